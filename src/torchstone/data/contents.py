"""What a file says, as a hash; remembered, so that a terabyte is not read again at every start.

A hash is kept with the file's identity on disk: device, inode, size, and when it was last changed to the nanosecond. No
tool can change a file's bytes and keep all of these. A file that was changed within the last seconds is hashed again
next time, since clocks may tick more slowly than files are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from torchstone.atomic import write_text

SETTLED_SECONDS = 2.0


def identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def content_hash(path: Path, memory: Path) -> str:
    """SHA-256 of the bytes of `path`, remembered in the folder `memory`."""
    before = identity(path)
    note = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    if note.is_file():
        remembered = _read(note)
        if remembered.get("identity") == before:
            return str(remembered["sha256"])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    settled = identity(path) == before and time.time() - before[-1] / 1e9 > SETTLED_SECONDS
    if settled and _can_write(memory):
        write_text(note, json.dumps({"path": str(path), "identity": before, "sha256": found}) + "\n")
    return found


def _can_write(memory: Path) -> bool:
    """Where nothing can be remembered, as in a cache that is only read, it is worked out again."""
    if not memory.is_dir():
        if memory.parent.is_dir() and not os.access(memory.parent, os.W_OK):
            return False
        memory.mkdir(parents=True, exist_ok=True)
    return os.access(memory, os.W_OK)


def _read(note: Path) -> dict[str, object]:
    """A note that cannot be read is no note."""
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
