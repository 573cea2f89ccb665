"""The learning rate as a function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torchstone.config.schema import OptimConfig
from torchstone.wording import plural


def lr_at_step(step: int, total_steps: int | None, optim: OptimConfig) -> float:
    """The learning rate of `step`, counted from 0. An endless run has no total and a constant schedule.

    The first warm-up step has 1/warmup_steps of the peak, not zero; the last one has the peak.
    """
    warmup_steps = resolve_warmup_steps(total_steps, optim)
    if step < warmup_steps:
        return optim.learning_rate * (step + 1) / warmup_steps
    return optim.learning_rate * _decay_factor(step, total_steps, optim)


def schedule_warnings(total_steps: int | None, optim: OptimConfig) -> list[str]:
    """Warnings about the part of the schedule that a run of `total_steps` cuts off."""
    if total_steps is None:
        return []
    warmup_steps = resolve_warmup_steps(total_steps, optim)
    if warmup_steps >= max(total_steps, 2):
        return [f"the run ends after {plural(total_steps, 'step')}, within its {warmup_steps} steps of warm-up"]
    if optim.schedule == "wsd" and warmup_steps + resolve_decay_steps(total_steps, optim) > total_steps:
        return [f"the decay starts right after warm-up, because the run has only {total_steps} steps"]
    return []


def resolve_warmup_steps(total_steps: int | None, optim: OptimConfig) -> int:
    return optim.warmup_steps or math.ceil(optim.warmup_ratio * (total_steps or 0))


def resolve_decay_steps(total_steps: int, optim: OptimConfig) -> int:
    return optim.decay_steps or max(1, total_steps // 5)


def _decay_factor(step: int, total_steps: int | None, optim: OptimConfig) -> float:
    """The learning rate after warm-up as a fraction of the peak."""
    if optim.schedule == "constant":
        return 1.0
    assert total_steps is not None
    start = resolve_warmup_steps(total_steps, optim)
    if optim.schedule == "wsd":
        start = max(start, total_steps - resolve_decay_steps(total_steps, optim))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * factor
