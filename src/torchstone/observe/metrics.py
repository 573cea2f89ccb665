"""metrics.jsonl: one line of unrounded metrics per step, to be read by programs.

A resumed run first removes the lines after its checkpoint, so that the file reads as one uninterrupted run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import torch

from torchstone.atomic import write_text


class MetricsFile:
    def __init__(self, path: Path, last_step: int, is_writer: bool = True) -> None:
        """Opens `path` to continue after `last_step`. Only one rank of a run is the writer."""
        self.removed_lines = _cut_after(path, last_step) if is_writer else 0
        self._file = path.open("a", encoding="utf-8") if is_writer else None

    def write(self, metrics: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory_bytes(device: torch.device) -> int:
    """Peak memory of the CUDA device, or the current memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def _cut_after(path: Path, last_step: int) -> int:
    """Removes the lines after `last_step` and a half-written last one; returns how many."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    remaining = "".join(f"{line}\n" for line in lines if _step_of(line) <= last_step)
    if remaining != text:
        write_text(path, remaining)
    return len(lines) - remaining.count("\n")


def _step_of(line: str) -> float:
    """Infinity for a line that cannot be read or has no step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
