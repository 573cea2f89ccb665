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
    lengths: np.ndarray

    def __len__(self) -> int: ...

    def get(self, index: int) -> list[Encoded]: ...


class WholeSequences:
    """One sequence of the cache per sample."""

    def __init__(self, cache: TokenCache, members: np.ndarray) -> None:
        self.cache, self.members = cache, members
        self.lengths = cache.lengths[members]

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
        self.lengths: np.ndarray = np.diff(np.append(np.arange(0, total, row_length), total))

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> list[Encoded]:
        start = index * self.row_length
        stop = start + int(self.lengths[index])
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop - 1, side="right"))
        pieces = []
        for document in range(first, last + 1):
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
