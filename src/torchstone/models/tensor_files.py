"""Safetensors files, read as exact ranges of bytes when asked for, and never mapped into memory.

The pages of a mapped file count as the process's own: 2 GB of bf16 weights read through `safe_open` peak at 4 GB, the
file and the model. Here bytes go from the disk into the tensor that keeps them, or through one buffer of 32 MiB when
they have to be converted or sent to a device, so that the peak is the model itself. A rank that wants a slice of a
tensor reads that slice and nothing else.

What it costs: time, where the file is in the page cache (200 MB into a tensor take about 34 ms instead of 18, and 75
instead of 35 when bf16 becomes fp32), and a file opened at every read (9 µs), so that no number of shards runs out of
descriptors. Slices are rows: only rows are contiguous on disk. A file is trusted only after its header accounts for
each of its bytes, once; one that changes after that is refused rather than read with a stale header.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
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


class TensorFile:
    """One safetensors file: what it holds, and any rows of any tensor, read from the disk when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Bytes of tensors read so far; the header is not among them.
        self.bytes_read = 0
        with _opened(path) as file:
            status = os.fstat(file.fileno())
            self._size, self._changed_ns = status.st_size, status.st_mtime_ns
            header = _read_header(file, self._size, path)
        self._data_begin = LENGTH_BYTES + len(header)
        self._entries = _entries(header, path)
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
        with self._at(entry, start) as file:
            self._fill(file, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor, start: int = 0) -> None:
        """Overwrites `target` with as many rows as it has, from row `start`, in its own dtype and on its own device."""
        entry = self._entry(name)
        if target.shape[1:] != entry.shape[1:] or target.dim() != len(entry.shape):
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(entry.shape)}, which does not fit {list(target.shape)}"
            )
        self._check_rows(name, start, start + (len(target) if entry.shape else 1))
        target = target.detach()
        with self._at(entry, start) as file:
            if target.dtype == entry.dtype and target.device.type == "cpu" and target.is_contiguous():
                self._fill(file, target)
                return
            most = BUFFER_BYTES // entry.dtype.itemsize
            buffer = torch.empty(min(most, target.numel()), dtype=entry.dtype, device="cpu")
            for piece in _pieces(target, most):
                part = buffer[: piece.numel()]
                self._fill(file, part)
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

    @contextmanager
    def _at(self, entry: _Entry, row: int) -> Iterator[FileIO]:
        """The file, at the first byte of a row, if it is still the one whose header was read."""
        with _opened(self.path) as file:
            if os.fstat(file.fileno()).st_mtime_ns != self._changed_ns:
                raise _damaged(self.path, "it was changed after its header was read")
            file.seek(self._data_begin + entry.begin + row * entry.row_bytes)
            yield file

    def _fill(self, file: FileIO, tensor: Tensor) -> None:
        """Overwrites a contiguous tensor on the CPU with the file's next bytes."""
        memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        count = _read_exactly(file, memory)
        self.bytes_read += count
        if count < len(memory):
            size = os.fstat(file.fileno()).st_size
            raise _damaged(self.path, f"it ends after {size:,} of {self._size:,} bytes")


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


def _entries(header: bytes, path: Path) -> dict[str, _Entry]:
    """What the header says of each tensor, in the order of their bytes."""
    try:
        value = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not the JSON it should be: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, f"its header is a JSON {type(value).__name__}, not an object")
    metadata = value.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise _damaged(path, "__metadata__ in its header is not a map from text to text")
    entries = [(name, _entry(described, f"tensor {name!r}", path)) for name, described in value.items()]
    return dict(sorted(entries, key=lambda item: (item[1].begin, item[1].end)))


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
