"""How the samples of one optimizer step become micro-batches, rank by rank.

A plan has rounds; in a round every data rank has one micro-batch, a list of rows, and a row is a list of samples. It
depends on lengths alone: all ranks make the same plan without a word between them, and each takes its column. The
samples of a step do not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchstone.config.schema import TrainingConfig
from torchstone.data.assignment import assign
from torchstone.errors import UsageError

Rows = list[list[int]]
Plan = list[list[Rows]]


@dataclass(frozen=True)
class Batching:
    """Samples per step, and what bounds a micro-batch: rows, or tokens where conversations share a row."""

    global_batch_size: int
    rows: int | None
    tokens: int | None

    def plan(self, samples: np.ndarray, lengths: np.ndarray, ranks: int = 1) -> Plan:
        """`lengths` are those of all samples. A rank with nothing left to do in a round has no rows in it."""
        if self.tokens is not None:
            rounds = assign(lengths[samples], self.tokens, ranks)
            return [[[[int(samples[i]) for i in taken]] if taken else [] for taken in each] for each in rounds]
        assert self.rows is not None
        a_round = self.rows * ranks
        return [
            [[[int(i)] for i in part] for part in np.array_split(samples[at : at + a_round], ranks)]
            for at in range(0, len(samples), a_round)
        ]


def batching(
    training: TrainingConfig, packed: bool, context_length: int, rows_by_default: int, ranks: int = 1
) -> Batching:
    """The batch numbers that are given, and those that follow, on so many data ranks. `packed` says that samples share
    rows."""
    if packed:
        return _packed(training, context_length, ranks)
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
        on_ranks = f" x {ranks} data ranks" if ranks > 1 else ""
        if rows is not None and rows * accumulation * ranks != total:
            raise UsageError(
                f"training.global_batch_size {total} is not batch_size {rows} x grad_accum_steps {accumulation}"
                f"{on_ranks}",
                f"leave one out, or make it global_batch_size {rows * accumulation * ranks}",
            )
        rows = rows or -(-total // (accumulation * ranks))
        if -(-total // (rows * ranks)) != accumulation:
            raise UsageError(
                f"training.global_batch_size {total} cannot be cut into {accumulation} micro-steps of equal rows"
                f"{on_ranks}",
                f"{rows} rows each make {-(-total // (rows * ranks))}; leave out training.grad_accum_steps",
            )
    rows = rows or min(-(-(total or 10**9) // ranks), rows_by_default)
    total = total or rows * (accumulation or 1) * ranks
    return Batching(total, rows=rows, tokens=None)


def _packed(training: TrainingConfig, context_length: int, ranks: int) -> Batching:
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
    return Batching(training.global_batch_size or 4 * ranks, rows=None, tokens=limit)
