"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Respects the affinity of the process, where the system reports it. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
