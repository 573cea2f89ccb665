"""The parts of parallel training: sizes, stages, heads, padding, resized embeddings, sizes that do not divide."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import parity
from layouts import CPU, Case, ShardedSide, check_layouts, free_rounding, reference_of
from selection import the_rest
from tiny_families import SHAPES, make_model
from torchstone import api
from torchstone.checkpoint.model_folder import load_model
from torchstone.config import load_config
from torchstone.config.schema import ParallelConfig, TrainingConfig
from torchstone.data.batch_sizes import resolve_batch_sizes
from torchstone.data.collate import PADDING_DOC_ID, MicroBatch
from torchstone.data.formats import IGNORE_INDEX
from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, LayerSpec
from torchstone.models.execution import apply_activation_checkpointing, compile_decoder
from torchstone.observe.console import Console
from torchstone.parallel.build import ShardedModelBuilder
from torchstone.parallel.mesh import ParallelContext, ParallelDims, init_distributed, resolve_dims
from torchstone.parallel.pipeline import pad_to_equal_shapes, split_layers, stage_indices
from torchstone.parallel.tensor_parallel import check_tp, kv_head_indices, shards_kv_heads
from torchstone.testing import launch_procs
from torchstone.training.setup import build_run


def decoder_config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 96, "width": 32, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp_width": 64, "depth": 4,
    }  # fmt: skip
    sizes |= changes
    layers = tuple(LayerSpec() for _ in range(sizes.pop("depth")))
    return DecoderConfig(layers=layers, **sizes)


class TestSizes:
    @pytest.mark.parametrize(
        ("parallel", "processes", "expected"),
        [
            ({}, 1, ParallelDims()),
            ({}, 8, ParallelDims(dp_shard=8)),
            ({"tp": 2}, 8, ParallelDims(dp_shard=4, tp=2)),
            ({"dp_replicate": 2, "tp": 2, "pp": 2}, 8, ParallelDims(pp=2, dp_replicate=2, tp=2)),
            ({"dp_shard": 4, "tp": 2, "pp": 4}, 32, ParallelDims(pp=4, dp_shard=4, tp=2)),
        ],
    )
    def test_dp_shard_takes_the_remaining_processes(
        self, parallel: dict[str, int], processes: int, expected: ParallelDims
    ) -> None:
        assert resolve_dims(ParallelConfig(**parallel), processes) == expected
        assert expected.world_size == processes

    @pytest.mark.parametrize(
        ("parallel", "processes", "hint"),
        [
            ({"tp": 3}, 8, "use --parallel.tp 1 or 2 or 4 or 8, or start 3 processes (--nproc 3)"),
            ({"tp": 3}, 512, "use --parallel.tp 1 or 2 or 4 or 8, or start 3 processes"),
            ({"pp": 5, "tp": 2}, 8, "use --parallel.pp 1 or 2 or 4, or start 10 processes (--nproc 10)"),
            ({"dp_shard": 4}, 8, "leave out parallel.dp_shard"),
            ({"dp_shard": 2, "tp": 2}, 8, "use --parallel.tp 4, or start 4 processes"),
            ({"tp": 16}, 8, "use --parallel.tp 1 or 2 or 4 or 8, or start 16 processes"),
        ],
    )
    def test_an_error_suggests_sizes_that_fit(self, parallel: dict[str, int], processes: int, hint: str) -> None:
        with pytest.raises(UsageError) as caught:
            resolve_dims(ParallelConfig(**parallel), processes)
        assert hint in caught.value.hint

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"parallel.schedule": "interleaved"}, "pipelines"),
            ({"parallel.stages_per_rank": 2, "parallel.pp": 2}, "interleaved"),
            ({"parallel.stages_per_rank": 1, "parallel.pp": 2, "parallel.schedule": "interleaved"}, "at least 2"),
            ({"parallel.stage_layers": "1,2,3", "parallel.pp": 2}, "does not have one number per stage"),
            ({"parallel.reduce": "each", "parallel.pp": 2}, "once per step"),
            ({"parallel.zero": 4}, "parallel.zero"),
        ],
    )
    def test_contradicting_settings_are_refused(self, settings: dict[str, Any], message: str) -> None:
        base = {"model.depth": 2, "model.tokenizer": "demo:tokenizer", "data.path": "demo:corpus"}
        with pytest.raises(UsageError, match=message):
            load_config(overrides=base | settings)

    def test_the_global_batch_size_counts_the_data_parallel_ranks(self) -> None:
        def resolve(packed: bool = False, **training: int) -> Any:
            return resolve_batch_sizes(TrainingConfig(**training), packed, 16, 8, dp=4)

        assert resolve(batch_size=2, grad_accum_steps=3).global_batch_size == 24
        assert resolve(global_batch_size=24).micro_batch_rows == 6
        assert resolve(packed=True).global_batch_size == 16
        with pytest.raises(UsageError, match="4 data-parallel ranks"):
            resolve(batch_size=2, grad_accum_steps=3, global_batch_size=6)


class TestStages:
    def test_every_layer_is_in_one_stage_and_the_head_counts(self) -> None:
        # A layer has 2 x 32 x 4 x (8 + 2) + 3 x 32 x 64 = 8,704 parameters, a head of 544 tokens twice as many.
        without_head = decoder_config(depth=10, vocab_size=1)
        with_head = decoder_config(depth=10, vocab_size=544)
        assert [len(stage) for stage in split_layers(without_head, 4)] == [3, 3, 2, 2]
        assert [len(stage) for stage in split_layers(with_head, 4)] == [3, 3, 3, 1]
        assert [len(stage) for stage in split_layers(with_head, 4, [4, 4, 1, 1])] == [4, 4, 1, 1]
        for stages in range(1, 11):
            layers = [n for stage in split_layers(with_head, stages) for n in stage]
            assert layers == list(range(10))

    def test_no_other_split_has_a_faster_slowest_stage(self) -> None:
        def all_splits(depth: int, stages: int) -> list[list[int]]:
            if stages == 1:
                return [[depth]]
            return [[n, *rest] for n in range(1, depth - stages + 2) for rest in all_splits(depth - n, stages - 1)]

        def slowest(sizes: list[int], head: float) -> float:
            return max([*sizes[:-1], sizes[-1] + head])

        for vocabulary, depth, stages in itertools.product((1, 96, 544, 10_000), (4, 7, 16), (2, 3, 4)):
            config, head = decoder_config(depth=depth, vocab_size=vocabulary), vocabulary * 32 / 8704
            best = min(slowest(sizes, head) for sizes in all_splits(depth, stages))
            assert slowest([len(stage) for stage in split_layers(config, stages)], head) == best

    def test_too_many_stages_or_wrong_sizes_are_refused(self) -> None:
        with pytest.raises(UsageError, match="5 pipeline stages are more than the model's 4 layers"):
            split_layers(decoder_config(), 5)
        with pytest.raises(UsageError, match="adds up to 5"):
            split_layers(decoder_config(), 2, [3, 2])

    def test_a_rank_has_every_pp_th_stage(self) -> None:
        assert [stage_indices(rank, 2, 4) for rank in range(2)] == [[0, 2], [1, 3]]
        assert [stage_indices(rank, 3, 3) for rank in range(3)] == [[0], [1], [2]]

    def test_micro_batches_get_equal_shapes_by_padding_only(self) -> None:
        uneven = [micro_batch(1, 16), micro_batch(3, 24), micro_batch(2, 8)]
        even = pad_to_equal_shapes(uneven, pp=4, tp=3)
        assert len(even) == 4
        assert {tuple(tensor.shape) for batch in even for tensor in batch.tensors} == {(3, 24)}
        for before, after in zip(uneven, even, strict=False):
            rows, length = before.ids.shape
            for old, new in zip(before.tensors, after.tensors, strict=True):
                assert torch.equal(new[:rows, :length], old)
            assert (after.labels[rows:] == IGNORE_INDEX).all()
            assert (after.labels[:, length:] == IGNORE_INDEX).all()
            assert (after.doc_ids[rows:] == PADDING_DOC_ID).all()
        assert (even[3].labels == IGNORE_INDEX).all()
        assert pad_to_equal_shapes([micro_batch(1, 65)], pp=1, tp=1)[0].ids.shape == (1, 128)


def micro_batch(rows: int, length: int) -> MicroBatch:
    ids = torch.arange(rows * length).reshape(rows, length) + 1
    return MicroBatch(ids, ids + 1, torch.arange(length).expand(rows, length), torch.zeros_like(ids))


class TestHeads:
    """A rank has its query heads and the key/value heads that they read."""

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tp", "indices"),
        [
            (8, 2, 1, [[0, 0, 0, 0, 1, 1, 1, 1]]),
            (8, 2, 2, [[0, 0, 0, 0], [1, 1, 1, 1]]),
            (8, 2, 4, [[0, 0], [0, 0], [1, 1], [1, 1]]),
            (8, 2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
            (6, 2, 3, [[0, 0], [0, 1], [1, 1]]),
            (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
            (4, 4, 2, [[0, 1], [2, 3]]),
            (8, 1, 4, [[0, 0]] * 4),
        ],
    )
    def test_kv_head_of_every_query_head(self, heads: int, kv_heads: int, tp: int, indices: list[list[int]]) -> None:
        config = decoder_config(heads=heads, kv_heads=kv_heads)
        assert [kv_head_indices(config, tp, rank) for rank in range(tp)] == indices
        assert shards_kv_heads(config, tp) == (kv_heads % tp == 0)

    def test_tp_must_divide_the_heads_and_the_mlp(self) -> None:
        with pytest.raises(UsageError, match="does not divide the model's 8 attention heads") as caught:
            check_tp(decoder_config(), 3)
        assert caught.value.hint == "use --parallel.tp 1 or 2 or 4 or 8"
        with pytest.raises(UsageError, match="50 MLP features") as caught:
            check_tp(decoder_config(mlp_width=50), 4)
        assert caught.value.hint == "use --parallel.tp 1 or 2"


# One shape of every other family than test_layouts.py's: norms of heads and of all features, soft caps, windows,
# biases, learned positions.
ONE_SHAPE = {
    family: next(iter(shapes)) for family, shapes in SHAPES.items() if family not in ("llama", "qwen3", "granite")
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


def test_every_family_trains_with_tp_2(root: Path) -> None:
    cases = []
    for family, shape in ONE_SHAPE.items():
        folder = make_model(root / family, family, shape, **({"n_positions": 128} if family == "gpt2" else {}))
        cases.append(Case(f"{family} {shape}", str(folder), {"tp": 2}, free_running=False))
    assert len(cases) == 8
    check_layouts(cases, 2, root)


def test_heads_and_vocabulary_need_not_divide(root: Path) -> None:
    # tp divides neither the key/value heads nor the vocabulary, and the query heads of a rank read two of them.
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "vocab_size": 97}
    llama = make_model(root / "odd llama", "llama", "tied", num_hidden_layers=2, **sizes)
    check_layouts([Case("llama", str(llama), {"tp": 3}, free_running=False)], 3, root)
    olmo = make_model(root / "odd olmo2", "olmo2", "grouped", num_hidden_layers=2, num_key_value_heads=1)
    check_layouts([Case("olmo2", str(olmo), {"tp": 2}, free_running=False)], 2, root)


def test_the_padding_embedding_is_not_trained_in_any_layout(root: Path) -> None:
    """Not even if the padding token occurs in text."""
    folder = make_model(root / "pad", "llama", "pad in text, tied", num_hidden_layers=2)
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence": False}, {"pp": 2}, {"zero": 3}]
    check_layouts([Case(f"pad {each}", str(folder), each, free_running=False) for each in layouts], 2, root)


def free_run(case: Case, reference: str, recompute: str, compiled: bool) -> dict[str, Any]:
    with init_distributed(ParallelConfig(**case.parallel), CPU, mesh_of_one=True) as ctx:
        side = ShardedSide(case, Path(reference), ctx)
        for part in side.model.model_parts:
            apply_activation_checkpointing(part, recompute)
            compile_decoder(part, "block" if compiled else "none", "aot_eager")
        return side.free_run()


@pytest.mark.parametrize(
    ("parallel", "recompute", "compiled"),
    [
        ({"zero": 3}, "full", True),
        ({"tp": 2}, "selective", False),
        pytest.param({"tp": 2}, "full", False, marks=the_rest),
        pytest.param({"pp": 2}, "selective", False, marks=the_rest),
    ],
    ids=str,
)
def test_recomputed_and_compiled_blocks_train_the_same(
    parallel: dict[str, Any], recompute: str, compiled: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "llama", "llama", "grouped", num_hidden_layers=2)
    reference, differences = reference_of(folder), parity.Differences()
    case = Case("", str(folder), parallel)
    for rank in launch_procs(free_run, 2, case, str(reference), recompute, compiled, timeout=200):
        differences.see("loss", rank["loss"])
        for name, value in rank["weights"].items():
            differences.see("weight", value, name)
    differences.check(parity.FREE_LIMITS, lambda: free_rounding(folder, reference))


def test_compile_is_refused_with_tp(settings: Any) -> None:
    config = load_config(overrides=settings(model__compile="block"))
    with pytest.raises(UsageError, match="model.compile does not work with parallel.tp"):
        build_run(config, Console("quiet"), CPU, ParallelContext(ParallelDims(tp=2)))


def test_a_layout_that_does_not_fit_the_model_is_refused_before_processes_start(settings: Any, root: Path) -> None:
    def check(world_size: int, **overrides: Any) -> None:
        base = settings()
        if "model.path" in overrides:
            base = {key: value for key, value in base.items() if not key.startswith("model.")}
        api.check_parallel_dims(load_config(overrides=base | overrides), world_size)

    with pytest.raises(UsageError, match="does not divide the model's 4 attention heads"):
        check(3, **{"parallel.tp": 3})
    with pytest.raises(UsageError, match="3 pipeline stages are more than the model's 2 layers"):
        check(3, **{"parallel.pp": 3})
    check(8, **{"parallel.pp": 2, "parallel.tp": 2})
    sizes = {"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 3}
    folder = make_model(root / "six heads", "llama", "grouped", **sizes)
    with pytest.raises(UsageError, match="does not divide the model's 6 attention heads"):
        check(4, **{"parallel.tp": 4, "model.path": str(folder)})
    # A run's folder has a config.json too, but not a model's. Its checkpoint is checked later.
    run = root / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    check(4, **{"parallel.tp": 4, "model.path": str(run)})


def load_resized(folder: str, tokenizer_size: int, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    with init_distributed(ParallelConfig(**parallel), CPU, mesh_of_one=True) as ctx:
        builder = ShardedModelBuilder(ctx, ParallelConfig(**parallel), "fp32", CPU)
        model = load_model(Path(folder), CPU, builder=builder, tokenizer_size=tokenizer_size)
        assert any("resized to 104" in warning for warning in model.warnings)
        assert model.hf_config["vocab_size"] == 104
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in model.named_parameters()
            if name in ("tok_embed.weight", "head.weight")
        }


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_keep_their_index_in_every_layout(tied: bool, root: Path) -> None:
    """Every old embedding keeps its global index on any number of ranks; new ones are the mean of the old."""
    folder = make_model(root / f"resize-{tied}", "llama", "grouped", num_hidden_layers=2, tie_word_embeddings=tied)
    before = {name: p.detach() for name, p in load_model(folder, CPU).named_parameters() if p.shape[0] == 96}
    model = load_model(folder, CPU, tokenizer_size=101)
    assert model.warnings == [
        "the tokenizer has 101 tokens, the model has 96 embeddings: resized to 104; new ones are the mean of the old"
    ]
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parallel, world_size in (({"tp": 2}, 2), ({"tp": 4}, 4), ({"tp": 2, "zero": 3}, 4), ({"pp": 2}, 2)):
        for rank in launch_procs(load_resized, world_size, str(folder), 101, parallel):
            for name, tensor in rank.items():
                key = "tok_embed.weight" if tied else name
                assert torch.equal(tensor[:96], before[key])
                assert torch.equal(tensor, after[key])
                mean = before[key].double().mean(dim=0).float()
                torch.testing.assert_close(tensor[96:], mean.expand(8, -1), rtol=1e-6, atol=1e-8)
