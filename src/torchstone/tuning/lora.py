"""LoRA: a linear whose frozen weight W gets a trained update of low rank.

    x ──────────────── W ──────────────── + ── y         y = W x + scale B A dropout(x)
    └── dropout ── A ─(rank)─ B ── scale ─┘

A is [rank, in]. B is [out, rank] and starts at zero, so that training starts from the model as it is. `scale` is alpha
/ rank, or alpha / sqrt(rank) with rsLoRA. DoRA also trains the length of every row of W + scale B A (its magnitude).
The names and the arithmetic are PEFT's.

A linear may have several adapters, whose updates are added; at most one of them is trained. Projections that read the
same input (q, k and v; gate and up) have an A each, which are multiplied as one matrix (`project_together`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.errors import UsageError
from torchstone.models.tensors import NamedTensors, TensorSource, slice_at
from torchstone.tuning.quantize import BaseQuantization

ADAPTERS, LORA_A, LORA_B, MAGNITUDE = "adapters", "lora_A", "lora_B", "magnitude"


class LoraSpec(NamedTuple):
    """The rank of a linear's update, and the factor that scales it."""

    rank: int
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter without its values. `linears` has the linears that it changes, by the name of the unfused module."""

    name: str
    linears: Mapping[str, LoraSpec]
    dropout: float = 0.0
    use_dora: bool = False
    # Whether scales are alpha / sqrt(rank). Only adapter_config.json needs it.
    use_rslora: bool = False


@dataclass(frozen=True)
class AdapterTensors:
    """An adapter and its values, by the names of our parameters. A `TensorSource`.

    `saved` has the parameters of the base model that the adapter replaces.
    """

    adapter: LoraAdapter
    factors: Mapping[str, Tensor]
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    # The base model as adapter_config.json names it, and its fingerprint. An adapter of PEFT has no fingerprint.
    base: str | None = None
    base_fingerprint: str | None = None
    # How the linears of the base were quantized.
    base_quantization: BaseQuantization | None = None
    # The frozen adapters that were active when this one was trained.
    frozen: tuple[AdapterTensors, ...] = ()

    @property
    def adapters(self) -> list[LoraAdapter]:
        """This adapter and the frozen ones: all that are active."""
        return [self.adapter, *(each.adapter for each in self.frozen)]

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """All tensors, with those of the frozen adapters."""
        return {**self.factors, **self.saved, **{k: v for each in self.frozen for k, v in each.values.items()}}

    @property
    def names(self) -> list[str]:
        return list(self.values)

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        values = self.values[name]
        target.copy_(values[slice_at(offset, target.shape)])

    def factors_of(self, linear: str) -> dict[str, Tensor]:
        """By kind: LORA_A, LORA_B and, with DoRA, MAGNITUDE."""
        kinds = (LORA_A, LORA_B, MAGNITUDE) if self.adapter.use_dora else (LORA_A, LORA_B)
        return {kind: self.factors[parameter_name(linear, self.adapter.name, kind)] for kind in kinds}


class LoraFactors(nn.Module):
    """The update of one linear by one adapter."""

    # By factor: its dimension that is sharded like the weight, and which dimension of the weight that is.
    sharded_dims: ClassVar = {LORA_A: (1, 1), LORA_B: (0, 0), MAGNITUDE: (0, 0)}

    def __init__(self, linear: nn.Linear, spec: LoraSpec, dropout: float, use_dora: bool) -> None:
        super().__init__()
        self.scale = spec.scale
        self.dropout = nn.Dropout(dropout) if dropout else None
        like = linear.weight
        self.lora_A = nn.Parameter(like.new_empty(spec.rank, linear.in_features))
        self.lora_B = nn.Parameter(like.new_empty(linear.out_features, spec.rank))
        self.magnitude = nn.Parameter(like.new_empty(linear.out_features)) if use_dora else None

    @property
    def is_plain(self) -> bool:
        """Whether the update depends on A x alone."""
        return self.dropout is None and self.magnitude is None

    def forward(self, x: Tensor, base_output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What to add to the linear's output."""
        if self.dropout is not None and self.training:
            x = self.dropout(x)
            base_output = F.linear(x, weight, bias) if self.magnitude is not None else base_output
        update = F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B)
        if self.magnitude is None:
            return update
        # The norm is a constant for the backward pass, as in section 4.3 of the paper.
        factor = self.magnitude / self.row_norms(weight)
        without_bias = base_output if bias is None else base_output - bias
        return (factor - 1) * without_bias + factor * update

    @torch.no_grad()
    def row_norms(self, weight: Tensor) -> Tensor:
        return torch.linalg.vector_norm(weight + self.scale * (self.lora_B @ self.lora_A), dim=1)

    def merged(self, weight: Tensor) -> Tensor:
        """`weight` with the update, in the dtype of the weight."""
        updated = weight + self.scale * (self.lora_B @ self.lora_A).to(weight.dtype)
        if self.magnitude is None:
            return updated
        return updated * (self.magnitude.to(weight.dtype) / torch.linalg.vector_norm(updated, dim=1))[:, None]


class LoraLinear(nn.Linear):
    """What `add_adapter` makes of a linear. `adapters` are by name."""

    adapters: nn.ModuleDict

    @property
    def factors(self) -> list[LoraFactors]:
        return list(self.adapters.values())

    def base_forward(self, x: Tensor) -> Tensor:
        """The output without the updates."""
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        base_output = output = self.base_forward(x)
        for factors in self.factors:
            output = output + factors(x, base_output, self.weight, self.bias)
        return output


class MergedLinear(NamedTuple):
    """A linear whose weight has the updates, with the weight and the adapters that it had."""

    linear: LoraLinear
    weight: Tensor
    adapters: nn.ModuleDict
    # See `rounding_error`.
    error: float


@torch.no_grad()
def merge_adapters(module: nn.Module) -> list[MergedLinear]:
    """Puts the updates of all adapters into the weights and takes the adapters away; `unmerge_adapters` undoes it.

    For a model in one process. It keeps a copy of the weights.
    """
    linears = [linear for linear in module.modules() if isinstance(linear, LoraLinear)]
    if not all(type(linear.weight) is nn.Parameter for linear in linears):
        raise UsageError(
            "weights that are quantized or sharded cannot be merged in memory", "use torchstone export --merge"
        )
    merged = []
    for linear in linears:
        weight = linear.weight.detach().clone()
        wide = updated = weight.to(wider_dtype(weight.dtype))
        for factors in linear.factors:
            updated = factors.merged(updated)
        linear.weight.copy_(updated)
        merged.append(MergedLinear(linear, weight, linear.adapters, rounding_error(wide, updated, linear.weight)))
        linear.adapters = nn.ModuleDict()
    return merged


@torch.no_grad()
def unmerge_adapters(merged: Iterable[MergedLinear]) -> None:
    """Restores weights, to the last bit, and adapters."""
    for linear, weight, adapters, _ in merged:
        linear.weight.copy_(weight)
        linear.adapters = adapters


def wider_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights of `dtype` are merged, so that the rounding is seen."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


def rounding_error(base: Tensor, merged: Tensor, rounded: Tensor) -> float:
    """What rounding a merged weight loses of the update: the norm of the error over the norm of the update."""
    update = (merged - base).norm().item()
    return (rounded.to(merged.dtype) - merged).norm().item() / update if update else 0.0


@cache
def _lora_class(linear_class: type[nn.Linear]) -> type[nn.Linear]:
    """`LoraLinear` on top of another kind of linear, such as one that computes in FP8."""
    if linear_class is nn.Linear:
        return LoraLinear
    return type(f"Lora{linear_class.__name__}", (LoraLinear, linear_class), {})


def project_together(linears: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """The outputs of several linears with the same input. The A of all updates are one matrix in one product.

    The reference is `[linear(x) for linear in linears]`.
    """
    factors = [factors for linear in linears for factors in get_factors(linear)]
    if len(factors) < 2 or not all(each.is_plain for each in factors):
        return [linear(x) for linear in linears]
    hidden = F.linear(x, torch.cat([each.lora_A for each in factors]))
    parts = iter(hidden.split([len(each.lora_A) for each in factors], dim=-1))
    outputs = []
    for linear in linears:
        output = base_output(linear, x)
        for each in get_factors(linear):
            output = output + F.linear(next(parts) * each.scale, each.lora_B)
        outputs.append(output)
    return outputs


def base_output(linear: nn.Linear, x: Tensor) -> Tensor:
    """The output of any linear without the updates."""
    return linear.base_forward(x) if isinstance(linear, LoraLinear) else linear(x)


def get_factors(linear: nn.Linear) -> list[LoraFactors]:
    """The factors that the forward pass of any linear adds."""
    return linear.factors if isinstance(linear, LoraLinear) else []


def add_adapter(module: nn.Module, adapter: LoraAdapter) -> None:
    """Adds uninitialized factors to the linears of `module` that the adapter names, in place.

    A pipeline stage has some of them. Linears keep their parameters and names.
    """
    for name, linear in list(module.named_modules()):
        spec = adapter.linears.get(name)
        if spec is None:
            continue
        assert isinstance(linear, nn.Linear), name
        if not isinstance(linear, LoraLinear):
            # A class, not a method of each instance: torch.compile reuses a graph for blocks of the same classes.
            linear.__class__ = _lora_class(linear.__class__)
            linear.adapters = nn.ModuleDict()
        linear.adapters[adapter.name] = LoraFactors(linear, spec, adapter.dropout, adapter.use_dora)


def is_adapter_parameter(name: str) -> bool:
    return f".{ADAPTERS}." in name


def parameter_name(linear: str, adapter: str, kind: str) -> str:
    return f"{linear}.{ADAPTERS}.{adapter}.{kind}"


def split_parameter_name(name: str) -> tuple[str, str, str]:
    """The linear, the adapter and the kind of an adapter's parameter."""
    linear, _, rest = name.partition(f".{ADAPTERS}.")
    adapter, _, kind = rest.rpartition(".")
    return linear, adapter, kind


class InitialFactors:
    """A `TensorSource` of initial values, distributed as in PEFT.

    Every parameter has its own random stream, so that the values are the same in any layout. DoRA's first magnitudes
    are the row norms of the weights of `base`. `frozen` adapters have their values already.
    """

    def __init__(
        self,
        base: TensorSource,
        shapes: Mapping[str, Sequence[int]],
        seed: int,
        frozen: Iterable[AdapterTensors] = (),
    ) -> None:
        """`shapes`: of the base's parameters."""
        self.base, self.shapes, self.seed = base, shapes, seed
        self.frozen = {tensors.adapter.name: tensors for tensors in frozen}

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        linear, adapter, kind = split_parameter_name(name)
        if adapter in self.frozen:
            self.frozen[adapter].read_into(name, target, offset)
            return
        in_features = self.shapes[f"{linear}.weight"][1]
        if kind == LORA_B:
            target.zero_()
        elif kind == MAGNITUDE:
            rows = torch.empty(len(target), in_features, dtype=torch.float32)
            self.base.read_into(f"{linear}.weight", rows, (offset[0], 0))
            target.copy_(torch.linalg.vector_norm(rows, dim=1))
        else:
            self._draw_into(name, target, offset, in_features)

    def _draw_into(self, name: str, target: Tensor, offset: Sequence[int], in_features: int) -> None:
        """nn.init.kaiming_uniform_(a=sqrt(5)), row by row, so that a shard needs no other rows."""
        bound = 1 / math.sqrt(in_features)
        for row in range(len(target)):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}/{offset[0] + row}".encode()))
            values = torch.empty(in_features).uniform_(-bound, bound, generator=generator)
            target[row] = values[offset[1] : offset[1] + target.shape[1]]


class MergedTensors:
    """A `TensorSource` of merged weights: those of `base` with the updates of `adapters`, which `factors` has.

    A weight is merged in a wider dtype and rounded once, to the dtype that is asked for. `errors` has what that lost,
    by name (`rounding_error`). Other parameters in `factors` (modules_to_save) replace those of `base`.
    """

    def __init__(
        self,
        base: TensorSource,
        factors: NamedTensors,
        adapters: Sequence[LoraAdapter],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """`shapes`: of the base's parameters."""
        self.base, self.factors, self.adapters, self.shapes = base, factors, adapters, shapes
        self._saved = frozenset(name for name in factors.names if not is_adapter_parameter(name))
        self.errors: dict[str, float] = {}

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        linear = name.removesuffix(".weight")
        adapters = [adapter for adapter in self.adapters if linear in adapter.linears]
        if not adapters:
            (self.factors if name in self._saved else self.base).read_into(name, target, offset)
            return
        # DoRA needs complete rows.
        rows, columns = slice_at(offset, target.shape)
        width = self.shapes[name][1]
        dtype = wider_dtype(target.dtype)
        base = torch.empty(len(target), width, dtype=dtype)
        self.base.read_into(name, base, (rows.start, 0))
        merged = base
        for adapter in adapters:
            merged = self._factors(adapter, linear, rows, width, dtype).merged(merged)
        target.copy_(merged[:, columns])
        self.errors[name] = max(
            self.errors.get(name, 0.0), rounding_error(base[:, columns], merged[:, columns], target.cpu())
        )

    def _factors(self, adapter: LoraAdapter, linear: str, rows: slice, width: int, dtype: torch.dtype) -> LoraFactors:
        """The factors of some rows of a linear."""
        meta = nn.Linear(width, rows.stop - rows.start, bias=False, dtype=dtype, device="meta")
        factors = LoraFactors(meta, adapter.linears[linear], 0.0, adapter.use_dora).to_empty(device="cpu")
        for kind, parameter in factors.named_parameters():
            offset = (0, 0) if kind == LORA_A else (rows.start,) + (0,) * (parameter.dim() - 1)
            self.factors.read_into(parameter_name(linear, adapter.name, kind), parameter.detach(), offset)
        return factors.requires_grad_(False)
