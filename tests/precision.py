"""A tiny model in a precision and layout, and its gradients: for the tests of mixed precision on CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parity import distance
from steps import step_batch, train_step
from tiny_families import VOCABULARY
from torchstone.checkpoint.model_folder import load_model
from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.collate import LENGTH_MULTIPLE, BatchShapes, MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.models.execution import ExecutionOptions
from torchstone.optim.build import build_optimizer
from torchstone.parallel import build
from torchstone.parallel.build import ModelBuilder, ShardedModelBuilder, build_runner
from torchstone.parallel.fsdp import COMPUTE_DTYPE, PARAM_DTYPE, mixed_precision_policy
from torchstone.parallel.mesh import init_distributed
from torchstone.parallel.runner import Runner
from torchstone.training.step import compute_gradients, optimizer_step

LEARNING_RATE = 3e-3
MOMENTS = ("exp_avg", "exp_avg_sq")
# A sum in bf16 is off by at least this.
BF16_SUM_ERROR = 1e-4

Parallel = dict[str, Any]
Tensors = dict[str, Tensor]


def random_sequences(rng: np.random.Generator, count: int, max_length: int, vocabulary: int) -> list[TokenSequence]:
    """Sequences of uneven lengths, with some labels ignored."""
    sequences = []
    for size in rng.integers(5, max_length + 1, count):
        ids = rng.integers(0, vocabulary, size)
        sequences.append(TokenSequence(ids, np.where(rng.random(size) < 0.8, ids, -100)))
    return sequences


def make_batches(seed: int, count: int, multiple: int = LENGTH_MULTIPLE) -> list[MicroBatch]:
    """Micro-batches of one row with two sequences, for the models of `tiny_families`."""
    sequences = random_sequences(np.random.default_rng(seed), 2 * count, 16, VOCABULARY)
    return [collate([sequences[2 * n : 2 * n + 2]], 0, BatchShapes(multiple)) for n in range(count)]


def rank_batch(runner: Runner, batches: Sequence[MicroBatch]) -> StepBatch:
    """This rank's share of `batches`."""
    return step_batch(batches[runner.ctx.dp_rank :: runner.ctx.dims.dp], batches)


def single_process_runner(folder: Path, device: torch.device, precision: str, **execution: Any) -> Runner:
    """The model as one process trains it: without a mesh."""
    builder = ModelBuilder(device, PARAM_DTYPE[precision], COMPUTE_DTYPE[precision])
    options = ExecutionOptions(packed=True, **execution)
    return build_runner(load_model(folder, device, COMPUTE_DTYPE[precision], options, builder), builder, packed=True)


@contextmanager
def open_runner(
    folder: Path,
    device: torch.device,
    precision: str,
    parallel: Parallel,
    reduce_dtype: torch.dtype = torch.float32,
    **execution: Any,
) -> Iterator[Runner]:
    """The model in a layout; a single process has a mesh of one. A `reduce_dtype` of bf16 is a planted fault."""
    config = ParallelConfig(**parallel)
    policy = replace(mixed_precision_policy(precision), reduce_dtype=reduce_dtype)
    with pytest.MonkeyPatch.context() as patch, init_distributed(config, device, mesh_of_one=True) as ctx:
        patch.setattr(build, "mixed_precision_policy", lambda _: policy)
        builder = ShardedModelBuilder(ctx, config, precision, device)
        options = ExecutionOptions(packed=True, tp=ctx.dims.tp, **execution)
        model = load_model(folder, device, COMPUTE_DTYPE[precision], options, builder)
        yield build_runner(model, builder, packed=True)


def make_optimizer(runner: Runner) -> torch.optim.Optimizer:
    optim = OptimConfig(learning_rate=LEARNING_RATE, weight_decay=0.1)
    model = runner.model
    copies = None if model.master_weights is None else model.master_weights.copies
    return build_optimizer(model.named_parameters(), optim, model.parameter_kinds(), copies=copies)


def train_losses(runner: Runner, batches: Sequence[StepBatch]) -> list[float]:
    """The losses of steps, each on one of `batches`."""
    optimizer = make_optimizer(runner)
    return [train_step(runner, optimizer, batch, n, LEARNING_RATE, 1.0).loss for n, batch in enumerate(batches, 1)]


def full_gradients(runner: Runner, batch: StepBatch) -> Tensors:
    compute_gradients(runner, batch, 1)
    return take_gradients(runner)


def take_gradients(runner: Runner) -> Tensors:
    """The unsharded gradients, the same on every rank. Those of the parameters are cleared."""
    gradients = {}
    for name, parameter in runner.model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name] = gradient.detach().clone()
        parameter.grad = None
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    return gradients


def sum_of_micro_batches(runner: Runner, batches: Sequence[MicroBatch]) -> Tensors:
    """The fp64 sum of the micro-batches' gradients, each computed by itself."""
    terms = [full_gradients(runner, step_batch([batch], batches)) for batch in batches]
    return {name: torch.stack([term[name].double() for term in terms]).sum(0) for name in terms[0]}


def distances(ours: Tensors, expected: Tensors) -> list[float]:
    assert ours.keys() == expected.keys()
    return [distance(ours[name].double(), expected[name].double()) for name in expected]


def train_steps(runner: Runner, batches: Sequence[StepBatch]) -> Tensors:
    """The losses and gradients of steps, and the weights after them."""
    optimizer, values = make_optimizer(runner), Tensors()
    for step, batch in enumerate(batches):
        result = compute_gradients(runner, batch, step + 1)
        values[f"loss {step}"] = torch.tensor([result.loss, result.grad_norm])
        values |= {f"{name} {step}": full_copy(p.grad) for name, p in runner.model.named_parameters()}
        optimizer_step(runner, optimizer, result, step + 1, LEARNING_RATE, 1.0)
    return values | {name: full_copy(p) for name, p in runner.model.named_parameters()}


def full_copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
