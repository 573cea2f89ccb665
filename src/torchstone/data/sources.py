"""Files to rows, each with the place it came from: every message about a row can say `file:line`.

JSONL or a JSON array (plain, .gz, .zst), parquet and Hugging Face datasets folders are read as chunks of about two
megabytes: raw bytes that any process can turn into rows. Reading is then one sequential pass that never holds more than
a few chunks, and parsing, the expensive part, can be anybody's. A damaged line is one line's problem.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from torchstone.data.json_array import array_lines, begins_array
from torchstone.errors import DataError, UsageError

CHUNK_BYTES = 1 << 21
CHUNK_ROWS = 1000
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, OSError)
JSONL = (".jsonl", ".json", ".ndjson")
ENDINGS = (*(f"{name}{packed}" for name in JSONL for packed in ("", ".gz", ".zst")), ".parquet")
# All that any shape of row looks at (formats.py); a table may have columns that Python cannot even hold.
COLUMNS = {
    "input_ids", "labels", "len", "messages", "conversations", "tools", "system", "unmask", "prompt", "completion",
    "instruction", "input", "output", "history", "text", "document",
}  # fmt: skip
OTHER_KINDS = (".txt", ".csv", ".tsv", ".md", ".arrow", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".xlsx", ".bin", ".npy")
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
BOM = b"\xef\xbb\xbf"
BEGINNING = 100
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class BadRow(DataError):
    """A row that cannot be trained on: where it is, why, and the row itself for the quarantine."""

    def __init__(self, path: Path, line: int, reason: str, raw: str, hint: str | None = None) -> None:
        begins = raw.strip()
        begins = begins if len(begins) <= BEGINNING else begins[: BEGINNING - 1] + "…"
        # What a row says to a terminal is not for the terminal.
        begins = STEERING.sub(lambda found: f"\\x{ord(found[0]):02x}", begins)
        super().__init__(f"{path}:{line}: {reason}", "\n  ".join(filter(None, [f"the row begins {begins}", hint])))
        self.path, self.line, self.reason, self.raw, self.more = path, line, reason, raw, hint


@dataclass(frozen=True)
class Row:
    path: Path
    line: int
    value: dict[str, Any]

    def error(self, reason: str, hint: str | None = None) -> BadRow:
        return BadRow(self.path, self.line, reason, json.dumps(self.value, default=str), hint)


class Position(NamedTuple):
    """Where a chunk ends: the file, its bytes or rows before the next chunk, and the number of the next line."""

    file: int = 0
    offset: int = 0
    line: int = 1


class Chunk(NamedTuple):
    """Rows not read yet. `done` is how much of the file on disk lies before its end."""

    kind: Literal["lines", "arrow"]
    path: Path
    first_line: int
    payload: bytes
    rows: int | None
    end: Position
    done: int


def find_files(name: str) -> list[Path]:
    """The data files that a path means: itself, all of a folder, those of a pattern; a datasets folder is one."""
    path = Path(name)
    if path.is_dir():
        found = [_datasets_folder(path)] if _is_datasets_folder(path) else _data_files(path)
        if not found:
            raise UsageError(f"no data files in the folder {path}", f"looked for {', '.join(ENDINGS)}")
        return found
    if path.is_file():
        if path.suffix in OTHER_KINDS:
            raise UsageError(f"{path}: {path.suffix} files are not read", f"the kinds are {', '.join(ENDINGS)}")
        return [path]
    if glob.has_magic(name):
        found = sorted(Path(match) for match in glob.glob(name, recursive=True) if Path(match).is_file())
        if not found:
            raise UsageError(f"no file matches {name}")
        return found
    near = sorted(p.name for p in path.parent.glob("*") if p.name.endswith(ENDINGS))[:8]
    raise UsageError(
        f"data file {path} does not exist",
        f"data files in {path.parent}: {', '.join(near)}" if near else "check the path",
    )


def chunks(files: list[Path], after: Position = Position()) -> Iterator[Chunk]:  # noqa: B008
    """All chunks of `files` from `after` on, in order."""
    for number in range(after.file, len(files)):
        path = files[number]
        start = after if number == after.file else Position(number)
        if path.is_dir():
            yield from _datasets_chunks(path, start)
        elif path.suffix == ".parquet":
            yield from _parquet_chunks(path, start)
        else:
            yield from (_array_chunks if _is_array(path) else _line_chunks)(path, start)


def rows(chunk: Chunk) -> Iterator[Row | BadRow]:
    """The rows of a chunk, a bad one as the error it is. Blank lines are no rows."""
    if chunk.kind == "arrow":
        yield from _arrow_rows(chunk)
        return
    for number, raw in enumerate(_lines(chunk.payload), start=chunk.first_line):
        if _is_row(raw):
            yield _parse(raw.removeprefix(BOM), chunk.path, number)


def read_rows(name: str | Path) -> Iterator[Row]:
    """Every row of a source; the first bad one stops."""
    for chunk in chunks(find_files(str(name))):
        for row in rows(chunk):
            if isinstance(row, BadRow):
                raise row
            yield row


def row_count(chunk: Chunk) -> int:
    """How many rows, good or bad, a chunk has."""
    return chunk.rows if chunk.rows is not None else sum(map(_is_row, _lines(chunk.payload)))


def first_rows(chunk: Chunk, count: int) -> Chunk:
    """A chunk with only the first `count` rows of `chunk`."""
    if chunk.kind == "arrow":
        import pyarrow as pa

        table = pa.ipc.open_stream(chunk.payload).read_all().slice(0, count)
        return chunk._replace(payload=_arrow_bytes(table), rows=count)
    kept, found = [], 0
    for raw in _lines(chunk.payload):
        if found == count:
            break
        found += _is_row(raw)
        kept.append(raw)
    return chunk._replace(payload=b"\n".join(kept))


def _is_row(raw: bytes) -> bool:
    return bool(raw.removeprefix(BOM).strip())


def size_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*.arrow"))


def real_files(path: Path) -> list[Path]:
    """The files whose bytes are what a data file says: itself, or those of a datasets folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".arrow", ".json"))


def _data_files(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.name.endswith(ENDINGS) and path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _line_chunks(path: Path, start: Position) -> Iterator[Chunk]:
    """Plain files are sought in; a compressed one is read again up to where it goes on, which is quick."""
    line, offset = start.line, start.offset
    with path.open("rb") as raw:
        stream = _decompressed(path, raw)
        try:
            _skip(stream, offset)
            while payload := _whole_lines(stream):
                first, offset, line = line, offset + len(payload), line + len(_lines(payload))
                yield Chunk("lines", path, first, payload, None, Position(start.file, offset, line), raw.tell())
        except DAMAGED as error:
            raise _cut_off(path, line - 1, error) from None


def _array_chunks(path: Path, start: Position) -> Iterator[Chunk]:
    """The elements of a JSON array as lines; going on reads it again up to there."""
    number, part = 0, list[bytes]()

    def chunk() -> Chunk:
        end = Position(start.file, number, number + 1)
        return Chunk("lines", path, number - len(part) + 1, b"\n".join(part), None, end, raw.tell())

    with path.open("rb") as raw:
        try:
            for number, element in enumerate(array_lines(_decompressed(path, raw)), start=1):
                if number > start.offset:
                    part.append(element)
                if len(part) == CHUNK_ROWS:
                    yield chunk()
                    part = []
            if part:
                yield chunk()
        except DAMAGED as error:
            raise _cut_off(path, number, error) from None
        except ValueError as error:
            raise DataError(f"{path}:{number + 1}: not a JSON array after element {number}: {error}") from None


def _is_array(path: Path) -> bool:
    with path.open("rb") as raw:
        try:
            beginning = _decompressed(path, raw).read(1 << 12)
        except DAMAGED as error:
            raise _cut_off(path, 0, error) from None
    if beginning[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path}: UTF-16, by its byte order mark; JSON is UTF-8",
            f"iconv -f UTF-16 -t UTF-8 {path.name} > NEW.jsonl",
        )
    for magic, ending in MAGIC.items():
        if beginning.startswith(magic):
            raise DataError(f"{path}: by its contents this is a {ending} file", f"give it a name that ends in {ending}")
    return begins_array(beginning)


def _cut_off(path: Path, line: int, error: BaseException) -> BaseException:
    """The error of a compressed file that is not whole; one of the system's own stays what it is."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{path}: damaged or cut off after line {line}: {error}", "copy or download it again")


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(_Zstd(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")))
    return raw


class _Zstd(io.RawIOBase):
    """What pyarrow decompresses, as a stream that knows lines."""

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
            raise EOFError("shorter than before")
        offset -= skipped


def _whole_lines(stream: IO[bytes]) -> bytes:
    block = stream.read(CHUNK_BYTES)
    return block if not block or block.endswith(b"\n") else block + stream.readline()


def _lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _parse(raw: bytes, path: Path, number: int) -> Row | BadRow:
    def bad(reason: str) -> BadRow:
        return BadRow(path, number, reason, raw.decode("utf-8", "backslashreplace"))

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 at byte {error.start} of the line")
    if "\0" in text:
        return bad(f"a NUL byte at character {text.index(chr(0))}: the file was cut off by a crash, or is not text")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return bad(f"not JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"a row is an object {{…}}, not {_KINDS.get(type(value), 'a number')}")
    return Row(path, number, value)


_KINDS = {list: "an array", str: "a string", type(None): "null", bool: "true or false"}


def _parquet_chunks(path: Path, start: Position) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file that can be read: {_one_line(error)}") from None
    size, total = path.stat().st_size, max(1, file.metadata.num_rows)
    row = 0
    for group in range(file.num_row_groups):
        in_group = file.metadata.row_group(group).num_rows
        if row + in_group <= start.offset:
            row += in_group
            continue
        bytes_a_row = max(1, file.metadata.row_group(group).total_byte_size // max(1, in_group))
        try:
            for batch in file.iter_batches(max(1, min(CHUNK_ROWS, CHUNK_BYTES // bytes_a_row)), row_groups=[group]):
                first, row = row, row + len(batch)
                if first < start.offset:
                    continue
                end = Position(start.file, row, row + 1)
                table = pa.Table.from_batches([batch])
                yield Chunk("arrow", path, first + 1, _arrow_bytes(table), len(batch), end, size * row // total)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged after row {row}: {_one_line(error)}") from None


def _is_datasets_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _datasets_folder(path: Path) -> Path:
    if (path / "state.json").is_file():
        return path
    splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
    if "train" in splits:
        return path / "train"
    raise UsageError(f"{path} has no split named train", f"name one: {', '.join(str(path / s) for s in splits)}")


def _datasets_chunks(path: Path, start: Position) -> Iterator[Chunk]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{path} is a Hugging Face datasets folder, which takes the package datasets",
            "pip install 'torchstone[datasets]'",
        ) from None
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")
    except Exception as error:
        # The library meets damaged files with whatever they make it stumble over.
        raise DataError(f"{path}: not a folder that datasets can read: {_one_line(error)}") from None
    size = size_on_disk(path)
    for first in range(start.offset, len(table), CHUNK_ROWS):
        part = table[first : first + CHUNK_ROWS]
        end = Position(start.file, first + len(part), first + len(part) + 1)
        yield Chunk("arrow", path, first + 1, _arrow_bytes(part), len(part), end, size * end.offset // len(table))


def _arrow_bytes(table: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _arrow_rows(chunk: Chunk) -> Iterator[Row]:
    """A column that a row does not have is null there, and so is left out, as it would be in JSON."""
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk.payload).read_all()
    known = [name for name in table.column_names if name in COLUMNS]
    # Where nothing is known, the names are all there is to say.
    values = table.select(known).to_pylist() if known else [dict.fromkeys(table.column_names, "…")] * len(table)
    for number, value in enumerate(values, start=chunk.first_line):
        yield Row(chunk.path, number, _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return (
        [_without_nulls(inner) for inner in value]
        if isinstance(value, list) and value and not isinstance(value[0], int)
        else value
    )


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]
