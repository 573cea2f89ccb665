"""The samples that a sampler draws: conversations as they are, or text laid out in rows of one length.

A sample is a list of sequences that share a row. Text is packed in one of two ways:

- stream: documents one after another, cut every `context_length` tokens. Nothing is dropped or padded, except in the
  last row; but most rows start in the middle of a document;
- best-fit: every row starts with a document, and documents go where they leave the least space. A document that fits in
  a row is never cut; the cost is a little padding, well under one percent if there are many documents.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchstone.atomic import file_lock
from torchstone.data.assignment import best_fit_rows
from torchstone.data.cache import TokenCache
from torchstone.data.encode import TokenSequence
from torchstone.errors import DataError


class Samples(ABC):
    """`lengths` and `loss_tokens` of all samples are known without reading them: steps are planned from them."""

    lengths: np.ndarray
    loss_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def get(self, index: int) -> list[TokenSequence]: ...

    def origin(self, index: int) -> str:
        """Where a sample comes from: `file:line` of its row. Errors never name a sample of packed text."""
        return f"sample {index}"

    def origins(self, index: int) -> list[str]:
        """Where the sequences of `get(index)` come from: `file:line` of each."""
        return [self.origin(index)]


class SequenceSamples(Samples):
    """One sequence of the cache per sample. `indices` selects the sequences."""

    def __init__(self, cache: TokenCache, indices: np.ndarray) -> None:
        self.cache, self.indices = cache, indices
        self.lengths = cache.lengths[indices].astype(np.int64)
        self.loss_tokens = cache.loss_tokens[indices].astype(np.int64)

    def get(self, index: int) -> list[TokenSequence]:
        return [self.cache.sequence(int(self.indices[index]))]

    def origin(self, index: int) -> str:
        return self.cache.origin(int(self.indices[index]))


class StreamSamples(Samples):
    """Rows of `row_length` tokens cut from the concatenated documents `indices`."""

    def __init__(self, cache: TokenCache, indices: np.ndarray, row_length: int) -> None:
        self.cache, self.indices, self.row_length = cache, indices, row_length
        self.ends = np.cumsum(cache.lengths[indices], dtype=np.int64)
        total = int(self.ends[-1]) if len(self.ends) else 0
        starts = np.arange(0, total, row_length)
        self.lengths = np.diff(np.append(starts, total))
        # Every piece of a document in a row starts with a token that nothing predicts.
        self._first = np.searchsorted(self.ends, starts, side="right")
        self._last = np.searchsorted(self.ends, starts + self.lengths - 1, side="right")
        self.loss_tokens = self.lengths - (self._last - self._first + 1)

    def get(self, index: int) -> list[TokenSequence]:
        start = index * self.row_length
        stop = start + int(self.lengths[index])
        sequences = []
        for document in range(self._first[index], self._last[index] + 1):
            end = int(self.ends[document])
            begin = end - int(self.cache.lengths[self.indices[document]])
            low, high = max(start, begin) - begin, min(stop, end) - begin
            sequences.append(self.cache.sequence(int(self.indices[document]), low, high))
        return sequences

    def origins(self, index: int) -> list[str]:
        documents = self.indices[self._first[index] : self._last[index] + 1]
        return [self.cache.origin(int(document)) for document in documents]


class BestFitSamples(Samples):
    """Rows of at most `row_length` tokens of complete documents. Packing takes seconds and is cached on disk."""

    def __init__(self, cache: TokenCache, indices: np.ndarray, row_length: int) -> None:
        self.cache = cache
        order, self.offsets = _best_fit_packing(cache, indices, row_length)
        self.documents = indices[order]
        self.lengths = _segment_sums(cache.lengths[self.documents], self.offsets)
        self.loss_tokens = _segment_sums(cache.loss_tokens[self.documents], self.offsets)

    def get(self, index: int) -> list[TokenSequence]:
        return [self.cache.sequence(int(document)) for document in self._documents(index)]

    def origins(self, index: int) -> list[str]:
        return [self.cache.origin(int(document)) for document in self._documents(index)]

    def _documents(self, index: int) -> np.ndarray:
        return self.documents[self.offsets[index] : self.offsets[index + 1]]


class ConcatSamples(Samples):
    """The samples of several sources, numbered consecutively."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.loss_tokens = np.concatenate([part.loss_tokens for part in parts])

    def get(self, index: int) -> list[TokenSequence]:
        part, index = self._locate(index)
        return part.get(index)

    def origin(self, index: int) -> str:
        part, index = self._locate(index)
        return part.origin(index)

    def origins(self, index: int) -> list[str]:
        part, index = self._locate(index)
        return part.origins(index)

    def _locate(self, index: int) -> tuple[Samples, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        part = self.parts[number]
        return part, index - int(self.ends[number]) + len(part)


def concat_samples(parts: Sequence[Samples]) -> Samples:
    return parts[0] if len(parts) == 1 else ConcatSamples(parts)


def split_validation(
    origins: np.ndarray, share: float, seed: int, num_texts: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and validation sequences: a random split that depends only on the seed.

    Rows are split, not sequences: all pieces of a long row are on one side. If the rows are pieces of `num_texts` large
    text files, there may be too few of them for the share.
    """
    indices = np.arange(len(origins))
    if share <= 0:
        return indices, indices[:0]
    row_of = np.cumsum(np.concatenate(([0], np.diff(origins) != 0)))
    num_rows = int(row_of[-1]) + 1
    num_validation = max(1, round(num_rows * share))
    is_too_large = num_texts is not None and num_rows > num_texts and num_validation > 2 * share * num_rows
    if is_too_large or num_validation >= num_rows:
        effect = f"holds out {num_validation}" if is_too_large else "leaves none for training"
        hint = "use a smaller --data.validation_split"
        if is_too_large or num_rows == 1:
            lines = "" if num_texts is None else ", or --data.format lines, which makes every line a row"
            hint = f"use --data.validation_path{lines}"
        raise DataError(f"data.validation_split {share:g} of {num_rows} rows {effect}", hint)
    is_validation: np.ndarray = np.zeros(num_rows, dtype=bool)
    is_validation[np.random.default_rng([seed, 0x5EED]).permutation(num_rows)[:num_validation]] = True
    return indices[~is_validation[row_of]], indices[is_validation[row_of]]


def _best_fit_packing(cache: TokenCache, indices: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    name = hashlib.sha256(indices.tobytes()).hexdigest()[:16]
    path = cache.folder / f"rows-{row_length}-{name}.npy"
    packing = _load_packing(path)
    if packing is None and os.access(cache.folder, os.W_OK):
        with file_lock(cache.folder / f"{path.stem}.lock"):
            packing = _load_packing(path)
            if packing is None:
                _save_packing(path, *_sort_rows(*best_fit_rows(cache.lengths[indices].astype(np.int64), row_length)))
                packing = _load_packing(path)
    return packing or _sort_rows(*best_fit_rows(cache.lengths[indices].astype(np.int64), row_length))


def _sort_rows(order: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the rows by their first document, so that they roughly follow the order of the files."""
    by_first = np.argsort(np.minimum.reduceat(order, offsets[:-1]), kind="stable")
    sizes = np.diff(offsets)[by_first]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    return order[np.repeat(offsets[by_first] - ends[:-1], sizes) + np.arange(len(order))], ends


def _load_packing(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Order and offsets from [number of documents, checksum, order, offsets]; None if missing or damaged."""
    if not path.is_file():
        return None
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        return None
    is_intact = len(array) > 2 and array[1] == zlib.crc32(array[2:].tobytes())
    return (array[2 : 2 + array[0]], array[2 + array[0] :]) if is_intact else None


def _save_packing(path: Path, order: np.ndarray, offsets: np.ndarray) -> None:
    both = np.concatenate([order, offsets]).astype(np.int64)
    temporary = path.with_suffix(f".{os.getpid()}.partial")
    with temporary.open("wb") as file:
        np.save(file, np.concatenate([[len(order), zlib.crc32(both.tobytes())], both]))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _segment_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return np.diff(np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[offsets])
