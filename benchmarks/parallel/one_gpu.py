"""FSDP2's mixed precision on one device beside the same arithmetic written out by hand: losses, tokens a second.

    python benchmarks/parallel/one_gpu.py [--rows 4] [--length 2048] [--steps 20] [--device cuda]

The shape is Llama 3.2 1B's. `sharded` is training.precision bf16 as a run has it: FSDP2 on a mesh of one, parameters
gathered as bf16, gradients reduced in fp32, AdamW on fp32. `by hand` has no FSDP2: fp32 weights are copied into a bf16
decoder before each step, and its gradients widened for AdamW. `fp32` tells how much of a loss is bf16's noise. The
first two are timed step by step in turn; --compile block compiles both. A JSON line an arm.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from speed import LLAMA_1B, step_batch

from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.models.execution import Execution
from torchstone.models.families import new_config
from torchstone.models.opening import new_model
from torchstone.optim.build import build_optimizer
from torchstone.optim.clip import clip_gradients
from torchstone.parallel.build import SharedBuilder, runner_of
from torchstone.parallel.mesh import Place, opened
from torchstone.parallel.running import Runner
from torchstone.training.step import backward, train_step

Step = Callable[[StepBatch, int], float]
RATE, MAX_NORM = 1e-4, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 4), ("length", 2048), ("steps", 20), ("depth", 16), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", default="none")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = new_config("llama", **(LLAMA_1B | {"depth": options.depth, "vocab_size": options.vocabulary}))
    execution = Execution(compile=options.compile)
    batches = [step_batch(np.random.default_rng(number), False, options) for number in range(4)]
    with opened(ParallelConfig(), device, mixed=True) as place:
        found = in_turn(
            {"sharded": sharded(shape, place, device, execution), "by hand": by_hand(shape, device, execution)},
            batches, options, device,
        )  # fmt: skip
    losses = {name: each["losses"] for name, each in found.items()}
    found |= in_turn({"fp32": in_fp32(shape, device)}, batches, options, device)
    for name, each in found.items():
        apart = [abs(a - b) / b for a, b in zip(each["losses"], losses["by hand"], strict=True)]
        print(json.dumps({"arm": name, "worst_loss_difference": max(apart), **each, "torch": torch.__version__}))


def in_turn(
    arms: dict[str, Step], batches: list[StepBatch], options: argparse.Namespace, device: torch.device
) -> dict[str, dict]:
    """Every arm's step number n before any arm's n + 1."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    losses: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.steps):
        for name, step in arms.items():
            began = time.perf_counter()
            losses[name].append(step(batches[number % len(batches)], number + 1))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    tokens = options.rows * options.length
    return {
        name: {"tok_s": round(tokens / statistics.median(seconds[name][3:])), "losses": losses[name]} for name in arms
    }


def sharded(shape: dict, place: Place, device: torch.device, execution: Execution) -> Step:
    builder = SharedBuilder(place, ParallelConfig(), "bf16", device)
    model = new_model(shape, 0.02, 0, device, torch.bfloat16, execution, builder)
    runner = runner_of(model, builder, packed=False)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig())
    return lambda batch, number: train_step(runner, optimizer, batch, number, RATE, MAX_NORM).loss


def by_hand(shape: dict, device: torch.device, execution: Execution) -> Step:
    model = new_model(shape, 0.02, 0, device, torch.float32)
    narrow = new_model(shape, 0.02, 0, device, torch.bfloat16, execution)
    wide = dict(model.named_parameters())
    optimizer = build_optimizer(model.named_parameters(), OptimConfig())
    runner = Runner(narrow, device, packed=False)

    def step(batch: StepBatch, number: int) -> float:
        with torch.no_grad():
            for name, parameter in narrow.named_parameters():
                parameter.copy_(wide[name])
                parameter.grad = None
        done = backward(runner, batch, number)
        for name, parameter in narrow.named_parameters():
            wide[name].grad = parameter.grad.float()
        clip_gradients(wide.values(), done.grad_norm, MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
        return done.loss

    return step


def in_fp32(shape: dict, device: torch.device) -> Step:
    model = new_model(copy.deepcopy(shape), 0.02, 0, device, torch.float32)
    runner, optimizer = Runner(model, device, packed=False), build_optimizer(model.named_parameters(), OptimConfig())
    return lambda batch, number: train_step(runner, optimizer, batch, number, RATE, MAX_NORM).loss


if __name__ == "__main__":
    main()
