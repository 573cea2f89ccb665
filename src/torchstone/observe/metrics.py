"""metrics.jsonl: one line of unrounded metrics per step, to be read by programs.

A resumed run first removes the lines after its checkpoint, so that the file reads as one uninterrupted run. A file of
which no line would stay is moved aside instead: it may be all that is left of an earlier attempt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from torchstone.atomic import free_path, fsync, write_text

MAX_RANGES = 8


class MetricsFile:
    """`removed_lines` and `moved_to` say what became of the old lines. `missing_steps` have no line."""

    def __init__(self, path: Path, last_step: int, is_writer: bool = True, first_step: int = 1) -> None:
        """Opens `path` to continue after `last_step`. Only one rank of a run is the writer."""
        self.removed_lines = 0
        self.moved_to: Path | None = None
        self.missing_steps: list[int] = []
        self._file: TextIO | None = None
        if not is_writer:
            return
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.splitlines()
        steps = [_step_of(line) for line in lines]
        kept = "".join(f"{line}\n" for line, step in zip(lines, steps, strict=True) if step <= last_step)
        if lines and (last_step == 0 or not kept):
            self.moved_to = path.rename(free_path(path.with_name(f"{path.stem}-old{path.suffix}")))
        elif kept != text:
            write_text(path, kept)
            self.removed_lines = len(lines) - kept.count("\n")
        self.missing_steps = sorted(set(range(first_step, last_step + 1)) - set(steps))
        self._file = path.open("a", encoding="utf-8")
        fsync(path.parent)

    def write(self, metrics: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

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


def format_steps(steps: Sequence[int]) -> str:
    """`1 to 4, 7`"""
    groups = [list(group) for _, group in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])]
    ranges = [str(g[0][1]) if len(g) == 1 else f"{g[0][1]} to {g[-1][1]}" for g in groups]
    return ", ".join(ranges[:MAX_RANGES]) + (" and more" if len(ranges) > MAX_RANGES else "")


def _step_of(line: str) -> float:
    """Infinity for a line that cannot be read or has no step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
