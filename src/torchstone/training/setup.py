"""Builds a `Run` from a config: a new one, or resumed from a checkpoint."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch

from torchstone import __version__, heartbeat, hub
from torchstone.checkpoint.export import source_dtype
from torchstone.checkpoint.load import (
    CHECKPOINTS,
    find_resume_checkpoint,
    is_tuned_folder,
    read_state,
    recorded_base,
    resolve_model_folder,
    restore_optimizer,
    restore_rng_states,
    tokenizer_files,
)
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.checkpoint.model_folder import (
    block_linears,
    check_model_folder,
    check_new_model,
    decoder_shapes,
    fallback_reason,
    load_model,
    read_model_config,
    stored_parameter_count,
)
from torchstone.config.schema import Config, SystemConfig
from torchstone.data.loader import RunData, load_data
from torchstone.data.tokenize import Tokenizer, load_tokenizer, tokenizer_warnings
from torchstone.demo.builtin import data_file, tokenizer_folder
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.choice import Choice
from torchstone.models.execution import ExecutionOptions
from torchstone.models.families import family_of
from torchstone.models.model import Model, NativeModel, padded_vocab_size
from torchstone.models.sizing import (
    build_sized_decoder_config,
    build_sized_hf_config,
    describe,
    parameter_count,
    resolve_init_std,
)
from torchstone.observe.console import Console
from torchstone.optim.adamw import AdamW
from torchstone.optim.build import build_optimizer
from torchstone.optim.muon import Muon
from torchstone.optim.schedule import schedule_warnings
from torchstone.parallel.build import ModelBuilder, ShardedModelBuilder, build_new_model, build_runner
from torchstone.parallel.fsdp import COMPUTE_DTYPE, PARAM_DTYPE
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext, is_distributed, local_rank
from torchstone.parallel.projections import ShardedProjections
from torchstone.parallel.runner import Runner
from torchstone.training.checks import SMALLER_PRECISION, check_memory
from torchstone.training.defaults import (
    choose_precision,
    describe_choices,
    execution_options,
    recorded_recompute,
    run_flops,
    slow_choices,
    with_precision,
)
from torchstone.training.hub_commits import hub_names
from torchstone.training.loop import mark_best_checkpoint
from torchstone.training.out_of_memory import limit_settings, restore_limit
from torchstone.training.run import Run
from torchstone.training.run_folder import check_identity, run_identity, warn_about_changes
from torchstone.training.sample_text import choose_prompts
from torchstone.training.schedule import TrainingSchedule, check_loss_tokens, plan_schedule
from torchstone.training.state import Progress
from torchstone.training.tuning import build_projection, decompose, plan_tuning, tuning_notes
from torchstone.tuning.lora import LORA_B
from torchstone.tuning.plan import LoraPlan, OsftPlan, TuningPlan
from torchstone.tuning.quantize import bytes_per_weight

# With one of these a user sets up torch's allocator.
ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})


def build_run(
    config: Config,
    console: Console,
    device: torch.device,
    ctx: ParallelContext = SINGLE_PROCESS,
    resume: str | None = None,
    recompute: Choice | None = None,
) -> Run:
    """`resume` and `recompute`: instead of `checkpoint.resume` and `model.recompute`."""
    # Ranks that differ only in pp or tp see the same rows and need the same dropout.
    seed = config.training.seed + ctx.dp_rank
    torch.manual_seed(seed)
    heartbeat.report_phase("looking for a checkpoint")
    resume = resume or _resume_setting(config, ctx)
    checkpoint = find_resume_checkpoint(Path(config.output_dir), resume, console.warn, ctx)
    model_folder = _model_folder(config, checkpoint, ctx, console)
    state = {} if checkpoint is None else _read_state(config, checkpoint)
    heartbeat.report_phase("checking the model")
    requested, precision = config, choose_precision(config, device, ctx, state.get("identity", {}))
    config = with_precision(config, precision)
    recompute = recompute or recorded_recompute(config, state, device, ctx)
    execution = execution_options(config, ctx, device, recompute)
    # A launcher has prepared the data, which has printed these lines.
    data_console = console.log_only() if heartbeat.has_launcher() else console
    tokenizer, parameters = _check_model(config, model_folder, checkpoint, device, execution, ctx, data_console)
    tuning = None if model_folder is None else plan_tuning(config, model_folder, checkpoint, execution, device)
    heartbeat.report_phase("opening the data")
    data = open_data(config, tokenizer, data_console, ctx, pad_to_buckets=device.type == "cuda")
    identity = run_identity(config, data)
    progress = Progress() if checkpoint is None else Progress.from_dict(state)
    if checkpoint is not None:
        check_identity(state.get("identity", {}), identity, checkpoint)
        _warn_about_batch_size(state, data, console)
    schedule = plan_schedule(config, data, progress)
    check_loss_tokens(config, data, schedule, progress)
    heartbeat.report_phase("loading the model")
    flops = run_flops(parameters, data, schedule, progress, ctx)
    execution = replace(execution, has_fixed_length=data.shapes.has_fixed_length, run_flops=flops)
    builder = model_builder(config, ctx, device)
    model = _build_model(config, model_folder, builder, execution, tokenizer, console, tuning, ctx)
    model.choices = {"training.precision": precision} | model.choices
    console.info("; ".join([*describe_choices(model.choices), *model.notes]))
    runner = _build_runner(config, model, builder, data)
    optimizer = _build_optimizer(config, model, ctx)
    if checkpoint is not None:
        # config.json now has the tokenizer's pad_token_id, but the run started with the one of the model folder.
        model.padding_idx = state.get("padding_row", model.padding_idx)
        restore_optimizer(checkpoint, optimizer, model)
        _restore_rng_states(checkpoint, model, ctx, seed, console)
        console.info(f"resuming from {checkpoint} (step {progress.step}, {progress.tokens} tokens)")
    _warn_about_padding(model, tokenizer, console)
    slow = slow_choices(requested, execution, device, isinstance(model, NativeModel))
    replaced = tokenizer_warnings(tokenizer, model.hf_config["model_type"])
    for warning in [*slow, *replaced, *_data_warnings(config, schedule, data)]:
        console.warn(warning)
    info = _checkpoint_info(config, runner, data, model_folder) | {
        "identity": identity,
        # The step after which metrics.jsonl begins: not 0 if the run began from a checkpoint of another one.
        "metrics_start": state.get("metrics_start", 0) if _is_own(checkpoint, config) else progress.last_logged_step,
    }
    if checkpoint is not None and ctx.is_main:
        warn_about_changes(requested, checkpoint, state.get("resolved", {}), info["resolved"], console)
    run = Run(config, model, tokenizer, data, optimizer, runner, schedule, progress, console, info, checkpoint)
    run.weights_folder = model_folder
    restore_limit(run, state.get("limit_settings"))
    if config.observe.sample_every_steps is not None:
        run.sample_prompts = choose_prompts(config, data, tokenizer, model)
    mark_best_checkpoint(run)
    return run


def _restore_rng_states(checkpoint: Path, model: Model, ctx: ParallelContext, seed: int, console: Console) -> None:
    """Results depend on them if the model has dropout, as one of the fallback may."""
    log = console.info if isinstance(model, NativeModel) else console.warn
    restore_rng_states(checkpoint, model.device, ctx, seed, log)


def _read_state(config: Config, checkpoint: Path) -> dict[str, Any]:
    """Raises CheckpointError for a checkpoint of another tuning.method, before it is opened as one of this method."""
    state = read_state(checkpoint)
    check_identity(state.get("identity", {}), {"tuning.method": config.tuning.method}, checkpoint)
    return state


def _model_folder(config: Config, checkpoint: Path | None, ctx: ParallelContext, console: Console) -> Path | None:
    """The folder with the weights, or None for a new model. The checkpoint of LoRA or OSFT has what was trained."""
    path = config.model.path
    if not path or (checkpoint is not None and config.tuning.method == "full"):
        return checkpoint
    if checkpoint is not None and is_tuned_folder(checkpoint):
        # If model.path is a run, it may have a newer checkpoint by now.
        recorded = recorded_base(checkpoint)
        path = recorded if recorded and Path(recorded).is_dir() else path
    folder = resolve_model_folder(path, ctx, console.warn)
    for note in [] if checkpoint is not None else tuning_notes(config, folder):
        console.info(note)
    return folder


def _checkpoint_info(config: Config, runner: Runner, data: RunData, model_folder: Path | None) -> dict[str, Any]:
    model = runner.model
    quantization = getattr(model.tuning, "base_quantization", None)
    return {
        "version": __version__,
        "torch": torch.__version__,
        "global_batch_size": data.batch_sizes.global_batch_size,
        "formats": data.formats,
        "padding_row": model.padding_idx,
        "implementation": model.implementation,
        "resolved": {key: choice.value for key, choice in model.choices.items()},
        "model": [*describe_choices(model.choices), *model.notes],
        "hub": hub_names(config),
        "limit_settings": limit_settings(runner),
        # The dtype of exports; None for a new model.
        "source_dtype": None if model_folder is None else source_dtype(model_folder),
    } | (
        {}
        if model.tuning is None
        else {
            "base_fingerprint": model.tuning.base_fingerprint,
            "base_quantization": quantization and str(quantization),
            "frozen_adapters": [tensors.adapter.name for tensors in getattr(model.tuning, "frozen", ())],
        }
    )


def model_builder(config: Config, ctx: ParallelContext, device: torch.device) -> ModelBuilder:
    precision = config.training.precision
    if ctx.mesh is None:
        return ModelBuilder(device, PARAM_DTYPE[precision], COMPUTE_DTYPE[precision])
    return ShardedModelBuilder(ctx, config.parallel, precision, device)


def open_data(
    config: Config,
    tokenizer: Tokenizer,
    console: Console,
    ctx: ParallelContext = SINGLE_PROCESS,
    pad_to_buckets: bool = False,
) -> RunData:
    assert config.data.path is not None
    cache_dir = Path(config.data.cache_dir)
    train = [data_file(name, cache_dir) for name in config.data.path]
    validation = {
        name: [data_file(path, cache_dir) for path in paths] for name, paths in config.data.validation_sets.items()
    }
    return load_data(config, tokenizer, train, validation, console, ctx.dims.dp, ctx.dims.tp, pad_to_buckets)


def tokenizer_path(config: Config, model_folder: Path | None) -> Path:
    if config.model.tokenizer is not None:
        name = hub.parse_model(config.model.tokenizer)
        if name is not None:
            return hub.download_model(name, None, False, config.model.trust_remote_code).folder
        return tokenizer_folder(config.model.tokenizer, Path(config.data.cache_dir))
    assert model_folder is not None
    return tokenizer_files(model_folder)


def select_device(system: SystemConfig) -> torch.device:
    if system.threads is not None:
        torch.set_num_threads(system.threads)
    if system.device == "cpu" or (system.device == "auto" and not torch.cuda.is_available()):
        if system.device_id:
            raise UsageError(f"system.device_id is {system.device_id}, but the device is the CPU", "leave it out")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("system.device is cuda, but torch sees no CUDA device", "use --system.device cpu")
    count, index = torch.cuda.device_count(), system.device_id or 0
    if is_distributed():
        if system.device_id is not None:
            raise UsageError(
                "system.device_id is for a single process; launched workers take one device each",
                "leave out system.device_id",
            )
        # A launcher of ours, or `srun --gpus-per-task`, shows each worker only its own device.
        has_own_device = heartbeat.has_launcher() or "SLURM_STEP_ID" in os.environ
        index = 0 if count == 1 and has_own_device else local_rank()
        if index >= count:
            raise UsageError(f"local rank {index} has no CUDA device: this machine has {count}")
    if index >= count:
        raise UsageError(f"system.device_id is {index}, but there are {count} CUDA devices, counted from 0")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if ALLOCATOR_VARIABLES.isdisjoint(os.environ):
        # Segments that grow leave few holes: in one case a fifth of the memory was free, but in pieces.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


def check_row_length(model: Model, config: Config) -> None:
    """Raises if rows are too long for the model, or if packing would change the results of its documents."""
    max_length = config.data.context_length
    reason = model.packing_error(max_length) if config.data.packing else None
    if reason is not None:
        raise UsageError(f"data.packing does not work with this model: {reason}", "use --data.packing false")
    reason = model.length_error(max_length)
    if reason is not None:
        raise UsageError(f"rows of {max_length} tokens are too long: {reason}", "use a shorter --data.context_length")


def check_vocabulary(model: Model, tokenizer: Tokenizer) -> None:
    """Raises if the tokenizer is larger than the embedding; only training resizes the embedding."""
    if tokenizer.size > model.vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer.path} has ids up to {tokenizer.size - 1}, but the model has only "
            f"{model.vocab_size} embeddings",
            "use the tokenizer of the model; training would resize the embedding",
        )


def _resume_setting(config: Config, ctx: ParallelContext) -> str:
    """Returns checkpoint.resume; for restarted workers that saved something, auto, so that they resume it."""
    is_restarted = ctx.all_reduce_max(heartbeat.read_int_variable("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    has_saved = bool(list_checkpoints(Path(config.output_dir) / CHECKPOINTS))
    setting = config.checkpoint.resume
    return "auto" if is_restarted and (has_saved or setting == "never") else setting


def _is_own(checkpoint: Path | None, config: Config) -> bool:
    """Whether this run, not another one, saved the checkpoint."""
    own_root = (Path(config.output_dir) / CHECKPOINTS).resolve()
    return checkpoint is not None and checkpoint.resolve().parent == own_root


def _check_model(
    config: Config,
    model_folder: Path | None,
    checkpoint: Path | None,
    device: torch.device,
    execution: ExecutionOptions,
    ctx: ParallelContext,
    console: Console,
) -> tuple[Tokenizer, int]:
    """Checks the model before any data is tokenized; returns the tokenizer and the number of parameters."""
    dtype = COMPUTE_DTYPE[config.training.precision]
    if model_folder is not None:
        parameters = stored_parameter_count(model_folder)
        check_state_memory(config, parameters, device, ctx, quantized_parameter_count(config, model_folder, execution))
        check_model_folder(model_folder, device, dtype, execution)
    folder = checkpoint or tokenizer_path(config, model_folder)
    tokenizer = load_tokenizer(folder, config.data.chat_template, config.model.trust_remote_code, console.warn)
    if model_folder is None:
        hf_config = _new_hf_config(config, tokenizer)
        check_new_model(hf_config, device, dtype, execution)
        parameters = parameter_count(family_of(hf_config).decoder_config(hf_config))
        check_state_memory(config, parameters, device, ctx)
    return tokenizer, parameters


def quantized_parameter_count(config: Config, folder: Path, execution: ExecutionOptions) -> int:
    """How many of the parameters are quantized. The fallback is loaded before its linears are."""
    if config.tuning.quantize_base == "none" or fallback_reason(folder, execution) is not None:
        return 0
    shapes = decoder_shapes(read_model_config(folder)[2])
    return sum(math.prod(shapes[f"{linear}.weight"]) for linear in block_linears(shapes))


def check_state_memory(
    config: Config, parameters: int, device: torch.device, ctx: ParallelContext, quantized: int = 0
) -> None:
    """Raises if weights, gradients and the moments (two of AdamW, one of Muon) do not fit in this rank's memory.

    `quantized`: how many of the parameters are.
    """
    shards = ctx.dims.dp_shard * ctx.dims.tp * ctx.dims.pp
    tensors = 4 if config.optim.name == "adamw" else 3
    needed = tensors * PARAM_DTYPE[config.training.precision].itemsize * parameters // shards
    if config.tuning.method != "full":
        # At least: of LoRA, the adapters are small.
        needed = COMPUTE_DTYPE[config.training.precision].itemsize * (parameters - quantized) // shards
        if quantized:
            # Each rank keeps those of all its layers.
            needed += int(bytes_per_weight(config.tuning.quantize_base) * quantized) // ctx.dims.pp
    check_memory(needed, parameters, device, smaller_state_hint(config))


def smaller_state_hint(config: Config) -> str:
    """What makes weights, gradients and moments smaller."""
    smaller = SMALLER_PRECISION.get(config.training.precision)
    precision = "" if smaller is None else f"--training.precision {smaller} (half of that), "
    if config.tuning.method == "lora" and config.tuning.quantize_base == "none":
        precision += "--tuning.quantize_base nf4 (about a quarter of bf16), "
    return f"use a smaller model, {precision}or more GPUs (--parallel.dp_shard shards the model)"


def _build_model(
    config: Config,
    model_folder: Path | None,
    builder: ModelBuilder,
    execution: ExecutionOptions,
    tokenizer: Tokenizer,
    console: Console,
    tuning: TuningPlan | None,
    ctx: ParallelContext,
) -> Model:
    if isinstance(tuning, OsftPlan):
        heartbeat.report_phase("computing singular vectors")
        decompose(tuning, builder.device, ctx, console)
        heartbeat.report_phase("loading the model")
    if model_folder is not None:
        model = _load_model(config, model_folder, builder, execution, tokenizer, console, tuning)
    else:
        model = _new_model(config, builder, execution, tokenizer, console)
    for warning in [*model.warnings, *(tuning.warnings if isinstance(tuning, LoraPlan) else ())]:
        console.warn(warning)
    check_row_length(model, config)
    return model


def _build_runner(config: Config, model: Model, builder: ModelBuilder, data: RunData) -> Runner:
    runner = build_runner(model, builder, data.packed, data.shapes.longest_document(config.data.context_length))
    if isinstance(model.tuning, OsftPlan):
        has_decay = config.optim.weight_decay > 0
        use_split_bf16 = builder.device.type == "cuda" and builder.compute_dtype == torch.bfloat16
        runner.projection = build_projection(model.tuning, model, builder.device, has_decay, use_split_bf16)
    return runner


def _build_optimizer(config: Config, model: Model, ctx: ParallelContext) -> AdamW | Muon:
    exchange = ShardedProjections(model, ctx) if config.optim.name == "muon" else None
    copies = None if model.master_weights is None else model.master_weights.copies
    parameters, ratio = list(model.trained_parameters()), config.tuning.lora_plus_ratio
    scales = {} if ratio is None else {name: ratio for name, _ in parameters if name.endswith(f".{LORA_B}")}
    return build_optimizer(parameters, config.optim, model.parameter_kinds(), exchange, copies, scales)


def _load_model(
    config: Config,
    folder: Path,
    builder: ModelBuilder,
    execution: ExecutionOptions,
    tokenizer: Tokenizer,
    console: Console,
    tuning: TuningPlan | None,
) -> Model:
    dtype, max_length = COMPUTE_DTYPE[config.training.precision], config.data.context_length
    model = load_model(folder, builder.device, dtype, execution, builder, tokenizer.size, tuning)
    if config.model.depth is not None:
        expected = build_sized_decoder_config(config.model, padded_vocab_size(tokenizer.size), max_length)
        if not isinstance(model, NativeModel) or expected != model.module.config:
            raise CheckpointError(
                f"the model in {folder} differs from the config: {model.describe()}",
                f"the config has {config.model.family}, native: {describe(expected)}; choose another --output-dir to "
                "start a new run",
            )
    _warn_about_other_tokenizer(folder, tokenizer, console)
    for change in model.align_special_tokens(_special_ids(tokenizer), tokenizer.stop_ids):
        console.info(change)
    if model.max_positions is not None and max_length > model.max_positions and model.length_error(max_length) is None:
        console.warn(f"data.context_length {max_length} exceeds the {model.max_positions} positions of the model")
    console.info(f"model {folder}: {model.describe()}")
    return model


def _new_model(
    config: Config, builder: ModelBuilder, execution: ExecutionOptions, tokenizer: Tokenizer, console: Console
) -> Model:
    if config.model.implementation == "fallback":
        raise UsageError("a new model is native, but model.implementation is fallback", "set it to auto")
    std = resolve_init_std(config.model, config.model.width or 64 * (config.model.depth or 0))
    dtype, hf_config = COMPUTE_DTYPE[config.training.precision], _new_hf_config(config, tokenizer)
    model = build_new_model(hf_config, std, config.training.seed, builder.device, dtype, execution, builder)
    console.info(f"new model: {model.describe()}, init std {std:.4f}")
    return model


def _new_hf_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    vocab_size = padded_vocab_size(tokenizer.size)
    return build_sized_hf_config(config.model, vocab_size, config.data.context_length) | _special_ids(tokenizer)


def _warn_about_batch_size(state: dict[str, Any], data: RunData, console: Console) -> None:
    new = data.batch_sizes.global_batch_size
    old = state.get("global_batch_size", new)
    if old != new:
        console.warn(
            f"a step had {old} samples and now has {new}; set --training.global_batch_size {old} to keep it with any "
            "number of processes"
        )


def _data_warnings(config: Config, schedule: TrainingSchedule, data: RunData) -> list[str]:
    """About runs and epochs that are shorter than they should be, and about validation on what is trained on."""
    warnings = list(schedule_warnings(schedule.total_steps, config.optim))
    trained = {os.path.realpath(path) for path in config.data.path or ()}
    shared = [path for path in config.data.validation_paths if os.path.realpath(path) in trained]
    if shared:
        warnings.append(f"{', '.join(shared)} is both data.path and data.validation_path: its rows are trained on")
    size, samples = data.batch_sizes.global_batch_size, len(data.train)
    if size > samples:
        warnings.append(
            f"training.global_batch_size {size} is larger than the data ({samples} samples): an epoch is less than a "
            "step"
        )
    return warnings


def _warn_about_other_tokenizer(folder: Path, tokenizer: Tokenizer, console: Console) -> None:
    """Warns if the tokens that the model was trained on have other ids now."""
    file = folder / "tokenizer.json"
    if tokenizer.path == folder or not file.is_file():
        return
    try:
        old, new = tokenizers.Tokenizer.from_file(str(file)).get_vocab(), tokenizer.hf.get_vocab()
    except Exception as error:
        # tokenizers raises nothing more specific.
        console.warn(f"{file} cannot be compared with {tokenizer.path}: {error}")
        return
    moved = sum(new.get(token) != index for token, index in old.items())
    if moved:
        console.warn(
            f"{tokenizer.path} is not the tokenizer of the model: {moved} of the model's {len(old)} tokens have "
            "another id or none, and the model has to learn them again"
        )


def _warn_about_padding(model: Model, tokenizer: Tokenizer, console: Console) -> None:
    if model.padding_idx in {tokenizer.hf.bos_token_id, *tokenizer.stop_ids} - {None}:
        console.warn(
            f"token {model.padding_idx} is the model's pad_token_id but also occurs in text: its embedding is not "
            "trained, as in Transformers"
        )


def _special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {key: getattr(tokenizer.hf, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
