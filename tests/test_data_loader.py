"""Datasets, samplers, collators and loaders: every sample once, in one order, on any number of ranks."""

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
from torchstone.config.schema import Config
from torchstone.data import samples
from torchstone.data.collate import PADDING_DOC_ID
from torchstone.data.loader import RunData, load_data
from torchstone.data.sampler import MAX_NUMPY_SIZE, MixedSampler
from torchstone.data.samples import split_validation
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console


def token_rows(count: int = 40, longest: int = 30) -> list[dict[str, Any]]:
    """Row n starts with the id n, which identifies it."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        ids = [number, *rng.integers(0, 400, int(rng.integers(1, longest))).tolist()]
        labels = [i if rng.random() < 0.6 else -100 for i in ids]
        rows.append({"input_ids": ids, "labels": labels, "len": len(ids)})
    return rows


def first_ids(micro_batches: list[dict[str, Any]]) -> list[int]:
    """The first id of every sample in the micro-batches, which is the number of its row."""
    ids = []
    for micro_batch in micro_batches:
        if micro_batch["num_samples"]:
            ids += micro_batch["input_ids"][0][micro_batch["position_ids"][0] == 0].tolist()
    return ids


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "tokens.jsonl", token_rows())


@pytest.fixture
def dataset(token_file: Path, tmp_path: Path) -> JsonlDataset:
    return JsonlDataset(token_file, cache_dir=tmp_path / "cache")


class TestJsonlDataset:
    def test_dataset_initialization(self, dataset: JsonlDataset) -> None:
        assert len(dataset) == 40

    def test_samples_equal_their_rows(self, dataset: JsonlDataset, token_file: Path) -> None:
        for number, row in enumerate(token_rows()):
            sample = dataset[number]
            assert sample["input_ids"].tolist() == row["input_ids"]
            assert sample["labels"].tolist() == row["labels"]
            assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
            assert sample["len"] == row["len"]
            assert sample["origin"] == f"{token_file}:{number + 1}"

    def test_only_predicted_labels_are_loss_counted(self, tmp_path: Path) -> None:
        """Not the first label, which has nothing before it, nor -100; whatever count the row has."""
        rows = [
            {"input_ids": [1, 2, 3, 4], "labels": [1, -100, 3, 4], "len": 4, "num_loss_counted_tokens": 99},
            {"input_ids": [1, 2], "labels": [1, -100], "len": 2},
            {"input_ids": [7, 8, 9]},
        ]
        data = JsonlDataset(write_rows(tmp_path / "a.jsonl", rows), cache_dir=tmp_path)
        assert [data[n]["num_loss_counted_tokens"] for n in range(3)] == [2, 0, 2]

    def test_a_pickled_dataset_maps_the_files_again(self, dataset: JsonlDataset) -> None:
        copy = pickle.dumps(dataset)
        assert len(copy) < 2000
        assert pickle.loads(copy)[7]["input_ids"].tolist() == dataset[7]["input_ids"].tolist()

    def test_indices_work_like_those_of_a_list(self, dataset: JsonlDataset) -> None:
        assert dataset[-1]["input_ids"].tolist() == dataset[39]["input_ids"].tolist()
        for wrong in (40, -41):
            with pytest.raises(IndexError):
                dataset[wrong]

    def test_rows_that_are_not_tokens_are_refused(self, tmp_path: Path) -> None:
        for number, (rows, reason) in enumerate(
            [
                ([{"text": "a"}], "row format is 'text'"),
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
        samples = list(islice(InfiniteSampler(50, seed=3), 150))
        epochs = [samples[at : at + 50] for at in (0, 50, 100)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert len(InfiniteSampler(50)) == 50

    @pytest.mark.parametrize("size", [1, 7, MAX_NUMPY_SIZE, MAX_NUMPY_SIZE + 1, 100_003])
    def test_an_epoch_is_a_permutation_at_any_size(self, size: int) -> None:
        order = InfiniteSampler(size, seed=1).take(size)
        assert np.array_equal(np.sort(order), np.arange(size))

    @pytest.mark.parametrize("size", [10, 100_003])
    def test_the_order_can_resume_anywhere(self, size: int) -> None:
        order = InfiniteSampler(size, seed=5).take(2 * size + 200)
        for start in (0, 1, size - 1, size, size + 50, 2 * size):
            assert (
                InfiniteSampler(size, seed=5, consumed_samples=start).take(100).tolist()
                == order[start : start + 100].tolist()
            )
        positions = np.array([3, 2 * size, 0, size + 3])
        assert InfiniteSampler(size, seed=5).at(positions).tolist() == order[positions].tolist()

    def test_iterating_counts_every_sample_drawn(self) -> None:
        sampler = InfiniteSampler(50, seed=3)
        first = list(islice(sampler, 7))
        assert sampler.consumed_samples == 7
        assert first + list(islice(sampler, 93)) == InfiniteSampler(50, seed=3).take(100).tolist()

    def test_a_billion_samples_need_no_memory(self) -> None:
        samples = InfiniteSampler(10**9, seed=0, consumed_samples=7 * 10**9 + 123).take(1000)
        assert len(set(samples.tolist())) == 1000
        assert samples.min() >= 0
        assert samples.max() < 10**9
        # Uniform: the mean of a thousand is within five standard errors of the middle.
        assert abs(samples.mean() / 1e9 - 0.5) < 5 / np.sqrt(12 * 1000)

    def test_large_permutations_look_random(self) -> None:
        size = MAX_NUMPY_SIZE + 1000
        orders = np.stack([InfiniteSampler(size, seed=seed).take(size) for seed in range(40)])
        # Neighbors and the orders of other seeds are uncorrelated; an order has one fixed point on average.
        for order in orders[:5]:
            assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
            assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.02
        assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.02
        assert 15 < (orders == np.arange(size)).sum() < 70
        # The first samples are as likely from any tenth: chi-square over 40 x 100 of them.
        counts = np.histogram(orders[:, :100], bins=10, range=(0, size))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 30

    def test_seed_and_shuffle(self) -> None:
        assert InfiniteSampler(50, seed=1).take(50).tolist() != InfiniteSampler(50, seed=2).take(50).tolist()
        assert InfiniteSampler(3, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]

    @pytest.mark.parametrize(("size", "consumed_samples"), [(0, 0), (50, -1)])
    def test_impossible_sizes_are_refused(self, size: int, consumed_samples: int) -> None:
        with pytest.raises(ValueError, match="size must be at least 1 and consumed_samples at least 0"):
            InfiniteSampler(size, consumed_samples=consumed_samples)


class TestMixedSampler:
    @pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [3, 2, 5], [0.001, 1], [1, 2, 3, 4]])
    def test_every_source_has_its_share_of_any_range_of_draws(self, weights: list[float]) -> None:
        sizes = [7, 11, 13, 5][: len(weights)]
        sampler = MixedSampler(sizes, weights, seed=0)
        source = np.searchsorted(np.cumsum(sizes), sampler.take(10_000), side="right")
        shares = np.array(weights) / sum(weights)
        for number, share in enumerate(shares):
            counts = np.cumsum(source == number)
            assert np.abs(counts - share * np.arange(1, 10_001)).max() < len(weights) + 0.02
            assert counts[-1] == sampler.samples_per_source(10_000)[number]

    def test_a_source_is_drawn_completely_before_it_repeats(self) -> None:
        samples = MixedSampler([5, 100], [1, 1], seed=2).take(60)
        small = [i for i in samples.tolist() if i < 5]
        assert [sorted(small[at : at + 5]) for at in range(0, 30, 5)] == [list(range(5))] * 6
        assert len({tuple(small[at : at + 5]) for at in range(0, 30, 5)}) > 1
        large = [i for i in samples.tolist() if i >= 5]
        assert len(set(large)) == len(large) == 30

    @given(start=st.integers(0, 10**9), count=st.integers(1, 50), seed=st.integers(0, 100))
    @settings(deadline=None, max_examples=50, derandomize=True)
    def test_the_order_can_resume_anywhere(self, start: int, count: int, seed: int) -> None:
        sizes, weights = [17, 400, 70_000], [0.2, 0.5, 0.3]
        order = MixedSampler(sizes, weights, seed).at(np.arange(start, start + 2 * count))
        assert (
            MixedSampler(sizes, weights, seed, consumed_samples=start + count).take(count).tolist()
            == order[count:].tolist()
        )

    def test_without_shuffling_each_source_keeps_its_order(self) -> None:
        samples = MixedSampler([2, 4], [1, 2], shuffle=False).take(9).tolist()
        assert [i for i in samples if i < 2] == [0, 1, 0]
        assert [i for i in samples if i >= 2] == [2, 3, 4, 5, 2, 3]


class TestMaxTokensPerRankCollator:
    def test_every_sample_is_on_one_rank_and_limits_hold(self, dataset: JsonlDataset) -> None:
        batch = [dataset[n] for n in range(40)]
        ranks = [MaxTokensPerRankCollator(50, rank, 3)(batch) for rank in range(3)]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        all_micro_batches = [m for micro_batches in ranks for m in micro_batches]
        for micro_batch in all_micro_batches:
            assert micro_batch["input_ids"].shape == micro_batch["labels"].shape == micro_batch["position_ids"].shape
            assert micro_batch["input_ids"].numel() <= 50
            assert micro_batch["num_samples"] in (int((micro_batch["position_ids"] == 0).sum()), 0)
        assert sorted(first_ids(all_micro_batches)) == list(range(40))

    def test_counts_are_those_of_the_global_batch(self, dataset: JsonlDataset) -> None:
        batch = [dataset[n] for n in range(40)]
        expected = sum(sum(label != -100 for label in row["labels"][1:]) for row in token_rows())
        micro_batches = [m for rank in range(4) for m in MaxTokensPerRankCollator(64, rank, 4)(batch)]
        assert {m["batch_num_loss_counted_tokens"] for m in micro_batches} == {expected}
        assert sum(m["num_loss_counted_tokens"] for m in micro_batches) == expected
        assert sum(int((m["labels"] != -100).sum()) for m in micro_batches) == expected
        assert sum(m["num_samples"] for m in micro_batches) == 40

    def test_positions_restart_and_first_labels_are_masked(self) -> None:
        batch = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
        (micro_batch,) = MaxTokensPerRankCollator(16, 0, 1)(batch)
        assert micro_batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
        assert micro_batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]
        assert micro_batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
        assert micro_batch["doc_ids"].tolist() == [[0, 0, 0, 1, 1]]
        assert micro_batch["num_loss_counted_tokens"] == 3

    def test_a_rank_without_samples_has_a_row_of_padding(self) -> None:
        batch = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
        ranks = [MaxTokensPerRankCollator(16, rank, 4, pad_id=2)(batch) for rank in range(4)]
        assert [len(micro_batches) for micro_batches in ranks] == [1] * 4
        idle = [m for (m,) in ranks if m["num_samples"] == 0]
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

    def test_rank_and_world_size_default_to_the_process_group(self) -> None:
        assert (MaxTokensPerRankCollator(8).rank, MaxTokensPerRankCollator(8).world_size) == (0, 1)
        for wrong in ({"max_tokens_per_rank": 8, "rank": 3, "world_size": 2}, {"max_tokens_per_rank": 0}):
            with pytest.raises(ValueError, match="rank . of"):
                MaxTokensPerRankCollator(**wrong)


class TestGetDataLoader:
    def loader(self, token_file: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        return get_data_loader(
            token_file, batch_size=6, max_tokens_per_gpu=64, seed=7, rank=rank, world_size=world_size,
            cache_dir=token_file.parent / "cache", **options,
        )  # fmt: skip

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_batches_follow_the_sampler_without_end(self, token_file: Path, num_workers: int) -> None:
        loader = self.loader(token_file, num_workers=num_workers)
        assert loader.batch_size == 6
        order = InfiniteSampler(40, seed=7).take(60)
        for number, batch in enumerate(islice(loader, 10)):
            assert sorted(first_ids(batch)) == sorted(order[6 * number : 6 * number + 6].tolist())

    def test_global_batches_do_not_depend_on_the_number_of_ranks(self, token_file: Path) -> None:
        """Also when resumed on another number of ranks: no sample is repeated or skipped."""
        expected = [sorted(first_ids(batch)) for batch in islice(self.loader(token_file), 9)]
        for world_size in (2, 5):
            ranks = [
                list(islice(self.loader(token_file, rank, world_size, consumed_samples=18), 6))
                for rank in range(world_size)
            ]
            steps = list(zip(*ranks, strict=True))
            assert [sorted(i for batch in step for i in first_ids(batch)) for step in steps] == expected[3:]
            assert all(len({len(micro_batches) for micro_batches in step}) == 1 for step in steps)


def run_data(tokenizer: Tokenizer, paths: list[Path], cache_dir: Path, **options: Any) -> tuple[RunData, Config]:
    defaults = {
        "model.depth": 1, "model.tokenizer": "-", "data.path": [str(path) for path in paths],
        "data.cache_dir": str(cache_dir), "data.context_length": 64, "training.global_batch_size": 6,
    }  # fmt: skip
    config = load_config(overrides=defaults | {key.replace("__", "."): value for key, value in options.items()})
    return load_data(config, tokenizer, [str(path) for path in paths], {}, Console("quiet")), config


def step_sequences(
    data: RunData, config: Config, consumed_samples: int, last: int, dp: int
) -> list[list[tuple[int, ...]]]:
    """For every step the sequences of its global batch over all ranks, sorted."""
    ranks = [list(data.batches(config, consumed_samples, last, rank, dp)) for rank in range(dp)]
    steps = []
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.micro_batches) for batch in batches}) == 1
        assert len({(b.samples, b.tokens, b.loss_tokens, b.first_sample) for b in batches}) == 1
        micro_batches = [m for batch in batches for m in batch.micro_batches]
        sequences: list[tuple[int, ...]] = []
        for micro_batch in micro_batches:
            for ids, doc_ids in zip(micro_batch.ids.tolist(), micro_batch.doc_ids.tolist(), strict=True):
                for document in set(doc_ids) - {PADDING_DOC_ID}:
                    sequences.append(tuple(i for i, d in zip(ids, doc_ids, strict=True) if d == document))
        assert sum(map(len, sequences)) == batches[0].tokens
        assert sum(int((m.labels != -100).sum()) for m in micro_batches) == batches[0].loss_tokens
        steps.append(sorted(sequences))
    return steps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mixed")
    return [write_rows(folder / "chat.jsonl", chat_rows(20)), write_rows(folder / "text.jsonl", corpus_rows(20))]


class TestRanks:
    @pytest.mark.parametrize(
        ("sources", "options"),
        [
            ([0], {}),
            ([0], {"data__packing": False}),
            ([1], {}),
            ([1], {"data__text_packing": "best-fit"}),
            ([0, 1], {}),
            ([0, 1], {"data__weights": [1, 3]}),
            ([0, 1], {"data__weights": [1, 3], "data__text_packing": "best-fit", "data__shuffle": False}),
        ],
        ids=["chat", "padded", "stream", "best-fit", "both", "weighted", "weighted-best-fit"],
    )
    def test_resuming_anywhere_on_other_ranks_repeats_and_skips_nothing(
        self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path, sources: list[int], options: dict[str, Any]
    ) -> None:
        """Also across the end of an epoch. The only state is the number of samples drawn."""
        paths = [files[n] for n in sources]
        data, config = run_data(tokenizer, paths, tmp_path, **options)
        last = 2 * len(data.train) + 5
        steps = step_sequences(data, config, 0, last, dp=1)
        for dp, start in ((2, 0), (3, 1), (4, len(steps) // 2), (1, len(steps) - 2)):
            resumed, _ = run_data(tokenizer, paths, tmp_path, **options)
            assert step_sequences(resumed, config, 6 * start, last, dp) == steps[start:]
        if "data__weights" not in options:
            expected = [tuple(s.ids.tolist()) for n in range(len(data.train)) for s in data.train.get(n)]
            first_epoch = [s for step in step_sequences(data, config, 0, len(data.train), 2) for s in step]
            assert sorted(first_epoch) == sorted(expected)

    def test_weights_are_shares_of_the_samples(self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path) -> None:
        data, config = run_data(tokenizer, files, tmp_path, data__weights=[1, 3], training__global_batch_size=40)
        assert data.describe_mixture(4000) == [
            f"chat.jsonl: 25.0 % of the samples, each seen {1000 / data.sizes[0]:.2f} times",
            f"text.jsonl: 75.0 % of the samples, each seen {3000 / data.sizes[1]:.2f} times",
        ]
        sampler = data.sampler(config)
        for _ in range(5):
            assert (sampler.take(40) < data.sizes[0]).sum() == 10

    def test_a_rank_without_samples_has_a_row_of_padding(
        self, tokenizer: Tokenizer, files: list[Path], tmp_path: Path
    ) -> None:
        data, config = run_data(tokenizer, files[:1], tmp_path, training__global_batch_size=1)
        ranks = [next(data.batches(config, 0, None, rank, 3)) for rank in range(3)]
        assert [len(batch.micro_batches) for batch in ranks] == [1, 1, 1]
        assert sorted(int((batch.micro_batches[0].doc_ids >= 0).sum()) for batch in ranks)[:2] == [0, 0]
        assert {batch.loss_tokens for batch in ranks} == {ranks[0].loss_tokens}


class TestBestFit:
    def test_no_document_is_cut_and_every_row_starts_with_one(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(500))
        data, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit", data__context_length=256)
        unpacked, _ = run_data(tokenizer, [path], tmp_path, data__packing=False, data__context_length=256)
        assert unpacked.counts.split_long == 0
        documents = sorted(tuple(unpacked.train.get(n)[0].ids.tolist()) for n in range(len(unpacked.train)))
        rows = [[tuple(s.ids.tolist()) for s in data.train.get(n)] for n in range(len(data.train))]
        assert sorted(d for row in rows for d in row) == documents
        assert [sum(map(len, row)) for row in rows] == data.train.lengths.tolist()
        assert max(data.train.lengths) <= 256
        assert sum(data.train.lengths) / (256 * len(rows)) > 0.98
        assert data.train.loss_tokens.tolist() == [sum(len(d) - 1 for d in row) for row in rows]

    @pytest.mark.parametrize(("on_long_row", "lost"), [("auto", 0), ("split", 0), ("truncate", 52), ("drop", 84)])
    def test_on_long_row_decides_about_documents_longer_than_a_row(
        self, tokenizer: Tokenizer, tmp_path: Path, on_long_row: str, lost: int
    ) -> None:
        long = tokenizer.hf.decode([300] * 83)
        path = write_rows(tmp_path / "text.jsonl", [{"text": long}, {"text": "short"}])
        options = {"data__text_packing": "best-fit", "data__context_length": 32, "data__on_long_row": on_long_row}
        data, _ = run_data(tokenizer, [path], tmp_path, **options)
        assert data.train.lengths.sum() == 84 + len(tokenizer.encode("short")) + 1 - lost
        assert data.counts.cropped_tokens == (lost if on_long_row == "truncate" else 0)
        assert data.counts.dropped_long == (1 if on_long_row == "drop" else 0)
        assert data.counts.split_long == (1 if on_long_row in ("auto", "split") else 0)

    def test_the_layout_is_computed_once(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(50))
        options = {"data__text_packing": "best-fit", "data__validation_split": 0.2}
        first, _ = run_data(tokenizer, [path], tmp_path, **options)
        monkeypatch.setattr(samples, "best_fit_rows", lambda *_: pytest.fail("computed again"))
        second, _ = run_data(tokenizer, [path], tmp_path, **options)
        assert first.train.lengths.tolist() == second.train.lengths.tolist()

    def test_a_damaged_layout_is_computed_again(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(50))
        first, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
        (layout,) = tmp_path.glob("*/rows-*.npy")
        intact = layout.read_bytes()
        for damaged in (intact[:-30], intact[:-8] + b"\1" * 8, intact[:200] + b"\0" + intact[201:], b""):
            layout.unlink()
            layout.write_bytes(damaged)
            again, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
            assert again.train.lengths.tolist() == first.train.lengths.tolist()
            assert layout.read_bytes() == intact

    def test_rows_follow_the_order_of_the_file(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "text.jsonl", corpus_rows(300))
        data, _ = run_data(tokenizer, [path], tmp_path, data__text_packing="best-fit")
        assert isinstance(data.train, samples.BestFitSamples)
        first = [min(row) for row in np.split(data.train.documents, data.train.offsets[1:-1])]
        assert first == sorted(first)
        assert first[0] == 0


class TestSplit:
    @pytest.mark.parametrize("pieces", [1, 5])
    def test_rows_are_split_at_random_with_all_their_pieces(self, pieces: int) -> None:
        origins = np.repeat(np.arange(50), np.random.default_rng(0).integers(1, pieces + 1, 50))
        train, validation = split_validation(origins, 0.2, seed=1)
        assert sorted([*train, *validation]) == list(range(len(origins)))
        assert not set(origins[train]) & set(origins[validation])
        assert len(set(origins[validation])) == 10
        assert split_validation(origins, 0.2, seed=2)[1].tolist() != validation.tolist()

    def test_a_split_leaves_rows_for_training(self) -> None:
        with pytest.raises(DataError, match="leaves none for training"):
            split_validation(np.arange(1), 0.5, seed=0)

    def test_every_source_is_split(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        paths = [write_rows(tmp_path / f"{n}.jsonl", chat_rows(40, seed=n)) for n in range(2)]
        data, _ = run_data(tokenizer, paths, tmp_path, data__validation_split=0.25)
        assert (data.sizes, len(data.validation[""])) == ([30, 30], 20)


def test_public_names_exist() -> None:
    for name in torchstone.__all__:
        assert getattr(torchstone, name) is not None
    with pytest.raises(AttributeError):
        torchstone.nothing  # noqa: B018
