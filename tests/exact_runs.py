"""Compares runs bit for bit: their metrics, and the weights, moments and random states of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchstone.observe.metrics import read_metrics
from torchstone.training.run import Callback, Run

# Fields of a metrics line that do not depend on the clock; tests name their validation sets `new` and `old`.
EXACT = (
    "step", "loss", "lr", "grad_norm", "tokens", "loss_tokens", "samples", "epoch", "total_tokens", "val_loss",
    "val_loss/new", "val_loss/old",
)  # fmt: skip


class StopAt(Callback):
    """Ends a run after a step, so that it can be resumed."""

    def __init__(self, step: int, reason: str = "test") -> None:
        self.step, self.reason = step, reason

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.step:
            run.stop(self.reason)


def exact_metrics(run: str | Path) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in EXACT} for line in read_metrics(Path(run) / "metrics.jsonl")]


def saved_tensors(run: str | Path, step: int) -> dict[str, bytes]:
    """The weights, moments and random states of every rank, by file."""
    files = sorted((Path(run) / f"checkpoints/step-{step:08d}").glob("*.safetensors"))
    assert len(files) % 3 == 0 < len(files)
    return {file.name: file.read_bytes() for file in files}


def assert_same_run(a: str | Path, b: str | Path, steps: int) -> None:
    assert [line["step"] for line in exact_metrics(a)] == list(range(1, steps + 1))
    assert exact_metrics(a) == exact_metrics(b)
    assert saved_tensors(a, steps) == saved_tensors(b, steps)
