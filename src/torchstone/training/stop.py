"""SIGTERM and Ctrl-C ask the run to end after the step in hand; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Why the run should end, if it should: a signal, or a callback's word."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None


@contextmanager
def listen(request: StopRequest) -> Iterator[None]:
    """Sets `request.signal` when one comes. Outside the main thread Python allows no handlers, and none are set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
