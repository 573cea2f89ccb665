"""Tokenized data on disk: built once, mapped by every process, never stale.

The key is a hash of everything that decides the contents: the files' bytes, the tokenizer and its template, what is
trained, the limit on length, how many rows are taken, and the version of this code. A cache is built under a lock in a
folder of another name and renamed when whole, so that a reader sees all of it or nothing. While it is built, a journal
says every two seconds how far it is: a build that was killed goes on from there. Ids take 2 bytes a token (4 where
the vocabulary is larger than 65 536), labels 4 more where they are not simply the ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchstone.atomic import hidden, is_locked, locked, sync, take_place, write_text
from torchstone.data.contents import content_hash, identity
from torchstone.data.encode import Counts, Encoded, Encoder, Part, Recipe
from torchstone.data.formats import SHAPES, Shape, shape_of
from torchstone.data.sources import (
    BadRow,
    Chunk,
    Position,
    chunks,
    find_files,
    first_rows,
    real_files,
    row_count,
    rows,
    size_on_disk,
)
from torchstone.data.workers import Workers
from torchstone.errors import DataError
from torchstone.observe.console import Console

# Raised whenever the same rows would become other tokens, or the files another layout.
CODE_VERSION = 2
JOURNAL_SECONDS = 2.0
# Below this, starting processes takes longer than tokenizing.
BYTES_FOR_WORKERS = 4_000_000
ROWS_TO_RECOGNISE = 1000
LINES_PER_FILE = 1 << 40
QUARANTINE = "bad-rows.jsonl"
FILES = ("ids.bin", "labels.bin", "lengths.bin", "loss_tokens.bin", "origins.bin", QUARANTINE)


@dataclass(frozen=True)
class Source:
    """One name under `data.path`: its files, and the shape of their rows."""

    name: str
    files: list[Path]
    shape: Shape

    @property
    def title(self) -> str:
        return Path(self.name).name or self.name


@dataclass(frozen=True)
class BuildSettings:
    """How a cache is built, which does not change what is in it."""

    cache_dir: Path
    workers: int | None = None
    stop_on_bad_row: bool = True


class TokenCache:
    """Sequences of ids and labels in mapped files."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder, self.source = folder, source
        meta = json.loads((folder / "meta.json").read_text())
        self.key: str = meta["key"]
        self.shape: Shape = source.shape
        self.counts = Counts(**meta["counts"])
        self.offsets: np.ndarray = np.load(folder / "offsets.npy", mmap_mode="r")
        self.lengths = _mapped(folder / "lengths.bin", np.dtype(np.uint32))
        self.loss_tokens = _mapped(folder / "loss_tokens.bin", np.dtype(np.uint32))
        self.origins = _mapped(folder / "origins.bin", np.dtype(np.int64))
        self.ids = _mapped(folder / "ids.bin", np.dtype(meta["id_type"]))
        self.labels = _mapped(folder / "labels.bin", np.dtype(np.int32)) if meta["has_labels"] else self.ids

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files for itself."""
        return TokenCache, (self.folder, self.source)

    def sequence(self, index: int, start: int = 0, stop: int | None = None) -> Encoded:
        """Sequence `index`, or its tokens from `start` to `stop`."""
        low, high = int(self.offsets[index]), int(self.offsets[index + 1])
        part = slice(low + start, high if stop is None else low + stop)
        return Encoded(self.ids[part].astype(np.int64), self.labels[part].astype(np.int64))

    def origin(self, index: int) -> str:
        """`file:line` of the row that sequence `index` came from."""
        file, line = divmod(int(self.origins[index]), LINES_PER_FILE)
        return f"{self.source.files[file]}:{line}"

    @property
    def quarantine(self) -> Path:
        return self.folder / QUARANTINE

    def refuse_if_untrained(self) -> None:
        """Training on nothing looks like training: it runs, and the loss stays where it was."""
        counts = self.counts
        if counts.trained_tokens == 0:
            raise DataError(
                f"{self.source.name}: none of its {counts.rows} rows has a token to train on",
                f"{counts.dropped_long} were longer than data.context_length, {counts.bad_rows} bad; "
                "torchstone inspect-data shows the others",
            )

    def first_bad_row(self) -> BadRow:
        row = json.loads(self.quarantine.open(encoding="utf-8").readline())
        return BadRow(Path(row["file"]), row["line"], row["reason"], row["row"], row.get("hint"))


def find_source(name: str, form: str = "auto", stop_on_bad_row: bool = True) -> Source:
    """The files that `name` means and the shape of their rows, which the first row decides unless it is named."""
    files = find_files(name)
    if form in SHAPES:
        return Source(name, files, form)
    seen, first = 0, None
    for chunk in chunks(files):
        for row in rows(chunk):
            seen += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                return Source(name, files, shape_of(row))
            except BadRow as error:
                first = first or error
                if stop_on_bad_row or seen >= ROWS_TO_RECOGNISE:
                    raise
    if first is not None:
        raise DataError(f"{name}: no rows of a known shape", f"the first: {first}")
    raise DataError(f"{name}: no rows", "there is nothing to train on")


def open_cache(
    source: Source, recipe: Recipe, settings: BuildSettings, console: Console, max_rows: int | None = None
) -> TokenCache:
    """The cache of `source`, built first where it is not there yet."""
    identities = _identities(source)
    key = _key(source, recipe, max_rows, settings.cache_dir)
    folder = settings.cache_dir / key[:32]
    if not _is_whole(folder):
        lock = settings.cache_dir / f"{key[:32]}.lock"
        if is_locked(lock):
            console.say(f"waiting for another process that tokenizes {source.name}")
        with locked(lock):
            # Another process may have built it while this one waited for the lock.
            if not _is_whole(folder):
                if folder.exists():
                    console.warn(f"{folder} is damaged; building it again")
                _Build(source, recipe, settings, console, max_rows, key, folder, identities).run()
    else:
        console.say(f"using the tokenized {source.name} in {folder}")
    cache = TokenCache(folder, source)
    if cache.counts.bad_rows and settings.stop_on_bad_row:
        raise cache.first_bad_row()
    return cache


def _key(source: Source, recipe: Recipe, max_rows: int | None, cache_dir: Path) -> str:
    decides: dict[str, Any] = {
        "contents": [content_hash(path, cache_dir / "hashes") for name in source.files for path in real_files(name)],
        "recipe": dataclasses.asdict(recipe),
        "max_rows": max_rows,
        "code": [CODE_VERSION, version("tokenizers")],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _identities(source: Source) -> list[list[int]]:
    return [identity(path) for name in source.files for path in real_files(name)]


class _Build:
    """One cache being built. All it has so far is in its folder, and the journal says how much of that counts."""

    def __init__(
        self, source: Source, recipe: Recipe, settings: BuildSettings, console: Console, max_rows: int | None,
        key: str, final: Path, identities: list[list[int]],
    ) -> None:  # fmt: skip
        self.source, self.recipe, self.settings, self.console = source, recipe, settings, console
        self.max_rows, self.key, self.final, self.identities = max_rows, key, final, identities
        self.work = hidden(final, "partial")
        self.counts, self.position = Counts(), Position()
        self.checksums = dict.fromkeys(FILES, 0)
        self.sizes = dict.fromkeys(FILES, 0)

    def run(self) -> None:
        self._go_on_or_begin()
        self._write_all()
        self._finish()

    def _go_on_or_begin(self) -> None:
        total = sum(map(size_on_disk, self.source.files))
        count = len(self.source.files)
        what = f"{self.source.name} ({count} file{'s' if count != 1 else ''}, {total / 1e6:.1f} MB)"
        if self._take_up_journal():
            self.console.say(f"going on with tokenizing {what} into {self.final}, after {self.counts.rows} rows")
            return
        shutil.rmtree(self.work, ignore_errors=True)
        self._remove_abandoned()
        self.work.mkdir(parents=True)
        for name in FILES:
            (self.work / name).touch()
        self.console.say(f"tokenizing {what} into {self.final}")

    def _remove_abandoned(self) -> None:
        """Begun for the same source as it was before, and never finished: its rows are different now."""
        for journal in self.work.parent.glob(".*.partial/journal.json"):
            lock = journal.parent.with_name(f"{journal.parent.name[1:].removesuffix('.partial')}.lock")
            if _read_json(journal).get("source") == self.source.name and not is_locked(lock):
                shutil.rmtree(journal.parent)

    def _take_up_journal(self) -> bool:
        """What was written after the last entry of the journal is cut off; it will be written again."""
        journal = _read_json(self.work / "journal.json")
        sizes = journal.get("sizes", {})
        if journal.get("key") != self.key or any((self.work / n).stat().st_size < size for n, size in sizes.items()):
            return False
        for name, size in sizes.items():
            os.truncate(self.work / name, size)
        self.sizes, self.checksums = sizes, journal["checksums"]
        self.counts, self.position = Counts(**journal["counts"]), Position(*journal["position"])
        return True

    def _write_all(self) -> None:
        files: dict[str, IO[bytes]] = {name: (self.work / name).open("ab") for name in FILES}
        before = np.cumsum([0, *map(size_on_disk, self.source.files)])
        last_entry = time.monotonic()
        try:
            with self.console.progress(f"tokenizing {self.source.title}", int(before[-1])) as progress:
                for chunk, part in self._parts():
                    if part.bad and self.settings.stop_on_bad_row:
                        self._enter(files)
                        line, reason, hint, raw = part.bad[0]
                        raise BadRow(chunk.path, line, reason, raw, hint)
                    self._write(chunk, part, files)
                    self.position = chunk.end
                    progress(int(before[chunk.end.file]) + chunk.done, f"{self.counts.rows:,} rows")
                    if time.monotonic() - last_entry >= JOURNAL_SECONDS:
                        self._enter(files)
                        last_entry = time.monotonic()
        finally:
            for file in files.values():
                file.close()

    def _parts(self) -> Iterator[tuple[Chunk, Part]]:
        todo = self._limited(chunks(self.source.files, self.position))
        left = sum(map(size_on_disk, self.source.files[self.position.file :]))
        count = self.settings.workers or _cores()
        # A template's time limit needs a main thread; a process always has one.
        here = threading.current_thread() is threading.main_thread() and left < BYTES_FOR_WORKERS
        if here or self.settings.workers == 0:
            encoder = Encoder(self.recipe)
            for chunk in todo:
                yield chunk, encoder.chunk(chunk)
            return
        workers = Workers(self.recipe, count)
        try:
            yield from workers.encode(todo)
        finally:
            workers.close()

    def _limited(self, todo: Iterator[Chunk]) -> Iterator[Chunk]:
        if self.max_rows is None:
            yield from todo
            return
        left = self.max_rows - self.counts.rows
        for chunk in todo:
            if left <= 0:
                return
            count = row_count(chunk)
            yield chunk if count <= left else first_rows(chunk, left)
            left -= count

    def _write(self, chunk: Chunk, part: Part, files: dict[str, IO[bytes]]) -> None:
        self.counts.add(part.counts)
        arrays = {
            "ids.bin": part.ids,
            "labels.bin": part.labels,
            "lengths.bin": part.lengths.astype(np.uint32),
            "loss_tokens.bin": part.loss_tokens.astype(np.uint32),
            "origins.bin": part.lines + chunk.end.file * LINES_PER_FILE,
        }
        written = {name: array.tobytes() for name, array in arrays.items() if array is not None}
        bad = [
            {"file": str(chunk.path), "line": b.line, "reason": b.reason, "hint": b.hint, "row": b.raw}
            for b in part.bad
        ]
        written[QUARANTINE] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad).encode()
        for name, data in written.items():
            files[name].write(data)
            self.sizes[name] += len(data)
            self.checksums[name] = zlib.crc32(data, self.checksums[name])

    def _enter(self, files: dict[str, IO[bytes]]) -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        entry = {
            "key": self.key,
            "source": self.source.name,
            "position": self.position,
            "sizes": self.sizes,
            "checksums": self.checksums,
            "counts": dataclasses.asdict(self.counts),
        }
        write_text(self.work / "journal.json", json.dumps(entry))

    def _finish(self) -> None:
        if self.identities != _identities(self.source):
            shutil.rmtree(self.work)
            raise DataError(f"{self.source.name} was changed while it was read", "start again when it is whole")
        lengths = np.fromfile(self.work / "lengths.bin", dtype=np.uint32)
        np.save(self.work / "offsets.npy", np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
        self.checksums["offsets.npy"] = _checksum(self.work / "offsets.npy")
        meta = {
            "key": self.key,
            "shape": self.source.shape,
            "id_type": self.recipe.id_type.name,
            "has_labels": self.recipe.has_labels,
            "source": self.source.name,
            "files": [str(path) for path in self.source.files],
            "counts": dataclasses.asdict(self.counts),
            "checksums": self.checksums,
        }
        write_text(self.work / "meta.json", json.dumps(meta, indent=2) + "\n")
        for path in self.work.iterdir():
            sync(path)
        sync(self.work)
        take_place(self.work, self.final)
        (self.final / "journal.json").unlink(missing_ok=True)
        _note_checked(self.final, list(self.checksums))


def _read_json(path: Path) -> dict[str, Any]:
    """What cannot be read says nothing."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _cores() -> int:
    """The cores this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_whole(folder: Path) -> bool:
    """There, and every file what it was when it was written. One that has not been touched since is not read again."""
    try:
        checksums = json.loads((folder / "meta.json").read_text())["checksums"]
        if _untouched(folder, checksums):
            return True
        whole = all(_checksum(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if whole:
        _note_checked(folder, list(checksums))
    return whole


def _untouched(folder: Path, names: dict[str, int]) -> bool:
    note = folder / "checked.json"
    if not note.is_file():
        return False
    checked = json.loads(note.read_text())
    return all(checked.get(name) == identity(folder / name) for name in names)


def _note_checked(folder: Path, names: list[str]) -> None:
    if os.access(folder, os.W_OK):
        write_text(folder / "checked.json", json.dumps({name: identity(folder / name) for name in names}))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _mapped(path: Path, kind: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")
