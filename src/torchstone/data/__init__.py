"""From data files to micro-batches. The public names below are imported on first use, because some import torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "JsonlDataset": "dataset",
    "MaxTokensPerRankCollator": "dataset",
    "get_data_loader": "dataset",
    "InfiniteSampler": "sampler",
    "MixedSampler": "sampler",
    "batch_lengths_to_minibatches": "assignment",
    "batch_lengths_to_minibatches_lpt": "assignment",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"torchstone.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'torchstone.data' has no attribute {name!r}")
