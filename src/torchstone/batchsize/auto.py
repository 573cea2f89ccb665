"""`training.batch_size auto`: sets the micro-batches of a run before its first step.

The global batch stays as configured, so the loss is the same for every size. A resumed run keeps its size, unless the
hardware is another one.

Where `model.recompute` is `auto` and larger micro-batches could be faster, but do not fit, more recomputation may pay.
Whether it does is predicted as in `torchstone plan`, then measured, and the faster one is taken.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

from torchstone.batchsize.cache import CachedProbe
from torchstone.batchsize.discovery import Discovery, DoesNotFitError, cache_key, hardware, is_wanted, size_name
from torchstone.batchsize.plan import make_plan
from torchstone.batchsize.probe import RunProbe
from torchstone.checkpoint.load import read_state
from torchstone.config.schema import AutoBatchConfig
from torchstone.models.execution import Recompute
from torchstone.models.model import NativeModel
from torchstone.training.defaults import run_flops
from torchstone.training.run import Run

GIB = 2**30


class MeasuredRun(NamedTuple):
    """`seconds` of a step with each `model.recompute` that was measured, infinite if not even one row fits; and the one
    to build the model with instead, or None if the run is ready."""

    seconds: dict[Recompute, float]
    rebuild_with: Recompute | None = None


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
    # All ranks use the identity of rank 0, because they must do the same.
    identity = run.ctx.all_gather_object(_identity(run))[0]
    recompute, is_free = identity["recompute"], before is None and run.config.model.recompute == "auto"
    recorded = {} if run.resumed_from is None else read_state(run.resumed_from).get("auto_batch") or {}
    was_chosen = recorded.get("identity", {}).get("recompute")
    if is_free and recorded.get("chose_recompute") and recorded["identity"] == identity | {"recompute": was_chosen}:
        run.console.info(f"the run had to begin with model.recompute {was_chosen}, or was faster with it")
        return MeasuredRun({}, was_chosen)
    result = MeasuredRun({}) if before is None else before._replace(rebuild_with=None)
    if recorded.get("identity") == identity:
        size = recorded["size"]
        run.console.info(f"Auto-discovery found {size_name(run)}={size} in {run.resumed_from}")
    else:
        if before is None:
            _warn_about_resumed_size(run, recorded, identity)
        size, result = _find_size(run, result, is_free)
        if result.rebuild_with is not None:
            return result
    run.data.set_micro_batch(size, run.ctx.dims.dp)
    run.runner.longest_document = run.data.shapes.longest_document(run.config.data.context_length)
    chose_recompute = before is not None and recompute != next(iter(before.seconds), None)
    run.checkpoint_info["auto_batch"] = {"size": size, "chose_recompute": chose_recompute, "identity": identity}
    return result


def _find_size(run: Run, before: MeasuredRun, is_free: bool) -> tuple[int, MeasuredRun]:
    """`is_free`: whether another `model.recompute` may be tried."""
    recompute: Recompute = run.model.choices["model.recompute"].value
    discovery = Discovery(run, may_recompute=recompute != "full" and (is_free or bool(before.seconds)))
    try:
        size = discovery.find()
    except DoesNotFitError as error:
        if not discovery.may_recompute:
            raise
        instead: Recompute = (_predict_recompute(run) if is_free else None) or "full"
        run.console.warn(f"{error.message}: trying again with --model.recompute {instead}")
        return 0, MeasuredRun(before.seconds | {recompute: math.inf}, instead)
    if recompute in before.seconds:
        # It was the faster one.
        return size, before
    seconds = before.seconds | {recompute: discovery.step_seconds(size // discovery.probe.unit)}
    if not before.seconds:
        candidate = _predict_recompute(run) if is_free and discovery.is_limited_by_memory else None
        if candidate is not None:
            run.console.info(f"larger micro-batches do not fit: model.recompute {candidate} may be faster")
        return size, MeasuredRun(seconds, candidate)
    other = min(before.seconds, key=lambda each: before.seconds[each])
    share = seconds[recompute] / seconds[other]
    if math.isfinite(seconds[other]):
        run.console.info(f"with model.recompute {recompute} a step takes {share:.2f} of the time with {other}")
    return size, MeasuredRun(seconds, other if share > 1 else None)


def _predict_recompute(run: Run) -> Recompute | None:
    """The `model.recompute` that a plan of the run has instead of its own: more rows fit, and it is predicted to be
    clearly faster. All ranks must call it."""
    recompute: Recompute = run.model.choices["model.recompute"].value
    predicted = recompute
    if run.ctx.is_main and isinstance(run.model, NativeModel):
        predicted = make_plan(run.config, run.ctx.world_size, None, False).layout.recompute
    predicted = run.ctx.all_gather_object(predicted)[0]
    return None if predicted == recompute else predicted


def _warn_about_resumed_size(run: Run, recorded: dict[str, Any], identity: dict[str, Any]) -> None:
    if run.resumed_from is not None and not recorded:
        run.console.warn("the run had another size of micro-batches: results may differ in the last bits")
    if recorded:
        run.console.warn(
            f"the run had {size_name(run)}={recorded['size']}, found with {_describe_identity(recorded['identity'])}; "
            f"now with {_describe_identity(identity)} it is found again, and results may differ in the last bits"
        )


def remember_out_of_memory(run: Run) -> None:
    """Records that a step of a size that was found ran out of memory: the next run of this kind does not try it."""
    limit = run.progress.micro_batch_limit
    if "auto_batch" not in run.checkpoint_info or limit is None or not run.config.auto_batch.cache:
        return
    probe = RunProbe(run)
    cached = CachedProbe(probe, cache_key(run, probe), True, run.console.warn)
    cached.add_out_of_memory(limit // probe.row_tokens)


def _identity(run: Run) -> dict[str, Any]:
    """What a size depends on. On other hardware or with other limits it is searched for again."""
    auto = run.config.auto_batch
    return {
        "hardware": hardware(run),
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
