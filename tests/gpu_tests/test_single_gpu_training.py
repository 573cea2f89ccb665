"""Training on one GPU: the loop, gradient accumulation, and a resumed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from exact_runs import StopAt
from hooks import on
from tiny import write_rows
from torchstone import api
from torchstone.config import load_config
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback

Settings = Callable[..., dict[str, Any]]


def losses(overrides: dict[str, Any], *callbacks: Callback) -> list[float]:
    api.train(load_config(overrides=overrides), callbacks=callbacks)
    return [line["loss"] for line in read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")]


class TestCompiledGraphs:
    @pytest.mark.parametrize(
        "changes",
        [
            {"training__max_tokens_per_gpu": 700, "model__recompute": "elementwise"},
            {"training__max_tokens_per_gpu": 700, "model__recompute": "full"},
            # Nine rows in micro-batches of at most four, six in the last step.
            {"data__packing": False, "training__batch_size": 4, "training__max_epochs": 2.3},
        ],
    )
    def test_nothing_is_compiled_after_the_second_step(
        self, settings: Settings, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        answers = ["word " * number for number in np.random.default_rng(0).integers(1, 60, 30)]
        rows = [{"prompt": "a question", "completion": answer} for answer in answers]
        torch.compiler.reset()
        counters.clear()
        # The number of graphs compiled so far, after every step.
        graphs: list[int] = []
        base = {
            "data__path": str(write_rows(tmp_path / "rows.jsonl", rows)), "data__context_length": 512,
            "training__global_batch_size": 9, "training__precision": "bf16", "model__compile": "block",
            "training__max_steps": None if "training__max_epochs" in changes else 12, "system__device": "cuda",
        }  # fmt: skip
        overrides = settings(**base | changes)
        values = losses(overrides, on(step=lambda *_: graphs.append(counters["stats"]["unique_graphs"])))
        lines = read_metrics(Path(overrides["output_dir"]) / "metrics.jsonl")
        assert len({line["padding"] + line["tokens"] for line in lines}) > 2, "the steps have the same shapes"
        assert len(values) >= 7
        assert 0 < graphs[0] <= graphs[1] == graphs[-1]


class TestSingleGPUTraining:
    @pytest.mark.diagnostic
    def test_single_gpu_training_loop(self, settings: Settings, tmp_path: Path) -> None:
        on_cpu = losses(settings(training__max_steps=20, optim__eps=1e-4))
        on_gpu = losses(
            settings(
                training__max_steps=20,
                optim__eps=1e-4,
                system__device="cuda",
                output_dir=str(tmp_path / "cuda"),
                training__precision="fp32",
            )
        )
        assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
        assert on_gpu[-1] < on_gpu[0]
        line = read_metrics(tmp_path / "cuda/metrics.jsonl")[-1]
        assert 0 < line["memory"] <= torch.cuda.get_device_properties(0).total_memory

    @pytest.mark.diagnostic
    def test_gradient_accumulation(self, settings: Settings, tmp_path: Path) -> None:
        results = []
        for size in (12, 5, 1):
            overrides = settings(
                training__global_batch_size=12, training__batch_size=size, optim__eps=1e-4, system__device="cuda",
                output_dir=str(tmp_path / str(size)), training__precision="fp32",
            )  # fmt: skip
            results.append(losses(overrides))
        assert results[1] == pytest.approx(results[0], rel=1e-5)
        assert results[2] == pytest.approx(results[0], rel=1e-5)

    @pytest.mark.diagnostic
    def test_loss_with_liger_kernels(self, settings: Settings, tmp_path: Path) -> None:
        """Kernels that are asked for by name are used, or the run ends with the reason."""
        pytest.importorskip("triton")
        pytest.importorskip("liger_kernel")
        changes = {"system__device": "cuda", "training__precision": "bf16"}
        plain = losses(settings(output_dir=str(tmp_path / "plain"), **changes))
        kernels = ["norm", "rope", "mlp", "loss"]
        liger = losses(settings(output_dir=str(tmp_path / "liger"), model__liger=kernels, **changes))
        assert liger == pytest.approx(plain, rel=1e-2)
        assert len(liger) == 6
        assert liger[-1] < liger[0]

    @pytest.mark.parametrize(("packing", "precision"), [(True, "auto"), (False, "auto"), (True, "fp32")])
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, settings: Settings, tmp_path: Path, packing: bool, precision: str
    ) -> None:
        changes = {"system__device": "cuda", "training__max_steps": 9, "data__packing": packing}
        changes["training__precision"] = precision
        uninterrupted = settings(output_dir=str(tmp_path / "uninterrupted"), **changes)
        resumed = settings(output_dir=str(tmp_path / "resumed"), **changes)
        assert len(losses(resumed, StopAt(4))) == 4
        assert losses(resumed) == losses(uninterrupted)
        name = "checkpoints/step-00000009/model.safetensors"
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()
