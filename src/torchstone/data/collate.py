"""Sequences to the four tensors of a micro-batch, all of shape [B, T].

Labels are shifted here, once, for good: `labels[b, t]` is the token that position t must predict, or -100. So the first
token of a sequence is nobody's target and the last one predicts nothing, packed or not. Padding is a document of its
own, -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstone.data.encode import Encoded
from torchstone.data.formats import IGNORED

PADDING = -1
# Rows end at a multiple of this, so that kernels and compilers meet few shapes.
BUCKET = 8


class MicroBatch(NamedTuple):
    ids: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in self))


def collate(rows: list[list[Encoded]], pad_id: int, multiple: int = BUCKET) -> MicroBatch:
    """`rows` of sequences side by side, padded on the right to a `multiple` of tokens.

    No rows at all are one row of padding: the part of a rank that has nothing left to do but must keep step.
    """
    rows = rows or [[]]
    longest = max(sum(len(sequence.ids) for sequence in row) for row in rows)
    width = max(1, -(-longest // multiple)) * multiple
    ids: np.ndarray = np.full((len(rows), width), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    positions = np.zeros_like(ids)
    doc_ids = np.full_like(ids, PADDING)
    for b, row in enumerate(rows):
        start = 0
        for document, sequence in enumerate(row):
            size = len(sequence.ids)
            here = slice(start, start + size)
            ids[b, here] = sequence.ids
            labels[b, start : start + size - 1] = sequence.labels[1:]
            positions[b, here] = np.arange(size)
            doc_ids[b, here] = document
            start += size
    return MicroBatch(*(torch.from_numpy(array) for array in (ids, labels, positions, doc_ids)))
