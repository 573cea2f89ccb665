"""One optimizer step: the loss, its gradients, clipping, the update.

The loss is the sum of all token losses divided by the number of loss tokens in the whole global batch. Each micro-batch
of a rank contributes its sum divided by that count, so how a batch is split never changes the result; one without loss
tokens contributes zero. One all-reduce per step sums loss, squared gradient norm and padding over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchstone.data.loader import StepBatch
from torchstone.errors import DataError
from torchstone.optim.clip import clip_grads_with_norm_, squared_norm
from torchstone.parallel.local_shards import is_owner
from torchstone.parallel.runner import Runner
from torchstone.training.checks import check_finite


@dataclass(frozen=True)
class StepResult:
    """The loss, the gradient norm before clipping, and the number of padding tokens computed, over all ranks."""

    loss: float
    grad_norm: float
    padding: int = 0


def compute_gradients(runner: Runner, batch: StepBatch, step: int) -> StepResult:
    """Runs the forward and backward passes of all micro-batches. `step`, counted from 1, is only for messages."""
    if batch.loss_tokens == 0:
        raise DataError(
            f"step {step} has no loss tokens: all labels of its {batch.samples} samples "
            f"(from sample {batch.first_sample} on) are masked",
            "check the labels with torchstone inspect-data, or use a larger training.global_batch_size",
        )
    loss_sum = runner.forward_backward(batch.micro_batches, batch.loss_tokens)
    model, ctx = runner.model, runner.ctx
    # A replicated gradient counts on one rank only.
    gradients = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and is_owner(model.decoder_config, name, parameter)
    ]
    # Ranks that differ only in pp or tp have the same rows.
    padding = torch.full_like(loss_sum, batch.padding if ctx.pp_rank == ctx.tp_rank == 0 else 0)
    global_sums = ctx.all_reduce_sum(torch.stack([loss_sum, squared_norm(gradients).to(loss_sum), padding]))
    total_loss, total_squared_norm, total_padding = global_sums.tolist()
    return StepResult(total_loss / batch.loss_tokens, total_squared_norm**0.5, round(total_padding))


def optimizer_step(
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    result: StepResult,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
) -> None:
    """Checks, clips and applies the gradients, and clears them."""
    check_finite(step, result.loss, result.grad_norm, runner)
    clip_grads_with_norm_((p for _, p in runner.model.named_parameters()), max_grad_norm, result.grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def validation_loss(runner: Runner, batches: Iterable[StepBatch]) -> tuple[float, int]:
    """Returns the loss per token over all batches, and the number of loss tokens. Restores the train/eval mode."""
    model = runner.model
    was_training = model.module.training
    model.train(False)
    total = torch.zeros((), dtype=torch.float64, device=runner.device)
    loss_tokens = 0
    try:
        for batch in batches:
            total += runner.forward(batch.micro_batches)
            loss_tokens += batch.loss_tokens
    finally:
        # Also after an interrupt: the checkpoint that follows saves sharded parameters.
        runner.reshard()
        model.train(was_training)
    if loss_tokens == 0:
        raise DataError("the validation data has no loss tokens: all labels are masked")
    return (runner.ctx.all_reduce_sum(total) / loss_tokens).item(), loss_tokens
