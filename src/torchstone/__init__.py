"""Torchstone: a trainer for language models that can prove its numbers are right.

`torchstone.train`, `prepare`, `evaluate`, `export`, `Callback` and `Chat` are the public names. They import torch, so
they are looked up when first used: `import torchstone` alone costs nothing.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Callback", "Chat", "evaluate", "export", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from torchstone import api

        return getattr(api, name)
    raise AttributeError(f"module 'torchstone' has no attribute {name!r}")
