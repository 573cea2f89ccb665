"""Kernel time by kind, from the Chrome trace of torch.profiler.

The name of a kernel tells its kind. What the optimizer starts, such as Muon's matrix products, is the optimizer's. On a
GPU the time of every kernel, copy and fill counts; idle is the time in which none of them runs. On a CPU the time
of every operation counts, without the operations that it calls; idle is the time in Python, in autograd and of waiting.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("matmul", "attention", "loss", "optimizer", "copies", "communication", "other")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
# The name of the range that a step records around its update.
OPTIMIZER_RANGE = "optimizer"
TOP_KERNELS = 12
# The first pattern that a name contains decides; case does not matter.
PATTERNS = {
    "communication": r"nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    # The fifth template argument of softmax_warp_forward is is_log_softmax.
    "loss": r"cross_?entropy|nll_loss|log_?softmax|logsumexp|softmax_warp_\w+<.*, \d+, true",
    "attention": r"flash|fmha|attention|attn|sdpa|softmax",
    # The update, and the norm and clipping of gradients. _foreach_copy_ is a copy.
    "optimizer": r"adam|muon|triton_for_fused|aten::_foreach(?!_copy)|multi_tensor_apply(?!.*copy)",
}
LIBRARY_PATTERNS = {
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitk|aten::(linear|matmul|mm|bmm|addmm|baddbmm|_scaled_mm)\b",
    "copies": r"memcpy|memset|copy|CatArray|FillFunctor|aten::(to|cat|clone|contiguous|fill_|zero_|pin_memory)\b",
}
# Inductor names a kernel after every operation that it fuses: only one that fuses nothing else is a copy.
COPY_OPERATIONS = r"_?to_copy|clone|copy_?|cat|_?unsafe_view|view|transpose|permute|t|slice|expand"
INDUCTOR_PATTERNS = {
    "matmul": r"^triton_(tem|mm)_",
    "copies": rf"^triton_[a-z]+_fused(_({COPY_OPERATIONS}))+_\d+$",
}


def kernel_kind(name: str) -> str:
    """The kind, one of `KINDS`, of a CUDA kernel or a CPU operation."""
    patterns = PATTERNS | (INDUCTOR_PATTERNS if name.startswith("triton_") else LIBRARY_PATTERNS)
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, name, re.IGNORECASE)), "other")


class Kernel(NamedTuple):
    kind: str
    name: str


@dataclass(frozen=True)
class KernelTimes:
    """Microseconds of each kernel, how often it ran, and the microseconds in which at least one of them ran."""

    by_kernel: dict[Kernel, float]
    counts: Counter[Kernel]
    busy: float
    is_gpu: bool

    def by_kind(self) -> dict[str, float]:
        return {kind: sum(t for kernel, t in self.by_kernel.items() if kernel.kind == kind) for kind in KINDS}


def read_trace(path: Path) -> KernelTimes:
    """The kernel times of a Chrome trace (.json.gz); of CPU operations if no GPU was profiled."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in GPU_CATEGORIES]
    operations = kernels or _without_children([event for event in events if _is_operation(event)])
    launches = {_correlation(event): event for event in events if event.get("cat") in LAUNCH_CATEGORIES}
    ranges = [event for event in events if (event.get("cat"), event["name"]) == ("user_annotation", OPTIMIZER_RANGE)]
    times: dict[Kernel, float] = {}
    counts = Counter[Kernel]()
    for event in operations:
        start = launches.get(_correlation(event)) if kernels else event
        kind = kernel_kind(event["name"])
        if kind != "communication" and start is not None and any(_is_within(start, outer) for outer in ranges):
            kind = "optimizer"
        kernel = Kernel(kind, event["name"])
        times[kernel] = times.get(kernel, 0.0) + event["dur"]
        counts[kernel] += 1
    return KernelTimes(times, counts, _union(operations), bool(kernels))


def _is_operation(event: dict[str, Any]) -> bool:
    """Operations of a CPU, and compiled code; not autograd's nodes, which call operations and may wait for ranks."""
    name = event["name"]
    return event.get("cat") == "cpu_op" and ((":" in name and "autograd::" not in name) or "Compiled" in name)


def _correlation(event: dict[str, Any]) -> int | None:
    """What a kernel and its launch have in common."""
    return event.get("args", {}).get("correlation")


def _is_within(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return event["tid"] == outer["tid"] and outer["ts"] <= event["ts"] < outer["ts"] + outer["dur"]


def _without_children(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """CPU operations with the duration of those that they call subtracted; `span` is the whole duration."""
    events = [event | {"span": event["dur"]} for event in events]
    stacks: dict[Any, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["span"])):
        stack = stacks.setdefault(event["tid"], [])
        while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["span"]:
            stack.pop()
        if stack:
            stack[-1]["dur"] -= event["span"]
        stack.append(event)
    return events


def _union(events: Iterable[dict[str, Any]]) -> float:
    """The time that the events cover together."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        stop = event["ts"] + event.get("span", event["dur"])
        total += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    return total


def kernel_table(times: KernelTimes, first: int, last: int, seconds: float, extra: str = "") -> str:
    """Milliseconds per step by kind, and the kernels that take the most time.

    `seconds`: duration of all steps. `extra`: what else was profiled.
    """
    steps = last - first + 1
    step_ms = 1e3 * seconds / steps
    counts = Counter[str]()
    for kernel, calls in times.counts.items():
        counts[kernel.kind] += calls
    lines = [
        f"profile of steps {first} to {last}: {step_ms:.1f} ms a step{extra}",
        f"{'kind':<16}{'ms':>10}{'share':>10}{'calls':>10}",
    ]
    idle = max(0.0, step_ms - times.busy / 1e3 / steps)
    rows = [(kind, time / 1e3 / steps, counts[kind] / steps) for kind, time in times.by_kind().items()]
    for kind, ms, count in [*rows, ("idle", idle, 0.0)]:
        lines.append(f"{kind:<16}{ms:>10.2f}{100 * ms / step_ms:>8.1f} %{count:>10.0f}".rstrip())
    lines.append("kernels with the most time per step:" if times.is_gpu else "operations with the most time per step:")
    for kernel, time in sorted(times.by_kernel.items(), key=lambda item: -item[1])[:TOP_KERNELS]:
        lines.append(f"{time / 1e3 / steps:>10.2f} ms  {kernel.kind:<14}{kernel.name[:100]}")
    return "\n".join(lines)
