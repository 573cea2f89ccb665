"""A few samples of the user's data, cut to what can be computed in a short time, as a data set of their own.

Most checks compute one step of them, in several micro-steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchstone.data.encode import TokenSequence
from torchstone.data.loader import RunData
from torchstone.data.samples import Samples
from torchstone.diagnosis.check import SkipCheck
from torchstone.training.run import Run

# Rows of a micro-batch. Two full micro-steps and a part of a third are enough to see how a step is divided.
CHECKED_ROWS, CHECKED_MICRO_STEPS = 2, 2
# Conversations per rank, if they share rows.
CHECKED_CONVERSATIONS = 6
# FLOPs of a checked step by device type, on a CPU per thread. The checks compute about thirty steps.
STEP_FLOPS, MIN_SAMPLE_TOKENS = {"cpu": 4e10, "cuda": 2e13}, 24
# How far to look for samples with labels.
MAX_SEARCHED_SAMPLES = 1 << 14
# Micro-steps of a step, if conversations share rows.
MICRO_STEPS = 3
# The share of a cut conversation's tokens that are before the first label.
CONTEXT_SHARE = 0.5


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


class SelectedSamples(Samples):
    """The samples `indices` of a data set. With `max_tokens`, each is cut: a conversation to the tokens around its
    first label, a row of several documents to its first tokens; or, with `one_document`, to its longest document."""

    def __init__(
        self,
        samples: Samples,
        indices: Sequence[int] | np.ndarray,
        max_tokens: int | None = None,
        one_document: bool = False,
    ) -> None:
        self.samples, self.indices, self.max_tokens, self.one_document = samples, indices, max_tokens, one_document
        sequences = [self.get(number) for number in range(len(indices))]
        self.lengths = np.array([sum(len(each.ids) for each in sample) for sample in sequences], dtype=np.int64)
        self.loss_tokens = np.array([sum(each.loss_tokens for each in sample) for sample in sequences], dtype=np.int64)

    def get(self, index: int) -> list[TokenSequence]:
        sequences = self.samples.get(int(self.indices[index]))
        if self.one_document:
            sequences = [max(sequences, key=lambda sequence: sequence.loss_tokens)]
        if self.max_tokens is None:
            return sequences
        if len(sequences) == 1:
            return [_around_first_label(sequences[0], self.max_tokens)]
        cut, left = list[TokenSequence](), self.max_tokens
        for sequence in sequences:
            if left > 0:
                cut.append(sequence.part(0, left))
            left -= len(sequence.ids)
        return cut

    def origin(self, index: int) -> str:
        return self.samples.origin(int(self.indices[index]))

    def origins(self, index: int) -> list[str]:
        return self.samples.origins(int(self.indices[index]))[: len(self.get(index))]


def _around_first_label(sequence: TokenSequence, max_tokens: int) -> TokenSequence:
    first = int(np.argmax(sequence.labels[1:] >= 0)) + 1 if sequence.loss_tokens else 0
    start = max(0, first - int(CONTEXT_SHARE * max_tokens))
    return sequence.part(start, start + max_tokens)


def select_data(data: RunData, samples: Samples, batch_size: int, rows: int | None, dp: int) -> RunData:
    """A data set of `samples` alone, without validation and mixture, in steps of `batch_size` samples and micro-batches
    of `rows` rows; None if conversations share rows."""
    data = replace(
        data, train=samples, validation={}, weights=[], sizes=[len(samples)],
        batch_sizes=replace(data.batch_sizes, global_batch_size=batch_size),
    )  # fmt: skip
    tokens = max(int(samples.lengths.max()), -(-int(samples.lengths.sum()) // (MICRO_STEPS * dp)))
    data.set_micro_batch(rows or tokens, dp)
    return data
