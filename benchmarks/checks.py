"""What the checks of a step cost: NaN, loss spikes, the copy of the random numbers' state that a replay needs.

    python benchmarks/checks.py --model.depth 16 --training.batch_size 8 --data.context_length 4096
    python benchmarks/checks.py --arm skip                with debug.on_nan skip, which reads numbers before each update

Flags are those of `torchstone train`. The arm `without` has none of the checks; arms take turns, and each run is one
process's. The speed is the mean of all steps after the second.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.profiler import record_function

from torchstone import api
from torchstone.config.load import extract_config_flags
from torchstone.observe.kernel_times import OPTIMIZER_RANGE
from torchstone.observe.metrics import read_metrics
from torchstone.optim.clip import clip_coefficient
from torchstone.parallel.runner import Runner
from torchstone.training import loop, out_of_memory, step_log
from torchstone.training.step import StepResult

WARMUP_STEPS = 2


def main() -> None:
    flags, arguments = extract_config_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=["checks", "skip"], default="checks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {options.arm: [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for arm in seconds:
                seconds_of_step = measure(arm, options.steps, dict(flags), Path(folder, f"{arm}-{repeat}"))
                seconds[arm].append(seconds_of_step)
                print(json.dumps({"arm": arm, "repeat": repeat + 1, "step_ms": 1e3 * seconds_of_step}), flush=True)
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    mean = statistics.mean(seconds[options.arm]) / statistics.mean(seconds["without"])
    print(f"a step with {options.arm} takes {mean:.4f} of one without (pairs: {min(ratios):.4f} to {max(ratios):.4f})")


def measure(arm: str, steps: int, flags: dict[str, Any], folder: Path) -> float:
    """Seconds of a step."""
    values: dict[str, Any] = {"training.max_steps": steps, "output_dir": str(folder), "checkpoint.at_end": False}
    values |= {"checkpoint.every_steps": None, "observe.console": "quiet", "data.validation_split": 0.0} | flags
    values |= {"debug.on_nan": "skip"} if arm == "skip" else {}
    with ExitStack() as stack:
        if arm == "without":
            stack.enter_context(patch.object(step_log, "loss_limit", lambda *_: math.inf))
            stack.enter_context(patch.object(step_log, "judge_step", lambda *_: True))
            stack.enter_context(patch.object(loop, "judge_step", lambda *_: True))
            stack.enter_context(patch.object(out_of_memory, "get_rng_states", lambda *_: {}))
            stack.enter_context(patch.object(loop, "optimizer_step", unchecked_optimizer_step))
        api.train(None, values, preset="debug")
    return statistics.mean(line["step_s"] for line in read_metrics(folder / "metrics.jsonl")[WARMUP_STEPS:])


def unchecked_optimizer_step(
    runner: Runner,
    optimizer: Any,
    result: StepResult,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
    max_loss: float,
    previous: StepResult | None,
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    coefficient: Tensor = clip_coefficient(result.sums[1], max_grad_norm)
    with record_function(OPTIMIZER_RANGE):
        optimizer.clip_and_step(coefficient)
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
