"""What of a model is trained. Everything else is frozen.

Frozen parameters of the model have the dtype that is computed in, and neither gradients nor optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchstone.models.decoder import Decoder
from torchstone.models.tensors import NamedTensors, TensorSource
from torchstone.tuning.fused_lora import fuse_lora
from torchstone.tuning.lora import (
    AdapterTensors,
    InitialFactors,
    LoraAdapter,
    add_adapter,
    is_adapter_parameter,
    split_parameter_name,
)
from torchstone.tuning.osft import OSFT_Z, InitialOsft, VectorSource, add_osft
from torchstone.tuning.quantize import BaseQuantization, DequantizedTensors, quantize_linears

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TuningPlan:
    """Parts that `LoraPlan` and `OsftPlan` share."""

    # The parameters of the model itself that are trained.
    trained_parameters: frozenset[str]
    # The values of what earlier steps or another run have trained.
    values: NamedTensors | None
    # The name of the model, which checkpoints record, and the fingerprint of its weights.
    base: str
    base_fingerprint: str

    def add_to(self, module: nn.Module) -> None:
        """Adds uninitialized factors to the linears of a model, or of a pipeline stage."""
        raise NotImplementedError

    def initial_factors(self, base: TensorSource, shapes: Shapes) -> TensorSource:
        """The first values of the factors. `base` has the model's weights; `shapes` are their shapes."""
        raise NotImplementedError

    def trains_factor(self, name: str) -> bool:
        raise NotImplementedError

    def count_parameters(self, shapes: Shapes) -> dict[str, int]:
        """The number of trained parameters by kind. `shapes`: of the model's parameters."""
        raise NotImplementedError

    @property
    def trained_share(self) -> float:
        """How much of the model's parameters needs gradients, roughly."""
        return 0.0

    def prepare_decoder(self, decoder: Decoder, frozen_dtype: torch.dtype, tp: int) -> None:
        """Adds factors to a decoder on the meta device; call `freeze` when it is sharded."""
        self.add_to(decoder)
        for name, parameter in decoder.named_parameters():
            if not self.is_saved(name):
                parameter.data = parameter.data.to(frozen_dtype)

    def is_trained(self, name: str) -> bool:
        """Whether the parameter `name` is trained."""
        return self.trains_factor(name) if is_adapter_parameter(name) else name in self.trained_parameters

    def is_saved(self, name: str) -> bool:
        """Whether checkpoints have the parameter `name`. It then has the dtype of what is trained."""
        return self.is_trained(name)

    def has_value(self, name: str) -> bool:
        """Whether the parameter `name` has been trained before."""
        return self.values is not None and name in self.values.names

    def freeze(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.is_trained(name))

    def tensors(self, base: TensorSource, shapes: Shapes) -> TensorSource:
        """The tensors of the model and its factors. `base` has those of the model; `shapes` are their shapes."""
        return _TunedTensors(self, base, shapes)

    def _count(self, names: Iterable[str], shapes: Shapes) -> int:
        return sum(math.prod(shapes[name]) for name in names if name in shapes)


class _TunedTensors:
    def __init__(self, plan: TuningPlan, base: TensorSource, shapes: Shapes) -> None:
        self.plan, self.base, self.initial = plan, base, plan.initial_factors(base, shapes)
        self._names = frozenset(() if plan.values is None else plan.values.names)

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        if self.plan.values is not None and name in self._names:
            self.plan.values.read_into(name, target, offset)
        elif is_adapter_parameter(name):
            self.initial.read_into(name, target, offset)
        else:
            self.base.read_into(name, target, offset)


@dataclass(frozen=True)
class LoraPlan(TuningPlan):
    """`adapter` is the one that is trained; a new one is drawn from `seed`. `frozen` has the other active ones.

    `trained_parameters` are PEFT's modules_to_save.
    """

    adapter: LoraAdapter
    frozen: tuple[AdapterTensors, ...] = ()
    seed: int = 0
    # The linears that are kept in fewer bits, and how they are quantized.
    quantized: frozenset[str] = frozenset()
    base_quantization: BaseQuantization | None = None
    warnings: tuple[str, ...] = ()

    def add_to(self, module: nn.Module) -> None:
        for adapter in (self.adapter, *(tensors.adapter for tensors in self.frozen)):
            add_adapter(module, adapter)

    def prepare_decoder(self, decoder: Decoder, frozen_dtype: torch.dtype, tp: int) -> None:
        super().prepare_decoder(decoder, frozen_dtype, tp)
        if tp == 1:
            fuse_lora(decoder)
        if self.base_quantization is not None:
            quantize_linears(decoder, self.quantized, self.base_quantization)

    def initial_factors(self, base: TensorSource, shapes: Shapes) -> TensorSource:
        if self.base_quantization is not None:
            # DoRA's first magnitudes are the row norms of the weights that are multiplied.
            base = DequantizedTensors(base, self.quantized, shapes, self.base_quantization)
        return InitialFactors(base, shapes, self.seed, self.frozen)

    def trains_factor(self, name: str) -> bool:
        return split_parameter_name(name)[1] == self.adapter.name

    def count_parameters(self, shapes: Shapes) -> dict[str, int]:
        adapter, factors = self.adapter, 0
        for linear, spec in adapter.linears.items():
            rows, columns = shapes[f"{linear}.weight"]
            factors += spec.rank * (rows + columns) + (rows if adapter.use_dora else 0)
        ranks = sorted({spec.rank for spec in adapter.linears.values()})
        kind = f"{'DoRA' if adapter.use_dora else 'LoRA'} of rank {', '.join(map(str, ranks))}"
        saved = self._count(self.trained_parameters, shapes)
        others = ", ".join(tensors.adapter.name for tensors in self.frozen)
        kind += f" on {len(adapter.linears)} linears" + (f" beside the frozen {others}" if others else "")
        return {kind: factors} | ({"modules_to_save": saved} if saved else {})


@dataclass(frozen=True)
class OsftPlan(TuningPlan):
    """`ranks`: r of every linear that is partly trained. Linears that are trained as a whole (a ratio of 1) are among
    `trained_parameters`; those that are frozen as a whole (a ratio of 0) are not recorded."""

    ranks: Mapping[str, int]
    unfreeze_rank_ratio: float
    vectors: VectorSource

    @property
    def trained_share(self) -> float:
        return self.unfreeze_rank_ratio

    def add_to(self, module: nn.Module) -> None:
        add_osft(module, self.ranks)

    def initial_factors(self, base: TensorSource, shapes: Shapes) -> TensorSource:
        return InitialOsft(self.vectors, self.ranks)

    def trains_factor(self, name: str) -> bool:
        return split_parameter_name(name)[2] == OSFT_Z

    def is_saved(self, name: str) -> bool:
        return is_adapter_parameter(name) or self.is_trained(name)

    def count_parameters(self, shapes: Shapes) -> dict[str, int]:
        z = sum(rank * max(shapes[f"{linear}.weight"]) for linear, rank in self.ranks.items())
        whole = self._count(self.trained_parameters, shapes)
        parts = {f"OSFT of {self.unfreeze_rank_ratio:g} of the ranks of {len(self.ranks)} linears": z}
        return {kind: count for kind, count in (parts | {"other parameters": whole}).items() if count}
