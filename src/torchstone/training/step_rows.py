"""Which rows of the data are in a step or in one of its micro-batches, for messages: file:line and length in tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchstone.data.loader import StepBatch
from torchstone.data.samples import Samples
from torchstone.data.split import num_documents
from torchstone.training.run import Run
from torchstone.wording import list_first

MAX_ROWS_SHOWN = 5
# (file:line, tokens)
Row = tuple[str, int]


def indices_of_step(run: Run, batch: StepBatch) -> np.ndarray:
    """Which training samples are in the batch of a step, over all ranks."""
    sampler = run.data.sampler(run.config, batch.first_sample)
    return sampler.take(batch.samples)


def rows_of_step(run: Run, batch: StepBatch) -> list[Row]:
    """The rows of all ranks."""
    indices, dp = indices_of_step(run, batch), run.ctx.dims.dp
    return [row for dp_rank in range(dp) for row in run.data.documents(run.data.train, indices, dp_rank, dp)]


def rows_of_micro_batch(run: Run, samples: Samples, indices: np.ndarray, batch: StepBatch, index: int) -> list[Row]:
    """The rows in this rank's micro-batch `index`. Parts of a split batch keep the order of its rows."""
    batches, ctx = batch.micro_batches, run.ctx
    first = sum(num_documents(each) for each in batches[:index])
    rows = run.data.documents(samples, indices, ctx.dp_rank, ctx.dims.dp)
    return rows[first : first + num_documents(batches[index])]


def describe_rows(rows: Sequence[Row]) -> str:
    """The longest rows as text, and how many more there are."""
    longest = sorted(rows, key=lambda row: -row[1])
    return list_first([f"{row} ({length} tokens)" for row, length in longest], MAX_ROWS_SHOWN) or "only padding"
