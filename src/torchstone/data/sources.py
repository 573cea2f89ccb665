"""Rows with the place they came from: every message about a row can say `file:line`.

JSONL is read as bytes, a line at a time, so that a damaged line is one line's problem and memory stays flat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchstone.errors import DataError, UsageError


@dataclass(frozen=True)
class Row:
    path: Path
    line: int
    value: dict[str, Any]

    def error(self, reason: str, hint: str | None = None) -> DataError:
        shown = json.dumps(self.value)
        shown = shown if len(shown) <= 100 else shown[:97] + "…"
        return DataError(f"{self.path}:{self.line}: {reason}", hint or f"the row begins {shown}")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file. Blank lines are skipped; anything else that is not an object stops with its line."""
    with existing(path).open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                yield Row(path, number, _parse(raw, path, number))


def existing(path: Path) -> Path:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the JSONL file")
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.jsonl"))[:8] if path.parent.is_dir() else []
        raise UsageError(
            f"data file {path} does not exist",
            f"JSONL files in {path.parent}: {', '.join(near)}" if near else "check the path",
        )
    return path


def content_hash(path: Path) -> str:
    with existing(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 at byte {error.start} of the line", _begins(raw)) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not JSON: {error}", _begins(raw)) from None
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: a row is an object {{…}}, not {type(value).__name__}", _begins(raw))
    return value


def _begins(raw: bytes) -> str:
    return f"the line begins {raw[:80].decode('utf-8', 'backslashreplace').strip()}"
