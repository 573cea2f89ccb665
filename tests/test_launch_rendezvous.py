"""Launchers of several nodes, all on this machine: ranks, restarts, nodes that come later, and waiting for a node.

Real launchers meet through torch's rendezvous; the workers are small scripts. tests/faults/test_two_nodes.py trains.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from processes import PRELOADED
from torchstone.config.schema import SystemConfig
from torchstone.errors import UsageError
from torchstone.launch import rendezvous
from torchstone.launch.local import run_workers
from torchstone.launch.nodes import Nodes
from torchstone.launch.plan import LaunchPlan
from torchstone.testing import forkserver_context

# Seconds within which anything below ends on a busy machine.
LIMIT = 120
WORKER = """
import os, signal, socket, sys, time
from pathlib import Path
folder, rank, attempt = Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
(folder / "new").mkdir(exist_ok=True)
(folder / f"new/{rank}-{attempt}").write_text(" ".join(os.environ[name] for name in names))
(folder / f"new/{rank}-{attempt}").rename(folder / f"{rank}-{attempt}")
"""


class Launchers:
    """Starts launchers of nodes that meet at one endpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self.context = forkserver_context(PRELOADED)
        self.processes: list[BaseProcess] = []

    def start(
        self, script: str, rank: int | None, nnodes: tuple[int, int] = (2, 2), nproc: int = 1,
        secret: str = "of the run", **options: Any,
    ) -> None:  # fmt: skip
        command = [sys.executable, "-S", "-E", "-c", WORKER + script, str(self.folder)]
        system = SystemConfig(join_timeout=options.pop("join_timeout", LIMIT))
        plan = LaunchPlan(nproc, system, Nodes(*nnodes, node_rank=rank, rdzv_endpoint=self.endpoint), **options)
        screen = self.folder / f"screen-{len(self.processes)}"
        process = self.context.Process(target=launch, args=(screen, plan, command, secret))
        process.start()
        self.processes.append(process)

    def codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(LIMIT)
        return [process.exitcode for process in self.processes]

    def screen(self, number: int) -> str:
        return (self.folder / f"screen-{number}").read_text()

    def attempts(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in self.folder.glob("[0-9]-[0-9]")}


def launch(screen: Path, plan: LaunchPlan, command: list[str], secret: str) -> None:
    with screen.open("wb") as file:
        os.dup2(file.fileno(), 2)
    rendezvous.LAST_CALL = 1
    os.environ[rendezvous.SECRET_VARIABLE] = secret
    os._exit(run_workers(plan, command, ignore_late_signals=True))


@pytest.fixture
def launchers(tmp_path: Path) -> Any:
    started = Launchers(tmp_path)
    yield started
    for process in started.processes:
        process.kill()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.01)


def test_ranks_follow_node_ranks_and_a_failure_restarts_all_nodes(launchers: Launchers) -> None:
    """Node 0 has one worker, node 1 has two. The store of the workers lives until the last of them has finished."""
    script = """
if attempt == "0":
    wait_for("0-0", "1-0", "2-0")
    sys.exit(5) if rank == "2" else time.sleep(100)
if rank == "2":
    wait_for("0-1")
    time.sleep(1.5)
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60)
"""
    for node, nproc in ((1, 2), (0, 1)):
        launchers.start(script, node, nproc=nproc, max_restarts=1)
    assert launchers.codes() == [0, 0], launchers.screen(0) + launchers.screen(1)
    placements = {"0": "3 0 1 0 2", "1": "3 0 2 1 2", "2": "3 1 2 1 2"}
    assert launchers.attempts() == {f"{rank}-{n}": placements[rank] for rank in placements for n in range(2)}
    assert "error: rank 2 failed first: ended with exit code 5\nrestart 1 of 1" in launchers.screen(0)


def test_a_node_that_comes_later_joins(launchers: Launchers) -> None:
    script = "time.sleep(100 if attempt == '0' else 0)"
    launchers.start(script, 0, (1, 2))
    wait_for(launchers.folder / "0-0")
    launchers.start(script, 1, (1, 2))
    assert launchers.codes() == [0, 0], launchers.screen(0) + launchers.screen(1)
    assert launchers.attempts() == {"0-0": "1 0 1 0 1", "0-1": "2 0 1 0 2", "1-1": "2 0 1 1 2"}
    assert "1 more node joined: all workers save and restart together" in launchers.screen(0)


def test_a_signal_to_one_node_stops_all_with_75(launchers: Launchers) -> None:
    """The workers of a run agree to save together, so those of the other node exit with 75 too."""
    script = """
wait_for("0-0", "1-0")
if rank == "0":
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "saved").touch(), os._exit(75)))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(100)
wait_for("saved")
sys.exit(75)
"""
    for node in range(2):
        launchers.start(script, node, max_restarts=3)
    assert launchers.codes() == [75, 75], launchers.screen(0) + launchers.screen(1)
    assert set(launchers.attempts()) == {"0-0", "1-0"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_the_wait_for_other_nodes(launchers: Launchers, rank: int) -> None:
    launchers.start("", rank)
    wait_for(launchers.folder / "screen-0")
    deadline = time.monotonic() + LIMIT
    while "waiting for 2 nodes at 127.0.0.1:" not in launchers.screen(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1)
    pid = launchers.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert launchers.codes() == [75]
    assert launchers.screen(0).splitlines()[-1] == "stopped by SIGTERM while waiting for the other nodes"


def test_a_node_that_waits_too_long_says_for_what(launchers: Launchers) -> None:
    launchers.start("", 0, join_timeout=2)
    assert launchers.codes() == [7]
    assert f"error: fewer than 2 nodes joined at {launchers.endpoint} in 2 s" in launchers.screen(0)


def test_a_node_that_cannot_reach_the_first_one_says_so(launchers: Launchers) -> None:
    launchers.start("", 1, join_timeout=2)
    assert launchers.codes() == [7]
    assert f"error: cannot reach the node at {launchers.endpoint}: [Errno 111]" in launchers.screen(0)


def test_an_unknown_endpoint_is_an_error_at_once_without_a_node_rank(launchers: Launchers) -> None:
    launchers.endpoint = "no-such-host.invalid:29400"
    launchers.start("", None, join_timeout=3600)
    assert launchers.codes() == [7]
    assert "error: cannot reach the node at no-such-host.invalid:29400: " in launchers.screen(0)


def test_two_nodes_with_the_same_rank_are_an_error(launchers: Launchers) -> None:
    launchers.start("", 1, (3, 3))
    launchers.start("", 1, (3, 3))
    launchers.start("", 0, (3, 3))
    assert 7 in launchers.codes()
    screens = "".join(launchers.screen(number) for number in range(3))
    assert "error: two nodes have the same --node-rank: [0, 1, 1]" in screens
    assert launchers.attempts() == {}


def test_without_node_ranks_the_nodes_still_get_different_ranks(launchers: Launchers) -> None:
    for _ in range(2):
        launchers.start("", None)
    assert launchers.codes() == [0, 0], launchers.screen(0) + launchers.screen(1)
    assert launchers.attempts() == {"0-0": "2 0 1 0 2", "1-0": "2 0 1 1 2"}


class TouchFile:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_a_state_without_the_secret_ends_the_wait_and_is_not_unpickled(launchers: Launchers) -> None:
    """Whoever reaches the rendezvous can write to its store, and a pickle can run any code."""
    launchers.start("", 0)
    wait_for(launchers.folder / "screen-0")
    host, port = launchers.endpoint.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    backend = C10dRendezvousBackend(store, Nodes.rdzv_id)
    deadline = time.monotonic() + LIMIT
    while (state := backend.get_state()) is None:
        assert time.monotonic() < deadline
    while not backend.set_state(pickle.dumps(TouchFile(launchers.folder / "executed")), state[1])[2]:
        state = backend.get_state()
    assert launchers.codes() == [7]
    assert not (launchers.folder / "executed").exists()
    error = launchers.screen(0).splitlines()[-2]
    assert error.startswith(f"error: the node at {launchers.endpoint} belongs to another run, or someone else wrote to")


class TestSignatures:
    def test_a_value_that_someone_else_wrote_is_not_read(self) -> None:
        store, signature = HashStore(), rendezvous.Signature(b"secret")
        signed = rendezvous.SignedStore(store, signature)
        signed.set("node", [0, 2])
        assert signed.get("node") == [0, 2]
        store.set("other", store.get("node").decode())
        for value in ("[0, 2]", b"[0, 2]".hex(), (32 * b"0" + b"[0, 2]").hex()):
            store.set("unsigned", value)
            for reader, key in ((signed, "unsigned"), (signed, "other"), (other_secret(store), "node")):
                with pytest.raises(RendezvousStateError, match=f"{key} is not signed with the secret of this run"):
                    reader.get(key)

    def test_a_state_is_verified_also_when_it_answers_a_write(self) -> None:
        """Torch unpickles the state that it finds when it could not write its own."""

        class Backend:
            name = "fake"

            def set_state(self, state: bytes, token: Any) -> tuple[bytes, int, bool]:
                return b"a pickle", 1, False

        backend = rendezvous.SignedBackend(Backend(), rendezvous.Signature(b"secret"))
        with pytest.raises(RendezvousStateError, match="state is not signed"):
            backend.set_state(b"ours")


def other_secret(store: HashStore) -> rendezvous.SignedStore:
    return rendezvous.SignedStore(store, rendezvous.Signature(b"of another run"))


def test_nodes_with_different_secrets_do_not_meet(launchers: Launchers) -> None:
    for node in range(2):
        launchers.start("", node, join_timeout=4, secret=str(node))
    assert launchers.codes() == [7, 7]
    assert "is not signed with the secret of this run" in launchers.screen(0) + launchers.screen(1)
    assert launchers.attempts() == {}


def test_the_launchers_listen_at_the_address_of_the_endpoint_only(launchers: Launchers) -> None:
    script = "wait_for('checked')"
    for node in range(2):
        launchers.start(script, node)
    wait_for(launchers.folder / "0-0")
    wait_for(launchers.folder / "1-0")
    connections = [
        connection
        for process in launchers.processes
        for connection in psutil.Process(process.pid).net_connections(kind="inet")
    ]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    (launchers.folder / "checked").touch()
    assert launchers.codes() == [0, 0], launchers.screen(0) + launchers.screen(1)
    assert {address.ip for address in listening} == {"127.0.0.1"}
    printed = {line for line in launchers.screen(0).splitlines() if " listens at " in line}
    titles = {int(launchers.endpoint.split(":")[1]): "the rendezvous"}
    assert len(listening) == 2
    assert printed == {
        f"{titles.get(port, 'the store of the workers')} listens at {ip}, port {port}" for ip, port in listening
    }
    assert " listens at " not in launchers.screen(1)


def test_the_first_node_creates_a_secret_that_only_its_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / "run/.rendezvous-secret"
    secrets = [rendezvous.read_secret(file) for _ in range(2)]
    assert secrets[0] == secrets[1] == file.read_bytes()
    assert len(secrets[0]) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.write_text("")
    with pytest.raises(UsageError, match="is empty"):
        rendezvous.read_secret(file)


def test_the_address_of_a_node_is_the_one_by_which_the_first_node_sees_it() -> None:
    assert rendezvous.own_address("127.0.0.1:29400") == "127.0.0.1"
    assert rendezvous.interface_variables("127.0.0.1", "A_VARIABLE") == {"A_VARIABLE": "lo"}
    assert rendezvous.interface_variables("192.0.2.7", "A_VARIABLE") == {}
