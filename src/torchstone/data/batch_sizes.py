"""The sizes of batches, and how the samples of an optimizer step become micro-batches on every data-parallel rank.

In a micro-step every rank has one micro-batch: a list of rows, and a row is a list of samples. The assignment depends
only on lengths, so every rank computes all of it without communication and takes its own part. Which samples a step has
does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchstone.config.schema import TrainingConfig
from torchstone.data.assignment import assign_micro_batches
from torchstone.errors import UsageError

Rows = list[list[int]]


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step, and the limit of a micro-batch: rows, or tokens if conversations share rows."""

    global_batch_size: int
    micro_batch_rows: int | None
    micro_batch_tokens: int | None

    def assign_micro_steps(self, samples: np.ndarray, lengths: np.ndarray, dp: int = 1) -> list[list[Rows]]:
        """For every micro-step the rows of each rank; no rows for a rank without samples.

        `lengths` are those of all samples of the data, not only of this step.
        """
        if self.micro_batch_tokens is not None:
            micro_steps = assign_micro_batches(lengths[samples], self.micro_batch_tokens, dp)
            return [[[[int(samples[i]) for i in bin_]] if bin_ else [] for bin_ in ranks] for ranks in micro_steps]
        assert self.micro_batch_rows is not None
        size = self.micro_batch_rows * dp
        return [
            [[[int(i)] for i in part] for part in np.array_split(samples[start : start + size], dp)]
            for start in range(0, len(samples), size)
        ]

    def row_counts(self, dp: int = 1) -> tuple[int, ...]:
        """How many rows the micro-batches of a complete step have, ascending: the last may have fewer than others."""
        assert self.micro_batch_rows is not None
        complete, rest = divmod(self.global_batch_size, self.micro_batch_rows * dp)
        return (*([-(-rest // dp)] if rest else []), *([self.micro_batch_rows] if complete else []))


def drop_preset_sizes(
    training: TrainingConfig, preset_keys: Sequence[str], shares_rows: bool
) -> tuple[TrainingConfig, list[str]]:
    """Removes the sizes of a preset that do not apply to the data; returns their keys too."""
    wrong_kind = ("batch_size", "grad_accum_steps") if shares_rows else ("max_tokens_per_gpu",)
    dropped = [name for name in wrong_kind if f"training.{name}" in preset_keys]
    unset: dict[str, Any] = dict.fromkeys(dropped)
    return replace(training, **unset), [f"training.{name}" for name in dropped]


def resolve_batch_sizes(
    training: TrainingConfig,
    shares_rows: bool,
    context_length: int,
    default_rows: int,
    dp: int = 1,
    default_total: int | None = None,
) -> BatchSizes:
    """Returns the configured sizes and those derived from them. `shares_rows`: several samples share a row.

    `default_total` is the number of samples per step if no size is set; without it, a step is one micro-step.
    """
    if shares_rows:
        return _shared_row_batch_sizes(training, context_length, dp, default_total)
    rows = training.micro_batch_rows
    if training.max_tokens_per_gpu is not None:
        if rows is not None:
            raise UsageError(
                "training.batch_size and training.max_tokens_per_gpu both limit a micro-batch", "set only one of them"
            )
        rows = training.max_tokens_per_gpu // context_length
        if rows == 0:
            raise UsageError(
                f"training.max_tokens_per_gpu {training.max_tokens_per_gpu} is less than one row of "
                f"data.context_length {context_length}"
            )
    total, accumulation = training.global_batch_size, training.grad_accum_steps
    if default_total is not None and (total, accumulation, rows) == (None, None, None):
        total = max(default_total, dp)
    if total is not None and accumulation is not None:
        rows = _check_accumulation(total, accumulation, rows, dp)
    rows = rows or min(-(-(total or 10**9) // dp), default_rows)
    return BatchSizes(total or rows * (accumulation or 1) * dp, micro_batch_rows=rows, micro_batch_tokens=None)


def _check_accumulation(total: int, accumulation: int, rows: int | None, dp: int) -> int:
    """The rows of a micro-batch if both the global batch size and the accumulation are set."""
    ranks = f" x {dp} data-parallel ranks" if dp > 1 else ""
    if rows is not None and rows * accumulation * dp != total:
        raise UsageError(
            f"training.global_batch_size {total} is not batch_size {rows} x grad_accum_steps {accumulation}{ranks}",
            f"leave one out, or use --training.global_batch_size {rows * accumulation * dp}",
        )
    rows = rows or -(-total // (accumulation * dp))
    steps = -(-total // (rows * dp))
    if steps != accumulation:
        raise UsageError(
            f"training.global_batch_size {total} does not split into {accumulation} micro-steps of equal size{ranks}",
            f"leave out training.grad_accum_steps: micro-batches of {rows} rows give {steps}",
        )
    return rows


def _shared_row_batch_sizes(
    training: TrainingConfig, context_length: int, dp: int, default_total: int | None
) -> BatchSizes:
    for key in ("batch_size", "grad_accum_steps"):
        if getattr(training, key) not in (None, "auto"):
            rows = training.micro_batch_rows
            instead = "--training.global_batch_size N"
            if key == "batch_size" and rows is not None:
                instead = f"--training.max_tokens_per_gpu {rows * context_length} ({rows} x data.context_length)"
            raise UsageError(
                f"training.{key} does not apply to packed conversations: training.max_tokens_per_gpu limits a "
                "micro-batch, and the number of micro-batches is computed",
                f"use {instead}, or --data.packing false",
            )
    tokens = training.max_tokens_per_gpu or context_length
    if tokens < context_length:
        raise UsageError(
            f"training.max_tokens_per_gpu {tokens} is less than data.context_length {context_length}",
            "the longest row must fit in a micro-batch",
        )
    total = training.global_batch_size or max(default_total or 4 * dp, dp)
    return BatchSizes(total, micro_batch_rows=None, micro_batch_tokens=tokens)
