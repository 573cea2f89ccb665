"""Watches the workers of this machine, and makes them end: together, in time, and with the reason printed last.

A thread waits for each worker, so the order in which workers exit is exact. After a failure the process group is broken
and nothing can be saved, so the other workers get a few seconds. After a signal they get the time to save. A hanging
worker is found by its heartbeat (heartbeat.py) and reported with the phase it was in.
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

from torchstone import heartbeat
from torchstone.config.schema import SystemConfig
from torchstone.errors import CheckpointError, DataError, StoppedBySignal, UsageError, WorkerError
from torchstone.heartbeat import EXIT_INTERRUPTED, Heartbeat, print_at_once, print_line, stop_message
from torchstone.signals import signal_handlers

# What asks a launch to stop. Workers get these signals as they are, except SIGQUIT, which asks them for their stacks.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SIGNALS = (*FORWARDED, signal.SIGQUIT)
EXIT_SAVED = StoppedBySignal.exit_code
EXIT_LOST = WorkerError.exit_code
# A restart does not help: the config, the data and the checkpoints stay as they are.
NON_RETRYABLE = (UsageError.exit_code, DataError.exit_code, CheckpointError.exit_code)
# After this many equal failures at the same step there is no further restart.
MAX_EQUAL_FAILURES = 3
# Seconds for the other workers to exit after a failure.
FAILURE_GRACE = 3.0
# Seconds after SIGKILL until a process counts as impossible to kill.
KILL_TIMEOUT = 30.0
POLL_INTERVAL = 0.1
HEARTBEAT_INTERVAL = 0.5


@dataclass(frozen=True)
class LaunchResult:
    """How the workers ended: the exit code to pass on, the step they were at, and the last lines to print."""

    exit_code: int
    step: int = 0
    message: str | None = None


class Supervisor:
    """The workers of one launch on this machine, over all restarts.

    `folder` holds their heartbeats and errors. `logs` holds their logs; without it the workers are a program without
    heartbeats.
    """

    def __init__(
        self, system: SystemConfig, folder: Path | None = None, logs: Path | None = None, has_other_nodes: bool = False
    ) -> None:
        self.system, self.folder, self.logs, self.has_other_nodes = system, folder, logs, has_other_nodes
        self.signals: list[signal.Signals] = []
        self._failures: list[tuple[int, int]] = []
        self.watch({})

    def watch(self, processes: Mapping[int, Popen[bytes]]) -> None:
        """Watches these processes, by rank, in place of the previous ones."""
        self.processes = dict(processes)
        # Ranks with a nonzero exit code, in the order of their exits; ranks that had to be killed; the rank that hangs,
        # and a description.
        self._failed_ranks: list[int] = []
        self._killed_ranks: list[int] = []
        self._hang: tuple[int, str] | None = None
        # How many had failed when the first signal arrived, and when the others were told to stop.
        self._failed_before_signal: int | None = 0 if self.signals else None
        self._failed_before_stop: int | None = None
        self._suspect: int | None = None
        self._next_check = 0.0
        self._threads = [
            threading.Thread(target=self._wait, args=(rank, process), daemon=True)
            for rank, process in processes.items()
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def handle_signals(self, ignore_late_signals: bool = False) -> Iterator[None]:
        """Records stop signals in `signals`.

        `ignore_late_signals`: when one node has ended, srun sends the others SIGTERM, which must not replace their exit
        code.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            if not self.signals:
                self._failed_before_signal = len(self._failed_ranks)
            self.signals.append(signal.Signals(number))

        with signal_handlers(SIGNALS, handle, ignore_late_signals):
            yield

    def poll(self) -> bool:
        """Whether all workers have exited. After a failure, a hang or a signal it stops them first."""
        if not self._failed_ranks and not self.signals:
            self._check_heartbeats()
        if self.signals or self._failed_ranks or self._hang:
            self.stop()
        return not self._running()

    def stop(self) -> None:
        """Sends all workers a signal, waits, then sends SIGKILL. Returns when none is running."""
        forwarded, is_grace_shortened = 0, False
        deadline = time.monotonic() + self.system.save_grace
        if self._failed_before_stop is None:
            self._failed_before_stop = len(self._failed_ranks)
        if not self.signals:
            self._send(self._running(), signal.SIGTERM)
        while running := self._running():
            # More signals may arrive in the meantime.
            for number in self.signals[forwarded:]:
                self._send(running, number if number in FORWARDED else signal.SIGTERM)
                self._acknowledge(number, is_first=forwarded == 0)
                forwarded += 1
            if not is_grace_shortened and not self._can_save():
                deadline, is_grace_shortened = min(deadline, time.monotonic() + FAILURE_GRACE), True
            if time.monotonic() >= deadline:
                self._killed_ranks += [rank for rank in running if rank not in self._killed_ranks]
                self._send(running, signal.SIGKILL)
            if time.monotonic() >= deadline + KILL_TIMEOUT:
                pids = ", ".join(str(self.processes[rank].pid) for rank in running)
                print_line(
                    f"error: cannot kill processes {pids}: they wait for a disk or a device that does not answer"
                )
                os._exit(EXIT_LOST)
            time.sleep(POLL_INTERVAL / 5)

    def result(self) -> LaunchResult:
        """How the workers ended, once all have exited."""
        if not self._failed_ranks:
            return LaunchResult(0)
        all_saved = all(
            self._exit_code(rank) == EXIT_SAVED for rank in self._failed_ranks[: self._failed_before_signal]
        )
        if self.signals and all_saved and not self._has_trained():
            name = self.signals[0].name
            return LaunchResult(EXIT_SAVED, 0, f"stopped by {name} before the first step: there is nothing new to save")
        if self._hang is not None:
            return self._failure(EXIT_LOST, *self._hang)
        rank = self._first_cause()
        code, error = self._exit_code(rank), self._error(rank)
        if code == EXIT_SAVED:
            return LaunchResult(EXIT_SAVED, self._step(rank), error)
        if self._was_interrupted_twice() and not self._failed_before_signal:
            return LaunchResult(EXIT_INTERRUPTED, self._step(rank), "interrupted")
        if rank in self._killed_ranks:
            return self._failure(EXIT_LOST, rank, "did not end in time and was killed")
        if code < 0:
            return self._failure(EXIT_LOST, rank, f"was killed by {_signal_name(-code)}")
        return self._failure(code, rank, error or f"ended with exit code {code}")

    def may_restart(self, result: LaunchResult) -> bool:
        """Whether a restart could end differently. Prints the reason if not."""
        if self.signals or result.exit_code in (0, EXIT_SAVED):
            return False
        if result.exit_code in NON_RETRYABLE and result.step == 0:
            print_line("not restarted: it would fail again in the same way")
            return False
        self._failures.append((result.exit_code, result.step))
        if self._failures[-MAX_EQUAL_FAILURES:] == [self._failures[-1]] * MAX_EQUAL_FAILURES:
            print_line(f"not restarted: it failed {MAX_EQUAL_FAILURES} times in the same way at step {result.step}")
            return False
        return True

    def _first_cause(self) -> int:
        """The rank whose failure explains the others. A rank that lost contact may exit before the rank that failed."""
        if self._killed_ranks and self._exit_code(self._failed_ranks[0]) == EXIT_SAVED:
            # The first rank has saved its shards, but those of the killed rank are missing.
            return self._killed_ranks[0]
        if self._exit_code(self._failed_ranks[0]) != EXIT_LOST:
            return self._failed_ranks[0]
        # A rank that died of a signal counts only if the signal was not ours.
        ours = (*(-number for number in self.signals), -signal.SIGTERM, -signal.SIGKILL)
        stopped = {rank for rank in self._failed_ranks[self._failed_before_stop :] if self._exit_code(rank) in ours}
        causes = [
            r for r in self._failed_ranks if self._exit_code(r) not in (EXIT_SAVED, EXIT_LOST) and r not in stopped
        ]
        return causes[0] if causes else self._failed_ranks[0]

    def _acknowledge(self, number: signal.Signals, is_first: bool) -> None:
        """Says at once what a signal does: a step and a save may take minutes."""
        if self._is_broken() or (number != signal.SIGINT and (self.logs is None or not is_first)):
            return
        if not is_first:
            print_at_once("quitting" if self.logs is None else "quitting without saving")
        elif self.logs is None:
            print_at_once("stopping; press Ctrl-C again to quit at once")
        else:
            print_at_once(stop_message(number, max(self._step(rank) for rank in self.processes)))

    def _failure(self, code: int, rank: int, description: str) -> LaunchResult:
        beat = self._heartbeat(rank)
        phase = f", while {beat.phase}" if beat is not None else ""
        message = f"error: rank {rank} failed first{phase}: {description}"
        if self.logs is not None:
            message += f"\n  its log: {heartbeat.log_file(self.logs, rank)}"
        return LaunchResult(code, self._step(rank), message)

    def _check_heartbeats(self) -> None:
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + HEARTBEAT_INTERVAL
        beats = {rank: beat for rank in self._running() if (beat := self._heartbeat(rank)) is not None}
        hang = self._find_hang(beats, time.monotonic()) if beats else None
        # Twice in a row: one check may come right after the machine was suspended.
        if hang is not None and self._suspect == hang[0]:
            self._hang = hang
            self._send(self._running(), heartbeat.STACK_SIGNAL)
            # Time to write the stacks.
            time.sleep(HEARTBEAT_INTERVAL)
        self._suspect = None if hang is None else hang[0]

    def _find_hang(self, beats: Mapping[int, Heartbeat], now: float) -> tuple[int, str] | None:
        """The rank that hangs, and a description."""
        rank = min(beats, key=lambda rank: beats[rank].alive_at)
        silence = now - beats[rank].alive_at
        if silence > self.system.hang_timeout:
            return rank, f"sent no heartbeat for {silence:.0f} s (it is stopped, or gets no CPU time)"
        # Ranks that wait for the one that hangs make no progress either, but most of them report that they wait.
        rank = min(beats, key=lambda rank: (beats[rank].is_waiting, beats[rank].progress_at))
        silence = now - beats[rank].progress_at
        # Before the first step a rank may read a large model.
        limit = self.system.hang_timeout
        limit = limit if beats[rank].step else max(limit, self.system.join_timeout)
        if silence > limit:
            others = "rank, node or network" if self.has_other_nodes else "rank"
            text = f"made no progress for {silence:.0f} s: it hangs, or waits for a {others} that hangs"
            return rank, f"{text}; the stacks of all ranks are in their logs"
        return None

    def _can_save(self) -> bool:
        """Whether workers get time to save: none has failed, a step has begun, and Ctrl-C was not pressed twice."""
        is_wanted = not self.signals or (self._has_trained() and not self._was_interrupted_twice())
        return is_wanted and not self._is_broken()

    def _was_interrupted_twice(self) -> bool:
        return signal.SIGINT in self.signals[1:]

    def _is_broken(self) -> bool:
        return self._hang is not None or any(self._exit_code(rank) != EXIT_SAVED for rank in self._failed_ranks)

    def _has_trained(self) -> bool:
        """Whether a step has begun. True without heartbeats, because it may have."""
        return any((beat := self._heartbeat(rank)) is None or beat.step > 0 for rank in self.processes)

    def _heartbeat(self, rank: int) -> Heartbeat | None:
        return None if self.folder is None or self.logs is None else heartbeat.read_heartbeat(self.folder, rank)

    def _step(self, rank: int) -> int:
        beat = self._heartbeat(rank)
        return 0 if beat is None else beat.step

    def _error(self, rank: int) -> str | None:
        return None if self.folder is None else heartbeat.read_error(self.folder, rank)

    def _wait(self, rank: int, process: Popen[bytes]) -> None:
        if process.wait() != 0:
            self._failed_ranks.append(rank)
            # A worker leads a process group: what it started ends with it.
            self._send([rank], signal.SIGKILL)

    def _send(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            # macOS reports a missing permission if no process is left.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.processes[rank].pid, number)

    def _running(self) -> list[int]:
        return [rank for rank, thread in zip(self.processes, self._threads, strict=True) if thread.is_alive()]

    def _exit_code(self, rank: int) -> int:
        code = self.processes[rank].returncode
        assert code is not None, f"worker {rank} is still running"
        return code


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
