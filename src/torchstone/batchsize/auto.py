"""`training.batch_size auto`: chooses the micro-batches of a run before its first step.

Of the sizes that fit it takes the fastest for the run's own steps, or the smallest that is as fast to 1 %. The global
batch stays as configured, so the loss is the same for every size. A resumed run keeps its size, unless the hardware is
another one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from torchstone import __version__
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
from torchstone.checkpoint.load import read_state
from torchstone.config.schema import AutoBatchConfig, Config
from torchstone.errors import OutOfMemoryError
from torchstone.models.execution import MIN_FLOPS_TO_COMPILE
from torchstone.training.defaults import run_flops
from torchstone.training.memory import describe_fit, size_text
from torchstone.training.run import Run

# Steps of the run, and numbers of micro-steps, that are compared.
COMPARED_STEPS, COMPARED_SIZES = 4, 16
GIB = 2**30


class DoesNotFitError(OutOfMemoryError):
    """Not even the smallest micro-batch fits."""


def choose_micro_batch(run: Run, may_recompute: bool = False, had_to_recompute: bool = False) -> None:
    """Sets the micro-batches of the run, if they are to be found, and logs what was found.

    `may_recompute`: if no size fits, the caller tries full recomputation; `had_to_recompute`: it did."""
    flops = run_flops(run.model.parameter_count, run.data, run.schedule, run.progress, run.ctx)
    shares_rows = run.data.batch_sizes.micro_batch_tokens is not None
    if not is_wanted(run.config, shares_rows, run.device, flops, run.console.info):
        auto, default = asdict(run.config.auto_batch), asdict(AutoBatchConfig())
        unused = [f"auto_batch.{key}" for key in auto if key != "enabled" and auto[key] != default[key]]
        if unused:
            run.console.warn(f"{', '.join(unused)} has no effect: the size of micro-batches is not searched for")
        return
    # That of rank 0: all ranks must do the same.
    identity = run.ctx.all_gather_object(_identity(run))[0]
    recorded = {} if run.resumed_from is None else read_state(run.resumed_from).get("auto_batch") or {}
    if recorded and recorded["identity"] == identity | {"recompute": "full"} and recorded["had_to_recompute"]:
        is_auto = run.config.model.recompute == "auto"
        if is_auto and identity["recompute"] != "full":
            raise DoesNotFitError("the run had to begin with model.recompute full")
    if recorded.get("identity") == identity:
        size = recorded["size"]
        run.console.info(f"Auto-discovery found {_name(run)}={size} in {run.resumed_from}")
    else:
        if run.resumed_from is not None and not recorded:
            run.console.warn("the run had another size of micro-batches: results may differ in the last bits")
        if recorded:
            run.console.warn(
                f"the run had {_name(run)}={recorded['size']}, found with {_describe_identity(recorded['identity'])}; "
                f"now with {_describe_identity(identity)} it is found again, and results may differ in the last bits"
            )
        size = Discovery(run, may_recompute).find()
    run.data.set_micro_batch(size, run.ctx.dims.dp)
    run.runner.longest_document = run.data.shapes.longest_document(run.config.data.context_length)
    run.checkpoint_info["auto_batch"] = {"size": size, "had_to_recompute": had_to_recompute, "identity": identity}


def remember_out_of_memory(run: Run) -> None:
    """After a step that ran out of memory, though its size was found: the next run of this kind does not try it."""
    limit = run.progress.micro_batch_limit
    if "auto_batch" not in run.checkpoint_info or limit is None or not run.config.auto_batch.cache:
        return
    probe = RunProbe(run)
    cached = CachedProbe(probe, cache_key(run, probe), True, run.console.warn)
    cached.add_out_of_memory(limit // probe.row_tokens)


def is_wanted(
    config: Config, shares_rows: bool, device: torch.device, flops: float | None, log: Callable[[str], None]
) -> bool:
    """Whether to find the size. `flops`: of one device in the whole run; None if it has no end."""
    auto, training = config.auto_batch, config.training
    # Those of a preset that do not apply to the data are dropped.
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
            f"Auto-discovery found {_name(self.run)}={size * probe.unit}: {self._describe(size)}; "
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
            is_over_budget = probe.budget.max_load < load < math.inf
            if is_over_budget or (math.isinf(load) and self.may_recompute):
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
        candidates = {-(-probe.limit // count) for count in counts} | {n for n, m in result.measured.items() if m.fits}
        return fastest_size(candidates, self._step_seconds)

    def _step_seconds(self, size: int) -> float:
        """The mean of some of the run's steps, from the measured seconds of micro-steps."""
        run, probe, dp = self.run, self.probe, self.run.ctx.dims.dp
        data, seconds = replace(run.data), 0.0
        data.set_micro_batch(size * probe.unit, dp)
        sampler = data.sampler(run.config.training.seed, run.config.data.shuffle)
        for _ in range(COMPARED_STEPS):
            samples = sampler.take(data.batch_sizes.global_batch_size)
            for ranks in data.batch_sizes.assign_micro_steps(samples, data.train.lengths, dp):
                lengths = [[int(data.train.lengths[row].sum()) for row in rows] for rows in ranks]
                shapes = [(len(rows), max(rows, default=0)) for rows in lengths]
                tokens = max(data.shapes.pad_rows(rows) * data.shapes.pad_length(longest) for rows, longest in shapes)
                seconds += micro_step_seconds(self.result.measured, tokens / probe.row_tokens)
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
        "version": __version__,
        "torch": torch.__version__,
        "hardware": _identity(run)["hardware"],
        "threads": torch.get_num_threads() if run.device.type == "cpu" else None,
        "parallel": asdict(config.parallel),
        "model": model.hf_config,
        "implementation": model.implementation,
        "choices": {key: str(choice.value) for key, choice in model.choices.items()},
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


def _identity(run: Run) -> dict[str, Any]:
    """What a size was found for: on other hardware, or with other limits, it is found again."""
    auto, device = run.config.auto_batch, run.device
    name, memory = "cpu", 0
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return {
        "hardware": [name, memory, str(run.ctx.dims)],
        "margin": auto.margin,
        "memory_limit": auto.memory_limit,
        "recompute": run.model.choices["model.recompute"].value,
        "loss": run.model.choices["model.loss"].value,
    }


def _describe_identity(identity: dict[str, Any]) -> str:
    name, memory, dims = identity["hardware"]
    limit = "" if identity["memory_limit"] is None else f", memory_limit {identity['memory_limit']}"
    settings = f"recompute {identity['recompute']}, loss {identity['loss']}, margin {identity['margin']:g}{limit}"
    return f"{name}{f' of {memory / GIB:.0f} GiB' if memory else ''}, {dims}, {settings}"


def _name(run: Run) -> str:
    return "device_batch_size" if run.data.batch_sizes.micro_batch_tokens is None else "max_tokens_per_gpu"
