"""What every layout has in common: the optimizer's step, clipping, checkpoints put together, who loads what.

The parity of all layouts with Transformers is in test_layouts.py; here are the things themselves.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from layouts import CPU, Case, SharedSide, write_reference
from sides import MAX_NORM, collated
from tiny_families import make_model
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.manifest import verify
from torchstone.checkpoint.save import save_checkpoint
from torchstone.config.schema import ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.models.opening import load_model
from torchstone.models.sliced_files import SlicedFiles
from torchstone.models.slices import OPTIMIZER, WEIGHTS, slice_files
from torchstone.parallel.build import SharedBuilder
from torchstone.parallel.mesh import Place, opened
from torchstone.parallel.pipeline import split_layers
from torchstone.testing import DistributedTest, launch_procs
from torchstone.training.step import train_step

STATE = {"step": 2}
# From many ranks to few and back, over every axis.
COURSE: list[tuple[int, dict[str, Any]]] = [
    (8, {"tp": 2, "pp": 2}),
    (4, {"tp": 4}),
    (2, {"pp": 2}),
    (4, {"dp_replicate": 2}),
    (1, {}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[Path, Path]:
    """A tied Llama with a vocabulary that no number of ranks here divides, and the reference's course on it."""
    root = tmp_path_factory.mktemp("common")
    rows = tokenizer.size + 1 - tokenizer.size % 2
    folder = make_model(root / "llama", "llama", "tied", num_hidden_layers=4, num_key_value_heads=2, vocab_size=rows)
    tokenizer.save(folder)
    return folder, write_reference(folder, root / "reference")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("small")
    folder = make_model(root / "llama", "llama", "tied", num_hidden_layers=2, num_key_value_heads=2)
    return folder, write_reference(folder, root / "reference")


@contextmanager
def side(folder: Path, reference: Path, **parallel: Any) -> Iterator[SharedSide]:
    with opened(ParallelConfig(**parallel), CPU, mixed=True) as place:
        yield SharedSide(Case("", str(folder), parallel), reference, place)


class TestCommonTrainingFeatures(DistributedTest):
    world_size = 4
    timeout = 200

    @pytest.mark.parametrize(
        "parallel",
        [{"zero": 1}, {"dp_replicate": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp_replicate": 2, "zero": 1}],
        ids=str,
    )
    def test_optimizer_step(self, parallel: dict[str, Any], model: tuple[Path, Path]) -> None:
        """Gradients do not depend on accumulation, and are clipped to the norm by their true global norm."""
        with side(*model, **parallel) as ours:
            found = []
            for pieces in (1, 4):
                ours.model.train()
                norms: list[float] = []
                hook = ours.optimizer.register_step_pre_hook(lambda *_: norms.append(self.norm(ours)))  # noqa: B023
                sequences = [one for batch in ours.steps[0] for one in batch]
                count = sum(label != -100 for _, labels in sequences for label in labels[1:])
                data_ranks, rank = ours.place.data_ranks, ours.place.data_rank
                mine = sequences[rank::data_ranks]
                cut = [mine[number::pieces] for number in range(pieces)]
                batch = StepBatch(collated(cut, True, 32), 0, 0, count, 0, 0)
                before = [parameter.detach().clone() for _, parameter in ours.model.named_parameters()]
                done = train_step(ours.runner, ours.optimizer, batch, 1, 0.0, MAX_NORM)
                hook.remove()
                # A rate of zero leaves the weights where they were, to the bit.
                for (_, parameter), old in zip(ours.model.named_parameters(), before, strict=True):
                    assert torch.equal(local(parameter.detach()), local(old))
                assert done.grad_norm > MAX_NORM, "nothing is clipped"
                assert norms[0] == pytest.approx(MAX_NORM, rel=2e-6)
                found.append((done.loss, done.grad_norm, {n: local(g).clone() for n, g in ours.gradients.items()}))
            assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
            assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
            for name, gradient in found[0][2].items():
                torch.testing.assert_close(gradient, found[1][2][name], rtol=1e-4, atol=1e-6)
            assert found[0][1] == pytest.approx(ours.numbers[0]["grad_norm"], rel=1e-6)

    def norm(self, ours: SharedSide) -> float:
        """Of the gradients as the optimizer gets them, each put together whole, and counted once over the stages."""
        whole: dict[str, float] = {}
        for name, parameter in ours.model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            whole[ours.model.piece_names(name, gradient)[0]] = gradient.double().square().sum().item()
        everyone = {name: square for rank in ours.place.gather(whole) for name, square in rank.items()}
        return sum(everyone.values()) ** 0.5


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(folder: str, reference: str, tokenizer: str, root: str, parallel: dict[str, Any]) -> list[Any]:
    """Two steps, saved; and what this rank then held of weights and moments."""
    with side(Path(folder), Path(reference), **parallel) as ours:
        for number in range(2):
            ours.step(number)
        save_checkpoint(Path(root), 2, ours.model, load_tokenizer(Path(tokenizer)), ours.optimizer, STATE, ours.place)
        return held(ours)


def held(ours: SharedSide) -> list[Any]:
    found = []
    for name, parameter in ours.model.named_parameters():
        tensors = {"": parameter.detach()} | {
            f"/{key}": value for key, value in ours.optimizer.state[parameter].items() if value.dim()
        }
        for key, tensor in tensors.items():
            found += [
                (f"{box.name}{key}", box.offset, box.tensor.clone()) for box in ours.model.slices_of(name, tensor)
            ]
    return found


def resaved(source: str, tokenizer: str, root: str, reference: str, parallel: dict[str, Any]) -> list[Any]:
    """A checkpoint opened in another layout, and saved by it."""
    with side(Path(source), Path(reference), **parallel) as ours:
        restore_optimizer(Path(source), ours.optimizer, ours.model)
        save_checkpoint(Path(root), 2, ours.model, load_tokenizer(Path(tokenizer)), ours.optimizer, STATE, ours.place)
        return held(ours)


def contents(folder: Path) -> dict[str, Tensor]:
    """All weights and moments of a checkpoint, whole."""
    found = {}
    for kind in (WEIGHTS, OPTIMIZER):
        files = SlicedFiles(slice_files(folder, kind) or [folder / f"{kind}.safetensors"])
        for name in files.names:
            found[name] = torch.empty(files.shape(name), dtype=files.dtype(name))
            files.read_into(name, found[name], (0,) * found[name].dim())
    return found


def test_consolidate_custom_model_parallel_checkpoints(
    model: tuple[Path, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    """8 -> 4 -> 2 -> 4 -> 1 ranks: nothing changes by a bit, and any of them becomes a Hugging Face folder."""
    folder, reference = model
    source, first = folder, None
    for number, (ranks, parallel) in enumerate(COURSE):
        root = tmp_path / str(number)
        if first is None:
            ranks_held = launch_procs(
                trained, ranks, str(folder), str(reference), str(tokenizer_dir), str(root), parallel, timeout=200
            )
        else:
            ranks_held = launch_procs(
                resaved, ranks, str(source), str(tokenizer_dir), str(root), str(reference), parallel, timeout=200
            )
        source = root / "step-00000002"
        verify(source)
        if ranks > 1:
            found = contents(source)
            for name, offset, box in (each for rank in ranks_held for each in rank):
                there = tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))
                assert torch.equal(found[name][there], box), (parallel, name)
            first = first or found
            assert found.keys() == first.keys()
            assert all(torch.equal(found[name], first[name]) for name in first), parallel
        done = export_model(str(source), tmp_path / f"exported-{number}")
        assert done["verified"]
    # What one process saves lies in a Hugging Face folder already; all exports are that file, byte for byte.
    files = [(tmp_path / f"exported-{number}" / "model.safetensors").read_bytes() for number in range(len(COURSE))]
    assert len(set(files)) == 1
    alone = load_file(source / "model.safetensors")
    assert {
        name: tensor.tolist() for name, tensor in load_file(tmp_path / "exported-0" / "model.safetensors").items()
    } == {name: tensor.tolist() for name, tensor in alone.items()}


def test_an_untrained_model_comes_back_as_the_file_it_was(
    model: tuple[Path, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    folder, reference = model
    launch_procs(untrained, 4, str(folder), str(reference), str(tokenizer_dir), str(tmp_path / "run"))
    export_model(str(tmp_path / "run" / "step-00000002"), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def untrained(folder: str, reference: str, tokenizer: str, root: str) -> None:
    with side(Path(folder), Path(reference), tp=2, pp=2) as ours:
        save_checkpoint(Path(root), 2, ours.model, load_tokenizer(Path(tokenizer)), ours.optimizer, STATE, ours.place)


def loaded(folder: str, parallel: dict[str, Any]) -> tuple[list[str], list[tuple[str, int]], int]:
    """The names a rank has, the boxes it holds with their bytes, and the bytes it read of the weights' file."""
    from torchstone.models import weights

    made: list[weights.Files] = []
    construct = weights.Files.__init__

    def noted(self: weights.Files, *arguments: Any) -> None:
        construct(self, *arguments)
        made.append(self)

    weights.Files.__init__ = noted  # type: ignore[method-assign]
    with opened(ParallelConfig(**parallel), CPU, mixed=True) as place:
        model = load_model(Path(folder), CPU, builder=SharedBuilder(place, ParallelConfig(**parallel), "fp32", CPU))
        boxes = [
            (box.name, box.tensor.nbytes) for n, p in model.named_parameters() for box in model.slices_of(n, p.detach())
        ]
        return [name for name, _ in model.named_parameters()], boxes, sum(files.bytes_read for files in made)


@pytest.mark.parametrize("parallel", [{"pp": 4}, {"pp": 2, "schedule": "interleaved"}, {"pp": 2, "tp": 2}], ids=str)
def test_a_pipeline_rank_loads_only_its_own_parameters(parallel: dict[str, Any], model: tuple[Path, Path]) -> None:
    folder, _ = model
    ranks = parallel["pp"] * parallel.get("tp", 1)
    whole = load_model(folder, CPU)
    stages = parallel["pp"] * (2 if "schedule" in parallel else 1)
    ranges = split_layers(whole.module.config, stages)  # type: ignore[union-attr]
    names = [name for name, _ in whole.named_parameters()]
    for rank, (own, boxes, read) in enumerate(launch_procs(loaded, ranks, str(folder), parallel)):
        pipeline_rank = rank // parallel.get("tp", 1)
        expected = []
        for layers in ranges[pipeline_rank :: parallel["pp"]]:
            expected += [name for name in names if name.startswith("tok_embed") and layers.start == 0]
            expected += [name for n in layers for name in names if name.startswith(f"layers.{n}.")]
            # Tied, the head is the embedding: the last stage has a copy under its own name.
            expected += ["norm.weight", "head.weight"] if layers.stop == ranges[-1].stop else []
        assert own == expected
        assert read == sum(size for _, size in boxes)
        assert read < sum(p.numel() * 4 for _, p in whole.named_parameters())


def twenty_steps(folder: str, reference: str, parallel: dict[str, Any]) -> list[Any]:
    with side(Path(folder), Path(reference), **parallel) as ours:
        for number in range(20):
            ours.step(number % 2)
        return held(ours)


def test_what_is_replicated_is_identical_on_all_ranks_after_twenty_steps(small: tuple[Path, Path]) -> None:
    """Copies of the model, whole tensors on all ranks of tp, and both ends of a tied matrix; weights and moments."""

    def counts(ranks: int, parallel: dict[str, Any]) -> dict[str, int]:
        seen: dict[Any, Tensor] = {}
        times: dict[Any, int] = {}
        for rank in launch_procs(twenty_steps, ranks, *map(str, small), parallel, timeout=200):
            for name, offset, box in rank:
                key = name, offset, tuple(box.shape)
                assert torch.equal(seen.setdefault(key, box), box), key
                times[key] = times.get(key, 0) + 1
        return {name: count for (name, _, _), count in times.items()}

    shared = counts(4, {"dp_replicate": 2, "tp": 2})
    assert shared["norm.weight"] == shared["layers.0.attention_norm.weight"] == 4, "two copies, two ranks of tp"
    assert shared["layers.0.attention.wq.weight"] == shared["layers.0.attention.wq.weight/exp_avg_sq"] == 2
    staged = counts(4, {"dp_replicate": 2, "pp": 2})
    assert staged["layers.0.attention.wq.weight"] == 2
    assert staged["tok_embed.weight"] == staged["tok_embed.weight/exp_avg"] == 4, "two copies, at both ends"


def shortened(folder: str, reference: str, tokenizer: str, root: str) -> str:
    """A rank that cannot write: all ranks say so, and nothing is committed."""
    from torchstone.errors import CheckpointError

    with side(Path(folder), Path(reference), zero=3) as ours:
        place: Place = ours.place
        if place.rank == 1:
            original = ours.model.save

            def failing(*arguments: Any) -> None:
                original(*arguments)
                raise OSError(28, "No space left on device")

            ours.model.save = failing  # type: ignore[method-assign]
        try:
            save_checkpoint(Path(root), 2, ours.model, load_tokenizer(Path(tokenizer)), ours.optimizer, STATE, place)
        except CheckpointError as error:
            return error.message
        return "saved"


def test_a_rank_that_cannot_write_stops_the_commit_on_all(
    model: tuple[Path, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    said = launch_procs(shortened, 2, *map(str, model), str(tokenizer_dir), str(root))
    assert all("No space left" in each for each in said), said
    assert not list(root.glob("*"))


def test_a_checkpoint_without_one_rank_s_file_is_refused(
    model: tuple[Path, Path], tokenizer_dir: Path, tmp_path: Path
) -> None:
    from torchstone.errors import CheckpointError

    launch_procs(untrained, 4, *map(str, model), str(tokenizer_dir), str(tmp_path / "run"))
    folder = tmp_path / "run" / "step-00000002"
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("manifest.json", "weights-00003*"))
    (folder / "weights-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="weights-00003"):
        verify(folder)
    # Without a manifest to tell, the slices themselves do not make a whole.
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "bare", CPU)
