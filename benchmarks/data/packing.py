"""Compare the assignment of samples to ranks with the greedy algorithm and with plain longest-first.

    python benchmarks/data/packing.py [--batches 1000] [--documents 1000000] [--multipack-lengths FILE]

Prints one JSON line per measurement and a last one with the verdicts. Exits with 1 if a verdict is false. Needs no
device and one core. Time is measured in costs, `length + length**2 / (12 * 4096)`. The ranks of a micro-step wait for
the costliest, so `waiting` is the sum over micro-steps of the costliest rank, divided by the sum of the means. 1 is no
waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from torchstone.data.assignment import (
    MicroSteps,
    assign_micro_batches,
    batch_lengths_to_minibatches,
    best_fit_rows,
    sample_costs,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000, help="random batches for the comparison of micro-steps")
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents to pack into rows")
    parser.add_argument("--seeds", type=int, default=8, help="batches of 512 samples per distribution")
    parser.add_argument("--multipack-lengths", type=Path, help="a JSON list of lengths: multipack's own test data")
    parser.add_argument("--shuffles", type=int, default=10, help="random orders of that list, as in its notebook")
    options = parser.parse_args()
    verdicts = {
        **measure_rows(options.documents),
        **compare_with_longest_first(options.batches),
        **measure_balance(options.seeds),
        **measure_time(),
    }
    if options.multipack_lengths is not None:
        verdicts |= measure_multipack(json.loads(options.multipack_lengths.read_text()), options.shuffles)
    print(json.dumps({"verdicts": verdicts, "all": all(verdicts.values())}))
    return 0 if all(verdicts.values()) else 1


def longest_first(lengths: list[int], limit: int, num_ranks: int) -> MicroSteps:
    """What other packers do, written as plainly as possible.

    Each sample, longest first, goes to the rank with the fewest tokens; one that does not fit there starts the next
    micro-step. Multipack finds the same micro-steps by bisection. Packers differ in whether they sort all samples or
    only those of a micro-step, and in whether they drop an incomplete last one; this one sorts all and keeps it.
    """
    micro_steps: MicroSteps = []
    loads = [limit + 1]
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if min(loads) + lengths[sample] > limit:
            loads = [0] * num_ranks
            micro_steps.append([[] for _ in range(num_ranks)])
        rank = loads.index(min(loads))
        loads[rank] += lengths[sample]
        micro_steps[-1][rank].append(sample)
    return micro_steps


def greedy(lengths: np.ndarray, limit: int, num_ranks: int) -> MicroSteps:
    """Computes the assignment once per rank, so its time here is `num_ranks` times what one rank pays."""
    by_rank = [batch_lengths_to_minibatches(lengths, limit, num_ranks, rank) for rank in range(num_ranks)]
    return [[[] if bin_ == [-1] else bin_ for bin_ in bins] for bins in zip(*by_rank, strict=True)]


ALGORITHMS: dict[str, Callable[[np.ndarray, int, int], MicroSteps]] = {
    "greedy": greedy,
    "longest-first": lambda lengths, limit, num_ranks: longest_first(lengths.tolist(), limit, num_ranks),
    "assign": assign_micro_batches,
}

# Lengths like those of chats, instructions with answers and web documents, and two hard artificial distributions.
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


def costs_of(micro_steps: MicroSteps, lengths: np.ndarray) -> np.ndarray:
    """Micro-steps x ranks."""
    return tokens_of(micro_steps, sample_costs(lengths)).astype(np.float64)


def tokens_of(micro_steps: MicroSteps, lengths: np.ndarray) -> np.ndarray:
    return np.array([[int(lengths[bin_].sum()) for bin_ in bins] for bins in micro_steps])


def checked(micro_steps: MicroSteps, lengths: np.ndarray, limit: int) -> MicroSteps:
    """An assignment that loses a sample or breaks a limit has no figures."""
    assert sorted(i for bins in micro_steps for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert tokens_of(micro_steps, lengths).max() <= limit
    return micro_steps


def report(**figures: object) -> None:
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def measure_rows(documents: int) -> dict[str, bool]:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(6.0, 1.0, documents)), 1, 2048).astype(np.int64)
    start, start_cpu = time.perf_counter(), time.process_time()
    order, offsets = best_fit_rows(lengths, 2048)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    assert np.array_equal(np.sort(order), np.arange(documents))
    assert np.add.reduceat(lengths[order], offsets[:-1]).max() <= 2048
    fill = float(lengths.sum() / ((offsets.size - 1) * 2048))
    report(measurement="rows of 2048", documents=documents, rows=offsets.size - 1, fill=fill, s=seconds, cpu_s=cpu)
    return {"rows: fill >= 0.995": fill >= 0.995, "rows: under 2 s on one core": max(seconds, cpu) < 2}


def compare_with_longest_first(batches: int) -> dict[str, bool]:
    rng = np.random.default_rng(1)
    micro_steps: dict[str, list[int]] = {name: [] for name in ALGORITHMS}
    busy: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    fair: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    names = list(DISTRIBUTIONS)
    for number in range(batches):
        limit = int(rng.choice([512, 2048, 4096, 8192, 16384, 32768, 65536]))
        num_ranks, size = int(rng.integers(1, 17)), int(np.exp(rng.uniform(0, np.log(1024))))
        top = limit if number % 2 else max(1, limit // int(rng.integers(1, 17)))
        lengths = draw(names[number % len(names)], rng, size, top)
        for name, algorithm in ALGORITHMS.items():
            cost = costs_of(checked(algorithm(lengths, limit, num_ranks), lengths, limit), lengths)
            micro_steps[name].append(len(cost))
            busy[name].append(cost.max(axis=1).sum())
            fair[name].append(cost.mean(axis=1).sum())
    for name in ALGORITHMS:
        report(
            measurement="random batches", algorithm=name, batches=batches,
            mean_micro_steps=float(np.mean(micro_steps[name])), waiting=sum(busy[name]) / sum(fair[name]),
            waiting_median=float(np.median(np.array(busy[name]) / np.array(fair[name]))),
        )  # fmt: skip
    ours, theirs = np.array(micro_steps["assign"]), np.array(micro_steps["longest-first"])
    slower = np.array(busy["assign"]) / np.array(busy["longest-first"])
    report(
        measurement="assign against longest-first", batches=batches, fewer_micro_steps=int((ours < theirs).sum()),
        more_micro_steps=int((ours > theirs).sum()), slower=int((slower > 1 + 1e-9).sum()), slowest=float(slower.max()),
    )  # fmt: skip
    return {"micro-steps: never more than longest-first": bool((ours <= theirs).all())}


def measure_balance(seeds: int) -> dict[str, bool]:
    """Samples have at most a quarter of the limit: the attention of one that fills a bin alone cannot be balanced."""
    worst = 0.0
    for name in REAL_LIKE:
        for limit, top in ((32768, 8192), (65536, 8192), (16384, 4096)):
            figures = {algorithm: balance(algorithm, name, limit, top, seeds) for algorithm in ALGORITHMS}
            worst = max(worst, figures["assign"]["longest_rank_max"])
            for algorithm, values in figures.items():
                report(measurement="512 samples on 8 ranks", lengths=name, longest_sample=top, limit=limit,
                       algorithm=algorithm, **values)  # fmt: skip
    for algorithm in ALGORITHMS:
        report(measurement="512 samples on 8 ranks, samples as long as the limit (no verdict)", lengths="heavy tail",
               limit=32768, algorithm=algorithm, **balance(algorithm, "heavy tail", 32768, 32768, seeds))  # fmt: skip
    return {"512 on 8: longest rank <= 1.02 of the mean": worst <= 1.02}


def balance(algorithm: str, distribution: str, limit: int, top: int, seeds: int) -> dict[str, float]:
    longest, waiting, micro_steps, seconds, least = [], [], [], [], []
    for seed in range(seeds):
        lengths = draw(distribution, np.random.default_rng(seed), 512, top)
        start = time.perf_counter()
        assignment = ALGORITHMS[algorithm](lengths, limit, 8)
        seconds.append(time.perf_counter() - start)
        cost = costs_of(checked(assignment, lengths, limit), lengths)
        longest.append(cost.sum(axis=0).max() / cost.sum(axis=0).mean())
        waiting.append(cost.max(axis=1).sum() / cost.mean(axis=1).sum())
        micro_steps.append(len(cost))
        least.append(max(1.0, sample_costs(lengths).max() / cost.sum(axis=0).mean()))
    return {
        "mean_micro_steps": float(np.mean(micro_steps)), "longest_rank_mean": float(np.mean(longest)),
        "longest_rank_max": float(max(longest)), "longest_rank_least_possible": float(np.mean(least)),
        "waiting_mean": float(np.mean(waiting)), "waiting_max": float(max(waiting)),
        "ms_median": float(np.median(seconds) * 1e3),
    }  # fmt: skip


def measure_time() -> dict[str, bool]:
    verdicts = {}
    for samples, num_ranks, limit, allowed_s in ((512, 8, 32768, 0.05), (6144, 8, 32768, 2.0), (4096, 64, 8192, 1.0)):
        lengths = draw("log-normal", np.random.default_rng(2), samples, 8192)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assignment = assign_micro_batches(lengths, limit, num_ranks)
            seconds.append(time.perf_counter() - start)
        median = float(np.median(seconds))
        report(measurement="time of assign", samples=samples, ranks=num_ranks, limit=limit,
               micro_steps=len(assignment), ms_median=median * 1e3, ms_max=max(seconds) * 1e3)  # fmt: skip
        verdicts[f"time: {samples} on {num_ranks} under {allowed_s} s"] = median < allowed_s
    return verdicts


def measure_multipack(multipack_lengths: list[int], shuffles: int) -> dict[str, bool]:
    """Multipack's own measure on its own data: 8 ranks of 16 x 2048 tokens, the whole list as one batch.

    L2 lag is the root of the mean over micro-steps of (largest minus smallest sum of squared lengths of a rank). The
    list holds the tokens of 36.3 micro-steps, so the fill to look at is that of all micro-steps but the last.
    """
    fills, lags = [], []
    for shuffle in range(shuffles):
        order = np.random.default_rng(shuffle).permutation(len(multipack_lengths)) if shuffle else slice(None)
        lengths = np.array(multipack_lengths, dtype=np.int64)[order]
        start = time.perf_counter()
        assignment = assign_micro_batches(lengths, 32768, 8)
        seconds = time.perf_counter() - start
        tokens = tokens_of(checked(assignment, lengths, 32768), lengths)
        squares = tokens_of(assignment, lengths**2)
        lag = squares.max(axis=1) - squares.min(axis=1)
        fills.append(float(tokens[:-1].mean() / 32768))
        lags.append(float(max(np.sqrt(lag[:-1].mean()), np.sqrt(lag.mean()))))
        report(
            measurement="multipack's lengths", shuffle=shuffle, micro_steps=len(assignment),
            fill_but_last=fills[-1], fill_of_all=float(tokens.mean() / 32768),
            l2_lag_but_last=float(np.sqrt(lag[:-1].mean())), l2_lag_of_all=float(np.sqrt(lag.mean())), ms=seconds * 1e3,
        )  # fmt: skip
    return {"multipack: fill >= 0.996": min(fills) >= 0.996, "multipack: lag <= 438": max(lags) <= 438}


if __name__ == "__main__":
    sys.exit(main())
