"""The step of most checks: a few of the user's samples in the batch sizes of several micro-steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchstone.data.loader import RunData
from torchstone.diagnosis.check import SkipCheck
from torchstone.diagnosis.selected_samples import SelectedSamples, select_data
from torchstone.training.run import Run

# Rows of a micro-batch. Two full micro-steps and a part of a third are enough to see how a step is divided.
CHECKED_ROWS, CHECKED_MICRO_STEPS = 2, 2
# Conversations per rank, if they share rows.
CHECKED_CONVERSATIONS = 6
# Of a step, by type of the device: on a CPU for each thread. The checks compute about thirty steps.
STEP_FLOPS, MIN_SAMPLE_TOKENS = {"cpu": 4e10, "cuda": 2e13}, 24
# How far to look for samples with labels.
MAX_SEARCHED_SAMPLES = 1 << 14


@dataclass(frozen=True)
class CheckedStep:
    """The samples of one optimizer step, and a data set of them alone, with batch sizes that make one step of them."""

    indices: np.ndarray
    data: RunData

    @property
    def labelled(self) -> np.ndarray:
        """The samples that have labels."""
        return self.indices[self.data.train.loss_tokens[self.indices] > 0]


def choose_step(run: Run, is_full: bool) -> CheckedStep:
    """The first samples that make two micro-steps and a part of a third on every rank, cut to what is computed soon;
    with `is_full`, a whole step of the run. Uneven parts show whether a loss is divided by the wrong count."""
    data, dp = run.data, run.ctx.dims.dp
    rows = data.batch_sizes.micro_batch_rows
    if rows is not None and not is_full:
        rows = min(CHECKED_ROWS, rows)
    number = CHECKED_CONVERSATIONS * dp + 1 if rows is None else CHECKED_MICRO_STEPS * rows * dp + 1
    number = min(data.batch_sizes.global_batch_size if is_full else number, len(data.train))
    order = first_labelled(run, number)
    max_tokens = None if is_full else max(MIN_SAMPLE_TOKENS, step_tokens(run) // number)
    data = select_data(data, SelectedSamples(data.train, order, max_tokens), number, rows, dp)
    indices = data.sampler(run.config).take(number)
    return CheckedStep(indices, data)


def step_tokens(run: Run) -> int:
    """The tokens of a step that takes a second or two."""
    threads = torch.get_num_threads() if run.device.type == "cpu" else 1
    return int(threads * STEP_FLOPS[run.device.type] / (6 * run.model.parameter_count))


def first_labelled(run: Run, number: int) -> np.ndarray:
    """`number` samples, in the order of the run, of which half or at least one have labels; of its first epoch."""
    data = run.data
    searched = min(len(data.train), max(number, MAX_SEARCHED_SAMPLES))
    order = data.sampler(run.config).take(searched)
    has_labels = np.concatenate(([0], np.cumsum(data.train.loss_tokens[order] > 0)))
    counts = has_labels[number:] - has_labels[: len(has_labels) - number]
    if counts.max() == 0:
        raise SkipCheck(f"none of the first {searched} samples has a label")
    first = int(np.argmax(counts >= min(max(1, number // 2), counts.max())))
    return order[first : first + number]
