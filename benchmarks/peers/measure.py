"""What the arms of the peers share: the job, its batches, and how steps are timed.

An arm is a script that gets the path of a job (JSON, written by benchmarks/train.py) and prints as its last line one
JSON object: `steps` (tokens, seconds, loss and grad_norm of each), `peak_bytes`, `start_s` and notes; or, if a package
is missing, `not_installed`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Job = dict[str, Any]
BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0


def run_arm(arm: Callable[[Job], dict[str, Any]]) -> None:
    """Runs the arm on the job of the command line, and prints its result."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        result = arm(job)
    except ModuleNotFoundError as error:
        result = {"not_installed": error.name}
    print(json.dumps(result), flush=True)


def step_rows(job: Job) -> list[list[list[int]]]:
    """The ids of every document of every step."""
    rows = [json.loads(line)["input_ids"] for line in Path(job["data"]).read_text().splitlines()]
    return [rows[start : start + job["rows"]] for start in range(0, len(rows), job["rows"])]


def new_optimizer(job: Job, parameters: Iterable[Any]) -> Any:
    import torch

    settings = {"lr": job["learning_rate"], "weight_decay": job["weight_decay"]}
    return torch.optim.AdamW(parameters, betas=BETAS, fused=True, **settings)


def versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def time_steps(
    job: Job, batches: Iterable[tuple[int, Any]], step: Callable[[Any], tuple[Any, Any]]
) -> list[dict[str, float]]:
    """Times `step` on (number of tokens, batch). It returns loss and gradient norm, which are read after every step, as
    a trainer that logs every step does."""
    import torch

    if job["device"] == "cuda":
        torch.cuda.reset_peak_memory_stats()
    measured, start_s = [], None
    for tokens, batch in batches:
        started = time.perf_counter()
        loss, norm = step(batch)
        values = {"loss": float(loss), "grad_norm": float(norm)}
        measured.append({"tokens": tokens, "seconds": time.perf_counter() - started} | values)
        if start_s is None:
            job["start_s"] = start_s = time.time() - job["started"]
    return measured


def result_of(job: Job, steps: list[dict[str, float]], **notes: Any) -> dict[str, Any]:
    import torch

    peak = torch.cuda.max_memory_allocated() if job["device"] == "cuda" else None
    return {"steps": steps, "peak_bytes": peak, "start_s": job["start_s"]} | notes
