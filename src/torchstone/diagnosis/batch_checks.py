"""Checks of labels: are those in rows of token ids right, and are there enough in a step?

Rows of ids can have labels that are shifted already, another value for masked ones, or padding. What goes wrong after
the rows is for `batch` to find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchstone.data.formats import IGNORE_INDEX, TEXT_FORMATS
from torchstone.diagnosis.batch_contents import Document
from torchstone.diagnosis.check import Finding, SkipCheck, Status
from torchstone.diagnosis.sampled_rows import (
    MAX_WRONG,
    inspect_command,
    name_token,
    sample_sequences,
    sample_step,
    search_sequences,
)

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

SHIFTS = range(-3, 6)
# A row is shifted if this share of its labels fits a shift, and it has enough labels for that to be no accident.
SHIFTED_SHARE, MIN_LABELS = 0.9, 4
# Nearly all labels that mean "masked", but are not -100, are the same, and there are many.
MASK_VALUE_SHARE, MIN_MASK_VALUES = 0.9, 8
# Shares: samples without a trained token; tokens that are trained.
MAX_UNTRAINED, MANY_UNTRAINED = 0.01, 0.5
MIN_TRAINED, MIN_TRAINED_TEXT = 0.005, 0.9


def check_label_shift(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    rows = [Document(ids, labels, origin) for _, origin, ids, labels in sample_sequences(run, ("tokens",), 512)]
    labels = sum(int((row.labels[1:] != IGNORE_INDEX).sum()) for row in rows)
    if not labels:
        raise SkipCheck("no rows of token ids with labels: the labels of other rows are their ids")
    wrong = [row for row in rows if (_wrong_labels(row) != IGNORE_INDEX).any()]
    others = sum(int((_wrong_labels(row) != IGNORE_INDEX).sum()) for row in wrong)
    finding = Finding(
        "pass",
        f"{labels - others:,} of {labels:,} labels in {len(rows)} rows of ids are their own id, {others:,} another one",
        limit="all, but for other ids that fit no shift",
        values={"labels": labels, "others": others},
    )
    shifts, mask = Counter(shift for shift in map(_find_shift, wrong) if shift), _find_mask_value(wrong)
    if shifts:
        shift, count = shifts.most_common(1)[0]
        cause = (
            f"position t learns token t{shift + 1:+} instead of t+1 in {count} of {len(rows)} rows: labels are shifted "
        )
        cause += "already, and are shifted again in training"
    elif mask is not None:
        cause = f"labels that are not their own id are {name_token(run, mask)}; to mask a token, use -100"
    else:
        return finding
    origin = wrong[0].origin
    next_step = f"write one label per id: the same id, or -100 to mask it; {inspect_command(run, origin)}"
    return finding.with_cause(cause, f"labels of {origin}", next_step)


def check_padding(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    pad_ids = {run.data.pad_id, run.tokenizer.hf.pad_token_id, run.tokenizer.hf.eos_token_id}

    def is_padded(ids: np.ndarray, labels: np.ndarray) -> bool:
        # One eos is the end of a text.
        return len(ids) > 2 and ids[-1] == ids[-2] == labels[-1] == labels[-2] and int(ids[-1]) in pad_ids

    rows, padded = search_sequences(run, ("tokens",), 512, is_padded)
    if not rows:
        raise SkipCheck("no rows of token ids")
    finding = Finding(
        "pass",
        f"{len(padded)} of {rows} rows of input_ids end with trained padding",
        limit=f"{MAX_WRONG:.0%} of the rows",
        values={"padded_rows": len(padded), "rows": rows},
    )
    if len(padded) <= MAX_WRONG * rows:
        return finding
    return finding.with_cause(
        "input_ids end with padding whose labels are not -100: the model learns to write padding",
        f"input_ids of {padded[0]}",
        "leave the padding out of input_ids (micro-batches are padded later), or give it labels of -100; "
        + inspect_command(run, padded[0]),
    )


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
    status: Status = "fail"
    if not labels:
        cause = f"all labels of the next step ({len(indices)} samples) are -100"
    elif set(run.data.formats) <= set(TEXT_FORMATS) and share < MIN_TRAINED_TEXT:
        cause = "labels of -100 mask text, all of which should be trained"
    elif untrained > MAX_UNTRAINED:
        cause = "samples without a trained token take time, and nothing is learned from them"
        status = "fail" if untrained > MANY_UNTRAINED else "warn"
    elif share < MIN_TRAINED:
        cause, status = "nearly all tokens are context, so a step learns from few tokens", "warn"
    else:
        return finding
    return finding.with_cause(cause, f"labels of {example}", inspect_command(run, example), status)


def _wrong_labels(row: Document) -> np.ndarray:
    """The labels, and -100 where they are their own id."""
    return np.where(row.labels == row.ids, IGNORE_INDEX, row.labels)[1:]


def _find_shift(row: Document) -> int:
    """By how many positions nearly all labels are shifted; 0 if that cannot be told."""
    positions = np.flatnonzero(row.labels != IGNORE_INDEX)
    shares = {}
    for shift in SHIFTS:
        inside = positions[(positions + shift >= 0) & (positions + shift < len(row.ids))]
        if len(inside) >= MIN_LABELS:
            shares[shift] = float((row.labels[inside] == row.ids[inside + shift]).mean())
    best = max(shares, key=shares.__getitem__, default=0)
    return best if shares and shares[best] >= SHIFTED_SHARE else 0


def _find_mask_value(documents: Sequence[Document]) -> int | None:
    """The id of nearly all labels that are not their own id."""
    wrong = np.concatenate([np.zeros(0, dtype=np.int64), *map(_wrong_labels, documents)])
    counts = Counter(wrong[wrong != IGNORE_INDEX].tolist())
    for value, count in counts.most_common(1):
        if count >= max(MIN_MASK_VALUES, MASK_VALUE_SHARE * counts.total()):
            return value
    return None
