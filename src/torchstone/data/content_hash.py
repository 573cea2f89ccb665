"""The hash of a file's contents, cached, so that a terabyte is not read again at every start.

A hash is cached with the file's identity on disk: device, inode, size, and the times of its last changes in
nanoseconds. No tool changes a file's bytes and keeps all of these. A file that changed within the last seconds is
hashed again next time, because a clock may tick more slowly than files are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from torchstone.atomic import read_json_or_empty, write_text

SETTLED_SECONDS = 2.0


def file_identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def content_hash(path: Path, cache_dir: Path) -> str:
    """SHA-256 of the file `path`, cached in `cache_dir`."""
    identity, entry_file = file_identity(path), _entry_file(path, cache_dir)
    if (known := known_hash(path, cache_dir)) is not None:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    is_settled = file_identity(path) == identity and time.time() - identity[-1] / 1e9 > SETTLED_SECONDS
    if is_settled and _can_write(cache_dir):
        write_text(entry_file, json.dumps({"path": str(path), "identity": identity, "sha256": digest}) + "\n")
    return digest


def known_hash(path: Path, cache_dir: Path) -> str | None:
    """The cached hash of the file, or None."""
    entry = read_json_or_empty(_entry_file(path, cache_dir))
    return str(entry["sha256"]) if entry.get("identity") == file_identity(path) else None


def _entry_file(path: Path, cache_dir: Path) -> Path:
    return cache_dir / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _can_write(cache_dir: Path) -> bool:
    """A read-only cache is not an error: the hash is computed again."""
    if not cache_dir.is_dir():
        if cache_dir.parent.is_dir() and not os.access(cache_dir.parent, os.W_OK):
            return False
        cache_dir.mkdir(parents=True, exist_ok=True)
    return os.access(cache_dir, os.W_OK)
