"""Frozen linears in 8 or 4 bits, by bitsandbytes, for adapters of models that would not fit otherwise (QLoRA).

| | a weight is | bytes |
|---|---|---|
| `nf4` | one of 16 values x the largest of 64 neighbors, which is in 8 bits itself (double quantization) | 0.52 |
| `int8` | an integer from -127 to 127 x the largest of its row / 127 | 1 |

They are those of PEFT with `load_in_4bit` (nf4, double quantization) and `load_in_8bit`. A weight is quantized when it
is loaded, from the dtype that is computed in, and dequantized to that dtype whenever it is multiplied, in the forward
and in the backward pass, so that only quantized weights stay in memory. The model that is trained is the dequantized
one: adapters are merged into that, not into the weights of the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchstone.errors import CheckpointError, UsageError
from torchstone.models.tensors import TensorSource, dtype_name, slice_at

Quantization = Literal["nf4", "int8"]
# The sizes of QLoRA: this many elements share a scale, and this many scales share one.
BLOCK, SCALE_BLOCK = 64, 256
INT8_MAX = 127


@dataclass(frozen=True)
class BaseQuantization:
    """How a run quantizes the linears of its model: from and to `dtype`, the one that is computed in.

    `device`: the type of the device that quantizes. Rounding makes a few values of another device differ.
    """

    kind: Quantization
    dtype: torch.dtype
    device: str

    @classmethod
    def parse(cls, text: str | None) -> BaseQuantization | None:
        """Reads the text in the files of an adapter."""
        if text is None:
            return None
        kind, name, device = [*text.split("/"), "", "", ""][:3]
        dtype = getattr(torch, name, None)
        if kind not in get_args(Quantization) or not isinstance(dtype, torch.dtype) or device not in ("cpu", "cuda"):
            raise CheckpointError(f"the adapter's base model is quantized in an unknown way: {text}")
        return cls(cast(Quantization, kind), dtype, device)

    def __str__(self) -> str:
        """The text for the files of an adapter."""
        return f"{self.name}/{self.device}"

    @property
    def name(self) -> str:
        return f"{self.kind}/{dtype_name(self.dtype)}"

    def is_reproducible(self) -> bool:
        """Whether this machine has such a device."""
        return self.device == "cpu" or torch.cuda.is_available()

    def round_trip(self, weight: Tensor) -> Tensor:
        """The values that a weight on the CPU has after it was quantized."""
        weight = weight.to(self.device if self.is_reproducible() else "cpu", self.dtype)
        rows, columns = weight.shape
        return dequantize(self.kind, quantize(self.kind, weight), (rows, columns), self.dtype).cpu()


def bytes_per_weight(quantization: str) -> float:
    """The bytes of a quantized weight, without the scales of int8, one for each row."""
    return 1.0 if quantization == "int8" else 0.5 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)


class QuantizedLinear(nn.Linear):
    """What `quantize_linears` makes of a linear. It has no parameter `weight`; the attribute is dequantized."""

    quantization: Quantization
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        return dequantize(self.quantization, self.parts, self.shape, self.dtype)

    @property
    def parts(self) -> list[Tensor]:
        return [buffer for _, buffer in self.named_buffers(recurse=False)]

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Quantizes `weight`, which has the dtype that is computed in."""
        assert weight.dtype == self.dtype
        for buffer, value in zip(self.parts, quantize(self.quantization, weight), strict=True):
            buffer.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        return _QuantizedLinear.apply(x, self.bias, self.quantization, self.shape, self.dtype, *self.parts)


class _QuantizedLinear(torch.autograd.Function):
    """x @ weight.T + bias. Autograd would keep the dequantized weight for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        quantization: Quantization,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.settings = quantization, shape, dtype
        return F.linear(x, dequantize(quantization, parts, shape, dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        quantization, shape, dtype = ctx.settings
        dx = dy @ dequantize(quantization, ctx.saved_tensors, shape, dtype)
        d_bias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dx, d_bias, *[None] * (3 + len(ctx.saved_tensors))


def check_quantization() -> None:
    if find_spec("bitsandbytes") is None:
        raise UsageError("tuning.quantize_base needs bitsandbytes", 'pip install -e ".[bitsandbytes]"')


def quantize(quantization: Quantization, weight: Tensor) -> list[Tensor]:
    """The tensors that stand for a weight; `dequantize` takes them."""
    import bitsandbytes.functional as bnb

    if quantization == "int8":
        values, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return [values, scales.float()]
    # In rows of one block: on a CPU, bitsandbytes 0.50 dequantizes wrong values if a row ends within a block.
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    packed, state = bnb.quantize_4bit(blocks, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return [packed, state.absmax, state.state2.absmax, state.state2.code, state.offset.view(1)]


def dequantize(
    quantization: Quantization, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weight, computed by plain operators of torch and bitsandbytes, which torch.compile takes as they are."""
    if quantization == "int8":
        values, scales = parts
        return (values * (scales[:, None] / INT8_MAX)).to(dtype)
    import bitsandbytes  # noqa: F401  (registers the operators)

    packed, scales, scales_of_scales, code, offset = parts
    ops = torch.ops.bitsandbytes
    wide = ops.dequantize_blockwise(scales, scales_of_scales, code, SCALE_BLOCK, torch.float32) + offset
    blocks = ops.dequantize_4bit(packed, wide, BLOCK, "nf4", [len(wide), BLOCK], dtype)
    return blocks.flatten()[: shape[0] * shape[1]].view(shape)


def quantize_linears(module: nn.Module, names: Collection[str], quantization: BaseQuantization) -> None:
    """Replaces the weights of the linears of `module` that `names` has, in place; `load` fills them."""
    for name, linear in list(module.named_modules()):
        if name in names:
            assert isinstance(linear, nn.Linear), name
            shape, device = (linear.out_features, linear.in_features), linear.weight.device
            del linear.weight
            linear.__class__ = _quantized_class(linear.__class__)
            linear.quantization, linear.shape, linear.dtype = quantization.kind, shape, quantization.dtype
            for number, part in enumerate(_empty_parts(quantization.kind, shape, device)):
                linear.register_buffer(f"part_{number}", part, persistent=False)


@cache
def _quantized_class(linear_class: type[nn.Linear]) -> type[nn.Linear]:
    """`QuantizedLinear` below another kind of linear, such as one with adapters."""
    if linear_class is nn.Linear:
        return QuantizedLinear
    return type(f"Quantized{linear_class.__name__}", (linear_class, QuantizedLinear), {})


def _empty_parts(quantization: Quantization, shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    if quantization == "int8":
        return [empty(shape, torch.int8), empty(shape[:1], torch.float32)]
    blocks = -(-shape[0] * shape[1] // BLOCK)
    return [
        empty([blocks * BLOCK // 2, 1], torch.uint8),
        empty([blocks], torch.uint8),
        empty([-(-blocks // SCALE_BLOCK)], torch.float32),
        empty([256], torch.float32),
        empty([1], torch.float32),
    ]


@torch.no_grad()
def quantize_loaded(module: nn.Module, names: Collection[str], quantization: BaseQuantization) -> None:
    """Quantizes linears that have their weights."""
    weights = {name: linear.weight.to(quantization.dtype) for name, linear in module.named_modules() if name in names}
    quantize_linears(module, names, quantization)
    for name, weight in weights.items():
        module.get_submodule(name).load(weight)


class DequantizedTensors:
    """A `TensorSource` of the model that was trained: `base` with `linears` quantized and dequantized."""

    def __init__(
        self,
        base: TensorSource,
        linears: Collection[str],
        shapes: Mapping[str, Sequence[int]],
        quantization: BaseQuantization,
    ) -> None:
        """`shapes` are those of the base's parameters."""
        self.base, self.linears, self.shapes = base, frozenset(linears), shapes
        self.quantization = quantization

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        if name.removesuffix(".weight") not in self.linears:
            self.base.read_into(name, target, offset)
            return
        weight = torch.empty(tuple(self.shapes[name]), dtype=self.quantization.dtype)
        self.base.read_into(name, weight, (0, 0))
        whole = self.quantization.round_trip(weight)
        target.copy_(whole[slice_at(offset, target.shape)])
