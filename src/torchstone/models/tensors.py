"""Where the values of a model's parameters come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Anything that has a model's global, unfused tensors: a folder, a checkpoint, a seed."""

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        """Overwrites `target` with the slice of `name` that starts at `offset` and has the shape of `target`."""


class NamedTensors(TensorSource, Protocol):
    """A source that knows what it has."""

    @property
    def names(self) -> Sequence[str]: ...
