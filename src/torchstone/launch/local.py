"""Workers on this machine, started through torch's elastic agent; with other machines, through one agent on each.

The agent gives ranks, the rendezvous of nodes, restarts and the environment; how workers end is decided by supervise.py
because its own way is not ours: 30 s after a failure, an exception wherever it happens to be when a signal comes, and
another start for a worker that has saved and ended as it was asked to. Ranks follow `--node-rank`; the agent by itself
would sort nodes by their addresses.

Torch is imported where it is used: `torchstone --help` answers without it. Starting costs its import, two seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from torchstone import post
from torchstone.errors import WorkerError
from torchstone.launch.nodes import Nodes
from torchstone.launch.supervise import LOOK, LOST, SAVED, Asked, Verdict, Workers, error_file, say

# Seconds between two looks at whether a node wants to join, and for those that may come once enough are there.
MEMBERSHIP_LOOK = 2.0
LAST_CALL = 10
# Seconds that an answer of the rendezvous may take; and that a launcher which is done waits for one.
STORE_TIMEOUT = 60
LEAVE = 5.0
# An address that nobody has (RFC 5737), and that is not this machine's.
ELSEWHERE = "192.0.2.1"
# Seconds for a preparation that was asked to end; what it has done is kept.
PREPARE_GRACE = 5.0
# What Python ends with after a Ctrl-C.
INTERRUPTED = 130


@dataclass(frozen=True)
class Launch:
    """What is started here: `nproc` copies of a command, the ranks of one group with those of the other nodes.

    `environments` are what each worker gets beside torchrun's variables; `logs` is where those that know of their post
    write. `OMP_NUM_THREADS` is the user's where it is set, otherwise `threads`, otherwise an equal share of the cores.
    """

    command: Sequence[str]
    nproc: int
    nodes: Nodes = field(default_factory=Nodes)
    environments: Sequence[Mapping[str, str]] = ()
    threads: int | None = None
    max_restarts: int = 0
    save_grace: float = 300.0
    hang_timeout: float | None = None
    join_timeout: float = 3600.0
    logs: Path | None = None

    def __post_init__(self) -> None:
        assert len(self.environments) in (0, self.nproc), "an environment for each worker"


def run_workers(launch: Launch, last: bool = False) -> int:
    """Runs the workers and returns the exit code to end with, having said why it is not 0.

    It is that of the worker that failed first, or 7 where it was killed, hung, or the network failed. SIGTERM and
    Ctrl-C are passed on to the workers, which have `save_grace` seconds to save and end with 75; a second Ctrl-C ends
    that. Afterwards they are as before, or ignored if this is the `last` thing that the process does.
    """
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(launch.threads or max(1, _cores() // launch.nproc)),
        # No signal is the agent's: ours are handled by `Workers`.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
    }
    with tempfile.TemporaryDirectory(prefix="torchstone-") as name:
        are_all = launch.nodes.high == 1
        workers = Workers(launch.save_grace, launch.hang_timeout, launch.join_timeout, Path(name), launch.logs, are_all)
        with _environment(environment), _quiet("torch.distributed.elastic"), workers.signals(last):
            verdict = _run_agent(launch, workers)
    if verdict.text is not None:
        say(verdict.text)
    return verdict.code


def prepare(command: Sequence[str]) -> int:
    """Runs a command that the workers need done before they start, and returns its exit code; 75 after a signal.

    The modules of the agent are imported meanwhile.
    """
    workers = Workers(PREPARE_GRACE)
    with workers.signals():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        workers.watch({0: process})
        _agent_class()
        while not workers.ended():
            time.sleep(LOOK)
    code = process.returncode
    if workers.asked and code in (0, INTERRUPTED, -signal.SIGTERM, -signal.SIGKILL):
        say(f"stopped by {workers.asked[0].name} while preparing the data: what is done is kept, no worker was started")
        return SAVED
    if code < 0:
        say(f"error: preparing the data was killed by signal {-code}")
        return LOST
    return code


def _run_agent(launch: Launch, workers: Workers) -> Verdict:
    agent_class = _agent_class()
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousError

    nodes = launch.nodes
    handler = None
    try:
        with workers.meeting():
            handler = Patient(_meeting(launch))
        spec = WorkerSpec(
            role="worker",
            local_world_size=launch.nproc,
            entrypoint=launch.command[0],
            # The agent reads them as templates ($local_rank); ours are meant as they stand.
            args=tuple(word.replace("$", "$$") for word in launch.command[1:]),
            rdzv_handler=handler,
            max_restarts=launch.max_restarts,
            monitor_interval=LOOK,
        )
        agent = agent_class(spec, launch, workers)
        agent.run()
        return agent.verdict
    except Asked:
        text = f"stopped by {workers.asked[0].name} while waiting for the other nodes"
        return Verdict(SAVED, 0, text)
    except (RendezvousError, DistError, socket.gaierror) as error:
        return _cut_off(error, workers, nodes)
    finally:
        workers.end()
        if handler is not None:
            handler.shutdown()


def _cut_off(error: Exception, workers: Workers, nodes: Nodes) -> Verdict:
    """The other nodes are not to be reached; where our own workers failed, that is the better reason."""
    workers.end()
    found = workers.verdict()
    if found.code not in (0, SAVED) or (workers.asked and found.code == SAVED):
        return found
    reason = error.__cause__ or error
    texts = {
        "RendezvousTimeoutError": f"not enough nodes came to {nodes.endpoint} in time ({nodes.low} are needed)",
        "RendezvousClosedError": "another node has ended the run",
    }
    text = texts.get(type(error).__name__, f"the node at {nodes.endpoint} cannot be reached: {reason}")
    # Workers whose launcher is gone save together with ours, and end.
    return Verdict(LOST, 0, f"error: {text}" + (f"\n  {found.text}" if found.text else ""))


def _meeting(launch: Launch) -> Any:
    """Where the nodes meet; on one machine at a free port of its own."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    nodes = launch.nodes
    alone = nodes.high == 1
    options: dict[str, Any] = {"join_timeout": int(launch.join_timeout), "last_call_timeout": LAST_CALL}
    options["read_timeout"] = max(1, int(min(STORE_TIMEOUT, launch.join_timeout)))
    if nodes.rank is not None and not alone:
        options["is_host"] = nodes.rank == 0
    if not alone:
        count = f"{nodes.low}" if nodes.low == nodes.high else f"{nodes.low} to {nodes.high}"
        say(f"meeting {count} nodes at {nodes.endpoint}")
        if nodes.rank:
            _await_host(nodes.endpoint or "", launch.join_timeout)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0" if alone else nodes.endpoint,
        run_id=uuid.uuid4().hex if alone else nodes.job,
        min_nodes=nodes.low,
        max_nodes=nodes.high,
        local_addr="localhost" if alone else own_address(nodes.endpoint or ""),
        **options,
    )
    until = time.monotonic() + launch.join_timeout
    while True:
        try:
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError:
            # The node that hosts it may be started later.
            if time.monotonic() > until or options.get("is_host"):
                raise
            time.sleep(1)


def _await_host(endpoint: str, seconds: float) -> None:
    """Until the node where they meet can be connected to: it may be started later, and its name be known later.

    Torch's store would wait for it too, but for a minute at a time, in which no signal is heard.
    """
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    host, _, port = endpoint.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise RendezvousConnectionError(f"no answer from {endpoint}") from error
        time.sleep(1)


class Patient:
    """A rendezvous that is asked, and not waited for.

    Where a machine or its network is gone no connection is closed, and torch's store waits for its answer for as long
    as the kernel does, a quarter of an hour: meanwhile nobody would look after the workers, or pass a signal on.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._question: Question | None = None
        self._said = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        # What was asked about the last one says nothing about this one.
        self._question, self._said = None, False
        # Torch tells the workers' address once only: a node that was not there then would wait for it in vain.
        self._handler._bootstrap_store_info = None
        return self._handler.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """As far as is known: none, until there is an answer."""
        self._question = self._question or Question(self._handler.num_nodes_waiting)
        if not self._question.answered(LOOK):
            return 0
        question, self._question = self._question, None
        count = int(question.answer())
        if count and not self._said:
            self._said = True
            say(f"{count} more node{'s' if count > 1 else ''} came: the workers save, and all start again together")
        return count

    def is_closed(self) -> bool:
        """As far as is known: not, until there is an answer."""
        question = Question(self._handler.is_closed)
        return question.answered(LOOK) and bool(question.answer())

    def shutdown(self) -> None:
        Question(self._handler.shutdown).answered(LEAVE)


class Question:
    """A call in a thread of its own, which may never return."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def answered(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def _ask(self) -> None:
        try:
            self._answer = self._call()
        except Exception as error:
            self._error = error


def _agent_class() -> Any:
    """Torch's agent, which asks `workers` whether all have ended, and never looks at or ends some of them itself."""
    # Torch warns of a node that ended first, with the stack of a library. Workers keep their warnings, in their logs.
    with _environment({"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL") or "ERROR"}):
        import torch.distributed  # noqa: F401
    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class Destinations(DefaultLogsSpecs):
        """Where torch asks for the files of their output, workers are given their environment: they keep their own
        logs, and write where we do until they have opened them."""

        def __init__(self, launch: Launch, folder: Path) -> None:
            super().__init__(log_dir=os.devnull)
            self.launch, self.folder, self.attempt = launch, folder, 0

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            found = super().reify(envs)
            # How often they were started, the same on all nodes.
            common = {"TORCHELASTIC_RESTART_COUNT": str(self.attempt), post.POST: str(self.folder)}
            common |= network_environment(self.launch.nodes)
            for local_rank, env in envs.items():
                found.error_files[local_rank] = str(error_file(self.folder, int(env["RANK"])))
                own = self.launch.environments[local_rank] if self.launch.environments else {}
                env.update({**common, post.ERROR_FILE: found.error_files[local_rank], "GPU_RANK": env["RANK"], **own})
            return found

    class Agent(LocalElasticAgent):
        def __init__(self, spec: Any, launch: Launch, workers: Workers) -> None:
            assert workers.folder is not None
            self.destinations = Destinations(launch, workers.folder)
            super().__init__(spec, self.destinations)
            self.launch, self.workers, self.verdict = launch, workers, Verdict(0)

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            with self.workers.meeting():
                super()._rendezvous(worker_group)

        def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
            """In the order of the nodes' own ranks, where they have any. And the number of this start, that of all."""
            own = [self.launch.nodes.rank, self.destinations.attempt]
            store.set(f"torchstone/node/{group_rank}", json.dumps(own))
            told = [json.loads(store.get(f"torchstone/node/{number}")) for number in range(group_world_size)]
            self.destinations.attempt = max(attempt for _, attempt in told)
            ranks = [rank for rank, _ in told]
            if None not in ranks:
                if len(set(ranks)) < len(ranks):
                    raise WorkerError(f"two nodes have the same --node-rank: {sorted(ranks)}")
                group_rank = sorted(ranks).index(self.launch.nodes.rank)
            return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            folder = self.destinations.folder
            for worker in worker_group.workers:
                post.prepare_pulse(folder, worker.global_rank)
                error_file(folder, worker.global_rank).unlink(missing_ok=True)
            started = super()._start_workers(worker_group)
            self.destinations.attempt += 1
            handlers = self._pcontext.subprocess_handlers
            self.workers.watch(
                {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
            )
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """Until they have ended, or it is time to see whether a node wants to join."""
            until = time.monotonic() + MEMBERSHIP_LOOK
            while not self.workers.ended():
                if time.monotonic() > until:
                    return RunResult(state=WorkerState.HEALTHY)
                time.sleep(LOOK)
            self.verdict = self.workers.verdict()
            if self.verdict.code == SAVED and not self.workers.asked and self._is_joined():
                return RunResult(state=WorkerState.HEALTHY)
            result = super()._monitor_workers(worker_group)
            if self.verdict.code and not self._may_restart():
                # So that torch's loop does not.
                self._remaining_restarts = 0
            return result

        def _is_joined(self) -> bool:
            """Whether workers that saved, of which nobody here had asked it, did so because a node has come: another
            agent may have seen it first."""
            until = time.monotonic() + 2 * MEMBERSHIP_LOOK
            while self.launch.nodes.high > 1 and time.monotonic() < until:
                if self._rdzv_handler.num_nodes_waiting() > 0:
                    return True
                if self._rdzv_handler.is_closed():
                    return False
                time.sleep(LOOK)
            return False

        def _may_restart(self) -> bool:
            if self._remaining_restarts == 0:
                return False
            if not self.workers.may_restart(self.verdict):
                return False
            done = self.launch.max_restarts - self._remaining_restarts + 1
            say(f"{self.verdict.text}\nrestart {done} of {self.launch.max_restarts}, from the last whole checkpoint")
            return True

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            self.workers.end()
            super()._shutdown(death_sig)

    return Agent


def own_address(endpoint: str) -> str:
    """The address by which this machine is seen from where the nodes meet: a name need not be known there.

    To itself a machine is often 127.0.1.1 by its name, which is no address for others: then it is that of the way out.
    """
    host = endpoint.rpartition(":")[0].strip("[]")
    found = _address_towards(host)
    if not found.startswith(("127.", "::1")) or host.startswith(("127.", "::1", "localhost")):
        return found
    try:
        return _address_towards(ELSEWHERE)
    except OSError:
        return host


def _address_towards(host: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: a datagram socket only looks up the way.
        probe.connect(target)
        return str(probe.getsockname()[0])


def network_environment(nodes: Nodes) -> dict[str, str]:
    """Gloo looks for its network by the machine's name, which may well lead to a loopback: it is told the interface by
    which the other nodes see us."""
    if nodes.high == 1 or nodes.endpoint is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = own_address(nodes.endpoint)
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


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
