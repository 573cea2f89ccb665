"""model.matmul onednn: linears that multiply by oneDNN equal nn.Linear and Transformers, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import parity
from exact_runs import StopAt, assert_same_run
from parity import distance, relative
from precision import distances, full_gradients, open_runner, random_sequences, single_process_runner, step_batch
from selection import the_rest
from sides import both_sides
from tiny import flags
from tiny_families import VOCABULARY, make_model
from torchstone import api
from torchstone.config.load import load_config
from torchstone.data.collate import collate
from torchstone.errors import UsageError
from torchstone.models.execution import MATMULS, ExecutionOptions, _ops
from torchstone.models.onednn import OnednnLinear, check_onednn
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs
from torchstone.tuning.lora import LoraFactors, LoraSpec, _lora_class

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
ONEDNN = ExecutionOptions(matmul="onednn")
# A sum of 96 products in another order.
ROUNDING = 1e-6


class MatmulCounter(TorchDispatchMode):
    """Counts the matmuls of torch's BLAS and of oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.blas = self.onednn = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.blas += str(function) in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
        self.onednn += str(function).startswith("mkldnn._linear_pointwise")
        return function(*args, **(kwargs or {}))


class TestLinear:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(7, 96), (2, 5, 96), (1, 1, 96)])
    def test_output_and_gradients_are_those_of_nn_linear(self, shape: tuple[int, ...], bias: bool) -> None:
        torch.manual_seed(0)
        linear, x, dy = nn.Linear(96, 40, bias=bias), torch.randn(shape), torch.randn(*shape[:-1], 40)
        expected = output_and_gradients(linear, x, dy)
        linear.__class__ = OnednnLinear
        for ours, value in zip(output_and_gradients(linear, x, dy), expected, strict=True):
            assert ours.shape == value.shape
            assert (ours - value).norm() <= ROUNDING * value.norm()

    def test_inputs_may_have_any_strides(self) -> None:
        torch.manual_seed(0)
        linear, x = nn.Linear(96, 40), torch.randn(4, 96, 6).transpose(1, 2)
        dy = torch.randn(40, 4, 6).permute(1, 2, 0)
        expected = output_and_gradients(linear, x, dy)
        linear.__class__ = OnednnLinear
        assert all(map(close, output_and_gradients(linear, x, dy), expected))

    def test_a_frozen_weight_has_no_gradient_and_costs_none(self) -> None:
        linear, x = nn.Linear(96, 40, bias=False).requires_grad_(False), torch.randn(4, 96, requires_grad=True)
        linear.__class__ = OnednnLinear
        with MatmulCounter() as counter:
            linear(x).sum().backward()
        assert (counter.onednn, counter.blas, linear.weight.grad) == (2, 0, None)

    def test_an_adapter_is_added_to_it(self) -> None:
        """The classes of LoRA and of quantized linears are built on that of the linear."""
        torch.manual_seed(0)
        outputs = []
        for linear_class in (nn.Linear, OnednnLinear):
            torch.manual_seed(1)
            linear, x = nn.Linear(96, 40), torch.randn(4, 96)
            linear.__class__ = _lora_class(linear_class)
            linear.adapters = nn.ModuleDict({"a": LoraFactors(linear, LoraSpec(4, 2.0), 0.0, False)})
            for factor in linear.adapters.parameters():
                nn.init.normal_(factor)
            with MatmulCounter() as counter:
                outputs.append(linear(x))
            assert counter.onednn == (linear_class is OnednnLinear)
        assert close(*outputs)


def output_and_gradients(linear: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    output = linear(x)
    return [output, *torch.autograd.grad(output, [x, *linear.parameters()], dy)]


def close(ours: Tensor, expected: Tensor) -> bool:
    return distance(ours, expected) < ROUNDING


class TestModels:
    @pytest.mark.parametrize("packed", [True, pytest.param(False, marks=the_rest)])
    @pytest.mark.parametrize(
        ("family", "variant"), [("llama", "grouped"), ("gpt2", "untied"), pytest.param("qwen3", "tied", marks=the_rest)]
    )
    def test_training_equals_transformers(self, tmp_path: Path, family: str, variant: str, packed: bool) -> None:
        folder = make_model(tmp_path, family, variant)
        reference, ours = both_sides(folder, packed, parity.FREE_RUNNING, ONEDNN)
        steps = parity.random_batches(3, VOCABULARY, seed=1)
        no_gradient = ("attn.c_attn.bias",) if family == "gpt2" else ()
        parity.assert_step_locked(reference, ours.step, ours.lock, steps, no_gradient)
        reference, ours = both_sides(folder, packed, parity.FREE_RUNNING, ONEDNN)
        steps = parity.random_batches(parity.FREE_RUNNING["steps"], VOCABULARY, seed=2)
        parity.assert_free_running(reference, ours.step, ours.weights, steps)

    @pytest.mark.parametrize("recompute", ["none", "full", "selective"])
    def test_all_linears_and_nothing_else(self, tmp_path: Path, recompute: Any) -> None:
        runner = single_process_runner(make_model(tmp_path, "llama", "grouped"), CPU, "fp32", recompute=recompute)
        ours = single_process_runner(tmp_path, CPU, "fp32", recompute=recompute, matmul="onednn")
        counts = []
        for each in (runner, ours):
            with MatmulCounter() as counter:
                full_gradients(each, random_step())
            counts.append((counter.blas, counter.onednn))
        (blas, none), (rest, onednn) = counts
        depth = ours.model.decoder_config.depth
        # Three of every linear of a block, and of the head.
        assert blas >= 3 * (7 * depth + 1)
        # Full recomputation stops before the last matmul of a block, but within an autograd.Function it cannot stop.
        assert (none, rest, onednn) == (0, 0, blas + depth * (recompute == "full"))
        assert torch.ops.mkldnn._linear_pointwise.default in _ops(*MATMULS)

    def test_layouts_have_the_gradients_of_one_process(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path, "llama", "grouped")
        expected = full_gradients(single_process_runner(folder, CPU, "fp32", matmul="onednn"), random_step(2))
        for layouts in launch_procs(gradients_of_layouts, 2, folder):
            for gradients in layouts:
                assert max(distances(gradients, expected)) < parity.GRADIENT_LIMIT


def random_step(micro_batches: int = 1) -> Any:
    sequences = random_sequences(np.random.default_rng(0), 2 * micro_batches, 16, VOCABULARY)
    return step_batch([collate([sequences[2 * n : 2 * n + 2]], pad_id=0) for n in range(micro_batches)])


def gradients_of_layouts(folder: Path) -> list[dict[str, Tensor]]:
    gradients = []
    for parallel in ({"dp_shard": 2}, {"dp_replicate": 2}):
        with open_runner(folder, CPU, "fp32", parallel, matmul="onednn") as runner:
            batches = random_step(2).micro_batches
            batch = step_batch(batches[runner.ctx.dp_rank :: 2], batches)
            assert sum(isinstance(module, OnednnLinear) for module in runner.model.module.modules()) > 1
            gradients.append(full_gradients(runner, batch))
    return gradients


class TestRuns:
    def test_the_losses_of_blas_and_exact_resume(self, torchstone: Command, settings: Settings, tmp_path: Path) -> None:
        runs = [settings(output_dir=str(tmp_path / name), model__matmul=name) for name in ("blas", "onednn")]
        logs = [torchstone("train", *flags(values | {"observe.console": "lines"}))[2] for values in runs]
        assert ["matmul: onednn (as requested)" in log for log in logs] == [False, True]
        losses = [[line["loss"] for line in read_metrics(Path(run["output_dir"]) / "metrics.jsonl")] for run in runs]
        assert all(relative(*pair) < parity.FREE_LOSS_LIMIT for pair in zip(*losses, strict=True))
        stopped = runs[1] | {"output_dir": str(tmp_path / "stopped")}
        api.train(overrides=stopped, callbacks=[StopAt(3)])
        api.train(overrides=stopped)
        assert_same_run(runs[1]["output_dir"], stopped["output_dir"], 6)

    def test_a_resumed_run_says_that_it_has_changed(self, torchstone: Command, settings: Settings) -> None:
        values = settings(observe__console="lines", training__max_steps=2)
        assert torchstone("train", *flags(values))[0] == 0
        _, _, log = torchstone("train", *flags(values | {"training.max_steps": 3, "model.matmul": "onednn"}))
        assert "model.matmul blas is now onednn" in log


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.tp": 2}, "does not work with parallel.tp"),
        ({"model.compile": "block"}, "does not work with model.compile"),
        ({"tuning.method": "osft", "model.path": "x"}, "does not work with OSFT"),
        ({"tuning.method": "lora", "tuning.quantize_base": "nf4", "model.path": "x"}, "or tuning.quantize_base"),
    ],
)
def test_what_does_not_work_together_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"data.path": "x", "model.tokenizer": "x", "model.matmul": "onednn"}
    values |= {} if "model.path" in changes else {"model.depth": 2}
    with pytest.raises(UsageError, match=f"model.matmul onednn.*{message}"):
        load_config(overrides=values | changes)


def test_only_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    with pytest.raises(UsageError, match="is for float32 on a CPU, not for bfloat16 on cpu"):
        api.train(overrides=settings(model__matmul="onednn", training__precision="bf16"))
    with pytest.raises(UsageError, match="not for float32 on cuda"):
        check_onednn(torch.device("cuda"), torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(UsageError, match="was built without oneDNN"):
        check_onednn(CPU, torch.float32)
