"""Clipping by one global norm over all gradients, wherever they lie.

Measuring and scaling are two functions, because somebody has to look at the norm in between: scaling by a norm that is
not a number spreads it to every gradient, and then nobody can tell where it came from. And what is measured is a rank's
share of the squares, each gradient counted on one rank only, to be summed over all: a norm of what one rank holds is no
norm of anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares of what is here of `gradients`, in fp64."""
    local = [_local(gradient) for gradient in gradients]
    if not local:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(local, 2, dtype=torch.float32)])
    return norms.square().sum()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales gradients of global norm `norm` down to `max_norm`; 0 leaves them as they are."""
    if max_norm > 0:
        scale = min(1.0, max_norm / (norm + 1e-6))
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
