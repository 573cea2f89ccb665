"""From a config to a `Run` that is ready to step, new or going on from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from torchstone import __version__, post
from torchstone.checkpoint.load import (
    CHECKPOINTS,
    find_resume,
    read_state,
    resolve_model_folder,
    restore_optimizer,
    restore_random,
)
from torchstone.checkpoint.manifest import list_checkpoints
from torchstone.config.schema import Config, SystemConfig
from torchstone.data.loader import RunData, load_data
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.builtin import data_file, tokenizer_folder
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.execution import Execution
from torchstone.models.model import Model, Native, rows_for
from torchstone.models.opening import Builder, check_folder, check_new, load_model, new_model
from torchstone.models.sizing import decoder_config, describe, init_std, new_hf_config
from torchstone.observe.console import Console
from torchstone.optim.build import build_optimizer
from torchstone.optim.schedule import schedule_notes
from torchstone.parallel.build import SharedBuilder, runner_of
from torchstone.parallel.mesh import ALONE, Place, is_worker, local_rank
from torchstone.parallel.shard import COMPUTED_IN, KEPT_IN
from torchstone.training.length import run_length
from torchstone.training.loop import Run, mark_best_of
from torchstone.training.run_folder import check_identity, identity
from torchstone.training.state import Progress


def assemble(config: Config, console: Console, device: torch.device, place: Place = ALONE) -> Run:
    # Ranks that differ in pp or tp alone see the same rows, and have to drop the same of them.
    torch.manual_seed(config.training.seed + place.data_rank)
    post.enter("looking for a checkpoint")
    checkpoint = find_resume(Path(config.output_dir), _resume(config, place), console.warn, place)
    source = checkpoint or (resolve_model_folder(config.model.path, place) if config.model.path else None)
    dtype, execution = COMPUTED_IN[config.training.precision], _execution(config, place)
    if source is not None:
        check_folder(source, device, dtype, execution)
    named = checkpoint or tokenizer_path(config, source)
    tokenizer = load_tokenizer(named, config.data.chat_template, config.model.trust_remote_code)
    if source is None:
        check_new(_new_hf_config(config, tokenizer), device, dtype, execution)
    post.enter("opening the data")
    data = open_data(config, tokenizer, console, place)
    identified = identity(config, data)
    progress = Progress()
    if checkpoint is not None:
        state = read_state(checkpoint)
        check_identity(state.get("identity", {}), identified, checkpoint)
        progress = Progress.from_dict(state)
        size = data.batching.global_batch_size
        if state.get("global_batch_size", size) != size:
            console.warn(
                f"a step had {state['global_batch_size']} samples and has {size} from now on: "
                "training.global_batch_size keeps it, whatever the number of processes"
            )
    post.enter("loading the model")
    builder = builder_for(config, place, device)
    if source is not None:
        model = _loaded(config, source, builder, execution, tokenizer, console)
    else:
        model = _new(config, builder, execution, tokenizer, console)
    for note in model.notes:
        console.say(note)
    for warning in model.warnings:
        console.warn(warning)
    check_rows(model, config)
    optimizer = build_optimizer(model.named_parameters(), config.optim, model.roles())
    if checkpoint is not None:
        # config.json has the tokenizer's pad_token_id by now, but the run began with the folder's.
        model.padding_row = state.get("padding_row", model.padding_row)
        restore_optimizer(checkpoint, optimizer, model)
        restore_random(checkpoint, place, config.training.seed + place.data_rank, console.warn)
        console.say(f"going on from {checkpoint} (step {progress.step}, {progress.tokens} tokens)")
    if model.padding_row in {tokenizer.hf.bos_token_id, *tokenizer.stop_ids} - {None}:
        console.warn(
            f"token {model.padding_row} occurs in text and is the model's pad_token_id as well: its embedding is not "
            "trained, as in Transformers"
        )
    length = run_length(config.training, data, config.data.shuffle, progress)
    for note in schedule_notes(length.steps, config.optim):
        console.warn(note)
    saved_with = {"identity": identified, "version": __version__, "torch": torch.__version__}
    saved_with["global_batch_size"] = data.batching.global_batch_size
    saved_with |= {"padding_row": model.padding_row, "implementation": model.implementation, "model": model.notes}
    runner = runner_of(model, builder, data.packed)
    run = Run(config, model, tokenizer, data, optimizer, runner, length, progress, console, saved_with, checkpoint)
    mark_best_of(run)
    return run


def _resume(config: Config, place: Place) -> str:
    """A launcher that starts its workers again means to go on with what they have saved, also where the run was to be a
    new one, or to begin with a certain checkpoint."""
    restarted = place.agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) > 0
    saved = bool(list_checkpoints(Path(config.output_dir) / CHECKPOINTS))
    return "auto" if restarted and (saved or config.checkpoint.resume == "never") else config.checkpoint.resume


def builder_for(config: Config, place: Place, device: torch.device) -> Builder:
    precision = config.training.precision
    if place.mesh is None:
        return Builder(device, KEPT_IN[precision])
    return SharedBuilder(place, config.parallel, precision, device)


def open_data(config: Config, tokenizer: Tokenizer, console: Console, place: Place = ALONE) -> RunData:
    assert config.data.path is not None
    cache_dir = Path(config.data.cache_dir)
    train = [data_file(name, cache_dir) for name in config.data.path]
    other = config.data.validation_path
    validation = None if other is None else [data_file(name, cache_dir) for name in other]
    return load_data(config, tokenizer, train, validation, console, place.data_ranks, place.layout.tp)


def tokenizer_path(config: Config, model_folder: Path | None) -> Path:
    if config.model.tokenizer is not None:
        return tokenizer_folder(config.model.tokenizer, Path(config.data.cache_dir))
    assert model_folder is not None
    return model_folder


def pick_device(system: SystemConfig) -> torch.device:
    if system.threads is not None:
        torch.set_num_threads(system.threads)
    if system.device == "cpu" or (system.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count, number = torch.cuda.device_count(), system.device_id or 0
    if not torch.cuda.is_available():
        raise UsageError("system.device is cuda, but torch sees no CUDA device", "use --system.device cpu")
    if is_worker():
        if system.device_id is not None:
            raise UsageError("system.device_id is for one process; the workers of a launch take a device each")
        # One that sees a single device was given it, by a launcher of ours or by `srun --gpus-per-task`.
        given = post.HERE.launched or "SLURM_STEP_ID" in os.environ
        number = 0 if count == 1 and given else local_rank()
        if number >= count:
            raise UsageError(f"worker {number} of this machine has no device: there are {count}")
    if number >= count:
        raise UsageError(f"system.device_id is {number}, but there are {count} CUDA devices, from 0 on")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def check_rows(model: Model, config: Config) -> None:
    """Refuses rows that the model cannot compute, or not as it would compute their documents alone."""
    longest = config.data.context_length
    reason = model.why_not_packed(longest) if config.data.packing else None
    if reason is not None:
        raise UsageError(
            f"data.packing puts several documents in a row, which this model does not allow: {reason}",
            "use --data.packing false",
        )
    reason = model.why_not_rows(longest)
    if reason is not None:
        raise UsageError(f"rows of {longest} tokens are too long: {reason}", "use a shorter context length")


def check_tokens(model: Model, tokenizer: Tokenizer) -> None:
    """Where nothing is trained, a model has rows for all tokens or is of no use."""
    if tokenizer.size > model.vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer.source} has ids up to {tokenizer.size - 1}, the model {model.vocab_size} rows",
            "use the tokenizer that belongs to the model; training gives it the rows that it lacks",
        )


def _loaded(
    config: Config, folder: Path, builder: Builder, execution: Execution, tokenizer: Tokenizer, console: Console
) -> Model:
    dtype = COMPUTED_IN[config.training.precision]
    model = load_model(folder, builder.device, dtype, execution, builder, tokenizer.size)
    if config.model.depth is not None:
        wanted = decoder_config(config.model, rows_for(tokenizer.size), config.data.context_length)
        if not isinstance(model, Native) or wanted != model.module.config:
            raise CheckpointError(
                f"{folder} holds another model than the config asks for: {model.describe()}",
                f"the config asks for {config.model.family}, native: {describe(wanted)}; choose another --output-dir "
                "to start anew",
            )
    for change in model.align(tokenizer.size, _marks(tokenizer), tokenizer.stop_ids):
        console.warn(change)
    longest = config.data.context_length
    if model.max_positions is not None and longest > model.max_positions and model.why_not_rows(longest) is None:
        console.warn(
            f"data.context_length {longest} is beyond the {model.max_positions} positions the model was made for"
        )
    console.say(f"model {folder}: {model.describe()}")
    return model


def _new(config: Config, builder: Builder, execution: Execution, tokenizer: Tokenizer, console: Console) -> Model:
    if config.model.implementation == "fallback":
        raise UsageError("a new model is native, and model.implementation is fallback", "leave out one of them")
    hf_config = _new_hf_config(config, tokenizer)
    std = init_std(config.model, config.model.width or 64 * (config.model.depth or 0))
    dtype = COMPUTED_IN[config.training.precision]
    model = new_model(hf_config, std, config.training.seed, builder.device, dtype, execution, builder)
    console.say(f"new model: {model.describe()}, init std {std:.4f}")
    return model


def _new_hf_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    rows = rows_for(tokenizer.size)
    return new_hf_config(config.model, rows, config.data.context_length) | _marks(tokenizer)


def _execution(config: Config, place: Place) -> Execution:
    model = config.model
    if place.mesh is not None and model.compile == "whole":
        raise UsageError(
            "model.compile whole is for a model that lies in one piece, and FSDP2 gathers it block by block",
            "use --model.compile block",
        )
    if place.layout.tp > 1 and model.compile != "none":
        raise UsageError(
            "model.compile does not go with parallel.tp: compiled by torch, blocks whose matrices are shared out "
            "trained wrong without a word",
            "leave out one of them",
        )
    return Execution(
        tp=place.layout.tp,
        pp=place.layout.pp,
        implementation=model.implementation,
        attention=model.attention,
        packed=config.data.packing,
        fused=model.fused,
        recompute=model.recompute,
        compile=model.compile,
        liger=model.liger,
        trust_remote_code=model.trust_remote_code,
    )


def _marks(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {key: getattr(tokenizer.hf, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
