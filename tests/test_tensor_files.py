"""Tensors in safetensors files, read and written: the bits of the format's own code, and no byte or memory more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from torchstone.errors import CheckpointError
from torchstone.models import tensor_files
from torchstone.models.tensor_files import DTYPES, MAX_HEADER_BYTES, TensorFile, TensorWriter

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (0,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (1, 1, 1, 6)]


def of_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every pattern of bits may appear, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    matrix, vector = torch.arange(40.0).reshape(10, 4), torch.arange(6).to(torch.bfloat16)
    save_file({"a": matrix, "b": vector, "scalar": torch.tensor(3.0)}, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_and_shape_reads_as_the_formats_own_reader_does(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"t{n}": of_bits(shape, dtype, n) for n, shape in enumerate(SHAPES)}, path, metadata={"format": "pt"})
    expected, file = load_file(path), TensorFile(path)
    assert sorted(file.names) == sorted(expected)
    for name, tensor in expected.items():
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert bits(file.read(name)) == bits(tensor)
        target = torch.empty_like(tensor)
        file.read_into(name, target)
        assert bits(target) == bits(tensor)


def test_names_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entries = {
        "last": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "first": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    path.write_bytes(framed(entries, b"\1\2\3\4\5"))
    file = TensorFile(path)
    assert file.names == ["first", "last"]
    assert file.read("last").tolist() == [4, 5]


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({}, path)
    assert TensorFile(path).names == []


tensors = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.builds(of_bits, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(list(DTYPES.values()))),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(tensors=tensors)
def test_any_rows_of_any_tensor_equal_the_slice(tensors: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(tensors, path)
        file = TensorFile(path)
        for name, tensor in tensors.items():
            assert bits(file.read(name)) == bits(tensor)
            rows = len(tensor) if tensor.dim() else 0
            for start in range(rows + 1):
                assert bits(file.read(name, start)) == bits(tensor[start:] if tensor.dim() else tensor)
                for stop in range(start, rows + 1 if tensor.dim() else 0):
                    assert bits(file.read(name, start, stop)) == bits(tensor[start:stop])


def test_what_is_read_owns_its_memory(weights: Path) -> None:
    file = TensorFile(weights)
    rows = file.read("a", 2, 4)
    assert rows.untyped_storage().nbytes() == 2 * 4 * 4
    rows.zero_()
    assert torch.equal(file.read("a", 2, 4), torch.arange(8.0, 16.0).reshape(2, 4))


def test_bytes_read_are_those_of_the_rows_asked_for(weights: Path) -> None:
    file = TensorFile(weights)
    assert file.bytes_read == 0
    file.read("a", 3, 5)
    assert file.bytes_read == 2 * 4 * 4
    file.read_into("a", torch.empty(3, 4, dtype=torch.bfloat16), start=7)
    assert file.bytes_read == 2 * 4 * 4 + 3 * 4 * 4
    file.read("a", 5, 5)
    file.read("b")
    assert file.bytes_read == 2 * 4 * 4 + 3 * 4 * 4 + 6 * 2


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "every other column", "rows of a parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("buffer_bytes", [8, 24, 100, 32 * 2**20])
def test_read_into_converts_into_any_view_and_touches_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    dtype: torch.dtype,
    kind: str,
    buffer_bytes: int,
) -> None:
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", buffer_bytes)
    path = tmp_path / "model.safetensors"
    values = torch.linspace(-9, 9, 10 * 6 * 3).reshape(10, 6, 3).to(stored)
    save_file({"w": values}, path)
    whole, view = {
        "contiguous": lambda: (w := torch.full((4, 6, 3), 77.0, dtype=dtype), w),
        "transposed": lambda: (w := torch.full((3, 6, 4), 77.0, dtype=dtype), w.transpose(0, 2)),
        "every other column": lambda: (w := torch.full((4, 12, 3), 77.0, dtype=dtype), w[:, ::2]),
        "rows of a parameter": lambda: (w := torch.nn.Parameter(torch.full((9, 6, 3), 77.0, dtype=dtype)), w[3:7]),
    }[kind]()
    file = TensorFile(path)
    file.read_into("w", view, start=5)
    assert torch.equal(view, values[5:9].to(dtype))
    assert int((whole == 77).sum()) == whole.numel() - view.numel()
    assert file.bytes_read == 4 * 6 * 3 * stored.itemsize


def test_the_buffer_holds_at_most_its_bytes_even_for_one_huge_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", 64)
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(2, 50, 7)}, path)
    target = torch.empty(2, 7, 50, dtype=torch.float64).transpose(1, 2)
    pieces = list(tensor_files._pieces(target, 64 // 4))
    assert max(piece.numel() for piece in pieces) <= 16
    assert sum(piece.numel() for piece in pieces) == 700
    TensorFile(path).read_into("w", target)
    assert torch.equal(target, load_file(path)["w"].double())


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and where in it a box begins and how large it is."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    offset = [draw(st.integers(0, size)) for size in shape]
    return tuple(shape), tuple(offset), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    box=boxes(),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    wanted=st.sampled_from([None, torch.float64]),
    transposed=st.booleans(),
    strided=st.booleans(),
    buffer_bytes=st.sampled_from([8, 24, 32 * 2**20]),
)
def test_any_box_is_read_into_any_view_with_its_own_bytes_only(
    box: tuple[tuple[int, ...], ...],
    stored: torch.dtype,
    wanted: torch.dtype | None,
    transposed: bool,
    strided: bool,
    buffer_bytes: int,
) -> None:
    shape, offset, size = box
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(stored)
    expected = values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].to(wanted or stored)
    if transposed:
        expected, offset = expected.permute(tuple(reversed(range(len(shape))))), offset[::-1]
    if strided and shape:
        memory = torch.full((*(2 * n for n in expected.shape),), 77, dtype=expected.dtype)
        target = memory[(slice(None, None, 2),) * len(shape)]
    else:
        memory = target = torch.full(expected.shape, 77, dtype=expected.dtype)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(tensor_files, "BUFFER_BYTES", buffer_bytes)
        save_file({"before": torch.ones(3, dtype=stored), "w": values}, Path(place) / "model.safetensors")
        file = TensorFile(Path(place) / "model.safetensors")
        file.read_box_into("w", target, offset, transposed)
    assert torch.equal(target, expected)
    assert file.bytes_read == expected.numel() * stored.itemsize
    if strided and expected.numel():
        target.fill_(77)
        assert bool((memory == 77).all())


def test_only_the_bytes_of_a_box_are_asked_of_the_disk(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the system is asked, and with the number of reads: whole rows are one."""
    asked: list[tuple[int, int]] = []
    preadv = os.preadv

    def counting(descriptor: int, memory: list[memoryview], offset: int) -> int:
        asked.append((offset, sum(map(len, memory))))
        return preadv(descriptor, memory, offset)

    monkeypatch.setattr(os, "preadv", counting)
    file = TensorFile(weights)
    begin = file._data_begin + file._entry("a").begin
    file.read_box_into("a", torch.empty(3, 4), (2, 0))
    assert asked == [(begin + 2 * 16, 3 * 16)]
    asked.clear()
    file.read_box_into("a", torch.empty(3, 2), (2, 1))
    assert asked == [(begin + row * 16 + 4, 8) for row in (2, 3, 4)]
    asked.clear()
    file.read_box_into("a", torch.empty(2, 3), (1, 2), transposed=True)
    assert asked == [(begin + row * 16 + 4, 8) for row in (2, 3, 4)]


def test_a_read_that_hands_out_less_than_asked_for_goes_on(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does beyond 2 GiB."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, memory, offset: preadv(fd, [memory[0][:5]], offset))
    target = torch.empty(9, 3)
    TensorFile(weights).read_box_into("a", target, (1, 1))
    assert torch.equal(target, torch.arange(40.0).reshape(10, 4)[1:, 1:])


def test_metadata_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, path, metadata={"format": "pt", "step": "7"})
    assert TensorFile(path).metadata == {"format": "pt", "step": "7"}
    save_file({"a": torch.ones(1)}, path)
    assert TensorFile(path).metadata == {}


def written(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with TensorWriter(path, [(name, t.dtype, t.shape) for name, t in tensors.items()], metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_written_is_byte_for_byte_what_the_formats_own_writer_writes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"t{n} €": of_bits(shape, dtype, n) for n, shape in enumerate(SHAPES)}
    for metadata in (None, {"format": "pt"}):
        written(path, tensors, metadata)
        assert path.read_bytes() == save(tensors, metadata)


def test_several_dtypes_in_the_order_given_are_read_by_both_readers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    dtypes = [torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]
    tensors = {
        f"{dtype} {shape}": of_bits(shape, dtype, n) for n, dtype in enumerate(dtypes) for shape in reversed(SHAPES)
    }
    written(path, tensors, {"step": "7"})
    file, theirs = TensorFile(path), load_file(path)
    assert file.names == list(tensors)
    assert file._data_begin % 8 == 0
    for name, tensor in tensors.items():
        assert bits(file.read(name)) == bits(theirs[name]) == bits(tensor)
    with safe_open(path, framework="pt") as handle:
        assert handle.metadata() == file.metadata == {"step": "7"}


@pytest.mark.parametrize("buffer_bytes", [8, 32 * 2**20])
def test_rows_and_views_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(tensor_files, "BUFFER_BYTES", buffer_bytes)
    path = tmp_path / "model.safetensors"
    whole = torch.randn(6, 9, dtype=torch.float64)
    parameter = torch.nn.Parameter(whole.T.contiguous())
    entries = [("a", whole.dtype, (6, 9)), ("none", whole.dtype, (4, 0)), ("b", whole.dtype, (6, 5))]
    with TensorWriter(path, entries) as writer:
        for start, stop in ((0, 1), (1, 1), (1, 4), (4, 6)):
            writer.write("a", parameter.T[start:stop])
        writer.write("b", whole[:, ::2])
    assert torch.equal(load_file(path)["a"], whole)
    assert torch.equal(load_file(path)["b"], whole[:, ::2])


def test_a_file_lacking_anything_is_an_error_and_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entries = [(name, torch.float32, (3, 2)) for name in "abc"]
    for rows, missing in ((2, "a and 2 more"), (3, "b and 1 more")):
        with (
            pytest.raises(CheckpointError, match=f"model.safetensors: not all of {missing} was written"),
            TensorWriter(path, entries) as writer,
        ):
            writer.write("a", torch.ones(rows, 2))
        with pytest.raises(CheckpointError, match="it ends after"):
            TensorFile(path)
    with pytest.raises(KeyError), TensorWriter(path, entries) as writer:
        raise KeyError("what went wrong is what is raised")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("a", (4, 2))], "a has 3 rows left to write, not 4"),
        ([("a", (3, 2)), ("a", (1, 2))], "a has 0 rows left to write, not 1"),
        ([("a", (3, 1))], r"a is to be torch.float32 of shape \[3, 2\], not torch.float32 of \[3, 1\]"),
        ([("a", (2,))], r"not torch.float32 of \[2\]"),
        ([("a", (2, 2)), ("b", (1,))], "b is written while a lacks 1 rows"),
        ([("b", (1,))], "b is written while a lacks 3 rows"),
        ([("a", (3, 2)), ("b", (1,)), ("a", (0, 2))], "a is written already, or is not to be in"),
        ([("a", (3, 2)), ("b", (1,)), ("c", (1,))], "c is written already, or is not to be in"),
    ],
)
def test_a_write_that_was_not_declared_is_refused(
    tmp_path: Path, calls: list[tuple[str, tuple[int, ...]]], message: str
) -> None:
    entries = [("a", torch.float32, (3, 2)), ("b", torch.float32, (1,))]

    def write() -> None:
        with TensorWriter(tmp_path / "model.safetensors", entries) as writer:
            for name, shape in calls:
                writer.write(name, torch.ones(shape))

    with pytest.raises(ValueError, match=message):
        write()


def test_another_dtype_a_name_twice_and_misaligned_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    one = ("a", torch.float32, (1,))
    with pytest.raises(ValueError, match="not torch.float64"), TensorWriter(path, [one]) as writer:
        writer.write("a", torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="'a' cannot be the name of another tensor"):
        TensorWriter(path, [one, one])
    with pytest.raises(ValueError, match="a would not be aligned"):
        TensorWriter(path, [("b", torch.uint8, (3,)), one])


def test_a_full_disk_is_the_systems_own_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("writes to /dev/full, which is not here")
    with pytest.raises(OSError, match="No space left on device"):
        written(Path("/dev/full"), {"a": torch.ones(5)})


def test_a_default_device_changes_nothing(weights: Path) -> None:
    with torch.device("meta"):
        read = TensorFile(weights).read("a")
    target = torch.zeros(10, 4, dtype=torch.float64)
    with torch.device("meta"):
        TensorFile(weights).read_into("a", target)
    assert torch.equal(read, torch.arange(40.0).reshape(10, 4))
    assert torch.equal(target, read.double())


@pytest.mark.parametrize(
    "ask",
    [
        lambda file: file.read("a", 0, 11),
        lambda file: file.read("a", -1),
        lambda file: file.read("a", 5, 4),
        lambda file: file.read("scalar", 0, 0),
        lambda file: file.read("scalar", 1),
        lambda file: file.read("absent"),
        lambda file: file.shape("absent"),
        lambda file: file.read_into("a", torch.empty(4, 4), start=7),
        lambda file: file.read_into("a", torch.empty(4, 5)),
        lambda file: file.read_into("a", torch.empty(4)),
        lambda file: file.read_into("b", torch.empty(())),
        lambda file: file.read_into("a", torch.empty(4, 3)),
        lambda file: file.read_box_into("a", torch.empty(4, 3), (0, 2)),
        lambda file: file.read_box_into("a", torch.empty(4, 3), (-1, 0)),
        lambda file: file.read_box_into("a", torch.empty(4, 3), (0,)),
        lambda file: file.read_box_into("a", torch.empty(4), (0,)),
        lambda file: file.read_box_into("a", torch.empty(4, 10), (0, 0)),
        lambda file: file.read_box_into("a", torch.empty(10, 4), (0, 0), transposed=True),
        lambda file: file.read_box_into("a", torch.empty(0, 4), (11, 0)),
        lambda file: file.read_box_into("scalar", torch.empty(1), (0,)),
        lambda file: file.read_box_into("absent", torch.empty(1), (0,)),
    ],
)
def test_what_the_file_does_not_hold_is_refused_before_reading(weights: Path, ask: Callable[[TensorFile], Any]) -> None:
    file = TensorFile(weights)
    with pytest.raises(CheckpointError, match="model.safetensors: "):
        ask(file)
    assert file.bytes_read == 0


def test_no_descriptor_stays_open(weights: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("counts descriptors in /proc, which is not here")
    before = len(os.listdir("/proc/self/fd"))
    files = [TensorFile(weights) for _ in range(50)]
    for file in files:
        file.read("a")
    (broken := weights.with_name("broken.safetensors")).write_bytes(b"nothing of the kind")
    for _ in range(50):
        with pytest.raises(CheckpointError):
            TensorFile(broken)
    assert len(os.listdir("/proc/self/fd")) == before


def framed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_entry(**changes: Any) -> bytes:
    """Two tensors of 8 bytes each, the second one changed."""
    first = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    second = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]} | changes
    return framed({"first": first, "second": second}, bytes(16))


ENTRY = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
DAMAGES = {
    "empty": (b"", "it has 0 bytes"),
    "shorter than a length": (b"\1\0\0", "it has 3 bytes"),
    "header larger than the file": (
        (500).to_bytes(8, "little") + b"{}",
        "after 10 bytes, inside its header of 500",
    ),
    "header over the limit": (
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        "a header of 100,000,001 bytes; the most there may be is 100,000,000",
    ),
    "text": (b"version https://git-lfs.github.com/spec/v1\n", "the most there may be"),
    "no header": (framed(b""), "not the JSON"),
    "header not UTF-8": (framed(b'{"\xff": 1}'), "not the JSON"),
    "header not JSON": (framed(b'{"a": '), "not the JSON"),
    "header nested without end": (framed(b"[" * 100_000), "not the JSON"),
    "header a list": (framed([]), "a JSON list, not an object"),
    "header a number": (framed(1), "a JSON int, not an object"),
    "metadata not text": (framed({"__metadata__": {"steps": 1}}), "__metadata__"),
    "two tensors of one name": (framed(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", b"\0"), "the key 'a' appears twice"),
    "two shapes": (
        framed(b'{"a":' + ENTRY.replace(b"{", b'{"shape":[1],') + b"}", b"\0"),
        "the key 'shape' appears twice",
    ),
    "entry not an object": (framed({"a": [1]}), "'a' is not described"),
    "entry without offsets": (framed({"a": {"dtype": "F32", "shape": [0]}}), "'a' is not described"),
    "unknown dtype": (with_entry(dtype="F7"), "'second' has dtype 'F7', which is not one of F64, F32"),
    "dtype not text": (with_entry(dtype=["F32"]), r"'second' has dtype \['F32'\]"),
    "negative shape": (with_entry(shape=[-2]), r"'second' has shape \[-2\]"),
    "two negatives": (with_entry(shape=[-1, -2]), r"'second' has shape \[-1, -2\]"),
    "fractional shape": (with_entry(shape=[2.0]), r"'second' has shape \[2.0\]"),
    "shape of truths": (with_entry(shape=[True, 2]), r"'second' has shape \[True, 2\]"),
    "shape not a list": (with_entry(shape=2), "'second' has shape 2"),
    "shape beyond 64 bits": (with_entry(shape=[0, 2**40, 2**40], data_offsets=[8, 8]), "'second' has shape"),
    "dimension beyond 64 bits": (with_entry(shape=[0, 2**63]), "'second' has shape"),
    "offsets as text": (with_entry(data_offsets=["8", "16"]), "'second' has data_offsets"),
    "offsets fractional": (with_entry(data_offsets=[8.0, 16]), "'second' has data_offsets"),
    "offsets truths": (with_entry(shape=[0], data_offsets=[False, False]), "'second' has data_offsets"),
    "offsets negative": (with_entry(data_offsets=[-8, 0]), "'second' has data_offsets"),
    "offsets reversed": (with_entry(data_offsets=[16, 8]), "'second' has data_offsets"),
    "offsets three": (with_entry(data_offsets=[8, 12, 16]), "'second' has data_offsets"),
    "offsets null": (with_entry(data_offsets=None), "'second' has data_offsets None"),
    "overlap": (with_entry(data_offsets=[4, 12]), "tensors 'first' and 'second' overlap"),
    "same bytes twice": (with_entry(data_offsets=[0, 8]), "overlap"),
    "hole": (with_entry(data_offsets=[12, 20]), "4 bytes between 'first' and 'second' belong to no tensor"),
    "hole at the start": (
        framed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}, bytes(4)),
        "3 bytes between the header and 'a' belong to no tensor",
    ),
    "range too short": (with_entry(data_offsets=[8, 12]), r"4 bytes, but F32 of shape \[2\] takes 8"),
    "range too long": (with_entry(shape=[1]), r"8 bytes, but F32 of shape \[1\] takes 4"),
    "truncated": (with_entry()[:-3], f"it ends after {len(with_entry()) - 3} of {len(with_entry())} bytes"),
    "trailing bytes": (with_entry() + b"\0\0", "2 more than its header accounts for"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=f"model.safetensors: damaged or not a safetensors file: .*{message}"
    ) as info:
        TensorFile(path)
    assert str(path) in str(info.value)
    assert info.value.exit_code == 6


def test_the_undamaged_form_of_these_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_entry())
    assert TensorFile(path).names == ["first", "second"]
    path.write_bytes(framed({"__metadata__": {"format": "pt"}, "a": json.loads(ENTRY)}, b"\5"))
    assert TensorFile(path).read("a").tolist() == [5]


def test_a_path_that_is_no_readable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="model.safetensors: damaged .* No such file"):
        TensorFile(path)
    path.mkdir()
    with pytest.raises(CheckpointError, match="model.safetensors: damaged .* Is a directory"):
        TensorFile(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(weights: Path) -> None:
    weights.chmod(0)
    with pytest.raises(CheckpointError, match="model.safetensors: damaged .* Permission denied"):
        TensorFile(weights)


def read_a(file: TensorFile) -> None:
    file.read("a")


def convert_a(file: TensorFile) -> None:
    file.read_into("a", torch.empty(10, 4, dtype=torch.float64))


@pytest.mark.parametrize("use", [read_a, convert_a])
def test_a_file_that_changes_after_opening_is_refused(weights: Path, use: Callable[[TensorFile], None]) -> None:
    file, status = TensorFile(weights), weights.stat()
    os.truncate(weights, status.st_size - 100)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    short = f"it ends after {status.st_size - 100} of {status.st_size} bytes"
    with pytest.raises(CheckpointError, match=f"model.safetensors: damaged .*: {short}"):
        use(file)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match="model.safetensors: damaged .* changed after its header was read"):
        use(file)
    weights.unlink()
    with pytest.raises(CheckpointError, match="model.safetensors: damaged .* No such file"):
        use(file)


def outcome(read: Callable[[], dict[str, Tensor]], refusal: type[Exception]) -> dict[str, Any] | None:
    try:
        return {name: bits(tensor) for name, tensor in read().items()}
    except refusal:
        return None


def both_readers_agree(path: Path, content: bytes) -> bool:
    """Whether the format's own reader and this one accept the same tensors, or both refuse the file."""

    def read() -> dict[str, Tensor]:
        file = TensorFile(path)
        return {name: file.read(name) for name in file.names}

    path.write_bytes(content)
    return outcome(lambda: load_file(path), SafetensorError) == outcome(read, CheckpointError)


def test_whichever_byte_is_changed_or_cut_the_formats_own_reader_agrees(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones((), dtype=torch.int64), "c": torch.ones(0, 2)}, path)
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    # All 256 values agree too, but for the dtypes U32, U64 and C64, which no weights have.
    changed = [
        content[:place] + bytes([value]) + content[place + 1 :]
        for place in range(header_end)
        for value in b'\x00\xff \n"-.0125689:,[]{}FIab\\'
    ]
    cut = [content[:length] for length in range(len(content))]
    for damaged in [*changed, *cut, content + b"\0"]:
        assert both_readers_agree(path, damaged), damaged
    assert both_readers_agree(path, content)
    assert TensorFile(path).names == ["b", "a", "c"]


# Each way of reading runs in a fork, whose peak begins at what is resident when it begins.
PEAKS = """
import gc, os, sys
from pathlib import Path
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torchstone.models.tensor_files import TensorFile, TensorWriter

torch.set_num_threads(1)
path, shape = Path(sys.argv[1]), (12800, 4096)
save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name in "ab"}, path)
gc.collect()

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def whole(): return [TensorFile(path).read(name) for name in "ab"]

def into(dtype):
    targets = [torch.empty(shape, dtype=dtype) for _ in "ab"]
    file = TensorFile(path)
    for name, target in zip("ab", targets): file.read_into(name, target)
    return targets

def mapped():
    targets = [torch.empty(shape, dtype=torch.bfloat16) for _ in "ab"]
    with safe_open(path, framework="pt") as handle:
        for name, target in zip("ab", targets): target.copy_(handle.get_tensor(name))
    return targets

def write(columns):
    tensor = torch.ones(shape[0], columns, dtype=torch.bfloat16)[:, : shape[1]]
    with TensorWriter(path.with_suffix(".new"), [("a", tensor.dtype, shape)]) as writer: writer.write("a", tensor)
    return [tensor]

ways = {"written": lambda: write(shape[1]), "strided": lambda: write(shape[1] + 8)}
ways |= {"read": whole, "same": lambda: into(torch.bfloat16), "wider": lambda: into(torch.float32), "mapped": mapped}
for name, way in ways.items():
    if os.fork() == 0:
        before = status("VmRSS")
        kept = way()
        assert all(bool((tensor[-1] == 1).all()) for tensor in kept)
        print(name, status("VmHWM") - before, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_the_peak_is_the_tensor_and_one_buffer(tmp_path: Path) -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("reads the peak from /proc, which is not here")
    path = tmp_path / "model.safetensors"
    try:
        done = subprocess.run([sys.executable, "-c", PEAKS, str(path)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        size = path.stat().st_size
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(".new").unlink(missing_ok=True)
    peak = {name: int(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert size > 200_000_000
    assert peak["read"] < 1.1 * size + 8 * 2**20
    assert peak["same"] < 1.1 * size + 8 * 2**20
    assert peak["wider"] < 2 * size + 64 * 2**20
    # One of the two tensors.
    assert peak["written"] < 0.6 * size + 8 * 2**20
    assert peak["strided"] < 0.6 * size + 64 * 2**20
    # The measure sees what it is there to see.
    assert peak["mapped"] > 1.9 * size
