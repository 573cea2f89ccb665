"""Torchstone: a trainer for language models that can prove its numbers are right.

The names in `__all__` are public. They import torch, so they are looked up when first used: `import torchstone` alone
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_JOBS = ["Callback", "Chat", "evaluate", "export", "inspect_data", "prepare", "train", "train_tokenizer"]
_DATA = [
    "InfiniteSampler",
    "JsonlDataset",
    "MaxTokensPerRankCollator",
    "batch_lengths_to_minibatches",
    "batch_lengths_to_minibatches_lpt",
    "get_data_loader",
]
__all__ = [*_JOBS, *_DATA]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("torchstone.api" if name in _JOBS else "torchstone.data"), name)
    raise AttributeError(f"module 'torchstone' has no attribute {name!r}")
