"""Workers on this machine, started through torch's elastic agent.

The agent gives ranks, the rendezvous and the environment; how the workers end is decided here, because its own way is
not ours. It tells which worker failed first to the second only, and by then the others have failed of it too: a thread
for each worker waits for its end, so the order is that in which they ended. It gives the others 30 s after a failure:
nothing can be saved in a broken group, so they get three. A signal from outside raises an exception wherever the agent
happens to be, which leaves workers behind when it comes while they start: here it is noted and passed on, and the
workers have time to save.

Torch is imported where it is used: `torchstone --help` answers without it. Starting costs its import, two seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from subprocess import Popen
from types import FrameType
from typing import Any

from torchstone.errors import StoppedBySignal, UsageError, WorkerError

# What torchrun gives each of its workers, and a process group needs.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SAVED = StoppedBySignal.exit_code
# Seconds: for the workers to save after a signal, for the others to end after a failure, between two looks.
SAVE_GRACE = 300.0
FAILURE_GRACE = 3.0
LOOK = 0.1


def joined() -> bool:
    """Whether this process is a worker already: torchrun's variables are there. All of them, or none."""
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if missing and len(missing) < len(TORCHRUN):
        there = [name for name in TORCHRUN if name not in missing]
        raise UsageError(
            f"the environment has {', '.join(there)} but not {', '.join(missing)}",
            "a worker of torchrun has them all; to have the workers started here, unset the former",
        )
    return not missing


def run_workers(command: Sequence[str], nproc: int, threads: int | None = None, save_grace: float = SAVE_GRACE) -> int:
    """Runs `nproc` copies of a command as the ranks of one group, and returns the exit code to end with.

    0 when all ended well, otherwise that of the worker that failed first, or 7 where it was killed. SIGTERM and Ctrl-C
    are passed on to the workers, which have `save_grace` seconds to save and end with 75; a second Ctrl-C ends that.
    `OMP_NUM_THREADS` is the user's where it is set, otherwise `threads`, otherwise an equal share of the cores.
    """
    workers = Workers(save_grace)
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads or max(1, _cores() // nproc)),
        # No signal is the agent's: ours are handled below.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
    }
    with _environment(environment), _quiet("torch.distributed.elastic"), workers.signals():
        _run_agent(command, nproc, workers)
    code, message = workers.outcome()
    if message is not None:
        sys.stderr.write(f"error: {message}\n")
    return code


class Workers:
    """The processes of one launch: in which order they failed, and how the others are ended."""

    def __init__(self, save_grace: float) -> None:
        self.save_grace = save_grace
        self.processes: dict[int, Popen[bytes]] = {}
        # Ranks in the order in which they ended, and those that had to be killed.
        self.failed: list[int] = []
        self.overdue: list[int] = []
        self._asked: list[signal.Signals] = []
        self._threads: list[threading.Thread] = []

    def watch(self, processes: Mapping[int, Popen[bytes]]) -> None:
        self.processes.update(processes)
        self._threads = [
            threading.Thread(target=self._wait, args=(rank, process), daemon=True)
            for rank, process in processes.items()
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Notes the signals that ask to stop. What is ignored stays so (nohup); only a main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            # To a worker, a closed terminal is as good a reason to save as SIGTERM, which is what it listens for.
            self._asked.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ended(self) -> bool:
        """Whether all have ended. Once one has failed or a signal has come, sees to it that they do."""
        if self._asked or self.failed:
            self.end()
        return not self._running()

    def end(self) -> None:
        """Returns when no worker runs: each is asked, has its time, and is killed."""
        if not self._asked:
            self._asked.append(signal.SIGTERM)
        deadline, sent, hurried = time.monotonic() + self.save_grace, 0, False
        while running := self._running():
            # More may come meanwhile.
            for number in self._asked[sent:]:
                self._send(running, number)
                sent += 1
            if not hurried and (self._broken() or self._asked.count(signal.SIGINT) > 1):
                deadline, hurried = min(deadline, time.monotonic() + FAILURE_GRACE), True
            if time.monotonic() >= deadline:
                self.overdue += [rank for rank in running if rank not in self.overdue]
                self._send(running, signal.SIGKILL)
            time.sleep(LOOK / 5)

    def outcome(self) -> tuple[int, str | None]:
        """The exit code to pass on, and the line that says why it is neither done nor saved."""
        if not self.failed:
            return 0, None
        rank = self.failed[0]
        if self._code(rank) == SAVED and self.overdue:
            # The first says that it saved; but what the killed one had to write is not there.
            rank = self.overdue[0]
        code = self._code(rank)
        if code == SAVED:
            return SAVED, None
        if rank in self.overdue:
            return WorkerError.exit_code, f"worker {rank} did not end in time and was killed"
        if code < 0:
            return WorkerError.exit_code, f"worker {rank} was killed by {_signal_name(-code)}"
        return code, f"worker {rank} ended with exit code {code}"

    def _wait(self, rank: int, process: Popen[bytes]) -> None:
        if process.wait() != 0:
            self.failed.append(rank)
            # A worker leads a group of its own: what it started goes with it.
            self._send([rank], signal.SIGKILL)

    def _send(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def _running(self) -> list[int]:
        return [rank for rank, thread in zip(self.processes, self._threads, strict=True) if thread.is_alive()]

    def _broken(self) -> bool:
        """Whether one ended otherwise than well or saved: without it, the others cannot save."""
        return any(self._code(rank) != SAVED for rank in self.failed)

    def _code(self, rank: int) -> int:
        code = self.processes[rank].returncode
        assert code is not None, f"worker {rank} has not ended"
        return code


def _run_agent(command: Sequence[str], nproc: int, workers: Workers) -> None:
    """One node of `nproc` workers, with a rendezvous at a free port of this machine, never restarted."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    meeting = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    handler = get_rendezvous_handler(meeting)
    spec = WorkerSpec(
        role="worker",
        local_world_size=nproc,
        entrypoint=command[0],
        # The agent reads them as templates ($local_rank); ours are meant as they stand.
        args=tuple(word.replace("$", "$$") for word in command[1:]),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=LOOK,
        local_addr="localhost",
    )
    try:
        # Without a folder for logs, the workers write where we do.
        _agent_class()(spec, DefaultLogsSpecs(log_dir=os.devnull), workers).run()
    finally:
        handler.shutdown()


def _agent_class() -> Any:
    """Torch's agent, which asks `workers` whether all have ended, and never looks at or ends some of them itself."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def __init__(self, spec: Any, logs_specs: Any, workers: Workers) -> None:
            super().__init__(spec, logs_specs)
            self.workers = workers

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started = super()._start_workers(worker_group)
            handlers = self._pcontext.subprocess_handlers
            self.workers.watch(
                {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
            )
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not self.workers.ended():
                return RunResult(state=WorkerState.HEALTHY)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            self.workers.end()
            super()._shutdown(death_sig)

    return Agent


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The agent reads our environment, and its workers inherit it; afterwards it is as it was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps a library's log lines off the screen: what is to be said of the workers is said here, once."""
    logger, silent = logging.getLogger(name), logging.NullHandler()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = before


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
