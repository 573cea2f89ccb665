"""What of the model this rank holds: for every local tensor, which box of which named tensor it is.

Read off the placements of DTensor, which are the only record of how anything is sharded. Axis `tp` cuts first, by its
dimension; the data axis then cuts what is left by rows. A matrix that runs fused is, within a rank, each of its parts'
share one below the other (parallel/tensor.py), so a cut by rows may hold the end of one part and the beginning of
another.

Everything that moves between layouts goes through here: loading, initialising, checkpoints, parity tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchstone.models.decoder import DecoderConfig, pieces_of
from torchstone.models.sliced_files import Slice

EMBEDDING, HEAD = "tok_embed.weight", "head.weight"
# What the files of a checkpoint that several ranks have saved hold: weights-00003.safetensors.
WEIGHTS, OPTIMIZER = "weights", "optimizer"


def slice_file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank:05d}.safetensors"


def slice_files(folder: Path, kind: str) -> list[Path]:
    """Those of all ranks that saved; none where one process saved alone."""
    return sorted(folder.glob(f"{kind}-?????.safetensors"))


def slices_of(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[Slice]:
    """The boxes that `tensor`, shaped and laid out like parameter `name`, holds; views of it. Only a native decoder
    (`config`) has parameters of several parts, and a head that is the embedding under another name."""
    if config is not None and config.tied and name == HEAD:
        name = EMBEDDING
    whole = _parts(config, name, tensor)
    if not isinstance(tensor, DTensor):
        views = tensor.split([size[0] for _, _, _, size in whole]) if len(whole) > 1 else [tensor]
        return [Slice(part, shape, at, view) for (part, shape, at, _), view in zip(whole, views, strict=True)]
    parts = [_cut(part, *_axis(tensor, "tp")) for part in whole]
    held = _rows(sum(size[0] for _, _, _, size in parts), *_axis(tensor, "dp_shard"))
    found, row, local = [], 0, tensor.to_local()
    for part, shape, offset, size in parts:
        begin, end = max(held.start, row), min(held.stop, row + size[0])
        if begin < end:
            view = local[begin - held.start : end - held.start]
            found.append(Slice(part, shape, (offset[0] + begin - row, *offset[1:]), view))
        row += size[0]
    return found


def piece_names(config: DecoderConfig, name: str, tensor: Tensor) -> list[str]:
    """The tensors of which parameter `name`, shaped like `tensor`, holds boxes on some rank."""
    return [part for part, _, _, _ in _parts(config, EMBEDDING if config.tied and name == HEAD else name, tensor)]


def is_counted(config: DecoderConfig | None, name: str, tensor: Tensor) -> bool:
    """Whether this rank stands for what it holds: of ranks that hold the same box, the first on every axis does, and of
    a tied matrix in two stages the first."""
    if config is not None and config.tied and name == HEAD:
        return False
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(at == 0 for at, how in zip(coordinates, tensor.placements, strict=True) if isinstance(how, Replicate))


Box = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name and shape of the whole, where the box begins, and its size."""


def _parts(config: DecoderConfig | None, name: str, tensor: Tensor) -> list[Box]:
    """The named tensors that a parameter holds, whole."""
    if config is None:
        return [(name, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))]
    # Of a tensor without numbers: their shapes are all that is wanted.
    parts = pieces_of(config, name, torch.empty(tensor.shape, device="meta"))
    return [(part, tuple(piece.shape), (0,) * piece.dim(), tuple(piece.shape)) for part, piece in parts]


def _axis(tensor: DTensor, axis: str) -> tuple[Placement | None, int, int]:
    """How a tensor lies on an axis, this rank's number there, and how many there are."""
    mesh = tensor.device_mesh
    names, coordinates = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if axis not in names or coordinates is None:
        return None, 0, 1
    at = names.index(axis)
    return tensor.placements[at], coordinates[at], mesh.size(at)


def _cut(box: Box, how: Placement | None, rank: int, ranks: int) -> Box:
    """What axis tp leaves of a part on one rank."""
    name, shape, offset, size = box
    if not isinstance(how, Shard):
        return box
    dim = how.dim % len(shape)
    taken = _chunk(size[dim], rank, ranks)
    return name, shape, _with(offset, dim, offset[dim] + taken.start), _with(size, dim, len(taken))


def _rows(count: int, how: Placement | None, rank: int, ranks: int) -> range:
    """The rows that the data axis leaves a rank; its placement is a shard by rows, whatever torch calls it."""
    return range(count) if how is None or isinstance(how, Replicate) else _chunk(count, rank, ranks)


def _chunk(count: int, rank: int, ranks: int) -> range:
    """As torch.chunk cuts: all of one size but the last ones, which may have less, or nothing."""
    size = -(-count // ranks)
    return range(min(rank * size, count), min((rank + 1) * size, count))


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
