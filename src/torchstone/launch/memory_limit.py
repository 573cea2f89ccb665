"""The limit on micro-batches that a rank leaves for the next start of its run: a small file in the run's folder.

When one of several ranks runs out of memory, the others wait for it in a collective, so it can only exit. The file is
how the next start knows, whoever starts it: this package's launcher, torchrun or a person. It also tells the launcher
that a restart makes sense. Launchers import no torch, so this module imports none either.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchstone.atomic import read_json_or_empty, write_text

LIMIT_FILE = "micro-batch-limit.json"


@dataclass(frozen=True)
class MemoryLimit:
    """The most tokens of a micro-batch. `step` ran out of memory with more, for the `splits`-th time in this run.

    `settings` are those that the limit was found with: the device, the layout and what else decides the memory.
    """

    tokens: int
    step: int
    splits: int
    settings: dict[str, Any]


def read_limit(output_dir: Path) -> MemoryLimit | None:
    """The limit that the last start left. None if there is none, or if the file is damaged: the run then runs out of
    memory once more."""
    values = read_json_or_empty(output_dir / LIMIT_FILE)
    try:
        return MemoryLimit(**values)
    except TypeError:
        return None


def write_limit(output_dir: Path, limit: MemoryLimit) -> None:
    """Writes the file, unless another rank has written a smaller limit."""
    other = read_limit(output_dir)
    if other is None or other.settings != limit.settings or other.tokens > limit.tokens:
        write_text(output_dir / LIMIT_FILE, json.dumps(asdict(limit)) + "\n")


def remove_limit(output_dir: Path) -> None:
    (output_dir / LIMIT_FILE).unlink(missing_ok=True)


class LimitWatch:
    """Tells a launcher whether workers failed because memory ran out, and start again with smaller micro-batches.

    Such restarts do not count as failures. There are only a few: each needs a smaller limit than the one before.
    """

    def __init__(self, output_dir: Path | None) -> None:
        """`output_dir`: the folder of the run; None for a program that leaves no limits."""
        self.output_dir = output_dir
        self._known: MemoryLimit | None = None
        self._last: MemoryLimit | None = None

    def begin_attempt(self) -> None:
        """Call it before the workers start: what is there now is of an earlier failure."""
        self._known = self._read()

    def is_smaller(self) -> bool:
        """Whether a worker of this attempt has left a limit that is smaller than the one of the last such restart."""
        limit = self._read()
        if limit is None or limit == self._known or (self._last is not None and limit.tokens >= self._last.tokens):
            return False
        self._last = limit
        return True

    def describe(self) -> str:
        assert self._last is not None
        return f"micro-batches of at most {self._last.tokens} tokens"

    def _read(self) -> MemoryLimit | None:
        return None if self.output_dir is None else read_limit(self.output_dir)
