"""Measure head and loss alone, forward and backward: all logits, chunks, Liger. One JSON line per variant.

    python benchmarks/models/loss.py [--tokens 32768] [--width 2048] [--vocabulary 128256] [--ignored 0] [--device cpu]

The variants alternate; the time is the median of their rounds, and the ratio is to the full loss (or to the first
variant, if the full loss does not fit). `peak_gib` is what a variant allocates beyond hidden states and head. With
`--ignored`, that share of the labels is -100, and the chunked loss knows how many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from torchstone.loss.chunked import chunked_loss_sum
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.loss.fused import fused_loss_sum

LossSum = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_loss_sum(hidden_BTD: Tensor, head_weight: Tensor, labels_BT: Tensor) -> Tensor:
    return token_loss_sum(hidden_BTD @ head_weight.T, labels_BT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 32768), ("width", 2048), ("vocabulary", 128256), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--ignored", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(1, options.tokens, options.width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.width, device=device) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(options.vocabulary, (1, options.tokens))
    labels[torch.rand(labels.shape) < options.ignored] = -100
    count = int((labels != -100).sum())
    variants: dict[str, LossSum] = {"full": full_loss_sum}
    for size in options.chunks:
        variants[f"chunked {size}"] = partial(chunked_loss_sum, chunk_tokens=size, loss_tokens=count)
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        variants["liger"] = fused_loss_sum
    results = run_in_turn(variants, hidden, weight, labels.to(device), count, options.rounds)
    first = statistics.median(next(iter(results.values()))["seconds"][2:])
    for name, result in results.items():
        median = statistics.median(result["seconds"][2:])
        line = {"variant": name, "ms": round(1e3 * median, 2), "ratio": round(median / first, 3)}
        print(json.dumps(line | {key: result[key] for key in ("peak_gib", "loss")}))


def run_in_turn(
    variants: dict[str, LossSum], hidden: Tensor, weight: Tensor, labels: Tensor, count: int, rounds: int
) -> dict[str, dict]:
    results: dict[str, dict] = {name: {"seconds": []} for name in variants}
    for _ in range(rounds + 2):
        for name in list(results):
            try:
                seconds, peak, loss = measure(variants[name], hidden, weight, labels, count)
            except torch.cuda.OutOfMemoryError:
                del results[name]
                continue
            results[name]["seconds"].append(seconds)
            results[name] |= {"peak_gib": peak, "loss": loss}
    return results


def measure(
    loss_sum: LossSum, hidden: Tensor, weight: Tensor, labels: Tensor, count: int
) -> tuple[float, float | None, float]:
    hidden.grad = weight.grad = None
    is_cuda = hidden.is_cuda
    before = 0
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    loss = loss_sum(hidden, weight, labels) / count
    loss.backward()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if is_cuda else None
    return seconds, peak, loss.item()


if __name__ == "__main__":
    main()
