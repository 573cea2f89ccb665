"""Torchstone: a language model trainer that can prove its numbers are right.

The names in `__all__` are public. They are imported on first use, because they import torch: `import torchstone` alone
is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"
_API_NAMES = [
    "Callback",
    "Chat",
    "evaluate",
    "export",
    "generate",
    "inspect_data",
    "plan",
    "prepare",
    "train",
    "train_tokenizer",
]
_DATA_NAMES = [
    "InfiniteSampler",
    "JsonlDataset",
    "MaxTokensPerRankCollator",
    "batch_lengths_to_minibatches",
    "batch_lengths_to_minibatches_lpt",
    "get_data_loader",
]
__all__ = [*_API_NAMES, *_DATA_NAMES]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("torchstone.api" if name in _API_NAMES else "torchstone.data"), name)
    raise AttributeError(f"module 'torchstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
