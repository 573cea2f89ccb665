"""SIGTERM and Ctrl-C ask the run to end after the step in hand; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchstone.parallel.mesh import ALONE, Place


class StopRequest:
    """Why the run should end, if it should: a signal, or a callback's word.

    What one rank hears (`heard`, `said`) the others do not, so nobody acts on it: ranks that stop at different steps
    wait for each other for ever. `settle` has them agree; `signal` and `reason` are what they agreed on.
    """

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.said: str | None = None
        self.signal: signal.Signals | None = None
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.said = self.said or reason

    def settle(self, place: Place = ALONE) -> bool:
        """Whether to end. Every rank has to ask at the same point."""
        agreed = place.agree(2 * int(self.heard or 0) + (self.said is not None))
        if agreed >= 2:
            self.signal = self.signal or signal.Signals(agreed // 2)
        if agreed % 2:
            self.reason = self.reason or self.said or "another rank's callback asked for it"
        return bool(self)

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None


@contextmanager
def listen(request: StopRequest) -> Iterator[None]:
    """Sets `request.heard` when a signal comes. Outside the main thread Python allows no handlers, and none are set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.heard is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.heard = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
