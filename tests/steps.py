"""An optimizer step as the training loop makes it, and its batch, for tests that have no `Run`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchstone.data.collate import MicroBatch
from torchstone.data.loader import StepBatch
from torchstone.parallel.runner import Runner
from torchstone.training.step import StepResult, compute_gradients, optimizer_step


def step_batch(batches: Sequence[MicroBatch], all_batches: Sequence[MicroBatch] = ()) -> StepBatch:
    """Micro-batches of a step that has `all_batches`, by default these alone."""
    loss_tokens = sum(int((batch.labels != -100).sum()) for batch in all_batches or batches)
    return StepBatch(list(batches), samples=0, tokens=0, loss_tokens=loss_tokens, padding=0, first_sample=0)


def train_step(
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
) -> StepResult:
    result = compute_gradients(runner, batch, step)
    optimizer_step(runner, optimizer, result, step, learning_rate, max_grad_norm)
    return result
