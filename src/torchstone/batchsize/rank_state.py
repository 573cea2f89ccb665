"""Weights, gradients and moments of every rank of a layout, and FSDP2's buffers, from the shapes of the parameters.

`Unit` has the bytes of the parameters that FSDP2 treats as one: a block, or all that is outside of blocks. Shapes are
sharded as parallel/tensor_parallel.py (its plan) and FSDP2 (dimension 0, in equal chunks) shard them; bytes are those
of the first rank, whose chunks are the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from operator import add

import torch
from torch import nn

from torchstone.config.schema import Config, ParallelConfig
from torchstone.models.decoder import EMBEDDING, HEAD, Decoder
from torchstone.optim.build import parameter_kind
from torchstone.parallel.fsdp import COMPUTE_DTYPE, reduces_once_per_step
from torchstone.parallel.mesh import ParallelDims
from torchstone.parallel.tensor_parallel import tp_shard_dims
from torchstone.tuning.lora import is_adapter_parameter, split_parameter_name
from torchstone.tuning.osft import OSFT_Z

KINDS = {EMBEDDING: "embed", "pos_embed.weight": "embed", HEAD: "head"}
LAYER = re.compile(r"\.(\d+)\.")
# The bytes of the scalar that counts AdamW's steps.
STEP_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """Bytes on one rank, between steps (`weights`, `moments`) and in a step."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    # Gradients of several micro-batches, beyond those of one.
    accumulation: int = 0
    # Beside the moments, while the optimizer updates.
    update: int = 0
    # What FSDP2 gathers, and what it needs to reduce the gradients.
    gathered: int = 0
    reduced: int = 0

    def __add__(self, other: Unit) -> Unit:
        return Unit(*map(add, astuple(self), astuple(other)))


def sum_units(units: Iterable[Unit]) -> Unit:
    return sum(units, Unit())


@dataclass(frozen=True)
class Units:
    """The units of all layers. `tied_head`: a copy of the embedding, which the last stage of a pipeline has."""

    embedding: Unit
    blocks: list[Unit]
    head: Unit
    tied_head: Unit


@dataclass(frozen=True)
class RankUnits:
    """The units of one rank: what is outside of blocks, its blocks, and the sum of all."""

    root: Unit
    blocks: list[Unit]
    total: Unit
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class ModelState:
    """The parameters of a model on the meta device, with adapters, frozen, and in the dtypes that a run gives them."""

    module: nn.Module
    config: Config
    is_cuda: bool
    depth: int
    is_tied: bool

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @cached_property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.trained.values())

    @cached_property
    def _tp_dims(self) -> dict[int, dict[str, int | None]]:
        return {}

    @cached_property
    def _units(self) -> dict[tuple[int, int, bool, bool], Units]:
        return {}

    @cached_property
    def _ranks(self) -> dict[tuple[object, ...], RankUnits]:
        return {}

    def rank_units(self, dims: ParallelDims, parallel: ParallelConfig, stages: Sequence[range]) -> RankUnits:
        """The units of a rank with these layers. Cached, because a search asks for the same again and again."""
        is_once = reduces_once_per_step(replace(parallel, pp=dims.pp), dims.dp_shard)
        key = (dims.tp, dims.dp_shard, dims.world_size == 1, is_once)
        if (rank := self._ranks.get((key, *stages))) is not None:
            return rank
        if key not in self._units:
            self._units[key] = self._make_units(dims, is_once)
        units = self._units[key]
        blocks = [units.blocks[n] for layers in stages for n in layers]
        has_embedding, has_head = stages[0].start == 0, stages[-1].stop == self.depth
        root = units.embedding if has_embedding else Unit()
        if has_head:
            root += units.head if has_embedding else units.head + units.tied_head
        rank = RankUnits(root, blocks, root + sum_units(blocks), has_embedding, has_head)
        self._ranks[key, *stages] = rank
        return rank

    def _make_units(self, dims: ParallelDims, is_once: bool) -> Units:
        if dims.tp not in self._tp_dims:
            is_native = isinstance(self.module, Decoder)
            self._tp_dims[dims.tp] = tp_shard_dims(self.module, dims.tp) if is_native else {}
        tp = self._tp_dims[dims.tp]
        blocks, embedding, head = [Unit()] * self.depth, Unit(), Unit()
        for name, parameter in self.parameters.items():
            unit, layer = self._unit(name, parameter, tp.get(name), dims, is_once), LAYER.search(name)
            if layer and int(layer[1]) < self.depth:
                blocks[int(layer[1])] += unit
            elif KINDS.get(name) == "embed" or not isinstance(self.module, Decoder):
                embedding += unit
            else:
                head += unit
        for name, buffer in self.module.named_buffers():
            if (layer := LAYER.search(name)) and int(layer[1]) < self.depth:
                blocks[int(layer[1])] += Unit(weights=buffer.nbytes)
        tied = Unit()
        if self.is_tied and EMBEDDING in self.parameters:
            tied = self._unit(EMBEDDING, self.parameters[EMBEDDING], tp.get(EMBEDDING), dims, is_once)
        return Units(embedding, blocks, head, tied)

    def _unit(self, name: str, parameter: nn.Parameter, tp_dim: int | None, dims: ParallelDims, is_once: bool) -> Unit:
        """`is_once`: gradients are reduced once per step."""
        precision = self.config.training.precision
        itemsize, compute = parameter.dtype.itemsize, COMPUTE_DTYPE[precision].itemsize
        shape = list(parameter.shape)
        if tp_dim is not None:
            shape[tp_dim] = -(-shape[tp_dim] // dims.tp)
        whole, own = math.prod(shape), -(-shape[0] // dims.dp_shard) * math.prod(shape[1:])
        is_single = dims.world_size == 1
        weights = own * itemsize + (own * compute if is_single and itemsize != compute else 0)
        sharding = {} if is_single else {"gathered": whole * compute}
        if not parameter.requires_grad:
            return Unit(own * compute if is_single else weights, **sharding)
        # In one process a gradient has the dtype that is computed in; a CPU casts it at once.
        gradients = own * (compute if is_single and self.is_cuda else itemsize)
        accumulation = own * itemsize - gradients
        if not is_single:
            sharding["reduced"] = whole * (compute + 4)
            accumulation = max(0, 4 * whole - gradients) if is_once else 0
        unit = Unit(weights, gradients, self._num_moments(name, parameter) * own * itemsize, accumulation, **sharding)
        if is_adapter_parameter(name) and split_parameter_name(name)[2] == OSFT_Z:
            unit += self._frozen_directions(name, own // shape[1], shape[1], own * itemsize - gradients)
        return unit

    def _frozen_directions(self, name: str, rows: int, rank: int, cast: int) -> Unit:
        """Bytes of OSFT's frozen directions: an fp32 basis, or two bf16 ones; W0_low, if it decays; a copy of Z during
        an update."""
        linear = self.module.get_submodule(split_parameter_name(name)[0])
        basis = 4 * rows * (min(linear.weight.shape) - rank)
        is_split = self.is_cuda and COMPUTE_DTYPE[self.config.training.precision] == torch.bfloat16
        initial = rows * rank * (2 if is_split else 4) if self.config.optim.weight_decay > 0 else 0
        return Unit(basis + initial, update=4 * rows * rank + cast)

    def _num_moments(self, name: str, parameter: nn.Parameter) -> int:
        has_muon = self.config.optim.name == "muon" and parameter_kind(name, parameter, KINDS) == "matrix"
        return 1 if has_muon else 2

    def checkpoint_bytes(self, world_size: int) -> dict[str, int]:
        """The tensors of a checkpoint: what was trained, frozen adapters, P of OSFT, moments, RNG states."""
        saved = [p for name, p in self.parameters.items() if p.requires_grad or is_adapter_parameter(name)]
        moments = sum(self._num_moments(name, p) * p.nbytes for name, p in self.trained.items())
        # Muon counts no steps; every unfused parameter has its own count.
        counted = [name for name, p in self.trained.items() if self._num_moments(name, p) == 2]
        return {
            "weights": sum(parameter.nbytes for parameter in saved),
            "optimizer": moments + STEP_BYTES * sum(_num_unfused(name) for name in counted),
            "rng": world_size * (torch.get_rng_state().nbytes + (16 if self.is_cuda else 0)),
        }


def _num_unfused(name: str) -> int:
    return 3 if ".wqkv." in name else 2 if ".gate_up." in name else 1
