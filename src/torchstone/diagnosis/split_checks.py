"""Do loss and gradients stay the same however the rows of a step are split and computed: packed or padded, in one
micro-batch or many, on one rank or several, in the last, partial step of an epoch?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from torchstone.data.collate import collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import RunData, StepBatch
from torchstone.diagnosis.batch_contents import read_contents, step_documents
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.checked_step import SelectedSamples, select_data
from torchstone.diagnosis.gradients import (
    EXACT_GRADIENT_LIMIT,
    GradientError,
    largest_difference,
    run_micro_batches,
    take_gradients,
)
from torchstone.diagnosis.hypotheses import find_causes, list_hypotheses
from torchstone.diagnosis.isolation import short_documents
from torchstone.diagnosis.loss_checks import EXACT_LIMIT, agreement, worst_of_ranks, wrong_divisors
from torchstone.diagnosis.reference import LossSums, relative
from torchstone.diagnosis.session import Diagnosis, end_after
from torchstone.training.loop import train_loop
from torchstone.training.run import Callback, Run
from torchstone.training.step import compute_gradients

# How many ranks' shares each rank computes.
VIRTUAL_RANKS = 2
EPOCH_END = "data/loader.py: RunData.batches, training/schedule.py, parallel/runner.py"


def check_packing(diagnosis: Diagnosis) -> Finding:
    diagnosis.require("batch", "loss", "gradients")
    exact = diagnosis.fp32_run
    if not exact.data.packed:
        raise SkipCheck("data.packing is false: every row has one document")
    documents = short_documents(diagnosis)
    if len(documents) < 2:
        raise SkipCheck("a row of data.context_length tokens has no room for two documents, or there is only one")
    sequences = [TokenSequence(document.ids, document.labels) for document in documents]
    shapes, pad_id = exact.data.shapes, exact.data.pad_id
    loss_tokens = sum(sequence.loss_tokens for sequence in sequences) * exact.ctx.dims.dp
    exact.model.train(False)
    losses, gradients = [], []
    for rows in ([sequences], [[sequence] for sequence in sequences]):
        losses.append(run_micro_batches(exact, [collate(rows, pad_id, shapes)], loss_tokens))
        gradients.append(take_gradients(exact))
    return _compare(
        diagnosis, f"{len(documents)} documents in one row and in rows of their own", losses,
        largest_difference(exact, *gradients),
        "a packed document is computed differently from one alone: other documents, positions or padding reach it",
        "data.packing, model.attention; models/attention.py: build_masks", "see documents; or use --data.packing false",
    )  # fmt: skip


def check_accumulation(diagnosis: Diagnosis) -> Finding:
    diagnosis.require("batch", "loss", "gradients")
    exact, step = diagnosis.fp32_run, diagnosis.step
    lengths = step.data.train.lengths[step.indices]
    has_rows = step.data.batch_sizes.micro_batch_rows is not None
    sizes = (-(-len(lengths) // exact.ctx.dims.dp), 1) if has_rows else (int(lengths.sum()), int(lengths.max()))
    exact.model.train(False)
    losses, gradients, counts = [], [], []
    for size in sizes:
        data = replace(step.data)
        data.set_micro_batch(size, exact.ctx.dims.dp)
        batch = diagnosis.batch(exact, data)
        counts.append(len(batch.micro_batches))
        losses.append(compute_gradients(exact.runner, batch, 1).loss)
        gradients.append(take_gradients(exact))
    if counts[0] == counts[1]:
        raise SkipCheck(f"the step has {counts[0]} micro-batch on each rank, whatever its size")
    return _compare(
        diagnosis, f"{counts[0]} and {counts[1]} micro-steps for the same samples", losses,
        largest_difference(exact, *gradients),
        _why_accumulation(diagnosis, losses), "parallel/runner.py: Runner.forward_backward, data/batch_sizes.py",
        "divide the sum of all token losses once, by the loss tokens of the whole step",
    )  # fmt: skip


def _why_accumulation(diagnosis: Diagnosis, losses: list[float]) -> str:
    sums = diagnosis.loss_sums
    wrong = [loss for loss in losses if relative(loss, sums.loss) > EXACT_LIMIT]
    if len(wrong) == 1:
        right = "many" if wrong[0] == losses[0] else "one"
        return f"the loss depends on the number of micro-steps; with {right} it is right: see loss"
    return "the loss or its gradients depend on the number of micro-steps"


def check_world_size(diagnosis: Diagnosis) -> Finding:
    """Splits the step over more ranks than there are; every rank computes the shares of several, one after another."""
    diagnosis.require("batch", "loss", "gradients")
    exact, step, dp = diagnosis.fp32_run, diagnosis.step, diagnosis.ctx.dims.dp
    exact.model.train(False)
    batch = diagnosis.batch(exact)
    losses = [run_micro_batches(exact, batch.micro_batches, batch.loss_tokens), 0.0]
    gradients: list[dict[str, Tensor]] = [take_gradients(exact), {}]
    batches, ranks = list[StepBatch](), VIRTUAL_RANKS * dp
    for share in range(VIRTUAL_RANKS):
        rank = exact.ctx.dp_rank * VIRTUAL_RANKS + share
        batch = step.data.step_batch(step.data.train, step.indices, 0, rank, ranks)
        batches.append(batch)
        losses[1] += run_micro_batches(exact, batch.micro_batches, batch.loss_tokens)
        # Added up here: a pipeline sums tied gradients at the end of each step.
        for name, gradient in take_gradients(exact).items():
            gradients[1][name] = gradients[1].get(name, 0.0) + gradient
    cause = wrong_divisors(diagnosis, batches, ranks)
    return _compare(
        diagnosis, f"the step on {dp} and on {ranks} ranks", losses, largest_difference(exact, *gradients),
        cause or "rows are lost or repeated when they are divided among the ranks",
        "data/loader.py: RunData.step_batch, StepBatch.loss_tokens",
        "every rank must divide by the loss tokens of all ranks, and no row may be lost or repeated",
    )  # fmt: skip


def check_last_step(diagnosis: Diagnosis) -> Finding:
    """Trains an epoch of two full steps and a partial one, with a learning rate of 0, by the training loop itself."""
    diagnosis.require("batch", "loss")
    step, dp = diagnosis.step, diagnosis.ctx.dims.dp
    size = len(step.labelled)
    samples = SelectedSamples(step.data.train, np.resize(step.labelled, 2 * size + max(1, size // 2)))
    data = select_data(step.data, samples, size, step.data.batch_sizes.micro_batch_rows, dp)
    settings = {"optim.learning_rate": 0.0, **end_after(epochs=1.0)}
    order = data.sampler(diagnosis.config).take(len(samples))
    parts, recorder = np.split(order, [size, 2 * size]), StepRecorder()
    expected = [diagnosis.reference.losses(step_documents(data, part)) for part in parts]
    with diagnosis.trial(diagnosis.fp32_run, data, settings) as trial, in_eval_mode(trial):
        train_loop(trial, [recorder])
    taken = [int(metrics["samples"]) for metrics in recorder.metrics]
    text = f"an epoch of {len(samples)} samples in steps of {' and '.join(map(str, taken)) or 'none'}"
    if taken != [len(part) for part in parts]:
        lost = len(samples) - sum(taken)
        cause = f"the last, partial step of an epoch is dropped: {lost} samples are never trained on"
        return Finding(
            "fail", text, f"steps of {' and '.join(str(len(part)) for part in parts)}",
            cause if lost > 0 else "the epoch does not end with its last sample", EPOCH_END,
            "end an epoch with a smaller step", {"lost_samples": float(lost)},
        )  # fmt: skip
    losses = [
        worst_of_ranks(diagnosis, metrics["loss"], sums.loss)
        for metrics, sums in zip(recorder.metrics, expected, strict=True)
    ]
    errors = [relative(loss, sums.loss) for loss, sums in zip(losses, expected, strict=True)]
    values = {"error_full": max(errors[:-1]), "error_partial": errors[-1], "limit": EXACT_LIMIT}
    is_right = max(errors) <= EXACT_LIMIT
    text = f"{text}: losses and definition {agreement(is_right, max(errors))}"
    finding = Finding("pass", text, f"{EXACT_LIMIT:g}", values=values)
    if is_right:
        return finding
    first = next(number for number, error in enumerate(errors) if error > EXACT_LIMIT)
    if first < len(parts) - 1:
        next_step = "compare the samples of each step with the sampler's (data/sampler.py)"
        return finding.with_cause(_why_full_step(diagnosis, losses, first), EPOCH_END, next_step)
    cause = _why_last_step(diagnosis, data, first * size, parts[-1], losses[-1], expected[-1])
    next_step = "divide by the loss tokens that the step has, not by those of a full one"
    return finding.with_cause(cause, EPOCH_END, next_step)


def _why_full_step(diagnosis: Diagnosis, losses: list[float], number: int) -> str:
    if any(relative(losses[number], earlier) <= EXACT_LIMIT for earlier in losses[:number]):
        return f"step {number + 1} has the samples of an earlier step: the loop does not advance through the data"
    return f"the loss of step {number + 1}, a full one, is wrong in the training loop, and right by itself"


def _why_last_step(
    diagnosis: Diagnosis, data: RunData, start: int, part: np.ndarray, loss: float, sums: LossSums
) -> str:
    ctx, end = diagnosis.ctx, len(data.train)
    batch = next(iter(data.batches(diagnosis.fp32_run.config, start, end, ctx.dp_rank, ctx.dims.dp)))
    contents = read_contents(step_documents(data, part), batch.micro_batches, ctx)
    causes = find_causes(list_hypotheses(contents, sums, diagnosis.contents.micro_steps), loss, sums, EXACT_LIMIT)
    known = " or: ".join(each.cause for each in causes) if 0 < len(causes) <= 2 else "no known mistake explains it"
    return contents.problem or known


class StepRecorder(Callback):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.metrics.append(dict(metrics))


@contextmanager
def in_eval_mode(run: Run) -> Iterator[None]:
    """The model computes without dropout, whatever the training loop sets."""
    run.model.train(False)
    keep: Callable[..., None] = lambda mode=True: None  # noqa: E731
    run.model.train = keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        del run.model.train


def _compare(
    diagnosis: Diagnosis,
    what: str,
    losses: list[float],
    gradient: GradientError,
    cause: str,
    source: str,
    next_step: str,
) -> Finding:
    """The finding of a comparison of two ways to compute the same loss and gradients."""
    other = worst_of_ranks(diagnosis, losses[1], losses[0])
    error = relative(other, losses[0])
    values = {"loss": losses[0], "other_loss": other, "error": error, "gradient_error": gradient.error}
    limit = f"{EXACT_LIMIT:g}, gradients {EXACT_GRADIENT_LIMIT:g}"
    is_right = error <= EXACT_LIMIT and gradient.error <= EXACT_GRADIENT_LIMIT
    text = f"{what}: losses {agreement(is_right, error)}, gradients {agreement(is_right, gradient.error)}"
    finding = Finding("pass", text, limit, values=values)
    return finding if is_right else finding.with_cause(cause, source, next_step)
