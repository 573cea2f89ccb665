"""Clipping by the global norm of all gradients, in any parallel layout.

Measuring and scaling are separate functions because the norm must be checked in between: scaling by a NaN norm spreads
NaN to every gradient, and its origin can no longer be found. `squared_norm` returns a rank's share:
training/step.py sums it over all ranks, with each gradient counted on one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares of the local shards of `gradients`, in fp64."""
    local = [_to_local(gradient) for gradient in gradients]
    if not local:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(local, 2, dtype=torch.float32)])
    return norms.square().sum()


def clip_grads_with_norm_(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: float) -> None:
    """Scales gradients of global norm `total_norm` down to `max_norm`; a `max_norm` of 0 turns clipping off."""
    if max_norm > 0:
        scale = min(1.0, max_norm / (total_norm + 1e-6))
        gradients = [_to_local(p.grad) for p in parameters if p.grad is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)


def _to_local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
