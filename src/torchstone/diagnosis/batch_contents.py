"""What the micro-batches of a step really contain, on all ranks, against the samples that the step should have.

It reads the tensors of the micro-batches back into documents and knows nothing about how they were made. Every document
of the step's samples must be there once, on one rank, with positions from 0 and with labels that are shifted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchstone.data.collate import PADDING_DOC_ID, MicroBatch
from torchstone.data.formats import IGNORE_INDEX
from torchstone.data.loader import RunData
from torchstone.parallel.mesh import ParallelContext
from torchstone.wording import list_ranks, plural

MAX_SHOWN = 3


class Document(NamedTuple):
    """A document of a sample. `labels` are not shifted. `origin`: the file:line it comes from."""

    ids: np.ndarray
    labels: np.ndarray
    origin: str

    def shifted(self, shift: int) -> np.ndarray:
        """The label of each position if labels are shifted `shift` times."""
        return np.append(self.labels[shift:], [IGNORE_INDEX] * min(shift, len(self.labels))).astype(np.int64)


class DocumentLocation(NamedTuple):
    """Where a document is: its data-parallel rank, micro-step, row and number in the row."""

    rank: int
    micro_step: int
    row: int
    number: int


class FoundDocument(NamedTuple):
    """A document of a micro-batch. `labels[t]` is what the loss expects after `ids[t]`, or -100."""

    place: DocumentLocation
    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray

    @property
    def trained(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of labels without a -100 between them."""
        edges = np.diff(np.concatenate(([0], self.labels != IGNORE_INDEX, [0])).astype(np.int8))
        return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


def _key(document: Document | FoundDocument) -> bytes:
    """What documents with the same ids have in common."""
    return document.ids.astype(np.int64).tobytes()


@dataclass(frozen=True)
class RowShape:
    """A row of a micro-batch: its length, and how many labels its padding has."""

    place: DocumentLocation
    length: int
    labels_on_padding: int


@dataclass(frozen=True)
class BatchContents:
    """`places`: of each expected document, None if it is missing. `extra`: documents that should not be there."""

    expected: Sequence[Document]
    places: Sequence[DocumentLocation | None]
    found: Sequence[FoundDocument]
    extra: Sequence[FoundDocument]
    rows: Sequence[RowShape]

    @property
    def micro_steps(self) -> int:
        return 1 + max((row.place.micro_step for row in self.rows), default=0)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, also those without a document."""
        return 1 + max((row.place.rank for row in self.rows), default=0)

    @property
    def computed_tokens(self) -> int:
        """Padding included."""
        return sum(row.length for row in self.rows)

    @property
    def problem(self) -> str | None:
        """What is wrong with the batch, in words; None if nothing is."""
        return self._missing_or_extra() or self._wrong_labels() or self._wrong_positions()

    def _missing_or_extra(self) -> str | None:
        missing = [document for document, place in zip(self.expected, self.places, strict=True) if place is None]
        known = Counter(_key(document) for document in self.expected)
        repeated = [each for each in self.extra if known[_key(each)]]
        if repeated:
            ranks = {_key(each): set[int]() for each in repeated}
            for each in self.found:
                if _key(each) in ranks:
                    ranks[_key(each)].add(each.place.rank)
            both = sorted(set().union(*ranks.values()))
            text = f"{plural(len(repeated), 'document')} of the step are computed more than once, on {list_ranks(both)}"
            return text + (f", and {plural(len(missing), 'document')} not at all" if missing else "")
        if missing:
            text = f"{len(missing)} of the {len(self.expected)} documents of the step are in no micro-batch"
            present = {place.rank for place in self.places if place is not None}
            absent = sorted(set(range(self.ranks)) - present)
            text += f", and {list_ranks(absent)} has none at all" if absent and present else ""
            return f"{text} (such as {', '.join(document.origin for document in missing[:MAX_SHOWN])})"
        if self.extra:
            return f"the micro-batches have {plural(len(self.extra), 'document')} that are not in the step's samples"
        return None

    def _wrong_labels(self) -> str | None:
        pairs = self._pairs()
        if all(np.array_equal(found.labels, document.shifted(1)) for document, found in pairs):
            padding = sum(row.labels_on_padding for row in self.rows)
            return f"{padding} positions of padding have a label: padding counts in the loss" if padding else None
        for shift, words in ((2, "labels are shifted twice"), (0, "labels are not shifted")):
            if all(np.array_equal(found.labels, document.shifted(shift)) for document, found in pairs):
                return f"{words}: position t predicts token t + {shift} instead of t + 1"
        wrong = [document for document, found in pairs if not np.array_equal(found.labels, document.shifted(1))]
        return (
            f"{len(wrong)} of {len(pairs)} documents have other labels than their rows (such as "
            f"{', '.join(document.origin for document in wrong[:MAX_SHOWN])})"
        )

    def _wrong_positions(self) -> str | None:
        wrong = [
            document for document, found in self._pairs() if not np.array_equal(found.positions, range(len(found.ids)))
        ]
        if not wrong:
            return None
        return f"the positions of {plural(len(wrong), 'document')} do not count from 0 (such as {wrong[0].origin})"

    def _pairs(self) -> list[tuple[Document, FoundDocument]]:
        by_place = {each.place: each for each in self.found}
        return [
            (document, by_place[place])
            for document, place in zip(self.expected, self.places, strict=True)
            if place is not None
        ]


def step_documents(data: RunData, indices: Iterable[int]) -> list[Document]:
    """The documents of these samples. One without a target, such as a single token, is left out."""
    documents = []
    for index in indices:
        sequences, origins = data.train.get(int(index)), data.train.origins(int(index))
        documents += [
            Document(np.asarray(sequence.ids), np.asarray(sequence.labels), origin)
            for sequence, origin in zip(sequences, origins, strict=True)
        ]
    return documents


def read_contents(
    expected: Sequence[Document], micro_batches: Sequence[MicroBatch], ctx: ParallelContext
) -> BatchContents:
    """What the micro-batches of all ranks contain. All ranks must call it."""
    own: tuple[list[FoundDocument], list[RowShape]] = [], []
    if ctx.pp_rank == ctx.tp_rank == 0:
        own = read_micro_batches(micro_batches, ctx.dp_rank)
    found, rows = list[FoundDocument](), list[RowShape]()
    for rank_documents, rank_rows in ctx.all_gather_object(own):
        found += rank_documents
        rows += rank_rows
    waiting: dict[bytes, list[FoundDocument]] = {}
    for each in found:
        waiting.setdefault(_key(each), []).append(each)
    places = [_take_place(waiting.get(_key(document), []), document) for document in expected]
    extra = [each for same in waiting.values() for each in same]
    return BatchContents(expected, places, found, extra, rows)


def _take_place(same: list[FoundDocument], document: Document) -> DocumentLocation | None:
    """Removes one of the documents with the same ids and returns its place: if possible, one with the same labels."""
    if not same:
        return None
    labels = document.shifted(1)
    index = next((n for n, each in enumerate(same) if np.array_equal(each.labels, labels)), 0)
    return same.pop(index).place


def read_micro_batches(micro_batches: Sequence[MicroBatch], rank: int) -> tuple[list[FoundDocument], list[RowShape]]:
    """The documents of one rank's micro-batches, and their rows."""
    documents, rows = list[FoundDocument](), list[RowShape]()
    for micro_step, batch in enumerate(micro_batches):
        ids_BT, labels_BT, positions_BT, doc_ids_BT = (tensor.cpu().numpy() for tensor in batch.tensors)
        for row in range(len(ids_BT)):
            numbers = doc_ids_BT[row]
            on_padding = int((labels_BT[row][numbers == PADDING_DOC_ID] != IGNORE_INDEX).sum())
            rows.append(RowShape(DocumentLocation(rank, micro_step, row, 0), len(numbers), on_padding))
            for number in dict.fromkeys(numbers[numbers != PADDING_DOC_ID].tolist()):
                own = numbers == number
                place = DocumentLocation(rank, micro_step, row, int(number))
                documents.append(FoundDocument(place, ids_BT[row, own], labels_BT[row, own], positions_BT[row, own]))
    return documents, rows
