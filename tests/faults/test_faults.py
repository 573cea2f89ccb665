"""Whatever happens to a worker or is asked of a launch: it ends in time, with the right code, its reason said last, and
nothing left running. Real commands, real processes, real signals; where in a run a fault falls is planted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from selection import the_rest
from torchstone.observe.metrics import read_metrics

PLANTED = Path(__file__).parent / "planted"
HANG = 5
# The issue's: how long the others may live after one has failed. And for a signal: what saving takes here, on a machine
# that is busy with other tests.
OTHERS, SAVING = 5, 20
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples", "val_loss")


@dataclass
class Ended:
    """A launch that is over: how, what it said last, and how long after the fault."""

    code: int
    said: str
    after: float
    folder: Path

    @property
    def last_lines(self) -> list[str]:
        return self.said.rstrip().splitlines()[-3:]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoints/*") if path.name.startswith("step-"))

    @property
    def trace(self) -> list[dict[str, Any]]:
        return [{key: line.get(key) for key in EXACT} for line in read_metrics(self.folder / "metrics.jsonl")]


Launch = Callable[..., Ended]


@pytest.fixture
def launch(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Launch:
    """`torchstone train --nproc N` with faults planted; a checkpoint every fourth step, validation every third."""

    def run(nproc: int, faults: list[list[Any]], *words: str, name: str = "run") -> Ended:
        folder, marker = tmp_path / name, uuid.uuid4().hex
        given = settings(
            output_dir=str(folder), training__max_steps=8, training__validate_every_steps=3, system__threads=1,
            data__validation_split=0.1, checkpoint__every_steps=4, system__hang_timeout=HANG, observe__console="lines",
        )  # fmt: skip
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(given))
        at = tmp_path / "planted-at"
        path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        planted = {"PLANTED": json.dumps(faults), "PLANTED_AT": str(at), "PYTHONPATH": path, "MARKED": marker}
        command = [sys.executable, "-m", "torchstone.cli", "train", str(config), "--nproc", str(nproc), *words]
        # Returns when nobody holds its end of the pipe any more: a worker that outlives its launcher does.
        done = subprocess.run(
            command, env=os.environ | planted, capture_output=True, text=True, timeout=150, check=False
        )
        after = time.monotonic() - float(at.read_text()) if at.exists() else 0.0
        assert left_running(marker) == []
        return Ended(done.returncode, done.stderr, after, folder)

    return run


def left_running(marker: str) -> list[str]:
    """Processes of a launch, by a variable that all of them inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKED") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class TestFailures:
    """Nothing is saved, the others are ended in time, and the last lines are the first failing rank's."""

    @pytest.mark.parametrize(
        ("nproc", "kind", "code", "how"),
        [
            pytest.param(2, "exception", 1, "ValueError: planted", marks=the_rest),
            (4, "exception", 1, "ValueError: planted"),
            (2, "SIGKILL", 7, "was killed by SIGKILL"),
            pytest.param(4, "SIGKILL", 7, "was killed by SIGKILL", marks=the_rest),
            pytest.param(2, "exit 37", 37, "ended with exit code 37", marks=the_rest),
            pytest.param(4, "exit 37", 37, "ended with exit code 37", marks=the_rest),
        ],
    )
    def test_a_worker_fails(self, launch: Launch, nproc: int, kind: str, code: int, how: str) -> None:
        rank = nproc - 1
        ended = launch(nproc, [[rank, "computing step 3", kind, 1]])
        assert ended.code == code, ended.said
        log = ended.folder / f"logs/rank-{rank}.log"
        assert ended.last_lines[-2:] == [
            f"error: rank {rank} failed first, while computing step 3: {how}",
            f"  its log: {log}",
        ]
        assert ended.after < OTHERS
        assert ended.checkpoints == []
        assert f"GPU{rank}:INFO | [GPU {rank}] Step [2/8]" in log.read_text()
        assert ("planted" in log.read_text()) == (kind == "exception")

    @pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=the_rest)])
    def test_a_worker_stops_answering(self, launch: Launch, nproc: int) -> None:
        ended = launch(nproc, [[nproc - 1, "computing step 3", "SIGSTOP", 1]])
        assert ended.code == 7, ended.said
        assert f"error: rank {nproc - 1} failed first, while computing step 3: gave no sign of life" in ended.said
        assert ended.last_lines[-1] == f"  its log: {ended.folder}/logs/rank-{nproc - 1}.log"
        assert HANG < ended.after < HANG + OTHERS + 1
        assert ended.checkpoints == []


@pytest.mark.parametrize(
    ("number", "phase", "saved", "nproc"),
    [
        pytest.param("SIGTERM", "importing torch", None, 2, marks=the_rest),
        pytest.param("SIGTERM", "importing torch", None, 4, marks=the_rest),
        ("SIGINT", "loading the model", None, 2),
        pytest.param("SIGINT", "loading the model", None, 4, marks=the_rest),
        pytest.param("SIGTERM", "computing step 3", 3, 2, marks=the_rest),
        pytest.param("SIGTERM", "computing step 3", 3, 4, marks=the_rest),
        pytest.param("SIGINT", "computing step 3", 3, 2, marks=the_rest),
        pytest.param("SIGINT", "computing step 3", 3, 4, marks=the_rest),
        ("SIGTERM", "validating after step 3", 3, 2),
        pytest.param("SIGTERM", "validating after step 3", 3, 4, marks=the_rest),
        pytest.param("SIGTERM", "saving step 4", 4, 2, marks=the_rest),
        ("SIGTERM", "saving step 4", 4, 4),
    ],
)
def test_a_signal_saves_and_ends_with_75_and_is_no_reason_to_restart(
    launch: Launch, nproc: int, number: str, phase: str, saved: int | None
) -> None:
    ended = launch(nproc, [[nproc - 1, phase, f"launcher {number}", 9]], "--max-restarts", "2")
    assert ended.code == 75, ended.said
    assert "restart" not in ended.said
    assert ended.checkpoints == ([] if saved is None else [f"step-{saved:08d}"])
    when = "before the first step" if saved is None else f"after step {saved}, saved in {ended.folder}/checkpoints/step"
    assert f"stopped by {number} {when}" in "\n".join(ended.last_lines)
    assert ended.after < SAVING


class TestRestarts:
    def test_a_killed_worker_costs_nothing_but_time(self, launch: Launch) -> None:
        """Killed after a checkpoint and before the next, then in the middle of saving that: the run is the same."""
        whole = launch(2, [], name="whole")
        assert whole.code == 0, whole.said
        faults = [[1, "computing step 6", "SIGKILL", 1], [0, "saving step 8", "SIGKILL", 2]]
        ended = launch(2, faults, "--max-restarts", "2")
        assert ended.code == 0, ended.said
        assert "restart 1 of 2" in ended.said
        assert "restart 2 of 2" in ended.said
        assert "going on from" in ended.said
        assert ended.trace == whole.trace
        names = [path.name for path in (whole.folder / "checkpoints/step-00000008").glob("*.safetensors")]
        assert len(names) >= 6, "weights, moments and random states of two ranks"
        for name in names:
            same = [(each.folder / "checkpoints/step-00000008" / name).read_bytes() for each in (whole, ended)]
            assert same[0] == same[1], name


@the_rest
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(launch: Launch) -> None:
    ended = launch(2, [[1, "waiting for the batch of step 4", "loop", 1]])
    assert ended.code == 7, ended.said
    assert "error: rank 1 failed first, while waiting for the batch of step 4: has not moved on for" in ended.said
    # Its stack shows where, and that of the other that it waits.
    assert "sitecustomize.py" in (ended.folder / "logs/rank-1.log").read_text()
    assert " in agree\n" in (ended.folder / "logs/rank-0.log").read_text()


@the_rest
def test_workers_save_and_end_when_their_launcher_is_killed(launch: Launch) -> None:
    ended = launch(2, [[1, "computing step 3", "kill the launcher", 1]])
    assert ended.code == -9
    assert ended.checkpoints == ["step-00000003"]
