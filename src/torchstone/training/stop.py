"""A signal or a callback's word asks the run to end after the step in hand; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from torchstone import signals
from torchstone.parallel.mesh import ALONE, Place


class StopRequest:
    """Why the run should end, if it should: a signal, or a callback's word.

    What one rank hears (`heard`, `said`) the others do not, so nobody acts on it: ranks that stop at different steps
    wait for each other for ever. `settle` has them agree; `signal` and `reason` are what they agreed on.
    """

    def __init__(self) -> None:
        self.heard = signals.Heard()
        self.said: str | None = None
        self.signal: signal.Signals | None = None
        self.reason: str | None = None

    def stop(self, reason: str) -> None:
        self.said = self.said or reason

    def settle(self, place: Place = ALONE) -> bool:
        """Whether to end. Every rank has to ask at the same point."""
        agreed = place.agree(2 * int(self.heard.signal or 0) + (self.said is not None))
        if agreed >= 2:
            self.signal = self.signal or signal.Signals(agreed // 2)
        if agreed % 2:
            self.reason = self.reason or self.said or "another rank's callback asked for it"
        return bool(self)

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None


@contextmanager
def listen(request: StopRequest) -> Iterator[None]:
    """While the run trains: a signal is noted, for the ranks to settle on."""
    with signals.listening() as heard:
        request.heard, heard.deferred = heard, True
        try:
            yield
        finally:
            heard.deferred = False
