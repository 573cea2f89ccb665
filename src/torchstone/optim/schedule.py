"""The learning rate of a step: a pure function, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torchstone.config.schema import OptimConfig


def learning_rate(step: int, total: int | None, optim: OptimConfig) -> float:
    """Of step `step` (from 0) of `total`; a run without end has no total and a constant schedule.

    Warm-up ends at the peak on its last step: the first step is made with 1/warmup of it, not with zero.
    """
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    return optim.learning_rate * _share(step, total, optim)


def schedule_notes(total: int | None, optim: OptimConfig) -> list[str]:
    """What a run of `total` steps cuts off its schedule: worth a word, since a short trial run is no mistake."""
    if total is None:
        return []
    if optim.warmup_steps >= total > 1:
        return [f"the run of {total} steps ends within optim.warmup_steps {optim.warmup_steps}"]
    if optim.schedule == "wsd" and optim.warmup_steps + decay_steps(total, optim) > total:
        return [f"optim.decay_steps begins right after warm-up: the run has only {total} steps"]
    return []


def decay_steps(total: int, optim: OptimConfig) -> int:
    return optim.decay_steps or max(1, total // 5)


def _share(step: int, total: int | None, optim: OptimConfig) -> float:
    """Of the peak, after warm-up."""
    if optim.schedule == "constant":
        return 1.0
    assert total is not None
    begins = optim.warmup_steps
    if optim.schedule == "wsd":
        begins = max(begins, total - decay_steps(total, optim))
    progress = min(1.0, max(0.0, (step - begins) / max(1, total - begins)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left
