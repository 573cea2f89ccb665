"""metrics.jsonl: one line a step, unrounded, for machines.

A run that goes on from a checkpoint first cuts the lines after it, so that the file reads as one uninterrupted run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import torch

from torchstone.atomic import write_text


class MetricsFile:
    def __init__(self, path: Path, resumed_step: int, written: bool = True) -> None:
        """Opens `path` to go on after `resumed_step`; only one process of a run has it `written`."""
        self.removed = _cut(path, resumed_step) if written else 0
        self._file = path.open("a", encoding="utf-8") if written else None

    def write(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory_bytes(device: torch.device) -> int:
    """The most a CUDA device has held, or what this process holds of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def _cut(path: Path, last_step: int) -> int:
    """Drops lines after `last_step` and a half-written last one; returns how many. The old file stays until the end."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    kept = "".join(f"{line}\n" for line in lines if _step_of(line) <= last_step)
    if kept != text:
        write_text(path, kept)
    return len(lines) - kept.count("\n")


def _step_of(line: str) -> float:
    """A line that cannot be read, or has no step, belongs to no step that was saved."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
