"""Commits, lists and verifies checkpoint folders. An incomplete folder is never listed.

Files are written under a temporary folder name, hashed into manifest.json and synced; renaming the folder is the
commit. Neither safetensors nor JSON notices a flipped bit, so every hash is verified before loading. Where several
ranks write, each hashes its own files and rank 0 commits when all are done; where several read, each verifies a share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from torchstone import atomic
from torchstone.errors import CheckpointError
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.wording import list_first

MANIFEST = "manifest.json"
FORMAT = 1
# What some loader takes for weights, moments or RNG states: a file that is loaded must be in the manifest. An index or
# an adapter leads Transformers to other weights.
TENSOR_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf")
ADAPTER_CONFIG = "adapter_config.json"
UNREADABLE_HINT = "nothing was changed: start again when it can be read, or move it away"


class UnlistedFilesError(CheckpointError):
    """A checkpoint with files that its manifest does not list. It is not damaged: without them it can be used."""


class UnreadableError(CheckpointError):
    """The operating system could not read a checkpoint, which may be intact."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints in `root` with their steps, oldest first."""
    if not root.is_dir():
        return []
    matches = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in root.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match and (path / MANIFEST).is_file())


@contextmanager
def commit_folder(final: Path, ctx: ParallelContext = SINGLE_PROCESS) -> Iterator[Path]:
    """A folder for all ranks to write into, committed as `final` with its manifest when all of them are done.

    If one rank fails, nothing is committed and all ranks raise its error.
    """
    with ExitStack() as stack:
        with _raise_together(ctx, final):
            folder = atomic.temporary_path(final, "partial")
            if ctx.is_main:
                folder = stack.enter_context(atomic.new_folder(final))
        with _raise_together(ctx, final):
            yield folder
        entries: dict[str, Any] = {}
        with _raise_together(ctx, final):
            if not ctx.is_main:
                entries = {path.name: _entry(path) for path in folder.glob(f"*-{ctx.rank:05d}.*")}
        gathered = ctx.all_gather_object(entries)
        with _raise_together(ctx, final):
            if ctx.is_main:
                _write_manifest(folder, {name: entry for rank in gathered for name, entry in rank.items()})
                # The rename: from here on the checkpoint is listed.
                stack.close()


def verify_checkpoint(folder: Path, ctx: ParallelContext = SINGLE_PROCESS) -> None:
    """Compares every file with its hash in the manifest; each rank verifies a share of the files.

    Raises UnlistedFilesError if the folder has tensor files that are not in the manifest.
    """
    error = None
    try:
        _verify_share(folder, ctx.rank, ctx.world_size)
    except CheckpointError as own_error:
        error = own_error
    except OSError as failure:
        error = UnreadableError(f"{folder}: cannot be read: {failure}", UNREADABLE_HINT)
    ctx.raise_on_all_ranks(error)


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it is neither listed nor counted; returns its new path."""
    aside = atomic.free_path(folder.with_name(f"damaged-{folder.name}"))
    folder.rename(aside)
    atomic.fsync(folder.parent)
    return aside


def remove_checkpoint(folder: Path) -> None:
    """Renames the folder first, so that a half-removed checkpoint is never listed."""
    hidden = atomic.temporary_path(folder, "removed")
    folder.rename(hidden)
    atomic.remove(hidden)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error}", UNREADABLE_HINT) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    atomic.write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify_share(folder: Path, rank: int, world_size: int) -> None:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: has checkpoint format {manifest.get('format')}; this version reads format {FORMAT}"
        )
    try:
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError):
        entries = {}
    if not entries:
        raise CheckpointError(f"{folder / MANIFEST}: damaged: it lists no files")
    _check_unlisted(folder, entries)
    for name, (size, digest) in list(entries.items())[rank::world_size]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != size or file_hash(path) != digest:
            raise CheckpointError(f"{path}: damaged: it differs from the file that was saved")


def _check_unlisted(folder: Path, listed: Collection[str]) -> None:
    names = sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*")} - set(listed))
    unlisted = [n for n in names if n.lower().endswith(TENSOR_SUFFIXES) or Path(n).name == ADAPTER_CONFIG]
    if unlisted:
        raise UnlistedFilesError(
            f"{folder}: has files that its {MANIFEST} does not list: {list_first(unlisted, 8)}",
            "they were not saved with it and might be loaded: move them away",
        )


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


@contextmanager
def _raise_together(ctx: ParallelContext, final: Path) -> Iterator[None]:
    error: CheckpointError | None = None
    try:
        yield
    except (OSError, SafetensorError) as failure:
        error = CheckpointError(f"{final}: could not be written: {failure}", "is the disk full?")
    except CheckpointError as failure:
        error = failure
    ctx.raise_on_all_ranks(error)


def _write_manifest(folder: Path, known_entries: dict[str, Any]) -> None:
    entries = dict(known_entries)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in entries:
            entries[name] = _entry(path)
    write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
