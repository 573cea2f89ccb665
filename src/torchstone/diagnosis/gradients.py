"""Compares the gradients that ranks hold with those of whole tensors, and with each other.

An error is the norm of the difference over the norm of what is expected. Some gradients are zero by mathematics, such
as that of a key bias, and hold only rounding. So a share of the norm of all gradients is added to the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchstone.data.collate import MicroBatch
from torchstone.diagnosis.session import Diagnosis
from torchstone.optim.clip import to_local
from torchstone.parallel.local_shards import TensorShard, local_shards
from torchstone.training.run import Run
from torchstone.training.step import StepResult, compute_gradients

# fp32: rounding gives up to 1e-5, a mistake 1e-2 or more.
EXACT_GRADIENT_LIMIT = 1e-3
# Added to the divisor of an error, as a share of the norm of all gradients.
FLOOR = 1e-3


class GradientError(NamedTuple):
    """The largest error of a tensor on any rank."""

    error: float
    name: str
    rank: int


def compute_step(diagnosis: Diagnosis, run: Run) -> StepResult:
    """Loss and gradients of the checked step, without dropout. OSFT's gradients are not projected."""
    run.model.train(False)
    projection, run.runner.projection = run.runner.projection, None
    try:
        return compute_gradients(run.runner, diagnosis.batch(run), 1)
    finally:
        run.runner.projection = projection


def gradient_shards(run: Run) -> Iterator[TensorShard]:
    """This rank's shards of all gradients, by unfused name; zeros where there is none."""
    for name, parameter in run.model.trained_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        yield from local_shards(run.model.decoder_config, name, gradient.detach())


def gradient_errors(run: Run, expected: Mapping[str, Tensor]) -> list[GradientError]:
    """The error of every tensor, in the order of the forward pass. All ranks must call it."""
    squares: dict[str, tuple[float, float]] = {}
    for shard in gradient_shards(run):
        values = expected[shard.name][shard.index].double()
        difference, size = squares.get(shard.name, (0.0, 0.0))
        difference += (shard.tensor.cpu().double() - values).square().sum().item()
        squares[shard.name] = difference, size + values.square().sum().item()
    floor = FLOOR * total_norm(expected.values())
    own = {name: _error(difference, size, floor) for name, (difference, size) in squares.items()}
    worst: dict[str, GradientError] = {}
    for rank, errors in enumerate(run.ctx.all_gather_object(own)):
        for name, error in errors.items():
            if name not in worst or error > worst[name].error:
                worst[name] = GradientError(error, name, rank)
    return [worst[name] for name in expected if name in worst]


def largest(errors: Iterable[GradientError]) -> GradientError:
    return max(errors, default=GradientError(0.0, "nothing", 0))


def total_norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def run_micro_batches(run: Run, batches: list[MicroBatch], loss_tokens: int) -> float:
    """Loss per token over all ranks, which may have different micro-batches; adds to the gradients."""
    return run.ctx.all_reduce_sum(run.runner.forward_backward(batches, loss_tokens)).item() / loss_tokens


def take_gradients(run: Run) -> dict[str, Tensor]:
    """Copies of this rank's gradients, which are then cleared."""
    gradients = {
        name: to_local(parameter.grad).detach().to("cpu", copy=True)
        for name, parameter in run.model.trained_parameters()
        if parameter.grad is not None
    }
    run.model.clear_gradients()
    return gradients


def largest_difference(run: Run, ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> GradientError:
    """The largest error between two results of `take_gradients`, on any rank. All ranks must call it."""
    floor, worst = FLOOR * total_norm(expected.values()), GradientError(0.0, "nothing", run.ctx.rank)
    for name in dict.fromkeys([*ours, *expected]):
        error = math.inf
        if name in ours and name in expected:
            difference = (ours[name].double() - expected[name].double()).square().sum().item()
            error = _error(difference, expected[name].double().square().sum().item(), floor)
        worst = max(worst, GradientError(error, name, run.ctx.rank))
    return max(run.ctx.all_gather_object(worst))


def _error(difference: float, size: float, floor: float) -> float:
    """The relative error, from sums of squares; infinite if a value is not finite."""
    if not math.isfinite(difference):
        return math.inf
    return math.sqrt(difference) / max(math.sqrt(size) + floor, 1e-30)
