"""How well samples are packed and shared out, against the greedy and the longest-first search of the field.

    python benchmarks/data/packing.py [--batches 1000] [--documents 1000000] [--multipack-lengths FILE]

A JSON line a measurement and a last one with the verdicts; it exits with 1 where one of them is false. No device and
one core. Time is counted in costs, `length + length**2 / (12 * 4096)`: the ranks of a round wait for the costliest, so
`waiting` is the sum over rounds of the costliest rank over the sum of the mean. 1 is no waiting.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from torchstone.data.assignment import ATTENTION, assign, batch_lengths_to_minibatches, best_fit_rows

Rounds = list[list[list[int]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000, help="random batches for the comparison of rounds")
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents for the rows of a corpus")
    parser.add_argument("--seeds", type=int, default=8, help="batches of 512 samples for every distribution")
    parser.add_argument("--multipack-lengths", type=Path, help="a JSON list of lengths: multipack's own test data")
    parser.add_argument(
        "--shuffles", type=int, default=10, help="orders of that list, as multipack's notebook has them"
    )
    options = parser.parse_args()
    verdicts = {
        **rows_of_a_corpus(options.documents),
        **rounds_against_the_search(options.batches),
        **balance_of_512(options.seeds),
        **speed(),
    }
    if options.multipack_lengths is not None:
        verdicts |= multipack(json.loads(options.multipack_lengths.read_text()), options.shuffles)
    print(json.dumps({"verdicts": verdicts, "all": all(verdicts.values())}))
    return 0 if all(verdicts.values()) else 1


def longest_first_search(lengths: list[int], limit: int, num_ranks: int) -> Rounds:
    """What the packers of the field do, as plainly as it can be written: LPT with a bisection.

    Samples are sorted, longest first. A round is the longest prefix of those left that fits when each sample goes to
    the rank with the fewest tokens so far; its length is bisected between one sample and as many as the tokens of all
    ranks together would hold. Multipack and the packers after it differ in whether they sort all samples or only those
    of a round, and in what they do with an incomplete last round; this one sorts all and keeps it.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = []
    while order:
        total, most = 0, 0
        while most < len(order) and total + lengths[order[most]] <= limit * num_ranks:
            total += lengths[order[most]]
            most += 1
        fits, too_many = 1, most + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if each_to_the_least_loaded(order[:middle], lengths, limit, num_ranks) is None:
                too_many = middle
            else:
                fits = middle
        bins = each_to_the_least_loaded(order[:fits], lengths, limit, num_ranks)
        assert bins is not None, "one sample alone fits"
        rounds.append(bins)
        order = order[fits:]
    return rounds


def each_to_the_least_loaded(
    samples: list[int], lengths: list[int], limit: int, num_ranks: int
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for sample in samples:
        load, rank = heapq.heappop(loads)
        if load + lengths[sample] > limit:
            return None
        bins[rank].append(sample)
        heapq.heappush(loads, (load + lengths[sample], rank))
    return bins


def greedy(lengths: np.ndarray, limit: int, num_ranks: int) -> Rounds:
    """All ranks' columns, so its time here is `num_ranks` times what one rank pays."""
    columns = [batch_lengths_to_minibatches(lengths, limit, num_ranks, rank) for rank in range(num_ranks)]
    return [[[] if bin_ == [-1] else bin_ for bin_ in bins] for bins in zip(*columns, strict=True)]


PLANNERS: dict[str, Callable[[np.ndarray, int, int], Rounds]] = {
    "greedy": greedy,
    "search": lambda lengths, limit, num_ranks: longest_first_search(lengths.tolist(), limit, num_ranks),
    "assign": assign,
}

# Lengths as they occur: chats, instructions with answers, web documents, and two that no one has, to be hard.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "log-normal": lambda rng, n, top: rng.lognormal(6.5, 1.0, n),
    "log-normal, clipped often": lambda rng, n, top: rng.lognormal(np.log(top) - 0.5, 1.0, n),
    "heavy tail": lambda rng, n, top: 100 + 200 * rng.pareto(1.3, n),
    "short and long": lambda rng, n, top: np.where(rng.random(n) < 0.8, rng.lognormal(5, 0.5, n), top * rng.random(n)),
    "uniform": lambda rng, n, top: rng.integers(1, top + 1, n).astype(float),
    "about a third": lambda rng, n, top: rng.integers(max(1, top // 4), max(2, top // 2), n).astype(float),
}
REAL_LIKE = ("log-normal", "log-normal, clipped often", "heavy tail", "short and long")


def draw(name: str, rng: np.random.Generator, n: int, top: int) -> np.ndarray:
    return np.clip(np.rint(DISTRIBUTIONS[name](rng, n, top)), 1, top).astype(np.int64)


def costs_of(rounds: Rounds, lengths: np.ndarray) -> np.ndarray:
    """Rounds x ranks."""
    cost = lengths + ATTENTION * lengths.astype(np.float64) ** 2
    return np.array([[cost[bin_].sum() for bin_ in bins] for bins in rounds])


def tokens_of(rounds: Rounds, lengths: np.ndarray) -> np.ndarray:
    return np.array([[int(lengths[bin_].sum()) for bin_ in bins] for bins in rounds])


def checked(rounds: Rounds, lengths: np.ndarray, limit: int) -> Rounds:
    """A plan that loses a sample or breaks a limit has no figures."""
    assert sorted(i for bins in rounds for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert tokens_of(rounds, lengths).max() <= limit
    return rounds


def report(**figures: object) -> None:
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def rows_of_a_corpus(documents: int) -> dict[str, bool]:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(6.0, 1.0, documents)), 1, 2048).astype(np.int64)
    began, began_cpu = time.perf_counter(), time.process_time()
    order, offsets = best_fit_rows(lengths, 2048)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    assert np.array_equal(np.sort(order), np.arange(documents))
    assert np.add.reduceat(lengths[order], offsets[:-1]).max() <= 2048
    fill = float(lengths.sum() / ((offsets.size - 1) * 2048))
    report(measurement="rows of 2048", documents=documents, rows=offsets.size - 1, fill=fill, s=seconds, cpu_s=cpu)
    return {"rows: fill >= 0.995": fill >= 0.995, "rows: under 2 s on one core": max(seconds, cpu) < 2}


def rounds_against_the_search(batches: int) -> dict[str, bool]:
    rng = np.random.default_rng(1)
    rounds: dict[str, list[int]] = {name: [] for name in PLANNERS}
    busy: dict[str, list[float]] = {name: [] for name in PLANNERS}
    fair: dict[str, list[float]] = {name: [] for name in PLANNERS}
    names = list(DISTRIBUTIONS)
    for number in range(batches):
        limit = int(rng.choice([512, 2048, 4096, 8192, 16384, 32768, 65536]))
        num_ranks, size = int(rng.integers(1, 17)), int(np.exp(rng.uniform(0, np.log(1024))))
        top = limit if number % 2 else max(1, limit // int(rng.integers(1, 17)))
        lengths = draw(names[number % len(names)], rng, size, top)
        for name, planner in PLANNERS.items():
            cost = costs_of(checked(planner(lengths, limit, num_ranks), lengths, limit), lengths)
            rounds[name].append(len(cost))
            busy[name].append(cost.max(axis=1).sum())
            fair[name].append(cost.mean(axis=1).sum())
    for name in PLANNERS:
        report(
            measurement="random batches", planner=name, batches=batches, mean_rounds=float(np.mean(rounds[name])),
            waiting=sum(busy[name]) / sum(fair[name]),
            waiting_median=float(np.median(np.array(busy[name]) / np.array(fair[name]))),
        )  # fmt: skip
    ours, theirs = np.array(rounds["assign"]), np.array(rounds["search"])
    slower = np.array(busy["assign"]) / np.array(busy["search"])
    report(
        measurement="assign against the search", batches=batches, fewer_rounds=int((ours < theirs).sum()),
        more_rounds=int((ours > theirs).sum()), slower=int((slower > 1 + 1e-9).sum()), slowest=float(slower.max()),
    )  # fmt: skip
    return {"rounds: never more than the search": bool((ours <= theirs).all())}


def balance_of_512(seeds: int) -> dict[str, bool]:
    """Samples up to a quarter of the limit: beside one that fills a bin alone no plan can balance attention."""
    worst = 0.0
    for name in REAL_LIKE:
        for limit, top in ((32768, 8192), (65536, 8192), (16384, 4096)):
            figures = {planner: balance(planner, name, limit, top, seeds) for planner in PLANNERS}
            worst = max(worst, figures["assign"]["longest_rank_max"])
            for planner, measured in figures.items():
                report(measurement="512 samples on 8 ranks", lengths=name, longest_sample=top, limit=limit,
                       planner=planner, **measured)  # fmt: skip
    for planner in PLANNERS:
        report(measurement="512 samples on 8 ranks, samples as long as the limit (no verdict)", lengths="heavy tail",
               limit=32768, planner=planner, **balance(planner, "heavy tail", 32768, 32768, seeds))  # fmt: skip
    return {"512 on 8: longest rank <= 1.02 of the mean": worst <= 1.02}


def balance(planner: str, distribution: str, limit: int, top: int, seeds: int) -> dict[str, float]:
    longest, waiting, rounds, seconds, least = [], [], [], [], []
    for seed in range(seeds):
        lengths = draw(distribution, np.random.default_rng(seed), 512, top)
        began = time.perf_counter()
        plan = PLANNERS[planner](lengths, limit, 8)
        seconds.append(time.perf_counter() - began)
        cost = costs_of(checked(plan, lengths, limit), lengths)
        longest.append(cost.sum(axis=0).max() / cost.sum(axis=0).mean())
        waiting.append(cost.max(axis=1).sum() / cost.mean(axis=1).sum())
        rounds.append(len(cost))
        costliest_sample = costs_of([[[int(lengths.argmax())]]], lengths).max()
        least.append(max(1.0, costliest_sample / cost.sum(axis=0).mean()))
    return {
        "mean_rounds": float(np.mean(rounds)), "longest_rank_mean": float(np.mean(longest)),
        "longest_rank_max": float(max(longest)), "longest_rank_least_possible": float(np.mean(least)),
        "waiting_mean": float(np.mean(waiting)), "waiting_max": float(max(waiting)),
        "ms_median": float(np.median(seconds) * 1e3),
    }  # fmt: skip


def speed() -> dict[str, bool]:
    verdicts = {}
    for samples, num_ranks, limit, allowed_s in ((512, 8, 32768, 0.05), (6144, 8, 32768, 2.0), (4096, 64, 8192, 1.0)):
        lengths = draw("log-normal", np.random.default_rng(2), samples, 8192)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            plan = assign(lengths, limit, num_ranks)
            taken.append(time.perf_counter() - began)
        middle = float(np.median(taken))
        report(measurement="time of assign", samples=samples, ranks=num_ranks, limit=limit, rounds=len(plan),
               ms_median=middle * 1e3, ms_max=max(taken) * 1e3)  # fmt: skip
        verdicts[f"time: {samples} on {num_ranks} under {allowed_s} s"] = middle < allowed_s
    return verdicts


def multipack(given: list[int], shuffles: int) -> dict[str, bool]:
    """Multipack's own measure on its own data: 8 ranks of 16 x 2048 tokens, the whole list one batch.

    L2 lag is the root of the mean over rounds of (most minus least, over the ranks, of the sum of squared lengths).
    The list is 36.3 rounds of tokens, so the fill that says anything is that of the rounds before the last.
    """
    fills, lags = [], []
    for shuffle in range(shuffles):
        rng = np.random.default_rng(shuffle)
        lengths = np.array(given, dtype=np.int64)[rng.permutation(len(given)) if shuffle else slice(None)]
        began = time.perf_counter()
        plan = assign(lengths, 32768, 8)
        seconds = time.perf_counter() - began
        tokens = tokens_of(checked(plan, lengths, 32768), lengths)
        squares = tokens_of(plan, lengths**2)
        lag = squares.max(axis=1) - squares.min(axis=1)
        fills.append(float(tokens[:-1].mean() / 32768))
        lags.append(float(max(np.sqrt(lag[:-1].mean()), np.sqrt(lag.mean()))))
        report(
            measurement="multipack's lengths", shuffle=shuffle, rounds=len(plan), fill_of_full_rounds=fills[-1],
            fill_of_all=float(tokens.mean() / 32768), l2_lag_of_full_rounds=float(np.sqrt(lag[:-1].mean())),
            l2_lag_of_all=float(np.sqrt(lag.mean())), ms=seconds * 1e3,
        )  # fmt: skip
    return {"multipack: fill >= 0.996": min(fills) >= 0.996, "multipack: lag <= 438": max(lags) <= 438}


if __name__ == "__main__":
    sys.exit(main())
