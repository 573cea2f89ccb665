"""From a config to a `Run` that is ready to step, new or going on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchstone import __version__
from torchstone.checkpoint.load import (
    find_resume,
    read_state,
    resolve_model_folder,
    restore_optimizer,
    restore_random,
)
from torchstone.config.schema import Config, SystemConfig
from torchstone.data.loader import RunData, load_data
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.builtin import data_file, tokenizer_folder
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.execution import Execution
from torchstone.models.model import Model, Native, rows_for
from torchstone.models.opening import check_folder, check_new, load_model, new_model
from torchstone.models.sizing import decoder_config, describe, init_std, new_hf_config
from torchstone.observe.console import Console
from torchstone.optim.build import build_optimizer
from torchstone.optim.schedule import schedule_notes
from torchstone.training.length import run_length
from torchstone.training.loop import Run, mark_best_of
from torchstone.training.run_folder import check_identity, identity
from torchstone.training.state import Progress

DTYPES = {"fp32": torch.float32, "bf16-pure": torch.bfloat16}


def assemble(config: Config, console: Console) -> Run:
    device = pick_device(config.system)
    torch.manual_seed(config.training.seed)
    checkpoint = find_resume(Path(config.output_dir), config.checkpoint.resume, console.warn)
    source = checkpoint or (resolve_model_folder(config.model.path) if config.model.path else None)
    if source is not None:
        check_folder(source, device, DTYPES[config.training.precision], _execution(config))
    named = checkpoint or tokenizer_path(config, source)
    tokenizer = load_tokenizer(named, config.data.chat_template, config.model.trust_remote_code)
    if source is None:
        check_new(_new_hf_config(config, tokenizer), device, DTYPES[config.training.precision], _execution(config))
    data = open_data(config, tokenizer, console)
    identified = identity(config, data)
    progress = Progress()
    if checkpoint is not None:
        state = read_state(checkpoint)
        check_identity(state.get("identity", {}), identified, checkpoint)
        progress = Progress.from_dict(state)
    model = _loaded(config, source, device, tokenizer, console) if source else _new(config, device, tokenizer, console)
    for note in model.notes:
        console.say(note)
    for warning in model.warnings:
        console.warn(warning)
    check_rows(model, config)
    optimizer = build_optimizer(model.module.named_parameters(), config.optim, model.roles())
    if checkpoint is not None:
        # config.json has the tokenizer's pad_token_id by now, but the run began with the folder's.
        model.padding_row = state.get("padding_row", model.padding_row)
        restore_optimizer(checkpoint, optimizer, model)
        restore_random(checkpoint)
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
    saved_with |= {"padding_row": model.padding_row, "implementation": model.implementation, "model": model.notes}
    run = Run(config, model, tokenizer, data, optimizer, device, length, progress, console, saved_with, checkpoint)
    mark_best_of(run)
    return run


def open_data(config: Config, tokenizer: Tokenizer, console: Console) -> RunData:
    assert config.data.path is not None
    cache_dir = Path(config.data.cache_dir)
    train = [data_file(name, cache_dir) for name in config.data.path]
    other = config.data.validation_path
    validation = None if other is None else [data_file(name, cache_dir) for name in other]
    return load_data(config, tokenizer, train, validation, console)


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
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise UsageError("system.device is cuda, but torch sees no CUDA device", "use --system.device cpu")
    if system.device_id >= count:
        raise UsageError(f"system.device_id is {system.device_id}, but there are {count} CUDA devices, from 0 on")
    device = torch.device("cuda", system.device_id)
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


def _loaded(config: Config, folder: Path, device: torch.device, tokenizer: Tokenizer, console: Console) -> Model:
    model = load_model(folder, device, DTYPES[config.training.precision], _execution(config))
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


def _new(config: Config, device: torch.device, tokenizer: Tokenizer, console: Console) -> Model:
    if config.model.implementation == "fallback":
        raise UsageError("a new model is native, and model.implementation is fallback", "leave out one of them")
    hf_config = _new_hf_config(config, tokenizer)
    std = init_std(config.model, config.model.width or 64 * (config.model.depth or 0))
    dtype = DTYPES[config.training.precision]
    model = new_model(hf_config, std, config.training.seed, device, dtype, _execution(config))
    console.say(f"new model: {model.describe()}, init std {std:.4f}")
    return model


def _new_hf_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    rows = rows_for(tokenizer.size)
    return new_hf_config(config.model, rows, config.data.context_length) | _marks(tokenizer)


def _execution(config: Config) -> Execution:
    model = config.model
    return Execution(
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
