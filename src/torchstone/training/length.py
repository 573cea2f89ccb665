"""How long a run is: every limit that is given, as optimizer steps, before the first one is made.

Tokens can be counted ahead because the order of the samples is known. So every mode has its number of steps, the
schedule knows its end, and the ETA means something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchstone.config.schema import TrainingConfig
from torchstone.data.loader import RunData
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
