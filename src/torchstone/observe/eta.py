"""How much longer a run takes, from what it did so far and what is still to come. It reads no clock: it is told.

A run is steps, validations and saves, and each has a pace of its own: an average over all of them would miss, until
the first tenth is over, a validation that comes every tenth. Steps are measured in seconds per token, since packed
steps differ in tokens. Before the first validation its cost is taken from its tokens; before the first save that is
nothing, as the speed of a disk is not known until it was written to. The price: a speed that changes later on is not
foreseen, and steps that scatter by 30 % need about thirty of them for an answer within 10 %.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

# At the start kernels are compiled and caches filled: so many steps, but never more than half of those made, are left
# out. The first one never counts.
WARM_UP = 5
# The pace is that of the last quarter of the steps made: so it follows a speed that drifts. These are the fewest and
# the most steps looked at.
FEWEST, MOST = 50, 400
# The slowest step, where it took so many times what is usual, was a pause (a shape compiled late, a busy machine) and
# is left out. More of them are a habit, and count.
PAUSE = 3.0
# Forward alone costs about a third of forward and backward.
FORWARD = 1 / 3
# The last few validations and saves; the median of them, so that a first one that compiles does not count for long.
REMEMBERED = 5
# And as long as there is no other, a first validation counts as no more than so many times what its tokens say.
SURPRISE = 3.0


class Eta:
    """Time left. `validation_tokens` are those of one validation, for as long as none was seen."""

    def __init__(self, validation_tokens: float = 0.0) -> None:
        self.validation_tokens = validation_tokens
        self._made = 0
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._validations: deque[float] = deque(maxlen=REMEMBERED)
        self._saves: deque[float] = deque(maxlen=REMEMBERED)

    def step(self, seconds: float, tokens: float = 1.0) -> None:
        """A step was made: all the time it took, waiting for data included, validation and saving not."""
        self._made += 1
        self._steps.append((seconds, max(1.0, tokens)))

    def validation(self, seconds: float) -> None:
        self._validations.append(seconds)

    def save(self, seconds: float) -> None:
        self._saves.append(seconds)

    def left(self, tokens: float, validations: float = 0.0, saves: float = 0.0) -> float | None:
        """Seconds for what is still to come; None where nothing is known yet. Counts may be what is expected: 2.5."""
        pace, validation = self.seconds_per_token(), self._validation()
        if (pace is None and tokens > 0) or (validation is None and validations > 0):
            return None
        save = median_low(self._saves) if self._saves else 0.0
        return max(0.0, tokens) * (pace or 0.0) + validations * (validation or 0.0) + saves * save

    def _validation(self) -> float | None:
        """What one takes, or None where neither it nor the pace is known."""
        pace = self.seconds_per_token()
        by_tokens = None if pace is None else FORWARD * self.validation_tokens * pace
        if not self._validations:
            return by_tokens
        if len(self._validations) == 1 and by_tokens:
            return min(self._validations[0], SURPRISE * by_tokens)
        return median_low(self._validations)

    def seconds_per_token(self) -> float | None:
        """The pace of the steps of late, or None after the first one."""
        warm = self._made - max(1, min(self._made // 2, WARM_UP))
        count = min(warm, max(FEWEST, self._made // 4), MOST)
        if count < 1:
            return None
        window = sorted(list(self._steps)[-count:], key=_pace)
        if _pace(window[-1]) > PAUSE * _pace(window[(count - 1) // 2]):
            window.pop()
        return sum(seconds for seconds, _ in window) / sum(tokens for _, tokens in window)


def _pace(step: tuple[float, float]) -> float:
    seconds, tokens = step
    return seconds / tokens
