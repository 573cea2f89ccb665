"""The parts of parallel training by themselves: sizes, stages, heads, padding, resized rows, odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from layouts import CPU, Case, SharedSide, check_cases, judge, write_reference
from parity import FREE_LOSS_LIMIT, FREE_WEIGHT_LIMIT
from tiny_families import SHAPES, make_model
from torchstone import api
from torchstone.config import load_config
from torchstone.config.schema import ParallelConfig, TrainingConfig
from torchstone.data.collate import PADDING, MicroBatch
from torchstone.data.formats import IGNORED
from torchstone.data.packing import batching
from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, LayerKind
from torchstone.models.execution import compile_model, recompute_activations
from torchstone.models.opening import load_model
from torchstone.observe.console import Console
from torchstone.parallel.build import SharedBuilder
from torchstone.parallel.mesh import Layout, Place, layout_of, opened
from torchstone.parallel.pipeline import level, split_layers, stages_of
from torchstone.parallel.tensor import check_tensor, heads_read, shares_key_values
from torchstone.testing import launch_procs
from torchstone.training.assemble import assemble


def config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 96, "width": 32, "heads": 8, "kv_heads": 2, "head_size": 4, "mlp_width": 64, "depth": 4,
    }  # fmt: skip
    sizes |= changes
    layers = tuple(LayerKind() for _ in range(sizes.pop("depth")))
    return DecoderConfig(layers=layers, **sizes)


class TestSizes:
    @pytest.mark.parametrize(
        ("given", "processes", "wanted"),
        [
            ({}, 1, Layout()),
            ({}, 8, Layout(dp_shard=8)),
            ({"tp": 2}, 8, Layout(dp_shard=4, tp=2)),
            ({"dp_replicate": 2, "tp": 2, "pp": 2}, 8, Layout(2, 2, 1, 2)),
            ({"dp_shard": 4, "tp": 2, "pp": 4}, 32, Layout(4, 1, 4, 2)),
        ],
    )
    def test_what_is_left_is_sharded(self, given: dict[str, int], processes: int, wanted: Layout) -> None:
        assert layout_of(ParallelConfig(**given), processes) == wanted
        assert wanted.world_size == processes

    @pytest.mark.parametrize(
        ("given", "processes", "hint"),
        [
            ({"tp": 3}, 8, "parallel.tp could be 1, 2, 4, 8"),
            ({"pp": 5, "tp": 2}, 8, "parallel.pp could be 1, 2, 4"),
            ({"dp_shard": 4}, 8, "leave out parallel.dp_shard"),
            ({"dp_shard": 2, "tp": 2}, 8, "parallel.tp could be 4; or start 4 processes"),
            ({"tp": 16}, 8, "parallel.tp could be 1, 2, 4, 8; or start 16 processes"),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused_with_some_that_do(
        self, given: dict[str, int], processes: int, hint: str
    ) -> None:
        with pytest.raises(UsageError) as caught:
            layout_of(ParallelConfig(**given), processes)
        assert hint in str(caught.value)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"parallel.schedule": "interleaved"}, "pipelines"),
            ({"parallel.stages_per_rank": 2, "parallel.pp": 2}, "interleaved"),
            ({"parallel.stages_per_rank": 1, "parallel.pp": 2, "parallel.schedule": "interleaved"}, "at least 2"),
            ({"parallel.stage_layers": "1,2,3", "parallel.pp": 2}, "3 sizes for 2 stages"),
            ({"parallel.reduce": "each", "parallel.pp": 2}, "once a step"),
            ({"parallel.zero": 4}, "parallel.zero"),
        ],
    )
    def test_switches_that_contradict_each_other_are_refused(self, settings: dict[str, Any], words: str) -> None:
        base = {"model.depth": 2, "model.tokenizer": "demo:tokenizer", "data.path": "demo:corpus"}
        with pytest.raises(UsageError, match=words):
            load_config(overrides=base | settings)

    def test_batches_count_the_data_ranks(self) -> None:
        assert batching(TrainingConfig(batch_size=2, grad_accum_steps=3), False, 16, 8, ranks=4).global_batch_size == 24
        assert batching(TrainingConfig(global_batch_size=24), False, 16, 8, ranks=4).rows == 6
        assert batching(TrainingConfig(), True, 16, 8, ranks=4).global_batch_size == 16
        with pytest.raises(UsageError, match="4 data ranks"):
            batching(TrainingConfig(batch_size=2, grad_accum_steps=3, global_batch_size=6), False, 16, 8, ranks=4)


class TestStages:
    def test_every_layer_is_in_one_stage_and_the_head_counts(self) -> None:
        # A layer has 2 x 32 x 4 x (8 + 2) + 3 x 32 x 64 = 8,704 parameters, a head of 544 rows twice as many.
        even = config(depth=10, vocab_size=1)
        headed = config(depth=10, vocab_size=544)
        assert [len(stage) for stage in split_layers(even, 4)] == [3, 3, 2, 2]
        assert [len(stage) for stage in split_layers(headed, 4)] == [3, 3, 3, 1]
        assert [len(stage) for stage in split_layers(headed, 4, [4, 4, 1, 1])] == [4, 4, 1, 1]
        for stages in range(1, 11):
            layers = [n for stage in split_layers(headed, stages) for n in stage]
            assert layers == list(range(10))

    @pytest.mark.parametrize("vocabulary", [1, 96, 544, 10_000])
    @pytest.mark.parametrize("depth", [4, 7, 16])
    @pytest.mark.parametrize("stages", [2, 3, 4])
    def test_no_split_has_a_faster_slowest_stage(self, depth: int, stages: int, vocabulary: int) -> None:
        shape = config(depth=depth, vocab_size=vocabulary)
        head = vocabulary * 32 / 8704

        def slowest(sizes: list[int]) -> float:
            return max([*sizes[:-1], sizes[-1] + head])

        def all_splits(left: int, parts: int) -> list[list[int]]:
            if parts == 1:
                return [[left]]
            return [[n, *rest] for n in range(1, left - parts + 2) for rest in all_splits(left - n, parts - 1)]

        ours = [len(stage) for stage in split_layers(shape, stages)]
        assert slowest(ours) == min(map(slowest, all_splits(depth, stages)))

    def test_too_many_stages_or_wrong_sizes_are_refused(self) -> None:
        with pytest.raises(UsageError, match="5 pipeline stages are more than the model's 4 layers"):
            split_layers(config(), 5)
        with pytest.raises(UsageError, match="add up to 5"):
            split_layers(config(), 2, [3, 2])

    def test_interleaved_stages_are_dealt_out_in_turn(self) -> None:
        assert [stages_of(rank, 2, 4) for rank in range(2)] == [[0, 2], [1, 3]]
        assert [stages_of(rank, 3, 3) for rank in range(3)] == [[0], [1], [2]]

    def test_micro_batches_become_alike_by_padding_alone(self) -> None:
        uneven = [_rows(1, 16), _rows(3, 24), _rows(2, 8)]
        even = level(uneven, ranks=4, tp=3)
        assert len(even) == 4
        assert {tuple(tensor.shape) for batch in even for tensor in batch} == {(3, 24)}
        for before, after in zip(uneven, even, strict=False):
            rows, width = before.ids.shape
            for old, new in zip(before, after, strict=True):
                assert torch.equal(new[:rows, :width], old)
            assert (after.labels[rows:] == IGNORED).all()
            assert (after.labels[:, width:] == IGNORED).all()
            assert (after.doc_ids[rows:] == PADDING).all()
        assert (even[3].labels == IGNORED).all()
        assert level([_rows(1, 65)], ranks=1, tp=1)[0].ids.shape == (1, 128)


def _rows(rows: int, width: int) -> MicroBatch:
    ids = torch.arange(rows * width).reshape(rows, width) + 1
    return MicroBatch(ids, ids + 1, torch.arange(width).expand(rows, width), torch.zeros_like(ids))


class TestHeads:
    """Query heads land on their rank, beside the key/value heads that they read."""

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tp", "table"),
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
    def test_the_index_table(self, heads: int, kv_heads: int, tp: int, table: list[list[int]]) -> None:
        shape = config(heads=heads, kv_heads=kv_heads)
        assert [heads_read(shape, tp, rank) for rank in range(tp)] == table
        assert shares_key_values(shape, tp) == (kv_heads % tp == 0)

    def test_sizes_that_cannot_be_shared_out_are_refused(self) -> None:
        with pytest.raises(UsageError, match="does not divide the model's 8 attention heads") as caught:
            check_tensor(config(), 3)
        assert "1, 2, 4, 8" in str(caught.value)
        with pytest.raises(UsageError, match="50 MLP features") as caught:
            check_tensor(config(mlp_width=50), 4)
        assert "could be 1, 2" in str(caught.value)


ODD = {
    # Neither key/value heads nor vocabulary divide, and the heads of a rank read two of them.
    "llama-3": ("llama", "tied", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48,
                                  "vocab_size": 97}),
    "olmo2, one": ("olmo2", "grouped", {"num_key_value_heads": 1}),
}  # fmt: skip
# One shape of every family: norms of heads and of all features, soft caps, windows, biases, tables of positions.
ONE_EACH = {
    family: next(iter(shapes)) for family, shapes in SHAPES.items() if family not in ("llama", "qwen3", "granite")
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


def compared(root: Path, processes: int, cases: list[Case]) -> None:
    folders = {case.folder for case in cases}
    references = {folder: str(write_reference(Path(folder), Path(f"{folder}-ref"))) for folder in folders}
    saved = root / f"saved-{processes}-{cases[0].name}"
    found = launch_procs(check_cases, processes, cases, references, str(saved), timeout=300)
    for number, case in enumerate(cases):
        judge(case, [rank[number] for rank in found], saved / case.name)


def test_every_family_trains_shared_out_over_two_ranks(root: Path) -> None:
    cases = []
    for family, shape in ONE_EACH.items():
        folder = make_model(root / family, family, shape, **({"n_positions": 128} if family == "gpt2" else {}))
        cases.append(Case(f"{family} {shape}", str(folder), {"tp": 2}, free_running=False))
    assert len(cases) == 8
    compared(root, 2, cases)


def test_heads_and_vocabularies_that_do_not_divide(root: Path) -> None:
    cases = []
    for name, (family, shape, changes) in ODD.items():
        folder = make_model(root / name, family, shape, num_hidden_layers=2, **changes)
        cases.append(Case(name, str(folder), {"tp": 3 if name == "llama-3" else 2}, free_running=False))
    compared(root, 3, cases[:1])
    compared(root, 2, cases[1:])


def test_padding_that_occurs_in_text_is_not_trained_in_any_layout(root: Path) -> None:
    folder = make_model(root / "pad", "llama", "pad in text, tied", num_hidden_layers=2)
    sizes: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence": False}, {"pp": 2}, {"zero": 3}]
    cases = [Case(f"pad {number}", str(folder), each, free_running=False) for number, each in enumerate(sizes)]
    compared(root, 2, cases)


def run_otherwise(case: Case, reference: str, recompute: str, compiled: bool) -> dict[str, float]:
    with opened(ParallelConfig(**case.parallel), CPU, mixed=True) as place:
        side = SharedSide(case, Path(reference), place)
        for part in side.model.parts:
            recompute_activations(part, recompute)
            compile_model(part, "block" if compiled else "none", "aot_eager")
        return side.free_run()


def test_recomputed_and_compiled_blocks_train_the_same_in_a_layout(root: Path) -> None:
    folder = make_model(root / "lean", "llama", "grouped", num_hidden_layers=2)
    reference = str(write_reference(folder, root / "lean-ref"))
    arms: list[tuple[dict[str, Any], str, bool]] = [
        ({"zero": 3}, "full", True),
        ({"tp": 2}, "full", False),
        ({"tp": 2}, "selective", False),
        ({"pp": 2}, "selective", False),
    ]
    for parallel, recompute, compiled in arms:
        case = Case("lean", str(folder), parallel)
        for rank in launch_procs(run_otherwise, 2, case, reference, recompute, compiled, timeout=200):
            assert rank["loss"] <= FREE_LOSS_LIMIT, (parallel, recompute, rank)
            assert rank["weight"] <= FREE_WEIGHT_LIMIT, (parallel, recompute, rank)


def test_what_is_not_known_to_train_right_together_is_refused(settings: Any) -> None:
    place = Place(Layout(tp=2))
    config = load_config(overrides=settings(model__compile="block"))
    with pytest.raises(UsageError, match="does not go with parallel.tp"):
        assemble(config, Console("quiet"), CPU, place)


def test_a_layout_that_the_model_does_not_allow_is_found_before_processes_start(settings: Any, root: Path) -> None:
    with pytest.raises(UsageError, match="does not divide the model's 4 attention heads"):
        api.check_layout(load_config(overrides=settings(parallel__tp=3)), 3)
    with pytest.raises(UsageError, match="3 pipeline stages are more than the model's 2 layers"):
        api.check_layout(load_config(overrides=settings(parallel__pp=3)), 3)
    api.check_layout(load_config(overrides=settings(parallel__pp=2, parallel__tp=2)), 8)
    folder = make_model(
        root / "three", "llama", "grouped", num_attention_heads=6, hidden_size=48, num_key_value_heads=3
    )
    named = {key: value for key, value in settings(parallel__tp=4).items() if not key.startswith("model.")}
    with pytest.raises(UsageError, match="does not divide the model's 6 attention heads"):
        api.check_layout(load_config(overrides=named | {"model.path": str(folder)}), 4)
    # A run has a config.json too, which is not a model's.
    run = root / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    api.check_layout(load_config(overrides=named | {"model.path": str(run)}), 4)


def grown(folder: str, tokens: int, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    with opened(ParallelConfig(**parallel), CPU, mixed=True) as place:
        builder = SharedBuilder(place, ParallelConfig(**parallel), "fp32", CPU)
        model = load_model(Path(folder), CPU, builder=builder, tokens=tokens)
        assert any("now 104" in warning for warning in model.warnings)
        assert model.hf_config["vocab_size"] == 104
        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in model.named_parameters()
            if name in ("tok_embed.weight", "head.weight")
        }


@pytest.mark.parametrize("tied", [True, False])
def test_custom_model_resize_embedding(tied: bool, root: Path) -> None:
    """Every old row keeps its own global index, on any number of ranks; new ones are the mean of the old."""
    folder = make_model(root / f"resize-{tied}", "llama", "grouped", num_hidden_layers=2, tie_word_embeddings=tied)
    alone = load_model(folder, CPU)
    before = {name: p.detach().clone() for name, p in alone.named_parameters() if p.shape[0] == 96}
    assert alone.align(101, {}) == ["the tokenizer has 101 tokens, the model 96 rows: now 104, the new ones beginning "
                                    "as the mean of the old"]  # fmt: skip
    after = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    for parallel, ranks in (({"tp": 2}, 2), ({"tp": 4}, 4), ({"tp": 2, "zero": 3}, 4), ({"pp": 2}, 2)):
        for rank in launch_procs(grown, ranks, str(folder), 101, parallel):
            for name, whole in rank.items():
                wanted = "tok_embed.weight" if tied else name
                assert torch.equal(whole[:96], before[wanted])
                assert torch.equal(whole, after[wanted])
                mean = before[wanted].double().mean(dim=0).float()
                torch.testing.assert_close(whole[96:], mean.expand(8, -1), rtol=1e-6, atol=1e-8)
