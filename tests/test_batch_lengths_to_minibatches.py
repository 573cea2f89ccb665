"""Which sample goes to which rank in which round: nothing lost, no limit broken, every rank of the same mind.

Run as a script it prints how the greedy, the search of the field and ours compare on some distributions.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.data import assignment
from torchstone.data.assignment import (
    assign,
    batch_lengths_to_minibatches,
    batch_lengths_to_minibatches_lpt,
    best_fit_rows,
)


def load_benchmark() -> ModuleType:
    """It holds the plain rewriting of the field's search, and the distributions."""
    path = Path(__file__).parents[1] / "benchmarks/data/packing.py"
    spec = importlib.util.spec_from_file_location("packing_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load_benchmark()
Split = Callable[[list[int], int, int, int], list[list[int]]]
SPLITS = pytest.mark.parametrize("split", [batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt])
STABLE = settings(deadline=None, max_examples=150, derandomize=True)


def columns(split: Split, lengths: list[int], limit: int, num_ranks: int) -> list[list[list[int]]]:
    """Ranks x rounds x samples, after checking what must hold of every plan."""
    found = [split(lengths, limit, num_ranks, rank) for rank in range(num_ranks)]
    assert len({len(rounds) for rounds in found}) == 1, "all ranks take part in every round"
    for rounds in found:
        for bin_ in rounds:
            assert bin_ == [-1] or (bin_ and min(bin_) >= 0), "a rank has samples or the one placeholder"
            assert sum(lengths[i] for i in bin_ if i >= 0) <= limit
    placed = sorted(i for rounds in found for bin_ in rounds for i in bin_ if i >= 0)
    assert placed == [i for i, length in enumerate(lengths) if length <= limit], "every sample that fits, once"
    return found


def random_batches(count: int, seed: int = 0) -> list[tuple[list[int], int, int]]:
    """Lengths, limit and ranks of every kind, also with samples as long as the limit."""
    rng = np.random.default_rng(seed)
    names = list(BENCHMARK.DISTRIBUTIONS)
    batches = []
    for number in range(count):
        limit, num_ranks = int(rng.choice([512, 4096, 32768])), int(rng.integers(1, 17))
        top = max(1, limit // int(rng.integers(1, 9)))
        lengths = BENCHMARK.draw(names[number % len(names)], rng, int(rng.integers(1, 400)), top)
        batches.append((lengths.tolist(), limit, num_ranks))
    return batches


def cut_into_pieces(limit: int) -> st.SearchStrategy[list[int]]:
    """Bins full to the token, cut up: the tightest batches there are."""
    cuts = st.lists(st.integers(1, max(1, limit - 1)), max_size=4)
    pieces = cuts.map(lambda at: np.diff([0, *sorted(at), limit]).tolist())
    return st.lists(pieces, max_size=12).map(lambda bins: [piece for bin_ in bins for piece in bin_])


batches = st.integers(1, 300).flatmap(
    lambda limit: st.tuples(
        st.lists(st.integers(0, limit), max_size=60)
        | st.lists(st.integers(limit // 4, limit // 2), max_size=60)
        | cut_into_pieces(limit),
        st.just(limit),
        st.integers(1, 9),
    )
)


class TestGreedy:
    def test_samples_as_they_come_each_to_the_least_loaded_rank(self) -> None:
        # 0 -> rank 0 (5); 1 -> rank 1 (3); 2 -> rank 1 (5); 3 -> rank 0 of equals (9); 4 -> rank 1 (8)
        found = columns(batch_lengths_to_minibatches, [5, 3, 2, 4, 3], 10, 2)
        assert found == [[[0, 3]], [[1, 2, 4]]]

    def test_what_does_not_fit_on_the_least_loaded_rank_begins_a_round_for_all(self) -> None:
        # 6 -> rank 0, 5 -> rank 1; 7 fits on neither, and rank 0 is the first of the new round.
        found = columns(batch_lengths_to_minibatches, [6, 5, 7, 2, 1], 10, 2)
        assert found == [[[0], [2]], [[1], [3, 4]]]

    def test_it_does_not_look_ahead(self) -> None:
        # 4 would still fit beside 6, but 9 came before it.
        found = columns(batch_lengths_to_minibatches, [6, 9, 4], 10, 1)
        assert found == [[[0], [1], [2]]]
        assert columns(batch_lengths_to_minibatches_lpt, [6, 9, 4], 10, 1) == [[[1], [0, 2]]]

    def test_a_rank_with_nothing_has_the_placeholder_in_a_round_that_is_not_the_last(self) -> None:
        # Samples of no tokens leave rank 0 the least loaded, so rank 1 has nothing when 5 begins the second round.
        found = columns(batch_lengths_to_minibatches, [0, 0, 5, 3, 6], 5 + 1, 2)
        assert found == [[[0, 1, 2], [4]], [[3], [-1]]]
        assert columns(batch_lengths_to_minibatches, [4, 4], 4, 1) == [[[0], [1]]]

    def test_a_full_bin_is_exactly_full(self) -> None:
        assert columns(batch_lengths_to_minibatches, [4, 6], 10, 1) == [[[0, 1]]]
        assert columns(batch_lengths_to_minibatches, [4, 7], 10, 1) == [[[0], [1]]]

    @STABLE
    @given(batches)
    def test_the_contract(self, batch: tuple[list[int], int, int]) -> None:
        lengths, limit, num_ranks = batch
        found = columns(batch_lengths_to_minibatches, lengths, limit, num_ranks)
        assert found == columns(batch_lengths_to_minibatches, lengths, limit, num_ranks)
        rounds = [[i for bins in found for i in bins[number] if i >= 0] for number in range(len(found[0]))]
        assert all(max(before) < min(after) for before, after in pairwise(rounds)), "no round takes from a later one"


class TestLPT:
    def test_longest_first_to_the_rank_with_the_least(self) -> None:
        # 8 | 7 | 6, then 5 to the 6, 4 to the 7 and 3 to the 8: all ranks have 11, the only way to do so.
        found = columns(batch_lengths_to_minibatches_lpt, [3, 8, 5, 7, 4, 6], 100, 3)
        assert {tuple(sorted(bins[0])) for bins in found} == {(0, 1), (3, 4), (2, 5)}

    def test_rounds_are_packed_where_the_search_of_the_field_wastes_them(self) -> None:
        # Longest first, 6 and 6 fill a round of two ranks: the search never comes back to put the 4s beside them.
        lengths = [6, 6, 6, 6, 4, 4, 4, 4]
        assert len(BENCHMARK.longest_first_search(lengths, 10, 2)) == 3
        assert len(assign(np.array(lengths), 10, 2)) == 2

    def test_attention_is_part_of_the_cost(self) -> None:
        lengths = np.array([1000] + [100] * 40)
        # In tokens the long sample is as much as ten short ones, and each of two ranks has 2500.
        by_tokens = assign(lengths, 4000, 2, quadratic=0.0)
        assert sorted(len(bin_) for bin_ in by_tokens[0]) == [16, 25]
        # With attention it costs 1000 + 1000, a short one 100 + 10: 2000 + 11 * 110 and 29 * 110 are nearest to even.
        with_attention = assign(lengths, 4000, 2, quadratic=0.001)
        assert sorted(len(bin_) for bin_ in with_attention[0]) == [12, 29]

    def test_rounds_before_the_last_are_full(self) -> None:
        lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 2000), 1, 4096).astype(np.int64)
        tokens = np.array([[lengths[bin_].sum() for bin_ in bins] for bins in assign(lengths, 16384, 8)])
        assert len(tokens) == -(-int(lengths.sum()) // (16384 * 8))
        assert tokens[:-1].mean() / 16384 > 0.995

    def test_clipped_conversations_fill_their_rounds_and_differ_little_in_attention(self) -> None:
        # Half of 6144 samples at the longest, as in the data of multipack, whose L2 lag is 438.
        lengths = np.rint(np.clip(np.random.default_rng(7).lognormal(7.62, 0.9, 6144), 24, 2048)).astype(np.int64)
        rounds = assign(lengths, 32768, 8)
        tokens, squares = BENCHMARK.tokens_of(rounds, lengths), BENCHMARK.tokens_of(rounds, lengths**2)
        assert tokens[:-1].mean() / 32768 >= 0.995
        assert np.sqrt((squares.max(axis=1) - squares.min(axis=1)).mean()) <= 438

    @STABLE
    @given(batches)
    def test_the_contract(self, batch: tuple[list[int], int, int]) -> None:
        lengths, limit, num_ranks = batch
        found = columns(batch_lengths_to_minibatches_lpt, lengths, limit, num_ranks)
        rounds = assign(np.array(lengths, dtype=np.int64), limit, num_ranks)
        assert found == [[bins[rank] or [-1] for bins in rounds] for rank in range(num_ranks)]

    @STABLE
    @given(batches)
    def test_never_more_rounds_than_the_search_of_the_field_nor_fewer_than_can_be(
        self, batch: tuple[list[int], int, int]
    ) -> None:
        lengths, limit, num_ranks = batch
        rounds = assign(np.array(lengths, dtype=np.int64), limit, num_ranks)
        assert len(rounds) <= len(BENCHMARK.longest_first_search(lengths, limit, num_ranks))
        assert len(rounds) >= -(-sum(lengths) // (limit * num_ranks))
        assert all(any(bins) for bins in rounds), "a round in which no rank has a sample"

    def test_full_bins_are_topped_up_where_the_rest_would_not_fit_the_last_round(self) -> None:
        # 26 + 10 + 6 and 15 + 15 + 12 fill two rounds to the token. Best fit puts 15 beside 26 and needs three.
        lengths = np.array([12, 15, 15, 26, 10, 6])
        assert best_fit_rows(lengths, 42)[1].size - 1 == 3
        rounds = [sorted(lengths[bins[0]].tolist()) for bins in assign(lengths, 42, 1)]
        assert sorted(rounds) == [[6, 10, 26], [12, 15, 15]]

    def test_the_search_of_the_field_is_the_last_resort(self) -> None:
        # Two bins full to the token: best fit needs three, and a deal by cost under strong attention fails as well.
        lengths = np.array([11, 36, 8, 23, 18, 4, 10])
        assert best_fit_rows(lengths, 55)[1].size - 1 == 3
        assert len(BENCHMARK.longest_first_search(lengths.tolist(), 55, 2)) == 1
        assert len(assign(lengths, 55, 2, quadratic=1.0)) == 1

    def test_never_more_rounds_than_the_search_of_the_field_on_real_sizes(self) -> None:
        fewer = 0
        for lengths, limit, num_ranks in random_batches(150):
            ours = len(assign(np.array(lengths), limit, num_ranks))
            theirs = len(BENCHMARK.longest_first_search(lengths, limit, num_ranks))
            assert ours <= theirs, (lengths, limit, num_ranks)
            fewer += ours < theirs
        assert fewer >= 15


class TestBalance:
    def test_never_much_under_the_greedy(self) -> None:
        for lengths, limit, num_ranks in random_batches(150, seed=1):
            evenness = []
            for planner in ("greedy", "assign"):
                loads = BENCHMARK.costs_of(
                    BENCHMARK.PLANNERS[planner](np.array(lengths), limit, num_ranks), np.array(lengths)
                ).sum(axis=0)
                evenness.append(loads.mean() / loads.max())
            assert evenness[1] >= 0.95 * evenness[0], (lengths, limit, num_ranks)

    @pytest.mark.parametrize("name", BENCHMARK.REAL_LIKE)
    @pytest.mark.parametrize("seed", range(3))
    def test_512_samples_on_8_ranks_are_even_on_the_whole_and_in_every_round(self, name: str, seed: int) -> None:
        lengths = BENCHMARK.draw(name, np.random.default_rng(seed), 512, 8192)
        cost = BENCHMARK.costs_of(assign(lengths, 32768, 8), lengths)
        assert cost.sum(axis=0).max() <= 1.02 * cost.sum(axis=0).mean()
        assert cost.max(axis=1).sum() <= 1.02 * cost.mean(axis=1).sum()

    def test_who_had_the_costliest_bin_has_a_cheap_one_next(self) -> None:
        lengths = [10, 9, 8, 7]
        found = columns(batch_lengths_to_minibatches_lpt, lengths, 10, 2)
        assert [sum(lengths[bin_[0]] for bin_ in rounds) for rounds in found] == [17, 17]

    def test_full_bins_are_levelled_by_one_sample_for_two(self) -> None:
        # No move and no swap of two fits in bins full to the token; an 8 for two 4s does, and evens the attention.
        lengths = np.array([8, 8, 4, 4, 4, 4])
        step = assignment._Step(lengths, assignment._costs(lengths, 1.0), max_tokens=16, num_ranks=2)
        levelled = assignment._level(step, [[0, 1], [2, 3, 4, 5]])
        assert [sorted(lengths[bin_].tolist()) for bin_ in levelled] == [[4, 4, 8], [4, 4, 8]]

    @settings(STABLE, max_examples=400)
    @given(
        st.lists(st.lists(st.integers(1, 40), max_size=7), min_size=2, max_size=4), st.sampled_from([0.0, 0.02, 1.0])
    )
    def test_levelling_keeps_the_limit_and_never_makes_a_round_dearer(
        self, given_: list[list[int]], quadratic: float
    ) -> None:
        lengths = np.array([length for bin_ in given_ for length in bin_], dtype=np.int64)
        limit = max(1, *(sum(bin_) for bin_ in given_))
        step = assignment._Step(lengths, assignment._costs(lengths, quadratic), limit, len(given_))
        ends = np.cumsum([0, *(len(bin_) for bin_ in given_)]).tolist()
        bins = [list(range(start, end)) for start, end in pairwise(ends)]
        levelled = assignment._level(step, bins)
        assert sorted(i for bin_ in levelled for i in bin_) == list(range(lengths.size))
        assert max(step.tokens_in(bin_) for bin_ in levelled) <= limit
        assert max(step.cost_of(bin_) for bin_ in levelled) <= max(step.cost_of(bin_) for bin_ in bins)

    def test_a_few_ten_milliseconds_at_most_for_512_samples(self) -> None:
        lengths = BENCHMARK.draw("log-normal", np.random.default_rng(3), 512, 8192)
        taken = []
        for _ in range(5):
            began = time.process_time()
            assign(lengths, 32768, 8)
            taken.append(time.process_time() - began)
        assert min(taken) < 0.1


class TestTokenBalance:
    """The greedy's is never clearly better, however long samples are; there cost and tokens are two things."""

    @pytest.mark.parametrize("num_ranks", [2, 4, 8])
    @pytest.mark.parametrize("kind", ["up to the limit", "few and long", "log-normal", "short"])
    def test_never_under_0_95_of_the_greedys(self, kind: str, num_ranks: int) -> None:
        rng, limit = np.random.default_rng(7), 130_000
        for _ in range(25):
            size = int(rng.choice([8, 16, 40, 150]))
            lengths = {
                "up to the limit": rng.integers(1, limit + 1, size),
                "few and long": np.where(rng.random(size) < 0.3, rng.integers(20_000, 100_000, size), 500),
                "log-normal": np.clip(rng.lognormal(7, 1.5, size), 1, limit).astype(np.int64),
                "short": rng.integers(100, 5000, size),
            }[kind]
            found = []
            for split in (batch_lengths_to_minibatches, batch_lengths_to_minibatches_lpt):
                columns = [split(lengths, limit, num_ranks, rank) for rank in range(num_ranks)]
                loads = np.array([[sum(lengths[i] for i in b if i >= 0) for b in column] for column in columns], float)
                at_work = np.where(loads > 0, loads, np.inf).min(axis=0)
                found.append((at_work / loads.max(axis=0)).mean())
            assert found[1] >= 0.95 * found[0]


class TestEdgeCases:
    @SPLITS
    def test_nothing_in_nothing_out(self, split: Split) -> None:
        assert split([], 10, 4, 3) == []
        assert assign(np.array([], dtype=np.int64), 10, 4) == []

    @SPLITS
    def test_one_sample_goes_to_rank_0_and_the_others_have_the_placeholder(self, split: Split) -> None:
        assert columns(split, [5000], 130000, 4) == [[[0]], [[-1]], [[-1]], [[-1]]]

    @SPLITS
    def test_one_rank_takes_all(self, split: Split) -> None:
        assert sorted(i for bin_ in columns(split, [3, 1, 2], 6, 1)[0] for i in bin_) == [0, 1, 2]
        assert len(columns(split, [3, 1, 2], 6, 1)[0]) == 1

    @SPLITS
    def test_samples_over_the_limit_are_left_out_counted_and_named(self, split: Split) -> None:
        with pytest.warns(UserWarning, match=r"2 of 4 samples are longer than 10 .*: 1 \(11\), 3 \(99\)$") as caught:
            found = split([5, 11, 6, 99], 10, 2, 0)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert [i for bin_ in found for i in bin_] in ([0], [2])

    @SPLITS
    def test_only_the_first_few_of_many_are_named(self, split: Split) -> None:
        with pytest.warns(UserWarning, match=r"20 of 20 .* 4 \(16\), \.\.\.$"):
            assert split(list(range(12, 32)), 10, 2, 1) == []

    @SPLITS
    def test_a_sample_as_long_as_the_limit_is_kept_without_a_word(self, split: Split) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert columns(split, [10, 10, 10], 10, 2) in (
                [[[0], [2]], [[1], [-1]]],
                [[[0], [-1]], [[1], [2]]],
            )

    @SPLITS
    def test_samples_of_no_tokens_are_placed(self, split: Split) -> None:
        columns(split, [0, 0, 0], 5, 2)
        columns(split, [0, 5, 0, 5, 5, 0], 5, 2)
        assert len(split([0], 1, 3, 0)) == 1

    @SPLITS
    @pytest.mark.parametrize(
        ("limit", "num_ranks", "rank", "said"),
        [
            (10, 0, 0, "at least one rank"),
            (10, 2, 2, "rank 2"),
            (10, 2, -1, "rank -1"),
            (0, 2, 0, "at least one token"),
        ],
    )
    def test_wrong_numbers_are_named(self, split: Split, limit: int, num_ranks: int, rank: int, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            split([1, 2], limit, num_ranks, rank)

    @SPLITS
    def test_lengths_are_whole_and_not_negative(self, split: Split) -> None:
        with pytest.raises(ValueError, match="sample 1 has -2 tokens"):
            split([1, -2], 10, 2, 0)
        with pytest.raises(ValueError, match="whole numbers"):
            split([1.5, 2.0], 10, 2, 0)  # type: ignore[list-item]

    def test_assign_does_not_drop(self) -> None:
        with pytest.raises(ValueError, match="sample 1 has 11 tokens, and a bin holds 0 to 10"):
            assign(np.array([3, 11]), 10, 2)

    @SPLITS
    @STABLE
    @given(batch=batches)
    def test_lists_tuples_and_arrays_give_the_same_and_plain_numbers(
        self, split: Split, batch: tuple[list[int], int, int]
    ) -> None:
        lengths, limit, num_ranks = batch
        found = split(lengths, limit, num_ranks, num_ranks - 1)
        assert all(type(i) is int for bin_ in found for i in bin_)
        for given_as in (tuple(lengths), np.array(lengths, dtype=np.int32), np.array(lengths, dtype=np.uint16)):
            assert split(given_as, limit, num_ranks, num_ranks - 1) == found  # type: ignore[arg-type]

    def test_the_lengths_given_are_not_written_to(self) -> None:
        lengths = np.array([5, 3, 2, 4, 3])
        lengths.setflags(write=False)
        assign(lengths, 10, 2)
        best_fit_rows(lengths, 10)


class TestBestFitRows:
    def test_each_into_the_row_it_fills_best(self) -> None:
        # 7 and 6 open rows; 4 goes beside 6, not 7; 3 beside 7; 2 finds both full.
        order, offsets = best_fit_rows(np.array([2, 3, 4, 6, 7]), 10)
        rows = {tuple(order[a:b].tolist()) for a, b in pairwise(offsets.tolist())}
        assert rows == {(4, 1), (3, 2), (0,)}

    def test_of_equal_lengths_the_earlier_document_first(self) -> None:
        order, offsets = best_fit_rows(np.array([5, 5, 5, 5, 5]), 10)
        assert order.tolist() == [0, 1, 2, 3, 4]
        assert offsets.tolist() == [0, 2, 4, 5]

    @pytest.mark.parametrize(("lengths", "said"), [([3, 0], "document 1 has 0"), ([11, 3], "document 0 has 11")])
    def test_a_document_that_fits_no_row_is_named(self, lengths: list[int], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            best_fit_rows(np.array(lengths), 10)

    def test_no_documents_make_no_rows(self) -> None:
        order, offsets = best_fit_rows(np.array([], dtype=np.int64), 10)
        assert order.tolist() == []
        assert offsets.tolist() == [0]

    @settings(STABLE, max_examples=300)
    @given(st.integers(1, 80).flatmap(lambda top: st.tuples(st.lists(st.integers(1, top), max_size=120), st.just(top))))
    def test_the_same_rows_as_document_by_document(self, given_: tuple[list[int], int]) -> None:
        lengths, row_length = given_
        order, offsets = best_fit_rows(np.array(lengths, dtype=np.int64), row_length)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        rows = [[lengths[i] for i in order[a:b]] for a, b in pairwise(offsets.tolist())]
        assert all(row and sum(row) <= row_length for row in rows)
        assert sorted(sum(row) for row in rows) == sorted(one_by_one(lengths, row_length))

    @pytest.mark.parametrize("row_length", [2048, 70_000])
    def test_a_corpus_is_full_and_quick(self, row_length: int) -> None:
        lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(6, 1, 200_000)), 1, 2048).astype(np.int64)
        began = time.process_time()
        order, offsets = best_fit_rows(lengths, row_length)
        assert time.process_time() - began < 2
        assert np.array_equal(np.sort(order), np.arange(lengths.size))
        assert lengths.sum() / ((offsets.size - 1) * row_length) >= 0.995


def one_by_one(lengths: list[int], row_length: int) -> list[int]:
    """How full the rows of best fit decreasing are, written as its definition."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] + length <= row_length]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return rows


def compare() -> None:
    print(
        f"{'512 samples on 8 ranks, 32768 tokens':38} {'planner':8} {'rounds':>6} {'fill':>7} {'balance':>8} {'ms':>7}"
    )
    for name in BENCHMARK.DISTRIBUTIONS:
        lengths = BENCHMARK.draw(name, np.random.default_rng(0), 512, 8192)
        for planner, plan in BENCHMARK.PLANNERS.items():
            began = time.perf_counter()
            rounds = plan(lengths, 32768, 8)
            taken = (time.perf_counter() - began) * 1e3
            cost = BENCHMARK.costs_of(rounds, lengths).sum(axis=0)
            fill = lengths.sum() / (len(rounds) * 8 * 32768)
            print(f"{name:38} {planner:8} {len(rounds):6} {fill:7.1%} {cost.mean() / cost.max():8.4f} {taken:7.1f}")


if __name__ == "__main__":
    compare()
