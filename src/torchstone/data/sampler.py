"""One endless global order of samples. Its complete state is the number of samples drawn.

Every epoch is a permutation that depends only on the seed and the epoch. So the order after any number of samples is
known without drawing them, and is the same on every rank. Beyond 65,536 samples the permutation is computed index by
index with a Feistel network: drawing from a billion samples takes no memory and no time to start. A formula interleaves
weighted sources evenly: it gives the source of each draw, and how many earlier draws that source had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

# Up to this size numpy permutes everything: it takes a millisecond, and a small network would not mix well.
MAX_NUMPY_SIZE = 1 << 16
FEISTEL_ROUNDS = 6
# Weights are rounded to parts per million; in 63 bits that is enough for 9e12 draws.
WEIGHT_PARTS = 1_000_000


class Sampler(ABC):
    """`consumed_samples` is the complete state; an epoch is `size` draws."""

    size: int
    consumed_samples: int

    @abstractmethod
    def at(self, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions of the endless order."""

    def take(self, count: int) -> np.ndarray:
        """The next `count` samples, which may span epochs."""
        positions = np.arange(self.consumed_samples, self.consumed_samples + count)
        self.consumed_samples += count
        return self.at(positions)


class InfiniteSampler(Sampler):
    """Draws 0 to size - 1, each once per epoch. Iterating over it never ends."""

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True, consumed_samples: int = 0) -> None:
        if size < 1 or consumed_samples < 0:
            raise ValueError(
                f"size must be at least 1 and consumed_samples at least 0, not {size} and {consumed_samples}"
            )
        self.size, self.seed, self.shuffle, self.consumed_samples = size, seed, shuffle, consumed_samples
        self._epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        while True:
            for sample in self.at(np.arange(self.consumed_samples, self.consumed_samples + 1024)).tolist():
                self.consumed_samples += 1
                yield sample

    def at(self, positions: np.ndarray) -> np.ndarray:
        epochs, indices = np.divmod(positions, self.size)
        if not self.shuffle or self.size == 1:
            return indices
        samples = np.empty_like(indices)
        by_epoch = np.argsort(epochs, kind="stable")
        for group in np.split(by_epoch, np.flatnonzero(np.diff(epochs[by_epoch])) + 1):
            if len(group):
                samples[group] = self._shuffle(indices[group], int(epochs[group[0]]))
        return samples

    def _shuffle(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        if self.size > MAX_NUMPY_SIZE:
            return _permute(indices, self.size, np.random.SeedSequence([self.seed, epoch]))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            self._epoch = epoch
        return self._order[indices]


class MixedSampler(Sampler):
    """Several sources by weight: in any range of draws each has its share, within one sample per source.

    Samples are numbered consecutively over the sources. A source that runs out starts its next epoch, in a new order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        consumed_samples: int = 0,
    ) -> None:
        total = sum(Fraction(str(weight)) for weight in weights)
        self.weights = [max(1, round(Fraction(str(weight)) / total * WEIGHT_PARTS)) for weight in weights]
        self.size, self.consumed_samples = sum(sizes), consumed_samples
        # Every source has its own seed; the first source uses the seed of an unmixed run.
        self.samplers = [InfiniteSampler(size, seed + (n << 40), shuffle) for n, size in enumerate(sizes)]
        self.starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Each source takes its share of the draws that earlier sources left, evenly spread."""
        samples = np.empty_like(positions)
        remaining, counts = np.arange(len(positions)), positions.astype(np.int64)
        for number, (sampler, weight) in enumerate(zip(self.samplers, self.weights, strict=True)):
            total = sum(self.weights[number:])
            before, after = (counts * weight + total // 2) // total, ((counts + 1) * weight + total // 2) // total
            is_own = after > before
            samples[remaining[is_own]] = sampler.at(before[is_own]) + self.starts[number]
            remaining, counts = remaining[~is_own], (counts - before)[~is_own]
        return samples

    def samples_per_source(self, draws: int) -> list[int]:
        """How many of the first `draws` samples come from each source."""
        counts = []
        for number, weight in enumerate(self.weights):
            total = sum(self.weights[number:])
            counts.append((draws * weight + total // 2) // total)
            draws -= counts[-1]
        return counts


def _permute(indices: np.ndarray, size: int, seeds: np.random.SeedSequence) -> np.ndarray:
    """The images of `indices` under a fixed random permutation of `size` elements.

    The network permutes the next power of four; images outside `size` go through it again until they are inside.
    """
    keys = seeds.generate_state(FEISTEL_ROUNDS, np.uint64)
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    values = indices.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half, values[outside] & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
