"""One global order of samples, without end; its whole state is how many have been drawn.

Every epoch is a permutation that depends on the seed and the epoch alone, so the order after any number of samples is
known without drawing them, and the same on every rank.
"""

from __future__ import annotations

import numpy as np


class InfiniteSampler:
    def __init__(self, size: int, seed: int, shuffle: bool = True, drawn: int = 0) -> None:
        if size < 1:
            raise ValueError("a sampler needs at least one sample")
        self.size, self.seed, self.shuffle, self.drawn = size, seed, shuffle, drawn
        self._epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        """The next `count` samples; a draw may run across the end of an epoch."""
        parts = []
        while count > 0:
            epoch, position = divmod(self.drawn, self.size)
            part = self.order(epoch)[position : position + count]
            parts.append(part)
            self.drawn += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = generator.permutation(self.size) if self.shuffle else np.arange(self.size)
            self._epoch = epoch
        return self._order
