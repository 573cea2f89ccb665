"""Bad steps: the loss or a gradient is NaN or infinite, or the loss is far above the recent ones (a spike).

All ranks judge a step by the same sums, before its update, so all of them act alike. `debug.on_nan` and
`debug.on_spike` say what happens then:

- stop: the run ends with exit code 5; weights and moments are those before the step.
- skip: the batch is left out. It is no step: weights, moments, random numbers, step number and learning rate stay as
  they are, and other data takes its place.
- rollback: the run goes on from its last checkpoint, and the data since then is left out.

Weights that were not finite when they were loaded end the run in any case.

With stop (and warn, for spikes) the device decides about the update, and the host reads the numbers when it has started
the next step, whose update then waits for the same decision: no step waits for the host. The other two read the numbers
of a step before its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torch import Tensor

from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.config.schema import DebugConfig
from torchstone.data.loader import StepBatch
from torchstone.errors import NumericalError
from torchstone.observe.console import Console
from torchstone.rng import set_rng_states
from torchstone.training.checks import WHAT_TO_TRY, non_finite_names
from torchstone.training.nan_report import describe_gradients, report_nan
from torchstone.training.run import Run
from torchstone.training.schedule import plan_schedule
from torchstone.training.step import StepResult, describe_numbers
from torchstone.training.step_rows import describe_rows, rows_of_step
from torchstone.training.stop import StopRequest
from torchstone.wording import list_first

# Losses that a spike is compared with, and the fewest of them.
WINDOW, MIN_LOSSES = 64, 16
# The standard deviation of a normal distribution, in median absolute deviations.
NORMAL_MAD = 1.4826
# The least standard deviation, as a share of the median: where the loss hardly varies, nothing else is a spike.
MIN_DEVIATION = 0.01
LOOK_AT_ROWS = (
    "look at these rows with torchstone inspect-data; if they are fine, try a lower --optim.learning_rate; "
    "--debug.on_spike skip leaves such batches out"
)
SKIP_THEM = "--debug.on_nan skip leaves such batches out"
MAX_NAMES = 3
# Full reports of a process; each repeats a step.
MAX_REPORTS = 3


# A loss above this multiple of both random guessing and the lowest recent loss means a damaged model.
DAMAGED = 2.0
# A lower loss may have no gradient left.
LEARNED = 0.01


@dataclass(frozen=True)
class ComputedStep:
    """A step whose gradients are computed. `loss_limit`: the largest loss that is no spike. `rng_states`: those at its
    start."""

    step: int
    batch: StepBatch
    result: StepResult
    loss_limit: float
    rng_states: Mapping[str, Tensor]


class RollBack(Exception):
    """The run must go on from its last checkpoint (None: from its start), with the data from sample `samples` on."""

    def __init__(self, reason: str, samples: int, run: Run) -> None:
        super().__init__(reason)
        self.samples, self.checkpoint, self.stop_request = samples, run.checkpoint, run.stop_request
        self.nan_reports = run.nan_reports
        # A limit that was found since the checkpoint.
        self.micro_batch_limit, self.oom_splits = run.progress.micro_batch_limit, run.progress.oom_splits


class Rollbacks:
    """What the next attempt must know about earlier ones."""

    def __init__(self, max_repeats: int, output_dir: Path) -> None:
        self.max_repeats, self.output_dir = max_repeats, output_dir
        # How often the run went back to the checkpoint that it last went back to.
        self.repeated = 0
        self.checkpoint: Path | None = None
        self.samples = 0
        self.stop_request: StopRequest | None = None
        self.nan_reports = self.oom_splits = 0
        self.micro_batch_limit: int | None = None

    def add(self, request: RollBack, console: Console) -> None:
        """Raises NumericalError if the run has gone back to this checkpoint often enough."""
        self.repeated = self.repeated + 1 if self.checkpoint == request.checkpoint else 1
        if self.repeated > self.max_repeats:
            raise NumericalError(
                f"{request}; going back to the same checkpoint {self.max_repeats} times has not helped "
                "(debug.max_bad_steps)",
                WHAT_TO_TRY,
            )
        self.checkpoint, self.samples, self.stop_request = request.checkpoint, request.samples, request.stop_request
        self.nan_reports = request.nan_reports
        self.micro_batch_limit, self.oom_splits = request.micro_batch_limit, request.oom_splits
        start = "the start of the run" if request.checkpoint is None else request.checkpoint
        console.warn(
            f"{request}; rolling back to {start} and continuing from sample {request.samples}; the data in between is "
            "skipped"
        )

    @property
    def resume(self) -> str | None:
        """What the next attempt resumes from, if not from what the config says: a checkpoint of its own."""
        is_own = self.checkpoint is not None and self.checkpoint.parent == self.output_dir / CHECKPOINTS
        return "auto" if is_own else None

    def apply(self, run: Run) -> None:
        """Makes a run that was built again go on after the data that is left out."""
        if self.stop_request is None:
            return
        # A signal may have come in the meantime.
        run.stop_request, run.nan_reports = self.stop_request, self.nan_reports
        progress = run.progress
        sampler = run.data.sampler(run.config, progress.samples)
        left_out = sampler.take(self.samples - progress.samples)
        progress.samples += len(left_out)
        progress.skipped_samples += len(left_out)
        progress.skipped_tokens += int(run.data.train.lengths[left_out].sum())
        # The checkpoint has those before it.
        progress.rollbacks += self.repeated
        progress.micro_batch_limit, progress.oom_splits = self.micro_batch_limit, self.oom_splits
        run.schedule = plan_schedule(run.config, run.data, progress)


def reads_numbers_first(debug: DebugConfig) -> bool:
    """Whether the numbers of a step are read before its update."""
    return bool({debug.on_nan, debug.on_spike} & {"skip", "rollback"})


def describe_damage(run: Run, computed: ComputedStep, learning_rate: float) -> str | None:
    """A warning if finite numbers show that training has destroyed the weights, else None."""
    loss, guessing = computed.result.loss, math.log(run.model.vocab_size)
    if loss > DAMAGED * max(guessing, min(run.progress.recent_losses, default=loss)):
        what = f"the loss is {loss:.1f}, and guessing any token gives {guessing:.1f}"
    elif computed.result.grad_norm == 0 and learning_rate > 0 and loss > LEARNED:
        what = f"the loss is {loss:.3f}, and all gradients are exactly 0: nothing is learned any more"
    else:
        return None
    return (
        f"step {computed.step}: {what}; a learning rate that is too high does this: try a lower --optim.learning_rate"
    )


def loss_limit(losses: Sequence[float], debug: DebugConfig) -> float:
    """The largest loss of the next step that is no spike: infinite, unless enough losses before it are known.

    Median and median absolute deviation, which a few spikes do not move.
    """
    if debug.on_spike == "off" or len(losses) < MIN_LOSSES:
        return math.inf
    center = median(losses)
    deviation = NORMAL_MAD * median(abs(loss - center) for loss in losses)
    return center + debug.spike_threshold * max(deviation, MIN_DEVIATION * center)


def remember_loss(run: Run, loss: float) -> None:
    """Records the loss of a step whose update was applied."""
    if run.config.debug.on_spike != "off":
        run.progress.recent_losses = [*run.progress.recent_losses, loss][-WINDOW - 1 :]


def max_loss_of_update(computed: ComputedStep, debug: DebugConfig) -> float:
    """The largest loss whose update the device applies."""
    return math.inf if debug.on_spike == "warn" else computed.loss_limit


def judge_step(run: Run, computed: ComputedStep) -> bool:
    """Whether a step may update (or, on a device, has updated) the weights; false if its batch is skipped. Raises
    NumericalError to stop, and RollBack. All ranks must call it, and have the same result."""
    result, debug, progress = computed.result, run.config.debug, run.progress
    is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    is_spike = is_finite and result.exceeds(computed.loss_limit)
    if is_finite and (not is_spike or debug.on_spike == "warn"):
        progress.bad_in_a_row = 0
        if is_spike:
            progress.loss_spikes += 1
            run.console.warn(f"{_describe_spike(run, computed)}; the update is applied")
        return True
    progress.bad_in_a_row += 1
    policy = debug.on_spike if is_spike else debug.on_nan
    text, advice = (_describe_spike(run, computed), LOOK_AT_ROWS) if is_spike else _describe_nan(run, computed)
    run.model.clear_gradients()
    if not is_spike:
        _check_loaded_weights(run, computed.step, text)
    if policy == "stop":
        raise NumericalError(f"{text}; its update was not applied", advice)
    if progress.bad_in_a_row > debug.max_bad_steps:
        raise NumericalError(
            f"{text}; more than {debug.max_bad_steps} bad batches in a row (debug.max_bad_steps)", WHAT_TO_TRY
        )
    batch = computed.batch
    if policy == "rollback":
        raise RollBack(text, batch.first_sample + batch.samples, run)
    progress.skipped_steps += 1
    progress.samples += batch.samples
    progress.skipped_samples += batch.samples
    progress.skipped_tokens += batch.tokens
    # An epoch now ends with data of the next one.
    run.schedule = plan_schedule(run.config, run.data, progress)
    set_rng_states(computed.rng_states, run.device)
    run.console.warn(f"{text}; its batch is skipped ({progress.skipped_steps} so far)")
    return False


def _check_loaded_weights(run: Run, step: int, text: str) -> None:
    """Raises if the weights of the first step, those that were loaded, are not finite: no other batch would help."""
    folder = run.weights_folder
    if folder is None or step != run.first_step:
        return
    weights = [(name, parameter.detach(), "") for name, parameter in run.model.named_parameters()]
    names = non_finite_names(run.runner, [each for each in weights if each[1].is_floating_point()])
    if names:
        folders = " or ".join(str(path) for path in (folder, run.config.tuning.adapter) if path is not None)
        raise NumericalError(
            f"{text}; its update was not applied",
            f"the weights in {folders} have NaN or infinite values: {list_first(names, MAX_NAMES)}; training "
            "cannot repair them: use another copy of the model",
        )


def _describe_spike(run: Run, computed: ComputedStep) -> str:
    return (
        f"step {computed.step}: loss {computed.result.loss:.4f} is a spike, more than {computed.loss_limit:.4f}; its "
        f"rows: {describe_rows(rows_of_step(run, computed.batch))}"
    )


def _describe_nan(run: Run, computed: ComputedStep) -> tuple[str, str]:
    """Reports the step, unless there were enough reports; returns what was found, and what to do."""
    text, advice = describe_numbers(computed.step, computed.result), f"{WHAT_TO_TRY}; {SKIP_THEM}"
    if run.nan_reports >= MAX_REPORTS:
        gradients = describe_gradients(run.runner, computed.result)
        return f"{text}{gradients}; not repeated to find the cause, as {MAX_REPORTS} steps were", advice
    run.nan_reports += 1
    summary, known = report_nan(run, computed.step, computed.batch, computed.result, computed.rng_states)
    return f"{text}; {summary}", known or advice
