"""Assigning samples to ranks and micro-steps, and documents to rows: no sample is lost and no limit is broken.

Run as a script, it prints how the greedy algorithm, plain longest-first and `assign_micro_batches` compare.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.data import batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt
from torchstone.data.assignment import assign_micro_batches, best_fit_rows


def load_benchmark() -> ModuleType:
    """The benchmark holds plain longest-first and the distributions of lengths."""
    path = Path(__file__).parents[1] / "benchmarks/data/packing.py"
    spec = importlib.util.spec_from_file_location("packing_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load_benchmark()
Algorithm = Callable[[list[int], int, int, int], list[list[int]]]
BOTH = pytest.mark.parametrize("algorithm", [batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt])
STABLE = settings(deadline=None, max_examples=150, derandomize=True)


def run_all_ranks(algorithm: Algorithm, lengths: list[int], limit: int, num_ranks: int) -> list[list[list[int]]]:
    """Ranks x micro-steps x samples, after checking the contract."""
    by_rank = [algorithm(lengths, limit, num_ranks, rank) for rank in range(num_ranks)]
    assert len({len(micro_batches) for micro_batches in by_rank}) == 1, "every rank has as many micro-batches"
    bins = [bin_ for micro_batches in by_rank for bin_ in micro_batches]
    assert all(bin_ == [-1] or (bin_ and min(bin_) >= 0) for bin_ in bins), "samples, or [-1]"
    samples = [[i for i in bin_ if i >= 0] for bin_ in bins]
    assert all(sum(lengths[i] for i in bin_) <= limit for bin_ in samples)
    assert sorted(chain.from_iterable(samples)) == [i for i, length in enumerate(lengths) if length <= limit]
    return by_rank


def full_bins_cut_up(limit: int) -> st.SearchStrategy[list[int]]:
    """The tightest batches there are."""
    cuts = st.lists(st.integers(1, max(1, limit - 1)), max_size=4)
    one_bin = cuts.map(lambda at: np.diff([0, *sorted(at), limit]).tolist())
    return st.lists(one_bin, max_size=12).map(lambda bins: list(chain.from_iterable(bins)))


batches = st.integers(1, 300).flatmap(
    lambda limit: st.tuples(
        st.lists(st.integers(0, limit), max_size=60)
        | st.lists(st.integers(limit // 4, limit // 2), max_size=60)
        | full_bins_cut_up(limit),
        st.just(limit),
        st.integers(1, 9),
    )
)


class TestGreedy:
    def test_each_sample_goes_to_the_rank_with_the_fewest_tokens(self) -> None:
        # 0 -> rank 0 (5); 1 -> rank 1 (3); 2 -> rank 1 (5); 3 -> rank 0 of equals (9); 4 -> rank 1 (8)
        assert run_all_ranks(batch_lengths_to_minibatches, [5, 3, 2, 4, 3], 10, 2) == [[[0, 3]], [[1, 2, 4]]]

    def test_a_sample_that_does_not_fit_starts_a_micro_step_on_all_ranks(self) -> None:
        assert run_all_ranks(batch_lengths_to_minibatches, [6, 5, 7, 2, 1], 10, 2) == [[[0], [2]], [[1], [3, 4]]]
        # 4 would fit beside 6, but 9 came first.
        assert run_all_ranks(batch_lengths_to_minibatches, [6, 9, 4], 10, 1) == [[[0], [1], [2]]]

    def test_a_bin_may_be_full(self) -> None:
        assert run_all_ranks(batch_lengths_to_minibatches, [4, 6], 10, 1) == [[[0, 1]]]
        assert run_all_ranks(batch_lengths_to_minibatches, [4, 7], 10, 1) == [[[0], [1]]]


class TestLPT:
    def test_longest_first_to_the_rank_with_the_fewest_tokens(self) -> None:
        # 8 | 7 | 6, then 5 to the 6, 4 to the 7 and 3 to the 8: every rank has 11.
        by_rank = run_all_ranks(batch_lengths_to_minibatches_lpt, [3, 8, 5, 7, 4, 6], 100, 3)
        assert by_rank == [[[1, 0]], [[3, 4]], [[5, 2]]]

    def test_one_micro_batch_holds_its_samples_longest_first(self) -> None:
        assert assign_micro_batches(np.array([2, 5, 0, 5, 9]), 100, 1) == [[[4, 1, 3, 0, 2]]]

    def test_samples_are_packed_where_longest_first_wastes_room(self) -> None:
        # Longest-first fills a micro-step of two ranks with 6 and 6, and never puts the 4s beside them.
        lengths = [6, 6, 6, 6, 4, 4, 4, 4]
        assert len(BENCHMARK.longest_first(lengths, 10, 2)) == 3
        assert len(assign_micro_batches(np.array(lengths), 10, 2)) == 2

    def test_longest_first_is_used_where_best_fit_wastes_room(self) -> None:
        # Best fit puts 18 beside 36 and needs three bins. Longest-first fills two to the token.
        lengths = np.array([11, 36, 8, 23, 18, 4, 10])
        assert best_fit_rows(lengths, 55)[1].size - 1 == 3
        assert len(assign_micro_batches(lengths, 55, 2)) == 1

    def test_attention_is_part_of_the_cost(self) -> None:
        # 49152 tokens cost twice their number: as much as 96 samples of 1024 tokens, which cost 1.02 times theirs.
        lengths = np.array([49152] + [1024] * 160)
        by_tokens = assign_micro_batches(lengths, 200_000, 2, costs=lengths)
        assert [len(bin_) for bin_ in by_tokens[0]] == [57, 104]
        assert [len(bin_) for bin_ in assign_micro_batches(lengths, 200_000, 2)[0]] == [34, 127]

    def test_all_micro_steps_but_the_last_are_full(self) -> None:
        lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 2000), 1, 4096).astype(np.int64)
        tokens = BENCHMARK.tokens_of(assign_micro_batches(lengths, 16384, 8), lengths)
        assert len(tokens) == -(-int(lengths.sum()) // (16384 * 8))
        assert tokens[:-1].mean() / 16384 > 0.995

    @STABLE
    @given(batches)
    def test_never_more_micro_steps_than_longest_first(self, batch: tuple[list[int], int, int]) -> None:
        lengths, limit, num_ranks = batch
        micro_steps = assign_micro_batches(np.array(lengths, dtype=np.int64), limit, num_ranks)
        assert len(micro_steps) <= len(BENCHMARK.longest_first(lengths, limit, num_ranks))
        assert all(any(bins) for bins in micro_steps), "a micro-step without samples"


class TestBalance:
    @pytest.mark.parametrize("num_ranks", [2, 4, 8])
    @pytest.mark.parametrize("kind", ["up to the limit", "few and long", "log-normal", "short"])
    def test_never_under_0_95_of_greedy(self, kind: str, num_ranks: int) -> None:
        """By three measures: fewest over most and mean over most tokens in a micro-step, fewest over most in all."""
        rng, limit = np.random.default_rng(7), 130_000
        for _ in range(25):
            size = int(rng.choice([8, 16, 40, 150]))
            lengths = {
                "up to the limit": rng.integers(1, limit + 1, size),
                "few and long": np.where(rng.random(size) < 0.3, rng.integers(20_000, 100_000, size), 500),
                "log-normal": np.clip(rng.lognormal(7, 1.5, size), 1, limit).astype(np.int64),
                "short": rng.integers(100, 5000, size),
            }[kind].tolist()
            balance = []
            for algorithm in (batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt):
                by_rank = run_all_ranks(algorithm, lengths, limit, num_ranks)
                tokens = np.array([[sum(lengths[i] for i in bin_ if i >= 0) for bin_ in bins] for bins in by_rank])
                most, sums = tokens.max(axis=0), tokens.sum(axis=1)
                fewest = np.where(tokens > 0, tokens, most).min(axis=0)
                balance.append(
                    [(fewest / most).mean(), tokens.mean(axis=0).sum() / most.sum(), sums.min() / sums.max()]
                )
            for greedy, lpt in zip(*balance, strict=True):
                assert lpt >= 0.95 * greedy

    def test_total_tokens_of_the_ranks_are_as_equal_as_with_greedy(self) -> None:
        lengths = [90000, 85000, 80000, 30000, 25000, 20000, 15000, 10000]
        balance = []
        for algorithm in (batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt):
            by_rank = run_all_ranks(algorithm, lengths, 130_000, 4)
            tokens = [sum(lengths[i] for bin_ in bins for i in bin_ if i >= 0) for bins in by_rank]
            balance.append(min(tokens) / max(tokens))
        assert balance == pytest.approx([0.9444, 0.9444], abs=1e-4)

    @pytest.mark.parametrize("name", BENCHMARK.REAL_LIKE)
    @pytest.mark.parametrize("seed", range(3))
    def test_512_samples_on_8_ranks_cost_the_same_in_total_and_in_every_micro_step(self, name: str, seed: int) -> None:
        lengths = BENCHMARK.draw(name, np.random.default_rng(seed), 512, 8192)
        cost = BENCHMARK.costs_of(assign_micro_batches(lengths, 32768, 8), lengths)
        assert cost.sum(axis=0).max() <= 1.02 * cost.sum(axis=0).mean()
        assert cost.max(axis=1).sum() <= 1.02 * cost.mean(axis=1).sum()

    def test_ranks_take_turns_at_the_costliest_bin(self) -> None:
        assert run_all_ranks(batch_lengths_to_minibatches_lpt, [10, 9, 8, 7], 10, 2) == [[[0], [3]], [[1], [2]]]


class TestEdgeCases:
    @BOTH
    @STABLE
    @given(batch=batches)
    def test_the_contract_for_lists_and_arrays(self, algorithm: Algorithm, batch: tuple[list[int], int, int]) -> None:
        lengths, limit, num_ranks = batch
        expected = run_all_ranks(algorithm, lengths, limit, num_ranks)
        assert all(type(i) is int for bins in expected for bin_ in bins for i in bin_)
        assert run_all_ranks(algorithm, np.array(lengths, dtype=np.uint16), limit, num_ranks) == expected  # type: ignore[arg-type]

    @BOTH
    def test_no_samples(self, algorithm: Algorithm) -> None:
        assert algorithm([], 10, 4, 3) == []

    @BOTH
    def test_one_sample_goes_to_rank_0(self, algorithm: Algorithm) -> None:
        assert run_all_ranks(algorithm, [5000], 130000, 4) == [[[0]], [[-1]], [[-1]], [[-1]]]

    @BOTH
    def test_samples_without_tokens_are_assigned(self, algorithm: Algorithm) -> None:
        assert run_all_ranks(algorithm, [0, 0, 0], 5, 2) == [[[0, 1, 2]], [[-1]]]
        run_all_ranks(algorithm, [0, 5, 0, 5, 5, 0], 5, 2)

    @BOTH
    def test_samples_over_the_limit_are_dropped_counted_and_named(self, algorithm: Algorithm) -> None:
        with pytest.warns(UserWarning, match=r"2 of 4 samples are longer than 10 .*: 1 \(11\), 3 \(99\)$") as caught:
            assert algorithm([5, 11, 6, 99], 10, 1, 0) in ([[0], [2]], [[2], [0]])
        assert [warning.filename for warning in caught] == [__file__]
        with pytest.warns(UserWarning, match=r"20 of 20 .* 4 \(16\), \.\.\.$"):
            assert algorithm(list(range(12, 32)), 10, 2, 1) == []

    @BOTH
    def test_a_sample_as_long_as_the_limit_is_kept(self, algorithm: Algorithm) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(run_all_ranks(algorithm, [10, 10, 10], 10, 2)[0]) == 2

    @BOTH
    @pytest.mark.parametrize(
        ("lengths", "limit", "num_ranks", "rank", "message"),
        [
            ([1], 10, 0, 0, "0 ranks of 10 tokens"),
            ([1], 0, 2, 0, "2 ranks of 0 tokens"),
            ([1], 10, 2, 2, "rank 2 is not between 0 and 1"),
            ([1], 10, 2, -1, "rank -1"),
            ([1, -2], 10, 2, 0, r"lengths\[1\] is -2, but must be at least 0"),
            ([1.5, 2.0], 10, 2, 0, "integers, not float64"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, algorithm: Algorithm, lengths: list[int], limit: int, num_ranks: int, rank: int, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            algorithm(lengths, limit, num_ranks, rank)

    def test_assign_micro_batches_drops_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"lengths\[1\] is 11, but must be at most 10"):
            assign_micro_batches(np.array([3, 11]), 10, 2)


class TestBestFitRows:
    def test_a_document_goes_to_the_row_with_the_least_room(self) -> None:
        # 7 and 6 open rows; 4 goes beside 6, 3 beside 7, and 2 opens a row.
        order, offsets = best_fit_rows(np.array([2, 3, 4, 6, 7]), 10)
        assert order.tolist() == [3, 2, 4, 1, 0]
        assert offsets.tolist() == [0, 2, 4, 5]

    def test_of_equal_lengths_the_earlier_document_comes_first(self) -> None:
        order, offsets = best_fit_rows(np.array([5, 5, 5, 5, 5]), 10)
        assert order.tolist() == [0, 1, 2, 3, 4]
        assert offsets.tolist() == [0, 2, 4, 5]

    @pytest.mark.parametrize(("lengths", "message"), [([3, 0], r"\[1\] is 0"), ([11, 3], r"\[0\] is 11")])
    def test_a_document_that_fits_no_row_is_named(self, lengths: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            best_fit_rows(np.array(lengths), 10)

    def test_no_documents_make_no_rows(self) -> None:
        order, offsets = best_fit_rows(np.array([], dtype=np.int64), 10)
        assert order.tolist() == []
        assert offsets.tolist() == [0]

    @settings(STABLE, max_examples=300)
    @given(st.integers(1, 80).flatmap(lambda top: st.tuples(st.lists(st.integers(1, top), max_size=120), st.just(top))))
    def test_the_rows_are_those_of_best_fit_document_by_document(self, batch: tuple[list[int], int]) -> None:
        lengths, row_length = batch
        order, offsets = best_fit_rows(np.array(lengths, dtype=np.int64), row_length)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        expected: list[int] = []
        for length in sorted(lengths, reverse=True):
            fitting = [row for row in range(len(expected)) if expected[row] + length <= row_length]
            row = max(fitting, key=lambda row: expected[row], default=len(expected))
            expected[row:] = [sum(expected[row : row + 1]) + length, *expected[row + 1 :]]
        assert sorted(sum(lengths[i] for i in order[a:b]) for a, b in pairwise(offsets)) == sorted(expected)

    @pytest.mark.parametrize("row_length", [2048, 70_000])
    def test_200_000_documents_fill_their_rows_in_under_2_s(self, row_length: int) -> None:
        lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(6, 1, 200_000)), 1, 2048).astype(np.int64)
        start = time.process_time()
        order, offsets = best_fit_rows(lengths, row_length)
        assert time.process_time() - start < 2
        assert np.array_equal(np.sort(order), np.arange(lengths.size))
        assert lengths.sum() / ((offsets.size - 1) * row_length) >= 0.995


def compare() -> None:
    print(f"{'512 samples on 8 ranks, 32768 tokens':38} {'algorithm':13} micro-steps    fill  balance      ms")
    for name in BENCHMARK.DISTRIBUTIONS:
        lengths = BENCHMARK.draw(name, np.random.default_rng(0), 512, 8192)
        for algorithm, assign in BENCHMARK.ALGORITHMS.items():
            start = time.perf_counter()
            micro_steps = assign(lengths, 32768, 8)
            ms = (time.perf_counter() - start) * 1e3
            cost = BENCHMARK.costs_of(micro_steps, lengths).sum(axis=0)
            fill = lengths.sum() / (len(micro_steps) * 8 * 32768)
            balance = cost.mean() / cost.max()
            print(f"{name:38} {algorithm:13} {len(micro_steps):11} {fill:7.1%} {balance:8.4f} {ms:7.1f}")


if __name__ == "__main__":
    compare()
