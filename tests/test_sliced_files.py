"""Boxes of tensors written by some ranks and read by others: the same bits, and not a byte more than asked for."""

from __future__ import annotations

import cProfile
import itertools
import json
import pstats
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from tiny_families import make_model
from torchstone.errors import CheckpointError
from torchstone.models.decoder import Decoder
from torchstone.models.families import FAMILIES
from torchstone.models.opening import load_model
from torchstone.models.sliced_files import Slice, SlicedFiles, write_slices
from torchstone.models.tensor_files import TensorFile
from torchstone.models.weights import Files, read_shape, save_weights, stream_weights

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def of(name: str, tensor: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Slice:
    box = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return Slice(name, tuple(tensor.shape), offset, box)


def rows_of(path: Path, tensor: Tensor, start: int, stop: int) -> Path:
    write_slices(path, [of("w", tensor, (start, 0), (stop - start, tensor.shape[1]))])
    return path


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The boxes that a shape is cut into along random edges; some are without elements."""
    axes = []
    for size in shape:
        edges = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))])
        axes.append([(low, high - low) for low, high in itertools.pairwise(edges)])
    return [(tuple(low for low, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*axes)]


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[tuple[int, ...], torch.dtype, list[tuple[Box, set[int]]]]]:
    """Some tensors, each cut by a grid of its own, each box held by one rank or several."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        owned = [(box, draw(st.sets(st.integers(0, 3), min_size=1, max_size=2))) for box in draw(grids(shape))]
        found.append((shape, draw(st.sampled_from(DTYPES)), owned))
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data(), given_tensors=tensors())
def test_whatever_layout_wrote_it_any_other_reads_it(
    data: st.DataObject, given_tensors: list[tuple[tuple[int, ...], torch.dtype, list[tuple[Box, set[int]]]]]
) -> None:
    values = {f"t{n}": numbered(shape, dtype) for n, (shape, dtype, _) in enumerate(given_tensors)}
    by_rank: list[list[Slice]] = [[] for _ in range(4)]
    for name, (_, _, owned) in zip(values, given_tensors, strict=True):
        for (offset, size), ranks in owned:
            for rank in ranks:
                by_rank[rank].append(of(name, values[name], offset, size))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank-{rank}.safetensors" for rank in range(4)]
        for path, slices in zip(paths, by_rank, strict=True):
            write_slices(path, slices)
        files = SlicedFiles(paths)
        assert sorted(files.names) == sorted(values)
        for name, value in values.items():
            assert (files.shape(name), files.dtype(name)) == (tuple(value.shape), value.dtype)
            for offset, size in data.draw(grids(tuple(value.shape))):
                expected = of(name, value, offset, size).tensor
                wide = data.draw(st.booleans())
                target = torch.full((*size, 2), 77, dtype=torch.float64 if wide else value.dtype)
                before = files.bytes_read
                files.read_into(name, target[..., 0], offset)
                assert torch.equal(target[..., 0], expected.to(target.dtype))
                assert bool((target[..., 1] == 77).all())
                assert files.bytes_read - before == expected.nbytes


def test_whole_tensors_make_an_ordinary_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    tensor, scalar, empty = numbered((3, 4), torch.bfloat16), torch.tensor(5), torch.empty(0, 2)
    values = {"w": tensor, "step": scalar, "none": empty}
    write_slices(path, [Slice(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in values.items()])
    assert TensorFile(path).metadata == {}
    theirs = load_file(path)
    assert sorted(theirs) == sorted(values)
    assert all(torch.equal(theirs[name], value) and theirs[name].dtype == value.dtype for name, value in values.items())


def test_an_ordinary_file_is_read_too_whatever_its_names(tmp_path: Path) -> None:
    save_file({"w@0,0": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = SlicedFiles([tmp_path / "model.safetensors"])
    assert (files.names, files.shape("w@0,0")) == (["w@0,0"], (2, 2))


def test_what_a_file_says_of_its_boxes(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    tensor = numbered((6, 4))
    boxes = [of("w", tensor, (0, 0), (3, 2)), of("w", tensor, (3, 2), (3, 2)), of("w", tensor, (3, 0), (0, 2))]
    write_slices(path, [*boxes, Slice("b", (4,), (0,), torch.ones(4, dtype=torch.float64))])
    file = TensorFile(path)
    assert file.names == ["b", "w@0,0", "w@3,2"]
    assert json.loads(file.metadata["slices"]) == {
        "w@0,0": {"name": "w", "shape": [6, 4], "offset": [0, 0]},
        "w@3,2": {"name": "w", "shape": [6, 4], "offset": [3, 2]},
    }
    assert torch.equal(file.read("w@3,2"), tensor[3:, 2:])


def test_a_box_that_two_ranks_hold_is_read_once_and_from_the_first(tmp_path: Path) -> None:
    tensor = numbered((4, 3))
    paths = [rows_of(tmp_path / f"{n}.safetensors", tensor + 100 * n, 0, 4) for n in range(2)]
    files, target = SlicedFiles(paths), torch.empty(4, 3)
    files.read_into("w", target, (0, 0))
    assert torch.equal(target, tensor)
    assert files.bytes_read == tensor.nbytes


def test_a_file_that_is_not_given_is_told_by_what_lacks(tmp_path: Path) -> None:
    tensor = numbered((12, 3))
    paths = [rows_of(tmp_path / f"rank-{n}.safetensors", tensor, 4 * n, 4 * n + 4) for n in range(3)]
    SlicedFiles(paths)
    with pytest.raises(
        CheckpointError, match=r"w: \[4:8, 0:3\] of its shape \[12, 3\] is in no file; .*rank-0.*rank-2"
    ) as caught:
        SlicedFiles([paths[0], paths[2]])
    assert caught.value.hint == "is the file of a rank missing?"
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: .* No such file"):
        SlicedFiles(paths)


def test_a_hole_inside_is_found(tmp_path: Path) -> None:
    tensor, path = numbered((4, 4, 4)), tmp_path / "a.safetensors"
    cells = [offset for offset in itertools.product((0, 2), repeat=3) if offset != (2, 0, 2)]
    write_slices(
        path, [of("w", tensor, offset, (2, 2, 2)) for offset in cells] + [Slice("v", (2,), (1,), tensor[0, 0, :1])]
    )
    with pytest.raises(CheckpointError, match=r"w: \[2:4, 0:2, 2:4\] of its shape .* \(and of 1 more tensors\)"):
        SlicedFiles([path])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda t: of("w", t, (1, 0), (3, 3)), r"w: \[0:2, 0:3\] in .*a.safetensors and \[1:4, 0:3\] in .*b.* overlap"),
        (lambda t: of("w", t, (1, 2), (2, 1)), "overlap"),
        (
            lambda t: of("w", t.double(), (2, 0), (2, 3)),
            r"float32 of .* in .*a.safetensors, but .*float64 of .* in .*b",
        ),
        (lambda t: of("w", numbered((5, 3)), (2, 0), (3, 3)), r"shape \[4, 3\] in .*a.safetensors, but .* \[5, 3\] in"),
    ],
)
def test_files_that_do_not_go_together_are_named(
    tmp_path: Path, second: Callable[[Tensor], Slice], message: str
) -> None:
    tensor = numbered((4, 3))
    paths = [rows_of(tmp_path / "a.safetensors", tensor, 0, 2), tmp_path / "b.safetensors"]
    write_slices(paths[1], [second(tensor)])
    with pytest.raises(CheckpointError, match=message):
        SlicedFiles(paths)


def test_what_no_file_has_is_refused(tmp_path: Path) -> None:
    files = SlicedFiles([rows_of(tmp_path / "a.safetensors", numbered((4, 3)), 0, 4)])
    for target, offset in ((torch.empty(2, 3), (3, 0)), (torch.empty(2, 3), (-1, 0)), (torch.empty(2), (0,))):
        with pytest.raises(CheckpointError, match=r"a.safetensors: w has shape \[4, 3\], but"):
            files.read_into("w", target, offset)
    with pytest.raises(CheckpointError, match="a.safetensors: no tensor named 'v'"):
        files.read_into("v", torch.empty(1), (0,))
    with pytest.raises(ValueError, match=r"w: \[2\] from \[3\] on is no box of \[4\]"):
        Slice("w", (4,), (3,), torch.ones(2))
    with pytest.raises(ValueError, match="w@1 is to be in one file twice"):
        write_slices(tmp_path / "a.safetensors", [Slice("w", (4,), (1,), torch.ones(n)) for n in (1, 2)])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "does not describe slices"),
        ("[]", "does not describe slices"),
        ({"a": {"name": "w", "shape": [4]}}, "does not describe slices: KeyError"),
        ({"a": {"name": 1, "shape": [4], "offset": [0]}}, "does not describe a slice under 'a'"),
        ({"a": {"name": "w", "shape": [4.0], "offset": [0]}}, "does not describe a slice under 'a'"),
        ({"a": {"name": "w", "shape": [4], "offset": [-1]}}, "does not describe a slice under 'a'"),
        ({"a": {"name": "w", "shape": [4], "offset": [3]}}, r"a has shape \[2\], which from \[3\] on is no box of w"),
        ({"a": {"name": "w", "shape": [4, 1], "offset": [0, 0]}}, "is no box of w"),
        ({"b": {"name": "w", "shape": [2], "offset": [0]}}, "holds no tensor named 'b'"),
    ],
)
def test_metadata_that_describes_no_boxes_is_named(tmp_path: Path, metadata: Any, message: str) -> None:
    path, text = tmp_path / "a.safetensors", metadata if isinstance(metadata, str) else json.dumps(metadata)
    save_file({"a": torch.ones(2)}, path, metadata={"slices": text})
    with pytest.raises(CheckpointError, match=f"a.safetensors: .*{message}"):
        SlicedFiles([path])


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_opening_takes_work_that_grows_with_the_number_of_boxes(tmp_path: Path, cut: str) -> None:
    """Counted in calls, which are the same at every run."""

    def calls(tensors: int, ranks: int) -> int:
        paths = [tmp_path / f"{tensors}-{ranks}-{rank}.safetensors" for rank in range(ranks)]
        for rank, path in enumerate(paths):
            offset, size = ((rank, 0), (1, ranks)) if cut == "rows" else ((0, rank), (ranks, 1))
            write_slices(path, [Slice(f"t{n}", (ranks, ranks), offset, torch.ones(size)) for n in range(tensors)])
        with cProfile.Profile() as profile:
            assert len(SlicedFiles(paths).names) == tensors
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]

    few = calls(50, 8)
    assert few < calls(200, 8) < 4.2 * few
    assert few < calls(50, 32) < 4.2 * few


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


def opened(folder: Path) -> tuple[Files, Decoder, dict[str, Tensor]]:
    """The files as a rank has them that holds no weight yet, its model, and what the pieces are."""
    _, family, config = read_shape(folder)
    with torch.device("meta"):
        decoder = Decoder(config)
    files = Files(folder, family, decoder)
    assert files.bytes_read == 0
    pieces = load_model(folder, CPU).module.pieces()  # type: ignore[operator]
    return files, decoder, {name: piece.detach() for name, piece in pieces.items()}


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_any_box_of_a_piece_is_read_from_wherever_it_lies(folders: Callable[[str], Path], family: str) -> None:
    """One tensor a piece, several pieces in a tensor, and these on their side."""
    files, decoder, pieces = opened(folders(family))
    assert files.shapes == {name: files.shape(name) for name in decoder.pieces()}
    for name, piece in pieces.items():
        assert files.shape(name) == tuple(piece.shape)
        for parts in (1, 3):
            for axis in range(piece.dim()):
                start = 0
                for expected in piece.tensor_split(parts, dim=axis):
                    target, before = torch.empty_like(expected, dtype=torch.float64), files.bytes_read
                    files.read_into(name, target, [start if each == axis else 0 for each in range(piece.dim())])
                    assert torch.equal(target, expected.double()), name
                    assert files.bytes_read - before == expected.numel() * 4
                    start += expected.shape[axis]


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_a_box_that_leaves_its_piece_is_refused(folders: Callable[[str], Path], family: str) -> None:
    files, _, pieces = opened(folders(family))
    name = "layers.0.attention.wq.weight"
    rows, columns = pieces[name].shape
    for size, offset in (
        ((rows, columns), (1, 0)),
        ((1, columns), (-1, 0)),
        ((1, columns), (0, 1)),
        ((1,), (0,)),
        ((1, 1), (0,)),
        ((), (0, 0)),
    ):
        with pytest.raises(CheckpointError, match=r"model.safetensors: .* has shape .* are asked of it"):
            files.read_into(name, torch.empty(size), offset)
    assert files.bytes_read == 0


@pytest.mark.parametrize("shard_bytes", [40_000, 10**9], ids=["shards", "one file"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_pieces_of_three_ranks_become_the_folder_that_one_process_writes(
    folders: Callable[[str], Path], tmp_path: Path, family: str, shard_bytes: int
) -> None:
    """Rows of every piece in three files; written from these, from the model and from its folder."""
    files, _, pieces = opened(folders(family))
    described = FAMILIES[family]
    paths = [tmp_path / f"rank-{rank}.safetensors" for rank in range(3)]
    for rank, path in enumerate(paths):
        cut = {name: torch.arange(len(piece)).tensor_split(3)[rank] for name, piece in pieces.items()}
        write_slices(
            path,
            [
                Slice(name, tuple(piece.shape), (int(cut[name][0]), *[0] * (piece.dim() - 1)), piece[cut[name]])
                for name, piece in pieces.items()
            ],
        )
    model = load_model(folders(family), CPU)
    found = []
    for number, source in enumerate([None, files, SlicedFiles(paths)]):
        place = tmp_path / str(number)
        place.mkdir()
        written = (
            save_weights(pieces, described, place, shard_bytes)
            if source is None
            else stream_weights(source, described, files.shapes, torch.float32, place, shard_bytes)
        )
        found.append({path.name: path.read_bytes() for path in written})
    assert found[0] == found[1] == found[2]
    assert (len(found[0]) > 3) == (shard_bytes == 40_000)
    if shard_bytes == 10**9:
        # The format's own writer.
        assert found[0] == {"model.safetensors": save(model.disk_tensors(), {"format": "pt"})}


def test_pieces_are_written_in_the_numbers_asked_for(folders: Callable[[str], Path], tmp_path: Path) -> None:
    files, _, _ = opened(folders("gpt2"))
    stream_weights(files, FAMILIES["gpt2"], files.shapes, torch.bfloat16, tmp_path)
    theirs, expected = load_file(tmp_path / "model.safetensors"), load_model(folders("gpt2"), CPU).disk_tensors()
    assert sorted(theirs) == sorted(expected)
    assert all(torch.equal(theirs[name], tensor.to(torch.bfloat16)) for name, tensor in expected.items())


def test_a_rank_sees_in_its_own_rows_that_a_tied_head_is_another(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders("gpt2"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    weights["lm_head.weight"][5, 3] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, family, config = read_shape(folder)
    assert config.tied
    with torch.device("meta"):
        files = Files(folder, family, Decoder(config))
    embedding = weights["transformer.wte.weight"]
    for box, offset in ((embedding[:5], (0, 0)), (embedding[6:], (6, 0)), (embedding[:, 4:], (0, 4))):
        files.check_head_copies(box, offset)
    for box, offset in ((embedding[:6], (0, 0)), (embedding[5:, 3:4], (5, 3))):
        with pytest.raises(CheckpointError, match="ties the output head to the embedding"):
            files.check_head_copies(box, offset)
