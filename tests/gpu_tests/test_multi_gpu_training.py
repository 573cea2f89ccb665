"""Training on two GPUs with FSDP2 and NCCL: the same losses and gradients on both ranks, and those of one GPU.

With one GPU, two processes share it if NCCL lets them; otherwise the tests are skipped with NCCL's reason. With gloo
and without a GPU the same is checked by training/test_overfit.py (losses of a run), test_precision.py (gradients and
losses of ranks) and training/test_layouts.py (every layout).

The ranks run this file, started by torchrun: a process that is forked cannot use CUDA if its parent has asked for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from precision import Tensors, distances, full_gradients, open_runner, random_sequences, rank_batch, train_losses
from tiny import TINY_LLAMA, make_llama
from torchstone import api
from torchstone.config.schema import ParallelConfig, SystemConfig
from torchstone.data.collate import MicroBatch, collate
from torchstone.observe.metrics import read_metrics
from torchstone.parallel.mesh import init_distributed
from torchstone.training.run import Callback, Run
from torchstone.training.setup import select_device

Settings = Callable[..., dict[str, Any]]
RANKS, STEPS = 2, 5
FSDP2 = {"dp_shard": RANKS, "zero": 3}
TIMEOUT = 300
pytestmark = pytest.mark.diagnostic


class Observe(Callback):
    """What a rank sees of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_start(self, run: Run) -> None:
        self.is_fsdp2 = isinstance(run.model.module, FSDPModule)
        tensors = [parameter for _, parameter in run.model.named_parameters()]
        local = sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)
        self.share = local / sum(tensor.numel() for tensor in tensors)

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])


def train(folder: Path, device: torch.device) -> dict[str, Any]:
    observe = Observe()
    api.train(overrides=json.loads((folder / "overrides.json").read_text()), callbacks=[observe])
    return vars(observe)


def take_steps(folder: Path, device: torch.device, parallel: dict[str, Any] = FSDP2) -> tuple[Tensors, list[float]]:
    """The gradients of the first step, and the losses of all. The ranks share the rows of a step."""
    with open_runner(folder / "model", device, "fp32", parallel, attention="eager") as runner:
        gradients = full_gradients(runner, rank_batch(runner, micro_batches(0)))
        batches = [micro_batches(step % 2) for step in range(1, STEPS + 1)]
        losses = train_losses(runner, [rank_batch(runner, each) for each in batches])
    return {name: gradient.cpu() for name, gradient in gradients.items()}, losses


def micro_batches(seed: int) -> list[MicroBatch]:
    """Four of two rows, of different lengths and numbers of loss tokens."""
    rows = [[sequence] for sequence in random_sequences(np.random.default_rng(seed), 8, 24, TINY_LLAMA["vocab_size"])]
    return [collate(rows[start : start + 2], pad_id=0) for start in range(0, 8, 2)]


def add_ranks(folder: Path, device: torch.device) -> float:
    with init_distributed(ParallelConfig(), device):
        total = torch.tensor(dist.get_rank() + 1.0, device=device)
        dist.all_reduce(total)
        return total.item()


TASKS: dict[str, Callable[[Path, torch.device], Any]] = {
    "train": train, "take_steps": take_steps, "add_ranks": add_ranks,
}  # fmt: skip


def run_ranks(task: str, folder: Path, device: str = "cuda") -> tuple[int, str]:
    """The exit code of two ranks that run a task, and their output. Each writes its result to a file in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        # As in a task of srun, where each rank sees one GPU: here both see the same.
        environment["SLURM_STEP_ID"] = "0"
    process = subprocess.run(
        [*command, task, str(folder), device], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    return process.returncode, process.stdout


def results_of(task: str, folder: Path, device: str = "cuda") -> list[Any]:
    code, output = run_ranks(task, folder, device)
    assert code == 0, output
    return [torch.load(folder / f"{task}-{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module", autouse=True)
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.cuda.device_count() >= RANKS:
        return
    folder = tmp_path_factory.mktemp("ranks")
    code, output = run_ranks("add_ranks", folder)
    refusal = re.search(r"Duplicate GPU detected.*", output) or re.search(r"DistBackendError: .*", output)
    if code and refusal:
        pytest.skip(f"needs {RANKS} GPUs, and NCCL refuses {RANKS} processes on one: {refusal[0]}")
    assert code == 0, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    make_llama(folder / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[tuple[Tensors, list[float]]]:
    return results_of("take_steps", folder)


@pytest.fixture(scope="module")
def single(folder: Path) -> tuple[Tensors, list[float]]:
    return take_steps(folder, torch.device("cuda"), {})


class TestMultiGPUTraining:
    def test_two_gpu_training(self, settings: Settings, tmp_path: Path) -> None:
        changes = {"training__precision": "fp32", "training__max_steps": 20, "optim__eps": 1e-4}
        changes |= {"system__device": "cuda"}
        single = settings(**changes, output_dir=str(tmp_path / "single"))
        api.train(overrides=single)
        expected = [line["loss"] for line in read_metrics(tmp_path / "single/metrics.jsonl")]
        parallel = settings(**changes, parallel__zero=3, parallel__dp_shard=RANKS)
        (tmp_path / "overrides.json").write_text(json.dumps(parallel))
        first, second = results_of("train", tmp_path)
        assert first["is_fsdp2"]
        assert second["is_fsdp2"]
        # Both together hold each parameter once.
        assert first["share"] + second["share"] == pytest.approx(1)
        assert 0.4 < first["share"] < 0.6
        assert first["losses"] == second["losses"] == pytest.approx(expected, rel=1e-4)
        assert len(expected) == 20
        assert expected[-1] < 0.95 * expected[0]
        assert (tmp_path / "run/checkpoints/step-00000020").is_dir()

    def test_gradient_synchronization(
        self, ranks: list[tuple[Tensors, list[float]]], single: tuple[Tensors, list[float]], folder: Path
    ) -> None:
        (first, _), (second, _) = ranks
        assert first.keys() == second.keys() == single[0].keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert max(distances(first, single[0])) < 1e-5

    def test_loss_consistency_across_ranks(
        self, ranks: list[tuple[Tensors, list[float]]], single: tuple[Tensors, list[float]]
    ) -> None:
        (_, first), (_, second) = ranks
        assert len(first) == STEPS
        assert first == second
        assert first == pytest.approx(single[1], rel=1e-5)
        assert first[-1] < first[0]


if __name__ == "__main__":
    task, out, kind = sys.argv[1:]
    rank_device = select_device(SystemConfig(device="cuda" if kind == "cuda" else "cpu"))
    result = TASKS[task](Path(out), rank_device)
    torch.save(result, Path(out) / f"{task}-{os.environ['RANK']}.pt")
