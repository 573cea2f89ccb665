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

from torchstone.models.tensors import NamedTensors, TensorSource

ADAPTERS, LORA_A, LORA_B, MAGNITUDE = "adapters", "lora_A", "lora_B", "magnitude"


class LoraSpec(NamedTuple):
    """The rank of a linear's update, and what it is multiplied by."""

    rank: int
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter without its values. `linears`: those that it changes, by the name of the module, unfused."""

    name: str
    linears: Mapping[str, LoraSpec]
    dropout: float = 0.0
    use_dora: bool = False
    # The scale is alpha / sqrt(rank); only for adapter_config.json.
    use_rslora: bool = False


@dataclass(frozen=True)
class AdapterTensors:
    """An adapter and its values, by the names of our parameters; `saved` are those of the base that it replaces.

    A `TensorSource`.
    """

    adapter: LoraAdapter
    factors: Mapping[str, Tensor]
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    # The base model: as adapter_config.json names it, and its fingerprint if the adapter is one of ours.
    base: str | None = None
    base_fingerprint: str | None = None
    # How the linears of the base were quantized, and the dtype that was computed in, such as nf4/bfloat16.
    base_quantization: str | None = None
    # Frozen adapters that were active when it was trained.
    frozen: tuple[AdapterTensors, ...] = ()

    @property
    def adapters(self) -> list[LoraAdapter]:
        """All that are active."""
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
        target.copy_(values[tuple(slice(at, at + size) for at, size in zip(offset, target.shape, strict=True))])

    def factors_of(self, linear: str) -> dict[str, Tensor]:
        """By kind: LORA_A, LORA_B and, with DoRA, MAGNITUDE."""
        kinds = (LORA_A, LORA_B, MAGNITUDE) if self.adapter.use_dora else (LORA_A, LORA_B)
        return {kind: self.factors[parameter_name(linear, self.adapter.name, kind)] for kind in kinds}


class LoraFactors(nn.Module):
    """The update of one linear by one adapter."""

    # Of each factor, the dimension that it shares with the weight, and the dimension of the weight.
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
    # The weight without the updates, while they are merged into it.
    unmerged_weight: Tensor | None

    @property
    def factors(self) -> list[LoraFactors]:
        """Those that the forward pass adds."""
        return list(self.adapters.values()) if self.unmerged_weight is None else []

    def base_forward(self, x: Tensor) -> Tensor:
        """The output without the updates, unless they are merged."""
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        base_output = output = self.base_forward(x)
        for factors in self.factors:
            output = output + factors(x, base_output, self.weight, self.bias)
        return output

    @torch.no_grad()
    def merge(self) -> float:
        """Puts the updates into the weight; returns the rounding error relative to the updates."""
        assert self.unmerged_weight is None, "the adapters are merged already"
        base = self.weight.detach().clone()
        wide = base.to(wider_dtype(base.dtype))
        merged = wide
        for factors in self.factors:
            merged = factors.merged(merged)
        self.weight.copy_(merged)
        self.unmerged_weight = base
        return rounding_error(wide, merged, self.weight)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restores the weight, to the last bit."""
        assert self.unmerged_weight is not None, "no adapter is merged"
        self.weight.copy_(self.unmerged_weight)
        self.unmerged_weight = None


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
    """The output of any linear without the updates, unless they are merged."""
    return linear.base_forward(x) if isinstance(linear, LoraLinear) else linear(x)


def get_factors(linear: nn.Linear) -> list[LoraFactors]:
    """Those that the forward pass of any linear adds."""
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
            linear.adapters, linear.unmerged_weight = nn.ModuleDict(), None
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
    """A `TensorSource` of initial values: those of PEFT, from a random stream of each parameter's own.

    `base`: has the weights, whose row norms are DoRA's first magnitudes. The values are the same in any layout. Those
    of `frozen` adapters are their own.
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
    by name (`rounding_error`). Parameters that `factors` has besides (modules_to_save) replace those of `base`.
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

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        linear = name.removesuffix(".weight")
        adapters = [adapter for adapter in self.adapters if linear in adapter.linears]
        if not adapters:
            (self.factors if name in self._saved else self.base).read_into(name, target, offset)
            return
        # DoRA needs complete rows.
        rows, columns = (slice(start, start + size) for start, size in zip(offset, target.shape, strict=True))
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
        """Those of some rows of a linear."""
        meta = nn.Linear(width, rows.stop - rows.start, bias=False, dtype=dtype, device="meta")
        factors = LoraFactors(meta, adapter.linears[linear], 0.0, adapter.use_dora).to_empty(device="cpu")
        for kind, parameter in factors.named_parameters():
            offset = (0, 0) if kind == LORA_A else (rows.start,) + (0,) * (parameter.dim() - 1)
            self.factors.read_into(parameter_name(linear, adapter.name, kind), parameter.detach(), offset)
        return factors.requires_grad_(False)
