"""Which part of the model this rank holds: for every local tensor, its slices of the global, unfused tensors.

It reads DTensor's placements, the only record of how a tensor is sharded. `tp` shards first, along its own dimension;
`dp_shard` then shards the rest along dim 0. Within a tp rank, a fused matrix is the stacked shards of its parts
(parallel/tensor_parallel.py), so a dp shard may hold the end of one part and the beginning of the next.

Everything that moves between parallel layouts goes through here: initialization, loading, checkpoints, parity tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchstone.models.decoder import EMBEDDING, HEAD, DecoderConfig, split_fused
from torchstone.models.tensors import slice_at


@dataclass(frozen=True)
class TensorShard:
    """A slice of a global tensor: the tensor's name and shape, where the slice starts, and its values."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def is_full(self) -> bool:
        return tuple(self.tensor.shape) == self.shape

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the slice is in the global tensor."""
        return slice_at(self.offset, self.tensor.shape)


class TensorSlice(NamedTuple):
    """Name and shape of a global tensor, and the offset and size of a slice of it."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def local_shards(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[TensorShard]:
    """The slices that `tensor`, shaped and sharded like parameter `name`, holds on this rank; as views.

    Only the native decoder (`config`) has fused parameters, and a tied head that is saved as the embedding.
    """
    if not isinstance(tensor, DTensor):
        slices = _global_slices(config, _tied_name(config, name), tensor)
        views = tensor.split([each.size[0] for each in slices]) if len(slices) > 1 else [tensor]
        return [TensorShard(each.name, each.shape, each.offset, v) for each, v in zip(slices, views, strict=True)]
    local = tensor.to_local()
    return [
        TensorShard(each.name, each.shape, each.offset, local[rows.start : rows.stop])
        for each, rows in local_rows(config, name, tensor)
        if rows
    ]


def local_rows(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[tuple[TensorSlice, range]]:
    """This rank's slice, maybe empty, of every global tensor of parameter `name`, and its rows in the local tensor."""
    slices = _global_slices(config, _tied_name(config, name), tensor)
    if isinstance(tensor, DTensor):
        slices = [_shard_slice(each, *_placement_in(tensor, "tp")) for each in slices]
    length = sum(each.size[0] for each in slices)
    local = _local_range(length, *_placement_in(tensor, "dp_shard")) if isinstance(tensor, DTensor) else range(length)
    result, start = list[tuple[TensorSlice, range]](), 0
    for each in slices:
        begin, end = max(local.start, start), min(local.stop, start + each.size[0])
        rows = range(begin - local.start, max(begin, end) - local.start)
        offset = (each.offset[0] + begin - start, *each.offset[1:])
        result.append((each._replace(offset=offset, size=(len(rows), *each.size[1:])), rows))
        start += each.size[0]
    return result


def unfused_names(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[str]:
    """The global tensors that parameter `name` holds slices of, on some rank."""
    return [each.name for each in _global_slices(config, _tied_name(config, name), tensor)]


def is_owner(config: DecoderConfig | None, name: str, tensor: Tensor) -> bool:
    """Whether this rank counts and saves what it holds of a parameter.

    Among ranks with the same slice, the owner is the first in every mesh dimension. If two pipeline stages have a tied
    embedding, the first stage owns it.
    """
    if config is not None and config.tied and name == HEAD:
        return False
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        rank == 0
        for rank, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def _tied_name(config: DecoderConfig | None, name: str) -> str:
    return EMBEDDING if config is not None and config.tied and name == HEAD else name


def _global_slices(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[TensorSlice]:
    """The unfused tensors of a parameter, unsharded."""
    # On meta: only the shapes matter.
    meta = torch.empty(tensor.shape, device="meta")
    parts = [(name, meta)] if config is None else split_fused(config, name, meta)
    return [TensorSlice(part, tuple(t.shape), (0,) * t.dim(), tuple(t.shape)) for part, t in parts]


def _placement_in(tensor: DTensor, dim: str) -> tuple[Placement | None, int, int]:
    """A tensor's placement in a mesh dimension, this process's rank there, and the dimension's size."""
    mesh = tensor.device_mesh
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if dim not in names or coordinate is None:
        return None, 0, 1
    index = names.index(dim)
    return tensor.placements[index], coordinate[index], mesh.size(index)


def _shard_slice(each: TensorSlice, placement: Placement | None, rank: int, size: int) -> TensorSlice:
    """The part of a slice that one rank holds after tp sharding."""
    if not isinstance(placement, Shard):
        return each
    dim = placement.dim % len(each.shape)
    chunk = _chunk(each.size[dim], rank, size)
    return each._replace(
        offset=_with(each.offset, dim, each.offset[dim] + chunk.start), size=_with(each.size, dim, len(chunk))
    )


def _local_range(length: int, placement: Placement | None, rank: int, size: int) -> range:
    """The part of dim 0 that FSDP2 gives a rank. Its placement has several types, all of them shards of dim 0."""
    return range(length) if placement is None or isinstance(placement, Replicate) else _chunk(length, rank, size)


def _chunk(length: int, rank: int, size: int) -> range:
    """A rank's chunk, split as by torch.chunk: chunks of equal size, the last ones smaller or empty."""
    chunk = -(-length // size)
    return range(min(rank * chunk, length), min((rank + 1) * chunk, length))


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
