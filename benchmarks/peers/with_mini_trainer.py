"""mini_trainer as its users run it: its own train.py under torchrun with one process, with Liger.

It always uses FlashAttention 2 and activation checkpointing, fp32 weights and bf16 compute by FSDP2. It shuffles its
data; the rows are written in the order that its shuffle turns into the order of the other arms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import BETAS, Job, run_arm, versions
from torch_flash import provide_flash_attn

SEED = 67


def arm(job: Job) -> dict[str, Any]:
    attention, folder = provide_flash_attn(Path(job["folder"])), Path(job["folder"])
    import liger_kernel  # noqa: F401
    import mini_trainer.train
    from mini_trainer.sampler import EpochSampler

    rows = Path(job["data"]).read_text().splitlines()
    shuffled = [""] * len(rows)
    for row, place in zip(rows, EpochSampler(len(rows), seed=SEED), strict=True):
        shuffled[place] = row
    data, metrics = folder / "rows.jsonl", folder / "training_metrics_0.jsonl"
    data.write_text("".join(f"{row}\n" for row in shuffled))
    settings = {
        "model-name-or-path": job["model"], "data-path": data, "batch-size": job["rows"], "seed": SEED,
        "max-tokens-per-gpu": job["packed_tokens"], "learning-rate": job["learning_rate"], "output-dir": folder,
        "training-mode": "step", "max-steps": job["steps"], "beta1": BETAS[0], "beta2": BETAS[1],
    }  # fmt: skip
    if job["osft_ratio"] is not None:
        settings |= {"osft-unfreeze-rank-ratio": job["osft_ratio"]}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [
        mini_trainer.train.__file__,
        "--use-liger-kernels",
        *(["--osft"] if job["osft_ratio"] is not None else []),
        *(f"--{key}={value}" for key, value in settings.items()),
    ]
    # Without a network it would wait for the hub.
    process = subprocess.Popen(command, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    start_s = None
    while process.poll() is None:
        if start_s is None and metrics.exists() and metrics.stat().st_size:
            start_s = time.time() - job["started"]
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"mini_trainer ended with exit code {process.returncode}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    keys = {"tokens": "num_total_tokens", "seconds": "time_per_batch", "loss": "loss", "grad_norm": "grad_norm"}
    return {
        "steps": [{key: line[name] for key, name in keys.items()} for line in lines],
        "peak_bytes": max(line["peak_memory_usage_GB"] for line in lines) * 1e9,
        "start_s": start_s,
        "attention": attention,
        "versions": versions("torch", "transformers", "liger_kernel", "rhai_innovation_mini_trainer"),
    }


if __name__ == "__main__":
    run_arm(arm)
