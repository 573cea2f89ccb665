"""Finds the largest size whose step fits into memory, in few steps and without running out of memory on the way.

Sizes double as long as the next one is expected to fit. What is expected follows from what was measured: the memory of
a step is nearly a straight line over the size, or a parabola where attention has a mask. Then the search goes to the
largest size that is expected to fit, and checks that the next one does not. Where expectations are wrong, it bisects.

All ranks must get the same measurements, so that they search in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# A size counts as fast as another one if it takes at most this much longer.
TOLERANCE = 0.01
# If twice the size has gained less than this, twice in a row, larger sizes gain nothing either.
MIN_GAIN = 0.005


@dataclass(frozen=True)
class Measurement:
    """A step with micro-batches of one size.

    `load`: the memory of the fullest rank, as a share of what it may take; infinite if a rank ran out of memory.
    `seconds`: of one micro-step.
    """

    load: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.load <= 1


Measurements = Mapping[int, Measurement]


@dataclass(frozen=True)
class SearchResult:
    """`largest`: the largest size that fits, 0 if none does. `is_exact`: whether it is known that the next one does not
    fit, or that there is none."""

    largest: int
    is_exact: bool
    measured: Measurements


def find_largest(
    measure: Callable[[int], Measurement],
    limit: int,
    base_load: float = 0.0,
    max_load: float = math.inf,
    should_stop: Callable[[Measurements], bool] = lambda measured: False,
) -> SearchResult:
    """The largest size of at most `limit` that fits, if those below a size that fits do.

    `base_load`: of a step of few tokens. No size is measured whose load is expected to be more than `max_load`:
    it would run out of memory. With `should_stop`, the search may end early.
    """
    measured = {1: measure(1)}
    if not measured[1].fits:
        return SearchResult(0, True, measured)
    # The smallest size that does not fit, or would run out of memory.
    largest, too_large, steps, is_exact = 1, limit + 1, 0, True
    while largest + 1 < too_large and not should_stop(measured):
        size, steps = _next_size(measured, largest, too_large, steps, base_load), steps + 1
        if expected_load(measured, size, base_load) > max_load:
            # It may fit all the same.
            is_exact, too_large = False, size
            continue
        measured[size] = measure(size)
        if measured[size].fits:
            largest = size
        else:
            is_exact, too_large = True, size
    return SearchResult(largest, is_exact and largest + 1 >= too_large, measured)


def _next_size(measured: Measurements, largest: int, too_large: int, steps: int, base_load: float) -> int:
    """The next size to try, between these two: `largest` fits, and `too_large` does not, or is beyond the limit."""
    if too_large in measured:
        low, high = measured[largest].load, measured[too_large].load
        # By a line between the two. It may approach them from one side only, so every third step bisects.
        share = 0.5 if steps % 3 == 0 or math.isinf(high) else (1 - low) / (high - low)
        return max(largest + 1, min(too_large - 1, largest + int(share * (too_large - largest))))
    # The largest size that is expected to fit, up to twice the last one.
    first, last = largest + 1, min(2 * largest, too_large - 1)
    while first < last:
        middle = (first + last + 1) // 2
        if expected_load(measured, middle, base_load) <= 1:
            first = middle
        else:
            last = middle - 1
    return first


def expected_load(measured: Measurements, size: int, base_load: float = 0.0) -> float:
    """The load of a size above those that were measured: by the line through the last two of them, or the parabola
    through the last three if that is higher. The first one is compared with `base_load`."""
    points = [(n, each.load) for n, each in sorted(measured.items()) if n < size and math.isfinite(each.load)]
    points = [(0, base_load), *points] if len(points) == 1 else points
    (n1, load1), (n2, load2) = points[-2:]
    slope = (load2 - load1) / (n2 - n1)
    line = load2 + slope * (size - n2)
    if len(points) == 2:
        return line
    n0, load0 = points[-3]
    curvature = (slope - (load1 - load0) / (n1 - n0)) / (n2 - n0)
    return line + max(0.0, curvature) * (size - n2) * (size - n1)


def is_saturated(measured: Measurements) -> bool:
    """Whether the last two doublings have not made a token cheaper."""
    sizes = sorted(size for size, each in measured.items() if each.fits)
    speeds = [size / measured[size].seconds for size in sizes]
    doublings = [(a, b) for a, b in pairwise(sizes) if b == 2 * a]
    if len(doublings) < 2 or len(doublings) < len(sizes) - 1:
        return False
    return all(later < (1 + MIN_GAIN) * earlier for earlier, later in pairwise(speeds[-3:]))


def micro_step_seconds(measured: Mapping[int, float], tokens: int) -> float:
    """The seconds of a micro-step of any number of tokens. `measured`: those of some numbers.

    Below the smallest one the line through the first two goes on, if it does not say that fewer tokens take no time."""
    (smallest, first), *others = sorted(measured.items())
    if tokens >= smallest:
        return float(np.interp(tokens, [smallest, *(n for n, _ in others)], [first, *(each for _, each in others)]))
    slope = (others[0][1] - first) / (others[0][0] - smallest) if others else first / smallest
    return first - (smallest - tokens) * max(0.0, min(slope, first / smallest))


def fastest_size(candidates: Collection[int], step_seconds: Callable[[int], float]) -> int:
    """The smallest candidate whose steps take at most 1 % longer than those of the fastest one."""
    seconds = {size: step_seconds(size) for size in candidates}
    limit = (1 + TOLERANCE) * min(seconds.values())
    return min(size for size in seconds if seconds[size] <= limit)
