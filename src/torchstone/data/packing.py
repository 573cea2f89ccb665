"""How the samples of one optimizer step become micro-batches.

A plan is a list of micro-batches, a micro-batch a list of rows, a row a list of samples. It depends on lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchstone.config.schema import TrainingConfig
from torchstone.data.formats import Shape
from torchstone.errors import UsageError

Plan = list[list[list[int]]]


@dataclass(frozen=True)
class Batching:
    """Samples per step, and what bounds a micro-batch: rows, or tokens where conversations share a row."""

    global_batch_size: int
    rows: int | None
    tokens: int | None

    def plan(self, samples: np.ndarray, lengths: np.ndarray) -> Plan:
        if self.tokens is None:
            assert self.rows is not None
            return [[[int(i)] for i in samples[at : at + self.rows]] for at in range(0, len(samples), self.rows)]
        return [[row] for row in first_fit(samples, lengths, self.tokens)]


def batching(training: TrainingConfig, shape: Shape, packing: bool, context_length: int) -> Batching:
    """The batch numbers that are given, and those that follow from them."""
    packed_rows = packing and shape != "text"
    if packed_rows:
        return _packed(training, context_length)
    rows = training.batch_size
    if training.max_tokens_per_gpu is not None:
        if rows is not None:
            raise UsageError("training.batch_size and training.max_tokens_per_gpu both bound a micro-batch", "give one")
        rows = training.max_tokens_per_gpu // context_length
        if rows == 0:
            raise UsageError(f"training.max_tokens_per_gpu {training.max_tokens_per_gpu} is less than one row of "
                             f"data.context_length {context_length}")  # fmt: skip
    total, accumulation = training.global_batch_size, training.grad_accum_steps
    if total is not None and accumulation is not None:
        if rows is not None and rows * accumulation != total:
            raise UsageError(
                f"training.global_batch_size {total} is not batch_size {rows} x grad_accum_steps {accumulation}",
                f"leave one out, or make it global_batch_size {rows * accumulation}",
            )
        rows = rows or -(-total // accumulation)
        if -(-total // rows) != accumulation:
            raise UsageError(
                f"training.global_batch_size {total} cannot be cut into {accumulation} micro-steps of equal rows",
                f"{rows} rows each make {-(-total // rows)}; leave out training.grad_accum_steps",
            )
    rows = rows or min(total or 10**9, 8 if shape == "text" else 4)
    total = total or rows * (accumulation or 1)
    return Batching(total, rows=rows, tokens=None)


def _packed(training: TrainingConfig, context_length: int) -> Batching:
    for key in ("batch_size", "grad_accum_steps"):
        if getattr(training, key) is not None:
            raise UsageError(
                f"training.{key} has no meaning where conversations are packed: training.max_tokens_per_gpu bounds a "
                "micro-batch, and the number of them follows",
                "give --training.global_batch_size N, or --data.packing false",
            )
    limit = training.max_tokens_per_gpu or context_length
    if limit < context_length:
        raise UsageError(f"training.max_tokens_per_gpu {limit} is less than data.context_length {context_length}",
                         "the longest row must fit in a micro-batch")  # fmt: skip
    return Batching(training.global_batch_size or 4, rows=None, tokens=limit)


def first_fit(samples: np.ndarray, lengths: np.ndarray, limit: int) -> list[list[int]]:
    """Longest first, each into the first row with room: every sample once, no row over `limit`."""
    order = sorted(range(len(samples)), key=lambda at: (-int(lengths[samples[at]]), at))
    rows: list[list[int]] = []
    room: list[int] = []
    for at in order:
        sample, length = int(samples[at]), int(lengths[samples[at]])
        assert length <= limit, f"sample {sample} of {length} tokens does not fit in {limit}"
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(limit)
            row = len(rows) - 1
        rows[row].append(sample)
        room[row] -= length
    return rows
