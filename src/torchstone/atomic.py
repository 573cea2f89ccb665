"""Files and folders that are complete or absent: written under a temporary name, synced, renamed.

Also a file lock, and a reader for JSON files that may be missing or damaged.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from secrets import token_hex
from typing import Any

from torchstone.errors import UsageError


def fsync(path: Path) -> None:
    """Waits until a file, or a folder's directory entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_without_following(path: str, flags: int) -> int:
    """An `opener` that refuses a symlink: a stranger's folder must not make us write elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Raises OSError where a library written in Rust raises a plain Exception, such as for a full disk."""
    try:
        yield
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None or isinstance(error, OSError):
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from None


def write_text(path: Path, text: str) -> None:
    # A random name: several processes on several machines may write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    fsync(path.parent)


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """The JSON object in a file. A missing or damaged file counts as empty."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to write into. On success it is synced and renamed to `final`; on an error it is removed.

    An existing `final` is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = temporary_path(final, "partial")
    remove(work)
    work.mkdir()
    try:
        yield work
        for path in work.rglob("*"):
            fsync(path)
        fsync(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    replace_folder(work, final)


def replace_folder(work: Path, final: Path) -> None:
    """Renames `work` to `final`. An existing `final` is moved aside first and removed last."""
    replaced = temporary_path(final, "replaced")
    if os.path.lexists(final):
        remove(replaced, ignore_errors=True)
        final.rename(replaced)
    work.rename(final)
    fsync(final.parent)
    remove(replaced, ignore_errors=True)


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Removes a folder or a file, if it exists; of a symbolic link the link alone, never what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits for an exclusive lock. The kernel releases it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # "a" changes nothing in a file that exists.
    with open(path, "a", opener=open_without_following) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[int]:
    """Locks the folder of a run and returns the open file; an error if a process has locked it.

    Child processes that inherit the file share the lock. It ends with the last of them.
    """
    check_utf8(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "is a file" if folder.is_file() else f"cannot be created: {error.strerror}"
        raise UsageError(f"output_dir {folder} {reason}", "choose another --output-dir") from None
    with open(folder / ".lock", "a", opener=open_without_following) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is training in {folder}", "choose another --output-dir") from None
        yield lock.fileno()


def check_utf8(folder: Path) -> None:
    """Raises if models cannot be saved in a folder because its name is not UTF-8, which tokenizers and torch need."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name of the folder {str(folder)!r} is not UTF-8", "choose another folder") from None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.is_file():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def temporary_path(final: Path, state: str) -> Path:
    """The hidden name of `final` while it is `partial`, `replaced` or `removed`."""
    return final.with_name(f".{final.name}.{state}")


def free_path(path: Path) -> Path:
    """`path`, or with a number after its stem if something of that name exists."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in chain([path], numbered) if not os.path.lexists(name))


def clean_up(root: Path, pattern: str) -> None:
    """Removes temporary folders of interrupted processes, and restores one that was moved aside but not replaced."""
    for leftover in root.glob(f".{pattern}"):
        final = root / leftover.name.removeprefix(".").rsplit(".", 1)[0]
        if leftover.suffix == ".replaced" and not final.exists():
            leftover.rename(final)
        elif leftover.suffix in (".partial", ".replaced", ".removed"):
            remove(leftover)
