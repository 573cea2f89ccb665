"""Checks of the labels in the micro-batches: is each the next token of its document, and are there enough?

They need nothing but the ids: a label must be the id one position later in the same document. So they find labels that
are wrong in the rows, with which `batch` compares the micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torchstone.data.collate import PADDING_DOC_ID
from torchstone.data.formats import IGNORE_INDEX, TEXT_FORMATS
from torchstone.diagnosis.batch_contents import FoundDocument
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.sampled_rows import (
    MAX_WRONG,
    inspect_command,
    look_for_change,
    name_token,
    sample_step,
    search_sequences,
)
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

COLLATE = "data/collate.py"
SHIFTS = range(-2, 7)
# A document is shifted if this share of its labels fits a shift, and it has enough labels for that to be no accident.
SHIFTED_SHARE, MIN_LABELS = 0.9, 4
# Nearly all labels that mean "masked", but are not -100, are the same, and there are many.
MASK_VALUE_SHARE, MIN_MASK_VALUES = 0.9, 8
# Of the samples: those without a trained token. Of the tokens: those that are trained.
MAX_UNTRAINED, MANY_UNTRAINED = 0.01, 0.5
MIN_TRAINED, MIN_TRAINED_TEXT = 0.005, 0.9


def check_label_shift(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    indices, _, documents = sample_step(run)
    labels = sum(int((d.labels[:-1] != IGNORE_INDEX).sum()) for d in documents)
    right = sum(int((d.labels[:-1] == d.ids[1:]).sum()) for d in documents)
    if not labels:
        raise SkipCheck("no position has a label: see loss_tokens")
    finding = Finding(
        "pass",
        f"{right:,} of {labels:,} labels are the next token of their document ({len(indices)} samples)",
        limit="all",
        values={"labels": labels, "right": right},
    )
    source, next_step = _label_source(run, indices)
    failure = replace(finding, status="fail", source=source, next_step=next_step)
    wrong = [d for d in documents if (_wrong_labels(d) != IGNORE_INDEX).any()]
    shifts = Counter(shift for shift in map(_find_shift, wrong) if shift != 1)
    if shifts:
        shift, count = shifts.most_common(1)[0]
        times = {0: ": they are not shifted", 2: ": they are shifted twice"}.get(shift, "")
        cause = f"position t has the label of token t{shift:+} instead of t+1 in {count} of {len(documents)} documents"
        return replace(failure, cause=cause + times)
    if (mask := _find_mask_value(wrong)) is not None:
        name = name_token(run, mask)
        return replace(failure, cause=f"labels that are not the next token are {name}; to mask a token, use -100")
    own = f"; {labels - right:,} are other tokens, as the rows say" if wrong else ""
    return replace(finding, measured=finding.measured + own)


def check_padding(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    micro_batches = sample_step(run)[1].micro_batches
    labels = np.concatenate([m.labels[m.doc_ids == PADDING_DOC_ID].numpy() for m in micro_batches])
    trained = labels[labels != IGNORE_INDEX]
    pad_ids = {run.data.pad_id, run.tokenizer.hf.pad_token_id, run.tokenizer.hf.eos_token_id}

    def is_padded(ids: np.ndarray, labels: np.ndarray) -> bool:
        # One eos is the end of a text.
        return len(ids) > 2 and ids[-1] == ids[-2] == labels[-1] == labels[-2] and int(ids[-1]) in pad_ids

    rows, padded = search_sequences(run, ("tokens",), 512, is_padded)
    finding = Finding(
        "pass",
        f"{len(trained):,} labels at {len(labels):,} positions of padding"
        + (f"; {len(padded)} of {rows} rows of input_ids end with trained padding" if rows else ""),
        limit=f"no label; {MAX_WRONG:.0%} of the rows",
        values={"labels": len(trained), "padded_rows": len(padded), "rows": rows},
    )
    if len(trained):
        name = name_token(run, Counter(trained.tolist()).most_common(1)[0][0])
        cause = f"the labels of padding are {name} instead of -100, so the loss counts padding"
        return replace(finding, status="fail", cause=cause, source=COLLATE, next_step=look_for_change(COLLATE))
    if len(padded) > MAX_WRONG * rows:
        cause = "input_ids end with padding whose labels are not -100: the model learns to write padding"
        next_step = "leave the padding out of input_ids (micro-batches are padded later), or give it labels of -100; "
        next_step += inspect_command(run, padded[0])
        return replace(finding, status="fail", cause=cause, source=f"input_ids of {padded[0]}", next_step=next_step)
    return finding


def check_loss_tokens(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    train = run.data.train
    indices, _, documents = sample_step(run)
    labels = sum(int((d.labels != IGNORE_INDEX).sum()) for d in documents)
    share = labels / max(1, sum(len(d.ids) - 1 for d in documents))
    # Nothing predicts a single token, such as the last one of a stream of text.
    is_untrained = (train.loss_tokens == 0) & (train.lengths > 1)
    untrained = float(is_untrained.mean())
    example = train.origins(int(is_untrained.argmax() if untrained else indices[0]))[0]
    finding = Finding(
        "pass",
        f"{share:.1%} of the tokens of a step are trained; {untrained:.1%} of all samples have no trained token",
        limit=f"at least {MIN_TRAINED:.1%}; at most {MAX_UNTRAINED:.0%} of the samples",
        values={"share": share, "untrained": untrained},
    )
    failure = replace(finding, status="fail", source=f"labels of {example}", next_step=inspect_command(run, example))
    if not labels:
        return replace(failure, cause=f"all labels of the next step ({len(indices)} samples) are -100")
    if set(run.data.formats) <= set(TEXT_FORMATS) and share < MIN_TRAINED_TEXT:
        return replace(failure, cause="labels of -100 mask text, all of which should be trained")
    if untrained > MAX_UNTRAINED:
        cause = "samples without a trained token take time, and nothing is learned from them"
        return replace(failure, status="fail" if untrained > MANY_UNTRAINED else "warn", cause=cause)
    if share < MIN_TRAINED:
        return replace(failure, status="warn", cause="nearly all tokens are context, so a step learns from few tokens")
    return finding


def _wrong_labels(document: FoundDocument) -> np.ndarray:
    """The labels, and -100 where they are the next token."""
    labels = document.labels[:-1]
    return np.where(labels == document.ids[1:], IGNORE_INDEX, labels)


def _find_shift(document: FoundDocument) -> int:
    """By how many positions nearly all labels are shifted; 1 if that cannot be told."""
    positions = np.flatnonzero(document.labels != IGNORE_INDEX)
    shares = {}
    for shift in SHIFTS:
        inside = positions[(positions + shift >= 0) & (positions + shift < len(document.ids))]
        if len(inside) >= MIN_LABELS:
            shares[shift] = float((document.labels[inside] == document.ids[inside + shift]).mean())
    best = max(shares, key=shares.__getitem__, default=1)
    return best if shares and shares[best] >= SHIFTED_SHARE else 1


def _find_mask_value(documents: Sequence[FoundDocument]) -> int | None:
    """The id of nearly all labels that are not the next token."""
    wrong = np.concatenate([np.zeros(0, dtype=np.int64), *map(_wrong_labels, documents)])
    counts = Counter(wrong[wrong != IGNORE_INDEX].tolist())
    for value, count in counts.most_common(1):
        if count >= max(MIN_MASK_VALUES, MASK_VALUE_SHARE * counts.total()):
            return value
    return None


def _label_source(run: Run, indices: np.ndarray) -> tuple[str, str]:
    """Where labels come from that are not the next token, and what to do: the rows, or what collates them."""
    for index in map(int, indices):
        for sequence, origin in zip(run.data.train.get(index), run.data.train.origins(index), strict=True):
            if ((sequence.labels != IGNORE_INDEX) & (sequence.labels != sequence.ids)).any():
                next_step = "write one label per id: the same id, or -100 to mask it; labels are shifted in training; "
                return f"labels of {origin}", next_step + inspect_command(run, origin)
    return COLLATE, look_for_change(COLLATE)
