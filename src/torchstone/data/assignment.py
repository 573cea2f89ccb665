"""Which samples of one optimizer step meet on which data rank in which round.

A round is one micro-batch on every rank: each rank takes a bin of at most so many tokens, and all wait for the slowest.
So a plan wants few rounds first, and then bins of one round that cost the same. Every rank works the whole plan out
from the lengths alone and takes its column; nothing is sent. Costs are kept as integers for that reason: sums of
floats may round differently on another processor, and two ranks with two plans would train on the wrong samples.

Least rounds is bin packing, which has no fast exact answer. Three heuristics are tried (best fit decreasing, a deal of
longest first, and the field's own search as a last resort) and the best plan is kept: `benchmarks/data/packing.py` has
the figures. The price is time on the host, some 10 ms for a step of 512 samples where the greedy takes 0.3, and that
samples of like length tend to share a round: harmless, as the rounds of one step are summed into one gradient.
"""

from __future__ import annotations

import heapq
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np

Rounds = list[list[list[int]]]
"""Rounds x ranks x positions of samples."""

ATTENTION = 1 / (12 * 4096)
"""What attention adds to a sample's cost, per token squared.

In a decoder layer the linear maps cost 24 * width**2 FLOPs a token and causal attention 2 * width * length, so
attention is length / (12 * width) of the rest. 4096 is the width of the models around 8B; for one of another width the
balance is a little off, never the limits.
"""


def batch_lengths_to_minibatches(
    batch_lengths: Sequence[int] | np.ndarray, max_tokens_per_rank: int, num_ranks: int, rank: int
) -> list[list[int]]:
    """The greedy: samples as they come, each to the least loaded rank, a new round for all where it does not fit.

    Returns the samples of `rank`, a list a round; `[-1]` stands for a round in which it has nothing. Samples over the
    limit are left out with a warning. One pass, O(n * ranks); it neither looks ahead nor knows of attention.
    """
    lengths, kept = _fitting(batch_lengths, max_tokens_per_rank, num_ranks, rank)
    return _column(_as_they_come(lengths[kept], max_tokens_per_rank, num_ranks), kept, rank)


def batch_lengths_to_minibatches_lpt(
    batch_lengths: Sequence[int] | np.ndarray,
    max_tokens_per_rank: int,
    num_ranks: int,
    rank: int,
    quadratic: float = ATTENTION,
) -> list[list[int]]:
    """The same contract as the greedy, by `assign`: fewer rounds, and ranks that wait less for each other.

    Equal cost is not equal tokens. Where samples are so long that the tokens in a round would be clearly less equal
    than the greedy has them (under 0.95 of it), tokens are levelled, or else the search or the greedy itself is
    followed, as long as that takes no more rounds than the search.
    """
    lengths, kept = _fitting(batch_lengths, max_tokens_per_rank, num_ranks, rank)
    return _column(_balanced(lengths[kept], max_tokens_per_rank, num_ranks, quadratic), kept, rank)


def assign(lengths: np.ndarray, max_tokens: int, num_ranks: int, quadratic: float = ATTENTION) -> Rounds:
    """Rounds x ranks x positions in `lengths`: every sample once, no bin over `max_tokens`, an empty bin is `[]`.

    Never more rounds than the longest-first search of the field takes (see `_longest_first_rounds`). All rounds but the
    last are as full as they get, so what is left over is in one place; within a round the costs, `length + quadratic *
    length**2`, are levelled. Costs O(n log n) and a bounded search in every round.
    """
    lengths = _whole_numbers(lengths)
    _check_limits(max_tokens, num_ranks)
    if quadratic < 0:
        raise ValueError(f"a longer sample never costs less: quadratic is at least 0, not {quadratic}")
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > max_tokens):
        wrong = int(np.flatnonzero((lengths < 0) | (lengths > max_tokens))[0])
        raise ValueError(f"sample {wrong} has {int(lengths[wrong])} tokens, and a bin holds 0 to {max_tokens}")
    if not lengths.size:
        return []
    step = _Step(lengths, _costs(lengths, quadratic), max_tokens, num_ranks)
    rounds = _fewest_rounds(step) or [[[] for _ in range(num_ranks)]]
    _deal_the_empty(step, rounds[-1])
    return _share_among_ranks(step, rounds)


def best_fit_rows(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit decreasing of documents into rows: row r holds the documents `order[offsets[r] : offsets[r + 1]]`.

    Longest first, each into the row where it leaves the least room. Equal documents fill equal rows alike, so this
    works on the histogram of lengths and on groups of identical rows: its time follows the distinct lengths, not the
    documents. A million long-tailed documents into rows of 2048 take a fraction of a second; where all lengths differ
    it is one bisection a document. Of equal lengths the earlier document comes first. The rows that close first, the
    ones with the longest documents, are not in any order a model should see: shuffle them.
    """
    lengths = _whole_numbers(lengths)
    if row_length < 1:
        raise ValueError(f"a row holds at least one token, not {row_length}")
    if lengths.size and (int(lengths.min()) < 1 or int(lengths.max()) > row_length):
        wrong = int(np.flatnonzero((lengths < 1) | (lengths > row_length))[0])
        raise ValueError(f"document {wrong} has {int(lengths[wrong])} tokens, and a row holds 1 to {row_length}")
    # 16 bits are sorted by radix, several times faster than by comparison.
    narrow = lengths.astype(np.uint16) if row_length < 2**16 else lengths
    by_length = np.argsort(narrow, kind="stable")
    values, counts = np.unique(narrow, return_counts=True)
    groups = _fill_by_histogram(values.tolist(), counts.tolist(), row_length)
    first_of_length = dict(zip(values.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
    return _write_out(groups, by_length, first_of_length)


@dataclass(frozen=True)
class _Step:
    """What a plan is made from."""

    lengths: np.ndarray
    costs: np.ndarray
    max_tokens: int
    num_ranks: int

    def tokens_in(self, bin_: list[int]) -> int:
        return int(self.lengths[bin_].sum())

    def cost_of(self, bin_: list[int]) -> int:
        return int(self.costs[bin_].sum())

    def longest_first(self, samples: np.ndarray) -> np.ndarray:
        return samples[np.argsort(-self.lengths[samples], kind="stable")]


def _fitting(
    batch_lengths: Sequence[int] | np.ndarray, max_tokens: int, num_ranks: int, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The lengths, and which of them fit; the others are named in a warning."""
    _check_limits(max_tokens, num_ranks)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} is not one of {num_ranks}: 0 to {num_ranks - 1}")
    lengths = _whole_numbers(batch_lengths)
    if lengths.size and int(lengths.min()) < 0:
        raise ValueError(f"sample {int(lengths.argmin())} has {int(lengths.min())} tokens")
    dropped = np.flatnonzero(lengths > max_tokens)
    if dropped.size:
        named = ", ".join(f"{i} ({int(lengths[i])})" for i in dropped[:5].tolist()) + (
            ", ..." if dropped.size > 5 else ""
        )
        warnings.warn(
            f"{dropped.size} of {lengths.size} samples are longer than {max_tokens} tokens and are left out: {named}",
            stacklevel=3,
        )
    return lengths, np.flatnonzero(lengths <= max_tokens)


def _as_they_come(lengths: np.ndarray, max_tokens: int, num_ranks: int) -> Rounds:
    rounds: Rounds = []
    loads = [max_tokens + 1] * num_ranks
    for sample, length in enumerate(lengths.tolist()):
        least = loads.index(min(loads))
        if loads[least] + length > max_tokens:
            loads = [0] * num_ranks
            least = 0
            rounds.append([[] for _ in range(num_ranks)])
        loads[least] += length
        rounds[-1][least].append(sample)
    return rounds


def _balanced(lengths: np.ndarray, max_tokens: int, num_ranks: int, quadratic: float) -> Rounds:
    """The first plan whose tokens are nearly as equal as the greedy's, of those of few enough rounds."""
    greedy = _as_they_come(lengths, max_tokens, num_ranks)
    enough = 0.95 * _balance(lengths, greedy)
    plan = assign(lengths, max_tokens, num_ranks, quadratic)
    if _balance(lengths, plan) >= enough:
        return plan
    step = _Step(lengths, _costs(lengths, 0.0), max_tokens, num_ranks)
    search = _longest_first_rounds(step, step.longest_first(np.flatnonzero(lengths)))
    if search:
        _deal_the_empty(step, search[-1])
    others = [assign(lengths, max_tokens, num_ranks, quadratic=0.0), search, greedy]
    good = [other for other in others if len(other) <= len(search) and _balance(lengths, other) >= enough]
    return good[0] if good else plan


def _column(rounds: Rounds, kept: np.ndarray, rank: int) -> list[list[int]]:
    return [kept[bins[rank]].tolist() if bins[rank] else [-1] for bins in rounds]


def _balance(lengths: np.ndarray, rounds: Rounds) -> float:
    """How equal the tokens of the ranks at work in a round are: least over most, on average; 1 is equal."""
    loads = np.array([[int(lengths[bin_].sum()) for bin_ in bins] for bins in rounds], dtype=np.float64)
    if not loads.any():
        return 1.0
    loads = loads[loads.any(axis=1)]
    return float((np.where(loads > 0, loads, np.inf).min(axis=1) / loads.max(axis=1)).mean())


def _check_limits(max_tokens: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"there is at least one rank, not {num_ranks}")
    if max_tokens < 1:
        raise ValueError(f"a rank takes at least one token a round, not {max_tokens}")


def _whole_numbers(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"lengths are a flat list of whole numbers, not {given.dtype} of shape {given.shape}")
    return given.astype(np.int64)


def _costs(lengths: np.ndarray, quadratic: float) -> np.ndarray:
    """In 256ths of a token's cost: fine enough to tell bins apart, small enough that no sum overflows."""
    wide = lengths.astype(np.float64)
    return np.rint((wide + quadratic * wide * wide) * 256).astype(np.int64)


# Ranks that wait for a 1024th of their time are as good as even.
_HARDLY_ANY = 1024


def _fewest_rounds(step: _Step) -> Rounds:
    """The best plan of the fewest rounds found, its rounds levelled; samples of no tokens are left out."""
    samples = step.longest_first(np.flatnonzero(step.lengths))
    if not samples.size:
        return []
    packed = _best_fit(step, samples)
    bound, most = _fewest_thinkable(step, samples), -(-len(packed) // step.num_ranks)
    if most > bound:
        most = min(most, len(_longest_first_rounds(step, samples)))
    # Best fit is nearly always at the bound. Where it is not, a deal may do with less.
    for count in range(max(bound, most - 2), most):
        plan = _dealt(step, samples, count)
        if plan is not None:
            return _levelled(step, plan)
    return _quickest(step, samples, packed, most)


def _quickest(step: _Step, samples: np.ndarray, packed: list[list[int]], count: int) -> Rounds:
    """Of the plans of `count` rounds the first in which ranks hardly wait, or else the one in which they wait least.

    The search comes last: it balances well and leaves the most room in the rounds before the last.
    """
    makers: list[Callable[[], Rounds | None]] = [
        lambda: _dealt(step, samples, count),
        lambda: _packed_full(step, packed, count),
        lambda: _longest_first_rounds(step, samples),
    ]
    hardly_waiting = int(step.costs.sum()) * (_HARDLY_ANY + 1) // (_HARDLY_ANY * step.num_ranks)
    found: list[tuple[int, int, Rounds]] = []
    for make in makers:
        plan = make()
        if plan is not None and len(plan) <= count:
            found.append((len(plan), _time_of(step, plan := _levelled(step, plan)), plan))
            if found[-1][1] <= hardly_waiting:
                break
    return min(found, key=lambda plan: plan[:2])[2]


def _fewest_thinkable(step: _Step, samples: np.ndarray) -> int:
    """No plan has fewer rounds: all tokens must go somewhere, and two samples over half the limit share no bin."""
    lengths = step.lengths[samples]
    by_tokens = -(-int(lengths.sum()) // (step.max_tokens * step.num_ranks))
    by_halves = -(-int((2 * lengths > step.max_tokens).sum()) // step.num_ranks)
    return max(by_tokens, by_halves)


def _time_of(step: _Step, rounds: Rounds) -> int:
    """The ranks of a round wait for the costliest."""
    return sum(max(step.cost_of(bin_) for bin_ in bins) for bins in rounds)


def _best_fit(step: _Step, samples: np.ndarray) -> list[list[int]]:
    order, offsets = best_fit_rows(step.lengths[samples], step.max_tokens)
    chosen = samples[order].tolist()
    return [chosen[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def _packed_full(step: _Step, packed: list[list[int]], count: int) -> Rounds | None:
    """The fullest bins make the first rounds; what the others hold is dealt anew over the last. None if too many."""
    fullest = sorted(packed, key=lambda bin_: -step.tokens_in(bin_))
    full = (count - 1) * step.num_ranks
    rest = np.array(list(chain.from_iterable(fullest[full:])), dtype=np.int64)
    last = _last_round(step, step.longest_first(rest)) or fullest[full:]
    return [*_alike_together(step, fullest[:full]), last] if len(last) <= step.num_ranks else None


def _dealt(step: _Step, samples: np.ndarray, count: int) -> Rounds | None:
    """All bins of the full rounds dealt out at once, so that each gets its share of long samples; None if too many."""
    bins, rest = _deal(step, samples, (count - 1) * step.num_ranks)
    if not rest.size:
        return _alike_together(step, bins)
    last = _last_round(step, rest) or _last_round(step, _top_up(step, bins, rest))
    return None if last is None else [*_alike_together(step, bins), last]


def _top_up(step: _Step, bins: list[list[int]], rest: np.ndarray) -> np.ndarray:
    """Exchanges a sample of each bin, or none, for one or two of the rest that leave the least room; the new rest.

    For a last round that would not hold the rest: bins full to the token are hard to level, so only then.
    """
    for number, bin_ in enumerate(bins):
        room = step.max_tokens - step.tokens_in(bin_)
        givable, takable = _few_of_each(step, np.array(bin_, dtype=np.int64), 1), _few_of_each(step, rest, 2)
        pairs = _pairs_of_places(takable.size + 1)[1]
        gained = np.append(0, step.lengths[takable])[pairs].sum(axis=0) - np.append(0, step.lengths[givable])[:, None]
        gained[gained > room] = 0
        give, take = divmod(int(gained.argmax()), pairs.shape[1])
        if gained[give, take] > 0:
            given, taken = givable[:give][-1:], takable[pairs[:, take][pairs[:, take] > 0] - 1]
            bins[number] = [sample for sample in bin_ if sample not in given] + taken.tolist()
            rest = np.concatenate([rest[~np.isin(rest, taken)], given])
    return step.longest_first(rest)


def _last_round(step: _Step, samples: np.ndarray) -> list[list[int]] | None:
    bins, rest = _deal(step, samples, step.num_ranks)
    if rest.size:
        bins = _best_fit(step, samples)
    return bins if len(bins) <= step.num_ranks else None


_TRIED_BINS = 16


def _deal(step: _Step, samples: np.ndarray, num_bins: int) -> tuple[list[list[int]], np.ndarray]:
    """Longest first to the cheapest bin, or to the next cheapest with room; and the samples that found none.

    Of many bins only some are tried: near the end all are nearly full, and a long sample would ask every one in vain.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [step.max_tokens] * num_bins
    heap = [(0, number) for number in range(num_bins)]
    rest = []
    lengths, costs = step.lengths[samples].tolist(), step.costs[samples].tolist()
    for sample, length, cost in zip(samples.tolist(), lengths, costs, strict=True):
        passed: list[tuple[int, int]] = []
        while heap and len(passed) < _TRIED_BINS and room[heap[0][1]] < length:
            passed.append(heapq.heappop(heap))
        if heap and len(passed) < _TRIED_BINS:
            load, number = heap[0]
            bins[number].append(sample)
            room[number] -= length
            heapq.heapreplace(heap, (load + cost, number))
        else:
            rest.append(sample)
        for bin_ in passed:
            heapq.heappush(heap, bin_)
    return bins, np.array(rest, dtype=np.int64)


def _alike_together(step: _Step, bins: list[list[int]]) -> Rounds:
    """Bins of like cost share a round; the costliest comes first, so that one too big for a device shows early."""
    ordered = sorted(bins, key=lambda bin_: -step.cost_of(bin_))
    return [ordered[at : at + step.num_ranks] for at in range(0, len(ordered), step.num_ranks)]


def _longest_first_rounds(step: _Step, samples: np.ndarray) -> Rounds:
    """The search of the field: of what is left, the most of the longest that fit a round when each goes to the
    least loaded rank. "The most" is found by bisection, as it is there: what fits is not quite monotone."""
    lengths = step.lengths[samples].tolist()
    ends = np.cumsum(step.lengths[samples])
    rounds: Rounds = []
    start = 0
    while start < len(lengths):
        done = int(ends[start - 1]) if start else 0
        capacity = done + step.max_tokens * step.num_ranks
        fits, too_many = 1, int(np.searchsorted(ends, capacity, side="right")) - start + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if _least_loaded(lengths[start : start + middle], step.num_ranks, step.max_tokens) is None:
                too_many = middle
            else:
                fits = middle
        ranks = _least_loaded(lengths[start : start + fits], step.num_ranks, step.max_tokens)
        assert ranks is not None
        rounds.append([[] for _ in range(step.num_ranks)])
        for sample, rank in zip(samples[start : start + fits].tolist(), ranks, strict=True):
            rounds[-1][rank].append(sample)
        start += fits
    return rounds


def _least_loaded(lengths: list[int], num_ranks: int, limit: int) -> list[int] | None:
    """The rank of each, or None where one comes over the limit."""
    heap = [(0, rank) for rank in range(num_ranks)]
    ranks = []
    for length in lengths:
        load, rank = heap[0]
        if load + length > limit:
            return None
        heapq.heapreplace(heap, (load + length, rank))
        ranks.append(rank)
    return ranks


# A bin within a 2048th of the mean is left alone: the cost is a model, no truer than that, and a finer search would pay
# for the last tokens with attention.
_NEAR_ENOUGH = 2048
_EXCHANGES_A_RANK = 4


def _levelled(step: _Step, rounds: Rounds) -> Rounds:
    return [_level(step, bins) for bins in rounds]


def _level(step: _Step, bins: list[list[int]]) -> list[list[int]]:
    """Exchanges samples between the costliest bin of a round and cheap ones until it is near the mean, or stuck."""
    held = [np.array(bin_, dtype=np.int64) for bin_ in bins]
    held += [np.empty(0, dtype=np.int64) for _ in range(step.num_ranks - len(bins))]
    cost = np.array([step.costs[bin_].sum() for bin_ in held])
    room = np.array([step.max_tokens - step.lengths[bin_].sum() for bin_ in held])
    goal = int(cost.sum()) // step.num_ranks
    goal += goal // _NEAR_ENOUGH
    for _ in range(_EXCHANGES_A_RANK * step.num_ranks):
        dear = int(cost.argmax())
        if cost[dear] <= goal or not _relieve(step, held, cost, room, dear):
            break
    return [bin_.tolist() for bin_ in held]


_PARTNERS = 4


def _relieve(step: _Step, held: list[np.ndarray], cost: np.ndarray, room: np.ndarray, dear: int) -> bool:
    """Exchanges between bin `dear` and the first of the cheapest with which that helps; False if there is none."""
    for cheap in np.argsort(cost, kind="stable")[:_PARTNERS].tolist():
        gap = int(cost[dear] - cost[cheap])
        found = _exchange(step, held[dear], held[cheap], gap, int(room[dear]), int(room[cheap])) if gap else None
        if found is None:
            continue
        given, taken = found
        for mine, gone, come in ((dear, given, taken), (cheap, taken, given)):
            held[mine] = np.concatenate([held[mine][~np.isin(held[mine], gone)], come])
            cost[mine] += int(step.costs[come].sum()) - int(step.costs[gone].sum())
            room[mine] -= int(step.lengths[come].sum()) - int(step.lengths[gone].sum())
        return True
    return False


_LOOKED_AT = 32


def _exchange(
    step: _Step, dear: np.ndarray, cheap: np.ndarray, gap: int, room_dear: int, room_cheap: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The sample to give and the none, one or two to take that come nearest to halving the gap.

    One for two is what levels full bins: a long sample against two short ones moves attention and hardly a token.
    """
    givable, takable = _few_of_each(step, dear, 1), _few_of_each(step, cheap, 2)
    # Place 0 is no sample, so that none, one and two are all pairs.
    lengths, costs = np.append(0, step.lengths[takable]), np.append(0, step.costs[takable])
    for pairs in _pairs_of_places(lengths.size):
        gain = step.costs[givable][:, None] - costs[pairs].sum(axis=0)
        grown = step.lengths[givable][:, None] - lengths[pairs].sum(axis=0)
        off = np.abs(2 * gain - gap)
        off[(grown > room_cheap) | (-grown > room_dear)] = gap
        give, take = divmod(int(off.argmin()), pairs.shape[1])
        if 2 * off[give, take] <= gap:
            break
    if off[give, take] >= gap:
        return None
    taken = pairs[:, take]
    return givable[give : give + 1], takable[taken[taken > 0] - 1]


@cache
def _pairs_of_places(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Place 0 with every place, and the same followed by all pairs: the many are tried only if the few do not do."""
    few = np.stack([np.zeros(size, dtype=np.int64), np.arange(size)])
    return few, np.concatenate([few, 1 + np.stack(np.triu_indices(size - 1, 1))], axis=1)


def _few_of_each(step: _Step, bin_: np.ndarray, most: int) -> np.ndarray:
    """At most so many samples of every length, evenly thinned where there are many: the search is to stay small."""
    ordered = bin_[np.argsort(step.lengths[bin_], kind="stable")]
    lengths = step.lengths[ordered]
    few = np.concatenate([ordered[:most], ordered[most:][lengths[most:] != lengths[:-most]]])
    return few[np.arange(_LOOKED_AT) * few.size // _LOOKED_AT] if few.size > _LOOKED_AT else few


def _deal_the_empty(step: _Step, bins: list[list[int]]) -> None:
    """Samples of no tokens go to the last round, where a bin without samples would otherwise be padding."""
    waiting = sorted(range(len(bins)), key=lambda number: (bool(bins[number]), number))
    for turn, sample in enumerate(np.flatnonzero(step.lengths == 0).tolist()):
        bins[waiting[turn % len(bins)]].append(sample)


def _share_among_ranks(step: _Step, rounds: Rounds) -> Rounds:
    """In each round the costliest bin to the rank that has had the least, so that no rank works more on the whole."""
    totals = [0] * step.num_ranks
    shared = []
    for bins in rounds:
        behind = sorted(range(step.num_ranks), key=lambda rank: (totals[rank], rank))
        row: list[list[int]] = [[] for _ in bins]
        for rank, bin_ in zip(behind, sorted(bins, key=lambda bin_: -step.cost_of(bin_)), strict=True):
            row[rank] = bin_
            totals[rank] += step.cost_of(bin_)
        shared.append(row)
    return shared


_Group = tuple[int, tuple[tuple[int, int], ...]]
"""Identical rows: how many, and what each holds as (length, times)."""


def _fill_by_histogram(values: list[int], counts: list[int], row_length: int) -> list[_Group]:
    """Groups of identical rows, from lengths (ascending) and how often each occurs."""
    by_room: dict[int, list[_Group]] = {}
    rooms: list[int] = []

    def put(room: int, count: int, holds: tuple[tuple[int, int], ...]) -> None:
        if count:
            if not by_room.setdefault(room, []):
                insort(rooms, room)
            by_room[room].append((count, holds))

    for length, left in zip(reversed(values), reversed(counts), strict=True):
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                count, holds = by_room[room].pop()
                if not by_room[room]:
                    del rooms[at]
            else:
                room, holds = row_length, ()
                count = -(-left // (row_length // length))
            # Once it has taken one, no other row has as little room and still enough: so it takes all that fit.
            each = room // length
            full = min(count, left // each)
            odd = min(each, left - full * each) if full < count else 0
            put(room - each * length, full, (*holds, (length, each)))
            put(room - odd * length, int(odd > 0), (*holds, (length, odd)))
            put(room, count - full - (odd > 0), holds)
            left -= full * each + odd
    return [group for room in rooms for group in by_room[room]]


def _write_out(
    groups: list[_Group], by_length: np.ndarray, next_of_length: dict[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Puts documents in the places of the groups' rows, those of one length in the order they were given."""
    order, widths = [by_length[:0]], [np.zeros(1, dtype=np.int64)]
    for count, holds in groups:
        columns = []
        for length, times in holds:
            at = next_of_length[length]
            next_of_length[length] = end = at + count * times
            columns.append(by_length[at:end].reshape(count, times))
        rows = np.concatenate(columns, axis=1)
        order.append(rows.ravel())
        widths.append(np.full(count, rows.shape[1]))
    return np.concatenate(order), np.cumsum(np.concatenate(widths))
