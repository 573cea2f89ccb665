"""SIGTERM, Ctrl-C and their like ask a run to end. Until it trains it ends at once; then after the step in hand.

Listening begins before torch is imported, which takes seconds in which a signal would otherwise kill the process with
nothing said. Whoever trains (training/stop.py) looks at `Heard.signal` between steps and sets `deferred` while it does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchstone import post
from torchstone.errors import StoppedBySignal

# SIGHUP: the terminal is gone. SIGUSR1: what many a SLURM script sends before the time is over.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Heard:
    """The signal that came, if one has."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.deferred = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if not self.deferred:
            raise StoppedBySignal(
                f"stopped by {self.signal.name} while {post.HERE.phase}",
                "no step was done that is not saved; the same command goes on",
            )


_listening: Heard | None = None


@contextmanager
def listening(last: bool = False) -> Iterator[Heard]:
    """What is heard from here on. Inside another `listening` it is the same; outside the main thread Python allows no
    handlers, and nothing is heard. What was ignored stays so (nohup). Afterwards signals do what they did before, or
    nothing if this was the `last` thing that the process does: one more must not kill it on its way out."""
    global _listening
    if threading.current_thread() is not threading.main_thread():
        yield Heard()
        return
    if _listening is not None:
        yield _listening
        return
    _listening = heard = Heard()
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, heard.note) for number in heeded}
    try:
        yield heard
    finally:
        _listening = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
