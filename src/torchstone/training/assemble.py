"""From a config to a `Run` that is ready to step, new or going on from a checkpoint."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
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
from torchstone.checkpoint.manifest import read_json, write_json
from torchstone.config.load import to_dict
from torchstone.config.schema import Config, SystemConfig
from torchstone.data.loader import RunData, load_data
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.builtin import data_file, tokenizer_folder
from torchstone.errors import CheckpointError, UsageError
from torchstone.models.sizing import decoder_config, describe, init_std
from torchstone.models.weights import Model, load_model, new_model
from torchstone.observe.console import Console
from torchstone.optim.build import build_optimizer
from torchstone.optim.schedule import schedule_notes
from torchstone.training.length import run_length
from torchstone.training.loop import Run
from torchstone.training.state import Progress

DTYPES = {"fp32": torch.float32, "bf16-pure": torch.bfloat16}


def assemble(config: Config, console: Console) -> Run:
    device = pick_device(config.system)
    torch.manual_seed(config.training.seed)
    checkpoint = find_resume(Path(config.output_dir), config.checkpoint.resume, console.warn)
    tokenizer = load_tokenizer(checkpoint or tokenizer_path(config))
    data = open_data(config, tokenizer, console)
    model = _model(config, tokenizer, checkpoint, device, console)
    _check_vocabulary(model, tokenizer)
    if config.data.context_length > model.decoder.config.max_positions:
        console.warn(
            f"data.context_length {config.data.context_length} is beyond the {model.decoder.config.max_positions} "
            "positions the model was made for"
        )
    optimizer = build_optimizer(model.decoder.named_parameters(), config.optim)
    length = run_length(config.training, data, config.data.shuffle)
    for note in schedule_notes(length.steps, config.optim):
        console.warn(note)
    saved_with = {"data": _data_identity(config, data), "version": __version__, "torch": torch.__version__}
    progress = Progress()
    if checkpoint is not None:
        state = read_state(checkpoint)
        _check_same_data(state["data"], saved_with["data"], checkpoint)
        progress = Progress.from_dict(state)
        restore_optimizer(checkpoint, optimizer, model.decoder)
        restore_random(checkpoint)
        console.say(f"going on from {checkpoint} (step {progress.step}, {progress.tokens} tokens)")
    return Run(config, model, tokenizer, data, optimizer, device, length, progress, console, saved_with)


def open_data(config: Config, tokenizer: Tokenizer, console: Console) -> RunData:
    assert config.data.path is not None
    train = data_file(config.data.path, Path(config.data.cache_dir))
    other = config.data.validation_path
    validation = None if other is None else data_file(other, Path(config.data.cache_dir))
    return load_data(config, tokenizer, train, validation, console.say)


def tokenizer_path(config: Config) -> Path:
    if config.model.tokenizer is not None:
        return tokenizer_folder(config.model.tokenizer, Path(config.data.cache_dir))
    assert config.model.path is not None
    return resolve_model_folder(config.model.path)


def pick_device(system: SystemConfig) -> torch.device:
    if system.threads is not None:
        torch.set_num_threads(system.threads)
    if system.device == "cpu" or (system.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "system.device is cuda, but torch sees no CUDA device", "use --system.device cpu, or check nvidia-smi"
        )
    if system.device_id >= torch.cuda.device_count():
        raise UsageError(
            f"system.device_id is {system.device_id}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    device = torch.device("cuda", system.device_id)
    torch.cuda.set_device(device)
    return device


@contextmanager
def run_folder(config: Config) -> Iterator[None]:
    """The output folder, held by this process alone."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is training into {folder}", "choose another --output-dir") from None
        yield


def record_config(run: Run) -> None:
    """Keeps the config beside the run, and says what is no longer as it was when the run began."""
    path = run.output_dir / "config.json"
    if run.progress.step > 0 and path.is_file():
        for line in differences(read_json(path), to_dict(run.config)):
            run.console.warn(f"the run in {run.output_dir} was started with {line}")
    write_json(path, to_dict(run.config))


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key} {old}, and goes on with {new}")
    return lines


def _model(
    config: Config, tokenizer: Tokenizer, checkpoint: Path | None, device: torch.device, console: Console
) -> Model:
    attention = "sdpa" if config.model.attention == "auto" else config.model.attention
    dtype = DTYPES[config.training.precision]
    # Sizes that Transformers, too, rounds a vocabulary to: matrix units like multiples of eight.
    vocab_size = -(-tokenizer.size // 8) * 8
    if config.model.path is not None or checkpoint is not None:
        folder = checkpoint or resolve_model_folder(str(config.model.path))
        model = load_model(folder, attention, device, dtype)
        if config.model.depth is not None:
            wanted = decoder_config(config.model, vocab_size, config.data.context_length)
            if wanted != model.decoder.config:
                raise CheckpointError(
                    f"{folder} holds another model than the config asks for: {describe(model.decoder.config)}",
                    f"the config asks for {describe(wanted)}; choose another --output-dir to start anew",
                )
        console.say(f"model {folder}: {describe(model.decoder.config)}")
        return model
    shape = decoder_config(config.model, vocab_size, config.data.context_length)
    std = init_std(config.model, shape.width)
    model = new_model(config.model.family, shape, attention, device)
    model.decoder.initialise(std, config.training.seed)
    model.decoder.to(dtype)
    special = {name: getattr(tokenizer.hf, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.hf_config |= special
    console.say(f"new model: {describe(shape, std)}")
    return model


def _check_vocabulary(model: Model, tokenizer: Tokenizer) -> None:
    if tokenizer.size > model.decoder.config.vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer.source} has {tokenizer.size} tokens, "
            f"the model's embedding {model.decoder.config.vocab_size} rows",
            "use the tokenizer that belongs to the model",
        )


def _data_identity(config: Config, data: RunData) -> dict[str, Any]:
    """What decides which sample comes when: a checkpoint can only go on with the same."""
    return {
        "fingerprint": data.fingerprint,
        "samples": len(data.train),
        "training.seed": config.training.seed,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.context_length": config.data.context_length,
        "data.validation_split": config.data.validation_split,
    }


def _check_same_data(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    changed = [f"{key} was {saved.get(key)}, is {now[key]}" for key in now if saved.get(key) != now[key]]
    if changed:
        raise CheckpointError(
            f"{checkpoint} was trained on other data or in another order: {'; '.join(changed)}",
            f"to go on with other data, start a new run: --model.path {checkpoint} --output-dir NEW",
        )
