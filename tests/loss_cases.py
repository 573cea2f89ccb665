"""The loss of all logits, and what a loss gives, for the tests of the chunked loss on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.loss.cross_entropy import token_loss_sum


def full_loss(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, divisor: float) -> Tensor:
    logits = hidden @ weight.T
    logits = logits if divisor == 1.0 else logits / divisor
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    if logits.dtype == torch.float64:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return token_loss_sum(logits, labels)


def loss_and_gradients(loss_sum: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_sum(hidden, weight, labels)
    assert loss.dtype in (torch.float32, hidden.dtype)
    # Not a power of two: that would hide a rounding.
    return [loss.detach(), *torch.autograd.grad(loss / 17, (hidden, weight))]
