"""Compare FSDP2's mixed precision on one device with the same arithmetic without FSDP2: losses, tokens per second.

    python benchmarks/parallel/one_gpu.py [--rows 4] [--length 2048] [--steps 20] [--device cuda]

The model has the sizes of Llama 3.2 1B. `fsdp2` is training.precision bf16 as in a run: FSDP2 on a mesh of one,
parameters gathered in bf16, gradients reduced in fp32, AdamW in fp32. `by hand` has no FSDP2: fp32 weights are copied
into a bf16 decoder before each step, and its gradients are cast to fp32 for AdamW. `fp32` shows how much of a
difference is bf16 noise. The first two take turns, step by step; --compile block compiles both. One JSON line each.
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
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from speed import LEARNING_RATE, LLAMA_1B, MAX_GRAD_NORM, step_batch, train_step

from torchstone.config.schema import OptimConfig, ParallelConfig
from torchstone.data.loader import StepBatch
from torchstone.models.execution import ExecutionOptions
from torchstone.models.families import new_hf_config
from torchstone.optim.build import build_optimizer
from torchstone.optim.clip import clip_grads_with_norm_
from torchstone.parallel.build import ShardedModelBuilder, build_new_model, build_runner
from torchstone.parallel.mesh import ParallelContext, init_distributed
from torchstone.parallel.runner import Runner
from torchstone.training.step import compute_gradients

Step = Callable[[StepBatch, int], float]
HfConfig = dict[str, Any]


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
    hf_config = new_hf_config("llama", **(LLAMA_1B | {"depth": options.depth, "vocab_size": options.vocabulary}))
    execution = ExecutionOptions(compile=options.compile, loss="full")
    batches = [step_batch(np.random.default_rng(number), False, options) for number in range(4)]
    with init_distributed(ParallelConfig(), device, mesh_of_one=True) as ctx:
        steps = {
            "fsdp2": fsdp2_step(hf_config, ctx, device, execution),
            "by hand": by_hand_step(hf_config, device, execution),
        }
        results = run_in_turn(steps, batches, options, device)
    expected = results["by hand"]["losses"]
    results |= run_in_turn({"fp32": fp32_step(hf_config, device)}, batches, options, device)
    for name, result in results.items():
        differences = [abs(a - b) / b for a, b in zip(result["losses"], expected, strict=True)]
        print(json.dumps({"arm": name, "max_loss_difference": max(differences), **result, "torch": torch.__version__}))


def run_in_turn(
    steps: dict[str, Step], batches: list[StepBatch], options: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Step n of all before step n + 1 of any."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.steps):
        for name, step in steps.items():
            started = time.perf_counter()
            losses[name].append(step(batches[number % len(batches)], number + 1))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    tokens = options.rows * options.length
    return {
        name: {"tok_s": round(tokens / statistics.median(seconds[name][3:])), "losses": losses[name]} for name in steps
    }


def fsdp2_step(hf_config: HfConfig, ctx: ParallelContext, device: torch.device, execution: ExecutionOptions) -> Step:
    builder = ShardedModelBuilder(ctx, ParallelConfig(), "bf16", device)
    model = build_new_model(hf_config, 0.02, 0, device, torch.bfloat16, execution, builder)
    runner = build_runner(model, builder, packed=False)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
    return lambda batch, number: train_step(runner, optimizer, batch, number).loss


def by_hand_step(hf_config: HfConfig, device: torch.device, execution: ExecutionOptions) -> Step:
    model = build_new_model(hf_config, 0.02, 0, device, torch.float32)
    bf16_model = build_new_model(hf_config, 0.02, 0, device, torch.bfloat16, execution)
    masters = dict(model.named_parameters())
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
    runner = Runner(bf16_model, device, packed=False)

    def step(batch: StepBatch, number: int) -> float:
        with torch.no_grad():
            for name, parameter in bf16_model.named_parameters():
                parameter.copy_(masters[name])
                parameter.grad = None
        result = compute_gradients(runner, batch, number)
        for name, parameter in bf16_model.named_parameters():
            masters[name].grad = parameter.grad.float()
        clip_grads_with_norm_(masters.values(), MAX_GRAD_NORM, result.grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        optimizer.step()
        return result.loss

    return step


def fp32_step(hf_config: HfConfig, device: torch.device) -> Step:
    model = build_new_model(copy.deepcopy(hf_config), 0.02, 0, device, torch.float32)
    runner = Runner(model, device, packed=False)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(), model.parameter_kinds())
    return lambda batch, number: train_step(runner, optimizer, batch, number).loss


if __name__ == "__main__":
    main()
