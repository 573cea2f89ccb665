"""Searches the layouts of a number of GPUs: those that fit, by predicted tokens a second.

It tries all sizes of the mesh, with tensor parallelism within one machine, the ZeRO stages, activation checkpointing
(unless the config sets it) and micro-batches (powers of two, unless the config sets them), and shows the best of every
mesh. The global batch stays the same, and the rules of a config hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torchstone.batchsize.gpus import GIB
from torchstone.batchsize.layout import Job, Layout, estimate_layout, fits, row_counts
from torchstone.batchsize.speed import StepTime, predict_step
from torchstone.config.schema import ParallelConfig, validate
from torchstone.errors import UsageError
from torchstone.models.execution import (
    ExecutionOptions,
    Recompute,
    check_fallback_execution,
    choose_compile,
    choose_loss,
)
from torchstone.parallel.build import stage_layer_ranges
from torchstone.parallel.fsdp import COMPUTE_DTYPE
from torchstone.parallel.memory_estimate import StepMemory
from torchstone.parallel.mesh import ParallelDims
from torchstone.training.defaults import check_compile

MAX_SHOWN = 10


@dataclass(frozen=True)
class RankedLayout:
    layout: Layout
    memory: StepMemory
    time: StepTime


@dataclass(frozen=True)
class Search:
    """The best layouts first. `tried`: how many the rules and the model allow; `fitting`: how many of them fit."""

    best: list[RankedLayout]
    tried: int
    fitting: int

    def to_dict(self, job: Job) -> dict[str, Any]:
        layouts = [
            asdict(each.layout.dims)
            | {"zero": each.layout.parallel.zero, "rows": each.layout.rows, "recompute": each.layout.recompute}
            | {"memory": each.memory.total, "tokens_per_second": each.time.tokens_per_second}
            | {"flags": each.layout.flags(job)}
            for each in self.best
        ]
        return {"tried": self.tried, "fitting": self.fitting, "layouts": layouts}

    @property
    def limit(self) -> str:
        """What the best layout loses time to, and what kept others out."""
        if not self.best:
            if not self.tried:
                return "no layout is possible: a step has too few samples, or the model too few layers or heads"
            return f"none of {self.tried} layouts fits: more GPUs, a smaller precision or fewer tokens in a row would"
        time = self.best[0].time
        lost = {"communication": time.communication, "the bubble of the pipeline": time.bubble}
        lost |= {"waiting for the host": time.idle, "the optimizer": time.optimizer}
        name, seconds = max(lost.items(), key=lambda each: each[1])
        share = 100 * seconds / time.seconds
        if share < 1:
            return f"{self.fitting} of {self.tried} layouts fit; the first one computes nearly all the time"
        return (
            f"{self.fitting} of {self.tried} layouts fit; the first one loses most to {name}, {share:.0f} % of a step"
        )


def search_layouts(
    job: Job, layout: Layout, has_free_rows: bool, has_free_recompute: bool, execution: ExecutionOptions
) -> Search:
    """`layout`: that of the config."""
    if predict_step(job, layout) is None:
        raise UsageError(
            f"--search ranks layouts by their speed, and that of {job.gpu.name} is not known",
            "use --gpu with a name, such as h100-80gb, or set --observe.peak_tflops",
        )
    tried, fitting, best = 0, 0, dict[ParallelDims, RankedLayout]()
    for parallel, dims in _valid_layouts(job, layout):
        own = _job_of(job, execution, dims)
        for recompute in recomputes(own) if has_free_recompute else (layout.recompute,):
            candidate = Layout(dims, parallel, layout.rows, recompute)
            for rows in row_counts(own, candidate) if has_free_rows else (layout.rows,):
                candidate = replace(candidate, rows=rows)
                tried, memory = tried + 1, estimate_layout(own, candidate)
                if not fits(own, memory):
                    continue
                time, fitting = predict_step(own, candidate), fitting + 1
                assert time is not None
                ranked = RankedLayout(candidate, memory, time)
                best[dims] = min(best.get(dims, ranked), ranked, key=_rank)
    return Search(sorted(best.values(), key=_rank)[:MAX_SHOWN], tried, fitting)


def _rank(each: RankedLayout) -> tuple[float, int]:
    """The fastest layout comes first; of equally fast ones, the one that needs the least memory."""
    return -_rounded_speed(each), each.memory.total


def _rounded_speed(each: RankedLayout) -> float:
    """Tokens per second to three digits: predictions are not more exact."""
    return float(f"{each.time.tokens_per_second:.3g}")


def _valid_layouts(job: Job, layout: Layout) -> Iterator[tuple[ParallelConfig, ParallelDims]]:
    world = layout.dims.world_size
    for tp in _divisors(min(world, job.gpu.node_size)):
        for pp in _divisors(world // tp) if world % tp == 0 else ():
            for dp_shard in _divisors(world // tp // pp):
                dims = ParallelDims(pp, world // tp // pp // dp_shard, dp_shard, tp)
                for zero in (3, 2, 1) if dp_shard > 1 else (3,):
                    parallel = replace(layout.parallel, **asdict(dims), zero=zero)
                    if dims.dp <= job.step_rows and _is_valid(job, parallel, dims):
                        yield parallel, dims


def _is_valid(job: Job, parallel: ParallelConfig, dims: ParallelDims) -> bool:
    config = replace(job.config, parallel=parallel)
    try:
        # The data is not needed.
        validate(config, "plan")
        check_compile(config, dims)
        if job.model.fallback is not None:
            check_fallback_execution(ExecutionOptions(tp=dims.tp, pp=dims.pp))
        stage_layer_ranges(job.model.config, dims, parallel)
    except UsageError:
        return False
    return True


def _job_of(job: Job, execution: ExecutionOptions, dims: ParallelDims) -> Job:
    """The job with `auto` settings resolved for that layout."""
    if job.model.fallback is not None or dims.tp == 1 == execution.tp:
        return job
    execution, device = replace(execution, tp=dims.tp, pp=dims.pp), torch.device("cuda")
    dtype = COMPUTE_DTYPE[job.config.training.precision]
    _, chunk_tokens = choose_loss(job.model.config, execution, device, dtype)
    return replace(job, compile=choose_compile(execution, device).value, chunk_tokens=chunk_tokens)


def recomputes(job: Job) -> tuple[Recompute, ...]:
    """The settings of model.recompute that may be the fastest, the one that recomputes least first."""
    if job.model.fallback is not None:
        return ("none", "full")
    return ("elementwise" if job.compile != "none" else "none", "selective", "full")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def describe_layouts(search: Search, job: Job) -> list[str]:
    """A line for each, with the flags to type."""
    return [
        f"{_rounded_speed(each):>12,.0f} {each.memory.total / GIB:>7.1f}  {each.layout.flags(job)}"
        for each in search.best
    ]
