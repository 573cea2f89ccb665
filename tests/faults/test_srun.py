"""Runs under srun. srun is a stub (stubs/srun) that starts tasks, sets their variables and ends them as SLURM does.

With one task per rank, nobody has prepared the data before the ranks start. With one task per node, each task is a
launcher, and the script of `torchstone launch slurm` runs as slurmd would run it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import processes
from exact_runs import assert_same_run
from selection import the_rest
from torchstone.launch.nodes import SLURM_PORTS
from torchstone.testing import launch_procs

FOLDER = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "torchstone"]
STEPS = 9
LIMIT = 240.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, chat_file: Path) -> Callable[..., Path]:
    """Writes the config of a short run with a token cache of its own."""

    def write(output: Path) -> Path:
        values = {
            "model.depth": 2, "model.width": 32, "model.heads": 4, "model.tokenizer": str(tokenizer_dir),
            "data.path": str(chat_file), "data.context_length": 64, "data.cache_dir": str(output.parent / "cache"),
            "training.max_steps": STEPS, "training.global_batch_size": 7, "checkpoint.every_steps": 2,
            "optim.learning_rate": 1e-3, "observe.console": "lines", "system.device": "cpu", "system.threads": 1,
            "output_dir": str(output),
        }  # fmt: skip
        file = output.with_suffix(".json")
        file.write_text(json.dumps(values))
        return file

    return write


@pytest.fixture(scope="module")
def reference(settings: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run as two ranks without srun."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    launch_procs(processes.train, 2, json.loads(settings(folder).read_text()), timeout=LIMIT)
    return folder


def test_with_a_task_per_rank_one_rank_prepares_the_data_and_the_run_equals_one_without_srun(
    settings: Callable[..., Path], reference: Path, tmp_path: Path
) -> None:
    command = ["srun", "--nodes=1", "--ntasks-per-node=2", *PROGRAM, "train", str(settings(tmp_path / "run"))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    tokenizing = [number for number, line in enumerate(lines) if line.startswith("tokenizing ")]
    training = [number for number, line in enumerate(lines) if line.startswith("rank0:INFO | ")]
    # The first line with the name of a rank comes after the process group has formed.
    assert len(tokenizing) == 1
    assert tokenizing[0] < training[0]
    assert_same_run(tmp_path / "run", reference, STEPS)
    assert f"Step [{STEPS}/{STEPS}]" in (tmp_path / "run/logs/rank-1.log").read_text()


@the_rest
def test_the_slurm_script_saves_requeues_itself_and_continues_exactly(
    settings: Callable[..., Path], reference: Path, tmp_path: Path
) -> None:
    """Two nodes with a launcher each. Every launcher gets the signal that SLURM sends before the time limit."""
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$*" >> requeued\n')
    (tmp_path / "scontrol").chmod(0o755)
    command = [*PROGRAM, "launch", "slurm", str(settings(tmp_path / "run")), "--program", " ".join(PROGRAM)]
    command += ["--nodes", "2", "--gpus-per-node", "0", "--output", "job.sbatch"]
    subprocess.run(command, cwd=tmp_path, env=environment(), timeout=LIMIT, check=True)
    job = str(free_job())
    # The variables that sbatch sets for the script.
    batch = {"SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    batch |= {"PATH": f"{tmp_path}:{environment()['PATH']}"}
    faults = [[rank, "computing step 5", "launcher SIGTERM", 1] for rank in range(2)]

    path = os.pathsep.join([str(FOLDER / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, output = slurmd(tmp_path, batch | {"PYTHONPATH": path, "INJECT_FAULTS": json.dumps(faults)})
    assert "srun: the tasks ended with [75, 75]" in output
    assert code == 0, output
    assert (tmp_path / "requeued").read_text() == f"requeue incomplete {job}\n"
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1] == "step-00000005"

    code, output = slurmd(tmp_path, batch | {"SLURM_RESTART_COUNT": "1"})
    assert "srun: the tasks ended with [0, 0]" in output
    assert code == 0, output
    assert "step-00000005 (step 5, " in output
    assert (tmp_path / "requeued").read_text().count("\n") == 1
    assert_same_run(tmp_path / "run", reference, STEPS)


def test_signals_until_the_very_end_do_not_change_the_exit_code_of_a_launcher(tmp_path: Path) -> None:
    """As soon as one node has ended with 75, srun sends SIGTERM to the others, which are about to end with 75 too."""
    worker = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("ready").touch()
while not pathlib.Path("asked").exists():
    time.sleep(0.01)
# As our workers do: when Python exits, it restores the default action, and the next SIGTERM would kill it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.exit(75)
"""
    script = (
        "import sys; from torchstone.launch.local import run_workers\nfrom torchstone.launch.plan import LaunchPlan\n"
    )
    script += f"command = [sys.executable, '-S', '-E', '-c', {worker!r}]\n"
    script += "sys.exit(run_workers(LaunchPlan(1), command, ignore_late_signals=True))"
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment())
    end = time.monotonic() + LIMIT
    while launcher.poll() is None and time.monotonic() < end:
        if (tmp_path / "ready").exists():
            launcher.terminate()
        time.sleep(0.002)
    launcher.kill()
    assert launcher.wait() == 75


def slurmd(folder: Path, variables: dict[str, str]) -> tuple[int, str]:
    """Runs the script as slurmd does; returns its exit code and its output."""
    result = subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, env=environment() | variables, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def environment() -> dict[str, str]:
    """The environment of a shell in which `srun` is the stub."""
    values = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "GLOO_"))}
    path = [str(FOLDER / "stubs"), str(Path(sys.executable).parent), values["PATH"]]
    return values | {"OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(path), "SLURM_JOB_ID": str(free_job())}


def free_job() -> int:
    """A job number whose port is free."""
    for job in range(os.getpid() % 1000, len(SLURM_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", SLURM_PORTS[job]))
            except OSError:
                continue
            return job
    raise AssertionError("all ports are in use")
