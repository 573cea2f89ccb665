"""Reads data files into rows that know where they came from, so that every message about a row can say `file:line`.

JSONL or a JSON array, CSV and text (plain, .gz, .zst), parquet and Hugging Face datasets folders are read as chunks,
most of about two megabytes: bytes that any process can turn into rows. Reading is one sequential pass that holds a few
chunks; parsing, the expensive part, can run in other processes. A damaged line affects only that line, as does any
error that reading a row raises.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import io
import json
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast, get_args

from torchstone import hub
from torchstone.config.schema import Column
from torchstone.data.json_array import array_lines, starts_with_array
from torchstone.data.text_files import read_pieces, read_records
from torchstone.errors import DataError, TorchstoneError, UsageError

T = TypeVar("T")
CHUNK_BYTES = 1 << 21
# A longer line is a bad row. It is not held in memory: a small compressed file can have a line of gigabytes.
MAX_LINE_BYTES = 1 << 28
CHUNK_ROWS = 1000
# Tables are read few rows at a time: a long value that occurs in every row may take a few bytes on disk.
TABLE_ROWS = 64
DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, OSError)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
COMPRESSIONS = (".gz", ".zst")
# The file types of a folder: only the first of these that occur in it are read.
FILE_TYPES: tuple[tuple[str, ...], ...] = ((".jsonl", ".json", ".ndjson", ".parquet"), (*DELIMITERS,), (".txt",))
ALL_TYPES = [name for types in FILE_TYPES for name in types]
# What a dataset on the hub is searched for. Not texts, which are often licenses; they can be named.
SUFFIXES = tuple(name + end for types in FILE_TYPES[:2] for name in types for end in ("", *COMPRESSIONS))
# The columns that row formats read (formats.py). Others are not read: Python may not even be able to represent them.
COLUMNS = set(get_args(Column))
# Columns that a row may leave out.
OPTIONAL_COLUMNS = {"labels", "len", "tools", "system", "unmask", "input", "history"}
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
UNSUPPORTED_SUFFIXES = (
    ".md", ".arrow", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".xlsx", ".pdf", ".safetensors", ".bin", ".pt",
    ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npy", ".npz", ".pkl", ".pickle",
)  # fmt: skip
MAGIC_BYTES = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
BOM = b"\xef\xbb\xbf"
SUPPORTED = f"{', '.join(ALL_TYPES)}; all but .parquet also with {' or '.join(COMPRESSIONS)}"
# What `surrogateescape` makes of bytes that are not UTF-8.
SURROGATE = re.compile("[\udc80-\udcff]")
MAX_SHOWN = 100
# A reason may have a key or a role of the row, which can be megabytes.
MAX_REASON = 1000


class BadRow(DataError):
    """A row that cannot be trained on: where it is, why, and its raw text for bad-rows.jsonl."""

    def __init__(self, path: Path, line: int, reason: str, raw: str, hint: str | None = None) -> None:
        # Strings from JSON may have lone surrogates, which can be neither printed nor written.
        reason, raw = _shorten(_encodable(reason), MAX_REASON), _encodable(raw)
        hint = hint and _shorten(_encodable(hint), MAX_REASON)
        shown = _shorten(raw.strip(), MAX_SHOWN)
        shown = shown and f"the row starts with {shown}"
        super().__init__(f"{path}:{line}: {reason}", "\n  ".join(filter(None, [shown, hint])) or None)
        self.path, self.line, self.reason, self.raw, self.row_hint = path, line, reason, raw, hint

    def with_hint(self, hint: str) -> BadRow:
        """The same error with another hint after its own."""
        return BadRow(self.path, self.line, self.reason, self.raw, "\n  ".join(filter(None, [self.row_hint, hint])))


@dataclass(frozen=True)
class Row:
    """`has_text_start` and `has_text_end` are false for a piece of a text file that lacks its start or its end."""

    path: Path
    line: int
    value: dict[str, Any]
    has_text_start: bool = True
    has_text_end: bool = True

    def error(self, reason: str, hint: str | None = None) -> BadRow:
        try:
            raw = json.dumps(self.value, default=str)
        except (RecursionError, ValueError, TypeError):
            raw = ", ".join(map(str, self.value))
        return BadRow(self.path, self.line, reason, raw, hint)


class ReadPosition(NamedTuple):
    """The end of a chunk: the index of its file, the bytes or rows of the file before it, and the next line."""

    file: int = 0
    offset: int = 0
    line: int = 1


class Chunk(NamedTuple):
    """Rows that are not parsed yet. `bytes_done` is how much of the file on disk is before its end.

    The payload of kind `csv` is the header and the records as JSON, one per line. The kind `long` is the start of a
    single line that is too long.
    """

    kind: Literal["lines", "arrow", "csv", "text", "text_lines", "long"]
    path: Path
    first_line: int
    payload: bytes
    num_rows: int | None
    end: ReadPosition
    bytes_done: int
    has_text_end: bool = True


def find_files(
    name: str, cache_dir: Path | None = None, note: Callable[[str], object] = lambda line: None
) -> list[Path]:
    """The data files of a path: the file, those of a folder, matches of a glob. A datasets folder is one file.

    Files on the hub are downloaded, unless they are in the cache. `note` gets a line about what is left out of a
    folder, such as the token cache `cache_dir`.
    """
    on_hub = hub.parse_data(name)
    if on_hub is not None:
        name = hub.data_path(hub.download_data(on_hub, SUFFIXES))
    path = Path(name)
    if path.is_dir():
        if _is_datasets_folder(path):
            return [_datasets_split(path)]
        notes: list[str] = []
        files = _files_in(path, cache_dir, notes)
        if not files:
            raise UsageError(
                f"no data files in the folder {path}", "; ".join([*notes, f"supported files: {SUPPORTED}"])
            )
        for line in notes:
            note(line)
        return files
    if path.is_file():
        if path.suffix.lower() in UNSUPPORTED_SUFFIXES:
            raise UsageError(f"{path}: {path.suffix} files are not supported", f"use one of {SUPPORTED}")
        return [path]
    if glob.has_magic(name):
        files = sorted(Path(match) for match in glob.glob(name, recursive=True) if Path(match).is_file())
        if not files:
            raise UsageError(f"no file matches {name}")
        return files
    siblings = sorted(p.name for p in path.parent.glob("*") if file_type(p) in ALL_TYPES)[:8]
    raise UsageError(
        f"data file {path} does not exist",
        f"data files in {path.parent}: {', '.join(siblings)}"
        if siblings
        else "check the path; a dataset on the hub is hub:org/name",
    )


def file_type(path: Path) -> str:
    """The suffix of a file, or the one before that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    is_compressed = len(suffixes) == 2 and suffixes[1] in COMPRESSIONS and suffixes[0] != ".parquet"
    return suffixes[0] if is_compressed else "".join(suffixes[-1:])


def read_chunks(
    files: list[Path],
    start: ReadPosition = ReadPosition(),  # noqa: B008
    text_lines: bool = False,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> Iterator[Chunk]:
    """All chunks of `files` from `start` on, in order. With `text_lines` every line of a text file is a row.

    Of a parquet file only the columns of row formats and the values of `columns` are read. Raises DataError if a table
    does not have one of `columns`.
    """
    for index in range(start.file, len(files)):
        path = files[index]
        position = start if index == start.file else ReadPosition(index)
        if path.is_dir():
            yield from _datasets_chunks(path, position, columns)
        elif path.suffix == ".parquet":
            yield from _parquet_chunks(path, position, columns)
        elif file_type(path) in DELIMITERS:
            yield from _csv_chunks(path, position, columns)
        elif file_type(path) == ".txt":
            yield from _line_chunks(path, position, "text_lines") if text_lines else _text_chunks(path, position)
        else:
            yield from (_array_chunks if _is_array(path) else _line_chunks)(path, position)


def parse_rows(chunk: Chunk, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Row | BadRow]:
    """The rows of a chunk, and a BadRow for each bad one. Blank lines are not rows.

    `columns` has our name for a column of the data: {"prompt": "question"}.
    """
    rows = _parse_rows(chunk, columns)
    if not columns:
        return rows
    return (row if isinstance(row, BadRow) else _rename_columns(row, columns) for row in rows)


def _rename_columns(row: Row, columns: Mapping[str, str]) -> Row | BadRow:
    value = row.value
    try:
        check_columns({name: c for name, c in columns.items() if name not in OPTIONAL_COLUMNS}, value)
    except DataError as error:
        return row.error(error.message, error.hint)
    others = {key: inner for key, inner in value.items() if key not in columns.values()}
    renamed = {name: value[column] for name, column in columns.items() if column in value}
    return replace(row, value=others | renamed)


def check_columns(columns: Mapping[str, str], keys: Collection[str], prefix: str = "") -> None:
    """Raises DataError if one of `columns` is not in `keys`."""
    for name, column in columns.items():
        if column not in keys:
            similar = difflib.get_close_matches(column, keys, n=1)
            raise DataError(
                f"{prefix}data.columns takes {name} from {column!r}, but the keys are "
                + _shorten(", ".join(keys) or "none", MAX_REASON),
                f"did you mean {name}={similar[0]}?" if similar else None,
            )


def _parse_rows(chunk: Chunk, columns: Mapping[str, str]) -> Iterator[Row | BadRow]:
    if chunk.kind == "arrow":
        yield from _arrow_rows(chunk, columns)
    elif chunk.kind == "csv":
        yield from _csv_rows(chunk)
    elif chunk.kind == "text":
        yield from _text_rows(chunk)
    elif chunk.kind == "long":
        beginning = chunk.payload.decode("utf-8", "backslashreplace")
        yield BadRow(chunk.path, chunk.first_line, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", beginning)
    else:
        parse = _parse_line if chunk.kind == "lines" else _parse_text_line
        for line, raw in enumerate(_split_lines(chunk.payload), start=chunk.first_line):
            if _is_row(raw):
                yield parse(raw.removeprefix(BOM), chunk.path, line)


def read_row(row: Row, read: Callable[[Row], T]) -> T:
    """Returns `read(row)`. Raises BadRow for any exception that is not ours: a row must not stop the others."""
    try:
        return read(row)
    except (TorchstoneError, MemoryError):
        raise
    except Exception as error:
        raise row.error(f"cannot be read: {type(error).__name__}: {_one_line(error)}") from None


def count_rows(chunk: Chunk) -> int:
    """The number of rows, good or bad."""
    return chunk.num_rows if chunk.num_rows is not None else sum(map(_is_row, _split_lines(chunk.payload)))


def truncate_chunk(chunk: Chunk, count: int) -> Chunk:
    """A chunk with only the first `count` rows."""
    if chunk.kind == "arrow":
        import pyarrow as pa

        table = pa.ipc.open_stream(chunk.payload).read_all().slice(0, count)
        return chunk._replace(payload=_arrow_bytes(table), num_rows=count)
    if chunk.kind == "csv":
        return chunk._replace(payload=b"\n".join(chunk.payload.split(b"\n")[: count + 1]), num_rows=count)
    lines, rows = [], 0
    for raw in _split_lines(chunk.payload):
        if rows == count:
            break
        rows += _is_row(raw)
        lines.append(raw)
    return chunk._replace(payload=b"\n".join(lines))


def size_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*.arrow"))


def content_files(path: Path) -> list[Path]:
    """The files whose bytes make up a data file: itself, or those of a datasets folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".arrow", ".json"))


def _is_row(raw: bytes) -> bool:
    return bool(raw.removeprefix(BOM).strip())


def _files_in(folder: Path, cache_dir: Path | None, notes: list[str]) -> list[Path]:
    """The data files of a folder at any depth, of one group of types. Hidden and output folders are left out."""
    found, left_out = list[Path](), list[Path]()
    for name, subfolders, files in os.walk(folder, onerror=_raise):
        parent = Path(name)
        is_cache = cache_dir is not None and cache_dir.exists() and parent.samefile(cache_dir)
        kind = "a token cache" if is_cache else _output_kind(parent, files)
        if kind:
            notes.append(f"{folder}: left out {parent}, which is {kind}")
            subfolders.clear()
            continue
        for path in (parent / entry for entry in files):
            is_hidden, is_data = path.name.startswith("."), file_type(path) in ALL_TYPES
            if is_data and not is_hidden and not path.exists():
                raise UsageError(f"{path} is a broken link", "restore what it points to, or remove it")
            (found if is_data and not is_hidden and path.is_file() else left_out).append(path)
        # A link to a folder is not followed: it may lead back here.
        left_out += [p for p in (parent / entry for entry in subfolders) if p.name.startswith(".") or p.is_symlink()]
        subfolders[:] = [entry for entry in subfolders if not entry.startswith(".")]
    if left_out:
        notes.append(
            f"{folder}: left out {len(left_out)} hidden entries, links to folders and files of other types, such as "
            f"{', '.join(map(str, left_out[:3]))}"
        )
    by_group = [sorted(path for path in found if file_type(path) in types) for types in FILE_TYPES]
    chosen = next((files for files in by_group if files), [])
    others = [path for files in by_group if files is not chosen for path in files]
    if others:
        types = sorted({file_type(path) for path in others})
        notes.append(
            f"{folder}: left out {len(others)} {', '.join(types)} files, such as {others[0]}: the folder has "
            f"{file_type(chosen[0])} files (use a glob to read the others)"
        )
    return chosen


def _raise(error: OSError) -> None:
    raise error


def _output_kind(folder: Path, files: list[str]) -> str | None:
    """What a folder is if a command of this package wrote it."""
    if any(folder.glob("*/ids.bin")):
        return "a token cache"
    if {"config.json", "metrics.jsonl"} <= {*files}:
        return "a run"
    has_weights = "config.json" in files and any(name.endswith(".safetensors") for name in files)
    return (
        "a model" if has_weights else "a tokenizer" if {"tokenizer.json", "tokenizer_config.json"} <= {*files} else None
    )


def _line_chunks(path: Path, start: ReadPosition, kind: Literal["lines", "text_lines"] = "lines") -> Iterator[Chunk]:
    """Seeks in a plain file; reads a compressed one again up to `start`, which is fast."""
    line, offset = start.line, start.offset
    with path.open("rb") as raw:
        stream = _decompress(path, raw)
        try:
            _skip(stream, offset)
            while True:
                payload, long_line, long_size = _read_whole_lines(stream)
                if payload:
                    first, offset, line = line, offset + len(payload), line + len(_split_lines(payload))
                    yield Chunk(kind, path, first, payload, None, ReadPosition(start.file, offset, line), raw.tell())
                if long_line:
                    first, offset, line = line, offset + long_size, line + 1
                    yield Chunk("long", path, first, long_line, 1, ReadPosition(start.file, offset, line), raw.tell())
                if not payload and not long_line:
                    return
        except DECOMPRESSION_ERRORS as error:
            raise _damaged_file(path, line - 1, error) from None


def _array_chunks(path: Path, start: ReadPosition) -> Iterator[Chunk]:
    """The elements of a JSON array as lines. Resuming reads the file again up to `start`."""
    number, lines, size = 0, list[bytes](), 0

    def chunk() -> Chunk:
        end = ReadPosition(start.file, number, number + 1)
        return Chunk("lines", path, number - len(lines) + 1, b"\n".join(lines), None, end, raw.tell())

    with path.open("rb") as raw:
        try:
            for number, element in enumerate(array_lines(_decompress(path, raw)), start=1):
                if number > start.offset:
                    lines.append(element)
                    size += len(element)
                if len(lines) == CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield chunk()
                    lines, size = [], 0
            if lines:
                yield chunk()
        except DECOMPRESSION_ERRORS as error:
            raise _damaged_file(path, number, error) from None
        except ValueError as error:
            raise DataError(f"{path}:{number + 1}: not a JSON array after element {number}: {error}") from None


def _text_chunks(path: Path, start: ReadPosition) -> Iterator[Chunk]:
    """One chunk for each piece of the text."""
    _check_beginning(path)
    line, offset = start.line, start.offset
    with path.open("rb") as raw:
        stream = _decompress(path, raw)
        try:
            _skip(stream, offset)
            for piece, is_last in read_pieces(stream):
                # A blank file has no row. A blank piece of another file belongs to its text.
                is_row = offset > 0 or not is_last or _is_row(piece)
                first, offset, line = line, offset + len(piece), line + piece.count(b"\n")
                end = ReadPosition(start.file, offset, line)
                yield Chunk("text", path, first, piece, int(is_row), end, raw.tell(), is_last)
        except DECOMPRESSION_ERRORS as error:
            raise _damaged_file(path, line - 1, error) from None


def _csv_chunks(path: Path, start: ReadPosition, columns: Mapping[str, str]) -> Iterator[Chunk]:
    """Resuming reads the file again up to `start`."""
    _check_beginning(path)
    number, line, lines = 0, 0, list[str]()

    def chunk() -> Chunk:
        end = ReadPosition(start.file, number, line + 1)
        return Chunk("csv", path, line, "\n".join([header, *lines]).encode(), len(lines), end, raw.tell())

    with path.open("rb") as raw:
        try:
            # The name keeps the stream open until the last chunk is made.
            stream = _decompress(path, raw)
            records = read_records(stream, DELIMITERS[file_type(path)])
            names = _csv_header(path, next(records, (1, "the file is empty: it needs a header"))[1])
            check_columns(columns, names, f"{path}: ")
            header = json.dumps(names)
            size = 0
            for number, (line, fields) in enumerate(records, start=1):
                if number <= start.offset:
                    continue
                lines.append(json.dumps([line, fields]))
                size += len(lines[-1])
                if len(lines) == CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield chunk()
                    lines, size = [], 0
            if lines:
                yield chunk()
        except DECOMPRESSION_ERRORS as error:
            raise _damaged_file(path, line, error) from None
        except ValueError as error:
            raise DataError(f"{path}: after line {line}: {error}") from None


def _csv_header(path: Path, fields: list[str] | str) -> list[str]:
    if isinstance(fields, str):
        raise DataError(f"{path}:1: {fields}")
    repeated = sorted(name for name, count in Counter(fields).items() if name and count > 1)
    if repeated or SURROGATE.search("".join(fields)):
        raise DataError(f"{path}:1: the header {f'has {repeated[0]!r} twice' if repeated else 'is not UTF-8'}")
    return fields


def _csv_rows(chunk: Chunk) -> Iterator[Row | BadRow]:
    header, *records = map(json.loads, chunk.payload.split(b"\n"))
    for line, fields in records:
        reason = None
        if isinstance(fields, str):
            reason, fields = fields, None
        elif len(fields) != len(header):
            reason = f"{len(fields)} fields, but the header has {len(header)}"
        elif SURROGATE.search("".join(fields)):
            reason = "not UTF-8"
        if reason is None:
            yield Row(chunk.path, line, dict(zip(header, fields, strict=True)))
        else:
            yield BadRow(chunk.path, line, reason, "" if fields is None else json.dumps(fields))


def _text_rows(chunk: Chunk) -> Iterator[Row | BadRow]:
    if not chunk.num_rows:
        return
    start = chunk.end.offset - len(chunk.payload)
    payload = chunk.payload if start else chunk.payload.removeprefix(BOM)
    try:
        yield Row(chunk.path, chunk.first_line, {"text": payload.decode()}, start == 0, chunk.has_text_end)
    except UnicodeDecodeError as error:
        line = chunk.first_line + payload.count(b"\n", 0, error.start)
        raw = payload[max(0, error.start - 50) : error.start + 50].decode("utf-8", "backslashreplace")
        yield BadRow(chunk.path, line, f"not UTF-8 at byte {chunk.end.offset - len(payload) + error.start}", raw)


def _parse_text_line(raw: bytes, path: Path, line: int) -> Row | BadRow:
    try:
        return Row(path, line, {"text": raw.decode().removesuffix("\r")})
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start} of the line"
        return BadRow(path, line, reason, raw.decode("utf-8", "backslashreplace"))


def _is_array(path: Path) -> bool:
    """Whether a file has a JSON array, not lines. Raises DataError for a binary file, if its name is not one of JSON:
    then NUL bytes are damaged rows."""
    beginning = _check_beginning(path)
    if b"\0" in beginning[:1024] and file_type(path) not in ALL_TYPES:
        raise DataError(f"{path}: is a binary file, which is not supported", f"use one of {SUPPORTED}")
    return starts_with_array(beginning)


def _check_beginning(path: Path) -> bytes:
    """The first bytes of a text file. Raises DataError for UTF-16, and for compressed data without its suffix."""
    with path.open("rb") as raw:
        try:
            beginning = _decompress(path, raw).read(1 << 12)
        except DECOMPRESSION_ERRORS as error:
            raise _damaged_file(path, 0, error) from None
    if beginning[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path}: is UTF-16 (byte order mark), but it must be UTF-8",
            f"iconv -f UTF-16 -t UTF-8 {shlex.quote(path.name)} > NEW{file_type(path)}",
        )
    for magic, suffix in MAGIC_BYTES.items():
        if beginning.startswith(magic):
            raise DataError(f"{path}: its contents are {suffix} data", f"rename it to end in {suffix}")
    return beginning


def _damaged_file(path: Path, line: int, error: BaseException) -> BaseException:
    """The error for a damaged compressed file; an error of the operating system stays as it is."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{path}: damaged or truncated after line {line}: {error}", "copy or download it again")


def _decompress(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(_ZstdStream(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")))
    return raw


class _ZstdStream(io.RawIOBase):
    """pyarrow's decompressed stream with the interface that BufferedReader needs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _skip(stream: IO[bytes], offset: int) -> None:
    if stream.seekable() and not isinstance(stream, gzip.GzipFile):
        stream.seek(offset)
        return
    while offset > 0:
        skipped = len(stream.read(min(offset, CHUNK_BYTES)))
        if not skipped:
            raise EOFError("the file is shorter than when its first part was read")
        offset -= skipped


def _read_whole_lines(stream: IO[bytes]) -> tuple[bytes, bytes, int]:
    """About CHUNK_BYTES of whole lines. If the next line is too long: its first bytes, and its size."""
    payload = stream.read(CHUNK_BYTES)
    if not payload or payload.endswith(b"\n"):
        return payload, b"", 0
    payload += stream.readline(MAX_LINE_BYTES)
    last = payload.rfind(b"\n") + 1
    size = len(payload) - last
    if size <= MAX_LINE_BYTES:
        return payload, b"", 0
    payload, beginning = payload[:last], payload[last : last + MAX_SHOWN]
    while part := stream.readline(CHUNK_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return payload, beginning, size


def _split_lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _parse_line(raw: bytes, path: Path, line: int) -> Row | BadRow:
    def bad(reason: str) -> BadRow:
        return BadRow(path, line, reason, raw.decode("utf-8", "backslashreplace"))

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 at byte {error.start} of the line")
    if "\0" in text:
        return bad(f"NUL byte at character {text.index(chr(0))}: the file was truncated by a crash or is not text")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return bad(f"not JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"a row must be an object {{…}}, not {_JSON_TYPES.get(type(value), 'a number')}")
    return Row(path, line, value)


_JSON_TYPES = {list: "an array", str: "a string", type(None): "null", bool: "true or false"}


def _parquet_chunks(path: Path, start: ReadPosition, columns: Mapping[str, str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable parquet file: {_one_line(error)}") from None
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path}: the column {repeated[0]!r} occurs twice")
    check_columns(columns, names, f"{path}: ")
    groups, first = list(range(file.num_row_groups)), 0
    while groups and (end := first + file.metadata.row_group(groups[0]).num_rows) <= start.offset:
        groups, first = groups[1:], end
    # If it has no known columns, the error message still shows the names.
    read_group = partial(file.iter_batches, TABLE_ROWS, columns=_columns_to_read(names, columns) or None)
    tables = (pa.Table.from_batches([batch]) for group in groups for batch in read_group(row_groups=[group]))
    row = first
    try:
        for chunk in _arrow_chunks(path, start, tables, first, file.metadata.num_rows):
            row = chunk.end.offset
            yield chunk
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged after row {row}: {_one_line(error)}") from None


def _arrow_chunks(path: Path, start: ReadPosition, tables: Iterable[Any], row: int, total: int) -> Iterator[Chunk]:
    """Joins tables of a few rows, of which the first starts at `row`, until they have CHUNK_BYTES in memory."""
    import pyarrow as pa

    file_size, parts, size, rows = size_on_disk(path), list[Any](), 0, 0

    def chunk() -> Chunk:
        table = pa.concat_tables(parts).combine_chunks()
        end, done = ReadPosition(start.file, row, row + 1), file_size * row // max(1, total)
        return Chunk("arrow", path, row - len(table) + 1, _arrow_bytes(table), len(table), end, done)

    for part in _split_large(map(_decode_dictionaries, tables)):
        skipped = min(len(part), max(0, start.offset - row))
        row += len(part)
        parts.append(part.slice(skipped))
        size, rows = size + parts[-1].nbytes, rows + len(parts[-1])
        if size >= CHUNK_BYTES or rows >= CHUNK_ROWS:
            yield chunk()
            parts, size, rows = [], 0, 0
    if rows:
        yield chunk()


def _split_large(tables: Iterable[Any]) -> Iterator[Any]:
    for table in tables:
        step = 1 if table.nbytes >= CHUNK_BYTES else max(1, len(table))
        yield from (table.slice(first, step) for first in range(0, len(table), step))


def _decode_dictionaries(table: Any) -> Any:
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


def _is_datasets_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _datasets_split(path: Path) -> Path:
    if (path / "state.json").is_file():
        return path
    try:
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        choices = ", ".join(str(path / split) for split in splits)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path / 'dataset_dict.json'}: not a list of splits: {error!r}") from None
    if "train" in splits:
        return path / "train"
    raise UsageError(f"{path} has no split named train", f"use one of {choices}")


def _datasets_chunks(path: Path, start: ReadPosition, columns: Mapping[str, str]) -> Iterator[Chunk]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{path} is a Hugging Face datasets folder, which needs the package datasets",
            "pip install 'torchstone[datasets]'",
        ) from None
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")
    except Exception as error:
        # The library raises all kinds of errors for damaged files.
        raise DataError(f"{path}: not a readable datasets folder: {_one_line(error)}") from None
    check_columns(columns, table.column_names, f"{path}: ")
    parts = (table[first : first + TABLE_ROWS] for first in range(start.offset, len(table), TABLE_ROWS))
    yield from _arrow_chunks(path, start, parts, start.offset, len(table))


def _arrow_bytes(table: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _columns_to_read(names: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """The columns among `names` that may be used. Conversations also need `images`, which make a bad row."""
    used = {*COLUMNS, *columns.values()}
    if not {"messages", "conversations", "prompt", "instruction"}.isdisjoint([*names, *columns]):
        used.add("images")
    return [name for name in names if name in used]


def _arrow_rows(chunk: Chunk, columns: Mapping[str, str]) -> Iterator[Row | BadRow]:
    """Nulls are left out: Arrow has them where a JSON row would not have the key."""
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk.payload).read_all()
    names = _columns_to_read(table.column_names, columns)
    # Without known columns, the error message still shows the names.
    values = _arrow_values(table.select(names)) if names else [dict.fromkeys(table.column_names, "…")] * len(table)
    for line, value in enumerate(values, start=chunk.first_line):
        if isinstance(value, dict):
            yield Row(chunk.path, line, _drop_nulls(value))
        else:
            yield BadRow(chunk.path, line, f"cannot be read: {value}", "")


def _arrow_values(table: Any) -> list[dict[str, Any] | str]:
    """The rows, or an error in place of one that Python cannot represent, such as a time after the year 9999."""
    try:
        return table.to_pylist()
    except MemoryError:
        raise
    except Exception as error:
        if len(table) == 1:
            return [_one_line(error)]
        return [value for index in range(len(table)) for value in _arrow_values(table.slice(index, 1))]


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [_drop_nulls(inner) for inner in value]
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON text; raises ValueError for a key that occurs twice, of which Python would use the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs twice in one object")
    return values


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _shorten(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]
