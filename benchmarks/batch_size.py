"""The automatic batch size against a bisection: what it finds, how long it takes, and what other sizes give.

    python benchmarks/batch_size.py --depth 12 20 26 32
    python benchmarks/batch_size.py --depth 2 --width 64 --length 64 --tokens 4096 --memory-limit 24MiB --device cpu

For each depth it prints one JSON line: the size that is found, the seconds and the steps that ran out of memory on the
way; the largest size that fits, by bisection; and the tokens per second of real steps of the run with 1, 8, 16, 32, ...
rows, with the size that was found and with the largest. `--steps` is the number of steps that are then trained at the
size that was found, of two micro-batches on rows of the full length.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.callback import on_compile_end, on_compile_start
from train import write_tokenizer, write_tokens

from torchstone.batchsize.probe import RunProbe
from torchstone.batchsize.run_discovery import Discovery
from torchstone.config.load import load_config
from torchstone.data.loader import StepBatch
from torchstone.observe.console import Console
from torchstone.optim.adamw import AdamW
from torchstone.training.checks import free_device_memory
from torchstone.training.run import Run
from torchstone.training.setup import build_run, select_device
from torchstone.training.step import compute_gradients, optimizer_step

# Micro-steps before the time is taken; then steps for at least this long.
WARMUP_STEPS, MIN_STEPS, MIN_SECONDS = 3, 1, 3.0
VOCABULARY = 50304


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, nargs="+", default=[12, 20, 26, 32])
    parser.add_argument("--width", type=int, help="by default 64 per layer")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=524288, help="per step")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--memory-limit")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHSTONE_CACHE"] = str(Path(folder, "cache"))
        write_tokenizer(Path(folder, "tokenizer"), options.vocabulary)
        rows = options.tokens // options.length
        sizes = {"length": options.length, "rows": rows, "packed_tokens": None, "vocab_size": options.vocabulary}
        write_tokens(SimpleNamespace(**sizes), 1, Path(folder, "tokens.jsonl"))
        for depth in options.depth:
            print(json.dumps(measure(depth, options, folder)), flush=True)
            # What is left of this run would count in the next one.
            free_device_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def measure(depth: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    run = make_run(depth, options, folder)
    clock, start = CompileClock(), time.perf_counter()
    discovery = Discovery(run)
    found = discovery.find()
    seconds, compiling, probe = time.perf_counter() - start, clock.seconds, RunProbe(run)
    log(f"depth {depth}: found {found} in {seconds:.1f} s, {compiling:.1f} s of them compiling")
    largest = bisect_largest(probe, found)
    log(f"depth {depth}: {largest} is the largest that fits")
    speeds = {}
    for size in sorted({1, found, largest} | {2**n for n in range(3, 12)}):
        if size <= largest:
            speeds[size] = tokens_per_second(run, size)
            log(f"depth {depth}: {speeds[size]:,.0f} tokens/s with {size} rows")
    best = max(speeds.values())
    line = {
        "depth": depth, "parameters": run.model.parameter_count, "found": found, "largest": largest,
        "seconds": seconds, "of_them_compiling": compiling, "out_of_memory": discovery.probe.oom_count, "tok_s": speeds,
        "found_to_best": speeds[found] / best, "found_to_8": speeds[found] / speeds[8] if 8 in speeds else None,
        "peak_gib": peak_gib(run),
    }  # fmt: skip
    if options.steps:
        train_steps(run, found, options.steps)
        line["steps_at_found"] = options.steps
    return line


class CompileClock:
    """Seconds that torch.compile takes from now on, until it is reset."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0
        on_compile_start(lambda _: setattr(self, "_start", time.perf_counter()))
        on_compile_end(lambda _: setattr(self, "seconds", self.seconds + time.perf_counter() - self._start))


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_run(depth: int, options: argparse.Namespace, folder: str) -> Run:
    values = {
        "model.depth": depth, "model.width": options.width, "model.tokenizer": f"{folder}/tokenizer",
        "data.path": f"{folder}/tokens.jsonl", "data.context_length": options.length, "data.packing": False,
        "data.cache_dir": f"{folder}/datasets", "training.global_batch_size": options.tokens // options.length,
        "training.max_steps": 10**6, "training.batch_size": "auto", "auto_batch.memory_limit": options.memory_limit,
        "system.device": options.device, "output_dir": f"{folder}/run", "observe.console": "quiet",
    }  # fmt: skip
    config = load_config(overrides={key: value for key, value in values.items() if value is not None})
    return build_run(config, Console("quiet"), select_device(config.system))


def bisect_largest(probe: RunProbe, found: int) -> int:
    """The largest size that fits, between the one that was found and the limit."""
    largest, too_large = found, probe.limit + 1
    with probe.without_trace():
        while largest + 1 < too_large:
            size = (largest + too_large) // 2
            largest, too_large = (size, too_large) if probe.measure(size)[1].fits else (largest, size)
    return largest


def tokens_per_second(run: Run, size: int) -> float:
    """Of whole steps of the run, with micro-batches of `size` rows. Weights change, which no figure here depends on."""
    batch = prepare(run, size)
    # The last micro-batch may have fewer rows, for which other code is compiled.
    for part in (batch.micro_batches[:1], batch.micro_batches[-1:]):
        take_step(run, replace(batch, micro_batches=part), WARMUP_STEPS)
    synchronize(run)
    start, steps = time.perf_counter(), 0
    while steps < MIN_STEPS or time.perf_counter() - start < MIN_SECONDS:
        take_step(run, batch)
        steps += 1
        synchronize(run)
    return steps * batch.tokens / (time.perf_counter() - start)


def train_steps(run: Run, size: int, steps: int) -> None:
    """Steps of at most two micro-batches, all of them of full rows: what takes the most memory."""
    batch = prepare(run, size)
    take_step(run, replace(batch, micro_batches=batch.micro_batches[:2]), steps)
    synchronize(run)


def prepare(run: Run, size: int) -> StepBatch:
    """A step of the run with such micro-batches. Nothing is compiled yet."""
    run.data.set_micro_batch(size, run.ctx.dims.dp)
    torch.compiler.reset()
    run.model.train()
    samples = run.data.batch_sizes.global_batch_size
    return next(iter(run.data.batches(run.config, 0, samples, pin_memory=run.device.type == "cuda")))


def take_step(run: Run, batch: StepBatch, times: int = 1) -> None:
    assert isinstance(run.optimizer, AdamW)
    for step in range(1, times + 1):
        result = compute_gradients(run.runner, batch, step)
        optimizer_step(run.runner, run.optimizer, result, step, 1e-5, 1.0)


def synchronize(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def peak_gib(run: Run) -> float | None:
    return torch.cuda.max_memory_allocated(run.device) / 2**30 if run.device.type == "cuda" else None


if __name__ == "__main__":
    main()
