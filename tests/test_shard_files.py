"""Shards of tensors that some ranks write and others read: the same bits, and only the bytes that are asked for."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from tiny_families import make_model
from torchstone.checkpoint.model_folder import load_model, read_model_config
from torchstone.checkpoint.save import hf_state_dict
from torchstone.checkpoint.shard_files import ShardedFiles, write_shards
from torchstone.checkpoint.tensor_files import open_tensor_file
from torchstone.checkpoint.weight_files import WeightFiles, save_weights, write_weights
from torchstone.checkpoint.weight_names import WEIGHT_NAMES
from torchstone.errors import CheckpointError
from torchstone.models.decoder import Decoder
from torchstone.parallel.local_shards import TensorShard

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def shard_of(name: str, tensor: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> TensorShard:
    values = tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return TensorShard(name, tuple(tensor.shape), offset, values)


def write_rows(path: Path, tensor: Tensor, start: int, stop: int) -> Path:
    write_shards(path, [shard_of("w", tensor, (start, 0), (stop - start, tensor.shape[1]))])
    return path


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Bounds]:
    """The slices that a shape is cut into along random edges; some are empty."""
    axes = []
    for size in shape:
        edges = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))])
        axes.append([(low, high - low) for low, high in itertools.pairwise(edges)])
    return [(tuple(low for low, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*axes)]


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[tuple[int, ...], torch.dtype, list[tuple[Bounds, set[int]]]]]:
    """Some tensors, each cut by a grid of its own, each shard held by one rank or several."""
    cases = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        owned = [(each, draw(st.sets(st.integers(0, 3), min_size=1, max_size=2))) for each in draw(grids(shape))]
        cases.append((shape, draw(st.sampled_from(DTYPES)), owned))
    return cases


@settings(max_examples=200, deadline=None)
@given(data=st.data(), cases=tensors())
def test_any_layout_reads_what_another_wrote(
    data: st.DataObject, cases: list[tuple[tuple[int, ...], torch.dtype, list[tuple[Bounds, set[int]]]]]
) -> None:
    # A layout has no shards of an empty tensor.
    cases = [case for case in cases if torch.Size(case[0]).numel()]
    values = {f"t{n}": numbered(shape, dtype) for n, (shape, dtype, _) in enumerate(cases)}
    by_rank: list[list[TensorShard]] = [[] for _ in range(4)]
    for name, (_, _, owned) in zip(values, cases, strict=True):
        for (offset, size), ranks in owned:
            for rank in ranks:
                by_rank[rank].append(shard_of(name, values[name], offset, size))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank-{rank}.safetensors" for rank in range(4)]
        for path, shards in zip(paths, by_rank, strict=True):
            write_shards(path, shards)
        files = ShardedFiles(paths)
        assert sorted(files.names) == sorted(values)
        for name, value in values.items():
            assert (files.shape(name), files.dtype(name)) == (tuple(value.shape), value.dtype)
            for offset, size in data.draw(grids(tuple(value.shape))):
                expected = shard_of(name, value, offset, size).tensor
                wide = data.draw(st.booleans())
                target = torch.full((*size, 2), 77, dtype=torch.float64 if wide else value.dtype)
                before = files.bytes_read
                files.read_into(name, target[..., 0], offset)
                assert torch.equal(target[..., 0], expected.to(target.dtype))
                assert bool((target[..., 1] == 77).all())
                assert files.bytes_read - before == expected.nbytes


def test_whole_tensors_make_an_ordinary_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    values = {"w": numbered((3, 4), torch.bfloat16), "step": torch.tensor(5), "none": torch.empty(0, 2)}
    write_shards(path, [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in values.items()])
    assert open_tensor_file(path).metadata == {}
    stored = load_file(path)
    assert sorted(stored) == sorted(values)
    assert all(torch.equal(stored[name], value) and stored[name].dtype == value.dtype for name, value in values.items())


def test_an_ordinary_file_is_read_too_whatever_its_names(tmp_path: Path) -> None:
    save_file({"w@0,0": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = ShardedFiles([tmp_path / "model.safetensors"])
    assert (files.names, files.shape("w@0,0")) == (["w@0,0"], (2, 2))


def test_the_format_of_a_file_of_shards(tmp_path: Path) -> None:
    """Checkpoints of earlier versions have it too."""
    path, tensor = tmp_path / "rank-0.safetensors", numbered((6, 4))
    slices = [((0, 0), (3, 2)), ((3, 2), (3, 2)), ((3, 0), (0, 2))]
    shards = [shard_of("w", tensor, offset, size) for offset, size in slices]
    write_shards(path, [*shards, TensorShard("b", (4,), (0,), torch.ones(4, dtype=torch.float64))])
    file = open_tensor_file(path)
    assert file.tensors.keys() == {"b", "w@0,0", "w@3,2"}
    assert json.loads(file.metadata["slices"]) == {
        "w@0,0": {"name": "w", "shape": [6, 4], "offset": [0, 0]},
        "w@3,2": {"name": "w", "shape": [6, 4], "offset": [3, 2]},
    }
    assert torch.equal(file.tensors["w@3,2"], tensor[3:, 2:])


def test_a_shard_in_two_files_is_read_once_and_from_the_first(tmp_path: Path) -> None:
    tensor = numbered((4, 3))
    paths = [write_rows(tmp_path / f"{n}.safetensors", tensor + 100 * n, 0, 4) for n in range(2)]
    files, target = ShardedFiles(paths), torch.empty(4, 3)
    files.read_into("w", target, (0, 0))
    assert torch.equal(target, tensor)
    assert files.bytes_read == tensor.nbytes


def test_a_missing_file_of_a_rank_is_an_error(tmp_path: Path) -> None:
    tensor = numbered((12, 3))
    paths = [write_rows(tmp_path / f"rank-{n}.safetensors", tensor, 4 * n, 4 * n + 4) for n in range(3)]
    ShardedFiles(paths)
    with pytest.raises(
        CheckpointError, match=r"rank-0.*rank-2.*: w of shape \[12, 3\] is incomplete: 24 of 36 elements are present"
    ) as caught:
        ShardedFiles([paths[0], paths[2]])
    assert caught.value.hint == "is the file of a rank missing, or from another checkpoint?"
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: .* No such file"):
        ShardedFiles(paths)


@pytest.mark.parametrize(
    ("offset", "dtype", "error"),
    [
        ((1, 0), torch.float32, "of shape [4, 2] has shards that overlap"),
        ((3, 0), torch.float32, "of shape [4, 2] has a shard beyond its end"),
        ((2, 0), torch.float16, "of shape [4, 2] has shards of different shapes or dtypes"),
    ],
)
def test_shards_that_do_not_fit_together_are_an_error(
    tmp_path: Path, offset: tuple[int, int], dtype: torch.dtype, error: str
) -> None:
    """An overlap and a hole of the same size have the right number of elements."""
    paths = [tmp_path / "rank-0.safetensors", tmp_path / "rank-1.safetensors"]
    write_shards(paths[0], [TensorShard("w", (4, 2), (0, 0), torch.ones(2, 2))])
    write_shards(paths[1], [TensorShard("w", (4, 2), offset, torch.ones(2, 2, dtype=dtype))])
    with pytest.raises(CheckpointError) as caught:
        ShardedFiles(paths)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    "slices",
    ["{", "[]", '{"w": {}}', '{"w": {"name": "w", "shape": [4], "offset": [0]}}', '{"w": {"name": "w", "shape": 4}}'],
)
def test_metadata_that_does_not_describe_shards_is_an_error(tmp_path: Path, slices: str) -> None:
    path = tmp_path / "rank-0.safetensors"
    save_file({"w": torch.ones(2, 2)}, path, metadata={"slices": slices})
    with pytest.raises(CheckpointError, match="its metadata does not describe shards"):
        ShardedFiles([path])


def test_a_slice_that_no_file_has_is_refused(tmp_path: Path) -> None:
    files = ShardedFiles([write_rows(tmp_path / "a.safetensors", numbered((4, 3)), 0, 4)])
    for target, offset in ((torch.empty(2, 3), (3, 0)), (torch.empty(2, 3), (-1, 0)), (torch.empty(2), (0,))):
        with pytest.raises(ValueError, match=r"w of shape \[4, 3\] has no slice|zip"):
            files.read_into("w", target, offset)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_model(tmp_path_factory.mktemp(family), family))


def open_files(folder: Path) -> WeightFiles:
    hf_config, _, config = read_model_config(folder)
    with torch.device("meta"):
        files = WeightFiles(folder, WEIGHT_NAMES[hf_config["model_type"]], Decoder(config))
    assert files.bytes_read == 0
    return files


def unfused_parameters(folder: Path) -> dict[str, Tensor]:
    parameters = load_model(folder, CPU).module.unfused_parameters()  # type: ignore[operator]
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_any_slice_of_a_parameter_is_read_from_wherever_it_lies(folders: Callable[[str], Path], family: str) -> None:
    """One parameter in a tensor, several in a tensor, and these transposed."""
    files, parameters = open_files(folders(family)), unfused_parameters(folders(family))
    assert files.shapes.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert files.shape(name) == tuple(parameter.shape)
        for parts in (1, 3):
            for axis in range(parameter.dim()):
                start = 0
                for expected in parameter.tensor_split(parts, dim=axis):
                    target, before = torch.empty_like(expected, dtype=torch.float64), files.bytes_read
                    files.read_into(name, target, [start if each == axis else 0 for each in range(parameter.dim())])
                    assert torch.equal(target, expected.double()), name
                    assert files.bytes_read - before == expected.numel() * 4
                    start += expected.shape[axis]


@pytest.mark.parametrize("shard_bytes", [40_000, 10**9], ids=["shards", "one file"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_shards_of_three_ranks_become_the_folder_that_one_process_writes(
    folders: Callable[[str], Path], tmp_path: Path, family: str, shard_bytes: int
) -> None:
    """A third of every parameter in each file; written from these, from the model and from its folder."""
    files, parameters = open_files(folders(family)), unfused_parameters(folders(family))
    names = WEIGHT_NAMES[family]
    paths = [tmp_path / f"rank-{rank}.safetensors" for rank in range(3)]
    for rank, path in enumerate(paths):
        shards = []
        for name, parameter in parameters.items():
            index = torch.arange(len(parameter)).tensor_split(3)[rank]
            offset = (int(index[0]), *[0] * (parameter.dim() - 1))
            shards.append(TensorShard(name, tuple(parameter.shape), offset, parameter[index]))
        write_shards(path, shards)
    model = load_model(folders(family), CPU)
    contents = []
    for number, source in enumerate([None, files, ShardedFiles(paths)]):
        target = tmp_path / str(number)
        target.mkdir()
        written = (
            save_weights(parameters, names, target, shard_bytes)
            if source is None
            else write_weights(source, names, files.shapes, torch.float32, target, shard_bytes)
        )
        contents.append({path.name: path.read_bytes() for path in written})
    assert contents[0] == contents[1] == contents[2]
    assert (len(contents[0]) > 3) == (shard_bytes == 40_000)
    if shard_bytes == 10**9:
        assert contents[0] == {"model.safetensors": save(hf_state_dict(model), {"format": "pt"})}


def test_weights_are_written_in_another_dtype(folders: Callable[[str], Path], tmp_path: Path) -> None:
    files = open_files(folders("gpt2"))
    write_weights(files, WEIGHT_NAMES["gpt2"], files.shapes, torch.bfloat16, tmp_path)
    stored, expected = load_file(tmp_path / "model.safetensors"), hf_state_dict(load_model(folders("gpt2"), CPU))
    assert sorted(stored) == sorted(expected)
    assert all(torch.equal(stored[name], tensor.to(torch.bfloat16)) for name, tensor in expected.items())


def test_a_rank_sees_in_its_own_shard_that_a_tied_head_differs(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("gpt2"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    weights["lm_head.weight"][5, 3] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = open_files(folder)
    embedding = weights["transformer.wte.weight"]
    for shard, offset in ((embedding[:5], (0, 0)), (embedding[6:], (6, 0)), (embedding[:, 4:], (0, 4))):
        files.check_head_copies(shard, offset)
    for shard, offset in ((embedding[:6], (0, 0)), (embedding[5:, 3:4], (5, 3))):
        with pytest.raises(CheckpointError, match="ties the head to the embedding"):
            files.check_head_copies(shard, offset)
