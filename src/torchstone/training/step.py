"""One optimizer step: the loss, its gradients, clipping, the update.

The loss is the sum of all token losses divided by the number of loss tokens in the whole global batch. Each micro-batch
of a rank contributes its sum divided by that count, so how a batch is split never changes the result; one without loss
tokens contributes zero. One all-reduce per step sums loss, squared gradient norm and padding over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from torchstone.checkpoint.save import hf_name
from torchstone.data.loader import StepBatch
from torchstone.errors import DataError, NumericalError
from torchstone.observe.kernel_times import OPTIMIZER_RANGE
from torchstone.optim.adamw import AdamW
from torchstone.optim.clip import clip_coefficient, squared_norms
from torchstone.optim.muon import Muon
from torchstone.parallel.local_shards import unfused_names
from torchstone.parallel.runner import Runner
from torchstone.training.checks import WHAT_TO_TRY, merge_names, non_finite_names

ALL_FINITE = "all gradients are finite"
# A right run has an osft_error of 1e-7 to 1e-5.
OSFT_ERROR_LIMIT = 1e-3


class StepResult:
    """The numbers of a step, over all ranks. They are copied from the device when they are known, and reading one waits
    for that copy, not for what the device does next."""

    def __init__(self, sums: Tensor, loss_tokens: int, names: list[str], own_squared_norms: Tensor) -> None:
        """`sums`: the loss sum, the squared gradient norm, the padding. `names`: of this rank's gradients."""
        self.sums, self.loss_tokens, self.names = sums, loss_tokens, names
        self._tensors = [_copy_to_host(tensor) for tensor in (sums, own_squared_norms)]
        # When they are known; None on a CPU.
        self.event = record_event(sums.device)
        # On the device: whether the update was applied. Set by `optimizer_step`.
        self.is_applied: Tensor | None = None

    @cached_property
    def _values(self) -> list[list[float]]:
        if self.event is not None:
            self.event.synchronize()
        return [tensor.tolist() for tensor in self._tensors]

    @property
    def loss(self) -> float:
        return self._values[0][0] / self.loss_tokens

    def exceeds(self, max_loss: float) -> bool:
        """Whether the loss exceeds the limit, as `optimizer_step` decides on the device."""
        return self._values[0][0] > max_loss * self.loss_tokens

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients before clipping."""
        return self._values[0][1] ** 0.5

    @property
    def padding(self) -> int:
        """The number of padding tokens computed."""
        return round(self._values[0][2])

    @property
    def non_finite(self) -> list[str]:
        """The names of this rank's gradients that are not finite."""
        return [name for name, norm in zip(self.names, self._values[1], strict=True) if not math.isfinite(norm)]


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the device has been given to do so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def compute_gradients(runner: Runner, batch: StepBatch, step: int) -> StepResult:
    """Runs the forward and backward passes of all micro-batches. `step`, counted from 1, is only for messages."""
    if batch.loss_tokens == 0:
        raise DataError(
            f"step {step} has no loss tokens: all labels of its {batch.samples} samples "
            f"(from sample {batch.first_sample} on) are masked",
            "check the labels with torchstone inspect-data, or use a larger training.global_batch_size",
        )
    loss_sum = runner.forward_backward(batch.micro_batches, batch.loss_tokens)
    if runner.projection is not None:
        runner.projection.project_gradients()
    owned = {name: p.grad for name, p in runner.owned_parameters if p.grad is not None}
    norms = squared_norms(owned.values()).to(loss_sum)
    squared_norm = norms.sum()
    # Another rank counts these. One that is not finite here makes the norm NaN, or the replicas would drift apart.
    replicas = {name: p.grad for name, p in runner.replicated_parameters if p.grad is not None}
    if replicas:
        replica_norms = squared_norms(replicas.values()).to(loss_sum)
        squared_norm, norms = squared_norm + 0.0 * replica_norms.sum(), torch.cat([norms, replica_norms])
    ctx = runner.ctx
    own_padding = batch.padding
    if runner.pipeline is not None:
        own_padding += runner.pipeline.added_padding(batch.micro_batches)
    # Ranks that differ only in pp or tp have the same rows.
    padding = torch.full_like(loss_sum, own_padding if ctx.pp_rank == ctx.tp_rank == 0 else 0)
    sums = ctx.all_reduce_sum(torch.stack([loss_sum, squared_norm, padding]))
    return StepResult(sums, batch.loss_tokens, [*owned, *replicas], norms)


def describe_numbers(step: int, result: StepResult) -> str:
    return f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}"


def check_finite(step: int, result: StepResult, runner: Runner) -> None:
    """Raises if loss or norm is not finite. Both are the same on all ranks, so all ranks raise, or none."""
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    names = non_finite_gradients(runner, result)
    summary = f"{len(names)} gradients are not finite, such as {', '.join(names[:3])}" if names else ALL_FINITE
    message = f"{describe_numbers(step, result)}; its update was not applied"
    raise NumericalError(message, f"{summary}; {WHAT_TO_TRY}")


def non_finite_gradients(runner: Runner, result: StepResult) -> list[str]:
    """The Hugging Face names of the gradients that are not finite on some rank."""
    model = runner.model
    gradients = [(name, p.grad, "") for name, p in model.trained_parameters() if p.grad is not None]
    if gradients:
        return non_finite_names(runner, gradients)
    # They are gone, but not their norms. That of a fused parameter is the norm of all its tensors.
    parameters = dict(model.named_parameters())
    unfused = (unfused_names(model.decoder_config, name, parameters[name]) for name in result.non_finite)
    return merge_names(runner.ctx, [hf_name(model, name) for names in unfused for name in names])


def optimizer_step(
    runner: Runner,
    optimizer: AdamW | Muon,
    result: StepResult,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
    max_loss: float = math.inf,
    previous: StepResult | None = None,
) -> None:
    """Clips and applies the gradients, and clears them. If they or the loss are not finite, a CPU raises; on CUDA
    nothing is applied, and the error comes when the numbers are read. Nothing is applied either to a loss above
    `max_loss`, and after a `previous` step, not read yet, that has bad numbers."""
    if runner.device.type == "cpu":
        check_finite(step, result, runner)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    loss_sum, squared_norm = result.sums[:2]
    is_good = loss_sum.isfinite() & (loss_sum <= max_loss * result.loss_tokens)
    squared_norm = torch.where(is_good, squared_norm, torch.nan)
    if previous is not None:
        squared_norm = torch.where(previous.is_applied, squared_norm, torch.nan)
    coefficient, projection = clip_coefficient(squared_norm, max_grad_norm), runner.projection
    result.is_applied = coefficient.isfinite()
    update = nullcontext() if projection is None else projection.projected_update(optimizer, coefficient)
    with record_function(OPTIMIZER_RANGE), update:
        optimizer.clip_and_step(coefficient)
    optimizer.zero_grad(set_to_none=True)


def measure_osft(runner: Runner, step: int) -> Tensor | None:
    """The largest deviation of OSFT from orthogonality over all ranks. Each step measures one linear per rank, each
    time a different one. On CUDA the value is copied to the host without waiting, and is known later."""
    if runner.projection is None:
        return None
    error = runner.projection.measure(step).to(runner.device)
    if runner.ctx.mesh is not None:
        dist.all_reduce(error, dist.ReduceOp.MAX)
    return _copy_to_host(error)


def check_osft_error(step: int, error: float) -> None:
    """Raises if what OSFT trains is not orthogonal to the frozen directions. The same on all ranks."""
    if not error <= OSFT_ERROR_LIMIT:
        raise NumericalError(
            f"step {step}: osft_error is {error:.1e}, more than {OSFT_ERROR_LIMIT:g}: frozen directions have changed",
            "resume from an earlier checkpoint; if that fails too, start again with an empty $TORCHSTONE_CACHE/osft on "
            "every machine, and please report it",
        )


def _copy_to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def validation_loss(
    runner: Runner, batches: Iterable[StepBatch], forward: Callable[[StepBatch], Tensor] | None = None
) -> tuple[float, int]:
    """Returns the loss per token over all batches, and the number of loss tokens. Restores the train/eval mode.

    `forward`: this rank's share of the loss sum of a batch, by default `runner.forward`.
    """
    model = runner.model
    was_training = model.module.training
    model.train(False)
    total = torch.zeros((), dtype=torch.float64, device=runner.device)
    loss_tokens = 0
    try:
        for batch in batches:
            total += runner.forward(batch.micro_batches) if forward is None else forward(batch)
            loss_tokens += batch.loss_tokens
    finally:
        # Also after an interrupt: the checkpoint that follows saves sharded parameters.
        runner.reshard()
        model.train(was_training)
    if loss_tokens == 0:
        raise DataError("the validation data has no loss tokens: all labels are masked")
    return (runner.ctx.all_reduce_sum(total) / loss_tokens).item(), loss_tokens
