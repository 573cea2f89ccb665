"""The scripts and the launcher on a real GPU: what they print, and what happens when a worker is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = (
    r"GPU0:INFO \| \[GPU 0\] Step \[\d+/\d+\] \| Loss: \d+\.\d{4} \| LR: \d\.\d\de-\d\d \| Grad Norm: \d+\.\d{4} \| "
    r"ETA: (-|\d+:\d\d)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, with the tokenized data of the first run for the others."""
    return Path(shutil.copytree(ROOT / "scripts", tmp_path_factory.mktemp("launch") / "scripts"))


@pytest.fixture
def scripts(folder: Path) -> Path:
    shutil.rmtree(folder / ".checkpoints", ignore_errors=True)
    return folder


def run(folder: Path, *args: str, **variables: str) -> tuple[int, str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GPU_RANK", "CUDA_VISIBLE_DEVICES")
    }
    # The interpreter of the tests, which need not be the first on the path.
    environment |= {"PYTHON": sys.executable, **variables}
    result = subprocess.run(
        args, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    sys.stdout.write(f"$ {' '.join(args)}\n{result.stdout}(exit code {result.returncode})\n")
    return result.returncode, result.stdout


def test_all_gpus_show_their_lines(scripts: Path) -> None:
    code, output = run(scripts, "bash", "run_training.sh", "--debug")
    assert code == 0
    assert len(re.findall(LINE, output)) >= 10
    assert (scripts / ".checkpoints/logs/rank-0.log").is_file()
    assert len(list((scripts / ".checkpoints/checkpoints").glob("step-*"))) == 2


@pytest.mark.parametrize("args", [("./train_gpu.sh", "0"), ("./train_auto_gpu.sh",)])
def test_one_gpu(scripts: Path, args: tuple[str, ...]) -> None:
    code, output = run(scripts, *args, "--debug", "--training.precision", "bf16")
    assert code == 0
    assert len(re.findall(LINE, output)) == 10
    assert "on cuda:0" in output
    assert ("Using GPU 0 (lowest utilization)" in output) == (args == ("./train_auto_gpu.sh",))


def test_the_file_for_one_gpu_works_as_printed(scripts: Path) -> None:
    file = {"system": {"device": "cuda", "device_id": 0}, "training": {"batch_size": 4, "grad_accum_nums": 8}}
    (scripts / "single_gpu.json").write_text(json.dumps(file))
    command = [sys.executable, "pretrain_main.py", "--debug", "--config", "single_gpu.json", "--max-steps", "2"]
    code, output = run(scripts, *command, CUDA_VISIBLE_DEVICES="0")
    assert code == 0
    assert "of 32 samples, micro-batches of 4 rows, on cuda:0" in output


def test_a_worker_killed_in_the_middle_ends_the_run_and_leaves_the_gpu(scripts: Path, tmp_path: Path) -> None:
    variables = {
        "INJECT_FAULTS": json.dumps([[0, "computing step 7", "SIGKILL", 1]]),
        "INJECT_TIME": str(tmp_path / "at"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/faults/inject"), os.environ.get("PYTHONPATH", "")]),
    }
    code, output = run(scripts, "bash", "run_training.sh", "--debug", "--max-steps", "20", **variables)
    after = time.monotonic() - float((tmp_path / "at").read_text())
    assert code == 7
    assert output.rstrip().endswith(
        "error: rank 0 failed first, while computing step 7: was killed by SIGKILL\n"
        "  its log: .checkpoints/logs/rank-0.log"
    )
    assert after < 5
    # And the same again, where it may be started again.
    code, output = run(
        scripts, "bash", "run_training.sh", "--debug", "--max-steps", "20", "--max-restarts", "1", **variables
    )
    assert code == 0
    assert "resuming from .checkpoints/checkpoints/step-00000005" in output
    assert "restart 1 of 1, from the last complete checkpoint" in output
    assert len(re.findall(r"Step \[6/20\]", output)) == 2


def test_the_doctor_tries_the_gpu_and_measures_nccl(tmp_path: Path) -> None:
    code, output = run(tmp_path, sys.executable, "-m", "torchstone", "doctor", "--gpus", "all")
    assert code == 0
    works = ("driver", "GPU memory", "GPU speed", "matmul bfloat16", "attention sdpa", "attention flash", "loss")
    for name in works:
        # Another process on the GPU, or heat, is a warning.
        assert re.search(rf"^(PASS|WARN) +{name}  ", output, re.MULTILINE), name
    assert re.search(r"^PASS +torch\.compile  ", output, re.MULTILINE)
    assert re.search(r"collectives: ok, \d+ ranks? over nccl", output)
    assert re.search(r"^doctor: ok", output, re.MULTILINE)
