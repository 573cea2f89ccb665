"""Linears that multiply by oneDNN (`model.matmul onednn`), in fp32 on a CPU.

torch multiplies fp32 matrices by its BLAS, which is mostly MKL. On CPUs of AMD, MKL does not use AVX-512, and oneDNN
takes less than half the time. It sums in another order, so that the last bits differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder

INSTEAD = "leave out model.matmul"


class OnednnLinear(nn.Linear):
    """What `apply_onednn` makes of a linear. Its reference is nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        output = _OnednnLinear.apply(x, self.weight)
        return output if self.bias is None else output + self.bias


class _OnednnLinear(torch.autograd.Function):
    """x @ weight.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = _multiply(dy, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _multiply(dy.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return dx, d_weight


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, of any strides."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def check_onednn(device: torch.device, dtype: torch.dtype) -> None:
    """Raises UsageError if oneDNN cannot be chosen here."""
    if device.type != "cpu" or dtype != torch.float32:
        computed_in = str(dtype).removeprefix("torch.")
        raise UsageError(f"model.matmul onednn is for float32 on a CPU, not for {computed_in} on {device}", INSTEAD)
    if not torch.backends.mkldnn.is_available():
        raise UsageError(f"model.matmul onednn: torch {torch.__version__} was built without oneDNN", INSTEAD)


def apply_onednn(decoder: Decoder) -> None:
    """Parameters and their names stay the same."""
    for module in decoder.modules():
        if type(module) is nn.Linear:
            # A class, not a method of each instance, so that other kinds of linears can be built on it.
            module.__class__ = OnednnLinear
