"""What a sampler draws from: conversations as they are, or text laid out in rows of one length.

A sample is a list of sequences that share a row. Packed text comes in two layouts:

- a stream, cut every `context_length` tokens: nothing is dropped and nothing is padding (but in the very last row); the
  price is that most rows begin in the middle of a document;
- best fit: every row begins with a document, and documents are put where they leave the least room. No document is cut
  that fits in a row; the price is a little padding, well under one per cent where there are many documents.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from torchstone.atomic import locked
from torchstone.data.assignment import best_fit_rows
from torchstone.data.cache import TokenCache
from torchstone.data.encode import Encoded
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
        self.lengths = cache.lengths[members].astype(np.int64)
        self.loss_tokens = cache.loss_tokens[members].astype(np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def get(self, index: int) -> list[Encoded]:
        return [self.cache.sequence(int(self.members[index]))]


class StreamRows:
    """Rows of `row_length` tokens cut from the documents `members`, one after another."""

    def __init__(self, cache: TokenCache, members: np.ndarray, row_length: int) -> None:
        self.cache, self.members, self.row_length = cache, members, row_length
        self.ends = np.cumsum(cache.lengths[members], dtype=np.int64)
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


class BestFitRows:
    """Rows of at most `row_length` tokens of whole documents. The layout is kept beside the cache: it takes seconds."""

    def __init__(self, cache: TokenCache, members: np.ndarray, row_length: int) -> None:
        self.cache = cache
        order, self.offsets = _layout(cache, members, row_length)
        self.documents = members[order]
        self.lengths: np.ndarray = _sums(cache.lengths[self.documents], self.offsets)
        self.loss_tokens: np.ndarray = _sums(cache.loss_tokens[self.documents], self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def get(self, index: int) -> list[Encoded]:
        row = self.documents[self.offsets[index] : self.offsets[index + 1]]
        return [self.cache.sequence(int(document)) for document in row]


class Together:
    """The samples of several sources, numbered through."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.lengths: np.ndarray = np.concatenate([part.lengths for part in parts])
        self.loss_tokens: np.ndarray = np.concatenate([part.loss_tokens for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def get(self, index: int) -> list[Encoded]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        part = self.parts[number]
        return part.get(index - int(self.ends[number]) + len(part))


def together(parts: Sequence[Samples]) -> Samples:
    return parts[0] if len(parts) == 1 else Together(parts)


def split(origins: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which sequences are trained on and which are held out: a random choice that depends on the seed alone.

    Rows are chosen, not sequences: the pieces of one long row are all on one side.
    """
    everything = np.arange(len(origins))
    if share <= 0:
        return everything, everything[:0]
    row_of = np.cumsum(np.concatenate(([0], np.diff(origins) != 0)))
    count = int(row_of[-1]) + 1
    held_out = max(1, round(count * share))
    if held_out >= count:
        raise DataError(f"data.validation_split {share:g} of {count} rows leaves none to train on")
    chosen: np.ndarray = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng([seed, 0x5EED]).permutation(count)[:held_out]] = True
    return everything[~chosen[row_of]], everything[chosen[row_of]]


def _layout(cache: TokenCache, members: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    name = hashlib.sha256(members.tobytes()).hexdigest()[:16]
    path = cache.folder / f"rows-{row_length}-{name}.npy"
    found = _load(path)
    if found is None and os.access(cache.folder, os.W_OK):
        with locked(cache.folder / f"{path.stem}.lock"):
            found = _load(path)
            if found is None:
                _save(path, *_in_order(*best_fit_rows(cache.lengths[members].astype(np.int64), row_length)))
                found = _load(path)
    return found or _in_order(*best_fit_rows(cache.lengths[members].astype(np.int64), row_length))


def _in_order(order: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows by their earliest document, as near to the order of the files as they come; they are made by length."""
    by_first = np.argsort(np.minimum.reduceat(order, offsets[:-1]), kind="stable")
    sizes = np.diff(offsets)[by_first]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    return order[np.repeat(offsets[by_first] - ends[:-1], sizes) + np.arange(len(order))], ends


def _load(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """A layout that is there and whole: documents, where rows begin, and a checksum of both after their number."""
    if not path.is_file():
        return None
    try:
        kept: np.ndarray = np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        return None
    whole = len(kept) > 2 and kept[1] == zlib.crc32(kept[2:].tobytes())
    return (kept[2 : 2 + kept[0]], kept[2 + kept[0] :]) if whole else None


def _save(path: Path, order: np.ndarray, offsets: np.ndarray) -> None:
    both = np.concatenate([order, offsets]).astype(np.int64)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.save(file, np.concatenate([[len(order), zlib.crc32(both.tobytes())], both]))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return np.diff(np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[offsets])
