"""Steps with bad numbers: a loss or gradient that is NaN or infinite, or a loss far above the recent ones (a spike).

Loss and gradient norm are sums over all ranks, so all ranks judge a step alike, before its update. `debug.on_nan` and
`debug.on_spike` say what happens then:

- stop: the run ends with exit code 5; weights and moments are those before the step.
- skip: the batch is dropped. It is no step: weights, moments, step number and learning rate stay as they are.
- rollback: the run goes on from its last checkpoint, and the data since then is left out, too.

With stop (and warn, for spikes) the device decides about the update, and the host reads the numbers when it has started
the next step, whose update then waits for the same decision: no step waits for the host. The other two read the numbers
of a step before its update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NoReturn

from torch import Tensor

from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.config.schema import Config, DebugConfig
from torchstone.data.loader import StepBatch
from torchstone.errors import NumericalError
from torchstone.observe.console import Console
from torchstone.training.checks import WHAT_TO_TRY
from torchstone.training.nan_dump import write_dump
from torchstone.training.nan_report import NanReport, banner, describe_origin, make_report
from torchstone.training.replay import clear_gradients
from torchstone.training.run import Run
from torchstone.training.schedule import plan_schedule
from torchstone.training.step import StepResult, describe_numbers
from torchstone.training.step_rows import describe_rows, indices_of_step

# Losses that a spike is compared with, and the fewest of them.
WINDOW, MIN_LOSSES = 64, 16
# The standard deviation of a normal distribution, in median absolute deviations.
NORMAL_MAD = 1.4826
# The least standard deviation, as a share of the median: a loss that hardly varies would make spikes of nothing.
MIN_DEVIATION = 0.01


@dataclass(frozen=True)
class ComputedStep:
    """A step whose gradients are computed. `loss_limit`: the largest loss that is no spike. `rng_states`: those at its
    start."""

    step: int
    batch: StepBatch
    result: StepResult
    loss_limit: float
    rng_states: list[Tensor]


class RollBack(Exception):
    """The run must go on from its last checkpoint, with the data from sample `samples` on."""

    def __init__(self, reason: str, samples: int, checkpoint: Path | None) -> None:
        super().__init__(reason)
        self.samples, self.checkpoint = samples, checkpoint


class Rollbacks:
    """How often a run has gone back, and to what."""

    def __init__(self, debug: DebugConfig) -> None:
        self.debug, self.count, self.repeated = debug, 0, 0
        # The checkpoint that it last went back to (None: the start), and the sample that it went on with.
        self.checkpoint: Path | None = None
        self.samples: int | None = None

    def add(self, request: RollBack, console: Console) -> None:
        """Raises NumericalError if the run has gone back to this checkpoint often enough."""
        is_same = self.count > 0 and self.checkpoint == request.checkpoint
        self.repeated = self.repeated + 1 if is_same else 1
        if self.repeated > self.debug.max_bad_steps:
            raise NumericalError(
                f"{request}; the run went back to the same checkpoint {self.repeated - 1} times "
                f"(debug.max_bad_steps {self.debug.max_bad_steps})",
                WHAT_TO_TRY,
            )
        self.checkpoint, self.samples, self.count = request.checkpoint, request.samples, self.count + 1
        start = "the start of the run" if request.checkpoint is None else request.checkpoint
        console.warn(
            f"{request}; back to {start}, and on from sample {request.samples}: the data before it is left out"
        )

    def build_config(self, config: Config) -> Config:
        """The config to build the run with: it resumes a checkpoint of its own, whatever it started from."""
        if self.checkpoint is None or self.checkpoint.parent != Path(config.output_dir) / CHECKPOINTS:
            return config
        return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))

    def apply(self, run: Run) -> None:
        """Makes a run that was built again go on after the data that is left out."""
        # The checkpoint has those before it.
        run.progress.rollbacks += self.repeated
        if self.samples is not None and run.checkpoint == self.checkpoint:
            run.progress.samples, run.progress.pending_metrics = self.samples, None
            run.schedule = plan_schedule(run.config, run.data, run.progress)


def reads_numbers_first(debug: DebugConfig) -> bool:
    """Whether the numbers of a step are read before its update."""
    return bool({debug.on_nan, debug.on_spike} & {"skip", "rollback"})


def loss_limit(losses: Sequence[float], debug: DebugConfig) -> float:
    """The largest loss of the next step that is no spike: infinite, unless enough losses before it are known.

    Median and median absolute deviation, which a few spikes do not move.
    """
    if debug.on_spike == "off" or len(losses) < MIN_LOSSES:
        return math.inf
    center = median(losses)
    deviation = NORMAL_MAD * median(abs(loss - center) for loss in losses)
    return center + debug.spike_threshold * max(deviation, MIN_DEVIATION * center)


def max_loss_of_update(computed: ComputedStep, debug: DebugConfig) -> float:
    """The largest loss whose update the device applies."""
    return math.inf if debug.on_spike == "warn" else computed.loss_limit


def may_update(run: Run, computed: ComputedStep) -> bool:
    """Judges a step on all ranks: whether it may update (or has updated) the weights, or is skipped. Raises
    NumericalError to stop, and RollBack."""
    result, debug = computed.result, run.config.debug
    is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    if is_finite and not result.exceeds(computed.loss_limit):
        run.progress.bad_in_a_row = 0
        return True
    text = describe_numbers(computed.step, result)
    if is_finite:
        text = f"step {computed.step}: loss {result.loss:.4f} is a spike, more than {computed.loss_limit:.4f}"
        policy, details = debug.on_spike, _rows_text(run, computed.batch)
    else:
        policy, details = debug.on_nan, _report_nan(run, computed)
    if is_finite and policy == "warn":
        run.progress.loss_spikes += 1
        run.console.warn(f"{text}; {details}; the update is applied")
        return True
    clear_gradients(run.runner)
    run.progress.bad_in_a_row += 1
    if policy == "stop" or run.progress.bad_in_a_row > debug.max_bad_steps:
        _stop(run, text, details, policy)
    if policy == "rollback":
        raise RollBack(f"{text}; {details}", computed.batch.first_sample + computed.batch.samples, run.checkpoint)
    run.progress.skipped_steps += 1
    run.progress.samples += computed.batch.samples
    # An epoch has fewer steps now.
    run.schedule = plan_schedule(run.config, run.data, run.progress)
    run.console.total = run.schedule.total_steps
    run.console.warn(f"{text}; {details}; its batch is skipped ({run.progress.skipped_steps} so far)")
    return False


def remember_loss(run: Run, loss: float) -> None:
    """Of a step whose update was applied."""
    if run.config.debug.on_spike != "off":
        run.progress.recent_losses = [*run.progress.recent_losses, loss][-WINDOW - 1 :]


def _stop(run: Run, text: str, details: str, policy: str) -> NoReturn:
    if policy == "stop":
        applied = "its update was not applied"
    else:
        count, limit = run.progress.bad_in_a_row, run.config.debug.max_bad_steps
        applied = f"{count} bad batches in a row are more than debug.max_bad_steps {limit}"
    raise NumericalError(f"{text}; {applied}", f"{details}; {WHAT_TO_TRY}")


def _report_nan(run: Run, computed: ComputedStep) -> str:
    """Prints the banner and writes the files; returns a summary."""
    result, batch = computed.result, computed.batch
    run.console.info(f"{describe_numbers(computed.step, result)}: repeating the step to find the first bad module")
    report = make_report(run, computed.step, batch, result, computed.rng_states)
    lines = banner(report, run.console.process)
    lines.append(f"Rows: {describe_rows(report.rows)}")
    # One by one, so that they are not indented.
    for line in [*lines, *_dump_lines(run, report, computed)]:
        run.console.info(line)
    names = report.names
    gradients = f"{len(names)} gradients are not finite, such as {', '.join(names[:3])}" if names else ""
    return "; ".join(text for text in (gradients, f"first bad module: {describe_origin(report)}") if text)


def _dump_lines(run: Run, report: NanReport, computed: ComputedStep) -> list[str]:
    try:
        header = {
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "bad_gradients": report.names,
            "first_bad_module": describe_origin(report),
            "rows": [list(row) for row in report.rows],
        }
        files = write_dump(run, header, computed.batch, computed.rng_states, report.gradients)
    except OSError as error:
        return [f"The tensors could not be written: {error}"]
    titles = ("Checkpoint saved", "Debug tensors saved")
    return ["", *(f"{title}: {file}" for title, file in zip(titles, files, strict=False))]


def _rows_text(run: Run, batch: StepBatch) -> str:
    indices = indices_of_step(run, batch)
    return f"its rows: {describe_rows(run.data.documents(run.data.train, indices, run.ctx.dp_rank, run.ctx.dims.dp))}"
