"""Collates sequences into the four tensors of a micro-batch, all of shape [B, T].

Labels are shifted here, once: `labels[b, t]` is the token that position t must predict, or -100. So the first token of
a sequence is never a target and the last one predicts nothing, packed or not. Padding is a document of its own, -1.

On a GPU every new shape costs: attention kernels and the allocator plan for it, and compiled code may be compiled
again. So `BatchShapes` pads to few of them there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstone.data.encode import TokenSequence
from torchstone.data.formats import IGNORE_INDEX

PADDING_DOC_ID = -1
# Row lengths are a multiple of this, so that kernels and compilers see few shapes.
LENGTH_MULTIPLE = 8
# The minimum on a GPU: FP8 matmuls need multiples of it.
GPU_LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class BatchShapes:
    """The shapes that micro-batches are padded to. By default only the length is rounded up, to a `multiple`."""

    multiple: int = LENGTH_MULTIPLE
    # With a limit there are few lengths: at most 64 between a number and its double. From 1024 tokens on that adds at
    # most 1.6 %, and 0.5 % on average, but never goes beyond the limit, rounded up to the multiple.
    max_length: int | None = None
    # All rows have the length of the limit.
    has_fixed_length: bool = False
    # The numbers of rows that there are, ascending; without them, any.
    row_counts: tuple[int, ...] = ()

    def pad_length(self, longest: int) -> int:
        longest = max(1, longest)
        length = _round_up(longest, self.multiple)
        if self.max_length is None:
            return length
        limit = _round_up(self.max_length, self.multiple)
        bucket = limit if self.has_fixed_length else self._bucket(longest)
        return max(length, min(limit, _round_up(longest, bucket)))

    def pad_rows(self, rows: int) -> int:
        return next((count for count in self.row_counts if count >= rows), rows)

    def longest_document(self, context_length: int) -> int:
        """The length that no document exceeds, if no sequence exceeds `context_length`. Padding is a document."""
        padding = 0 if self.max_length is None else self._bucket(self.max_length)
        return max(_round_up(context_length, self.multiple), padding)

    def _bucket(self, length: int) -> int:
        return math.lcm(self.multiple, max(GPU_LENGTH_MULTIPLE, 1 << max(0, length.bit_length() - 7)))


DEFAULT_SHAPES = BatchShapes()


class BatchCounts(NamedTuple):
    """What is counted in a micro-batch before it is on a GPU, where counting would wait. Padding is a document."""

    loss_tokens: int
    documents: int
    longest_document: int


class MicroBatch(NamedTuple):
    ids: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor
    # Set by `collate`.
    counts: BatchCounts | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[:4]

    def to(self, device: torch.device) -> MicroBatch:
        # A non-blocking copy to the CPU could be read before it is complete.
        return self._map(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pin_memory(self) -> MicroBatch:
        """A copy in memory that a GPU can read while the host goes on."""
        return self._map(lambda tensor: tensor.pin_memory())

    def get_counts(self) -> BatchCounts:
        """`counts`, or the same counted now, on the CPU."""
        return self.counts or count_documents(self.labels.numpy(), self.doc_ids.numpy())

    def _map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        ids, labels, positions, doc_ids = map(function, self.tensors)
        return MicroBatch(ids, labels, positions, doc_ids, self.counts)


def collate(rows: list[list[TokenSequence]], pad_id: int, shapes: BatchShapes = DEFAULT_SHAPES) -> MicroBatch:
    """Rows of concatenated sequences, with padding on the right and, if `shapes` says so, further rows of padding.

    Without rows it is one row of padding, for a rank that has no samples left in a micro-step.
    """
    rows = rows or [[]]
    longest = max(sum(len(sequence.ids) for sequence in row) for row in rows)
    shape = shapes.pad_rows(len(rows)), shapes.pad_length(longest)
    ids: np.ndarray = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORE_INDEX)
    positions = np.zeros_like(ids)
    doc_ids = np.full_like(ids, PADDING_DOC_ID)
    for b, row in enumerate(rows):
        start = 0
        for document, sequence in enumerate(row):
            size = len(sequence.ids)
            columns = slice(start, start + size)
            ids[b, columns] = sequence.ids
            labels[b, start : start + size - 1] = sequence.labels[1:]
            positions[b, columns] = np.arange(size)
            doc_ids[b, columns] = document
            start += size
    tensors = (torch.from_numpy(array) for array in (ids, labels, positions, doc_ids))
    return MicroBatch(*tensors)._replace(counts=count_documents(labels, doc_ids))


def count_documents(labels: np.ndarray, doc_ids: np.ndarray) -> BatchCounts:
    is_start: np.ndarray = np.ones(doc_ids.shape, dtype=bool)
    is_start[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    starts = np.append(is_start.ravel().nonzero()[0], doc_ids.size)
    return BatchCounts(int((labels != IGNORE_INDEX).sum()), len(starts) - 1, int(np.diff(starts).max()))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
