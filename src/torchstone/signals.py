"""Signal handlers for the time of a context."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signal_handlers(
    numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None], ignore_late_signals: bool
) -> Iterator[None]:
    """Calls `handle` for these signals. Ignored ones stay ignored (nohup). Only a main thread can set handlers.

    On exit it restores the previous handlers. With `ignore_late_signals` these signals are then ignored instead.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if ignore_late_signals else handler)
