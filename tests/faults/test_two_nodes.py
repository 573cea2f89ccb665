"""Two nodes that train together, as network namespaces of this machine, with a cable between them.

A run with faults is compared bit for bit with a run without. A run of two nodes takes about ten seconds on two cores,
mostly imports, so a test injects several faults where they do not hide each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import parity
import processes
from exact_runs import assert_same_run, exact_metrics
from selection import the_rest
from torchstone.testing import launch_procs

INJECT = Path(__file__).parent / "inject"
STEPS = 9
ENDPOINT = "10.77.0.1:29400"
# Seconds within which anything below ends on a busy machine.
LIMIT = 240.0
# With a short wait for further nodes.
LAUNCHER = "from torchstone import cli; from torchstone.launch import rendezvous; rendezvous.LAST_CALL = 1; cli.main()"
# In addition to faults: workers wait in the phase HOLD_AT until the file GATE exists.
SITECUSTOMIZE = f"""
import os, runpy, time
runpy.run_path({str(INJECT / "sitecustomize.py")!r})
if "HOLD_AT" in os.environ and "RANK" in os.environ:
    from torchstone import heartbeat
    def report_phase(phase, step=0):
        original(phase, step)
        while phase == os.environ["HOLD_AT"] and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    original, heartbeat.report_phase = heartbeat.report_phase, report_phase
"""


@dataclass
class Node:
    """The launcher of a node, and its output."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def screen(self) -> str:
        return self.file.read_text()

    def code(self) -> int:
        return self.process.wait(LIMIT)


class Network:
    """Two namespaces with a cable between them; namespace N is node N."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"ts{os.getpid()}n{node}" for node in range(2)]

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, name in enumerate(self.names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")

    def remove(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cable(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "cable", state)

    def running(self) -> list[int]:
        """The processes on the nodes."""
        lists = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in self.names]
        return [int(pid) for each in lists for pid in each.stdout.split()]

    def start(self, node: int, args: Sequence[str], nnodes: str = "2", **environment: str) -> Node:
        flags = ["--nproc", "1", "--nnodes", nnodes, "--node-rank", str(node), "--rdzv-endpoint", ENDPOINT]
        program = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", LAUNCHER, "train"]
        file = self.folder / f"screen-{len(list(self.folder.glob('screen-*')))}"
        if environment:
            path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        with file.open("wb") as screen:
            process = subprocess.Popen(
                [*program, *args, *flags],
                stdout=screen,
                stderr=screen,
                env=clean_environment(**environment),
                cwd=self.folder,
            )
        return Node(process, file)

    def start_both(self, args: Sequence[str], **environment: str) -> list[Node]:
        return [self.start(node, args, **environment) for node in range(2)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need `ip` (of iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    nodes = Network(tmp_path_factory.mktemp("nodes"))
    (nodes.folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    try:
        nodes.build()
    except subprocess.CalledProcessError as error:
        nodes.remove()
        pytest.skip(f"network namespaces are not allowed here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    yield nodes
    nodes.remove()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, chat_file: Path) -> Callable[..., Any]:
    """Writes the config of a short run. An epoch ends inside step 5, and every second step is saved."""

    def write(output: Path, **changes: Any) -> list[str]:
        values = {
            "model.depth": 2, "model.width": 32, "model.heads": 4, "model.tokenizer": str(tokenizer_dir),
            "data.path": str(chat_file), "data.context_length": 64,
            "data.cache_dir": str(tmp_path_factory.getbasetemp() / "datasets"),
            "training.max_steps": STEPS, "training.global_batch_size": 7, "checkpoint.every_steps": 2,
            "optim.learning_rate": 1e-3, "observe.console": "lines", "system.device": "cpu", "system.threads": 1,
            "output_dir": str(output),
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        file = output.with_suffix(".json")
        file.write_text(json.dumps(values))
        return [str(file)]

    return write


@dataclass
class Reference:
    """The run without faults: its folder on one node with two processes, its folder on two nodes, and these nodes."""

    one: Path
    two: Path
    nodes: list[Node]


@pytest.fixture(scope="module")
def reference(network: Network, settings: Callable[..., Any]) -> Reference:
    one, two = network.folder / "one", network.folder / "two"
    args = settings(two)
    second = network.start(1, args)
    # In the meantime the second node waits for the first one, which hosts the rendezvous.
    launch_procs(processes.train, 2, json.loads(Path(*settings(one)).read_text()), timeout=LIMIT)
    wait_until(lambda: f"waiting for 2 nodes at {ENDPOINT}" in second.screen)
    nodes = [network.start(0, args), second]
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    return Reference(one, two, nodes)


def test_two_nodes_train_exactly_as_one_and_rank_0_is_on_node_0(reference: Reference, network: Network) -> None:
    assert_same_run(reference.two, reference.one, STEPS)
    first, second = (node.screen for node in reference.nodes)
    assert f"Step [{STEPS}/{STEPS}]" in first
    assert f"done: step {STEPS}" in first
    assert "(2 processes" in first
    assert "Step [" not in second
    logs = [(reference.two / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert all(f"rank{rank}:INFO | [rank {rank}] Step [{STEPS}/{STEPS}]" in log for rank, log in enumerate(logs))
    assert network.running() == []


def test_another_machine_reaches_no_port_of_a_run_on_one_node(network: Network, tmp_path: Path) -> None:
    """Two workers on node 0 have formed their process group. Node 1 tries every port that node 0 listens at."""
    worker = """
import pathlib, psutil, sys, time, torch
from torchstone.config.schema import ParallelConfig
from torchstone.parallel.mesh import init_distributed
with init_distributed(ParallelConfig(), torch.device("cpu")) as ctx:
    connections = [c for process in (psutil.Process(), psutil.Process().parent()) for c in process.net_connections()]
    ports = [str(c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
    file = pathlib.Path(sys.argv[1], f"ready-{ctx.rank}")
    file.with_suffix(".new").write_text(" ".join(ports))
    file.with_suffix(".new").rename(file)
    while not pathlib.Path(sys.argv[1], "checked").exists():
        time.sleep(0.01)
"""
    launcher = (
        "import sys\nfrom torchstone.launch.local import run_workers\nfrom torchstone.launch.plan import LaunchPlan\n"
    )
    launcher += "sys.exit(run_workers(LaunchPlan(2), sys.argv[1:]))"
    connect = """
import socket, sys
for port in map(int, sys.argv[1:]):
    code = socket.socket().connect_ex(("10.77.0.1", port))
    print(port, "refused" if code == 111 else code)
"""
    python = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in network.names]
    run = subprocess.Popen(
        [*python[0], launcher, sys.executable, "-c", worker, str(tmp_path)], env=clean_environment(), cwd=tmp_path
    )
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    ports = [port for rank in range(2) for port in (tmp_path / f"ready-{rank}").read_text().split()]
    output = subprocess.run([*python[1], connect, *ports], capture_output=True, text=True, check=True)
    (tmp_path / "checked").touch()
    assert run.wait(LIMIT) == 0
    assert len(ports) >= 2, "gloo listens in each of the two workers"
    assert output.stdout.split() == [word for port in ports for word in (port, "refused")]


@the_rest
def test_a_cut_cable_ends_both_nodes_and_the_same_commands_continue_exactly(
    reference: Reference, network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    args = settings(tmp_path / "run", system__hang_timeout=10)
    gate = tmp_path / "gate"
    nodes = network.start_both(args, HOLD_AT="computing step 6", GATE=str(gate))
    wait_until(lambda: lines(tmp_path / "run") == 5)
    network.cable("down")
    began = time.monotonic()
    gate.touch()
    try:
        assert [node.code() for node in nodes] == [7, 7]
        # hang_timeout, the stacks, the time after a failure, and a goodbye that nobody hears, on a busy machine.
        assert time.monotonic() - began < 90
    finally:
        network.cable("up")
    assert network.running() == []
    for rank, node in enumerate(nodes):
        error, log = node.screen.splitlines()[-2:]
        assert error.startswith(f"error: rank {rank} failed first, while ")
        assert "waits for a rank, node or network that hangs" in error
        assert log.strip() == f"its log: {tmp_path / 'run'}/logs/rank-{rank}.log"
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000004"]

    nodes = network.start_both(args)
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    assert "step-00000004 (step 4, " in nodes[0].screen
    assert_same_run(tmp_path / "run", reference.two, STEPS)


@the_rest
def test_a_killed_worker_restarts_both_nodes_and_a_signal_to_one_saves_on_both(
    reference: Reference, network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    args = [*settings(tmp_path / "run"), "--max-restarts", "1"]
    faults = [[1, "computing step 4", "SIGKILL", 1], [1, "computing step 7", "launcher SIGTERM", 2]]
    nodes = network.start_both(args, INJECT_FAULTS=json.dumps(faults))
    assert [node.code() for node in nodes] == [75, 75], "".join(node.screen for node in nodes)
    first, second = (node.screen for node in nodes)
    assert "error: rank 1 failed first, while computing step 4: was killed by SIGKILL" in second
    assert "restart 1 of 1, from the last complete checkpoint" in second
    assert "step-00000002 (step 2, " in first
    for screen in (first, second):
        assert "stopped by SIGTERM after step 7, saved in" in screen.splitlines()[-2]
    assert saved(tmp_path / "run")[-1] == "step-00000007"
    assert network.running() == []

    nodes = network.start_both(args)
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    assert_same_run(tmp_path / "run", reference.two, STEPS)


@the_rest
def test_a_node_that_comes_later_joins_at_a_saved_step(
    network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    args = settings(tmp_path / "run", training__max_steps=60, checkpoint__every_steps=100)
    gate = tmp_path / "gate"
    first = network.start(0, args, "1:2", HOLD_AT="computing step 3", GATE=str(gate))
    wait_until(lambda: lines(tmp_path / "run") == 2)
    second = network.start(1, args, "1:2")
    wait_until(lambda: "1 more node joined" in first.screen)
    gate.touch()
    assert [first.code(), second.code()] == [0, 0], first.screen + second.screen
    assert network.running() == []
    assert "(2 processes" not in first.screen.partition("1 more node joined")[0]
    assert "(2 processes" in first.screen.partition("1 more node joined")[2]
    between = [name for name in saved(tmp_path / "run") if name != "step-00000060"]
    assert len(between) == 1
    assert f"resuming from {tmp_path / 'run'}/checkpoints/{between[0]}" in first.screen
    assert "Step [60/60]" in (tmp_path / "run/logs/rank-1.log").read_text()

    alone = json.loads(Path(args[0]).read_text()) | {"output_dir": str(tmp_path / "alone"), "observe.console": "quiet"}
    assert processes.run(processes.train, alone) == 0
    actual, expected = exact_metrics(tmp_path / "run"), exact_metrics(tmp_path / "alone")
    assert [line["step"] for line in actual] == list(range(1, 61))
    for a, b in zip(actual, expected, strict=True):
        assert parity.relative(a["loss"], b["loss"]) < parity.LONG_LOSS_LIMIT


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], capture_output=True, text=True, check=True)


def clean_environment(**environment: str) -> dict[str, str]:
    """The environment of a shell, without variables of launchers and schedulers."""
    values = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "GLOO_"))}
    return values | {"OMP_NUM_THREADS": "1"} | environment


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
