"""The token cache on disk: built once, memory-mapped by every process, never stale.

Its key is a hash of everything that decides the contents: the bytes of the files, the tokenizer and its template, the
loss mask, the length limit, the number of rows, and the version of this code. A cache is built under a lock in a
temporary folder and renamed when complete, so a reader sees all of it or nothing. During the build, a journal records
the progress every two seconds, and a killed build resumes from there. Ids take 2 bytes per token (4 if the vocabulary
is larger than 65,536); labels take 4 more unless they are the ids.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchstone.atomic import (
    file_lock,
    fsync,
    is_locked,
    read_json_or_empty,
    replace_folder,
    temporary_path,
    write_text,
)
from torchstone.cpu_cores import usable_cores
from torchstone.data.content_hash import content_hash, file_identity, known_hash
from torchstone.data.encode import EncodedChunk, Encoder, EncodingConfig, RowCounts, TokenSequence
from torchstone.data.formats import ROW_FORMATS, RowFormat, detect_format
from torchstone.data.sources import (
    NO_COLUMNS,
    OPTIONAL_COLUMNS,
    BadRow,
    Chunk,
    ReadPosition,
    check_columns,
    content_files,
    count_rows,
    file_type,
    find_files,
    parse_rows,
    read_chunks,
    size_on_disk,
    truncate_chunk,
)
from torchstone.data.tokenizer_pool import TokenizerPool
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console

# Increased whenever the same rows would give different tokens, or the layout of the files changes.
CODE_VERSION = 2
# Increased if only conversations give other tokens, so that runs on other data can still be resumed.
CHAT_VERSION = 2
JOURNAL_SECONDS = 2.0
# Below this, starting processes takes longer than tokenizing.
MIN_POOL_BYTES = 4_000_000
MAX_DETECTION_ROWS = 1000
LINES_PER_FILE = 1 << 40
BAD_ROWS_FILE = "bad-rows.jsonl"
SKIP_HINT = "--data.on_bad_row skip leaves such rows out and counts them"
# For a row without a good one before it.
FIRST_ROW_HINT = f"if all rows are like this one, data.format or data.columns is wrong; otherwise, {SKIP_HINT}"
FILES = (
    "ids.bin", "labels.bin", "lengths.bin", "row_lengths.bin", "loss_tokens.bin", "origins.bin", BAD_ROWS_FILE,
)  # fmt: skip


@dataclass(frozen=True)
class DataSource:
    """One entry of `data.path`: its files, the format of their rows, and our names for their columns.

    `notes` say what was left out of a folder.
    """

    name: str
    files: list[Path]
    row_format: RowFormat
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read_chunks(self, start: ReadPosition = ReadPosition()) -> Iterator[Chunk]:  # noqa: B008
        return read_chunks(self.files, start, self.row_format == "lines", self.columns)

    @property
    def num_texts(self) -> int | None:
        """The number of text files whose pieces are the rows; None if rows are something else."""
        is_text = self.row_format == "text" and all(file_type(path) == ".txt" for path in self.files)
        return len(self.files) if is_text else None

    @property
    def title(self) -> str:
        return Path(self.name).name or self.name


@dataclass(frozen=True)
class CacheOptions:
    """How a cache is built. Nothing here changes its contents."""

    cache_dir: Path
    num_processes: int | None = None
    stop_on_bad_row: bool = True
    # Caches of version 0.1 do not have them; they are then built again.
    needs_row_lengths: bool = False


class TokenCache:
    """Sequences of ids and labels in memory-mapped files."""

    def __init__(self, folder: Path, source: DataSource) -> None:
        self.folder, self.source = folder, source
        meta = json.loads((folder / "meta.json").read_text())
        self.key: str = meta["key"]
        self.row_format: RowFormat = source.row_format
        self.counts = RowCounts(**meta["counts"])
        self.offsets: np.ndarray = np.load(folder / "offsets.npy", mmap_mode="r")
        self.lengths = _memmap(folder / "lengths.bin", np.dtype(np.uint32))
        self.loss_tokens = _memmap(folder / "loss_tokens.bin", np.dtype(np.uint32))
        self.origins = _memmap(folder / "origins.bin", np.dtype(np.int64))
        self.ids = _memmap(folder / "ids.bin", np.dtype(meta["id_type"]))
        self.labels = _memmap(folder / "labels.bin", np.dtype(np.int32)) if meta["has_labels"] else self.ids

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling maps the files again."""
        return TokenCache, (self.folder, self.source)

    def sequence(self, index: int, start: int = 0, stop: int | None = None) -> TokenSequence:
        """Sequence `index`, or its tokens from `start` to `stop`."""
        low, high = int(self.offsets[index]), int(self.offsets[index + 1])
        part = slice(low + start, high if stop is None else low + stop)
        return TokenSequence(self.ids[part].astype(np.int64), self.labels[part].astype(np.int64))

    def origin(self, index: int) -> str:
        """`file:line` of the row that sequence `index` came from."""
        file, line = divmod(int(self.origins[index]), LINES_PER_FILE)
        return f"{self.source.files[file]}:{line}"

    @property
    def row_lengths(self) -> np.ndarray:
        """The tokens of every good row before it was cut or dropped; with `needs_row_lengths` every cache has them."""
        return _memmap(self.folder / "row_lengths.bin", np.dtype(np.uint32))

    @property
    def bad_rows_path(self) -> Path:
        return self.folder / BAD_ROWS_FILE

    def check_trainable(self, unknown_tokens: Sequence[str] = ()) -> None:
        """Raises DataError if no token would be trained on. `unknown_tokens`: those of the chat template that are not
        single tokens of the tokenizer: rows become longer.

        Training on nothing looks like training: it runs, and the loss stays where it was.
        """
        counts = self.counts
        if counts.trained_tokens == 0:
            path = self.folder / "row_lengths.bin"
            longest = f" (up to {self.row_lengths.max()} tokens)" if counts.dropped_long and path.is_file() else ""
            has_others = counts.rows > counts.dropped_long + counts.bad_rows
            hint = f"{counts.dropped_long} are longer than data.context_length{longest}, {counts.bad_rows} are bad"
            hint += f", such as {next(self.bad_rows()).message}" if counts.bad_rows else ""
            hint += "; torchstone inspect-data shows the others" if has_others else ""
            if unknown_tokens:
                verb = "is not a single token" if len(unknown_tokens) == 1 else "are not single tokens"
                hint = (
                    f"the chat template writes {', '.join(unknown_tokens)}, which {verb} of this tokenizer: set a "
                    f"--data.chat_template that fits it, or leave it out to use the tokenizer's own; {hint}"
                )
            raise DataError(f"{self.source.name}: none of its {counts.rows} rows has a token to train on", hint)

    def bad_rows(self) -> Iterator[BadRow]:
        with self.bad_rows_path.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                yield BadRow(Path(row["file"]), row["line"], row["reason"], row["row"], row.get("hint"))


def columns_per_path(columns: Sequence[Mapping[Any, str]], names: Sequence[str]) -> Sequence[Mapping[str, str]]:
    """The column mapping of each path; `columns` has none, one for all paths, or one per path."""
    if len(columns) > 1 and len(columns) != len(names):
        raise UsageError(
            f"there are {len(columns)} column mappings for {len(names)} paths", "give one for all, or one per path"
        )
    return columns if len(columns) > 1 else [*columns, {}][:1] * len(names)


def open_source(
    name: str,
    row_format: str = "auto",
    stop_on_bad_row: bool = True,
    columns: Mapping[str, str] = NO_COLUMNS,
    cache_dir: Path | None = None,
) -> DataSource:
    """Returns the files of `name` and their row format, which `auto` detects from the first good row."""
    notes: list[str] = []
    files = find_files(name, cache_dir, notes.append)
    if row_format == "lines" and (others := [path for path in files if file_type(path) != ".txt"]):
        raise UsageError(f"{others[0]}: data.format lines is for .txt files", "use --data.format auto")
    if columns.keys() & OPTIONAL_COLUMNS:
        _check_optional_columns(files[0], columns)
    if row_format in ROW_FORMATS:
        return DataSource(name, files, row_format, dict(columns), notes)
    rows_read, first_error = 0, None
    for chunk in read_chunks(files, columns=columns):
        for row in parse_rows(chunk, columns):
            rows_read += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                return DataSource(name, files, detect_format(row, columns), dict(columns), notes)
            except BadRow as error:
                first_error = first_error or error
                if stop_on_bad_row or rows_read >= MAX_DETECTION_ROWS:
                    # The first row shows best what is wrong with all of them.
                    raise first_error from None
    if first_error is not None:
        raise DataError(f"{name}: no row has a known format", f"the first error: {first_error}")
    raise DataError(f"{name}: the data is empty", "check data.path")


def _check_optional_columns(path: Path, columns: Mapping[str, str]) -> None:
    """Raises DataError if none of the first rows has an optional column; a row may leave it out. Tables know theirs."""
    chunk = next(read_chunks([path], columns=columns), None)
    if chunk is not None and chunk.kind == "lines":
        keys = dict.fromkeys(key for row in parse_rows(chunk) if not isinstance(row, BadRow) for key in row.value)
        check_columns(columns, keys, f"{path}: ")


def open_cache(
    source: DataSource, encoding: EncodingConfig, options: CacheOptions, console: Console, max_rows: int | None = None
) -> TokenCache:
    """Returns the cache of `source`, and builds it first if it does not exist."""
    identities = _file_identities(source)
    key = _cache_key(source, encoding, max_rows, options.cache_dir)
    folder = options.cache_dir / key[:32]
    if not _is_intact(folder, encoding, options.needs_row_lengths):
        lock = options.cache_dir / f"{key[:32]}.lock"
        if is_locked(lock):
            console.info(f"waiting for another process that tokenizes {source.name}")
        with file_lock(lock):
            # Another process may have built it while this one waited for the lock.
            if not _is_intact(folder, encoding, options.needs_row_lengths):
                if folder.exists():
                    console.warn(f"{folder} is damaged, or of an earlier version; building it again")
                _CacheBuilder(source, encoding, options, console, max_rows, key, folder, identities).build()
    else:
        console.info(f"using the token cache of {source.name} in {folder}")
    cache = TokenCache(folder, source)
    if cache.counts.bad_rows and options.stop_on_bad_row:
        raise next(cache.bad_rows()).with_hint(SKIP_HINT)
    return cache


def has_cache(source: DataSource, encoding: EncodingConfig, cache_dir: Path, max_rows: int | None = None) -> bool:
    """Whether `open_cache` would find the cache, as far as that is known without reading the data."""
    files = [path for name in source.files for path in content_files(name)]
    if any(known_hash(path, cache_dir / "hashes") is None for path in files):
        return False
    return (cache_dir / _cache_key(source, encoding, max_rows, cache_dir)[:32] / "meta.json").is_file()


def _cache_key(source: DataSource, encoding: EncodingConfig, max_rows: int | None, cache_dir: Path) -> str:
    hashes = [content_hash(path, cache_dir / "hashes") for name in source.files for path in content_files(name)]
    inputs: dict[str, Any] = {
        "contents": hashes,
        "recipe": encoding.cache_key(),
        "max_rows": max_rows,
        "code": [CODE_VERSION, version("tokenizers"), *([] if encoding.template is None else [CHAT_VERSION])],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _file_identities(source: DataSource) -> list[list[int]]:
    return [file_identity(path) for name in source.files for path in content_files(name)]


class _CacheBuilder:
    """Builds one cache. Everything is written to its temporary folder; the journal says how much of it is valid."""

    def __init__(
        self,
        source: DataSource,
        encoding: EncodingConfig,
        options: CacheOptions,
        console: Console,
        max_rows: int | None,
        key: str,
        final: Path,
        identities: list[list[int]],
    ) -> None:
        self.source, self.encoding, self.options, self.console = source, encoding, options, console
        self.max_rows, self.key, self.final, self.identities = max_rows, key, final, identities
        self.work = temporary_path(final, "partial")
        self.counts, self.position = RowCounts(), ReadPosition()
        self.checksums = dict.fromkeys(FILES, 0)
        self.sizes = dict.fromkeys(FILES, 0)

    def build(self) -> None:
        self._start_or_resume()
        self._write_chunks()
        self._commit()

    def _start_or_resume(self) -> None:
        total = sum(map(size_on_disk, self.source.files))
        count = len(self.source.files)
        title = f"{self.source.name} ({count} file{'s' if count != 1 else ''}, {total / 1e6:.1f} MB)"
        if self._restore_journal():
            self.console.info(f"resuming the tokenization of {title} into {self.final}, after {self.counts.rows} rows")
            return
        shutil.rmtree(self.work, ignore_errors=True)
        self._remove_abandoned()
        self.work.mkdir(parents=True)
        for name in FILES:
            (self.work / name).touch()
        self.console.info(f"tokenizing {title} into {self.final}")

    def _remove_abandoned(self) -> None:
        """Removes unfinished builds of an earlier version of the same source."""
        for journal in self.work.parent.glob(".*.partial/journal.json"):
            lock = journal.parent.with_name(f"{journal.parent.name[1:].removesuffix('.partial')}.lock")
            if read_json_or_empty(journal).get("source") == self.source.name and not is_locked(lock):
                shutil.rmtree(journal.parent)

    def _restore_journal(self) -> bool:
        """Returns to the last journal entry and cuts off what was written after it; False if no entry is valid."""
        journal = read_json_or_empty(self.work / "journal.json")
        sizes = journal.get("sizes", {})
        if journal.get("key") != self.key or sizes.keys() != {*FILES}:
            return False
        if any((self.work / n).stat().st_size < size for n, size in sizes.items()):
            return False
        for name, size in sizes.items():
            os.truncate(self.work / name, size)
        self.sizes, self.checksums = sizes, journal["checksums"]
        self.counts, self.position = RowCounts(**journal["counts"]), ReadPosition(*journal["position"])
        return True

    def _write_chunks(self) -> None:
        files: dict[str, IO[bytes]] = {name: (self.work / name).open("ab") for name in FILES}
        file_starts = np.cumsum([0, *map(size_on_disk, self.source.files)])
        last_entry = time.monotonic()
        try:
            with self.console.progress(f"tokenizing {self.source.title}", int(file_starts[-1])) as progress:
                for chunk, encoded in self._encode_chunks():
                    if encoded.bad_rows and self.options.stop_on_bad_row:
                        self._write_journal(files)
                        line, reason, hint, raw = encoded.bad_rows[0]
                        is_first = not (len(encoded.lengths) or self.counts.sequences)
                        skip_hint = FIRST_ROW_HINT if is_first else SKIP_HINT
                        raise BadRow(chunk.path, line, reason, raw, hint).with_hint(skip_hint)
                    self._write_chunk(chunk, encoded, files)
                    self.position = chunk.end
                    progress(int(file_starts[chunk.end.file]) + chunk.bytes_done, f"{self.counts.rows:,} rows")
                    if time.monotonic() - last_entry >= JOURNAL_SECONDS:
                        self._write_journal(files)
                        last_entry = time.monotonic()
        finally:
            for file in files.values():
                file.close()

    def _encode_chunks(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        chunks = self._limit_rows(self.source.read_chunks(self.position))
        bytes_left = sum(map(size_on_disk, self.source.files[self.position.file :]))
        # The time limit of a template needs a main thread, which every process of a pool has.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self.options.num_processes == 0 or (is_main_thread and bytes_left < MIN_POOL_BYTES):
            encoder = Encoder(self.encoding, self.options.stop_on_bad_row)
            for chunk in chunks:
                yield chunk, encoder.encode_chunk(chunk)
            return
        num_processes = self.options.num_processes or usable_cores()
        pool = TokenizerPool(self.encoding, num_processes, self.options.stop_on_bad_row)
        try:
            yield from pool.encode(chunks)
        finally:
            pool.close()

    def _limit_rows(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        if self.max_rows is None:
            yield from chunks
            return
        rows_left = self.max_rows - self.counts.rows
        for chunk in chunks:
            if rows_left <= 0:
                return
            count = count_rows(chunk)
            yield chunk if count <= rows_left else truncate_chunk(chunk, rows_left)
            rows_left -= count

    def _write_chunk(self, chunk: Chunk, encoded: EncodedChunk, files: dict[str, IO[bytes]]) -> None:
        self.counts.add(encoded.counts)
        arrays = {
            "ids.bin": encoded.ids,
            "labels.bin": encoded.labels,
            "lengths.bin": encoded.lengths.astype(np.uint32),
            "row_lengths.bin": encoded.row_lengths.astype(np.uint32),
            "loss_tokens.bin": encoded.loss_tokens.astype(np.uint32),
            "origins.bin": encoded.lines + chunk.end.file * LINES_PER_FILE,
        }
        contents = {name: array.tobytes() for name, array in arrays.items() if array is not None}
        bad_rows = [
            {"file": str(chunk.path), "line": b.line, "reason": b.reason, "hint": b.hint, "row": b.raw}
            for b in encoded.bad_rows
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad_rows)
        # The name of a file may not be UTF-8.
        contents[BAD_ROWS_FILE] = lines.encode(errors="backslashreplace")
        for name, data in contents.items():
            files[name].write(data)
            self.sizes[name] += len(data)
            self.checksums[name] = zlib.crc32(data, self.checksums[name])

    def _write_journal(self, files: dict[str, IO[bytes]]) -> None:
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

    def _commit(self) -> None:
        if self.identities != _file_identities(self.source):
            shutil.rmtree(self.work)
            raise DataError(f"{self.source.name} changed while it was read", "start again when it is complete")
        lengths = np.fromfile(self.work / "lengths.bin", dtype=np.uint32)
        np.save(self.work / "offsets.npy", np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
        self.checksums["offsets.npy"] = _checksum(self.work / "offsets.npy")
        meta = {
            "key": self.key,
            "shape": self.source.row_format,
            "id_type": self.encoding.id_dtype.name,
            "has_labels": self.encoding.has_labels,
            "source": self.source.name,
            "files": [str(path) for path in self.source.files],
            "counts": dataclasses.asdict(self.counts),
            "checksums": self.checksums,
        }
        write_text(self.work / "meta.json", json.dumps(meta, indent=2) + "\n")
        for path in self.work.iterdir():
            fsync(path)
        fsync(self.work)
        replace_folder(self.work, self.final)
        (self.final / "journal.json").unlink(missing_ok=True)
        _record_check(self.final, list(self.checksums))


def _is_intact(folder: Path, encoding: EncodingConfig, needs_row_lengths: bool) -> bool:
    """Whether the cache exists and its checksums are right. Files unchanged since the last check are not read again."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        checksums = meta["checksums"]
        if (meta["id_type"], meta["has_labels"]) != (encoding.id_dtype.name, encoding.has_labels):
            return False
        counts = dataclasses.asdict(RowCounts(**meta["counts"]))
        examples = counts.pop("examples")
        if not all(type(value) is int for value in counts.values()) or not all(isinstance(e, str) for e in examples):
            return False
        if needs_row_lengths and "row_lengths.bin" not in checksums:
            return False
        if _is_unchanged(folder, checksums):
            return True
        is_intact = all(_checksum(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    if is_intact:
        _record_check(folder, list(checksums))
    return is_intact


def _is_unchanged(folder: Path, names: dict[str, int]) -> bool:
    path = folder / "checked.json"
    if not path.is_file():
        return False
    identities = json.loads(path.read_text())
    return all(identities.get(name) == file_identity(folder / name) for name in names)


def _record_check(folder: Path, names: list[str]) -> None:
    if os.access(folder, os.W_OK):
        write_text(folder / "checked.json", json.dumps({name: file_identity(folder / name) for name in names}))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _memmap(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
