"""Splits a micro-batch into smaller ones that have the same rows and documents, in the same order.

A step that runs out of memory is computed again in smaller micro-batches. The loss is divided by the loss tokens of the
whole global batch, so the result is the same within rounding. A document is never cut: attention would change.

Rows are halved, again and again, so there are few numbers of rows; a single row is cut between two of its documents.
A part is padded as `collate` would pad it. A split copies the four tensors once: 0.3 ms for 8 x 4096 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from torchstone.data.collate import DEFAULT_SHAPES, PADDING_DOC_ID, BatchShapes, MicroBatch, count_documents
from torchstone.data.formats import IGNORE_INDEX
from torchstone.data.loader import StepBatch, count_padding


def split_step_batch(batch: StepBatch, max_tokens: int, pad_id: int, shapes: BatchShapes = DEFAULT_SHAPES) -> StepBatch:
    """The step in micro-batches of at most `max_tokens` tokens, padding included, as far as they can be split."""
    if all(micro_batch.ids.numel() <= max_tokens for micro_batch in batch.micro_batches):
        return batch
    parts = [part for each in batch.micro_batches for part in split_to_limit(each, max_tokens, pad_id, shapes)]
    return replace(batch, micro_batches=parts, padding=count_padding(parts))


def split_to_limit(
    batch: MicroBatch, max_tokens: int, pad_id: int, shapes: BatchShapes = DEFAULT_SHAPES
) -> list[MicroBatch]:
    parts = [batch] if batch.ids.numel() <= max_tokens else split_micro_batch(batch, pad_id, shapes)
    if len(parts) == 1:
        return parts
    if max(part.ids.numel() for part in parts) == batch.ids.numel():
        # Short documents beside a long one, or in a row of the shortest length that there is.
        return [batch]
    return [part for each in parts for part in split_to_limit(each, max_tokens, pad_id, shapes)]


def split_micro_batch(batch: MicroBatch, pad_id: int, shapes: BatchShapes = DEFAULT_SHAPES) -> list[MicroBatch]:
    """Two micro-batches: half of the rows each or, of a single row, documents with about half of the tokens each. A
    single document stays one micro-batch. Rows of padding are left out."""
    lengths = (batch.doc_ids.numpy() != PADDING_DOC_ID).sum(axis=1)
    rows = int((lengths > 0).sum())
    if rows > 1:
        middle = -(-rows // 2)
        return [
            _take(batch, slice(start, stop), slice(0, length), shapes.pad_length(length), pad_id)
            for start, stop in ((0, middle), (middle, rows))
            for length in [int(lengths[start:stop].max())]
        ]
    row = batch.doc_ids[0, : lengths[0]].numpy()
    starts = np.flatnonzero(row[1:] != row[:-1]) + 1
    if not len(starts) and len(batch.ids) == 1:
        return [batch]
    ends = [int(starts[np.abs(2 * starts - len(row)).argmin()])] if len(starts) else []
    # Not the one length that complete rows may have: a part would need as much memory as the row.
    shapes = replace(shapes, has_fixed_length=False)
    return [
        _take(batch, slice(0, 1), slice(start, stop), shapes.pad_length(stop - start), pad_id)
        for start, stop in pairwise([0, *ends, len(row)])
    ]


def num_documents(batch: MicroBatch) -> int:
    """The documents of a micro-batch, without padding, which `get_counts` counts as one at the end of a row."""
    return batch.get_counts().documents - int((batch.doc_ids[:, -1] == PADDING_DOC_ID).sum())


def _take(batch: MicroBatch, rows: slice, columns: slice, length: int, pad_id: int) -> MicroBatch:
    """Some of the rows and columns, padded to `length`."""
    fills = (pad_id, IGNORE_INDEX, 0, PADDING_DOC_ID)
    size = (rows.stop - rows.start, columns.stop - columns.start)
    arrays = []
    for tensor, fill in zip(batch.tensors, fills, strict=True):
        array: np.ndarray = np.full((size[0], length), fill, dtype=np.int64)
        array[:, : size[1]] = tensor[rows, columns].numpy()
        arrays.append(array)
    ids, labels, positions, doc_ids = map(torch.from_numpy, arrays)
    part = MicroBatch(ids, labels, positions, doc_ids, count_documents(arrays[1], arrays[3]))
    return part.pin_memory() if batch.ids.is_pinned() else part
