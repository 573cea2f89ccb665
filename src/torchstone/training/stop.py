"""Requests to stop a run: signals, and callbacks.

Before training begins a signal ends the process at once. During training it is acknowledged and recorded, and the run
stops after the current step; a second Ctrl-C stops it immediately. Signals are handled before torch is imported,
because the import takes seconds and a signal would otherwise kill the process without a message. So this module imports
no torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from torchstone import heartbeat
from torchstone.errors import StoppedBySignal
from torchstone.signals import signal_handlers

if TYPE_CHECKING:
    from torchstone.parallel.mesh import ParallelContext

# SIGHUP: the terminal was closed. SIGUSR1: many SLURM scripts send it before the time limit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Whether the run should stop, and why.

    One rank may receive a signal that the others do not. Ranks that stop at different steps wait for each other
    forever. So no rank acts on `local_signal` or `local_reason`; `sync` derives `signal` and `reason` on all ranks.
    """

    def __init__(self) -> None:
        self.local_signal: signal.Signals | None = None
        self.local_reason: str | None = None
        self.signal: signal.Signals | None = None
        self.reason: str | None = None
        # Not a stop: rank 0 asks for a checkpoint after this step, and `sync` tells the other ranks.
        self.local_save = False
        self.save = False
        # The step that is computed, or was computed last; 0 before the first.
        self.step = 0

    def stop(self, reason: str) -> None:
        """Requests a stop for a reason other than a signal; the first reason is kept."""
        self.local_reason = self.local_reason or reason

    def sync(self, ctx: ParallelContext) -> bool:
        """Returns whether to stop, the same on all ranks. All must call it at the same point. Costs an all-reduce."""
        code, save = ctx.all_reduce_max_each(
            [2 * int(self.local_signal or 0) + (self.local_reason is not None), int(self.local_save)]
        )
        self.save = self.save or save > 0
        if code >= 2:
            self.signal = self.signal or signal.Signals(code // 2)
        if code % 2:
            self.reason = self.reason or self.local_reason or "another rank's callback asked for it"
        return self.signal is not None or self.reason is not None


@contextmanager
def handle_stop_signals(
    request: StopRequest | None = None, ignore_late_signals: bool = False
) -> Iterator[Callable[[], None]]:
    """Records stop signals in `request`; without a request, a signal raises `StoppedBySignal`.

    Yields a function that raises it again, for code that may have swallowed it, such as the imports of a library.

    `signal_handlers` says which signals are handled, and what happens on exit. With `ignore_late_signals` a late signal
    does not change the exit code.
    """
    stop_request = StopRequest() if request is None else request

    def raise_if_stopped() -> None:
        if request is None and stop_request.local_signal is not None:
            raise StoppedBySignal(
                f"stopped by {stop_request.local_signal.name} while {heartbeat.current_phase()}",
                "no step was interrupted; run the same command to continue",
            )

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = stop_request.local_signal is None
        is_main_rank = not heartbeat.has_launcher() and os.environ.get("RANK", "0") == "0"
        if not is_first and number == signal.SIGINT:
            if is_main_rank:
                heartbeat.print_at_once("quitting without saving")
            raise KeyboardInterrupt
        stop_request.local_signal = signal.Signals(number)
        if is_first and request is not None and is_main_rank:
            heartbeat.print_at_once(heartbeat.stop_message(stop_request.local_signal, request.step))
        raise_if_stopped()

    with signal_handlers(STOP_SIGNALS, handle, ignore_late_signals):
        try:
            yield raise_if_stopped
        except Exception:
            # A library may have wrapped StoppedBySignal in an exception of its own.
            raise_if_stopped()
            raise
