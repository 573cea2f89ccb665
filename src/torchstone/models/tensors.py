"""Where the values of a model's parameters come from; their dtypes and slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Anything that has a model's global, unfused tensors: a folder, a checkpoint, a seed."""

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        """Overwrites `target` with the slice of `name` that starts at `offset` and has the shape of `target`."""


class NamedTensors(TensorSource, Protocol):
    """A source that knows what it has."""

    @property
    def names(self) -> Sequence[str]: ...


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def slice_at(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of the slice of a tensor that starts at `offset` and has this shape."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
