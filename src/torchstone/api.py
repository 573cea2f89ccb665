"""The commands as Python functions, with the same configs and errors.

import torchstone
result = torchstone.train("run.yaml", {"training.max_steps": 100})

`train`, `prepare` and `inspect_data` take a path, a preset and overrides, or a `Config`, and validate it once.
Functions that end in `_with_config` take a validated `Config`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from torchstone import heartbeat, hub
from torchstone.batchsize.auto import choose_micro_batch, remember_out_of_memory
from torchstone.batchsize.plan import Plan, make_plan
from torchstone.batchsize.run_discovery import is_wanted
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import (
    CHECKPOINTS,
    is_model_folder,
    named_checkpoint_folder,
    read_state,
    resolve_model_folder,
    tokenizer_files,
)
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.checkpoint.model_folder import (
    NotNativeError,
    check_model_folder,
    check_new_model,
    decoder_shapes,
    load_model,
    read_model_config,
    stored_parameter_count,
)
from torchstone.checkpoint.save import STATE_FILE
from torchstone.config.load import convert_value, from_dict, load_config, read_config_layers, resolve, to_dict
from torchstone.config.schema import (
    Config,
    Device,
    Dtype,
    OptimConfig,
    ParallelConfig,
    Purpose,
    SystemConfig,
)
from torchstone.data.formats import TEXT_FORMATS, Message
from torchstone.data.inspect import inspect_sources
from torchstone.data.loader import open_sources, tokenize_source
from torchstone.data.sources import SUFFIXES
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import Pattern, check_target, save_tokenizer
from torchstone.data.train_tokenizer import train_tokenizer as train_bpe
from torchstone.demo.builtin import data_file
from torchstone.diagnosis.checks import CHECKS
from torchstone.diagnosis.report import DiagnosisReport
from torchstone.diagnosis.run_checks import CheckResult, run_checks, select_checks
from torchstone.diagnosis.session import change, open_diagnosis
from torchstone.doctor import collectives, machine
from torchstone.doctor.machine import Machine
from torchstone.errors import TorchstoneError, UsageError
from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.execution import MIN_FLOPS_TO_COMPILE, ExecutionOptions, check_fallback_execution
from torchstone.models.families import family_of
from torchstone.models.model import FallbackModel, Model
from torchstone.models.sizing import build_sized_decoder_config, build_sized_hf_config, parameter_count
from torchstone.models.tensors import dtype_name
from torchstone.observe.console import Console
from torchstone.optim.schedule import resolve_warmup_steps
from torchstone.parallel.build import stage_layer_ranges
from torchstone.parallel.fsdp import COMPUTE_DTYPE
from torchstone.parallel.mesh import (
    SINGLE_PROCESS,
    ParallelContext,
    ParallelDims,
    init_distributed,
    is_distributed,
    local_rank,
    resolve_dims,
    translate_comm_errors,
)
from torchstone.training import run_folder
from torchstone.training.bad_steps import RollBack, Rollbacks
from torchstone.training.checks import check_memory, free_device_memory, translate_out_of_memory
from torchstone.training.defaults import (
    check_compile,
    choose_precision,
    execution_options,
    recorded_recompute,
    with_precision,
)
from torchstone.training.evaluate import AnswerOptions, evaluate_file
from torchstone.training.generation import (
    DEFAULT_TEMPERATURE,
    GeneratedText,
    SamplingOptions,
    TextCallback,
    encode_text_prompt,
    generate_text,
)
from torchstone.training.hub_commits import check_same_commits, pin_hub_names
from torchstone.training.loop import train_loop
from torchstone.training.profile import StepProfiler
from torchstone.training.run import Callback, Run, TrainResult
from torchstone.training.schedule import Interval, describe_saving
from torchstone.training.setup import (
    build_run,
    check_row_length,
    check_state_memory,
    check_vocabulary,
    open_data,
    quantized_parameter_count,
    select_device,
    smaller_state_hint,
    tokenizer_path,
)
from torchstone.training.stop import handle_stop_signals
from torchstone.tuning.plan import LoraPlan
from torchstone.wording import plural

# Default maximum row length for evaluation; a model with fewer positions lowers it.
EVALUATION_LENGTH = 1024
PRECISION_TEXTS = {
    "fp32": "fp32",
    "bf16": "fp32, computed in bf16",
    "bf16-pure": "bf16",
    "fp8": "fp32, computed in FP8 and bf16",
    "fp8-pure": "bf16, computed in FP8 and bf16",
}
SHORT_RUN = f"but none (like model.recompute) in a run of less than {MIN_FLOPS_TO_COMPILE / 1e15:.2g} PFLOP per device"
# For commands that do not train.
MEMORY_HINT = "use a smaller model, or a device with more memory (--device cuda)"


def train(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Trains to the end of the run; calling it again resumes a run that was stopped."""
    heartbeat.begin_startup()
    return train_with_config(_load_and_validate(config, overrides, preset), callbacks)


def train_with_config(config: Config, callbacks: Sequence[Callback] = ()) -> TrainResult:
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(f"callbacks has {callback!r}", "pass instances of torchstone.Callback, such as [Mine()]")
    with handle_stop_signals(), translate_comm_errors():
        return _train(_prepare_for_ranks(config), callbacks)


def _prepare_for_ranks(config: Config) -> Config:
    """Downloads and tokenizes what a launcher would have; returns the config with the commits of hub names."""
    if heartbeat.has_launcher():
        return config
    heartbeat.report_phase("downloading from the hub")
    config = download_with_config(config, weights=True)
    if is_distributed() and not dist.is_initialized():
        # torchrun or srun started the ranks. One process per host prepares the data now, so that no process group waits
        # during tokenization.
        heartbeat.report_phase("preparing the data")
        prepare_with_config(config)
    return config


def _train(config: Config, callbacks: Sequence[Callback]) -> TrainResult:
    device, system = select_device(config.system), config.system
    # The launcher names a rank that hangs, so it must notice before the process group times out.
    timeout = timedelta(seconds=system.hang_timeout * (2 if heartbeat.has_launcher() else 1))
    join_timeout = timedelta(seconds=system.join_timeout)
    heartbeat.report_phase("joining the other ranks")
    with ExitStack() as stack:
        ctx = stack.enter_context(init_distributed(config.parallel, device, timeout, join_timeout))
        check_same_commits(config, ctx)
        stack.enter_context(run_folder.lock_output_dir(config, ctx))
        console = stack.enter_context(run_folder.open_console(config, ctx, device))
        rollbacks = Rollbacks(config.debug.max_bad_steps, Path(config.output_dir))
        while True:
            try:
                return _train_once(config, console, device, ctx, callbacks, rollbacks)
            except RollBack as request:
                rollbacks.add(request, console)
            # Frees the model of the failed attempt.
            free_device_memory(device)


def _train_once(
    config: Config,
    console: Console,
    device: torch.device,
    ctx: ParallelContext,
    callbacks: Sequence[Callback],
    rollbacks: Rollbacks,
) -> TrainResult:
    """One attempt: a new run, or one from its last checkpoint. Raises RollBack if there must be another one."""
    run = _build_run(config, console, device, ctx, rollbacks.resume)
    rollbacks.apply(run)
    if run.schedule.is_done(run.progress) and run.progress.pending_metrics is None:
        step, end, stopped = run.progress.step, run.schedule.total_steps, run.early_stop_reason
        reason = stopped or f"to continue it, set a later end: {_later_end(run)}"
        console.info(f"the run in {run.output_dir} is complete: step {step} of {end or 'any number'}; {reason}")
        return TrainResult(step, run.checkpoint, None, None, stopped)
    console.open_log()
    measured = choose_micro_batch(run)
    while measured.rebuild_with is not None:
        # Both models may not fit together.
        del run
        free_device_memory(device)
        run = _build_run(config, console, device, ctx, rollbacks.resume, measured.rebuild_with)
        rollbacks.apply(run)
        measured = choose_micro_batch(run, measured)
    if ctx.is_main:
        run_folder.save_config(config, console)
    for line in _describe_run(run):
        console.info(line)
    run_folder.warn_about_disk(run)
    with ExitStack() as stack:
        if config.observe.profile is not None and ctx.is_main:
            profiler = StepProfiler(run)
            stack.callback(profiler.close)
            callbacks = [*callbacks, profiler]
        result = train_loop(run, callbacks)
        if "auto_batch" in run.checkpoint_info:
            remember_out_of_memory(run)
        return result


def _build_run(
    config: Config,
    console: Console,
    device: torch.device,
    ctx: ParallelContext,
    resume: str | None,
    recompute: Choice | None = None,
) -> Run:
    with translate_out_of_memory("loading the model", device, lambda: smaller_state_hint(config)):
        return build_run(config, console, device, ctx, resume, recompute)


def destroy_process_group() -> None:
    """Destroys the process group, if there is one, before the process exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_parallel_dims(config: Config, world_size: int) -> None:
    """Raises UsageError if the parallel sizes do not fit the number of processes or the model."""
    dims = resolve_dims(config.parallel, world_size)
    check_compile(config, dims)
    if config.model.path is None:
        # Neither vocabulary nor context length matters for this check.
        decoder_config = build_sized_decoder_config(config.model, vocab_size=8, context_length=8)
    elif (name := hub.parse_model(config.model.path)) is not None or is_model_folder(Path(config.model.path)):
        folder = Path(config.model.path) if name is None else hub.download_model(name, weights=False).folder
        try:
            _, _, decoder_config = read_model_config(folder)
        except NotNativeError:
            check_fallback_execution(ExecutionOptions(tp=dims.tp, pp=dims.pp))
            return
    else:
        # A run: its checkpoint is chosen and checked later.
        return
    stage_layer_ranges(decoder_config, dims, config.parallel)


def describe_defaults(config: Config, world_size: int | None = 1) -> str:
    """What the settings that are `auto` mean here for this run, or why its model would be refused.

    `world_size`: None if it is not known.
    """
    later = "what auto means is decided when the run starts"
    checkpoint, state = _resumed_checkpoint(config)
    identity = state.get("identity", {})
    path = checkpoint or (None if config.model.path is None else Path(config.model.path))
    if path is not None and (checkpoints := list_checkpoints(path / CHECKPOINTS)):
        path = checkpoints[-1][1]
    if path is not None and not is_model_folder(path):
        return f"{later}: {path} is not a model folder here"
    try:
        device = select_device(config.system)
    except TorchstoneError as error:
        return f"this run would be refused here: {_one_line(error)}"
    parallel = config.parallel
    try:
        dims = ParallelDims(tp=parallel.tp, pp=parallel.pp)
        if world_size is not None:
            dims = resolve_dims(parallel, world_size)
        ctx = replace(SINGLE_PROCESS, dims=dims)
        precision = choose_precision(config, device, ctx, identity)
        config = with_precision(config, precision)
        if checkpoint is not None:
            _check_resumable(config, identity, checkpoint)
        execution = execution_options(config, ctx, device, recorded_recompute(config, state, device, ctx))
        dtype = COMPUTE_DTYPE[precision.value]
        quantized = 0 if path is None else quantized_parameter_count(config, path, execution)
        if path is None:
            hf_config = build_sized_hf_config(config.model, vocab_size=8, context_length=8)
            choices = check_new_model(hf_config, device, dtype, execution)
            parameters = parameter_count(family_of(hf_config).decoder_config(hf_config))
            # The tokens of a chunk follow from the vocabulary, which is not known yet.
            choices["model.loss"] = choices["model.loss"]._replace(detail="")
        else:
            choices = check_model_folder(path, device, dtype, execution)
            parameters = stored_parameter_count(path)
    except TorchstoneError as error:
        return f"on {device} this run would be refused: {_one_line(error)}"
    choices = {"training.precision": precision} | choices
    compile_ = choices["model.compile"]
    if compile_.value != "none" and compile_.reason != AS_REQUESTED:
        choices["model.compile"] = compile_._replace(detail=SHORT_RUN)
    if config.training.batch_size is None and is_wanted(config, False, device, None, log=lambda line: None):
        choices["training.batch_size"] = Choice("auto", "the fastest that fits", "but not in short runs")
    texts = [f"{key} {choice}" for key, choice in choices.items() if choice.reason != AS_REQUESTED]
    try:
        if world_size is not None:
            check_state_memory(config, parameters, device, ctx, quantized)
    except TorchstoneError as error:
        texts.append(f"this run would be refused: {_one_line(error)}")
    return f"auto on {device}: {'; '.join(texts) or 'nothing'}"


def _check_resumable(config: Config, identity: dict[str, Any], checkpoint: Path) -> None:
    """Raises if the run could not resume the checkpoint, as far as that is known before it starts."""
    current = run_folder.config_identity(config)
    for key in ("model.path", "model.tokenizer"):
        # A name on the hub is pinned to the run's commit when it starts.
        if current[key] is not None and hub.parse_model(current[key]) is not None:
            del current[key]
    run_folder.check_identity(identity, current, checkpoint)


def _one_line(error: TorchstoneError) -> str:
    return "; ".join(text for text in (error.message, error.hint) if text)


def _resumed_checkpoint(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that the run would resume, if there is one, and its state. Its files are not verified."""
    resume, folders = config.checkpoint.resume, list_checkpoints(Path(config.output_dir) / CHECKPOINTS)
    named = [] if resume == "auto" else [named_checkpoint_folder(resume)]
    candidates = [folder for _, folder in reversed(folders)] or named
    for folder in candidates if resume != "never" else ():
        with suppress(TorchstoneError):
            return folder, read_state(folder)
    return None, {}


def download_with_config(config: Config, weights: bool = False) -> Config:
    """Downloads what a config names on the hub, and returns the config with the commits."""
    return pin_hub_names(config, Console(config.observe.console if local_rank() == 0 else "none"), weights)


def prepare(
    config: Config | str | Path | None = None, overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Tokenizes the data of a run into the cache, and returns its counts."""
    return prepare_with_config(_load_and_validate(config, overrides, preset, "data"))


def prepare_with_config(config: Config) -> dict[str, Any]:
    config = download_with_config(config)
    console = Console(config.observe.console)
    data = open_data(config, _load_tokenizer(config, console), console)
    return {
        "fingerprint": data.fingerprint,
        "formats": data.formats,
        "samples": len(data.train),
        "tokens": int(data.train.lengths.sum()),
        "validation_samples": sum(map(len, data.validation.values())),
        "bad_rows": data.counts.bad_rows,
        "dropped_rows": data.counts.dropped,
        "truncated_rows": data.counts.truncated_long,
        "split_rows": data.counts.split_long,
        "cache_dir": config.data.cache_dir,
    }


def plan(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    world: int | None = None,
    gpu: str | None = None,
    search: bool = False,
) -> dict[str, Any]:
    """What a run needs: steps, tokens, memory per rank, hours and checkpoint size, from config.json and the data alone.

    `world` processes on `gpu` (such as h100-80gb, or 40GiB), by default those of this machine. `search` also ranks the
    layouts that fit by predicted tokens a second. `fits` says whether the plan fits.
    """
    return plan_with_config(_load_and_validate(config, overrides, preset, "plan"), world, gpu, search).to_dict()


def plan_with_config(config: Config, world: int | None = None, gpu: str | None = None, search: bool = False) -> Plan:
    if world is not None and world < 1:
        raise UsageError(f"world {world} is less than 1")
    return make_plan(download_with_config(config), world, gpu, search)


def inspect_data(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    rows: int = 5,
    tokens: int | None = 400,
) -> dict[str, Any]:
    """Returns a report on the data of a run: counts, lengths, what is dropped and why, and `rows` rows per source,
    split into text with and without loss. Bad rows are counted, not an error."""
    return inspect_data_with_config(_load_and_validate(config, overrides, preset, "data"), rows, tokens)


def inspect_data_with_config(config: Config, rows: int = 5, tokens: int | None = 400) -> dict[str, Any]:
    config = download_with_config(config)
    console, data = Console(config.observe.console), config.data
    tokenizer = _load_tokenizer(config, console)
    names = [data_file(name, Path(data.cache_dir)) for name in data.path or ()]
    caches = [
        tokenize_source(data, source, tokenizer, console, inspect_only=True, max_rows=data.max_samples)
        for source in open_sources(data, names, inspect_only=True)
    ]
    return inspect_sources(caches, tokenizer, data.context_length, rows, tokens)


def train_tokenizer(
    data: str | Sequence[str],
    folder: str | Path,
    vocab_size: int = 32768,
    special: Sequence[str] = (),
    chat_template: str | None = "chatml",
    pattern: Pattern = "gpt4",
    min_frequency: int = 2,
    max_bytes: int | None = None,
    skip_bad_rows: bool = False,
    cache_dir: str = "cache/datasets",
    quiet: bool = False,
    columns: str | Mapping[str, str] = "",
    bos: bool = True,
) -> dict[str, Any]:
    """Trains a byte-level BPE tokenizer from `data`, saves it as a Hugging Face folder, and returns a report.

    `columns` is as in data.columns. With `bos` the tokenizer begins every text with a BOS token.
    """
    check_target(Path(folder))
    console = Console("quiet" if quiet else "auto")
    names = [_data_path(name, cache_dir, console) for name in ([data] if isinstance(data, str) else data)]
    tokenizer, report = train_bpe(
        names,
        vocab_size,
        special=special,
        chat_template=chat_template,
        pattern=pattern,
        min_frequency=min_frequency,
        max_bytes=max_bytes,
        stop_on_bad_row=not skip_bad_rows,
        columns=convert_value("data.columns", columns),
        bos=bos,
        console=console,
    )
    save_tokenizer(tokenizer, Path(folder))
    return {"folder": str(folder)} | report


def evaluate(
    source: str | Path,
    data: str,
    questions: int | None = 200,
    context_length: int | None = None,
    device: Device = "auto",
    cache_dir: str = "cache/datasets",
    quiet: bool = False,
    trust_remote_code: bool = False,
    columns: str | Mapping[str, str] = "",
    *,
    extract: str | None = None,
    max_tokens: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the loss of a model (run, checkpoint, folder or name on the hub) over `data`; for conversations also the
    exact match.

    `columns` is as in data.columns. `questions` is the number of rows to answer, None for all. `extract` is a regular
    expression for what is compared of an answer of at most `max_tokens` tokens. `overrides` are config keys such as
    data.on_bad_row.
    """
    console, source = Console("quiet" if quiet else "auto"), os.fspath(source)
    _check_minimum("questions", questions, 0)
    _check_minimum("max_tokens", max_tokens, 1)
    try:
        options = AnswerOptions(questions, max_tokens, None if extract is None else re.compile(extract))
    except re.error as error:
        raise UsageError(f"--extract {extract!r} is not a regular expression: {error}") from None
    settings: dict[str, Any] = {
        "model.path": source,
        "model.trust_remote_code": trust_remote_code,
        "data.path": data,
        "data.cache_dir": cache_dir,
        "system.device": device,
        "training.global_batch_size": 64,
    }
    optional = {"data.context_length": context_length, "data.columns": columns or None}
    settings |= {key: value for key, value in optional.items() if value is not None} | dict(overrides or {})
    layers = read_config_layers(None, None, settings)
    config = resolve(layers)
    torch_device = select_device(config.system)
    folder = resolve_model_folder(source, trust_remote_code=config.model.trust_remote_code)
    execution = _execution(config, packed=config.data.packing)
    check_memory(4 * (parameters := stored_parameter_count(folder)), parameters, torch_device, MEMORY_HINT)
    check_model_folder(folder, torch_device, torch.float32, execution)
    tokenizer = load_tokenizer(
        tokenizer_files(folder), config.data.chat_template, config.model.trust_remote_code, console.warn
    )
    path = _data_path(data, config.data.cache_dir, console)
    with translate_out_of_memory(
        "evaluating", torch_device, lambda: f"use a shorter --context-length; or {MEMORY_HINT}"
    ):
        model = load_model(folder, torch_device, execution=execution)
        for warning in model.warnings:
            console.warn(warning)
        defaults: dict[str, Any] = {
            "data.context_length": min(EVALUATION_LENGTH, model.max_positions or EVALUATION_LENGTH)
        }
        length = resolve(layers, defaults=defaults).data.context_length
        # Documents that fit into a row stay whole, so that the loss does not depend on the row length.
        defaults |= {"data.packing": model.packing_error(length) is None, "data.text_packing": "best-fit"}
        config = resolve(layers, defaults=defaults)
        console.info(f"model {folder}: {model.describe()}; rows of up to {length} tokens")
        check_row_length(model, config)
        check_vocabulary(model, tokenizer)
        result = evaluate_file(model, tokenizer, config, path, torch_device, options, console)
    return {"model": str(folder)} | result


def export(
    source: str | Path,
    target: str | Path,
    dtype: Dtype = "auto",
    verify: bool = True,
    trust_remote_code: bool = False,
    merge: bool = False,
    average_lora_a: bool = False,
    base: str | Path | None = None,
) -> dict[str, Any]:
    """Writes a run, a checkpoint or a folder as a Hugging Face folder, verified by loading it in Transformers.

    An adapter is written for PEFT, or with `merge` as a model. `base`: where the model is, if it has moved since an
    adapter, or a checkpoint of OSFT, was trained on it.
    """
    if dtype not in get_args(Dtype):
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(get_args(Dtype))}")
    base = None if base is None else os.fspath(base)
    return export_model(os.fspath(source), Path(target), dtype, verify, trust_remote_code, merge, average_lora_a, base)


def doctor(
    device: Device = "auto",
    limit: float = collectives.LIMIT,
    quiet: bool = False,
    output_dir: str | Path = ".",
    only: Literal["machine", "collectives"] | None = None,
    on_text: TextCallback | None = None,
) -> dict[str, Any]:
    """Checks each machine of a launch and the collectives between its ranks; all ranks call it together.

    Returns `text` to print, which rank 0 also passes to `on_text` as soon as a part is known, and `json` for programs,
    with `errors`. `output_dir` is a folder on the disk to check. Raises WorkerError with the ranks that do not answer
    within `limit` seconds.
    """
    torch_device = select_device(SystemConfig(device=device))
    # Longer than `limit`: at the process group's timeout NCCL ends the process before the silent ranks are named. The
    # first rank of a machine checks it while the others wait.
    timeout, join_timeout = timedelta(seconds=limit + machine.SECONDS), timedelta(seconds=limit)
    heartbeat.report_phase("joining the other ranks")
    machines, reports, texts = list[Machine](), list[collectives.Report](), list[str]()
    with (
        translate_comm_errors(),
        init_distributed(ParallelConfig(), torch_device, timeout, join_timeout, mesh_of_one=True) as ctx,
    ):
        console = Console("quiet" if quiet else "lines") if ctx.is_main else Console("none")

        def add_text(text: str) -> None:
            texts.append(text)
            if on_text is not None and ctx.is_main:
                on_text(text)

        if only != "collectives":
            machines = machine.check_machines(ctx, torch_device, device != "cpu", Path(output_dir), console.info)
            add_text(machine.as_text(machines))
        if only != "machine":
            reports.append(collectives.measure(torch_device, limit, console.info))
            if torch_device.type == "cuda":
                # Ranks also use the CPU backend, for small tensors and objects.
                reports.append(collectives.measure(torch.device("cpu"), limit, console.info, sizes=()))
            separator = "\n" if machines else ""
            add_text(separator + "\n".join(collectives.as_text(report) for report in reports))
        errors = [str(error) for report in reports if (error := collectives.failure(report)) is not None]
        errors += machine.failures(machines)
        if only is None:
            add_text(machine.verdict(machines, errors))
    result = {
        "ok": not errors,
        "errors": errors,
        "machines": [each.to_dict() for each in machines],
        "collectives": [asdict(report) for report in reports],
    }
    return {"text": "".join(texts), "json": result}


def diagnose(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    full: bool = False,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Checks whether a run of this config would train right: its model, data and layout. Leaves no trace.

    Returns the `verdict` (pass, warn, fail, incomplete, skip), `next_steps`, and the `checks` with what each
    measured (docs/diagnose.md). `full` checks whole steps of the run; `only` names the checks to run. With several
    processes, all of them call it.
    """
    return diagnose_with_config(_load_and_validate(config, overrides, preset), full, only).to_dict()


def diagnose_with_config(
    config: Config,
    full: bool = False,
    only: Sequence[str] = (),
    on_result: Callable[[CheckResult], None] = lambda result: None,
    quiet: bool = True,
) -> DiagnosisReport:
    """`on_result` gets the result of each check when it is known, on every rank."""
    checks = select_checks(CHECKS, only)
    with handle_stop_signals(), translate_comm_errors():
        on_bad_row = config.data.on_bad_row
        config = _prepare_for_ranks(change(config, {"data.on_bad_row": "skip"}))
        config = change(config, {"data.on_bad_row": on_bad_row})
        device, system = select_device(config.system), config.system
        timeout, join_timeout = timedelta(seconds=system.hang_timeout), timedelta(seconds=system.join_timeout)
        heartbeat.report_phase("joining the other ranks")
        with init_distributed(config.parallel, device, timeout, join_timeout) as ctx:
            check_same_commits(config, ctx)
            console = Console("quiet" if quiet else "lines") if ctx.is_main else Console("none")
            with (
                translate_out_of_memory("loading the model", device, lambda: smaller_state_hint(config)),
                open_diagnosis(config, console, device, ctx, full) as diagnosis,
            ):
                results = run_checks(diagnosis, checks, on_result)
            left_out = [check.name for check in CHECKS if check not in checks]
            return DiagnosisReport(results, ctx.world_size, left_out)


def generate(
    source: str | Path,
    prompt: str = "",
    max_tokens: int = 256,
    temperature: float = DEFAULT_TEMPERATURE,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    device: Device = "auto",
    on_text: TextCallback | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text with which a model (run, checkpoint or folder) continues `prompt`, the start of a document.

    `on_text` gets the text while it is generated. `overrides` are config keys of the model, such as model.attention.
    """
    _check_minimum("max_tokens", max_tokens, 1)
    config = model_config(source, {"system.device": device} | dict(overrides or {}))
    sampling = SamplingOptions(temperature, top_p, top_k, seed)
    return generate_with_config(config, prompt, max_tokens, sampling, on_text).text


def generate_with_config(
    config: Config, prompt: str, max_tokens: int, sampling: SamplingOptions, on_text: TextCallback | None = None
) -> GeneratedText:
    model, tokenizer = _load_model_and_tokenizer(config)
    ids, generator = encode_text_prompt(tokenizer, prompt), _generator(model, sampling.seed)
    return generate_text(model, tokenizer, ids, max_tokens, sampling, generator, on_text)


class Chat:
    """A conversation with a run, a checkpoint, a Hugging Face folder or a model on the hub.

    `chat_template` (a file or a built-in name) replaces the tokenizer's; `overrides` are config keys of the model.
    """

    def __init__(
        self,
        source: str | Path,
        max_new_tokens: int = 256,
        device: Device = "auto",
        trust_remote_code: bool = False,
        *,
        system: str | None = None,
        chat_template: str | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        settings = {
            "system.device": device,
            "model.trust_remote_code": trust_remote_code,
            "data.chat_template": chat_template,
        }
        config = model_config(source, settings | dict(overrides or {}))
        self.sampling = SamplingOptions(temperature, top_p, top_k, seed)
        self.model, self.tokenizer = _load_model_and_tokenizer(config, for_chat=True)
        self.generator = _generator(self.model, seed)
        self.max_new_tokens, self.system = max_new_tokens, system
        # The last answer, and how it ended.
        self.last: GeneratedText | None = None
        self.messages: list[Message] = []
        self.reset()

    def ask(self, question: str, on_text: TextCallback | None = None) -> str:
        """Returns the answer; `on_text` gets it while it is generated."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": question}]
        prompt = self.tokenizer.encode(self.tokenizer.template.render_prompt(messages))
        self.last = generate_text(
            self.model, self.tokenizer, prompt, self.max_new_tokens, self.sampling, self.generator, on_text
        )
        # A template may put a space before it, which is then part of its first token.
        answer = self.last.text.lstrip(" ")
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []


def model_config(source: str | Path, overrides: Mapping[str, Any]) -> Config:
    """The config of a command that uses a model and reads no data; the rules of a config ask for a path."""
    return load_config(overrides={"model.path": os.fspath(source), "data.path": os.fspath(source)} | dict(overrides))


def _load_model_and_tokenizer(config: Config, for_chat: bool = False) -> tuple[Model, Tokenizer]:
    assert config.model.path is not None
    device = select_device(config.system)
    folder = resolve_model_folder(config.model.path, trust_remote_code=config.model.trust_remote_code)
    execution = _execution(config, packed=False)
    check_memory(4 * (parameters := stored_parameter_count(folder)), parameters, device, MEMORY_HINT)
    check_model_folder(folder, device, torch.float32, execution)
    tokenizer = load_tokenizer(
        tokenizer_files(folder), config.data.chat_template, config.model.trust_remote_code, Console().warn
    )
    if for_chat:
        _check_chat(folder, config, tokenizer)
    with translate_out_of_memory("loading the model", device, lambda: MEMORY_HINT):
        model = load_model(folder, device, execution=execution)
    for warning in model.warnings:
        Console().warn(warning)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _execution(config: Config, packed: bool) -> ExecutionOptions:
    model = config.model
    return ExecutionOptions(
        implementation=model.implementation,
        attention=model.attention,
        packed=packed,
        loss=model.loss,
        trust_remote_code=model.trust_remote_code,
    )


def _check_chat(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Raises if the model has never seen a chat template: it would continue the conversation as if it were a text."""
    if config.data.chat_template is not None:
        return
    reason = None if tokenizer.hf.chat_template else "its tokenizer has no chat template"
    if (folder / STATE_FILE).is_file():
        state = read_state(folder)
        formats, is_new = state.get("formats"), state.get("identity", {}).get("model.path") is None
        if formats and is_new and all(row_format in TEXT_FORMATS for row_format in formats):
            reason = "it was trained on text only, without a chat template"
    if reason is not None:
        raise UsageError(
            f"{folder} cannot chat: {reason}",
            f'torchstone generate {config.model.path} "Once upon a time" continues a text; --chat-template chatml '
            "(or another) uses a template anyway",
        )


def _generator(model: Model, seed: int) -> torch.Generator:
    return torch.Generator(next(model.module.parameters()).device).manual_seed(seed)


def _data_path(name: str, cache_dir: str, console: Console) -> str:
    """The file of a `demo:` name, the pinned name of a dataset on the hub; any other path is returned as it is."""
    name = os.path.expanduser(name)
    on_hub = hub.parse_data(name)
    if on_hub is not None:
        return str(hub.download_data(on_hub, SUFFIXES, console).name)
    return data_file(name, Path(cache_dir))


def _load_tokenizer(config: Config, console: Console) -> Tokenizer:
    folder = resolve_model_folder(config.model.path, weights=False) if config.model.path else None
    path = tokenizer_path(config, folder)
    return load_tokenizer(path, config.data.chat_template, config.model.trust_remote_code, console.warn)


def _load_and_validate(
    config: Config | str | Path | None,
    overrides: Mapping[str, Any] | None,
    preset: str | None,
    purpose: Purpose = "train",
) -> Config:
    if isinstance(config, Config):
        if overrides or preset:
            raise ValueError("overrides and presets apply to a config file, not to a Config")
        # A Config built in Python is neither converted nor validated yet.
        return from_dict(to_dict(config), purpose)
    return load_config(config, preset, overrides or {}, purpose)


def _describe_run(run: Run) -> list[str]:
    """What is trained, how long and with what, in one line, and a line for each source of a mixture."""
    sizes, steps, dims, optim = run.data.batch_sizes, run.schedule.total_steps, run.ctx.dims, run.config.optim
    micro_batch = (
        f"{sizes.micro_batch_rows} rows"
        if sizes.micro_batch_tokens is None
        else f"up to {sizes.micro_batch_tokens} tokens"
    )
    epochs, mixture, processes = "", list[str](), ""
    if dims.world_size > 1:
        processes = f" ({dims.world_size} processes: {dims}, zero {run.config.parallel.zero})"
    if steps is not None:
        samples = run.schedule.end(run.progress)[1]
        epochs = f" ({samples / len(run.data.train):.2f} epochs)"
        mixture = run.data.describe_mixture(samples)
    sets = [f"{len(samples)}{f' of {name}' if name else ''}" for name, samples in run.data.validation.items()]
    if len(sets) > 1:
        sets[0] += " (val_loss)"
    validation = f"{', '.join(sets) or 'none'} held out"
    if run.data.validation and run.schedule.validation == Interval():
        validation += " and never used (neither training.validate_at_end nor an interval is set)"
    warmup_steps = resolve_warmup_steps(steps, optim)
    return [
        f"{'endless steps' if steps is None else plural(steps, 'step')}{epochs} of {sizes.global_batch_size} samples, "
        f"micro-batches of {micro_batch}, on {run.device}{processes}; "
        f"{_trained_text(run.model, run.config.training.precision)}; "
        f"{len(run.data.train)} samples to train on, {validation}; "
        f"{_optimizer_text(optim)} with learning rate {optim.learning_rate:g} ({optim.schedule}, "
        f"{plural(warmup_steps, 'step')} of warm-up), weight decay {optim.weight_decay:g}",
        f"{describe_saving(run.config.checkpoint)}, in {run.output_dir / CHECKPOINTS}",
        *mixture,
    ]


def _trained_text(model: Model, precision: str) -> str:
    if model.tuning is None:
        return f"all {model.parameter_count / 1e6:.2f}M parameters in {PRECISION_TEXTS[precision]}"
    if isinstance(model, FallbackModel):
        shapes = model.parameter_shapes
    else:
        assert model.decoder_config is not None
        shapes = decoder_shapes(model.decoder_config)
    counts = model.tuning.count_parameters(shapes)
    kinds = ", ".join(f"{kind} {_millions(count)}" for kind, count in counts.items())
    frozen = dtype_name(COMPUTE_DTYPE[precision])
    if isinstance(model.tuning, LoraPlan) and model.tuning.base_quantization is not None:
        frozen = f"{frozen}, the linears of the blocks in {model.tuning.base_quantization.kind}"
    return (
        f"{_millions(sum(counts.values()))} parameters in {PRECISION_TEXTS[precision]}: {kinds}; the frozen "
        f"rest of the model's {_millions(model.parameter_count)} is in {frozen}"
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}M"


def _optimizer_text(optim: OptimConfig) -> str:
    if optim.name == "adamw":
        return "AdamW"
    muon = "" if optim.muon_learning_rate is None else f" (learning rate {optim.muon_learning_rate:g})"
    return f"Muon{muon} and AdamW"


def _check_minimum(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise UsageError(f"{name} {value} is less than {minimum}")


def _later_end(run: Run) -> str:
    """The limits of a complete run doubled or, if it was trained further than that, twice what was trained."""
    training, progress = run.config.training, run.progress
    epochs = progress.trained_samples / len(run.data.train)
    limits = {
        "max_steps": (training.max_steps, progress.step),
        "max_epochs": (training.max_epochs, epochs),
        "max_tokens": (training.max_tokens, progress.tokens),
    }
    later = {
        name: 2 * limit if 2 * limit > trained else 2 * math.ceil(trained)
        for name, (limit, trained) in limits.items()
        if limit is not None
    }
    later = later or {"max_steps": 2 * progress.step}
    return " ".join(f"--training.{name} {int(end) if end == int(end) else end}" for name, end in later.items())
