"""metrics.jsonl: one line of unrounded metrics per step, to be read by programs.

A resumed run first removes the lines after its checkpoint, so that the file reads as one uninterrupted run. If no
line would remain, the file is renamed instead: it may be all that is left of an earlier attempt.
"""

from __future__ import annotations

import errno
import json
import os
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import torch

from torchstone.atomic import free_path, fsync, open_without_following, write_text


class MetricsFile:
    """`removed_lines` and `moved_to` say what became of the old lines; `missing_steps` is the number of steps without
    a line."""

    def __init__(self, path: Path, last_step: int, is_writer: bool = True, first_step: int = 1) -> None:
        """Opens `path` to continue after `last_step`. Only one rank of a run is the writer."""
        self.removed_lines = 0
        self.moved_to: Path | None = None
        self.missing_steps = 0
        self._file: FileIO | None = None
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
        found = {step for step in steps if first_step <= step <= last_step}
        self.missing_steps = max(0, last_step - first_step + 1) - len(found)
        self._file = FileIO(path, "a", opener=open_without_following)
        fsync(path.parent)

    def write(self, metrics: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            line = f"{json.dumps(metrics)}\n".encode()
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file.name)) from None

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    @property
    def is_deleted(self) -> bool:
        """Whether someone has removed the file since it was opened."""
        return self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory_bytes(device: torch.device) -> int:
    """The peak of the bytes that torch allocated on a CUDA device since the last call; on a CPU, the current memory of
    this process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return _process(os.getpid()).memory_info().rss


# Its constructor reads files of /proc.
_process = cache(psutil.Process)


def _step_of(line: str) -> float:
    """Infinity for a line that cannot be read or has no step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")
