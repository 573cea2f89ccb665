"""Limits on the CPU time and memory of chat templates, which come with models that people download.

jinja2's sandbox keeps a template from Python's internals, but not from building gigabytes or looping forever. The
limits are the kernel's, in this process (docs/decisions/031). They apply in the main thread only: signals reach no
other, and the memory limit is that of the whole process. Data is prepared in main threads.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torchstone.errors import DataError, UsageError

T = TypeVar("T")
# Rendering a conversation takes a fraction of a millisecond; one that takes seconds will never end.
TIME_LIMIT = 5.0
# Python cannot interrupt some operations, such as the comparison of lists that contain each other many times.
KILL_AFTER = 20.0
# In bytes.
MEMORY_LIMIT = 1 << 30
# After this many conversations in a row that take too long, the template is refused.
MAX_TIMEOUTS = 10


class RenderTimeout(BaseException):
    """Not an Exception: jinja2 catches those of constant expressions, and evaluates them again."""


class RenderLimits:
    def __init__(self) -> None:
        self._is_active = False
        self._timeouts = 0

    def run(self, render: Callable[[], T]) -> T:
        """Calls `render`; raises DataError if it does not end or fills the memory. Within `batch()` it is cheaper.

        It is CPU time that counts, not wall time: a busy machine must not make a row bad.
        """
        if threading.current_thread() is not threading.main_thread():
            return render()
        if not self._is_active:
            with self.batch():
                return self.run(render)
        # Nothing handles SIGPROF: it ends the process.
        before = signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT), signal.setitimer(signal.ITIMER_PROF, KILL_AFTER)
        try:
            result = render()
            self._timeouts = 0
            return result
        except RenderTimeout:
            self._timeouts += 1
            limit = f"the chat template took more than {TIME_LIMIT:g} s for"
            if self._timeouts == MAX_TIMEOUTS:
                raise UsageError(f"{limit} {MAX_TIMEOUTS} conversations in a row", "use another template") from None
            raise DataError(f"{limit} this conversation") from None
        except MemoryError as error:
            # Its frames hold the memory.
            error.__traceback__ = None
            limit = f"{MEMORY_LIMIT >> 20} MiB"
            raise DataError(f"the chat template needs more than {limit} for this conversation") from None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, *before[0])
            signal.setitimer(signal.ITIMER_PROF, *before[1])

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Applies the memory limit to all renderings within."""
        if self._is_active or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_active = True
        handler = signal.signal(signal.SIGVTALRM, _raise_timeout)
        try:
            with _memory_limit():
                yield
        finally:
            signal.signal(signal.SIGVTALRM, handler)
            self._is_active = False


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Makes allocations fail when the process has grown by the limit. Only Linux says how large it is."""
    try:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [pages * resource.getpagesize() + MEMORY_LIMIT, soft, hard]
    resource.setrlimit(resource.RLIMIT_AS, (min(n for n in limits if n != resource.RLIM_INFINITY), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _raise_timeout(number: int, frame: Any) -> None:
    raise RenderTimeout
