"""Does the model learn: one sample and a small batch by heart, and at the learning rate that is configured?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torchstone.data.loader import RunData
from torchstone.diagnosis.batch_contents import step_documents
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.checked_step import SelectedSamples, select_data, step_tokens
from torchstone.diagnosis.session import CONSTANT_RATE, Diagnosis, end_after
from torchstone.errors import NumericalError
from torchstone.models.decoder import HEAD
from torchstone.models.model import NativeModel
from torchstone.training.loop import train_loop
from torchstone.training.run import Callback, Run
from torchstone.training.step import compute_gradients, optimizer_step

# The range test: from the first learning rate to the last, by this factor each step.
FIRST_RATE, LAST_RATE, GROWTH = 1e-5, 10.0, 1.6
# The loss diverges when it has lost half of what it gained, and this much, and this share of what it was.
LOST_GAIN, MIN_RISE, MIN_SHARE = 0.5, 0.1, 0.1
# A learning rate this many times the one at which the loss diverges is no use; a smaller one is tried, for some steps.
TOO_LARGE, DIRECT_STEPS = 10.0, 12
# A warning below this share of it.
TOO_SMALL = 1e-5
# Memorizing: tokens of a sample, samples of the small batch, steps.
MAX_TOKENS, MIN_TOKENS, SMALL_BATCH, MAX_STEPS, FULL_STEPS = 64, 24, 4, 100, 400
# Learning rates that are tried, as shares of that at which the loss diverges.
RATE_SHARES, MAX_RATE = (0.1, 0.3, 0.03), 1e-2
# Seconds for each check without --full.
MAX_SECONDS = 30.0
# Steps and learning rate that find the best hidden states for a frozen head.
HEAD_STEPS, HEAD_RATE = 100, 0.1
# A loss below it cannot be halved in any useful sense.
KNOWN_BY_HEART = 1e-3


@dataclass(frozen=True)
class Goal:
    """When samples count as learned: a loss, and a share of the first one; above the lowest that is possible."""

    what: str
    samples: int
    loss: float
    share: float
    lowest: float = 0.0

    def is_reached(self, losses: list[float]) -> bool:
        first, last = losses[0] - self.lowest, losses[-1] - self.lowest
        return last < self.loss and last < max(self.share * first, KNOWN_BY_HEART)

    @property
    def limit(self) -> str:
        parts = [f"under {self.loss:g}"] if math.isfinite(self.loss) else []
        text = " and ".join([*parts, f"under {self.share:g} of its start"])
        return (
            text
            if self.lowest < 1e-3
            else f"{text}, above the {self.lowest:.3f} that a frozen head or a soft cap allows"
        )


# What LoRA and OSFT must reach at least.
ADAPTER_SHARE = 0.5
ONE_SAMPLE = Goal("one sample", 1, 0.1, 0.5)
FEW_SAMPLES = Goal(f"{SMALL_BATCH} samples", SMALL_BATCH, math.inf, 0.3)


def check_learning_rate(diagnosis: Diagnosis) -> Finding:
    diagnosis.require("batch", "loss")
    configured = diagnosis.config.optim.learning_rate
    if configured == 0:
        raise SkipCheck("optim.learning_rate is 0")
    divergence = divergence_rate(diagnosis)
    values = {"learning_rate": configured, "diverges_at": divergence}
    where = f"at {divergence:.1e}" if math.isfinite(divergence) else f"nowhere up to {LAST_RATE:g}"
    text = f"optim.learning_rate is {configured:g}, and the loss diverges {where}"
    if configured < divergence:
        finding = Finding("pass", text, f"below that, above {TOO_SMALL:g} of it", values=values)
        tried = min(divergence, LAST_RATE)
        if configured > TOO_SMALL * tried:
            return finding
        return finding.with_cause(
            f"weights hardly move: the loss does not diverge below {tried / configured:.0e} times this rate",
            "optim.learning_rate",
            f"try --optim.learning_rate {tried / 30:.0e}",
            status="warn",
        )
    losses = train_at(diagnosis, lambda _: configured, DIRECT_STEPS)
    is_bad = not losses[-1] < losses[0]
    text += f"; in {len(losses)} steps it goes from {losses[0]:.3f} to {losses[-1]:.3f}"
    return Finding(
        "fail" if is_bad or configured > TOO_LARGE * divergence else "warn", text, "below that",
        f"the learning rate is {configured / divergence:.0f} times the one at which the loss diverges",
        "optim.learning_rate", f"try --optim.learning_rate {divergence / 30:.0e}",
        values | {"first_loss": losses[0], "last_loss": losses[-1]},
    )  # fmt: skip


def divergence_rate(diagnosis: Diagnosis) -> float:
    """The learning rate, rising from step to step on one small batch, at which the loss gets worse again."""
    if diagnosis.divergence_rate is None:
        rates = list(_rates())
        losses = train_at(diagnosis, rates.__getitem__, len(rates), has_diverged)
        # A loss is that of the weights before its step, so the step before the last one was too large.
        diagnosis.divergence_rate = rates[max(0, len(losses) - 2)] if has_diverged(losses) else math.inf
    return diagnosis.divergence_rate


def has_diverged(losses: list[float]) -> bool:
    first, lowest = losses[0], min(losses)
    return not losses[-1] <= lowest + max(LOST_GAIN * (first - lowest), MIN_RISE, MIN_SHARE * first)


def train_at(
    diagnosis: Diagnosis,
    rate_of: Callable[[int], float],
    steps: int,
    should_stop: Callable[[list[float]], bool] = lambda losses: False,
) -> list[float]:
    """The losses of steps on one small batch, at the learning rate of each; the same on all ranks."""
    data, losses = small_data(diagnosis, SMALL_BATCH), list[float]()
    with diagnosis.trial(diagnosis.run, data, {}) as trial:
        trial.model.train()
        batch = next(iter(data.batches(trial.config, 0, len(data.train), trial.ctx.dp_rank, trial.ctx.dims.dp)))
        for step in range(steps):
            result = compute_gradients(trial.runner, batch, step + 1)
            is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
            losses.append(diagnosis.ctx.all_gather_object(result.loss if is_finite else math.inf)[0])
            if math.isinf(losses[-1]) or should_stop(losses):
                break
            max_norm = diagnosis.config.optim.max_grad_norm
            optimizer_step(trial.runner, trial.optimizer, result, step + 1, rate_of(step), max_norm)
    return losses


def _rates() -> Iterator[float]:
    rate = FIRST_RATE
    while rate <= LAST_RATE:
        yield rate
        rate *= GROWTH


def check_one_sample(diagnosis: Diagnosis) -> Finding:
    return memorize(diagnosis, ONE_SAMPLE)


def check_small_batch(diagnosis: Diagnosis) -> Finding:
    return memorize(diagnosis, FEW_SAMPLES)


def memorize(diagnosis: Diagnosis, goal: Goal) -> Finding:
    """Trains on a few samples until they are learned, at one learning rate after another; without --full, not long."""
    diagnosis.require("batch", "loss", "update")
    data = small_data(diagnosis, goal.samples)
    targets = np.concatenate([each.shifted(1) for each in step_documents(data, range(len(data.train)))])
    lowest = lowest_loss(diagnosis, targets[targets >= 0])
    goal = replace(goal, lowest=lowest or 0.0)
    recorder = LossRecorder(goal, math.inf if diagnosis.is_full else MAX_SECONDS)
    losses, rate, is_late = list[float](), 0.0, False
    for each in memorizing_rates(divergence_rate(diagnosis)):
        attempt = _train(diagnosis, data, each, recorder)
        if not losses or attempt[-1] < losses[-1]:
            losses, rate = attempt, each
        is_late = diagnosis.ctx.any_rank(recorder.is_late)
        if goal.is_reached(losses) or is_late:
            break
    values = {"first_loss": losses[0], "last_loss": losses[-1], "steps": float(len(losses)), "learning_rate": rate}
    text = f"{goal.what}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps at learning rate {rate:.1e}"
    if diagnosis.run.model.tuning is not None and not goal.is_reached(losses):
        # Adapters of a few linears may not have what it takes to go further.
        goal = replace(goal, loss=math.inf, share=ADAPTER_SHARE)
    finding = Finding("pass", text, goal.limit, values=values)
    if goal.is_reached(losses):
        return finding
    if is_late:
        cause = f"{MAX_SECONDS:g} s were not enough"
        return finding.with_cause(cause, "the speed of this device", "--full has no limit of time", "warn")
    cause = _why_not_learned(losses)
    if lowest is None and cause == NOT_BY_HEART:
        raise SkipCheck(f"{text}; what the frozen parts of this model allow is not known")
    # A loss that has halved may need more steps than there are here.
    is_partial = cause == NOT_BY_HEART and losses[-1] <= losses[0] / 2
    return finding.with_cause(
        cause,
        "the backward pass and the optimizer; tuning.method decides what is trained",
        "if gradients, frozen and dtypes pass, --full takes more steps"
        if is_partial
        else "look at gradients, frozen and dtypes first, then at optim.*",
        status="warn" if is_partial else "fail",
    )


def lowest_loss(diagnosis: Diagnosis, targets: Sequence[int] | np.ndarray) -> float | None:
    """The lowest mean loss of these targets that what is frozen allows; 0 if nothing limits it, None if unknown.

    With LoRA or OSFT the last norm and the head stay as they are: hidden states of one length times a frozen head give
    logits of a limited size. In a pretrained model they are large enough for any target; in a random one they are not.
    So the frozen head gets the best hidden states, found by gradient descent. Soft-capped logits have a limit of their
    own.
    """
    model = diagnosis.run.model
    if not isinstance(model, NativeModel):
        return None if model.tuning is not None else 0.0
    if model.tuning is None or model.tuning.is_trained(HEAD):
        softcap = model.decoder_config.logit_softcap
        return 0.0 if softcap is None else math.log1p((model.vocab_size - 1) * math.exp(-2 * softcap))
    # `reference_run` is not sharded.
    decoder = diagnosis.reference_run.model.module
    labels = torch.as_tensor(np.asarray(targets, dtype=np.int64), device=decoder.head.weight.device)
    # The row of a target in the head is near the best hidden state.
    hidden_ND = decoder.head.weight.detach()[labels].float().clone().requires_grad_()
    optimizer = torch.optim.Adam([hidden_ND], lr=HEAD_RATE * hidden_ND.detach().std().item())
    loss = torch.zeros(())
    for _ in range(HEAD_STEPS):
        loss = F.cross_entropy(decoder.compute_logits(decoder.norm(hidden_ND[None]))[0], labels)
        (hidden_ND.grad,) = torch.autograd.grad(loss, [hidden_ND])
        optimizer.step()
    return loss.item()


def memorizing_rates(divergence: float) -> list[float]:
    return list(dict.fromkeys(min(MAX_RATE, share * divergence) for share in RATE_SHARES))


def _train(diagnosis: Diagnosis, data: RunData, rate: float, recorder: LossRecorder) -> list[float]:
    """The losses of the training loop at a constant learning rate, the same on all ranks."""
    steps = FULL_STEPS if diagnosis.is_full else MAX_STEPS
    settings = {"optim.learning_rate": rate, **CONSTANT_RATE, **end_after(steps)}
    recorder.losses = []
    with diagnosis.trial(diagnosis.run, data, settings) as trial:
        try:
            train_loop(trial, [recorder])
        except NumericalError:
            recorder.losses.append(math.inf)
    return diagnosis.ctx.all_gather_object(recorder.losses)[0]


NOT_BY_HEART = "the loss falls, but not far enough in these steps: too little is trained, or gradients are wrong"


def _why_not_learned(losses: list[float]) -> str:
    first, last = losses[0], losses[-1]
    if abs(last - first) <= 1e-4 * abs(first):
        return (
            "the loss does not change at all: the optimizer's update does not reach the weights that are computed with"
        )
    if last > first or not math.isfinite(last):
        return "the loss rises: gradients or updates have the wrong sign, or every rate that was tried is too large"
    return NOT_BY_HEART


def small_data(diagnosis: Diagnosis, number: int) -> RunData:
    """The first samples with labels, cut to a few tokens, in steps that have all of them. Of packed text one document
    each: after equal beginnings, such as BOS, no model can know which document goes on."""
    run = diagnosis.run
    room = MAX_TOKENS if diagnosis.is_full else min(MAX_TOKENS, max(MIN_TOKENS, step_tokens(run) // SMALL_BATCH))
    samples = SelectedSamples(diagnosis.step.data.train, diagnosis.step.labelled[:number], room, one_document=True)
    samples = SelectedSamples(samples, np.flatnonzero(samples.loss_tokens > 0))
    if not len(samples):
        raise SkipCheck(f"no sample has a label among {room} tokens")
    rows = diagnosis.step.data.batch_sizes.micro_batch_rows
    return select_data(diagnosis.step.data, samples, len(samples), rows, run.ctx.dims.dp)


class LossRecorder(Callback):
    """The losses of all steps; ends the run when the goal is reached, or when the steps took too long."""

    def __init__(self, goal: Goal, max_seconds: float) -> None:
        self.goal, self.max_seconds, self.seconds, self.losses = goal, max_seconds, 0.0, list[float]()

    @property
    def is_late(self) -> bool:
        return self.seconds > self.max_seconds

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])
        # The first step may compile.
        self.seconds += metrics["step_s"] if len(self.losses) > 1 else 0.0
        if self.goal.is_reached(self.losses):
            run.stop("learned")
        elif self.is_late:
            run.stop("too late")
