"""How the workers of this machine end, whatever happens: together, in time, and with the reason said last.

Torch's agent tells which worker failed first to the second only, and by then the others have failed of it too: here a
thread for each worker waits for its end, so the order is that in which they ended. After a failure nothing can be saved
in a group that is broken, so the others have seconds; after a signal from outside they have the time to save. A worker
that stands still is found by its pulse (post.py), and named with what it was doing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType

from torchstone import post
from torchstone.errors import CheckpointError, DataError, StoppedBySignal, UsageError, WorkerError
from torchstone.signals import STOP_SIGNALS

HEEDED = (*STOP_SIGNALS, signal.SIGQUIT)
SAVED = StoppedBySignal.exit_code
LOST = WorkerError.exit_code
# What would only fail again: the words, the data, the checkpoints are as they were.
FOR_GOOD = (UsageError.exit_code, DataError.exit_code, CheckpointError.exit_code)
# How often the same end at the same step is taken for bad luck.
SAME_CRASHES = 3
# Seconds: for the others to end after a failure, between two looks, between two looks at the pulses.
FAILURE_GRACE = 3.0
# Seconds after which a process that was killed is taken for one that cannot be.
UNDEAD = 30.0
LOOK = 0.1
PULSE_LOOK = 0.5


class Asked(Exception):
    """A signal came while no worker ran: there is nobody to pass it on to."""


@dataclass(frozen=True)
class Verdict:
    """How the workers ended: the exit code to pass on, and what to say last."""

    code: int
    step: int = 0
    text: str | None = None


class Workers:
    """The processes of one launch on this machine, restarted or not.

    `folder` is where their pulses and last words are, `logs` where each writes, if they are workers that do; without a
    `hang_timeout` nobody looks whether they move. They `are_all` of the run unless there are other nodes.
    """

    def __init__(
        self,
        save_grace: float,
        hang_timeout: float | None = None,
        join_timeout: float = 0.0,
        folder: Path | None = None,
        logs: Path | None = None,
        are_all: bool = True,
    ) -> None:
        self.save_grace, self.hang_timeout, self.join_timeout = save_grace, hang_timeout, join_timeout
        self.folder, self.logs, self.are_all = folder, logs, are_all
        self.asked: list[signal.Signals] = []
        self.crashes: list[tuple[int, int]] = []
        # Where a signal finds no worker to pass it on to.
        self.is_meeting = False
        self.watch({})

    def watch(self, processes: Mapping[int, Popen[bytes]]) -> None:
        """Begins anew, with these processes by rank."""
        self.processes = dict(processes)
        # Ranks in the order in which they ended, those that had to be killed, and the one that stood still, and how.
        self.failed: list[int] = []
        self.overdue: list[int] = []
        self.hung: tuple[int, str] | None = None
        # How many had failed when the others were told to end.
        self._before_end: int | None = None
        self._before_signal: int | None = None
        self._suspect: int | None = None
        self._next_look = 0.0
        self._threads = [
            threading.Thread(target=self._wait, args=(rank, process), daemon=True)
            for rank, process in processes.items()
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def signals(self, last: bool = False) -> Iterator[None]:
        """Notes the signals that ask to stop. What is ignored stays so (nohup); only a main thread may set handlers.

        If this is the `last` thing that the process does, they are ignored from then on: once one node has ended, srun
        has the others get SIGTERM, and one that is just leaving with 75 would be said to have died of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if not self.asked:
                self._before_signal = len(self.failed)
            self.asked.append(signal.Signals(number))
            if self.is_meeting:
                raise Asked

        heard = [number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if last else handler)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While the other nodes are waited for, a signal ends the waiting."""
        self.is_meeting = True
        try:
            if self.asked:
                raise Asked
            yield
        finally:
            self.is_meeting = False

    def ended(self) -> bool:
        """Whether all have ended. Once one has failed or hangs, or a signal has come, sees to it that they do."""
        if not self.failed and not self.asked:
            self._look_at_pulses()
        if self.asked or self.failed or self.hung:
            self.end()
        return not self._running()

    def end(self) -> None:
        """Returns when no worker runs: each is asked, has its time, and is killed."""
        seen, hurried = 0, False
        deadline = time.monotonic() + self.save_grace
        self._before_end = len(self.failed) if self._before_end is None else self._before_end
        if not self.asked:
            self._send(self._running(), signal.SIGTERM)
        while running := self._running():
            # More may come meanwhile.
            for number in self.asked[seen:]:
                # To a worker, a closed terminal is as good a reason to save as SIGTERM.
                self._send(running, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
                seen += 1
            if not hurried and self._cannot_save():
                deadline, hurried = min(deadline, time.monotonic() + FAILURE_GRACE), True
            if time.monotonic() >= deadline:
                self.overdue += [rank for rank in running if rank not in self.overdue]
                self._send(running, signal.SIGKILL)
            if time.monotonic() >= deadline + UNDEAD:
                # In the kernel, waiting for a disk or a device that is gone. Nobody can end them, or wait for them.
                pids = ", ".join(str(self.processes[rank].pid) for rank in running)
                say(f"error: processes {pids} cannot be killed: they wait for a disk or a device that does not answer")
                os._exit(LOST)
            time.sleep(LOOK / 5)

    def verdict(self) -> Verdict:
        """Of workers that have all ended."""
        if not self.failed:
            return Verdict(0)
        heard_first = all(self._code(rank) == SAVED for rank in self.failed[: self._before_signal])
        if self.asked and heard_first and not self._has_trained():
            name = self.asked[0].name
            return Verdict(SAVED, 0, f"stopped by {name} before the first step: nothing new was to be saved")
        if self.hung is not None:
            rank, how = self.hung
            return self._failure(LOST, rank, how)
        rank = self._first()
        code = self._code(rank)
        if code == SAVED:
            return Verdict(SAVED, self._step(rank), self._last_words(rank))
        if rank in self.overdue:
            return self._failure(LOST, rank, "did not end in time and was killed")
        if code < 0:
            return self._failure(LOST, rank, f"was killed by {_signal_name(-code)}")
        return self._failure(code, rank, self._last_words(rank) or f"ended with exit code {code}")

    def may_restart(self, verdict: Verdict) -> bool:
        """Whether another start could end otherwise: not after a signal, not after what fails for good, and not when
        the same has happened too often at the same step."""
        if self.asked or verdict.code in (0, SAVED):
            return False
        if verdict.code in FOR_GOOD and verdict.step == 0:
            say("not restarted: it would fail again in the same way")
            return False
        self.crashes.append((verdict.code, verdict.step))
        if self.crashes[-SAME_CRASHES:] == [self.crashes[-1]] * SAME_CRASHES:
            say(f"not restarted: it has failed {SAME_CRASHES} times in the same way at step {verdict.step}")
            return False
        return True

    def _first(self) -> int:
        """The worker whose end explains the others'. One that says it has lost contact may have ended before the one
        that it lost."""
        if self.overdue and self._code(self.failed[0]) == SAVED:
            # The first says that it saved; but what the killed one had to write is not there.
            return self.overdue[0]
        if self._code(self.failed[0]) != LOST:
            return self.failed[0]
        # Killed by a signal counts if it was not by ours.
        ours = (-signal.SIGTERM, -signal.SIGKILL)
        killed = {rank for rank in self.failed[self._before_end :] if self._code(rank) in ours}
        causes = [rank for rank in self.failed if self._code(rank) not in (SAVED, LOST) and rank not in killed]
        return causes[0] if causes else self.failed[0]

    def _failure(self, code: int, rank: int, how: str) -> Verdict:
        pulse = self._pulse(rank)
        when = f", while {pulse.phase}" if pulse is not None else ""
        text = f"error: rank {rank} failed first{when}: {how}"
        if self.logs is not None:
            text += f"\n  its log: {post.log_file(self.logs, rank)}"
        return Verdict(code, self._step(rank), text)

    def _look_at_pulses(self) -> None:
        if self.hang_timeout is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + PULSE_LOOK
        pulses = {rank: pulse for rank in self._running() if (pulse := self._pulse(rank)) is not None}
        now = time.monotonic()
        silent = min(pulses, key=lambda rank: pulses[rank].lived, default=None)
        if silent is None:
            return
        # Those that wait for a rank that has stopped have not moved either, but they live, and most say that they wait.
        slowest = min(pulses, key=lambda rank: (pulses[rank].waits, pulses[rank].moved))
        # What is done before the first step, such as reading a large model, has its own time.
        patience = self.hang_timeout if pulses[slowest].step else max(self.hang_timeout, self.join_timeout)
        found = None
        if now - pulses[silent].lived > self.hang_timeout:
            found = (silent, f"gave no sign of life for {now - pulses[silent].lived:.0f} s (stopped, or starved)")
        elif now - pulses[slowest].moved > patience:
            others = "" if self.are_all else ", a node or a network"
            found = (
                slowest,
                f"has not moved on for {now - pulses[slowest].moved:.0f} s, though it lives: it hangs, or waits for a "
                f"rank{others} that does; the stacks are in the logs",
            )
        # Seen twice: a run is not ended for one look at a machine that was asleep.
        if found is not None and self._suspect == found[0]:
            self._hang(*found)
        self._suspect = None if found is None else found[0]

    def _hang(self, rank: int, how: str) -> None:
        self.hung = (rank, how)
        # The stacks go to the logs, from all that can still answer.
        self._send(self._running(), post.STACK_SIGNAL)
        time.sleep(PULSE_LOOK)

    def _cannot_save(self) -> bool:
        """Whether there is nothing to wait for: somebody is impatient, nothing was trained, or the group is broken."""
        broken = any(self._code(rank) != SAVED for rank in self.failed)
        impatient = self.asked.count(signal.SIGINT) > 1
        return broken or impatient or self.hung is not None or (bool(self.asked) and not self._has_trained())

    def _has_trained(self) -> bool:
        """Whether a step was begun; without pulses nobody knows, and it may have been."""
        return any((pulse := self._pulse(rank)) is None or pulse.step > 0 for rank in self.processes)

    def _pulse(self, rank: int) -> post.Pulse | None:
        """Of workers that know of their post: other commands have no logs of ours."""
        return None if self.folder is None or self.logs is None else post.read_pulse(self.folder, rank)

    def _step(self, rank: int) -> int:
        pulse = self._pulse(rank)
        return 0 if pulse is None else pulse.step

    def _last_words(self, rank: int) -> str | None:
        return None if self.folder is None else post.read_error(error_file(self.folder, rank))

    def _wait(self, rank: int, process: Popen[bytes]) -> None:
        if process.wait() != 0:
            self.failed.append(rank)
            # A worker leads a group of its own: what it started goes with it.
            self._send([rank], signal.SIGKILL)

    def _send(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            # macOS says that it is not permitted where there is nobody left.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.processes[rank].pid, number)

    def _running(self) -> list[int]:
        return [rank for rank, thread in zip(self.processes, self._threads, strict=True) if thread.is_alive()]

    def _code(self, rank: int) -> int:
        code = self.processes[rank].returncode
        assert code is not None, f"worker {rank} has not ended"
        return code


def say(text: str) -> None:
    post.tell(text)


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
