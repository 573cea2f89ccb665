"""Finds the size of a run's micro-batches.

Of the sizes that fit it takes the fastest for the run's own steps, or the smallest that is as fast to 1 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from torchstone.batchsize.cache import CachedProbe
from torchstone.batchsize.probe import RunProbe
from torchstone.batchsize.search import (
    Measurements,
    SearchResult,
    fastest_size,
    find_largest,
    is_saturated,
    micro_step_seconds,
)
from torchstone.config.schema import Config
from torchstone.errors import OutOfMemoryError
from torchstone.models.execution import MIN_FLOPS_TO_COMPILE
from torchstone.training.memory import describe_fit, size_text
from torchstone.training.run import Run

# Steps of the run, and numbers of micro-steps, that are compared.
COMPARED_STEPS, COMPARED_SIZES = 4, 16


class DoesNotFitError(OutOfMemoryError):
    """Not even the smallest micro-batch fits."""


def is_wanted(
    config: Config, shares_rows: bool, device: torch.device, flops: float | None, log: Callable[[str], None]
) -> bool:
    """Whether to find the size. `flops`: of one device in the whole run; None if it has no end."""
    auto, training = config.auto_batch, config.training
    # Sizes of a preset that do not apply to the data are dropped.
    keys = ["max_tokens_per_gpu"] if shares_rows else ["batch_size", "max_tokens_per_gpu", "grad_accum_steps"]
    manual = [key for key in keys if getattr(training, key) not in (None, "auto")]
    is_requested = bool(auto.enabled or training.batch_size == "auto")
    if manual and is_requested:
        log(f"Auto-discovery skipped: training.{manual[0]} {getattr(training, manual[0])} is set")
    if manual or auto.enabled is False:
        return False
    if is_requested or device.type != "cuda":
        return is_requested
    if flops is not None and flops < MIN_FLOPS_TO_COMPILE:
        log("Auto-discovery skipped: the run is too short; --training.batch_size auto searches anyway")
        return False
    return True


class Discovery:
    """Finds the size of a run's micro-batches: what a step of each size takes, and which is the fastest that fits."""

    def __init__(self, run: Run, may_recompute: bool = False) -> None:
        self.may_recompute = may_recompute
        self.run, self.auto, self.start = run, run.config.auto_batch, time.perf_counter()
        self.probe = RunProbe(run)
        self.cached = CachedProbe(self.probe, cache_key(run, self.probe), self.auto.cache, run.console.warn)
        self.result, self.is_late = SearchResult(0, False, {}), False

    @property
    def is_limited_by_memory(self) -> bool:
        """Whether larger sizes could be faster, but do not fit."""
        result = self.result
        return 0 < result.largest < self.probe.limit and not self.is_late and not is_saturated(result.measured)

    def find(self) -> int:
        """Rows, or tokens if conversations share rows."""
        probe = self.probe
        try:
            with probe.without_trace():
                base_load, max_load = self.cached.base_load(), probe.budget.max_load
                self.result = find_largest(self.cached.measure, probe.limit, base_load, max_load, self.should_stop)
        finally:
            self.cached.save()
        size = self._choose()
        self.run.console.info(
            f"Auto-discovery found {size_name(self.run)}={size * probe.unit}: {self._describe(size)}; "
            f"{self.cached.describe(time.perf_counter() - self.start)}"
        )
        return size * probe.unit

    def should_stop(self, measured: Measurements) -> bool:
        self.is_late = self.run.ctx.any_rank(time.perf_counter() - self.start > self.auto.time_limit)
        if self.is_late:
            self.run.console.warn(f"Auto-discovery ends after auto_batch.time_limit {self.auto.time_limit:g} s")
        return self.is_late or is_saturated(measured)

    def _choose(self) -> int:
        """The fastest size that fits. The smallest one may take more than the margin, if it fits at all."""
        result, probe = self.result, self.probe
        if result.largest == 0:
            load = result.measured[1].load
            # Between the margin and all of the memory it is the last resort.
            if self.may_recompute or probe.budget.max_load < load < math.inf:
                raise self._does_not_fit()
            self.run.console.warn(
                "even the smallest micro-batch is out of memory: it is split when a step comes to it"
                if math.isinf(load)
                else f"even the smallest micro-batch takes {load * self.auto.margin:.0%} of the memory, more than "
                f"auto_batch.margin {self.auto.margin:g}"
            )
            return 1
        # Those that split a step into equal parts.
        counts = range(-(-probe.limit // result.largest), probe.limit + 1)[:COMPARED_SIZES]
        measured = {-(-probe.limit // n) for n, each in result.measured.items() if each.fits}
        candidates = {-(-probe.limit // count) for count in {*counts, *measured}}
        return fastest_size(candidates, self.step_seconds)

    def step_seconds(self, size: int) -> float:
        """The mean of some of the run's steps, from the measured seconds of micro-steps; infinite if no size fits."""
        run, probe, dp = self.run, self.probe, self.run.ctx.dims.dp
        if not self.result.largest:
            return math.inf
        data, seconds = replace(run.data), 0.0
        data.set_micro_batch(size * probe.unit, dp)
        measured = {probe.padded_tokens(n): each.seconds for n, each in self.result.measured.items() if each.fits}
        sampler = data.sampler(run.config)
        for _ in range(COMPARED_STEPS):
            samples = sampler.take(data.batch_sizes.global_batch_size)
            for ranks in data.batch_sizes.assign_micro_steps(samples, data.train.lengths, dp):
                lengths = [[int(data.train.lengths[row].sum()) for row in rows] for rows in ranks]
                shapes = [(len(rows), max(rows, default=0)) for rows in lengths]
                tokens = max(data.shapes.pad_rows(rows) * data.shapes.pad_length(longest) for rows, longest in shapes)
                seconds += micro_step_seconds(measured, tokens)
        return seconds / COMPARED_STEPS

    def _describe(self, size: int) -> str:
        entry, probe, largest = self.cached.entry(size), self.probe, self.result.largest
        unit = self.probe.unit
        margin = f"margin {self.auto.margin:g}"
        if not largest:
            text = "not even this size fits"
        elif size == probe.limit:
            text = "a larger one would change nothing"
        elif largest == probe.limit:
            text = f"{largest * unit} would fit, too"
        elif self.result.is_exact:
            text = f"{largest * unit} is the largest that fits"
        elif self.is_limited_by_memory:
            text = "larger ones are not expected to fit"
        else:
            text = f"larger ones {'were not tried' if self.is_late else 'are at most 1 % faster'}"
        if entry is None or entry.used is None or entry.seconds is None:
            return f"{text} ({margin})"
        tokens = size * probe.row_tokens * self.run.ctx.dims.dp / entry.seconds
        return (
            f"{size_text(entry.used)} of {size_text(probe.budget.memory)} ({margin}) and "
            f"{tokens:,.0f} tokens/s in full micro-batches; {text}"
        )

    def _does_not_fit(self) -> DoesNotFitError:
        run, budget = self.run, self.probe.budget
        used = self.cached.entry(1)
        needs = "is out of memory" if used is None or used.used is None else f"needs {size_text(used.used)}"
        is_limited = budget.limit == budget.memory
        limit, hint = (
            " (auto_batch.memory_limit)" if is_limited else "",
            describe_fit(run, (1, self.probe.row_tokens), is_measured=used is not None and used.used is not None),
        )
        return DoesNotFitError(
            f"not even one row fits: a step with micro-batches of {self.probe.row_tokens} tokens {needs}, and may take "
            f"{self.auto.margin:.0%} of the {size_text(budget.memory)} of {run.device}{limit}",
            f"use a larger --auto_batch.memory_limit; {hint}" if is_limited else hint,
        )


def cache_key(run: Run, probe: RunProbe) -> dict[str, Any]:
    """Everything that changes the memory or the time of a step of one size."""
    config, model = run.config, run.model
    return {
        "versions": package_versions(),
        "settings": run.checkpoint_info["limit_settings"],
        "threads": torch.get_num_threads() if run.device.type == "cpu" else None,
        "parallel": asdict(config.parallel),
        "model": model.hf_config,
        "implementation": model.implementation,
        "chunk_tokens": getattr(model, "chunk_tokens", None),
        "liger": config.model.liger,
        "fp8_recipe": config.training.fp8_recipe,
        "optimizer": [config.optim.name, config.optim.weight_decay > 0],
        "tuning": asdict(config.tuning),
        "row_tokens": probe.row_tokens,
        "unit": probe.unit,
        "packed": run.data.packed,
        "shapes": [run.data.shapes.multiple, run.data.shapes.has_fixed_length],
    }


def package_versions() -> dict[str, str]:
    """Those that may change the memory or the time of a step."""
    names = ("torchstone", "torch", "transformers", "triton", "flash-attn", "flash-attn-4", "liger-kernel", "torchao")
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def size_name(run: Run) -> str:
    return "device_batch_size" if run.data.batch_sizes.micro_batch_tokens is None else "max_tokens_per_gpu"
