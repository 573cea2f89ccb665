"""What a sampler draws from: conversations as they are, or text cut into rows of one length.

A sample is a list of sequences that share a row. Text with packing is one long stream of documents, cut every
`context_length` tokens: nothing is dropped and no token is padding (but in the very last row); the price is that a
document may be split, and that the first token of each piece has nothing to be predicted from (at most one token in
`context_length`, and one a document).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from torchstone.data.cache import TokenCache
from torchstone.data.tokenize import Encoded
from torchstone.errors import DataError


class Samples(Protocol):
    """`lengths` and `loss_tokens` of every sample are known without reading it: a step is planned from them alone."""

    lengths: np.ndarray
    loss_tokens: np.ndarray

    def __len__(self) -> int: ...

    def get(self, index: int) -> list[Encoded]: ...


class WholeSequences:
    """One sequence of the cache per sample."""

    def __init__(self, cache: TokenCache, members: np.ndarray) -> None:
        self.cache, self.members = cache, members
        self.lengths = cache.lengths[members]
        self.loss_tokens = cache.loss_tokens[members]

    def __len__(self) -> int:
        return len(self.members)

    def get(self, index: int) -> list[Encoded]:
        return [self.cache.sequence(int(self.members[index]))]


class StreamRows:
    """Rows of `row_length` tokens cut from the documents `members`, one after another."""

    def __init__(self, cache: TokenCache, members: np.ndarray, row_length: int) -> None:
        self.cache, self.members, self.row_length = cache, members, row_length
        self.ends = np.cumsum(cache.lengths[members])
        total = int(self.ends[-1]) if len(self.ends) else 0
        starts = np.arange(0, total, row_length)
        self.lengths: np.ndarray = np.diff(np.append(starts, total))
        # Every piece of a document in a row begins with a token that nothing predicts.
        self._first = np.searchsorted(self.ends, starts, side="right")
        self._last = np.searchsorted(self.ends, starts + self.lengths - 1, side="right")
        self.loss_tokens: np.ndarray = self.lengths - (self._last - self._first + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> list[Encoded]:
        start = index * self.row_length
        stop = start + int(self.lengths[index])
        pieces = []
        for document in range(self._first[index], self._last[index] + 1):
            end = int(self.ends[document])
            begin = end - int(self.cache.lengths[self.members[document]])
            low, high = max(start, begin) - begin, min(stop, end) - begin
            pieces.append(self.cache.sequence(int(self.members[document]), low, high))
        return pieces


def split(size: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which sequences are trained on and which are held out: a random choice that depends on the seed alone."""
    held_out = max(1, round(size * share)) if share > 0 else 0
    if held_out >= size:
        raise DataError(f"data.validation_split {share:g} of {size} rows leaves none to train on")
    order = np.random.default_rng([seed, 0x5EED]).permutation(size)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
