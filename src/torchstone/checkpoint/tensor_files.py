"""Safetensors files: read through the safetensors package, written one tensor at a time.

A file is mapped into memory, so its tensors are views: the bytes of a slice are read when the slice is copied, and no
others. Mapped pages are page cache. They count in a process's RSS, but the kernel takes them back when it needs memory.

`safetensors.torch.save_file` needs all tensors of a file in host memory at once: moments on a GPU, or a model that is
exported file to file, would need their whole size again. docs/decisions/022-ranks-save-shards.md has the measurements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from torchstone.errors import CheckpointError, first_line, is_out_of_memory

# 32 MiB of fp32. A copy to another device or dtype needs at most this much memory besides the two tensors.
CHUNK_ELEMENTS = 8 * 2**20
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorFile:
    """An open safetensors file. Its tensors are views of the mapped file: copy from them, never write to them."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


@contextmanager
def name_damaged_file(path: Path, problem: str = "damaged or not a safetensors file") -> Iterator[None]:
    """Turns what safetensors and torch raise for a damaged file, which may be anything, into an error that names it."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Torch adds the frames of its C++ stack.
        raise CheckpointError(f"{path}: {problem}: {first_line(error)}") from None


def open_tensor_file(path: Path) -> TensorFile:
    """Reads the header and maps the file. Takes about 20 µs per tensor; no descriptor stays open."""
    with name_damaged_file(path), safe_open(path, "pt") as file:
        return TensorFile(path, {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes in the header of a file. Torch's mapping may fail for a file larger than memory; this does not."""
    with name_damaged_file(path), safe_open(path, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def read_slice_into(source: Tensor, target: Tensor, offset: Sequence[int]) -> int:
    """Overwrites `target` with the slice of `source` that has its shape and begins at `offset`, in the dtype and on the
    device of `target`. Returns the number of bytes read from `source`."""
    for dim, (start, size) in enumerate(zip(offset, target.shape, strict=True)):
        source = source.narrow(dim, start, size)
    for part, values in zip(_chunks(target.detach()), _chunks(source), strict=True):
        # A device converts faster than the host, and gets fewer bytes where the file has the narrower dtype.
        part.copy_(values.to(part.device))
    return source.nbytes


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    load: Callable[[str], Tensor] | None = None,
) -> None:
    """Writes a safetensors file of tensors on any device and with any strides, and waits until it is on the disk.

    With `load`, `tensors` may be on the meta device: `load` returns each tensor by name when its turn comes.
    """
    # Wide dtypes first, so that all tensors are aligned; then by name, as safetensors does.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape, dtype = list(tensors[name].shape), DTYPE_NAMES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            for chunk in _chunks((load or tensors.__getitem__)(name).detach()):
                file.write(_as_bytes(chunk.cpu().contiguous()))
        file.flush()
        os.fsync(file.fileno())


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Splits along dim 0 into views of at most CHUNK_ELEMENTS (at least one index each). A scalar is one view."""
    tensor = torch.atleast_1d(tensor)
    return tensor.split(max(1, CHUNK_ELEMENTS * len(tensor) // max(1, tensor.numel())))


def _as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    # A contiguous tensor of one element may have any stride, and torch then refuses to view it as bytes.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())
