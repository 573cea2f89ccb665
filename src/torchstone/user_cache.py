"""Where runs keep what other runs on this machine can use: singular vectors, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """$TORCHSTONE_CACHE, or a folder of the user's cache."""
    if os.environ.get("TORCHSTONE_CACHE"):
        return Path(os.environ["TORCHSTONE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torchstone"
