"""One global order of samples, without end; its whole state is how many have been drawn.

Every epoch is a permutation that depends on the seed and the epoch alone, so the order after any number of samples is
known without drawing them, and the same on every rank. Beyond 65 536 samples the permutation is computed place by
place (a Feistel network): drawing from a billion samples takes no memory and no time to start. Several sources with
weights are interleaved evenly, by counting: which source a draw comes from, and how many it gave before, is a formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

# Up to here a permutation is made as a whole: it takes a millisecond, and the network needs room to mix.
SMALL = 1 << 16
ROUNDS = 6
# Weights are kept to so many parts; with 63 bits, enough for nine million million draws.
WEIGHT_PARTS = 1_000_000


class Sampler(Protocol):
    """`drawn` is the whole state. An epoch is `size` draws."""

    size: int
    drawn: int

    def at(self, positions: np.ndarray) -> np.ndarray: ...

    def take(self, count: int) -> np.ndarray: ...


class InfiniteSampler:
    """The samples 0 to size - 1, every one once an epoch. Iterating over it never ends."""

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True, drawn: int = 0) -> None:
        if size < 1 or drawn < 0:
            raise ValueError(f"a sampler needs at least one sample, and cannot go on before the first: {size}, {drawn}")
        self.size, self.seed, self.shuffle, self.drawn = size, seed, shuffle, drawn
        self._epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        while True:
            for sample in self.at(np.arange(self.drawn, self.drawn + 1024)).tolist():
                self.drawn += 1
                yield sample

    def take(self, count: int) -> np.ndarray:
        """The next `count` samples; a draw may run across the end of an epoch."""
        positions = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        return self.at(positions)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The samples at these places of the endless order."""
        epochs, indices = np.divmod(positions, self.size)
        if not self.shuffle or self.size == 1:
            return indices
        found = np.empty_like(indices)
        by_epoch = np.argsort(epochs, kind="stable")
        for here in np.split(by_epoch, np.flatnonzero(np.diff(epochs[by_epoch])) + 1):
            if len(here):
                found[here] = self._shuffled(indices[here], int(epochs[here[0]]))
        return found

    def _shuffled(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        if self.size > SMALL:
            return _permuted(indices, self.size, np.random.SeedSequence([self.seed, epoch]))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            self._epoch = epoch
        return self._order[indices]


class MixedSampler:
    """Several sources by weight: in any run of draws each has its share, to within a sample for each source.

    Samples are numbered through: those of the second source follow those of the first. A source that is drawn more
    often than it has samples begins its next epoch, in another order.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int = 0, shuffle: bool = True, drawn: int = 0
    ) -> None:
        total = sum(Fraction(str(weight)) for weight in weights)
        self.weights = [max(1, round(Fraction(str(weight)) / total * WEIGHT_PARTS)) for weight in weights]
        self.size, self.drawn = sum(sizes), drawn
        # Source n has a seed of its own; the first has that of an unmixed run.
        self.sources = [InfiniteSampler(size, seed + (n << 40), shuffle) for n, size in enumerate(sizes)]
        self.starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)

    def take(self, count: int) -> np.ndarray:
        positions = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        return self.at(positions)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Source by source: its share of what the earlier ones left, spread evenly over it."""
        found = np.empty_like(positions)
        waiting, counts = np.arange(len(positions)), positions.astype(np.int64)
        for number, (source, weight) in enumerate(zip(self.sources, self.weights, strict=True)):
            rest = sum(self.weights[number:])
            given, after = (counts * weight + rest // 2) // rest, ((counts + 1) * weight + rest // 2) // rest
            chosen = after > given
            found[waiting[chosen]] = source.at(given[chosen]) + self.starts[number]
            waiting, counts = waiting[~chosen], (counts - given)[~chosen]
        return found

    def drawn_from(self, draws: int) -> list[int]:
        """How many of the first `draws` samples come from each source."""
        given = []
        for number, weight in enumerate(self.weights):
            rest = sum(self.weights[number:])
            given.append((draws * weight + rest // 2) // rest)
            draws -= given[-1]
        return given


def _permuted(indices: np.ndarray, size: int, seeds: np.random.SeedSequence) -> np.ndarray:
    """Where a fixed random permutation of `size` things puts these.

    The network permutes the next power of four; what falls outside is sent through again until it falls inside.
    """
    keys = seeds.generate_state(ROUNDS, np.uint64)
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    values = indices.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half, values[outside] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit given (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
