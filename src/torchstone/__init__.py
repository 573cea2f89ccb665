"""Torchstone: a language model trainer that can prove its numbers are right.

The names in `__all__` are public. They are imported on first use, because they import torch: `import torchstone` alone
is instant.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# Threads of torch wait for each other by spinning, which takes the time of other processes on the same cores, and of
# each other. This shortens it; libgomp reads it when torch is imported. docs/performance.md has figures.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.2.0.dev0"
_API_NAMES = [
    "Callback",
    "Chat",
    "diagnose",
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
_BATCHSIZE_NAMES = ["discover_batch_size"]
_MODULES = (
    dict.fromkeys(_API_NAMES, "torchstone.api")
    | dict.fromkeys(_DATA_NAMES, "torchstone.data")
    | dict.fromkeys(_BATCHSIZE_NAMES, "torchstone.batchsize.module_discovery")
)
__all__ = [*_API_NAMES, *_DATA_NAMES, *_BATCHSIZE_NAMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'torchstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
