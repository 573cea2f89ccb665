"""Whole or not listed: how a checkpoint folder is committed, found and checked.

Files are written under a hidden name, hashed into manifest.json, synced, and the folder is renamed: the rename is the
commit. Neither safetensors nor JSON notices a flipped bit, so loading compares every hash first. Where several ranks
write, each hashes what it wrote, and the first commits once all are done; when they read, each checks a share of files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from torchstone import atomic
from torchstone.errors import CheckpointError
from torchstone.parallel.mesh import ALONE, Place

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
def committed(final: Path, place: Place = ALONE) -> Iterator[Path]:
    """A folder for all ranks to write into; with the manifest in it, it takes the name `final`. Where one cannot write,
    it does so nowhere, and all of them say why."""
    with ExitStack() as stack:
        with _together(place, final):
            folder = stack.enter_context(atomic.new_folder(final)) if place.is_main else atomic.hidden(final, "partial")
        with _together(place, final):
            yield folder
        entries: dict[str, Any] = {}
        with _together(place, final):
            if not place.is_main:
                entries = {path.name: _entry(path) for path in folder.glob(f"*-{place.rank:05d}.*")}
        gathered = place.gather(entries)
        with _together(place, final):
            if place.is_main:
                _write_manifest(folder, {name: entry for each in gathered for name, entry in each.items()})
                stack.close()


def tidy(root: Path) -> None:
    atomic.tidy(root, "step-*")


def verify(folder: Path, place: Place = ALONE) -> None:
    """Every file of the manifest is there with the hash it was written with; each rank looks at a share of them."""
    error = None
    try:
        _verify(folder, place.rank, place.layout.world_size)
    except CheckpointError as found:
        error = found
    place.together(error)


def _verify(folder: Path, rank: int, ranks: int) -> None:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: written in checkpoint format {manifest.get('format')}, this reads {FORMAT}")
    try:
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / MANIFEST}: damaged: it does not list the files") from None
    if not entries:
        raise CheckpointError(f"{folder / MANIFEST}: damaged: it does not list the files")
    for name, (size, digest) in list(entries.items())[rank::ranks]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != size or file_hash(path) != digest:
            raise CheckpointError(f"{path}: damaged: it is not the file that was saved")


def remove(folder: Path) -> None:
    """Takes the folder out of the list first, so that a half-removed checkpoint is never found."""
    hidden = atomic.hidden(folder, "removed")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    atomic.write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


@contextmanager
def _together(place: Place, final: Path) -> Iterator[None]:
    """What goes wrong on one rank goes wrong on all."""
    error: CheckpointError | None = None
    try:
        yield
    except (OSError, SafetensorError) as found:
        error = CheckpointError(f"{final}: could not be written: {found}", "is the disk full?")
    except CheckpointError as found:
        error = found
    place.together(error)


def _write_manifest(folder: Path, known: dict[str, Any] | None = None) -> None:
    """The hashes of all files, those `known` being taken as they are."""
    files = dict(known or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            files[name] = _entry(path)
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})
