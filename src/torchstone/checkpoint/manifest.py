"""Whole or not listed: how a checkpoint folder is committed, found and checked.

Files are written under a hidden name, hashed into manifest.json, synced, and the folder is renamed: the rename is the
commit. Neither safetensors nor JSON notices a flipped bit, so loading compares every hash first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchstone.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints below `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in root.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in found if match and (path / MANIFEST).is_file())


@contextmanager
def committed(final: Path) -> Iterator[Path]:
    """A folder to write into; it takes the name `final` once everything in it is on disk, or is removed on an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.with_name(f".{final.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        _write_manifest(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    work.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(root: Path) -> None:
    """Removes what an interrupted save left behind, and puts back a folder whose replacement never arrived."""
    for left in root.glob(".step-*"):
        final = root / left.name.removeprefix(".").rsplit(".", 1)[0]
        if left.suffix == ".replaced" and not final.exists():
            left.rename(final)
        elif left.suffix in (".partial", ".replaced", ".removed"):
            shutil.rmtree(left)


def verify(folder: Path) -> None:
    """Every file of the manifest is there with the hash it was written with."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: written in checkpoint format {manifest.get('format')}, this reads {FORMAT}")
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != entry["bytes"] or file_hash(path) != entry["sha256"]:
            raise CheckpointError(f"{path}: damaged: it is not the file that was saved")


def remove(folder: Path) -> None:
    """Takes the folder out of the list first, so that a half-removed checkpoint is never found."""
    hidden = folder.with_name(f".{folder.name}.removed")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, also where the file exists."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync(path)
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    sync(folder / MANIFEST)
    sync(folder)
