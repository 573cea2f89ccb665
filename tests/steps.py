"""One optimizer step as the training loop makes it, for tests that have no `Run`."""

from __future__ import annotations

import torch

from torchstone.data.loader import StepBatch
from torchstone.parallel.runner import Runner
from torchstone.training.step import StepResult, compute_gradients, optimizer_step


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
