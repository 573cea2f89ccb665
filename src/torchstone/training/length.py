"""How long a run is: every limit that is given, as optimizer steps, before the first one is made; and what is left.

Tokens can be counted ahead because the order of the samples is known. So every mode has its number of steps, the
schedule knows its end, and the ETA means something: the steps after which a validation or a save is due are listed once
when a run begins (eight bytes each), and what is left of them is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchstone.config.schema import Config, TrainingConfig
from torchstone.data.loader import RunData
from torchstone.observe.eta import Eta
from torchstone.training.state import Progress

DRAWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class Length:
    """The step at which the run ends, and the sample, where epochs or tokens say so; None where nothing does."""

    steps: int | None
    samples: int | None


def run_length(training: TrainingConfig, data: RunData, shuffle: bool, progress: Progress) -> Length:
    """Steps already made count as they were made, also where the batch size has changed since."""
    if training.mode == "infinite":
        return Length(None, None)
    size, per_step = len(data.train), data.batching.global_batch_size
    ends = []
    if training.max_tokens is not None:
        needed = max(0, _samples_for(training.max_tokens, data, training.seed, shuffle) - progress.samples)
        ends.append(progress.samples + -(-needed // per_step) * per_step)
    if training.max_epochs is not None or (training.max_steps is None and not ends):
        ends.append(max(1, round((training.max_epochs or 1) * size)))
    last_sample = min(ends, default=None)
    limits = [] if training.max_steps is None else [training.max_steps]
    if last_sample is not None:
        limits.append(progress.step + -(-max(0, last_sample - progress.samples) // per_step))
    return Length(min(limits), last_sample)


def _samples_for(tokens: int, data: RunData, seed: int, shuffle: bool) -> int:
    """Samples after which at least `tokens` tokens have been seen. Without weights every whole epoch has the same."""
    sampler = data.sampler(seed, shuffle)
    per_epoch = int(data.train.lengths.sum())
    epochs, rest = (0, tokens) if data.weights else divmod(tokens, per_epoch)
    sampler.drawn = epochs * sampler.size
    while rest > 0:
        seen = np.cumsum(data.train.lengths[sampler.take(DRAWS_AT_A_TIME)])
        if seen[-1] >= rest:
            return sampler.drawn - DRAWS_AT_A_TIME + int(np.searchsorted(seen, rest)) + 1
        rest -= int(seen[-1])
    return sampler.drawn


def crossed(before: float, after: float, every: float | None) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return every is not None and int(after / every + 1e-9) > int(before / every + 1e-9)


@dataclass(frozen=True)
class Every:
    """When something is due: after so many steps, samples, passes over the data, and at the end."""

    steps: int | None = None
    samples: int | None = None
    epochs: float | None = None
    at_end: bool = False


def due_steps(every: Every, progress: Progress, length: Length, per_step: int, size: int) -> np.ndarray:
    """The steps to come after which `crossed` finds `every` due, each once, in order; none where the run has no end.

    A step draws `per_step` of the `size` samples, the last one what is left.
    """
    if length.steps is None or progress.step >= length.steps:
        return np.empty(0, dtype=np.int64)
    last = _last_sample(progress, length, per_step)
    found = [np.array([length.steps] if every.at_end else [], dtype=np.int64)]
    if every.steps is not None:
        found.append(np.arange(progress.step // every.steps + 1, length.steps // every.steps + 1) * every.steps)
    for samples in (every.samples, None if every.epochs is None else every.epochs * size):
        if samples is None:
            continue
        first, stop = int(progress.samples / samples + 1e-9) + 1, int(last / samples + 1e-9) + 1
        if samples > per_step:
            # As `crossed` does: a multiple counts as reached a trifle before it, for epochs such as 0.1.
            away = (np.arange(first, stop) - 1e-9) * samples - progress.samples
            found.append(progress.step + np.ceil(away / per_step).astype(np.int64))
        else:
            # Every whole step reaches at least one; the last one may be too small to.
            partial = length.steps - 1 if (last - progress.samples) % per_step else length.steps
            found.append(np.arange(progress.step + 1, partial + 1))
            before = progress.samples + (partial - progress.step) * per_step
            found.append(np.array([length.steps] if crossed(before, last, samples) else [], dtype=np.int64))
    return np.unique(np.concatenate(found))


class Outlook:
    """What is still to come of a run, and how long that takes, from what `eta` was told."""

    def __init__(self, config: Config, data: RunData, length: Length, progress: Progress) -> None:
        self._length, self._weighted = length, bool(data.weights)
        self._size, self._per_step = len(data.train), data.batching.global_batch_size
        self._epoch_tokens = int(data.train.lengths.sum())
        self.eta = Eta(0.0 if data.validation is None else float(data.validation.lengths.sum()))
        when, kept = config.training, config.checkpoint
        validate = Every(
            when.validate_every_steps, when.validate_every_samples, when.validate_every_epochs, when.validate_at_end
        )
        save = Every(kept.every_steps, kept.every_samples, kept.every_epochs, kept.at_end)
        self._validations = self._due(validate if data.validation is not None else Every(), progress)
        self._saves = self._due(save, progress)
        # Those after which only a loss that is the best so far is saved.
        self._chances = np.setdiff1d(self._validations, self._saves if kept.save_best else self._validations)
        self._validated = self._improved = 0

    def validated(self, seconds: float, improved: bool) -> None:
        self.eta.validation(seconds)
        self._validated += 1
        self._improved += improved

    def seconds_left(self, progress: Progress) -> float | None:
        """Asked after a step and its validation, before it is saved. None where there is no end, or no pace yet."""
        if self._length.steps is None:
            return None
        step = progress.step
        share = self._improved / self._validated if self._validated else 1.0
        now = progress.best_step == step and step in self._chances
        saves = _from(self._saves, step) + share * _from(self._chances, step + 1) + now
        return self.eta.left(self._tokens_left(progress), _from(self._validations, step + 1), saves)

    def _due(self, every: Every, progress: Progress) -> np.ndarray:
        return due_steps(every, progress, self._length, self._per_step, self._size)

    def _tokens_left(self, progress: Progress) -> float:
        """An epoch has each sample once: what it has not seen yet, the rest of it has. Not so where sources are mixed
        by weights: there it goes on as it went."""
        samples = _last_sample(progress, self._length, self._per_step) - progress.samples
        if self._weighted:
            return samples * progress.tokens / max(1, progress.samples)
        epoch, drawn = divmod(progress.samples, self._size)
        unseen = max(0, (epoch + 1) * self._epoch_tokens - progress.tokens)
        here = min(samples, self._size - drawn)
        return here * unseen / (self._size - drawn) + (samples - here) * self._epoch_tokens / self._size


def _last_sample(progress: Progress, length: Length, per_step: int) -> int:
    assert length.steps is not None
    end = progress.samples + (length.steps - progress.step) * per_step
    return end if length.samples is None else min(end, length.samples)


def _from(steps: np.ndarray, first: int) -> int:
    """How many of the sorted `steps` are `first` or later."""
    return len(steps) - int(np.searchsorted(steps, first))
