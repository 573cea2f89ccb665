"""What of a model is trained: LoRA adapters and some parameters of the model itself. Everything else is frozen.

Frozen parameters have the dtype that is computed in, and neither gradients nor optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchstone.models.decoder import Decoder
from torchstone.models.tensors import NamedTensors, TensorSource
from torchstone.tuning.fused_lora import fuse_lora
from torchstone.tuning.lora import (
    InitialFactors,
    LoraAdapter,
    add_adapter,
    is_adapter_parameter,
    split_parameter_name,
)


@dataclass(frozen=True)
class TuningPlan:
    """`adapters`: all that are active; `trained`: the name of the one that is trained."""

    adapters: tuple[LoraAdapter, ...]
    trained: str
    # Parameters of the model that are trained as well (modules_to_save).
    trained_parameters: frozenset[str] = frozenset()
    # What has been trained before; new factors are drawn from `seed`.
    values: NamedTensors | None = None
    seed: int = 0
    # The name of the model, for adapter_config.json, and what tells its weights from others.
    base: str | None = None
    base_fingerprint: str | None = None

    @property
    def trained_adapter(self) -> LoraAdapter:
        return next(adapter for adapter in self.adapters if adapter.name == self.trained)

    def count_parameters(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The number of trained parameters by kind. `shapes`: of the model's parameters."""
        adapter = self.trained_adapter
        factors = 0
        for linear, spec in adapter.linears.items():
            rows, columns = shapes[f"{linear}.weight"]
            factors += spec.rank * (rows + columns) + (rows if adapter.use_dora else 0)
        ranks = sorted({spec.rank for spec in adapter.linears.values()})
        kind = f"{'DoRA' if adapter.use_dora else 'LoRA'} of rank {', '.join(map(str, ranks))}"
        saved = sum(math.prod(shapes[name]) for name in self.trained_parameters if name in shapes)
        return {f"{kind} on {len(adapter.linears)} linears": factors} | ({"modules_to_save": saved} if saved else {})

    def is_trained(self, name: str) -> bool:
        """Whether the parameter `name` is."""
        if is_adapter_parameter(name):
            return split_parameter_name(name)[1] == self.trained
        return name in self.trained_parameters

    def has_value(self, name: str) -> bool:
        """Whether the parameter `name` has been trained before."""
        return self.values is not None and name in self.values.names

    def add_adapters(self, decoder: Decoder, frozen_dtype: torch.dtype, tp: int) -> None:
        """Adds uninitialized adapters to a decoder on the meta device; call `freeze` when it is sharded."""
        for adapter in self.adapters:
            add_adapter(decoder, adapter)
        if tp == 1:
            fuse_lora(decoder)
        for name, parameter in decoder.named_parameters():
            if not self.is_trained(name):
                parameter.data = parameter.data.to(frozen_dtype)

    def freeze(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.is_trained(name))

    def tensors(self, base: TensorSource, shapes: Mapping[str, Sequence[int]]) -> TensorSource:
        """Those of the model and its adapters. `base`: has the model's, of these `shapes`."""
        return _TunedTensors(self, base, InitialFactors(base, shapes, self.seed))


class _TunedTensors:
    def __init__(self, plan: TuningPlan, base: TensorSource, initial: InitialFactors) -> None:
        self.plan, self.base, self.initial = plan, base, initial
        self._names = frozenset(() if plan.values is None else plan.values.names)

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        if self.plan.values is not None and name in self._names:
            self.plan.values.read_into(name, target, offset)
        elif is_adapter_parameter(name):
            self.initial.read_into(name, target, offset)
        else:
            self.base.read_into(name, target, offset)
