"""Safetensors files: the same bits as the format's own reader and writer, any slice alone, and damage that is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from torchstone.checkpoint import tensor_files
from torchstone.checkpoint.tensor_files import DTYPE_NAMES, open_tensor_file, read_slice_into, write_tensors
from torchstone.errors import CheckpointError

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (0,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (1, 1, 1, 6)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any pattern of bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_files_equal_those_of_safetensors_and_read_back_bit_for_bit(path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{n} €": random_bits(shape, dtype, n) for n, shape in enumerate(SHAPES)}
    for metadata in (None, {"format": "pt"}):
        write_tensors(path, tensors, metadata)
        assert path.read_bytes() == save(tensors, metadata)
        file = open_tensor_file(path)
        assert file.metadata == (metadata or {})
        assert {name: bits(t) for name, t in file.tensors.items()} == {name: bits(t) for name, t in tensors.items()}


def test_tensors_of_any_dtype_stride_and_storage_are_written_together(path: Path) -> None:
    """save_file refuses strided tensors and shared memory."""
    base = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "transposed": base.T,
        "columns": base[:, ::2],
        "one element": base[2:3, 3:4],
        "step": (step := torch.tensor(5.0)),
        "same step": step,
        "narrow": torch.ones(3, dtype=torch.bfloat16),
    }
    write_tensors(path, tensors)
    stored = load_file(path)
    assert {name: bits(t) for name, t in stored.items()} == {name: bits(t.detach()) for name, t in tensors.items()}
    # Every tensor is aligned to its dtype.
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in open_tensor_file(path).tensors.values())


def test_tensors_on_the_meta_device_are_loaded_once_each(path: Path) -> None:
    values = {name: random_bits((4, 3), torch.float32, n) for n, name in enumerate("abc")}
    loaded: list[str] = []

    def load(name: str) -> Tensor:
        loaded.append(name)
        return values[name]

    write_tensors(path, {name: torch.empty(4, 3, device="meta") for name in values}, None, load)
    assert loaded == ["a", "b", "c"]
    assert {name: bits(t) for name, t in load_file(path).items()} == {name: bits(t) for name, t in values.items()}


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and offset and size of a slice of it."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    offset = [draw(st.integers(0, size)) for size in shape]
    return tuple(shape), tuple(offset), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    case=slices(),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    dtype=st.sampled_from([None, torch.float64]),
    strided=st.booleans(),
    chunk=st.sampled_from([1, 7, 8 * 2**20]),
)
def test_any_slice_is_read_into_any_view(
    case: tuple[tuple[int, ...], ...], stored: torch.dtype, dtype: torch.dtype | None, strided: bool, chunk: int
) -> None:
    shape, offset, size = case
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(stored)
    expected = values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].to(dtype or stored)
    memory = torch.full((*size, 2) if strided else size, 77, dtype=expected.dtype)
    target = memory[..., 0] if strided else memory
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(tensor_files, "CHUNK_ELEMENTS", chunk)
        write_tensors(Path(folder) / "a", {"before": torch.ones(3, dtype=stored), "w": values})
        count = read_slice_into(open_tensor_file(Path(folder) / "a").tensors["w"], target, offset)
    assert torch.equal(target, expected)
    assert count == expected.numel() * stored.itemsize
    if strided:
        assert bool((memory[..., 1] == 77).all())


@pytest.mark.parametrize(
    ("size", "offset"), [((4, 4), (7, 0)), ((4, 4), (-1, 0)), ((4, 3), (0, 2)), ((4,), (0,)), ((4, 4), (0,))]
)
def test_a_slice_outside_the_tensor_is_refused(size: tuple[int, ...], offset: tuple[int, ...]) -> None:
    """Indexing would cut the slice off, and copy_ would repeat what is left."""
    target = torch.full(size, 77.0)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        read_slice_into(torch.arange(40.0).reshape(10, 4), target, offset)
    assert bool((target == 77).all())


def test_a_slice_is_read_without_the_rest_of_the_file(path: Path) -> None:
    """The pages of the mapped file that are in memory, of 64 MiB."""
    if "Rss:" not in (Path("/proc/self/smaps").read_text() if Path("/proc/self/smaps").exists() else ""):
        pytest.skip("reads /proc/self/smaps, which is not here")
    save_file({"w": torch.ones(64, 2**18)}, path)
    file, target = open_tensor_file(path), torch.empty(2, 2**18, dtype=torch.float64)
    assert mapped_bytes(path) < 8 * 2**20
    assert read_slice_into(file.tensors["w"], target, (30, 0)) == 2 * 2**20
    assert 2 * 2**20 <= mapped_bytes(path) < 16 * 2**20
    assert bool((target == 1).all())


def mapped_bytes(path: Path) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_default_device_changes_nothing(path: Path) -> None:
    values, target = torch.arange(40.0).reshape(10, 4), torch.zeros(10, 4, dtype=torch.float64)
    with torch.device("meta"):
        write_tensors(path, {"a": values})
        read_slice_into(open_tensor_file(path).tensors["a"], target, (0, 0))
    assert torch.equal(target, values.double())


@pytest.mark.parametrize(
    "damage", ["absent", "folder", "empty", "text", "truncated", "longer", "header", "dtype", "overflow"]
)
def test_a_file_that_cannot_be_read_is_named(path: Path, damage: str) -> None:
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2)}, path)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "absent":
        path.write_bytes(
            {
                "empty": b"",
                "text": b"version https://git-lfs.github.com/spec/v1\n",
                "truncated": content[:-3],
                "longer": content + b"\0",
                "header": content.replace(b'"shape":[2]', b'"shape":[3]'),
                "dtype": content.replace(b"F32", b"F7 "),
                # Torch adds the frames of its C++ stack to the message.
                "overflow": (96).to_bytes(8, "little")
                + b'{"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'.ljust(96),
            }[damage]
        )
    with pytest.raises(CheckpointError, match="model.safetensors: damaged or not a safetensors file: ") as caught:
        open_tensor_file(path)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 6
    assert "\n" not in caught.value.message


def test_a_full_disk_is_an_os_error() -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("writes to /dev/full, which is not here")
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(Path("/dev/full"), {"a": torch.ones(5)})


def test_no_descriptor_stays_open(path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("counts descriptors in /proc, which is not here")
    write_tensors(path, {"a": torch.ones(5)})
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = [open_tensor_file(path) for _ in range(50)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert all(torch.equal(file.tensors["a"], torch.ones(5)) for file in files)
