"""Does anything of one document reach another one? Measured with losses, so in every layout and with every kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.formats import IGNORE_INDEX
from torchstone.diagnosis.batch_contents import Document
from torchstone.diagnosis.check import SkipCheck
from torchstone.diagnosis.reference import relative
from torchstone.diagnosis.session import Diagnosis
from torchstone.training.run import Run

# Relative. Tokens that must not matter change at most the order of additions.
LEAK_LIMIT = 1e-5
MASKS = "data.packing, model.attention; models/attention.py: build_masks, parallel/runner.py: Runner._inputs"
# Documents that share a row, and the tokens that are taken of each.
PACKED_DOCUMENTS, PACKED_TOKENS, MIN_TOKENS = 4, 128, 8


class Leak(NamedTuple):
    """Relative changes of the loss of a document: when earlier ones of its row change, or later ones; of the loss of
    its first half when its second half changes; and, to see that the loss would show it, when its first token does."""

    from_earlier: float
    from_later: float
    from_future: float
    from_itself: float

    @property
    def is_large(self) -> bool:
        return not max(self.from_earlier, self.from_later, self.from_future) <= LEAK_LIMIT

    def describe(self, run: Run) -> str:
        if self.from_future > LEAK_LIMIT:
            return "tokens see later tokens of their own document: attention is not causal"
        return f"documents of {'a packed row' if run.data.packed else 'a micro-batch'} see each other"


def measure_leak(run: Run, documents: Sequence[np.ndarray]) -> Leak:
    """`documents`: their ids, in rows of their own if rows are not packed. All ranks must call it."""
    vocabulary = min(run.tokenizer.size, run.model.vocab_size)

    def change(ids: np.ndarray) -> np.ndarray:
        return (ids + 1 + vocabulary // 2) % vocabulary

    *others, own = documents
    last, half = len(others), (len(own) + 1) // 2
    first_changed, second_half_changed = change(own), change(own)
    first_changed[1:], second_half_changed[:half] = own[1:], own[:half]
    of_last, of_first = _loss(run, documents, last), _loss(run, documents, 0)
    of_half = _loss(run, documents, last, half)
    return Leak(
        relative(_loss(run, [*map(change, others), own], last), of_last),
        relative(_loss(run, [documents[0], *map(change, documents[1:])], 0), of_first),
        relative(_loss(run, [*others, second_half_changed], last, half), of_half) if half > 1 else 0.0,
        relative(_loss(run, [*others, first_changed], last), of_last),
    )


def find_leak(diagnosis: Diagnosis) -> str | None:
    """What leaks in `fp32_run`, in words; None if nothing does, or if it cannot be measured."""
    try:
        documents = short_documents(diagnosis)
    except SkipCheck:
        return None
    leak = measure_leak(diagnosis.fp32_run, [document.ids for document in documents])
    return leak.describe(diagnosis.fp32_run) if leak.is_large else None


def _loss(run: Run, documents: Sequence[np.ndarray], target: int, size: int | None = None) -> float:
    """The loss sum of the first `size` tokens of one of the documents."""
    sequences = [TokenSequence(ids, np.full(len(ids), IGNORE_INDEX)) for ids in documents]
    sequences[target].labels[:size] = documents[target][:size]
    rows = [sequences] if run.data.packed else [[sequence] for sequence in sequences]
    run.model.train(False)
    loss = run.runner.forward([collate(rows, run.data.pad_id, run.data.shapes)])
    run.runner.reshard()
    return run.ctx.all_reduce_sum(loss).item()


def short_documents(diagnosis: Diagnosis) -> list[Document]:
    """A few documents of the checked step with labels, cut to a row together."""
    length = diagnosis.config.data.context_length
    if length < MIN_TOKENS:
        raise SkipCheck(f"rows of data.context_length {length} tokens are too short")
    number = min(PACKED_DOCUMENTS, length // MIN_TOKENS)
    room = min(PACKED_TOKENS, length // number)
    candidates = [
        document._replace(ids=document.ids[:room], labels=document.labels[:room])
        for document in diagnosis.documents
        if (document.labels[1:room] >= 0).any()
    ]
    if len(candidates) < min(2, number):
        # The labels come late: train on all tokens, which is as good for a comparison.
        candidates = [
            document._replace(ids=document.ids[:room], labels=document.ids[:room])
            for document in diagnosis.documents
            if len(document.ids) > 1
        ]
    if not candidates:
        raise SkipCheck("every document has a single token")
    return candidates[:number]
