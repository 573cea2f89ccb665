"""Clipping by the global norm of all gradients, in any parallel layout.

`squared_norms` returns a rank's shares: training/step.py sums them over all ranks, with each gradient counted on one
rank only. The coefficient stays on the device, so that no step with AdamW waits for it; Muon reads it. It is NaN if the
norm is not finite, and an optimizer then changes no weight: scaling by it would spread NaN to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def squared_norms(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares of the local shard of each gradient, in fp64."""
    local = [to_local(gradient) for gradient in gradients]
    if not local:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32)).double().square()


def clip_coefficient(squared_norm: Tensor, max_norm: float) -> Tensor:
    """What scales gradients of this global norm down to `max_norm`; a `max_norm` of 0 turns clipping off."""
    norm = squared_norm.sqrt()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return torch.where(norm.isfinite(), coefficient, torch.nan)


def scale_gradients(parameters: Iterable[nn.Parameter], coefficient: Tensor) -> None:
    """Multiplies gradients by `coefficient`, which is read from the device; in the dtype of the parameters."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in with_gradient:
        parameter.grad = parameter.grad.to(parameter.dtype)
    if with_gradient and coefficient < 1:
        torch._foreach_mul_([to_local(parameter.grad) for parameter in with_gradient], coefficient.item())


def to_local(tensor: Tensor | None) -> Tensor:
    """This rank's shard of a DTensor; another tensor as it is."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
