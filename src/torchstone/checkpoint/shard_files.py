"""Files that ranks write in parallel, each with shards of the model's tensors, and that any layout can read.

A shard is a slice of a named tensor. Every rank writes the shards it holds into one safetensors file, whose metadata
says which slice of which tensor each of them is. A complete tensor needs no metadata: a file of complete tensors is an
ordinary safetensors file. A reader asks for its own slices and reads only their bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchstone.checkpoint.tensor_files import open_tensor_file, read_slice_into, write_tensors
from torchstone.errors import CheckpointError
from torchstone.parallel.local_shards import TensorShard
from torchstone.wording import list_first

METADATA_KEY = "slices"
# The kinds of files in a checkpoint of several ranks, such as weights-00003.safetensors.
WEIGHTS, OPTIMIZER, RNG = "weights", "optimizer", "random"


def shard_file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank:05d}.safetensors"


def shard_files(folder: Path, kind: str) -> list[Path]:
    """The files of all ranks, or none if a single process saved the checkpoint."""
    return sorted(folder.glob(f"{kind}-?????.safetensors"))


def write_shards(path: Path, shards: Iterable[TensorShard]) -> None:
    """Writes shards into one file. Empty shards are left out: other ranks hold the values."""
    by_key = {
        shard.name if shard.is_full else f"{shard.name}@{','.join(map(str, shard.offset))}": shard
        for shard in shards
        if shard.is_full or shard.tensor.numel()
    }
    slices = {
        key: {"name": shard.name, "shape": shard.shape, "offset": shard.offset}
        for key, shard in by_key.items()
        if not shard.is_full
    }
    metadata = {METADATA_KEY: json.dumps(slices)} if slices else None
    write_tensors(path, {key: shard.tensor for key, shard in by_key.items()}, metadata)


class ShardedFiles:
    """The tensors that several files hold together, and any slice of them. Opening reads every file's header."""

    def __init__(self, paths: Sequence[Path]) -> None:
        # Bytes of tensor data read so far.
        self.bytes_read = 0
        # By name and offset. Several files may hold the same shard (AdamW's step count): any of them will do.
        self._shards: dict[str, dict[tuple[int, ...], TensorShard]] = {}
        for path in paths:
            for shard in _read_shards(path):
                self._shards.setdefault(shard.name, {}).setdefault(shard.offset, shard)
        for name, shards in self._shards.items():
            error = _tiling_error(list(shards.values()))
            if error is not None:
                raise CheckpointError(
                    f"{list_first(paths)}: {name} of shape {list(self.shape(name))} {error}",
                    "is the file of a rank missing, or from another checkpoint?",
                )
        self.names = list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return next(iter(self._shards[name].values())).shape

    def dtype(self, name: str) -> torch.dtype:
        return next(iter(self._shards[name].values())).tensor.dtype

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        """Overwrites `target` with the slice that has its shape and begins at `offset`, from all shards it overlaps."""
        end = [start + size for start, size in zip(offset, target.shape, strict=True)]
        copied = 0
        for shard in self._shards[name].values():
            first = [max(starts) for starts in zip(offset, shard.offset, strict=True)]
            last = [min(e, o + n) for e, o, n in zip(end, shard.offset, shard.tensor.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                part = target[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))]
                within = [a - o for a, o in zip(first, shard.offset, strict=True)]
                self.bytes_read += read_slice_into(shard.tensor, part, within)
                copied += part.numel()
        if copied != target.numel():
            raise ValueError(
                f"{name} of shape {list(self.shape(name))} has no slice of shape {list(target.shape)} at {list(offset)}"
            )


def _read_shards(path: Path) -> Iterable[TensorShard]:
    """The shards of one file, as views of it."""
    file = open_tensor_file(path)
    try:
        slices = json.loads(file.metadata.get(METADATA_KEY, "{}"))
        for key, tensor in file.tensors.items():
            full = {"name": key, "shape": tensor.shape, "offset": [0] * tensor.dim()}
            entry = slices.get(key, full)
            shard = TensorShard(
                entry["name"], tuple(map(int, entry["shape"])), tuple(map(int, entry["offset"])), tensor
            )
            if not len(shard.shape) == len(shard.offset) == tensor.dim():
                raise ValueError(entry)
            yield shard
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: its metadata does not describe shards: {error!r}") from None


def _tiling_error(shards: Sequence[TensorShard]) -> str | None:
    """What is wrong with the shards of one tensor: they must cover each of its elements once."""
    shape = shards[0].shape
    if any((shard.shape, shard.tensor.dtype) != (shape, shards[0].tensor.dtype) for shard in shards):
        return "has shards of different shapes or dtypes"
    ends = [tuple(np.add(shard.offset, shard.tensor.shape).tolist()) for shard in shards]
    # The grid formed by all shard edges. In our layouts it has one cell per shard.
    edges = [
        np.unique([0, size, *(shard.offset[dim] for shard in shards), *(end[dim] for end in ends)])
        for dim, size in enumerate(shape)
    ]
    if any(axis[0] < 0 or axis[-1] > size for axis, size in zip(edges, shape, strict=True)):
        return "has a shard beyond its end"
    times_covered = np.zeros([len(axis) - 1 for axis in edges], dtype=np.int64)
    for shard, end in zip(shards, ends, strict=True):
        ranges = zip(edges, shard.offset, end, strict=True)
        times_covered[tuple(slice(*np.searchsorted(axis, (first, last))) for axis, first, last in ranges)] += 1
    if (times_covered > 1).any():
        return "has shards that overlap"
    stored, total = sum(shard.tensor.numel() for shard in shards), math.prod(shape)
    return None if stored == total else f"is incomplete: {stored:,} of {total:,} elements are present"
