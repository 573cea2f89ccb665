"""The time left in a run, from the speed so far.

Steps, validations and saves are timed separately: one average would be wrong until the first validation. The
speed of steps is in seconds per token, because packed steps differ in tokens. It is taken from the last 50 steps, never
from the first, which may compile. Until a validation or a save has been timed, it counts as zero.
"""

from __future__ import annotations

from collections import deque

RECENT_STEPS = 50
RECENT_EVENTS = 3


class EtaEstimator:
    def __init__(self) -> None:
        self._is_first_step = True
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._validations: deque[float] = deque(maxlen=RECENT_EVENTS)
        self._saves: deque[float] = deque(maxlen=RECENT_EVENTS)

    def add_step(self, seconds: float, tokens: int) -> None:
        """`seconds` includes waiting for data, but neither validation nor saving."""
        if not self._is_first_step:
            self._steps.append((seconds, tokens))
        self._is_first_step = False

    def add_validation(self, seconds: float) -> None:
        self._validations.append(seconds)

    def add_save(self, seconds: float) -> None:
        self._saves.append(seconds)

    def seconds_left(self, tokens: float, validations: int, saves: int) -> float | None:
        """None until two steps have been measured."""
        if not self._steps:
            return None
        seconds_per_token = sum(seconds for seconds, _ in self._steps) / max(1, sum(n for _, n in self._steps))
        return tokens * seconds_per_token + validations * _mean(self._validations) + saves * _mean(self._saves)


def _mean(seconds: deque[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0
