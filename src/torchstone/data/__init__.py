"""From files to micro-batches. The names below are public; some import torch, so they are looked up when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "JsonlDataset": "dataset",
    "MaxTokensPerRankCollator": "dataset",
    "get_data_loader": "dataset",
    "InfiniteSampler": "sampler",
    "MixedSampler": "sampler",
    "batch_lengths_to_minibatches": "assignment",
    "batch_lengths_to_minibatches_lpt": "assignment",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"torchstone.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'torchstone.data' has no attribute {name!r}")
