"""Mixed precision by FSDP2, on a mesh of one GPU with NCCL. One process without FSDP2 is in test_adamw_kernel.py.

The dtype of a gradient does not tell the dtype of its sum. So the sum over a step's micro-batches is compared with the
fp64 sum of its terms, and the same check must fail when the sum is in bf16. How much bf16 may change a loss is
measured, against the same run in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from parity import relative
from precision import (
    BF16_SUM_ERROR,
    LEARNING_RATE,
    MOMENTS,
    distances,
    full_gradients,
    make_optimizer,
    open_runner,
    random_sequences,
    sum_of_micro_batches,
    train_losses,
)
from steps import step_batch, train_step
from tiny import TINY_LLAMA, make_llama
from torchstone import api
from torchstone.checkpoint.save import hf_state_dict
from torchstone.config import load_config
from torchstone.data.collate import MicroBatch, collate
from torchstone.models.master_weights import MasterWeights
from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run
from torchstone.training.step import compute_gradients, optimizer_step

Settings = Callable[..., dict[str, Any]]
CUDA = torch.device("cuda")
# Heads of 64, which every attention kernel supports.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
SUM_LIMIT = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), **SIZES)


def random_batches(seed: int, count: int = 8) -> list[MicroBatch]:
    """Micro-batches of two rows with three documents each, with some labels ignored."""
    rng, batches = np.random.default_rng(seed), []
    for _ in range(count):
        documents = random_sequences(rng, 6, 24, TINY_LLAMA["vocab_size"])
        batches.append(collate([documents[:3], documents[3:]], pad_id=0))
    return batches


def losses_of_steps(folder: Path, precision: str, **execution: Any) -> list[float]:
    """Ten steps, which have the same two batches in turn."""
    with open_runner(folder, CUDA, precision, {}, **execution) as runner:
        return train_losses(runner, [step_batch(random_batches(step % 2, count=2)) for step in range(1, 11)])


class TestMixedPrecisionDtypes:
    def test_fsdp2_mixed_precision_dtypes(self, folder: Path) -> None:
        activations: list[torch.dtype] = []
        gradients: dict[str, torch.dtype] = {}
        with open_runner(folder, CUDA, "bf16", {}) as runner:
            model, parameters = runner.model, dict(runner.model.named_parameters())
            assert 100_000 < sum(p.numel() for p in parameters.values()) < 1_000_000
            assert isinstance(model.module, FSDPModule)
            optimizer = make_optimizer(runner)

            for block in model.module.layers.values():
                assert isinstance(block, FSDPModule)
                block.register_forward_hook(lambda *args: activations.append(args[-1].dtype))
            for step in (1, 2, 3):
                batch = step_batch(random_batches(step, count=4))
                result = compute_gradients(runner, batch, step)
                gradients.update({name: p.grad.dtype for name, p in parameters.items()})
                assert all(bool(p.grad.full_tensor().isfinite().all()) for p in parameters.values())
                optimizer_step(runner, optimizer, result, step, LEARNING_RATE, 1.0)
            expected = dict.fromkeys(parameters, torch.float32)
            assert {name: p.dtype for name, p in parameters.items()} == expected
            assert gradients == expected
            for moment in MOMENTS:
                assert {name: optimizer.state[p][moment].dtype for name, p in parameters.items()} == expected
            assert activations == [torch.bfloat16] * 3 * 4 * TINY_LLAMA["num_hidden_layers"]

    def test_a_sum_in_bf16_is_noticed(self, folder: Path) -> None:
        """With eager attention: other kernels add in any order, so that the terms would differ every time."""
        batches = random_batches(0)
        with open_runner(folder, CUDA, "bf16", {}, attention="eager") as runner:
            expected = sum_of_micro_batches(runner, batches)
            assert max(distances(full_gradients(runner, step_batch(batches)), expected)) <= SUM_LIMIT
        with open_runner(folder, CUDA, "bf16", {}, reduce_dtype=torch.bfloat16, attention="eager") as runner:
            assert min(distances(full_gradients(runner, step_batch(batches)), expected)) > BF16_SUM_ERROR

    def test_pure_bf16_keeps_everything_in_bf16(self, folder: Path) -> None:
        with open_runner(folder, CUDA, "bf16-pure", {}) as runner:
            parameters, optimizer = dict(runner.model.named_parameters()), make_optimizer(runner)
            train_step(runner, optimizer, step_batch(random_batches(0, count=2)), 1, LEARNING_RATE, 1.0)
            expected = dict.fromkeys(parameters, torch.bfloat16)
            assert {name: p.dtype for name, p in parameters.items()} == expected
            for moment in MOMENTS:
                assert {name: optimizer.state[p][moment].dtype for name, p in parameters.items()} == expected


class TestMixedPrecisionNumbers:
    def test_every_loss_is_within_two_percent_of_fp32(self, folder: Path) -> None:
        mixed, exact = losses_of_steps(folder, "bf16"), losses_of_steps(folder, "fp32", attention="eager")
        assert mixed == pytest.approx(exact, rel=0.02)
        assert mixed != exact
        assert mixed[-1] < 0.9 * mixed[0]

    @pytest.mark.parametrize(
        "execution", [{"compile": "block"}, {"recompute": "full"}, {"recompute": "selective"}, {"attention": "eager"}],
        ids=str,
    )  # fmt: skip
    def test_execution_changes_losses_by_no_more_than_bf16_does(self, folder: Path, execution: dict[str, Any]) -> None:
        exact = losses_of_steps(folder, "fp32", attention="eager")
        plain, other = losses_of_steps(folder, "bf16"), losses_of_steps(folder, "bf16", **execution)
        bf16_error = max(map(relative, plain, exact))
        assert max(map(relative, other, plain)) <= 2 * bf16_error + 1e-3

    def test_recomputed_activations_give_the_same_gradients(self, folder: Path) -> None:
        batch, gradients = step_batch(random_batches(0, count=2)), []
        for recompute in ("none", "full"):
            with open_runner(folder, CUDA, "bf16", {}, attention="eager", recompute=recompute) as runner:
                gradients.append(full_gradients(runner, batch))
        assert max(distances(gradients[1], gradients[0])) <= SUM_LIMIT


class TestMixedPrecisionRun:
    def test_the_checkpoint_of_a_run_loads_in_transformers(self, settings: Settings, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        callback = KeepWeights()
        changes = {"training__precision": "bf16", "model__attention": "auto", "system__device": "cuda"}
        api.train(load_config(overrides=settings(**changes)), callbacks=[callback])
        lines = read_metrics(tmp_path / "run/metrics.jsonl")
        assert len(lines) == 6
        assert lines[-1]["loss"] < lines[0]["loss"]
        # A single process writes a Hugging Face folder with fp32 weights.
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run/checkpoints/step-00000006"))
        loaded = dict(model.named_parameters())
        assert loaded.keys() == callback.weights.keys()
        for name, tensor in callback.weights.items():
            assert loaded[name].dtype == torch.float32, name
            assert torch.equal(loaded[name], tensor), name


class KeepWeights(Callback):
    """The weights at the end of the run, by their Hugging Face names."""

    def on_end(self, run: Run) -> None:
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in hf_state_dict(run.model).items()}


def test_of_a_frozen_parameter_the_gpu_has_only_the_copy() -> None:
    module = torch.nn.Linear(4, 4, device="cuda")
    weight = module.weight.requires_grad_(False).detach().clone()
    masters = MasterWeights(module, torch.bfloat16)
    assert module.weight.is_cuda
    assert torch.equal(module.weight, weight.bfloat16())
    assert torch.equal(masters.parameters["weight"], weight.cpu())
    assert masters.parameters["bias"].is_cuda
