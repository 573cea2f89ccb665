"""Clipping by one global norm over all gradients.

Measuring and scaling are two functions, because somebody has to look at the norm in between: scaling by a norm that is
not a number spreads it to every gradient, and then nobody can tell where it came from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales gradients of global norm `norm` down to `max_norm`; 0 leaves them as they are."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, norm)
