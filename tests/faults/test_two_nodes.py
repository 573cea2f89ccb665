"""Two nodes that train together, as network namespaces of this machine: real launchers, real workers, a real cable.

What a fault must not change is compared bit for bit with a run that had none. A run of two nodes costs some ten seconds
on two cores, nearly all of it imports, so a test plants more than one fault where they do not hide each other.
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
from selection import the_rest
from torchstone.observe.metrics import read_metrics

PLANTED = Path(__file__).parent / "planted"
# Fields of a metrics line that are the run's and not the clock's.
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "epoch", "total_tokens")
STEPS = 9
ENDPOINT = "10.77.0.1:29400"
# Seconds within which anything below ends, on a machine that is busy with something else too.
LIMIT = 240.0
# A short `last call`: the time that a group which is large enough waits for more.
LAUNCHER = "from torchstone import cli; from torchstone.launch import local; local.LAST_CALL = 1; cli.main()"
# Beside what is planted: workers wait in the phase HELD until the file GATE is there.
HOLD = f"""
import os, runpy, time
runpy.run_path({str(PLANTED / "sitecustomize.py")!r})
if "HELD" in os.environ and "RANK" in os.environ:
    from torchstone import post
    def enter(self, phase, step=0):
        say(self, phase, step)
        while phase == os.environ["HELD"] and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    say, post.Post.enter = post.Post.enter, enter
"""


@dataclass
class Node:
    """A launcher on one of the nodes, and what its user sees."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def screen(self) -> str:
        return self.file.read_text()

    def code(self) -> int:
        return self.process.wait(LIMIT)


class Network:
    """Two namespaces with a cable between them; a node's number is its namespace's."""

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
        """The processes that are left on the nodes."""
        told = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in self.names]
        return [int(pid) for each in told for pid in each.stdout.split()]

    def start(self, node: int, words: Sequence[str], nnodes: str = "2", **environment: str) -> Node:
        place = ["--nproc", "1", "--nnodes", nnodes, "--node-rank", str(node), "--rdzv-endpoint", ENDPOINT]
        program = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", LAUNCHER, "train"]
        file = self.folder / f"screen-{len(list(self.folder.glob('screen-*')))}"
        if environment:
            environment["PYTHONPATH"] = str(self.folder)
        with file.open("wb") as screen:
            process = subprocess.Popen(
                [*program, *words, *place], stdout=screen, stderr=screen, env=plain(**environment), cwd=self.folder
            )
        return Node(process, file)

    def both(self, words: Sequence[str], **environment: str) -> list[Node]:
        return [self.start(node, words, **environment) for node in range(2)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("two nodes are network namespaces here, and there is no `ip` (of iproute2) to make them")
    if os.geteuid() != 0:
        pytest.skip("two nodes are network namespaces here, and only root may make them")
    found = Network(tmp_path_factory.mktemp("nodes"))
    (found.folder / "sitecustomize.py").write_text(HOLD)
    try:
        found.build()
    except subprocess.CalledProcessError as error:
        found.remove()
        pytest.skip(f"network namespaces are not allowed here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    yield found
    found.remove()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, chat_file: Path) -> Callable[..., Any]:
    """A file for a run that takes a moment; the epoch's edge lies inside step 5, and every second step is saved."""

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
class Whole:
    """The same run without a fault: on one node with two processes, and on two nodes."""

    one: Path
    two: Path
    nodes: list[Node]


@pytest.fixture(scope="module")
def whole(network: Network, settings: Callable[..., Any]) -> Whole:
    one, two = network.folder / "one", network.folder / "two"
    words = settings(two)
    second = network.start(1, words)
    # Meanwhile the second node waits for the first, which is where they meet.
    alone = [sys.executable, "-m", "torchstone.cli", "train", *settings(one), "--nproc", "2"]
    done = subprocess.run(alone, capture_output=True, text=True, env=plain(), timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: f"meeting 2 nodes at {ENDPOINT}" in second.screen)
    nodes = [network.start(0, words), second]
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    return Whole(one, two, nodes)


def test_two_nodes_train_with_the_numbers_of_one_and_rank_0_is_on_node_0(whole: Whole, network: Network) -> None:
    assert [line["step"] for line in trace(whole.two)] == list(range(1, STEPS + 1))
    assert trace(whole.two) == trace(whole.one)
    assert state(whole.two) == state(whole.one)
    first, second = (node.screen for node in whole.nodes)
    assert f"Step [{STEPS}/{STEPS}]" in first
    assert f"done: step {STEPS}" in first
    assert "(2 processes" in first
    assert "Step [" not in second
    logs = [(whole.two / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert all(f"GPU{rank}:INFO | [GPU {rank}] Step [{STEPS}/{STEPS}]" in log for rank, log in enumerate(logs))
    assert network.running() == []


@the_rest
def test_a_node_that_is_cut_off_ends_both_and_the_same_commands_go_on_exactly(
    whole: Whole, network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    words = settings(tmp_path / "run", system__hang_timeout=4)
    gate = tmp_path / "gate"
    nodes = network.both(words, HELD="computing step 6", GATE=str(gate))
    wait_until(lambda: lines(tmp_path / "run") == 5)
    network.cable("down")
    began = time.monotonic()
    gate.touch()
    try:
        assert [node.code() for node in nodes] == [7, 7]
        # hang_timeout, a look at the stacks, the grace of a failure, a goodbye that nobody hears; and a busy machine.
        assert time.monotonic() - began < 40
    finally:
        network.cable("up")
    assert network.running() == []
    for rank, node in enumerate(nodes):
        error, log = node.screen.splitlines()[-2:]
        assert error.startswith(f"error: rank {rank} failed first, while ")
        assert "waits for a rank, a node or a network that does" in error
        assert log.strip() == f"its log: {tmp_path / 'run'}/logs/rank-{rank}.log"
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000004"]

    nodes = network.both(words)
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    assert "step-00000004 (step 4, " in nodes[0].screen
    assert_same_run(tmp_path / "run", whole.two)


@the_rest
def test_a_killed_worker_restarts_both_nodes_and_a_signal_to_one_saves_on_both(
    whole: Whole, network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    words = [*settings(tmp_path / "run"), "--max-restarts", "1"]
    faults = [[1, "computing step 4", "SIGKILL", 1], [1, "computing step 7", "launcher SIGTERM", 2]]
    nodes = network.both(words, PLANTED=json.dumps(faults))
    assert [node.code() for node in nodes] == [75, 75], "".join(node.screen for node in nodes)
    first, second = (node.screen for node in nodes)
    assert "error: rank 1 failed first, while computing step 4: was killed by SIGKILL" in second
    assert "restart 1 of 1, from the last whole checkpoint" in second
    assert "step-00000002 (step 2, " in first
    for screen in (first, second):
        assert "stopped by SIGTERM after step 7, saved in" in screen.splitlines()[-2]
    assert saved(tmp_path / "run")[-1] == "step-00000007"
    assert network.running() == []

    nodes = network.both(words)
    assert [node.code() for node in nodes] == [0, 0], "".join(node.screen for node in nodes)
    assert_same_run(tmp_path / "run", whole.two)


@the_rest
def test_a_node_that_comes_later_is_taken_in_at_a_saved_step(
    network: Network, settings: Callable[..., Any], tmp_path: Path
) -> None:
    words = settings(tmp_path / "run", training__max_steps=60, checkpoint__every_steps=100)
    gate = tmp_path / "gate"
    first = network.start(0, words, "1:2", HELD="computing step 3", GATE=str(gate))
    wait_until(lambda: lines(tmp_path / "run") == 2)
    second = network.start(1, words, "1:2")
    wait_until(lambda: "1 more node came" in first.screen)
    gate.touch()
    assert [first.code(), second.code()] == [0, 0], first.screen + second.screen
    assert network.running() == []
    assert "(2 processes" not in first.screen.partition("1 more node came")[0]
    assert "(2 processes" in first.screen.partition("1 more node came")[2]
    between = [name for name in saved(tmp_path / "run") if name != "step-00000060"]
    assert len(between) == 1
    assert f"going on from {tmp_path / 'run'}/checkpoints/{between[0]}" in first.screen
    assert "Step [60/60]" in (tmp_path / "run/logs/rank-1.log").read_text()

    alone = json.loads(Path(words[0]).read_text()) | {"output_dir": str(tmp_path / "alone"), "observe.console": "quiet"}
    assert processes.run(processes.train, alone) == 0
    got, wanted = trace(tmp_path / "run"), trace(tmp_path / "alone")
    assert [line["step"] for line in got] == list(range(1, 61))
    for a, b in zip(got, wanted, strict=True):
        assert parity.relative(a["loss"], b["loss"]) < parity.LONG_LOSS_LIMIT


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def plain(**environment: str) -> dict[str, str]:
    """The environment of a shell that no launcher or scheduler has touched."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "GLOO_"))}
    return kept | {"OMP_NUM_THREADS": "1"} | environment


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def trace(folder: Path) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in EXACT} for line in read_metrics(folder / "metrics.jsonl")]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def state(folder: Path, step: int = STEPS) -> dict[str, bytes]:
    """Weights, moments and random states of every rank."""
    files = sorted((folder / f"checkpoints/step-{step:08d}").glob("*.safetensors"))
    assert len(files) == 6
    return {file.name: file.read_bytes() for file in files}


def assert_same_run(a: Path, b: Path) -> None:
    assert trace(a) == trace(b)
    assert state(a) == state(b)
