"""Measure tokens per second, peak memory and the time of the first step on one device; one JSON line per variant.

    python benchmarks/models/speed.py [--rows 8] [--length 4096] [--steps 8] [--arm NAME …]

The model has the sizes of Llama 3.2 1B (16 layers of 2048, 32/8 heads of 64, a vocabulary of 128256, tied), all in
bf16 (training.precision bf16-pure), with AdamW and clipping. A row is one document, or documents of long-tailed lengths
(mean about 600) if packed. The first step includes compiling; the speed is that of the median step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from torchstone.config.schema import OptimConfig
from torchstone.data.collate import MicroBatch, collate
from torchstone.data.encode import TokenSequence
from torchstone.data.loader import StepBatch
from torchstone.models.execution import ExecutionOptions
from torchstone.models.families import new_hf_config
from torchstone.optim.build import build_optimizer
from torchstone.parallel.build import build_new_model
from torchstone.parallel.runner import Runner
from torchstone.training.step import StepResult, compute_gradients, optimizer_step

LEARNING_RATE, MAX_GRAD_NORM = 1e-4, 1.0
LLAMA_1B = {
    "vocab_size": 128256, "width": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "mlp_width": 8192,
    "max_positions": 131072, "tied": True, "rope_theta": 500000.0,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    packed: bool
    execution: ExecutionOptions


def arm(packed: bool = False, **execution: object) -> Arm:
    """With all logits, unless another loss or Liger is named."""
    loss = {} if "liger" in execution else {"loss": "full"}
    return Arm(packed, ExecutionOptions(packed=packed, has_fixed_length=True, **(loss | execution)))  # type: ignore[arg-type]


ARMS = {
    "unpacked": arm(),
    "unpacked, compiled per block": arm(compile="block"),
    "unpacked, compiled per block, fused": arm(compile="block", fused=("qkv", "gate_up")),
    "unpacked, compiled per block, selective": arm(compile="block", recompute="selective"),
    "unpacked, compiled per block, full": arm(compile="block", recompute="full"),
    "unpacked, compiled per block, chunked loss": arm(compile="block", loss="chunked"),
    "unpacked, compiled per block, liger loss": arm(compile="block", liger=("loss",)),
    "unpacked, liger": arm(liger=("auto",)),
    "unpacked, compiled whole": arm(compile="whole"),
    "packed": arm(packed=True),
    "packed, compiled per block": arm(packed=True, compile="block"),
    "packed, compiled per block, flex": arm(packed=True, compile="block", attention="flex"),
    "packed, compiled per block, sdpa": arm(packed=True, compile="block", attention="sdpa"),
    "packed, compiled per block, chunked loss": arm(packed=True, compile="block", loss="chunked"),
    "packed, compiled per block, liger loss": arm(packed=True, compile="block", liger=("loss",)),
    "packed, liger": arm(packed=True, liger=("auto",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 8), ("length", 4096), ("steps", 8), ("depth", 16), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arm", action="append", choices=list(ARMS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for name in options.arm or ARMS:
        print(json.dumps({"arm": name} | measure(ARMS[name], options)), flush=True)


def measure(arm: Arm, options: argparse.Namespace) -> dict[str, object]:
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    torch._dynamo.reset()
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    hf_config = new_hf_config("llama", **(LLAMA_1B | {"depth": options.depth, "vocab_size": options.vocabulary}))
    model = build_new_model(hf_config, 0.02, 0, device, torch.bfloat16, arm.execution)
    runner = Runner(model, device, arm.packed, longest_document=options.length)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
    rng = np.random.default_rng(0)
    seconds, losses = [], []
    for number in range(options.steps + 3):
        batch = step_batch(rng, arm.packed, options)
        started = time.perf_counter()
        result = train_step(runner, optimizer, batch, number + 1)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(result.loss)
    median = statistics.median(seconds[3:])
    return {
        "notes": [f"{key} {choice}" for key, choice in model.choices.items()] + model.notes,
        "tok_s": round(options.rows * options.length / median),
        "step_s": round(median, 4),
        "first_step_s": round(seconds[0], 1),
        "second_step_s": round(seconds[1], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if is_cuda else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
    }


def train_step(runner: Runner, optimizer: torch.optim.Optimizer, batch: StepBatch, step: int) -> StepResult:
    result = compute_gradients(runner, batch, step)
    optimizer_step(runner, optimizer, result, step, LEARNING_RATE, MAX_GRAD_NORM)
    return result


def step_batch(rng: np.random.Generator, packed: bool, options: argparse.Namespace) -> StepBatch:
    rows = []
    for _ in range(options.rows):
        lengths = document_lengths(rng, options.length) if packed else [options.length]
        documents = [rng.integers(0, options.vocabulary, size) for size in lengths]
        rows.append([TokenSequence(ids, ids) for ids in documents])
    micro_batch: MicroBatch = collate(rows, pad_id=0)
    count = int((micro_batch.labels != -100).sum())
    return StepBatch([micro_batch], options.rows, options.rows * options.length, count, 0, 0)


def document_lengths(rng: np.random.Generator, total: int) -> list[int]:
    """Long-tailed lengths that fill a row exactly."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(2, int(rng.lognormal(6.0, 0.9)))))
    return lengths


if __name__ == "__main__":
    main()
