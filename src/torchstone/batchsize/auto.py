"""`training.batch_size auto`: sets the micro-batches of a run before its first step.

The global batch stays as configured, so the loss is the same for every size. A resumed run keeps its size, unless the
hardware is another one, or a setting that decides the memory of a step.

Where `model.recompute` is `auto` and larger micro-batches could be faster, but do not fit, more recomputation may pay.
Whether it does is predicted as in `torchstone plan`, then measured, and the faster one is taken.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torchstone.batchsize.cache import CachedProbe
from torchstone.batchsize.layout import estimate_layout
from torchstone.batchsize.plan import make_plan
from torchstone.batchsize.probe import SAFE_SHARE, RunProbe
from torchstone.batchsize.run_discovery import Discovery, DoesNotFitError, cache_key, is_wanted, size_name
from torchstone.checkpoint.load import read_state
from torchstone.config.schema import AutoBatchConfig
from torchstone.models.choice import Choice
from torchstone.models.execution import Recompute
from torchstone.models.model import NativeModel
from torchstone.training.defaults import run_flops
from torchstone.training.run import Run


class MeasuredRun(NamedTuple):
    """`seconds` of a step with each `model.recompute` that was measured, infinite if not even one row fits; and the one
    to build the model with instead, or None if the run is ready."""

    seconds: dict[Recompute, float]
    rebuild_with: Choice | None = None


def choose_micro_batch(run: Run, before: MeasuredRun | None = None) -> MeasuredRun:
    """Sets the micro-batches of the run, if they are to be found, and logs what was found.

    `before`: what it returned for the run before this one, which was built with another `model.recompute`."""
    flops = run_flops(run.model.parameter_count, run.data, run.schedule, run.progress, run.ctx)
    shares_rows = run.data.batch_sizes.micro_batch_tokens is not None
    if not is_wanted(run.config, shares_rows, run.device, flops, run.console.info):
        auto, default = asdict(run.config.auto_batch), asdict(AutoBatchConfig())
        unused = [f"auto_batch.{key}" for key in auto if key != "enabled" and auto[key] != default[key]]
        if unused:
            run.console.warn(f"{', '.join(unused)} has no effect: the size of micro-batches is not searched for")
        return MeasuredRun({})
    # A step may have run out of memory since the last checkpoint.
    remember_out_of_memory(run)
    search = run.config.auto_batch
    identity = run.checkpoint_info["limit_settings"] | {"margin": search.margin, "memory_limit": search.memory_limit}
    # That of rank 0: all ranks must do the same.
    identity = run.ctx.all_gather_object(identity)[0]
    recorded = {} if run.resumed_from is None else read_state(run.resumed_from).get("auto_batch") or {}
    result = MeasuredRun({}) if before is None else before._replace(rebuild_with=None)
    if recorded.get("identity") == identity:
        size = recorded["size"]
        run.console.info(f"Auto-discovery found {size_name(run)}={size} in {run.resumed_from}")
    else:
        if before is None:
            _warn_about_resumed_size(run, recorded, identity)
        size, result = _find_size(run, result)
        if result.rebuild_with is not None:
            return result
    run.data.set_micro_batch(size, run.ctx.dims.dp)
    run.runner.longest_document = run.data.shapes.longest_document(run.config.data.context_length)
    run.checkpoint_info["auto_batch"] = {
        "size": size,
        "unit": size_name(run),
        # A resumed run begins with the same.
        "chose_recompute": run.config.model.recompute == "auto",
        "identity": identity,
    }
    return result


def _find_size(run: Run, before: MeasuredRun) -> tuple[int, MeasuredRun]:
    recompute: Recompute = run.model.choices["model.recompute"].value
    is_first, is_auto = not before.seconds, run.config.model.recompute == "auto"
    discovery = Discovery(run, may_recompute=recompute != "full" and is_auto)
    if is_first and discovery.may_recompute and run.ctx.world_size > 1 and discovery.cached.entry(1) is None:
        # Several ranks cannot go on after one of them ran out of memory.
        forecast = _forecast(run)
        if forecast.is_out_of_memory and forecast.recompute != recompute:
            reason = f"with {recompute} not even one row is expected to fit"
            run.console.warn(f"model.recompute {forecast.recompute}: {reason}")
            return 0, MeasuredRun({recompute: math.inf}, Choice(forecast.recompute, reason))
    try:
        size = discovery.find()
    except DoesNotFitError as error:
        if not discovery.may_recompute:
            raise
        # `full` takes least, if what is predicted does not fit either.
        predicted = _forecast(run).recompute if is_first else recompute
        instead = "full" if predicted == recompute else predicted
        run.console.warn(f"{error.message}: trying again with --model.recompute {instead}")
        return 0, MeasuredRun(before.seconds | {recompute: math.inf}, Choice(instead, f"{recompute} does not fit"))
    if recompute in before.seconds:
        # It was the faster one.
        return size, before
    seconds = before.seconds | {recompute: discovery.step_seconds(size // discovery.probe.unit)}
    if is_first:
        if is_auto and discovery.is_limited_by_memory and (predicted := _forecast(run).recompute) != recompute:
            run.console.info(f"larger micro-batches do not fit: model.recompute {predicted} may be faster")
            return size, MeasuredRun(seconds, Choice(predicted, "larger micro-batches fit"))
        return size, MeasuredRun(seconds)
    other = min(before.seconds, key=lambda each: before.seconds[each])
    share = seconds[recompute] / seconds[other]
    if math.isfinite(seconds[other]):
        run.console.info(f"with model.recompute {recompute} a step takes {share:.2f} of the time with {other}")
    return size, MeasuredRun(seconds, Choice(other, f"faster than {recompute}") if share > 1 else None)


class Forecast(NamedTuple):
    """The `model.recompute` of a plan, and whether one row would be out of memory with that of the run."""

    recompute: Recompute
    is_out_of_memory: bool


def _forecast(run: Run) -> Forecast:
    """All ranks must call it; rank 0 plans for them."""
    forecast = Forecast(run.model.choices["model.recompute"].value, False)
    if run.ctx.is_main and isinstance(run.model, NativeModel):
        plan = make_plan(run.config, run.ctx.world_size, None, False)
        one_row = estimate_layout(plan.job, replace(plan.layout, rows=1, recompute=forecast.recompute))
        forecast = Forecast(plan.layout.recompute, one_row.total > SAFE_SHARE * plan.job.memory)
    return run.ctx.all_gather_object(forecast)[0]


def _warn_about_resumed_size(run: Run, recorded: dict[str, Any], identity: dict[str, Any]) -> None:
    if run.resumed_from is not None and not recorded:
        run.console.warn("the run had another size of micro-batches: results may differ in the last bits")
    if recorded:
        then = recorded["identity"]
        changed = [f"{key} {then.get(key)}, now {value}" for key, value in identity.items() if then.get(key) != value]
        run.console.warn(
            f"the run had {size_name(run)}={recorded['size']}, found with {'; '.join(changed)}: it is found again, and "
            "results may differ in the last bits"
        )


def remember_out_of_memory(run: Run) -> None:
    """After a step that ran out of memory, though its size was found: the next run of this kind does not try it."""
    limit = run.progress.micro_batch_limit
    if limit is not None and run.config.auto_batch.cache:
        probe = RunProbe(run)
        cached = CachedProbe(probe, cache_key(run, probe), True, run.console.warn)
        cached.add_out_of_memory(limit // probe.row_tokens)
