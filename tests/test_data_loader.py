"""Rows to batches, rank by rank: every sample once, in one order, on any number of ranks, wherever it goes on."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstone
from tiny import write_rows
from torchstone import InfiniteSampler, JsonlDataset, MaxTokensPerRankCollator, get_data_loader
from torchstone.config import load_config
from torchstone.data.collate import PADDING
from torchstone.data.loader import RunData, load_data
from torchstone.data.sampler import SMALL, MixedSampler
from torchstone.data.samples import split
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console


def token_rows(count: int = 40, longest: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    """Row n begins with the id n, so that it can be told apart afterwards."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ids = [number, *rng.integers(0, 400, int(rng.integers(1, longest))).tolist()]
        labels = [i if rng.random() < 0.6 else -100 for i in ids]
        rows.append({"input_ids": ids, "labels": labels, "len": len(ids)})
    return rows


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "tokens.jsonl", token_rows())


@pytest.fixture
def dataset(token_file: Path, tmp_path: Path) -> JsonlDataset:
    return JsonlDataset(token_file, cache_dir=tmp_path / "cache")


class TestJsonlDataset:
    def test_dataset_initialization(self, dataset: JsonlDataset) -> None:
        assert len(dataset) == 40

    def test_a_sample_is_its_row(self, dataset: JsonlDataset, token_file: Path) -> None:
        for number, row in enumerate(token_rows()):
            sample = dataset[number]
            assert sample["input_ids"].tolist() == row["input_ids"]
            assert sample["labels"].tolist() == row["labels"]
            assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
            assert sample["len"] == row["len"]
            assert sample["origin"] == f"{token_file}:{number + 1}"

    def test_loss_counted_tokens_are_the_labels_that_are_predicted(self, tmp_path: Path) -> None:
        """The first label has nothing before it, and -100 is no label; whatever the row says of itself."""
        rows = [
            {"input_ids": [1, 2, 3, 4], "labels": [1, -100, 3, 4], "len": 4, "num_loss_counted_tokens": 99},
            {"input_ids": [1, 2], "labels": [1, -100], "len": 2},
            {"input_ids": [7, 8, 9]},
        ]
        data = JsonlDataset(write_rows(tmp_path / "a.jsonl", rows), cache_dir=tmp_path)
        assert [data[n]["num_loss_counted_tokens"] for n in range(3)] == [2, 0, 2]

    def test_another_process_maps_the_files_for_itself(self, dataset: JsonlDataset) -> None:
        copy = pickle.dumps(dataset)
        assert len(copy) < 2000
        assert pickle.loads(copy)[7]["input_ids"].tolist() == dataset[7]["input_ids"].tolist()

    def test_indices_are_those_of_a_list(self, dataset: JsonlDataset) -> None:
        assert dataset[-1]["input_ids"].tolist() == dataset[39]["input_ids"].tolist()
        for wrong in (40, -41):
            with pytest.raises(IndexError):
                dataset[wrong]

    def test_what_is_not_tokens_is_refused(self, tmp_path: Path) -> None:
        for number, (rows, reason) in enumerate(
            [
                ([{"text": "a"}], "shape 'text'"),
                ([{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}], "1.jsonl:2: 2 input_ids and 1 labels"),
                ([{"input_ids": [1, 500]}], "id 500 is outside the vocabulary of 500"),
                ([{"input_ids": [1, 2], "labels": [-100, -100]}], "none of its 1 rows has a token to train on"),
            ]
        ):
            path = write_rows(tmp_path / f"{number}.jsonl", rows)
            with pytest.raises((DataError, UsageError), match=reason):
                JsonlDataset(path, cache_dir=tmp_path, vocab_size=500)


class TestInfiniteSampler:
    def test_every_epoch_has_every_sample_once_in_another_order(self) -> None:
        drawn = list(islice(InfiniteSampler(50, seed=3), 150))
        epochs = [drawn[at : at + 50] for at in (0, 50, 100)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert len(InfiniteSampler(50)) == 50

    @pytest.mark.parametrize("size", [1, 7, SMALL, SMALL + 1, 100_003])
    def test_an_epoch_is_a_permutation_at_any_size(self, size: int) -> None:
        order = InfiniteSampler(size, seed=1).take(size)
        assert np.array_equal(np.sort(order), np.arange(size))

    @pytest.mark.parametrize("size", [10, 100_003])
    def test_any_place_is_known_without_drawing(self, size: int) -> None:
        whole = InfiniteSampler(size, seed=5).take(2 * size + 200)
        for start in (0, 1, size - 1, size, size + 50, 2 * size):
            assert InfiniteSampler(size, seed=5, drawn=start).take(100).tolist() == whole[start : start + 100].tolist()
        places = np.array([3, 2 * size, 0, size + 3])
        assert InfiniteSampler(size, seed=5).at(places).tolist() == whole[places].tolist()

    def test_a_billion_samples_cost_nothing(self) -> None:
        sampler = InfiniteSampler(10**9, seed=0, drawn=7 * 10**9 + 123)
        drawn = sampler.take(1000)
        assert len(set(drawn.tolist())) == 1000
        assert drawn.min() >= 0
        assert drawn.max() < 10**9
        # Spread evenly: the mean of a thousand is within five standard errors of the middle.
        assert abs(drawn.mean() / 1e9 - 0.5) < 5 / np.sqrt(12 * 1000)

    def test_large_permutations_are_random_in_every_way_that_is_cheap_to_look_at(self) -> None:
        size = SMALL + 1000
        orders = np.stack([InfiniteSampler(size, seed=seed).take(size) for seed in range(40)])
        # Neighbours are unrelated, orders of other seeds too, and fixed points are as many as chance has (one each).
        for order in orders[:5]:
            assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
            assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.02
        assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.02
        assert 15 < (orders == np.arange(size)).sum() < 70
        # The first sample drawn is as likely from any tenth: chi-square over 40 x 100 first draws.
        counts = np.histogram(orders[:, :100], bins=10, range=(0, size))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 30

    def test_what_was_drawn_is_known_at_every_sample(self) -> None:
        sampler = InfiniteSampler(50, seed=3)
        first = list(islice(sampler, 7))
        assert sampler.drawn == 7
        assert (
            first + list(islice(InfiniteSampler(50, seed=3, drawn=7), 93))
            == InfiniteSampler(50, seed=3).take(100).tolist()
        )
        with pytest.raises(ValueError, match="before the first"):
            InfiniteSampler(50, drawn=-1)

    def test_seed_and_shuffle(self) -> None:
        assert InfiniteSampler(50, seed=1).take(50).tolist() != InfiniteSampler(50, seed=2).take(50).tolist()
        assert InfiniteSampler(3, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]
        with pytest.raises(ValueError, match="at least one sample"):
            InfiniteSampler(0)


class TestMixedSampler:
    @pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [3, 2, 5], [0.001, 1], [1, 2, 3, 4]])
    def test_every_source_has_its_share_of_any_run_of_draws(self, weights: list[float]) -> None:
        sizes = [7, 11, 13, 5][: len(weights)]
        sampler = MixedSampler(sizes, weights, seed=0)
        source = np.searchsorted(np.cumsum(sizes), sampler.take(10_000), side="right")
        shares = np.array(weights) / sum(weights)
        for number, share in enumerate(shares):
            seen = np.cumsum(source == number)
            assert np.abs(seen - share * np.arange(1, 10_001)).max() < len(weights) + 0.02
            assert abs(seen[-1] - sampler.drawn_from(10_000)[number]) == 0

    def test_a_source_is_seen_whole_before_it_is_seen_again(self) -> None:
        drawn = MixedSampler([5, 100], [1, 1], seed=2).take(60)
        small = [i for i in drawn.tolist() if i < 5]
        assert [sorted(small[at : at + 5]) for at in range(0, 30, 5)] == [list(range(5))] * 6
        assert len({tuple(small[at : at + 5]) for at in range(0, 30, 5)}) > 1
        large = [i for i in drawn.tolist() if i >= 5]
        assert len(set(large)) == len(large) == 30

    @given(start=st.integers(0, 10**9), count=st.integers(1, 50), seed=st.integers(0, 100))
    @settings(deadline=None, max_examples=50, derandomize=True)
    def test_going_on_anywhere_is_the_same_order(self, start: int, count: int, seed: int) -> None:
        sizes, weights = [17, 400, 70_000], [0.2, 0.5, 0.3]
        whole = MixedSampler(sizes, weights, seed).at(np.arange(start, start + 2 * count))
        assert MixedSampler(sizes, weights, seed, drawn=start + count).take(count).tolist() == whole[count:].tolist()

    def test_without_shuffling_each_source_keeps_its_order(self) -> None:
        assert MixedSampler([2, 4], [1, 2], shuffle=False).take(9).tolist() in (
            [2, 0, 3, 4, 1, 5, 2, 0, 3], [0, 2, 3, 1, 4, 5, 0, 2, 3], [2, 3, 0, 4, 5, 1, 2, 3, 0]
        )  # fmt: skip


class TestMaxTokensPerRankCollator:
    def test_every_sample_is_on_one_rank_once_and_limits_hold(self, dataset: JsonlDataset) -> None:
        batch = [dataset[n] for n in range(40)]
        ranks = [MaxTokensPerRankCollator(50, rank, 3)(batch) for rank in range(3)]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        seen = []
        for micro_batch in (m for micro_batches in ranks for m in micro_batches):
            assert micro_batch["input_ids"].shape == micro_batch["labels"].shape == micro_batch["position_ids"].shape
            assert micro_batch["input_ids"].numel() <= 50
            starts = micro_batch["position_ids"][0] == 0
            if micro_batch["num_samples"]:
                seen += micro_batch["input_ids"][0][starts].tolist()
            assert micro_batch["num_samples"] in (int(starts.sum()), 0)
        assert sorted(seen) == list(range(40))

    def test_counts_are_those_of_the_whole_batch(self, dataset: JsonlDataset) -> None:
        batch = [dataset[n] for n in range(40)]
        counted = sum(sum(label != -100 for label in row["labels"][1:]) for row in token_rows())
        ranks = [MaxTokensPerRankCollator(64, rank, 4)(batch) for rank in range(4)]
        found = [micro_batch for micro_batches in ranks for micro_batch in micro_batches]
        assert {micro_batch["batch_num_loss_counted_tokens"] for micro_batch in found} == {counted}
        assert sum(micro_batch["num_loss_counted_tokens"] for micro_batch in found) == counted
        assert sum(int((m["labels"] != -100).sum()) for m in found) == counted
        assert sum(micro_batch["num_samples"] for micro_batch in found) == 40

    def test_positions_restart_and_first_labels_are_masked(self) -> None:
        batch = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
        (micro_batch,) = MaxTokensPerRankCollator(16, 0, 1)(batch)
        assert micro_batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
        assert micro_batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]
        assert micro_batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
        assert micro_batch["doc_ids"].tolist() == [[0, 0, 0, 1, 1]]
        assert micro_batch["num_loss_counted_tokens"] == 3

    def test_a_rank_without_work_keeps_step_with_padding(self) -> None:
        batch = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
        found = [MaxTokensPerRankCollator(16, rank, 4, pad_id=2)(batch) for rank in range(4)]
        assert [len(micro_batches) for micro_batches in found] == [1] * 4
        idle = [m for (m,) in found if m["num_samples"] == 0]
        assert len(idle) == 3
        for micro_batch in idle:
            assert micro_batch["input_ids"].tolist() == [[2]]
            assert micro_batch["labels"].tolist() == [[-100]]
            assert micro_batch["num_loss_counted_tokens"] == 0
            assert micro_batch["batch_num_loss_counted_tokens"] == 2

    def test_a_sample_over_the_limit_is_dropped_counted_and_named(self, tmp_path: Path) -> None:
        rows = [{"input_ids": [1] * n} for n in (5, 20, 6, 30)]
        data = JsonlDataset(write_rows(tmp_path / "a.jsonl", rows), cache_dir=tmp_path)
        collator = MaxTokensPerRankCollator(16, 0, 1)
        with pytest.warns(UserWarning, match=r"2 samples longer than 16 tokens.*a.jsonl:2 \(20 tokens\)"):
            (micro_batch,) = collator([data[n] for n in range(4)])
        assert collator.dropped == 2
        assert micro_batch["num_samples"] == 2
        assert micro_batch["batch_num_loss_counted_tokens"] == 4 + 5

    def test_the_process_group_says_which_rank_this_is(self) -> None:
        assert (MaxTokensPerRankCollator(8).rank, MaxTokensPerRankCollator(8).world_size) == (0, 1)
        for wrong in ({"max_tokens_per_rank": 8, "rank": 3, "world_size": 2}, {"max_tokens_per_rank": 0}):
            with pytest.raises(ValueError, match="rank . of"):
                MaxTokensPerRankCollator(**wrong)


class TestGetDataLoader:
    def loader(self, token_file: Path, rank: int = 0, world_size: int = 1, **more: Any) -> Any:
        return get_data_loader(
            token_file, batch_size=6, max_tokens_per_gpu=64, seed=7, rank=rank, world_size=world_size,
            cache_dir=token_file.parent / "cache", **more,
        )  # fmt: skip

    @staticmethod
    def samples(batches: list[list[dict[str, Any]]]) -> list[int]:
        """Which rows were in one global batch, over all ranks."""
        found = []
        for micro_batch in (m for micro_batches in batches for m in micro_batches):
            starts = micro_batch["position_ids"][0] == 0
            found += micro_batch["input_ids"][0][starts].tolist() if micro_batch["num_samples"] else []
        return sorted(found)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_never_end_and_follow_the_sampler(self, token_file: Path, workers: int) -> None:
        loader = self.loader(token_file, num_workers=workers)
        assert loader.batch_size == 6
        order = InfiniteSampler(40, seed=7).take(60)
        for number, batch in enumerate(islice(loader, 10)):
            assert self.samples([batch]) == sorted(order[6 * number : 6 * number + 6].tolist())

    def test_the_global_batch_is_the_same_on_any_number_of_ranks(self, token_file: Path) -> None:
        """And going on from a number of samples, on another number of ranks, repeats none and skips none."""
        alone = [self.samples([batch]) for batch in islice(self.loader(token_file), 9)]
        for world_size in (2, 5):
            ranks = [list(islice(self.loader(token_file, rank, world_size, drawn=18), 6)) for rank in range(world_size)]
            assert [self.samples(list(step)) for step in zip(*ranks, strict=True)] == alone[3:]
            assert all(len({len(micro) for micro in step}) == 1 for step in zip(*ranks, strict=True))


def run_data(tokenizer: Tokenizer, paths: list[Path], cache_dir: Path, **settings: Any) -> tuple[RunData, Any]:
    given = {
        "model.depth": 1, "model.tokenizer": "-", "data.path": [str(path) for path in paths],
        "data.cache_dir": str(cache_dir), "data.context_length": 64, "training.global_batch_size": 6,
    }  # fmt: skip
    config = load_config(overrides=given | {key.replace("__", "."): value for key, value in settings.items()})
    return load_data(config, tokenizer, [str(path) for path in paths], None, Console("quiet")), config


def contents(data: RunData, config: Any, drawn: int, last: int, ranks: int) -> list[list[tuple[int, ...]]]:
    """Step by step, the sequences of a global batch over all ranks, as sorted tuples of ids."""
    each = [list(data.batches(config, drawn, last, rank, ranks)) for rank in range(ranks)]
    steps = []
    for step in zip(*each, strict=True):
        assert len({len(batch.micro_batches) for batch in step}) == 1
        assert len({(b.samples, b.tokens, b.loss_tokens, b.first_sample) for b in step}) == 1
        found: list[tuple[int, ...]] = []
        for micro_batch in (m for batch in step for m in batch.micro_batches):
            for ids, doc_ids in zip(micro_batch.ids.tolist(), micro_batch.doc_ids.tolist(), strict=True):
                for document in set(doc_ids) - {PADDING}:
                    found.append(tuple(i for i, d in zip(ids, doc_ids, strict=True) if d == document))
        assert sum(map(len, found)) == step[0].tokens
        counted = sum(int((m.labels != -100).sum()) for batch in step for m in batch.micro_batches)
        assert counted == step[0].loss_tokens
        steps.append(sorted(found))
    return steps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mixed")
    return [write_rows(folder / "chat.jsonl", chat_rows(50)), write_rows(folder / "text.jsonl", corpus_rows(50))]


class TestRanks:
    @pytest.mark.parametrize(
        "given",
        [
            {"paths": [0]},
            {"paths": [0], "data__packing": False},
            {"paths": [1]},
            {"paths": [1], "data__text_packing": "best-fit"},
            {"paths": [0, 1]},
            {"paths": [0, 1], "data__weights": [1, 3]},
            {"paths": [0, 1], "data__weights": [1, 3], "data__text_packing": "best-fit", "data__shuffle": False},
        ],
        ids=["chat", "padded", "stream", "best-fit", "both", "weighted", "weighted-best-fit"],
    )
    def test_going_on_anywhere_on_other_ranks_repeats_and_skips_nothing(
        self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path, given: dict
    ) -> None:
        """Across the end of an epoch; the state is the number of samples drawn and nothing else."""
        chosen = [files[n] for n in given.pop("paths")]
        data, config = run_data(tokenizer, chosen, tmp_path, **given)
        last = 2 * len(data.train) + 5
        whole = contents(data, config, 0, last, ranks=1)
        for ranks, step in ((2, 0), (3, 1), (4, len(whole) // 2), (1, len(whole) - 2)):
            again, _ = run_data(tokenizer, chosen, tmp_path, **given)
            assert contents(again, config, 6 * step, last, ranks) == whole[step:]
        if "data__weights" not in given:
            per_epoch = sorted(
                t for n in range(len(data.train)) for t in (tuple(s.ids.tolist()) for s in data.train.get(n))
            )
            first_epoch = [t for step in contents(data, config, 0, len(data.train), 2) for t in step]
            assert sorted(first_epoch) == per_epoch

    def test_weights_are_shares_of_the_samples(self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path) -> None:
        data, config = run_data(tokenizer, files, tmp_path, data__weights=[1, 3], training__global_batch_size=40)
        assert data.mixture(4000) == [
            f"chat.jsonl: 25.0 % of the samples, each seen {1000 / data.sizes[0]:.2f} times",
            f"text.jsonl: 75.0 % of the samples, each seen {3000 / data.sizes[1]:.2f} times",
        ]
        sampler = data.sampler(config.training.seed, True)
        for _ in range(5):
            assert (sampler.take(40) < data.sizes[0]).sum() == 10

    def test_an_idle_rank_has_a_row_of_padding(self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path) -> None:
        data, config = run_data(tokenizer, files[:1], tmp_path, training__global_batch_size=1)
        each = [next(data.batches(config, 0, None, rank, 3)) for rank in range(3)]
        assert [len(batch.micro_batches) for batch in each] == [1, 1, 1]
        assert sorted(int((batch.micro_batches[0].doc_ids >= 0).sum()) for batch in each)[:2] == [0, 0]
        assert {batch.loss_tokens for batch in each} == {each[0].loss_tokens}


class TestBestFit:
    def test_no_document_is_cut_and_every_row_begins_one(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(500))
        data, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit", data__context_length=256)
        whole, _ = run_data(tokenizer, [path], tmp_path, data__packing=False, data__context_length=256)
        assert whole.counts.split_long == 0
        documents = sorted(tuple(whole.train.get(n)[0].ids.tolist()) for n in range(len(whole.train)))
        rows = [[tuple(s.ids.tolist()) for s in data.train.get(n)] for n in range(len(data.train))]
        assert sorted(d for row in rows for d in row) == documents
        assert [sum(map(len, row)) for row in rows] == data.train.lengths.tolist()
        assert max(data.train.lengths) <= 256
        assert sum(data.train.lengths) / (256 * len(rows)) > 0.98
        assert data.train.loss_tokens.tolist() == [sum(len(d) - 1 for d in row) for row in rows]

    @pytest.mark.parametrize(("on_long", "lost"), [("auto", 0), ("split", 0), ("truncate", 52), ("drop", 84)])
    def test_a_document_longer_than_a_row_is_what_the_config_says(
        self, tokenizer: Tokenizer, tmp_path: Path, on_long: str, lost: int
    ) -> None:
        long = {"input_ids": [3] * 84}
        texts = write_rows(tmp_path / "text.jsonl", [{"text": tokenizer.hf.decode([300] * 83)}, {"text": "short"}])
        data, _ = run_data(
            tokenizer,
            [texts],
            tmp_path,
            data__text_packing="best-fit",
            data__context_length=32,
            data__on_long_row=on_long,
        )
        short = len(tokenizer.encode("short")) + 1
        assert data.train.lengths.sum() == len(long["input_ids"]) + short - lost
        assert data.counts.cropped_tokens == (lost if on_long == "truncate" else 0)
        assert data.counts.dropped_long == (1 if on_long == "drop" else 0)
        assert data.counts.split_long == (1 if on_long in ("auto", "split") else 0)

    def test_the_layout_is_made_once(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torchstone.data import samples

        path = write_rows(tmp_path / "text.jsonl", corpus_rows(50))
        given = {"data__text_packing": "best-fit", "data__validation_split": 0.2}
        first, _ = run_data(tokenizer, [path], tmp_path, **given)
        monkeypatch.setattr(samples, "best_fit_rows", lambda *a: pytest.fail("made again"))
        second, _ = run_data(tokenizer, [path], tmp_path, **given)
        assert first.train.lengths.tolist() == second.train.lengths.tolist()

    def test_a_damaged_layout_is_made_again(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(50))
        first, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
        (layout,) = tmp_path.glob("*/rows-*.npy")
        whole = layout.read_bytes()
        for damaged in (whole[:-30], whole[:-8] + b"\1" * 8, whole[:200] + b"\0" + whole[201:], b""):
            layout.unlink()
            layout.write_bytes(damaged)
            again, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
            assert again.train.lengths.tolist() == first.train.lengths.tolist()
            assert layout.read_bytes() == whole

    def test_without_shuffling_rows_follow_the_file(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(300))
        data, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
        first = [min(row) for row in np.split(data.train.documents, data.train.offsets[1:-1])]  # type: ignore[attr-defined]
        assert first == sorted(first)
        assert first[0] == 0


class TestSplit:
    def test_the_pieces_of_a_row_are_all_on_one_side(self) -> None:
        origins = np.repeat(np.arange(50), np.random.default_rng(0).integers(1, 5, 50))
        train, held_out = split(origins, 0.2, seed=1)
        assert sorted([*train, *held_out]) == list(range(len(origins)))
        assert not set(origins[train]) & set(origins[held_out])
        assert len(set(origins[held_out])) == 10

    def test_every_source_gives_its_share(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        paths = [write_rows(tmp_path / f"{n}.jsonl", chat_rows(40, seed=n)) for n in range(2)]
        data, _ = run_data(tokenizer, paths, tmp_path, data__validation_split=0.25)
        assert (data.sizes, len(data.validation or [])) == ([30, 30], 20)


def test_the_public_names_are_there() -> None:
    for name in torchstone.__all__:
        assert getattr(torchstone, name) is not None
    with pytest.raises(AttributeError):
        torchstone.nothing  # noqa: B018
