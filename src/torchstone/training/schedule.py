"""When a run ends, validates and saves, in optimizer steps and samples.

The order of the samples is known before the first step, so tokens can be counted ahead. Every limit becomes a number of
steps, which the learning-rate schedule and the ETA need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchstone.config.schema import CheckpointConfig, Config, resolve_save_minutes
from torchstone.data.loader import RunData
from torchstone.errors import DataError
from torchstone.training.state import Progress
from torchstone.wording import list_first

DRAWS_PER_CHUNK = 1 << 16
# Samples that are checked for masked steps before the first step: about a second.
MAX_CHECKED_DRAWS = 1 << 22
MAX_ROWS_SHOWN = 5
# (step, samples)
StepAndSamples = tuple[int, int]


@dataclass(frozen=True)
class Interval:
    """Something that happens every n steps, samples or seconds, and perhaps at the end of the run."""

    every_steps: int | None = None
    every_samples: tuple[float, ...] = ()
    at_end: bool = False
    # The clock of rank 0 decides; neither `count` nor the ETA includes it.
    every_seconds: float | None = None

    def count(self, start: StepAndSamples, end: StepAndSamples) -> int:
        """How many times it happens after `start` and up to `end`."""
        counts = [0] if self.every_steps is None else [_multiples(start[0], end[0], self.every_steps)]
        return max(counts + [_multiples(start[1], end[1], every) for every in self.every_samples])


@dataclass(frozen=True)
class TrainingSchedule:
    """The step and the sample at which the run ends (None: never), and what happens in between."""

    total_steps: int | None
    total_samples: int | None
    batch_size: int
    validation: Interval = Interval()
    checkpoint: Interval = Interval()
    # Validations without an improvement that end the run.
    patience: int | None = None

    def is_done(self, progress: Progress) -> bool:
        return self._is_at_end(progress) or self.early_stop_reason(progress) is not None

    def early_stop_reason(self, progress: Progress) -> str | None:
        """Why the run ends before its last step, from counters that are the same on all ranks and in a resumed run."""
        if self.patience is None or progress.stale_validations < self.patience or self._is_at_end(progress):
            return None
        return (
            f"the validation loss has not improved in {progress.stale_validations} validations (training.patience "
            f"{self.patience}): the best is {progress.best_loss:.4f}, after step {progress.best_step}"
        )

    def _is_at_end(self, progress: Progress) -> bool:
        return self.total_steps is not None and progress.step >= self.total_steps

    def is_due(self, interval: Interval, progress: Progress, step_samples: int, is_final_step: bool) -> bool:
        """Whether it is due after a step of `step_samples` samples, which `progress` includes."""
        samples = progress.trained_samples
        before = (progress.step - 1, samples - step_samples)
        return interval.count(before, (progress.step, samples)) > 0 or (interval.at_end and is_final_step)

    def end(self, progress: Progress) -> StepAndSamples:
        """The last step and sample; only for a run that ends."""
        assert self.total_steps is not None
        samples = progress.samples + (self.total_steps - progress.step) * self.batch_size
        return self.total_steps, samples if self.total_samples is None else min(samples, self.total_samples)

    def count_left(self, interval: Interval, progress: Progress) -> int:
        """How many more times it happens in a run that ends, for the ETA; at most once per step."""
        end = (self.end(progress)[0], self.end(progress)[1] - progress.skipped_samples)
        steps_left = end[0] - progress.step
        before_last = (end[0] - 1, end[1] - self.batch_size)
        only_at_end = interval.at_end and steps_left > 0 and interval.count(before_last, end) == 0
        start = (progress.step, progress.trained_samples)
        return min(interval.count(start, end), steps_left - only_at_end) + only_at_end


def plan_schedule(config: Config, data: RunData, progress: Progress) -> TrainingSchedule:
    """Returns the schedule of a run. Finished steps keep the batch size they had, even if it has changed since."""
    steps, samples = _run_length(config, data, progress)
    training, checkpoint = config.training, config.checkpoint
    validation = Interval()
    if data.validation:
        every = _in_samples(training.validate_every_samples, training.validate_every_epochs, data)
        validation = Interval(training.validate_every_steps, every, training.validate_at_end)
    every = _in_samples(checkpoint.every_samples, checkpoint.every_epochs, data)
    minutes = resolve_save_minutes(checkpoint)
    saving = Interval(checkpoint.every_steps, every, checkpoint.at_end, None if minutes is None else 60 * minutes)
    batch_size = data.batch_sizes.global_batch_size
    return TrainingSchedule(steps, samples, batch_size, validation, saving, training.patience)


def describe_saving(checkpoint: CheckpointConfig) -> str:
    """When a run saves and what it keeps, in words: `saves every 30 minutes and at the end, keeping 2`."""
    units = {
        "steps": checkpoint.every_steps,
        "samples": checkpoint.every_samples,
        "epochs": checkpoint.every_epochs,
        "minutes": resolve_save_minutes(checkpoint),
    }
    counts = {unit: int(n) if n == int(n) else n for unit, n in units.items() if n is not None}
    times = [f"every {unit[:-1]}" if n == 1 else f"every {n:,} {unit}" for unit, n in counts.items()]
    times += ["after every best validation"] if checkpoint.save_best else []
    times += ["at the end"] if checkpoint.at_end else []
    when = " and ".join([", ".join(times[:-1]), times[-1]] if len(times) > 1 else times) or "only if a signal stops it"
    kept = "all" if checkpoint.keep_last is None else str(checkpoint.keep_last)
    best = " and the best" if checkpoint.save_best and checkpoint.keep_last is not None else ""
    return f"saves {when}, keeping {kept}{best}"


def check_loss_tokens(config: Config, data: RunData, schedule: TrainingSchedule, progress: Progress) -> None:
    """Raises DataError if a step of the run has only masked labels: it would end the run there.

    Only the first MAX_CHECKED_DRAWS samples are checked here; a later step is checked when it is computed.
    """
    loss_tokens, size = data.train.loss_tokens, schedule.batch_size
    if loss_tokens.all():
        return
    sampler = data.sampler(config, progress.samples)
    end = progress.samples + max(1, MAX_CHECKED_DRAWS // size) * size
    end = end if schedule.total_steps is None else min(end, schedule.end(progress)[1])
    step = progress.step
    steps_per_chunk = max(1, DRAWS_PER_CHUNK // size)
    while sampler.consumed_samples < end:
        samples = sampler.take(min(steps_per_chunk * size, end - sampler.consumed_samples))
        masked = np.flatnonzero(np.add.reduceat(loss_tokens[samples], np.arange(0, len(samples), size)) == 0)
        if len(masked):
            first = int(masked[0])
            raise masked_step_error(data, step + first + 1, samples[first * size : (first + 1) * size])
        step += len(samples) // size


def masked_step_error(data: RunData, step: int, samples: np.ndarray) -> DataError:
    rows = [data.train.origin(int(sample)) for sample in samples]
    return DataError(
        f"step {step} has no loss tokens: all labels of its {len(samples)} samples are masked "
        f"({list_first(rows, MAX_ROWS_SHOWN)})",
        "look at these rows with torchstone inspect-data and leave them out, or use a larger "
        f"--training.global_batch_size than {data.batch_sizes.global_batch_size}",
    )


def _run_length(config: Config, data: RunData, progress: Progress) -> tuple[int | None, int | None]:
    """The last step, and the last sample if epochs or tokens limit the run."""
    training = config.training
    if training.mode == "infinite":
        return None, None
    batch_size = data.batch_sizes.global_batch_size
    sample_limits = []
    if training.max_tokens is not None:
        # What was left out is drawn besides.
        tokens = training.max_tokens + progress.skipped_tokens
        needed = max(0, _samples_for_tokens(tokens, config, data) - progress.samples)
        sample_limits.append(progress.samples + -(-needed // batch_size) * batch_size)
    if training.max_epochs is not None or (training.max_steps is None and not sample_limits):
        samples = max(1, round((training.max_epochs or 1) * len(data.train)))
        sample_limits.append(samples + progress.skipped_samples)
    last_sample = min(sample_limits, default=None)
    step_limits = [] if training.max_steps is None else [training.max_steps]
    if last_sample is not None:
        step_limits.append(progress.step + -(-max(0, last_sample - progress.samples) // batch_size))
    return min(step_limits), last_sample


def _samples_for_tokens(tokens: int, config: Config, data: RunData) -> int:
    """The number of samples to draw for at least `tokens` tokens. Without weights all epochs have the same tokens."""
    sampler, lengths = data.sampler(config), data.train.lengths
    if lengths.min() == lengths.max():
        # Rows of packed text: no need to draw billions of them.
        return -(-tokens // int(lengths[0]))
    tokens_per_epoch = int(lengths.sum())
    epochs, tokens_left = (0, tokens) if data.weights else divmod(tokens, tokens_per_epoch)
    sampler.consumed_samples = epochs * sampler.size
    while tokens_left > 0:
        cumulative = np.cumsum(lengths[sampler.take(DRAWS_PER_CHUNK)])
        if cumulative[-1] >= tokens_left:
            return sampler.consumed_samples - DRAWS_PER_CHUNK + int(np.searchsorted(cumulative, tokens_left)) + 1
        tokens_left -= int(cumulative[-1])
    return sampler.consumed_samples


def _in_samples(samples: int | None, epochs: float | None, data: RunData) -> tuple[float, ...]:
    intervals = (samples, None if epochs is None else epochs * len(data.train))
    return tuple(interval for interval in intervals if interval is not None)


def _multiples(start: float, end: float, every: float) -> int:
    """How many multiples of `every` are in (start, end]. The tolerance absorbs the rounding of epochs such as 0.1."""
    return int(end / every + 1e-9) - int(start / every + 1e-9)
