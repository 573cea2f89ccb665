"""What all layouts have in common: the optimizer step, clipping, checkpoints, and which rank loads what.

The parity of all layouts with Transformers is in test_layouts.py.
"""

from __future__ import annotations

import resource
import shutil
import sys
from collections import Counter
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

from layouts import CPU, Case, Shard, ShardedSide, assert_shards_in, read_tensors, reference_of
from sides import MAX_NORM, collated
from steps import step_batch, train_step
from tiny_families import make_model
from torchstone.checkpoint import model_folder
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import restore_optimizer
from torchstone.checkpoint.manifest import verify_checkpoint
from torchstone.checkpoint.model_folder import load_model
from torchstone.checkpoint.save import save_checkpoint
from torchstone.checkpoint.shard_files import OPTIMIZER, WEIGHTS
from torchstone.config.schema import ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import CheckpointError
from torchstone.models.decoder import Fusion
from torchstone.parallel.build import ShardedModelBuilder
from torchstone.parallel.local_shards import local_shards, unfused_names
from torchstone.parallel.mesh import init_distributed
from torchstone.parallel.pipeline import split_layers
from torchstone.testing import DistributedTest, launch_procs

CHECKPOINT = "step-00000002"
FUSED: tuple[Fusion, ...] = ("qkv", "gate_up")
# From many ranks to few and back, over every mesh dimension.
LAYOUTS: list[tuple[int, dict[str, Any], tuple[Fusion, ...]]] = [
    (8, {"tp": 2, "pp": 2}, FUSED),
    (4, {"tp": 4}, ()),
    (2, {"pp": 2}, ()),
    (4, {"dp_replicate": 2}, ()),
    (1, {}, ()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A tied Llama with a tokenizer, whose vocabulary no number of ranks here divides."""
    size = tokenizer.size + 1 - tokenizer.size % 2
    folder = tmp_path_factory.mktemp("common") / "llama"
    make_model(folder, "llama", "tied", num_hidden_layers=4, num_key_value_heads=2, vocab_size=size)
    tokenizer.save(folder)
    return folder


@contextmanager
def sharded_side(
    folder: Path, reference: Path, parallel: dict[str, Any], fused: tuple[Fusion, ...] = ()
) -> Iterator[ShardedSide]:
    with init_distributed(ParallelConfig(**parallel), CPU, mesh_of_one=True) as ctx:
        yield ShardedSide(Case("", str(folder), parallel, fused), reference, ctx)


class TestCommonTrainingFeatures(DistributedTest):
    world_size = 4
    timeout = 200

    @pytest.fixture
    def reference(self, folder: Path) -> Path:
        return reference_of(folder)

    @pytest.mark.parametrize(
        "parallel",
        [{"zero": 1}, {"dp_replicate": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp_replicate": 2, "zero": 1}],
        ids=str,
    )
    def test_optimizer_step(self, parallel: dict[str, Any], folder: Path, reference: Path) -> None:
        """Gradients do not depend on accumulation, and are clipped by their true global norm."""
        with sharded_side(folder, reference, parallel) as side:
            results, gradients = [], []
            for accumulation in (1, 4):
                clipped_norms: list[float] = []
                hook = side.optimizer.register_step_pre_hook(
                    lambda *_: clipped_norms.append(self.global_norm(side))  # noqa: B023
                )
                before = [parameter.detach().clone() for _, parameter in side.model.named_parameters()]
                batch = self.batch(side, accumulation)
                results.append(train_step(side.runner, side.optimizer, batch, 1, 0.0, MAX_NORM))
                hook.remove()
                # A learning rate of zero keeps the weights bit for bit.
                for (_, parameter), old in zip(side.model.named_parameters(), before, strict=True):
                    assert torch.equal(local(parameter.detach()), local(old))
                assert results[-1].grad_norm > MAX_NORM, "nothing is clipped"
                assert clipped_norms == [pytest.approx(MAX_NORM, rel=2e-6)]
                gradients.append({name: local(gradient).clone() for name, gradient in side.gradients.items()})
            assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
            assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
            assert results[0].grad_norm == pytest.approx(side.results[0]["grad_norm"], rel=1e-6)
            for name, gradient in gradients[0].items():
                torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)

    def batch(self, side: ShardedSide, accumulation: int) -> StepBatch:
        """This rank's sequences of the reference's first step, in `accumulation` micro-batches."""
        sequences = [sequence for batch in side.steps[0] for sequence in batch]
        own = sequences[side.ctx.dp_rank :: side.ctx.dims.dp]
        micro_batches = collated([own[number::accumulation] for number in range(accumulation)], True, 32)
        return step_batch(micro_batches, collated([sequences], True))

    def global_norm(self, side: ShardedSide) -> float:
        """The norm of the full gradients, each counted once over all stages."""
        squares: dict[str, float] = {}
        for name, parameter in side.model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            key = unfused_names(side.model.decoder_config, name, gradient)[0]
            squares[key] = gradient.double().square().sum().item()
        merged = {key: square for rank in side.ctx.all_gather_object(squares) for key, square in rank.items()}
        return sum(merged.values()) ** 0.5


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(side: ShardedSide, folder: Path, root: Path) -> None:
    state = {"step": 2}
    save_checkpoint(root, 2, side.model, load_tokenizer(folder), side.optimizer, state, side.ctx)


def held_shards(side: ShardedSide) -> list[Shard]:
    """What this rank holds of weights and moments, named as in a checkpoint."""
    config, shards = side.model.decoder_config, list[Shard]()
    for name, parameter in side.model.named_parameters():
        tensors = {"": parameter.detach()}
        tensors |= {f"/{key}": value for key, value in side.optimizer.state[parameter].items() if value.dim()}
        for key, tensor in tensors.items():
            shards += [
                (f"{shard.name}{key}", shard.offset, shard.tensor.clone())
                for shard in local_shards(config, name, tensor)
            ]
    return shards


def train_and_save(
    folder: Path, reference: Path, root: Path, parallel: dict[str, Any], fused: tuple[Fusion, ...]
) -> list[Shard]:
    """Two steps and a checkpoint. From a checkpoint, no step."""
    with sharded_side(folder, reference, parallel, fused) as side:
        if folder.name == CHECKPOINT:
            restore_optimizer(folder, side.optimizer, side.model)
        else:
            for number in range(2):
                side.step(number)
        save(side, folder, root)
        return held_shards(side)


def test_consolidate_custom_model_parallel_checkpoints(folder: Path, tmp_path: Path) -> None:
    """8 -> 4 -> 2 -> 4 -> 1 ranks: every bit stays the same, and each checkpoint becomes the same Hugging Face file."""
    source, first, exports = folder, dict[str, Tensor](), []
    for number, (ranks, parallel, fused) in enumerate(LAYOUTS):
        root = tmp_path / str(number)
        shards = launch_procs(
            train_and_save, ranks, source, reference_of(folder), root, parallel, fused, timeout=200
        )  # fmt: skip
        source = root / CHECKPOINT
        verify_checkpoint(source)
        if ranks > 1:
            tensors = read_tensors(source, WEIGHTS) | read_tensors(source, OPTIMIZER)
            assert_shards_in([shard for rank_shards in shards for shard in rank_shards], tensors, str(parallel))
            first = first or tensors
            assert tensors.keys() == first.keys()
            assert all(torch.equal(tensors[name], first[name]) for name in first), parallel
        assert export_model(str(source), tmp_path / f"exported-{number}")["verified"]
        exports.append(tmp_path / f"exported-{number}" / "model.safetensors")
    assert len({path.read_bytes() for path in exports}) == 1
    # A single process saves a Hugging Face folder.
    exported, saved = load_file(exports[0]), load_file(source / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


def save_untrained(folder: Path, reference: Path, root: Path) -> None:
    with sharded_side(folder, reference, {"tp": 2}, FUSED) as side:
        save(side, folder, root)


@pytest.fixture(scope="module")
def untrained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an untrained model by dp_shard 2 x tp 2, with fused matrices."""
    root = tmp_path_factory.mktemp("untrained")
    launch_procs(save_untrained, 4, folder, reference_of(folder), root)
    return root / CHECKPOINT


def test_an_untrained_model_is_exported_as_the_file_it_was(untrained: Path, folder: Path, tmp_path: Path) -> None:
    export_model(str(untrained), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_checkpoint_without_one_ranks_file_is_refused(untrained: Path, tmp_path: Path) -> None:
    folder, missing = tmp_path / CHECKPOINT, "weights-00003.safetensors"
    shutil.copytree(untrained, folder, ignore=shutil.ignore_patterns(missing))
    with pytest.raises(CheckpointError, match="weights-00003"):
        verify_checkpoint(folder)
    # The remaining shards do not cover the tensors, even if no manifest says which files there were.
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        load_model(folder, CPU)


def save_with_full_disk(folder: Path, reference: Path, root: Path) -> str:
    """Rank 1 cannot write more than 10 kB into a file."""
    with sharded_side(folder, reference, {"zero": 3}) as side:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if side.ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            save(side, folder, root)
        except CheckpointError as error:
            return error.message
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return "saved"


def test_if_one_rank_cannot_write_no_rank_commits(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    messages = launch_procs(save_with_full_disk, 2, folder, reference_of(folder), root)
    assert all("could not be written" in message and "File too large" in message for message in messages), messages
    assert list(root.iterdir()) == []


def load_and_count_bytes(folder: Path, parallel: dict[str, Any]) -> tuple[list[str], int, int]:
    """The names of a rank's parameters, their bytes, and the bytes it read of the weights."""
    opened_files: list[Any] = []

    def open_weights(*args: Any) -> Any:
        opened_files.append(original(*args))
        return opened_files[-1]

    original = model_folder.open_weights
    with (
        pytest.MonkeyPatch.context() as patch,
        init_distributed(ParallelConfig(**parallel), CPU, mesh_of_one=True) as ctx,
    ):
        patch.setattr(model_folder, "open_weights", open_weights)
        model = load_model(folder, CPU, builder=ShardedModelBuilder(ctx, ParallelConfig(**parallel), "fp32", CPU))
        names = [name for name, _ in model.named_parameters()]
        size = sum(local(parameter.detach()).nbytes for _, parameter in model.named_parameters())
        return names, size, sum(files.bytes_read for files in opened_files)


@pytest.mark.parametrize("parallel", [{"pp": 4}, {"pp": 2, "schedule": "interleaved"}, {"pp": 2, "tp": 2}], ids=str)
def test_a_pipeline_rank_loads_only_its_own_parameters(parallel: dict[str, Any], folder: Path) -> None:
    pp, tp = parallel["pp"], parallel.get("tp", 1)
    model = load_model(folder, CPU)
    names = [name for name, _ in model.named_parameters()]
    assert model.decoder_config is not None
    stages = split_layers(model.decoder_config, pp * (2 if "schedule" in parallel else 1))
    for rank, (rank_names, size, read) in enumerate(launch_procs(load_and_count_bytes, pp * tp, folder, parallel)):
        expected = []
        for layers in stages[rank // tp :: pp]:
            expected += [name for name in names if name.startswith("tok_embed") and layers.start == 0]
            expected += [name for n in layers for name in names if name.startswith(f"layers.{n}.")]
            # The last stage has its own replica of the tied embedding, as the head.
            expected += ["norm.weight", "head.weight"] if layers.stop == stages[-1].stop else []
        assert rank_names == expected
        assert read == size < sum(parameter.nbytes for _, parameter in model.named_parameters())


def train_six_steps(folder: Path, reference: Path, parallel: dict[str, Any]) -> list[Shard]:
    with sharded_side(folder, reference, parallel) as side:
        for number in range(6):
            side.step(number % 2)
        return held_shards(side)


def test_replicas_are_identical_after_six_steps(tmp_path: Path) -> None:
    """Replicas of the model, parameters that all tp ranks have, both ends of a tied embedding: weights and moments."""
    folder = make_model(tmp_path / "llama", "llama", "tied", num_hidden_layers=2, num_key_value_heads=2)

    def count_replicas(parallel: dict[str, Any]) -> dict[str, int]:
        first, counts = dict[Any, Tensor](), Counter[Any]()
        for rank in launch_procs(train_six_steps, 4, folder, reference_of(folder), parallel, timeout=200):
            for name, offset, tensor in rank:
                key = name, offset, tuple(tensor.shape)
                assert torch.equal(first.setdefault(key, tensor), tensor), key
                counts[key] += 1
        return {name: count for (name, _, _), count in counts.items()}

    counts = count_replicas({"dp_replicate": 2, "tp": 2})
    assert counts["norm.weight"] == counts["layers.0.attention_norm.weight"] == 4, "two replicas, two tp ranks"
    assert counts["layers.0.attention.wq.weight"] == counts["layers.0.attention.wq.weight/exp_avg_sq"] == 2
    counts = count_replicas({"dp_replicate": 2, "pp": 2})
    assert counts["layers.0.attention.wq.weight"] == 2
    assert counts["tok_embed.weight"] == counts["tok_embed.weight/exp_avg"] == 4, "two replicas, two ends"
