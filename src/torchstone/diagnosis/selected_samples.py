"""A few samples of the user's data as a data set of their own, cut to what can be computed in a short time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchstone.data.encode import TokenSequence
from torchstone.data.loader import RunData
from torchstone.data.samples import Samples

# Micro-steps of a step, if conversations share rows.
MICRO_STEPS = 3
# Of a cut conversation: the share of its tokens before the first label.
CONTEXT_SHARE = 0.5


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
