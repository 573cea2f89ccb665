"""Clipping by one global norm over all gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients down to `max_norm` (0 leaves them) and returns the norm they had."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm
