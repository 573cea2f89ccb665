"""One optimizer step: the loss of promise one, its gradients, clipping, the update.

The loss is the sum of all token losses over the count of loss tokens in the whole global batch. Each micro-batch
contributes its sum over that count, so how a batch is cut never changes the result; one without any contributes zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from torchstone.data.collate import MicroBatch
from torchstone.data.loader import StepBatch
from torchstone.errors import DataError
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.optim.clip import clip_gradients, gradient_norm
from torchstone.training.guard import check_numbers


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
    packed: bool,
    device: torch.device,
) -> StepResult:
    """Step number `step` (from 1) of `module` on `batch`."""
    loss = backward(module, batch, step, packed, device)
    norm = gradient_norm(module.parameters())
    check_numbers(step, loss, norm.item(), module)
    clip_gradients(module.parameters(), norm, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm.item())


def backward(module: nn.Module, batch: StepBatch, step: int, packed: bool, device: torch.device) -> float:
    """Gradients of the batch's loss; returns the loss."""
    if batch.loss_tokens == 0:
        raise DataError(
            f"step {step} has no token to learn from: all labels of its {batch.samples} samples "
            f"(from sample {batch.first_sample} on) are masked",
            "look at the rows' labels, or make training.global_batch_size larger",
        )
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro_batch in batch.micro_batches:
        loss_sum = micro_loss(module, micro_batch.to(device), packed)
        (loss_sum / batch.loss_tokens).backward()
        total += loss_sum.detach()
    return (total / batch.loss_tokens).item()


def micro_loss(module: nn.Module, batch: MicroBatch, packed: bool) -> Tensor:
    """The sum of one micro-batch's token losses. The logits end here: the largest tensor of a step is not kept; a
    module with a `fused_loss` never has all of them."""
    inputs = batch.ids, batch.positions, batch.doc_ids if packed else None
    fused_loss = getattr(module, "fused_loss", None)
    if fused_loss is not None:
        return module(*inputs, finish=partial(fused_loss, labels_BT=batch.labels))
    return token_loss_sum(module(*inputs), batch.labels)


@torch.no_grad()
def mean_loss(module: nn.Module, batches: Iterable[StepBatch], packed: bool, device: torch.device) -> tuple[float, int]:
    """The loss per token over all batches, and the number of tokens; the model is left in the mode it was in."""
    was_training = module.training
    module.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    for batch in batches:
        for micro_batch in batch.micro_batches:
            total += micro_loss(module, micro_batch.to(device), packed)
        tokens += batch.loss_tokens
    module.train(was_training)
    if tokens == 0:
        raise DataError("the validation data has no token with a label")
    return (total / tokens).item(), tokens
