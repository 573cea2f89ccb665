"""One optimizer step: the loss of promise one, its gradients, clipping, the update.

The loss is the sum of all token losses over the count of loss tokens in the whole global batch. Each micro-batch of a
rank contributes its sum over that count, so how a batch is cut never changes the result; one without any contributes
zero. What ranks have to tell each other, the losses and the squares of the norm, is summed once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchstone.data.loader import StepBatch
from torchstone.errors import DataError
from torchstone.optim.clip import clip_gradients, squared_norm
from torchstone.parallel.running import Runner
from torchstone.training.guard import check_numbers


@dataclass(frozen=True)
class StepResult:
    """Of all ranks. `padding` are the tokens of padding that were computed."""

    loss: float
    grad_norm: float
    padding: int = 0


def train_step(
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
) -> StepResult:
    """Step number `step` (from 1) of the runner's model on `batch`."""
    result = backward(runner, batch, step)
    check_numbers(step, result.loss, result.grad_norm, runner)
    clip_gradients((p for _, p in runner.model.named_parameters()), result.grad_norm, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def backward(runner: Runner, batch: StepBatch, step: int) -> StepResult:
    """Gradients of the batch's loss; returns the loss and their norm."""
    if batch.loss_tokens == 0:
        raise DataError(
            f"step {step} has no token to learn from: all labels of its {batch.samples} samples "
            f"(from sample {batch.first_sample} on) are masked",
            "look at the rows' labels, or make training.global_batch_size larger",
        )
    loss_sum = runner.backward(batch.micro_batches, batch.loss_tokens)
    model = runner.model
    counted = [p.grad for name, p in model.named_parameters() if p.grad is not None and model.counts(name, p)]
    place = runner.place
    # Ranks that differ in pp or tp alone have the same rows.
    padding = torch.full_like(loss_sum, batch.padding if place.on("pp") == place.on("tp") == 0 else 0)
    numbers = place.sum(torch.stack([loss_sum, squared_norm(counted).to(loss_sum), padding]))
    loss, squares, padded = numbers.tolist()
    return StepResult(loss / batch.loss_tokens, squares**0.5, round(padded))


def mean_loss(runner: Runner, batches: Iterable[StepBatch]) -> tuple[float, int]:
    """The loss per token over all batches, and the number of tokens; the model is left in the mode it was in."""
    model = runner.model
    was_training = model.module.training
    model.train(False)
    total = torch.zeros((), dtype=torch.float64, device=runner.device)
    tokens = 0
    try:
        for batch in batches:
            total += runner.losses(batch.micro_batches)
            tokens += batch.loss_tokens
    finally:
        # Also where a signal cuts it short: what is saved then are the shards.
        runner.rest()
        model.train(was_training)
    if tokens == 0:
        raise DataError("the validation data has no token with a label")
    return (runner.place.sum(total) / tokens).item(), tokens
