"""What the settings `auto` mean for a run on this device: the fastest configuration that computes the same.

Kernels, compilation and the loss are chosen with the model (models/execution.py); here is what has to be known before
it: the precision, and how long the run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchstone.config.schema import Config
from torchstone.data.loader import RunData
from torchstone.errors import UsageError
from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.execution import (
    ExecutionOptions,
    choose_compile,
    get_gpu_memory,
)
from torchstone.models.fp8 import Fp8Options
from torchstone.parallel.mesh import ParallelContext, ParallelDims
from torchstone.training.schedule import TrainingSchedule
from torchstone.training.state import Progress


def choose_precision(
    config: Config, device: torch.device, ctx: ParallelContext, saved_identity: dict[str, Any]
) -> Choice:
    """`saved_identity`: of the checkpoint that the run resumes, if there is one."""
    if config.training.precision != "auto":
        return Choice(config.training.precision, AS_REQUESTED)
    if "training.precision" in saved_identity:
        return Choice(saved_identity["training.precision"], "as in the checkpoint")
    if device.type != "cuda":
        return Choice("fp32", "on a CPU")
    # The GPUs of a run may differ.
    if ctx.any_rank(not _has_bf16()):
        return Choice("fp32", "the GPU does not have bf16")
    return Choice("bf16", "fp32 master weights")


def recorded_recompute(
    config: Config, state: dict[str, Any], device: torch.device, ctx: ParallelContext
) -> Choice | None:
    """What the search for the batch size chose for the run that is resumed, if it goes on with the same hardware.

    `state`: of its checkpoint."""
    found = state.get("auto_batch") or {}
    if config.model.recompute != "auto" or not found.get("chose_recompute"):
        return None
    hardware = hardware_settings(device, ctx)
    if not hardware.items() <= found["identity"].items():
        return None
    return Choice(found["identity"]["model.recompute"], "as in the checkpoint")


def hardware_settings(device: torch.device, ctx: ParallelContext) -> dict[str, Any]:
    """Device and layout. GPUs of one run may differ: that of rank 0 counts."""
    name = "cpu"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {properties.total_memory} bytes"
    return {"device": ctx.all_gather_object(name)[0], "layout": str(ctx.dims)}


def with_precision(config: Config, precision: Choice) -> Config:
    return replace(config, training=replace(config.training, precision=precision.value))


def describe_choices(choices: Mapping[str, Choice]) -> list[str]:
    """Each with the last part of its key. Projections that are not fused are not mentioned."""
    return [
        f"{key.rpartition('.')[2]}: {choice}"
        for key, choice in choices.items()
        if (key, choice.value) != ("model.fused", "none")
    ]


def run_flops(
    parameters: int, data: RunData, schedule: TrainingSchedule, progress: Progress, ctx: ParallelContext
) -> float | None:
    """About what one device computes from the first step of the run to the last; None if it has no end."""
    if schedule.total_steps is None:
        return None
    tokens = schedule.end(progress)[1] * float(data.train.lengths.mean())
    return 6 * parameters * tokens / ctx.world_size


def check_compile(config: Config, dims: ParallelDims) -> None:
    """Raises UsageError if torch.compile does not work with the parallel layout."""
    mode = config.model.compile
    if dims.world_size > 1 and mode == "whole":
        raise UsageError(
            "model.compile whole does not work with FSDP2, which gathers the model block by block",
            "use --model.compile block",
        )
    if dims.tp > 1 and mode in ("block", "whole"):
        raise UsageError(
            "model.compile does not work with parallel.tp: torch.compile computes wrong gradients there",
            "leave out one of them",
        )


def execution_options(
    config: Config, ctx: ParallelContext, device: torch.device, recompute: Choice | None = None
) -> ExecutionOptions:
    """How the model of a training run is executed. Raises UsageError for what does not work together.

    `recompute`: instead of `model.recompute`."""
    check_compile(config, ctx.dims)
    recompute = recompute or Choice(config.model.recompute, AS_REQUESTED)
    model, gpu_memory = config.model, get_gpu_memory(device)
    return ExecutionOptions(
        tp=ctx.dims.tp,
        pp=ctx.dims.pp,
        implementation=model.implementation,
        attention=model.attention,
        packed=config.data.packing,
        fused=tuple(name for name in model.fused if name != "auto"),
        recompute=recompute.value,
        recompute_reason=recompute.reason,
        compile=model.compile,
        loss=model.loss,
        liger=model.liger,
        optimizer=config.optim.name,
        fp8=Fp8Options(config.training.fp8_recipe) if config.training.precision.startswith("fp8") else None,
        gpu_memory=None if gpu_memory is None else -ctx.all_reduce_max(-gpu_memory),
        trust_remote_code=model.trust_remote_code,
    )


def slow_choices(config: Config, execution: ExecutionOptions, device: torch.device, is_native: bool) -> list[str]:
    """A warning if settings of the user make a run on a GPU much slower or larger than `auto` would."""
    if device.type != "cuda":
        return []
    auto_compile = choose_compile(replace(execution, compile="auto"), device).value
    is_slow = {
        "training.precision fp32 (auto: bf16)": config.training.precision == "fp32" and _has_bf16(),
        f"model.compile none (auto: {auto_compile})": is_native
        and execution.compile == "none"
        and auto_compile != "none",
        "model.loss full (auto: chunked)": is_native and execution.loss == "full",
        f"model.attention {execution.attention} (auto: a fused kernel)": execution.attention == "eager"
        or (execution.attention == "sdpa" and execution.packed),
    }
    slow = ", ".join(name for name, applies in is_slow.items() if applies)
    return [f"{slow}: the run is much slower or larger than with the defaults"] if slow else []


def _has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)
