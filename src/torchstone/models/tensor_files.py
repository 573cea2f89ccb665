"""Safetensors files, read and written as exact ranges of bytes, and never mapped into memory.

The pages of a mapped file count as the process's own: 2 GB of bf16 weights read through `safe_open` peak at 4 GB, the
file and the model. Here bytes go from the disk into the tensor that keeps them, or through one buffer of 32 MiB when
they have to be converted or sent to a device, so that the peak is the model itself. A rank that wants a box of a
tensor reads that box and nothing else. Written is the same way: the header first, then one tensor after another.

What it costs: time, where the file is in the page cache (200 MB into a tensor take about 34 ms instead of 18, and 75
instead of 35 when bf16 becomes fp32), and a file opened at every read (9 µs), so that no number of shards runs out of
descriptors. Rows lie together on disk and are one read; a box of some columns is a read a row, 1.3 to 1.6 µs each from
the page cache where it has up to 1 KiB. A file is trusted only after its header accounts for each of its bytes, once;
one that changes after that is refused rather than read with a stale header.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from torchstone.errors import CheckpointError

BUFFER_BYTES = 32 * 2**20
# The format's own limit, so that a damaged length does not become an allocation.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFile:
    """One safetensors file: what it holds, and any box of any tensor, read from the disk when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Bytes of tensors read so far; the header is not among them.
        self.bytes_read = 0
        with _opened(path) as file:
            status = os.fstat(file.fileno())
            self._size, self._changed_ns = status.st_size, status.st_mtime_ns
            header = _read_header(file, self._size, path)
        self._data_begin = LENGTH_BYTES + len(header)
        self.metadata, self._entries = _described(header, path)
        _check_ranges(self._entries, self._data_begin, self._size, path)
        # In the order of their bytes.
        self.names = list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, or all of them, in memory of their own. A scalar is one row."""
        entry = self._entry(name)
        stop = entry.rows if stop is None else stop
        self._check_rows(name, start, stop)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        tensor = torch.empty(shape, dtype=entry.dtype, device="cpu")
        self.read_into(name, tensor, start)
        return tensor

    def read_into(self, name: str, target: Tensor, start: int = 0) -> None:
        """Overwrites `target` with as many rows as it has, from row `start`, in its own dtype and on its own device."""
        entry = self._entry(name)
        if target.shape[1:] != entry.shape[1:] or target.dim() != len(entry.shape):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(entry.shape)}, which does not fit {list(target.shape)}"
            )
        self._check_rows(name, start, start + (len(target) if entry.shape else 1))
        self.read_box_into(name, target, (start, *[0] * (target.dim() - 1)) if entry.shape else ())

    def read_box_into(self, name: str, target: Tensor, offset: Sequence[int], transposed: bool = False) -> None:
        """Overwrites `target` with the box of its shape that begins at `offset`, in its own dtype and on its own
        device. `transposed`: with a box of the transposed tensor, of which again no other bytes are read."""
        entry, target, offset = self._entry(name), target.detach(), tuple(offset)
        if transposed:
            target, offset = target.permute(tuple(reversed(range(target.dim())))), offset[::-1]
        self._check_box(name, offset, tuple(target.shape))
        with self._current() as file:
            box = _Runs(file, self._data_begin + entry.begin, entry, offset, target.shape)
            if target.dtype == entry.dtype and target.device.type == "cpu" and target.is_contiguous():
                self._fill(box, target)
                return
            most = BUFFER_BYTES // entry.dtype.itemsize
            buffer = torch.empty(min(most, target.numel()), dtype=entry.dtype, device="cpu")
            for piece in _pieces(target, most):
                part = buffer[: piece.numel()]
                self._fill(box, part)
                piece.copy_(part.view(piece.shape))

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: holds no tensor named {name!r}")
        return self._entries[name]

    def _check_rows(self, name: str, start: int, stop: int) -> None:
        entry = self._entry(name)
        if not 0 <= start <= stop <= entry.rows or (not entry.shape and start == stop):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(entry.shape)}, but rows {start} to {stop} are asked of it"
            )

    def _check_box(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        shape = self._entry(name).shape
        if not len(offset) == len(size) == len(shape) or not all(
            0 <= begin <= begin + length <= most for begin, length, most in zip(offset, size, shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, but {list(size)} from {list(offset)} on are asked of it"
            )

    @contextmanager
    def _current(self) -> Iterator[FileIO]:
        """The file, if it is still the one whose header was read."""
        with _opened(self.path) as file:
            if os.fstat(file.fileno()).st_mtime_ns != self._changed_ns:
                raise _damaged(self.path, "it was changed after its header was read")
            yield file

    def _fill(self, box: _Runs, tensor: Tensor) -> None:
        """Overwrites a contiguous tensor on the CPU with the box's next bytes."""
        memory = _bytes_of(tensor)
        count = box.read(memory)
        self.bytes_read += count
        if count < len(memory):
            size = os.fstat(box.descriptor).st_size
            raise _damaged(self.path, f"it ends after {size:,} of {self._size:,} bytes")


class TensorWriter:
    """A safetensors file that is written front to back, without ever being in memory.

    `entries` (name, dtype, shape) become the header at once; then `write` appends the bytes, tensor after tensor in
    that order. A block that ends in an exception leaves a file that is too short, and that no reader accepts.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._entries = _laid_out(entries)
        self._header = _header(self._entries, metadata)
        self._unfinished = iter(self._entries.items())
        self._name, self._entry, self._rows_left = "", _Entry(torch.uint8, (0,), 0, 0), 0

    def __enter__(self) -> TensorWriter:
        self._file = FileIO(self.path, "w")
        try:
            _write_all(self._file, memoryview(self._header))
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._finish()
                os.fsync(self._file.fileno())

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor, or its next rows; it may be on any device and have any strides."""
        if name != self._name:
            self._begin(name)
        entry, rows = self._entry, len(tensor) if tensor.dim() else 1
        if (tensor.dtype, tensor.dim(), tensor.shape[1:]) != (entry.dtype, len(entry.shape), entry.shape[1:]):
            raise ValueError(
                f"{name} is to be {entry.dtype} of shape {list(entry.shape)}, "
                f"not {tensor.dtype} of {list(tensor.shape)}"
            )
        if rows > self._rows_left:
            raise ValueError(f"{name} has {self._rows_left} rows left to write, not {rows}")
        self._rows_left -= rows
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            _write_all(self._file, _bytes_of(tensor))
            return
        for piece in _pieces(tensor, BUFFER_BYTES // entry.dtype.itemsize):
            _write_all(self._file, _bytes_of(piece.cpu().contiguous()))

    def _begin(self, name: str) -> None:
        """Goes on to tensor `name`; only tensors without elements may lie in between."""
        while self._name != name:
            if self._rows_left and self._entry.row_bytes:
                raise ValueError(f"{name} is written while {self._name} lacks {self._rows_left} rows")
            self._name, self._entry = next(self._unfinished, ("", self._entry))
            if not self._name:
                raise ValueError(f"{name} is written already, or is not to be in {self.path}")
            self._rows_left = self._entry.rows

    def _finish(self) -> None:
        missing = [self._name] if self._rows_left and self._entry.row_bytes else []
        missing += [name for name, entry in self._unfinished if entry.end > entry.begin]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.path}: not all of {missing[0]}{more} was written")


class _Runs:
    """The bytes of a box, in the order of its elements: runs that lie together on disk, one read each."""

    def __init__(self, file: FileIO, begin: int, entry: _Entry, offset: tuple[int, ...], size: Sequence[int]) -> None:
        self.descriptor = file.fileno()
        strides = entry.strides
        # The axis from which on the box is whole: together with it, everything behind it is one run.
        axis = len(size)
        while axis > 0 and (axis == len(size) or size[axis] == entry.shape[axis]):
            axis -= 1
        self._run = math.prod(size[axis:]) * entry.dtype.itemsize
        self._begins = _begins(begin + sum(map(operator.mul, offset, strides)), size[:axis], strides[:axis])
        # The run that was begun and not read to its end.
        self._at = self._left = 0

    def read(self, memory: memoryview) -> int:
        """Overwrites `memory` with the next bytes; returns how many, fewer only where the file ends."""
        run, done, wanted = self._run, 0, len(memory)
        while done < wanted:
            if not self._left:
                self._at, self._left = next(self._begins), run
            count = min(self._left, wanted - done)
            got = os.preadv(self.descriptor, [memory[done : done + count]], self._at)
            if not got:
                break
            # Fewer than asked for is no end yet: Linux hands out 2 GiB at most in one call.
            self._at, self._left, done = self._at + got, self._left - got, done + got
        return done


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header describes it; its bytes count from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def strides(self) -> list[int]:
        """In bytes."""
        sizes = [self.dtype.itemsize, *reversed(self.shape[1:])][: len(self.shape)]
        return list(itertools.accumulate(sizes, operator.mul))[::-1]


def _begins(begin: int, size: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """Where each run begins; the innermost axis is a range, for there may be millions."""
    if not size:
        yield begin
        return
    outer = itertools.product(
        *(range(0, n * stride, stride) for n, stride in zip(size[:-1], strides[:-1], strict=True))
    )
    for places in outer:
        first = begin + sum(places)
        yield from range(first, first + size[-1] * strides[-1], strides[-1])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # Of none or one element a contiguous tensor may have any stride, with which it cannot be seen as bytes.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


def _write_all(file: FileIO, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += file.write(memory[done:])


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    try:
        with FileIO(path) as file:
            yield file
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror or error}") from None


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged or not a safetensors file: {what}")


def _read_header(file: FileIO, size: int, path: Path) -> bytes:
    if size < LENGTH_BYTES:
        raise _damaged(path, f"it has {size} bytes, and the length of the header alone takes {LENGTH_BYTES}")
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"it claims a header of {length:,} bytes; the most there may be is {MAX_HEADER_BYTES:,}")
    if length > size - LENGTH_BYTES:
        raise _damaged(path, f"it ends after {size:,} bytes, inside its header of {length:,}")
    header = bytearray(length)
    if _read_exactly(file, memoryview(header)) < length:
        raise _damaged(path, f"it ends after {file.tell():,} bytes, inside its header of {length:,}")
    return bytes(header)


def _read_exactly(file: FileIO, memory: memoryview) -> int:
    """The bytes read, fewer than asked for only at the end of the file; Linux hands out 2 GiB at most in one call."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            break
        done += count
    return done


def _laid_out(entries: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, _Entry]:
    """Where each tensor lies in a new file."""
    found: dict[str, _Entry] = {}
    position = 0
    for name, dtype, shape in entries:
        if name in found or name == "__metadata__":
            raise ValueError(f"{name!r} cannot be the name of {'another' if name in found else 'a'} tensor")
        if position % dtype.itemsize:
            raise ValueError(f"{name} would not be aligned, which not every reader accepts: put wider numbers first")
        end = position + math.prod(shape) * dtype.itemsize
        found[name] = _Entry(dtype, tuple(shape), position, end)
        position = end
    return found


def _header(entries: dict[str, _Entry], metadata: Mapping[str, str] | None) -> bytes:
    """With its length before it, and padded so that the first tensor is aligned: as the format's own writer has it."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        described[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text):,} bytes is more than the {MAX_HEADER_BYTES:,} the format allows")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _described(header: bytes, path: Path) -> tuple[dict[str, str], dict[str, _Entry]]:
    """What the header says of the file and of each tensor, in the order of their bytes."""
    try:
        value = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not the JSON it should be: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, f"its header is a JSON {type(value).__name__}, not an object")
    # The format's own reader takes null for none.
    metadata = value.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
        raise _damaged(path, "__metadata__ in its header is not a map from text to text")
    entries = [(name, _entry(described, f"tensor {name!r}", path)) for name, described in value.items()]
    return metadata, dict(sorted(entries, key=lambda item: (item[1].begin, item[1].end)))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last of two equal keys would win silently, and which tensor that is depends on the reader."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice")
        found[key] = value
    return found


def _entry(described: Any, what: str, path: Path) -> _Entry:
    if not isinstance(described, dict) or not {"dtype", "shape", "data_offsets"} <= described.keys():
        raise _damaged(path, f"{what} is not described by dtype, shape and data_offsets")
    name, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise _damaged(path, f"{what} has dtype {_shortened(name)}, which is not one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    # Where one dimension is 0, the others still become strides, which have to fit 64 bits.
    if not _are_counts(shape) or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise _damaged(path, f"{what} has shape {_shortened(shape)}, which is not one a tensor can have")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"{what} has data_offsets {_shortened(offsets)}, which are not a range of bytes")
    entry = _Entry(dtype, tuple(shape), *offsets)
    needed = math.prod(shape) * dtype.itemsize
    if entry.end - entry.begin != needed:
        raise _damaged(
            path,
            f"{what} has {entry.end - entry.begin:,} bytes, but {name} of shape {_shortened(shape)} takes {needed:,}",
        )
    return entry


def _are_counts(values: Any) -> bool:
    # type() and not isinstance(): JSON's true is no number, but Python's True is an int.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_ranges(entries: dict[str, _Entry], data_begin: int, size: int, path: Path) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    position, before = 0, "the header"
    for name, entry in entries.items():
        if entry.begin < position:
            raise _damaged(path, f"tensors {before} and {name!r} overlap")
        if entry.begin > position:
            raise _damaged(path, f"{entry.begin - position:,} bytes between {before} and {name!r} belong to no tensor")
        position, before = entry.end, repr(name)
    end = data_begin + position
    if size < end:
        raise _damaged(path, f"it ends after {size:,} of {end:,} bytes")
    if size > end:
        raise _damaged(path, f"it has {size:,} bytes, {size - end:,} more than its header accounts for")


def _pieces(target: Tensor, most: int) -> Iterator[Tensor]:
    """Views that cover `target` in the order of the numbers on disk, of at most `most` elements each."""
    if target.numel() == 0:
        return
    rows = target.view(-1) if target.is_contiguous() else target
    if rows[0].numel() <= most:
        yield from rows.split(most // rows[0].numel())
    else:
        for row in rows:
            yield from _pieces(row, most)
