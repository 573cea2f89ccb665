"""Files and folders that are whole or not there: written under another name, synced, renamed. And one lock."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    # A name of its own: several processes, on several machines, may write the same thing at the same time.
    partial = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, named `final` once everything in it is on the disk, removed if something goes wrong.

    A folder that has the name already is replaced: moved aside first, removed last.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = hidden(final, "partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        for path in work.rglob("*"):
            sync(path)
        sync(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    take_place(work, final)


def take_place(work: Path, final: Path) -> None:
    """Names the folder `work` `final`; what had the name is moved aside first and removed last."""
    replaced = hidden(final, "replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    work.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait. The lock ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at this moment."""
    if not path.is_file():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def hidden(final: Path, state: str) -> Path:
    """The name of `final` while it is being written (partial), replaced or removed."""
    return final.with_name(f".{final.name}.{state}")


def tidy(root: Path, pattern: str) -> None:
    """Removes what an interrupted process left of such folders, and restores one whose successor never came."""
    for left in root.glob(f".{pattern}"):
        final = root / left.name.removeprefix(".").rsplit(".", 1)[0]
        if left.suffix == ".replaced" and not final.exists():
            left.rename(final)
        elif left.suffix in (".partial", ".replaced", ".removed"):
            shutil.rmtree(left)
