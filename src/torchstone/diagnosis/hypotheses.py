"""Known mistakes, and what each of them would have measured: this is how a failed check finds its cause.

Most mistakes give the documents of a step other weights. The right weight of a document's loss sum is 1 / N, with N the
loss tokens of the whole step. A mean of means, for example, gives it 1 / (cells x loss tokens of its cell), where a
cell is a micro-batch of one rank. Other mistakes change the labels. One is named only if what it would give differs
from what is right, and agrees with what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchstone.diagnosis.batch_contents import BatchContents, DocumentLocation
from torchstone.diagnosis.reference import LossSums, Variant

RUNNER = "parallel/runner.py: Runner.forward_backward"
LOSS = "loss/cross_entropy.py: token_loss_sum, or the loss that model.loss and model.liger choose"
COUNT = "data/loader.py: StepBatch.loss_tokens"
DIVIDE_ONCE = "divide the sum of all token losses once, by the loss tokens of the whole step"
# What is right must be this many times further from what was measured than a mistake that is named.
MIN_CONTRAST = 20


@dataclass(frozen=True)
class Hypothesis:
    """`weights`: of each document's loss sum. `source`: where to look."""

    cause: str
    source: str
    next_step: str
    weights: np.ndarray
    variant: Variant = "right"

    def loss(self, sums: LossSums) -> float:
        return float((self.weights * sums.sums[self.variant]).sum())


def find_causes(hypotheses: Sequence[Hypothesis], measured: float, sums: LossSums, limit: float) -> list[Hypothesis]:
    """The hypotheses that explain a loss, each cause once."""
    right, found = sums.loss, dict[str, Hypothesis]()
    for each in hypotheses:
        predicted = each.loss(sums)
        error, effect = abs(predicted - measured), abs(predicted - right)
        if error <= limit * max(abs(measured), abs(right)) and effect >= MIN_CONTRAST * error:
            found.setdefault(each.cause, each)
    return list(found.values())


def list_hypotheses(contents: BatchContents, sums: LossSums, full_micro_steps: int | None = None) -> list[Hypothesis]:
    """The mistakes that are known, the most frequent first. `full_micro_steps`: of a step that is not a partial one."""
    return [
        *_means_of_means(contents, sums),
        *_wrong_counts(contents),
        *_wrong_labels(contents, sums),
        *_scales(contents, sums, full_micro_steps),
        *_lost_parts(contents, sums),
    ]


def document_weights(contents: BatchContents, sums: LossSums) -> np.ndarray:
    """The right weights: 1 / loss tokens of the step."""
    return np.full(len(contents.expected), 1.0 / sums.counts["right"].sum())


def _means_of_means(contents: BatchContents, sums: LossSums) -> list[Hypothesis]:
    def by_cell(place: DocumentLocation) -> tuple[int, int]:
        return place.rank, place.micro_step

    def by_rank(place: DocumentLocation) -> int:
        return place.rank

    ranks, micro_steps = contents.ranks, contents.micro_steps
    cell_means, rank_means = _mean_weights(contents, sums, by_cell), _mean_weights(contents, sums, by_rank)
    cells = max(1, len({by_cell(place) for place in contents.places if place is not None}))
    counts = sums.counts["right"]
    document_means = (counts > 0) / np.maximum(counts, 1)
    mean, added = "every micro-batch's loss is averaged by itself, and then the averages", "averages are added up"
    weights = {
        "every rank averages over its own loss tokens, and then the ranks are averaged": [rank_means / ranks],
        mean: [cell_means / cells, cell_means / (ranks * micro_steps)],
        f"every micro-batch's loss is averaged by itself, and the {added}": [cell_means, cell_means / ranks],
        f"every rank averages over its own loss tokens, and the {added}": [rank_means],
        "every document's loss is averaged by itself: short answers count more": [document_means / (counts > 0).sum()],
    }
    return [
        Hypothesis(cause, COUNT if "rank" in cause else RUNNER, DIVIDE_ONCE, each)
        for cause, variants in weights.items()
        for each in variants
        if ranks > 1 or "rank" not in cause
    ]


def _wrong_counts(contents: BatchContents) -> list[Hypothesis]:
    ones = np.ones(len(contents.expected))
    tokens = sum(len(document.ids) for document in contents.expected)
    fix = "count only the labels that are not -100"
    return [
        Hypothesis("the loss is divided by all tokens, padding included", COUNT, fix, ones / contents.computed_tokens),
        Hypothesis("the loss is divided by all tokens, not by those with a label", COUNT, fix, ones / tokens),
        Hypothesis("the loss is a sum: it is not divided by the loss tokens", RUNNER, DIVIDE_ONCE, ones),
    ]


def _wrong_labels(contents: BatchContents, sums: LossSums) -> list[Hypothesis]:
    ones, count = np.ones(len(contents.expected)), sums.counts["right"].sum()
    causes: list[tuple[Variant, str, str]] = [
        ("shifted twice", "labels are shifted twice: position t predicts token t + 2", "shift labels once"),
        ("not shifted", "labels are not shifted: position t predicts itself", "shift labels by one"),
        (
            "without pad id",
            "targets with the id of the pad token are left out of the loss: the model never learns to end",
            "mask padding with -100 and not by its id",
        ),
        ("all tokens", "the loss mask is not used: prompts are trained on too", "mask prompts with -100"),
    ]
    return [
        Hypothesis(cause, LOSS, fix, ones / divisor, variant)
        for variant, cause, fix in causes
        for divisor in (count, max(1, sums.counts[variant].sum()))
    ]


def _scales(contents: BatchContents, sums: LossSums, full_micro_steps: int | None) -> list[Hypothesis]:
    right, micro_steps, ranks = document_weights(contents, sums), contents.micro_steps, contents.ranks
    factors = {}
    if full_micro_steps is not None and full_micro_steps != micro_steps:
        factors[
            f"the last, partial step is divided by the {full_micro_steps} micro-steps of a full one, not by its own "
            f"{micro_steps}"
        ] = micro_steps / full_micro_steps
    for number, noun in ((micro_steps, "micro-steps"), (ranks, "ranks"), (micro_steps * ranks, "micro-steps x ranks")):
        factors[f"the loss is divided by the {number} {noun} as well"] = 1 / number
        factors[f"the loss is {number} times too large, the number of {noun}"] = number
    return [Hypothesis(cause, RUNNER, DIVIDE_ONCE, right * factor) for cause, factor in factors.items()]


def _lost_parts(contents: BatchContents, sums: LossSums) -> list[Hypothesis]:
    right, last = document_weights(contents, sums), contents.micro_steps - 1
    micro_steps = np.array([-1 if place is None else place.micro_step for place in contents.places])
    ranks = np.array([-1 if place is None else place.rank for place in contents.places])
    parts = {
        "only the last micro-step counts": (RUNNER, micro_steps == last),
        "only the first micro-step counts": (RUNNER, micro_steps == 0),
        "the last micro-step is missing": (RUNNER, micro_steps != last),
    }
    for rank in range(contents.ranks):
        parts[f"only rank {rank} counts: the other ranks are not added"] = ("parallel/fsdp.py", ranks == rank)
    fix = "add up the losses and gradients of all micro-steps and ranks"
    return [Hypothesis(cause, source, fix, right * mask) for cause, (source, mask) in parts.items()]


def _mean_weights(contents: BatchContents, sums: LossSums, group: Callable[[DocumentLocation], object]) -> np.ndarray:
    """1 / loss tokens of the group of each document."""
    keys = [None if place is None else group(place) for place in contents.places]
    totals: dict[object, float] = {}
    for key, count in zip(keys, sums.counts["right"], strict=True):
        totals[key] = totals.get(key, 0.0) + count
    return np.array([0.0 if key is None else 1.0 / max(1.0, totals[key]) for key in keys])
