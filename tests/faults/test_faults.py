"""Faults in a launch on one machine: it ends in time, with the right exit code and reason, and leaves no process.

Real commands, processes and signals; faults are injected at a rank and phase.
"""

from __future__ import annotations

import json
import os
import re
import signal
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
from safetensors.torch import load_file

import processes
from exact_runs import exact_metrics
from selection import the_rest
from torchstone.checkpoint.shard_files import WEIGHTS, shard_files
from torchstone.observe.metrics import read_metrics
from torchstone.testing import launch_procs

INJECT = Path(__file__).parent / "inject"
# Seconds without progress after which a worker hangs, where a test needs one: a slow step on a busy machine is no hang.
HANG_TIMEOUT = 10
# Seconds from a fault to the end of the launch. An idle machine needs a few; without the launcher, workers would wait
# half an hour for a failed rank.
LIMIT = 60


@dataclass
class Result:
    """A launch that has ended: exit code, stderr, seconds since the fault, and the run's folder."""

    code: int
    stderr: str
    seconds: float
    folder: Path

    @property
    def last_lines(self) -> list[str]:
        return self.stderr.rstrip().splitlines()[-3:]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoints/*") if path.name.startswith("step-"))


Launch = Callable[..., Result]


@pytest.fixture
def launch(settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Launch:
    """`torchstone train --nproc N` with injected faults; a checkpoint every 4 steps, validation every 3."""

    def run(nproc: int, faults: list[list[Any]], *args: str, shell: str = "") -> Result:
        folder, marker = tmp_path / "run", uuid.uuid4().hex
        values = settings(
            output_dir=str(folder), training__max_steps=8, training__validate_every_steps=3, system__threads=1,
            data__validation_split=0.1, checkpoint__every_steps=4, observe__console="lines",
        )  # fmt: skip
        config = tmp_path / "run.json"
        config.write_text(json.dumps(values))
        time_file = tmp_path / "time"
        path = os.pathsep.join([str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"INJECT_FAULTS": json.dumps(faults), "INJECT_TIME": str(time_file), "PYTHONPATH": path}
        command = [sys.executable, "-m", "torchstone", "train", str(config), "--nproc", str(nproc), *args]
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        # Returns when no process holds the pipe any more, so a worker that outlives its launcher fails the test. A test
        # that runs in the background of a shell ignores Ctrl-C, and the launch must not.
        result = subprocess.run(
            command, env=os.environ | variables | {"MARKER": marker}, capture_output=True, text=True, timeout=240,
            check=False, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        seconds = time.monotonic() - float(time_file.read_text()) if time_file.exists() else 0.0
        assert running_processes(marker) == []
        return Result(result.returncode, result.stderr, seconds, folder)

    return run


def running_processes(marker: str) -> list[str]:
    """Processes of a launch, by a variable that all of them inherit."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return commands


class TestFailures:
    """Nothing is saved, the other workers end in time, and the last lines describe the rank that failed first."""

    @pytest.mark.parametrize(
        ("nproc", "kind", "code", "description"),
        [
            pytest.param(2, "exception", 1, "ValueError: injected", marks=the_rest),
            pytest.param(4, "exception", 1, "ValueError: injected", marks=the_rest),
            pytest.param(2, "SIGKILL", 7, "was killed by SIGKILL", marks=the_rest),
            pytest.param(4, "SIGKILL", 7, "was killed by SIGKILL", marks=the_rest),
            pytest.param(2, "exit 37", 37, "ended with exit code 37", marks=the_rest),
            pytest.param(4, "exit 37", 37, "ended with exit code 37", marks=the_rest),
        ],
    )
    def test_a_worker_fails(self, launch: Launch, nproc: int, kind: str, code: int, description: str) -> None:
        rank = nproc - 1
        result = launch(nproc, [[rank, "computing step 3", kind, 1]])
        assert result.code == code, result.stderr
        log = result.folder / f"logs/rank-{rank}.log"
        assert result.last_lines[-2:] == [
            f"error: rank {rank} failed first, while computing step 3: {description}",
            f"  its log: {log}",
        ]
        assert result.seconds < LIMIT
        assert result.checkpoints == []
        assert f"rank{rank}:INFO | [rank {rank}] Step [2/8]" in log.read_text()
        assert ("injected" in log.read_text()) == (kind == "exception")

    def test_a_worker_has_no_memory_and_nobody_is_listening(self, launch: Launch) -> None:
        """All standard streams are closed: the launch must not depend on them, nor write into other files."""
        result = launch(2, [[1, "computing step 3", "out of memory", 1]], shell="<&- >&- 2>&-")
        assert (result.code, result.stderr) == (4, "")
        log = (result.folder / "logs/rank-1.log").read_text()
        assert "rank1:INFO | [rank 1] Step [2/8]" in log
        assert "Traceback" not in log
        assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 2

    @the_rest
    @pytest.mark.parametrize("nproc", [2, 4])
    def test_a_worker_is_stopped(self, launch: Launch, nproc: int) -> None:
        faults = [[nproc - 1, "computing step 3", "SIGSTOP", 1]]
        result = launch(nproc, faults, f"--system.hang_timeout={HANG_TIMEOUT}")
        assert result.code == 7, result.stderr
        assert f"error: rank {nproc - 1} failed first, while computing step 3: sent no heartbeat" in result.stderr
        assert result.last_lines[-1] == f"  its log: {result.folder}/logs/rank-{nproc - 1}.log"
        assert HANG_TIMEOUT < result.seconds < HANG_TIMEOUT + LIMIT
        assert result.checkpoints == []


@pytest.mark.parametrize(
    ("number", "phase", "step", "nproc"),
    [
        pytest.param("SIGTERM", "importing torch", None, 2, marks=the_rest),
        pytest.param("SIGTERM", "importing torch", None, 4, marks=the_rest),
        pytest.param("SIGINT", "loading the model", None, 2, marks=the_rest),
        pytest.param("SIGINT", "loading the model", None, 4, marks=the_rest),
        pytest.param("SIGTERM", "computing step 3", 3, 2, marks=the_rest),
        pytest.param("SIGTERM", "computing step 3", 3, 4, marks=the_rest),
        pytest.param("SIGINT", "computing step 3", 3, 2, marks=the_rest),
        pytest.param("SIGINT", "computing step 3", 3, 4, marks=the_rest),
        pytest.param("SIGTERM", "validating after step 3", 3, 2, marks=the_rest),
        pytest.param("SIGTERM", "validating after step 3", 3, 4, marks=the_rest),
        ("SIGHUP", "saving step 4", 4, 2),
        pytest.param("SIGTERM", "saving step 4", 4, 4, marks=the_rest),
    ],
)
def test_a_signal_saves_and_ends_with_75_without_a_restart(
    launch: Launch, nproc: int, number: str, phase: str, step: int | None
) -> None:
    result = launch(nproc, [[nproc - 1, phase, f"launcher {number}", 9]], "--max-restarts", "2")
    assert result.code == 75, result.stderr
    assert "restart" not in result.stderr
    assert result.checkpoints == ([] if step is None else [f"step-{step:08d}"])
    when = "before the first step" if step is None else f"after step {step}, saved in {result.folder}/checkpoints/step"
    assert f"stopped by {number} {when}" in "\n".join(result.last_lines)
    assert result.seconds < LIMIT


class TestRestarts:
    def test_a_restarted_run_equals_an_undisturbed_one(self, launch: Launch, tmp_path: Path) -> None:
        """One worker fails between two checkpoints, then another one is killed while it saves. Before that, someone
        starts the same run again with another learning rate, which is refused."""
        second = ["-m", "torchstone", "train", str(tmp_path / "run.json"), "--nproc", "2"]
        second += ["--optim.learning_rate", "0.5"]
        faults = [
            [1, "computing step 5", f"second launch {json.dumps([second, str(tmp_path / 'second')])}", 1],
            [1, "computing step 6", "exception", 1],
            [0, "saving step 8", "SIGKILL", 2],
        ]
        restarted = launch(2, faults, "--max-restarts", "2")
        assert restarted.code == 0, restarted.stderr
        assert (tmp_path / "second").read_text().startswith(f"2 error: another process is training in {tmp_path}/run\n")
        # The lines about the data are those of the preparation; the workers write them to their logs.
        assert restarted.stderr.count("% of them trained") == 1
        assert restarted.folder.joinpath("logs/rank-0.log").read_text().count("% of them trained") == 3
        assert restarted.stderr.count("done: step 8") == 1
        failures = ["saving step 8: was killed by SIGKILL", "computing step 6: ValueError: injected"]
        for rank, failure in enumerate(failures):
            log = restarted.folder / f"logs/rank-{rank}.log"
            assert f"error: rank {rank} failed first, while {failure}\n  its log: {log}\n" in restarted.stderr
            assert ("ValueError: injected" in log.read_text()) == (rank == 1)
        assert "restart 1 of 2" in restarted.stderr
        assert "restart 2 of 2" in restarted.stderr
        assert "resuming from" in restarted.stderr
        undisturbed = tmp_path / "undisturbed"
        values = json.loads((tmp_path / "run.json").read_text()) | {"output_dir": str(undisturbed)}
        launch_procs(processes.train, 2, values)
        assert exact_metrics(restarted.folder) == exact_metrics(undisturbed)
        names = [path.name for path in (undisturbed / "checkpoints/step-00000008").glob("*.safetensors")]
        assert len(names) >= 6, "weights, moments and random states of two ranks"
        for name in names:
            files = [folder / "checkpoints/step-00000008" / name for folder in (undisturbed, restarted.folder)]
            assert files[0].read_bytes() == files[1].read_bytes(), name

    def test_out_of_memory_restarts_with_smaller_micro_batches(
        self, launch: Launch, tmp_path: Path, chat_file: Path
    ) -> None:
        """Of packed conversations: the ranks split theirs into different numbers."""
        flags = {
            "data.path": str(chat_file), "data.context_length": 64, "training.max_tokens_per_gpu": 128,
            "training.global_batch_size": 12,
        }  # fmt: skip
        arguments = [f"--{key}={value}" for key, value in flags.items()]
        result = launch(2, [[1, "computing step 6", "room for 72", 9]], *arguments)
        assert result.code == 0, result.stderr
        log = (result.folder / "logs/rank-1.log").read_text()
        (limit,) = re.findall(r"restart with micro-batches of at most (\d+) tokens", result.stderr)
        assert f"micro-batches have at most {limit} tokens: with more, this run was out of memory (oom_splits 1)" in log
        assert (
            "rank 1 failed first, while computing step 6: out of memory on cpu while computing step 6" in result.stderr
        )
        lines = read_metrics(result.folder / "metrics.jsonl")
        assert [line["oom_splits"] for line in lines] == [0] * 4 + [1] * 4
        undisturbed = tmp_path / "undisturbed"
        values = json.loads((tmp_path / "run.json").read_text()) | flags | {"output_dir": str(undisturbed)}
        launch_procs(processes.train, 2, values)
        files = [shard_files(folder / "checkpoints/step-00000008", WEIGHTS) for folder in (undisturbed, result.folder)]
        assert [len(each) for each in files] == [2, 2]
        for a, b in ((load_file(x), load_file(y)) for x, y in zip(*files, strict=True)):
            assert a.keys() == b.keys()
            assert all((a[key] - b[key]).abs().max() <= 1e-6 for key in a)
        assert not (result.folder / "micro-batch-limit.json").exists()


@the_rest
def test_a_rank_that_loops_is_told_from_those_that_wait_for_it(launch: Launch) -> None:
    faults = [[1, "waiting for the batch of step 4", "loop", 1]]
    result = launch(2, faults, f"--system.hang_timeout={HANG_TIMEOUT}")
    assert result.code == 7, result.stderr
    assert "error: rank 1 failed first, while waiting for the batch of step 4: made no progress" in result.stderr
    # The stacks in the logs show the loop, and that the other rank waits.
    assert "sitecustomize.py" in (result.folder / "logs/rank-1.log").read_text()
    assert " in sync\n" in (result.folder / "logs/rank-0.log").read_text()


@the_rest
def test_workers_save_and_end_when_their_launcher_is_killed(launch: Launch) -> None:
    result = launch(2, [[1, "computing step 3", "kill the launcher", 1]])
    assert result.code == -9
    assert result.checkpoints == ["step-00000003"]
