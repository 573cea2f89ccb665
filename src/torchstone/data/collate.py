"""Collates sequences into the four tensors of a micro-batch, all of shape [B, T].

Labels are shifted here, once: `labels[b, t]` is the token that position t must predict, or -100. So the first token of
a sequence is never a target and the last one predicts nothing, packed or not. Padding is a document of its own, -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstone.data.encode import TokenSequence
from torchstone.data.formats import IGNORE_INDEX

PADDING_DOC_ID = -1
# Row lengths are a multiple of this, so that kernels and compilers see few shapes.
LENGTH_MULTIPLE = 8


class MicroBatch(NamedTuple):
    ids: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def pin_memory(self) -> MicroBatch:
        """A copy in memory that a GPU can read while the host goes on."""
        return MicroBatch(*(tensor.pin_memory() for tensor in self))

    def document_sizes(self) -> tuple[int, int]:
        """The number of documents in all rows, and the length of the longest. Padding is a document."""
        rows, length = self.doc_ids.shape
        is_start: np.ndarray = np.ones((rows, length), dtype=bool)
        doc_ids = self.doc_ids.numpy()
        is_start[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        starts = np.append(is_start.ravel().nonzero()[0], rows * length)
        return len(starts) - 1, int(np.diff(starts).max())


def collate(rows: list[list[TokenSequence]], pad_id: int, multiple: int = LENGTH_MULTIPLE) -> MicroBatch:
    """Rows of concatenated sequences, padded on the right to a `multiple` of tokens.

    Without rows it is one row of padding, for a rank that has no samples left in a micro-step.
    """
    rows = rows or [[]]
    longest = max(sum(len(sequence.ids) for sequence in row) for row in rows)
    length = max(1, -(-longest // multiple)) * multiple
    ids: np.ndarray = np.full((len(rows), length), pad_id, dtype=np.int64)
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
    return MicroBatch(*(torch.from_numpy(array) for array in (ids, labels, positions, doc_ids)))
