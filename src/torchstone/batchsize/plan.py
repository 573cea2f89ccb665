"""The plan of a run: what `auto` means for it, its length, its memory per rank, its speed and its checkpoints.

Everything follows from config.json, the tokenizer and the data: no weights are read and no GPU is used. So a run can be
planned for GPUs that are not here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torchstone.batchsize.gpus import Gpu, find_gpu, own_gpu
from torchstone.batchsize.layout import Job, Layout, estimate_layout, fits, largest_rows, row_counts
from torchstone.batchsize.layouts import Search, recomputes, search_layouts
from torchstone.batchsize.meta_model import MetaModel, build_meta_model, find_model_folder
from torchstone.batchsize.probe import SAFE_SHARE
from torchstone.batchsize.rank_state import ModelState
from torchstone.batchsize.run_discovery import is_wanted
from torchstone.batchsize.run_length import RunLength, plan_length
from torchstone.batchsize.search import fastest_size
from torchstone.batchsize.speed import StepTime, predict_step
from torchstone.config.schema import Config, parse_memory
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import TorchstoneError, UsageError
from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.execution import (
    ExecutionOptions,
    Recompute,
    choose_attention,
    choose_compile,
    choose_loss,
    choose_recompute,
)
from torchstone.models.fp8 import INSTEAD, SIZE_MULTIPLE
from torchstone.models.model import choose_fallback_execution
from torchstone.observe.console import Console
from torchstone.parallel.fsdp import COMPUTE_DTYPE
from torchstone.parallel.memory_estimate import StepMemory
from torchstone.parallel.mesh import SINGLE_PROCESS, resolve_dims
from torchstone.training.defaults import choose_precision, execution_options, with_precision
from torchstone.training.memory import USABLE, size_text
from torchstone.training.setup import select_device, tokenizer_path
from torchstone.wording import plural

# Another activation checkpointing must be predicted to be this many times as fast, because predictions have errors.
MIN_GAIN = 1.1


@dataclass(frozen=True)
class Plan:
    config: Config
    job: Job
    layout: Layout
    choices: dict[str, Choice]
    length: RunLength
    memory: StepMemory
    time: StepTime | None
    # Rows of a micro-batch: the most that fit, and what is recommended; 0 if none fit.
    largest_rows: int
    recommended_rows: int
    has_chosen_rows: bool
    notes: list[str]
    search: Search | None = None

    @property
    def fits(self) -> bool:
        return fits(self.job, self.memory)

    @property
    def hours(self) -> float | None:
        steps = self.length.steps
        return None if self.time is None or steps is None else steps * self.time.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """For programs: unrounded, sizes in bytes, times in seconds."""
        job, layout, length, time = self.job, self.layout, self.length, self.time
        return {
            "fits": self.fits,
            "model": {
                "parameters": job.model.parameter_count,
                "trained_parameters": job.state.num_trained,
                "implementation": "native" if job.model.fallback is None else "fallback",
            },
            "device": {"name": job.gpu.name, "memory": job.gpu.memory, "usable": job.usable},
            "layout": asdict(layout.dims) | {"world": layout.dims.world_size, "zero": layout.parallel.zero},
            "resolved": {key: choice.value for key, choice in self.choices.items()},
            "batch": {
                "global_batch_size": length.batch_sizes.global_batch_size,
                "rows": layout.rows,
                "row_tokens": job.row_tokens,
                "micro_steps": layout.micro_steps(job),
                "largest_rows": self.largest_rows,
                "recommended_rows": self.recommended_rows,
            },
            "memory": self.memory.components | {"total": self.memory.total, "at": self.memory.moment},
            "length": {"steps": length.steps, "tokens": length.tokens, "source": length.source},
            "speed": None
            if time is None
            else asdict(time) | {"step_seconds": time.seconds, "tokens_per_second": time.tokens_per_second},
            "hours": self.hours,
            "checkpoint": self.job.state.checkpoint_bytes(layout.dims.world_size),
            "notes": self.notes,
        } | ({} if self.search is None else {"search": self.search.to_dict(job)})


def make_plan(config: Config, world: int | None, gpu_name: str | None, has_search: bool) -> Plan:
    """`world`: processes, by default one for each GPU of this machine, or as many as the config asks for."""
    gpu, world = _find_device(config, world, gpu_name)
    dims = resolve_dims(config.parallel, world)
    precision = _choose_precision(config, gpu)
    config = with_precision(config, precision)
    execution = execution_options(config, replace(SINGLE_PROCESS, dims=dims), torch.device("cpu"))
    gpu_memory = None if gpu.is_cpu else gpu.memory
    execution = replace(execution, gpu_memory=gpu_memory, is_elsewhere=gpu_name is not None)
    notes = list[str]()
    tokenizer = _open_tokenizer(config, notes)
    model = build_meta_model(config, execution, 0 if tokenizer is None else tokenizer.size)
    length = plan_length(config, tokenizer, dims)
    flops = None if length.tokens is None else 6 * model.parameter_count * length.tokens / world
    execution = replace(execution, run_flops=flops)
    is_auto = is_wanted(config, length.shares_rows, torch.device("cpu" if gpu.is_cpu else "cuda"), flops, notes.append)
    if model.fallback is not None:
        notes.append(
            f"the model runs in the Transformers fallback ({model.fallback}): its activations are a rough guess"
        )
    choices, chunk_tokens = _choose(model, execution, gpu, COMPUTE_DTYPE[config.training.precision])
    job = _make_job(config, model, gpu, length, choices, chunk_tokens, is_auto)
    rows = length.batch_sizes.micro_batch_rows or max(1, (length.batch_sizes.micro_batch_tokens or 1) // job.row_tokens)
    layout = Layout(dims, replace(config.parallel, dp_shard=dims.dp_shard), rows, choices["model.recompute"].value)
    if is_auto and config.model.recompute == "auto":
        layout = replace(layout, recompute=_choose_recompute(job, layout))
        if layout.recompute != choices["model.recompute"].value:
            # A run measures both, and may choose the same.
            notes.append(_why_recompute(job, layout, choices["model.recompute"].value))
            choices["model.recompute"] = Choice(layout.recompute, "larger micro-batches fit")
    largest = largest_rows(job, layout)
    recommended = _recommended_rows(job, layout, largest)
    if is_auto:
        # If nothing fits, plan with one row.
        layout = replace(layout, rows=recommended or 1)
    search = None
    if has_search:
        search = search_layouts(job, layout, is_auto, config.model.recompute == "auto", execution)
    notes += _notes(config, job, length)
    return Plan(
        config, job, layout, {"training.precision": precision} | choices, length, estimate_layout(job, layout),
        predict_step(job, layout), largest, recommended, is_auto, notes, search,
    )  # fmt: skip


def _find_device(config: Config, world: int | None, gpu_name: str | None) -> tuple[Gpu, int]:
    parallel = config.parallel
    asked = math.prod((parallel.pp, parallel.dp_replicate, parallel.dp_shard or 1, parallel.tp))
    if gpu_name is not None:
        return find_gpu(gpu_name), world or asked
    gpu = own_gpu(select_device(config.system))
    if gpu.is_cpu:
        # The ranks share the memory.
        return replace(gpu, memory=gpu.memory // (world or asked)), world or asked
    count = 1 if config.system.device_id is not None else torch.cuda.device_count()
    return gpu, world or max(asked, count)


def _choose_precision(config: Config, gpu: Gpu) -> Choice:
    """All GPUs of the table have bf16."""
    if config.training.precision.startswith("fp8") and not gpu.has_fp8:
        raise UsageError(f"{gpu.name} has no FP8", INSTEAD)
    if gpu.is_cpu or config.training.precision != "auto":
        return choose_precision(config, torch.device("cpu"), SINGLE_PROCESS, {})
    return Choice("bf16", "fp32 master weights")


def _choose(
    model: MetaModel, execution: ExecutionOptions, gpu: Gpu, dtype: torch.dtype
) -> tuple[dict[str, Choice], int | None]:
    """What `train` would choose on that device. Kernels of attention differ in speed, but not in memory."""
    device = torch.device("cpu" if gpu.is_cpu else "cuda")
    if model.fallback is not None:
        return choose_fallback_execution(execution), None
    compile_ = choose_compile(execution, device)
    loss, chunk_tokens = choose_loss(model.config, execution, device, dtype)
    attention = Choice(execution.attention, AS_REQUESTED)
    if gpu.is_cpu:
        attention = choose_attention(model.config, execution, device, dtype)
    elif execution.attention == "auto":
        attention = Choice("flash", "or the fastest kernel that is installed there")
    return {
        "model.attention": attention,
        "model.loss": loss,
        "model.recompute": choose_recompute(execution, compile_.value),
        "model.compile": compile_,
    }, chunk_tokens


def _open_tokenizer(config: Config, notes: list[str]) -> Tokenizer | None:
    """The tokenizer of the run; None if the model's folder has none."""
    folder = None if config.model.path is None else find_model_folder(config.model.path)
    try:
        path = tokenizer_path(config, folder)
        return load_tokenizer(path, config.data.chat_template, config.model.trust_remote_code, Console("quiet").warn)
    except TorchstoneError:
        if config.model.path is None or config.model.tokenizer is not None:
            raise
        notes.append(f"no tokens are counted: {config.model.path} has no tokenizer that can be read")
        return None


def _make_job(
    config: Config,
    model: MetaModel,
    gpu: Gpu,
    length: RunLength,
    choices: dict[str, Choice],
    chunk_tokens: int | None,
    is_auto: bool,
) -> Job:
    sizes, decoder = length.batch_sizes, model.config
    state = ModelState(model.module, config, not gpu.is_cpu, decoder.depth, decoder.tied)
    step_rows = sizes.global_batch_size
    if length.shares_rows:
        # The samples of a step fill this many rows of the context length.
        step_rows = max(1, math.ceil(length.step_tokens / length.row_tokens))
    # The fallback has its own kernels.
    attention = choices["model.attention"].value if "model.attention" in choices else "sdpa"
    return Job(
        config, model, state, gpu, choices["model.compile"].value, attention, chunk_tokens,
        length.row_tokens, length.step_tokens, length.mean_length, step_rows, length.shares_rows,
        *_available_memory(config, gpu, is_auto),
    )  # fmt: skip


def _available_memory(config: Config, gpu: Gpu, is_auto: bool) -> tuple[int, float]:
    """The memory, and the share of it to use; what the search of a run would use, if it searches."""
    if not is_auto:
        return gpu.memory, USABLE
    limit = None if config.auto_batch.memory_limit is None else parse_memory(config.auto_batch.memory_limit)
    return gpu.memory if limit is None else min(gpu.memory, limit), config.auto_batch.margin


def _choose_recompute(job: Job, layout: Layout) -> Recompute:
    """What `auto` means if micro-batches may have any size: that of `layout`, unless no row fits with it, or another
    one is predicted to be clearly faster. If nothing fits, what takes least memory."""
    speeds = {recompute: _best_speed(job, replace(layout, recompute=recompute)) for recompute in recomputes(job)}
    fitting = {recompute: speed for recompute, speed in speeds.items() if speed is not None}
    own = fitting.pop(layout.recompute, None)
    if not fitting:
        return layout.recompute if own is not None else "full"
    best = max(fitting, key=lambda each: fitting[each])
    return best if own is None or fitting[best] > MIN_GAIN * own else layout.recompute


def _why_recompute(job: Job, layout: Layout, default: Recompute) -> str:
    """`default`: what it would be otherwise."""
    before, after = _best_speed(job, replace(layout, recompute=default)), _best_speed(job, layout)
    if before is None:
        return f"no micro-batch fits with model.recompute {default}: a run then takes {layout.recompute}"
    assert after is not None
    return (
        f"larger micro-batches fit with model.recompute {layout.recompute}, which is predicted to be "
        f"{after / before:.1f} times as fast as {default}: a run measures both"
    )


def _best_speed(job: Job, layout: Layout) -> float | None:
    """The predicted tokens per second of the micro-batch that is recommended; 0 if the speed is not known, None if none
    fits."""
    rows = _recommended_rows(job, layout, largest_rows(job, layout))
    time = predict_step(job, replace(layout, rows=rows or 1))
    return None if not rows else 0.0 if time is None else time.tokens_per_second


def _recommended_rows(job: Job, layout: Layout, largest: int) -> int:
    """The fewest rows that are nearly as fast as the fastest; the largest if the speed is not known."""
    candidates = [rows for rows in row_counts(job, layout) if rows < largest] + [largest] * (largest > 0)
    times = {rows: predict_step(job, replace(layout, rows=rows)) for rows in candidates}
    seconds = {rows: time.seconds for rows, time in times.items() if time is not None}
    return fastest_size(seconds, seconds.__getitem__) if seconds else largest


def _notes(config: Config, job: Job, length: RunLength) -> list[str]:
    notes = []
    if job.gpu.is_cpu and config.observe.peak_tflops is None:
        notes.append("no hours: the speed of a CPU is not known; --observe.peak_tflops sets it")
    elif job.gpu.flops is None and config.observe.peak_tflops is None:
        notes.append(f"no hours: the speed of {job.gpu.name} is not known; --observe.peak_tflops sets it")
    if config.training.precision.startswith("fp8") and job.model.config.width % SIZE_MULTIPLE:
        notes.append(f"FP8 leaves out linears whose sizes are no multiple of {SIZE_MULTIPLE}")
    if config.training.mode == "infinite":
        notes.append("the run has no end")
    return notes


def not_fitting(plan: Plan) -> tuple[str, str]:
    """The message and the hint of the error for a plan that does not fit."""
    total, usable = size_text(plan.memory.total), size_text(plan.job.usable)
    message = f"the plan does not fit: a rank needs {total}, but only {usable} can be used on {plan.job.gpu.name}"
    if plan.largest_rows:
        unit = plan.job.row_tokens if plan.job.shares_rows else 1
        key = "max_tokens_per_gpu" if plan.job.shares_rows else "batch_size"
        return message, f"--training.{key} {plan.largest_rows * unit} fits, with the same global batch"
    if plan.layout.recompute != "full":
        recomputed = replace(plan.layout, recompute="full")
        if rows := largest_rows(plan.job, recomputed):
            return message, f"--model.recompute full fits, with micro-batches of up to {plural(rows, 'row')}"
    if plan.has_chosen_rows and plan.memory.total <= SAFE_SHARE * plan.job.memory:
        margin = f"auto_batch.margin {plan.job.config.auto_batch.margin:g}"
        return message, f"it takes more than {margin}: a run would warn, and might run out of memory"
    smaller = "--training.precision bf16-pure and --tuning.method lora need less, --world N plans for more GPUs"
    if plan.search is None:
        return message, f"torchstone plan --search looks for layouts that fit; {smaller}"
    return message, smaller
