"""The learning rate of a step: a pure function, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torchstone.config.schema import OptimConfig
from torchstone.errors import UsageError


def learning_rate(step: int, total: int | None, optim: OptimConfig) -> float:
    """Of step `step` (from 0) of `total`; a run without end has no total and a constant schedule.

    Warm-up ends at the peak on its last step: the first step is made with 1/warmup of it, not with zero.
    """
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    return optim.learning_rate * _share(step, total, optim)


def check_schedule(total: int | None, optim: OptimConfig) -> None:
    if total is not None and optim.warmup_steps > total:
        raise UsageError(
            f"optim.warmup_steps {optim.warmup_steps} is more than the {total} steps of the run",
            "the learning rate would never reach optim.learning_rate",
        )
    if total is not None and optim.schedule == "wsd" and decay_steps(total, optim) + optim.warmup_steps > total:
        raise UsageError(
            f"optim.warmup_steps and optim.decay_steps together are more than the {total} steps of the run"
        )


def decay_steps(total: int, optim: OptimConfig) -> int:
    return optim.decay_steps or max(1, total // 5)


def _share(step: int, total: int | None, optim: OptimConfig) -> float:
    """Of the peak, after warm-up."""
    if optim.schedule == "constant":
        return 1.0
    assert total is not None
    begins = total - decay_steps(total, optim) if optim.schedule == "wsd" else optim.warmup_steps
    progress = min(1.0, max(0.0, (step - begins) / max(1, total - begins)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left
