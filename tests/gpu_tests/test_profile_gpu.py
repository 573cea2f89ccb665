"""MFU, peak memory and the profile of a run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchstone import api
from torchstone.observe.kernel_times import read_trace
from torchstone.observe.metrics import memory_bytes, read_metrics

Settings = Callable[..., dict[str, Any]]


def test_memory_is_the_peak_since_the_last_call() -> None:
    device = torch.device("cuda", 0)
    memory_bytes(device)
    large = torch.zeros(1 << 26, device=device)
    del large
    base = torch.cuda.memory_allocated(device)
    assert memory_bytes(device) >= base + (1 << 28)
    assert memory_bytes(device) == base


def test_a_profiled_run_has_kernel_times_and_the_same_losses(settings: Settings, tmp_path: Path) -> None:
    runs = {name: settings(system__device="cuda", output_dir=str(tmp_path / name)) for name in ("plain", "profiled")}
    for name, overrides in runs.items():
        # Not a GPU's own peak: the tiny model would round to nothing.
        api.train(
            overrides=overrides | {"observe.peak_tflops": 1} | ({"observe.profile": "3"} if name[1] == "r" else {})
        )
    plain, profiled = (read_metrics(tmp_path / name / "metrics.jsonl") for name in runs)
    assert [line["loss"] for line in profiled] == [line["loss"] for line in plain]
    assert all(0 < line["mfu"] < 1 for line in plain)
    times = read_trace(tmp_path / "profiled/profile/steps-3-5.json.gz")
    assert not any(name.startswith("aten::") for _, name in times.by_kernel), "kernels, not CPU operations"
    kinds = times.by_kind()
    assert all(kinds[kind] > 0 for kind in ("matmul", "attention", "loss", "optimizer", "copies", "other")), kinds
    # Rounded in the trace.
    assert 0 < times.busy <= 1.001 * sum(kinds.values())
