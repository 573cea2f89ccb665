"""OSFT on a GPU: frozen directions in bf16 with compiled blocks, and no step that waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny_families import make_model
from torchstone import api
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run
from torchstone.tuning.osft import frozen_basis, is_decomposition, singular_vectors

Settings = Callable[..., dict[str, Any]]
RATIO, STEPS = 0.25, 20


class ForbidSync(Callback):
    """From the third step to the last but one, an operation that waits for the device is an error."""

    def on_step_begin(self, run: Run, step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 2 < step < STEPS else "default")


@pytest.mark.usefixtures("sync_mode")
@pytest.mark.parametrize("recompute", ["auto", "full"])
@pytest.mark.parametrize("compile", ["none", "block"])
def test_frozen_directions_stay(
    compile: str, recompute: str, settings: Settings, chat_file: Path, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", "llama", "grouped", vocab_size=448)
    values = settings(
        training__max_steps=STEPS, system__device="cuda", model__compile=compile, model__recompute=recompute,
        tuning__method="osft", tuning__unfreeze_rank_ratio=RATIO, tuning__osft_train_rest=True,
        optim__learning_rate=3e-3, optim__weight_decay=0.1, training__precision="bf16",
    )  # fmt: skip
    for key in ("model.depth", "model.width", "model.heads"):
        del values[key]
    values |= {"model.path": str(folder), "data.path": str(chat_file), "data.context_length": 64}
    checkpoint = api.train(overrides=values, callbacks=[ForbidSync()]).checkpoint
    torch.cuda.set_sync_debug_mode("default")
    assert checkpoint is not None
    lines = read_metrics(Path(values["output_dir"]) / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert max(line["osft_error"] for line in lines) < 1e-5
    api.export(checkpoint, tmp_path / "exported", dtype="float32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "exported"))
    for name, weight in before.items():
        if ".layers." in name and weight.dim() == 2:
            change = (after[name] - weight).double()
            k = int(min(weight.shape) * (1 - RATIO))
            u, _, vh = torch.linalg.svd(weight.double(), full_matrices=False)
            assert change.norm() > 1e-3 * weight.norm(), name
            assert (u[:, :k].t() @ change).norm() <= 1e-4 * change.norm(), name
            assert (change @ vh[:k].t()).norm() <= 1e-4 * change.norm(), name


@pytest.mark.parametrize("shape", [(2048, 512), (512, 1024), (768, 768)])
def test_the_device_decomposes_as_a_cpu(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5
    vectors = singular_vectors(weight.cuda())
    assert is_decomposition(weight, vectors.cpu())
    k = min(shape) // 2
    ours, expected = frozen_basis(weight.cuda(), vectors, k).cpu(), frozen_basis(weight, singular_vectors(weight), k)
    assert torch.linalg.svdvals(ours.t() @ expected).min() > 1 - 1e-5, "the same subspace"
