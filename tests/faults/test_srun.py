"""Under srun, which is a stand-in here (stubs/srun): the tasks, their variables and their ends are as SLURM has them.

With a task per rank nobody has prepared the data before the ranks start; with a task per node each is a launcher, and
the script that `torchstone launch slurm` writes is run as slurmd would run it.
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
from typing import Any

import pytest

from selection import the_rest
from torchstone.launch.nodes import SLURM_PORTS
from torchstone.observe.metrics import read_metrics

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-m", "torchstone.cli"]
# Fields of a metrics line that are the run's and not the clock's.
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "epoch", "total_tokens")
STEPS = 9
LIMIT = 240.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, chat_file: Path) -> Callable[..., Path]:
    """A file for a run that takes a moment, with a cache of its own."""

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
def whole(settings: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, started by us on one machine."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = [*PROGRAM, "train", str(settings(folder)), "--nproc", "2"]
    subprocess.run(words, capture_output=True, env=environment(), timeout=LIMIT, check=True)
    return folder


def test_a_task_per_rank_trains_as_our_own_workers_and_one_of_them_prepares_the_data(
    settings: Callable[..., Path], whole: Path, tmp_path: Path
) -> None:
    words = ["srun", "--nodes=1", "--ntasks-per-node=2", *PROGRAM, "train", str(settings(tmp_path / "run"))]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    built = [number for number, line in enumerate(said) if line.startswith("tokenizing ")]
    used = [number for number, line in enumerate(said) if line.startswith("using the tokenized ")]
    opened = [number for number, line in enumerate(said) if line.startswith("GPU0:INFO | ")]
    assert (len(built), len(used)) == (1, 1)
    # The first line with a rank's name is of a rank that has met the others.
    assert max(built + used) < min(opened)
    assert_same_run(tmp_path / "run", whole)
    assert f"Step [{STEPS}/{STEPS}]" in (tmp_path / "run/logs/rank-1.log").read_text()


@the_rest
def test_the_script_for_slurm_saves_requeues_itself_and_goes_on_exactly(
    settings: Callable[..., Path], whole: Path, tmp_path: Path
) -> None:
    """Two nodes with a launcher each; every launcher gets the signal that SLURM sends before the time is over."""
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$*" >> requeued\n')
    (tmp_path / "scontrol").chmod(0o755)
    words = [*PROGRAM, "launch", "slurm", str(settings(tmp_path / "run")), "--program", " ".join(PROGRAM)]
    words += ["--nodes", "2", "--gpus-per-node", "0", "--output", "job.sbatch"]
    subprocess.run(words, cwd=tmp_path, env=environment(), timeout=LIMIT, check=True)
    job = str(free_job())
    # What sbatch gives the script.
    batch = {"SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    batch |= {"PATH": f"{tmp_path}:{environment()['PATH']}"}
    faults = [[rank, "computing step 5", "launcher SIGTERM", 1] for rank in range(2)]

    path = os.pathsep.join([str(HERE / "planted"), *filter(None, [os.environ.get("PYTHONPATH")])])
    planted = {"PYTHONPATH": path, "PLANTED": json.dumps(faults)}
    code, said = slurmd(tmp_path, batch | planted)
    assert "srun: the tasks ended with [75, 75]" in said
    assert code == 0, said
    assert (tmp_path / "requeued").read_text() == f"requeue incomplete {job}\n"
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1] == "step-00000005"

    code, said = slurmd(tmp_path, batch | {"SLURM_RESTART_COUNT": "1"})
    assert "srun: the tasks ended with [0, 0]" in said
    assert code == 0, said
    assert "step-00000005 (step 5, " in said
    assert (tmp_path / "requeued").read_text().count("\n") == 1
    assert_same_run(tmp_path / "run", whole)


def test_signals_until_the_very_end_do_not_change_a_launchers_exit_code(tmp_path: Path) -> None:
    """srun has the other nodes get SIGTERM as soon as one has ended with 75, while they are about to do the same."""
    worker = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("ready").touch()
while not pathlib.Path("asked").exists():
    time.sleep(0.01)
sys.exit(75)
"""
    script = "import sys; from torchstone.launch.local import Launch, run_workers\n"
    script += f"sys.exit(run_workers(Launch([sys.executable, '-S', '-E', '-c', {worker!r}], 1), last=True))"
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment())
    end = time.monotonic() + LIMIT
    while launcher.poll() is None and time.monotonic() < end:
        if (tmp_path / "ready").exists():
            launcher.terminate()
        time.sleep(0.002)
    launcher.kill()
    assert launcher.wait() == 75


def slurmd(folder: Path, more: dict[str, str]) -> tuple[int, str]:
    """The script as slurmd runs it; its exit code and its output."""
    done = subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, env=environment() | more, capture_output=True, text=True, timeout=LIMIT,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def environment() -> dict[str, str]:
    """A shell's, in which `srun` is the stand-in and `torchstone` what is tested."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "GLOO_"))}
    path = [str(HERE / "stubs"), str(Path(sys.executable).parent), kept["PATH"]]
    return kept | {"OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(path), "SLURM_JOB_ID": str(free_job())}


def free_job() -> int:
    """A number whose port nobody uses."""
    for job in range(os.getpid() % 1000, len(SLURM_PORTS)):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", SLURM_PORTS[job])):
                return job
    raise AssertionError("all ports are in use")


def trace(folder: Path) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in EXACT} for line in read_metrics(folder / "metrics.jsonl")]


def state(folder: Path) -> dict[str, bytes]:
    """Weights, moments and random states of every rank."""
    files = sorted((folder / f"checkpoints/step-{STEPS:08d}").glob("*.safetensors"))
    assert len(files) == 6
    return {file.name: file.read_bytes() for file in files}


def assert_same_run(a: Path, b: Path) -> None:
    assert [line["step"] for line in trace(a)] == list(range(1, STEPS + 1))
    assert trace(a) == trace(b)
    assert state(a) == state(b)
