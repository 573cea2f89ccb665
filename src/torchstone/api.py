"""The commands as Python functions, with the same configs and errors.

import torchstone
result = torchstone.train("run.yaml", {"training.max_steps": 100})

`train`, `prepare` and `inspect_data` take a path, a preset and overrides, or a `Config`, and validate it once.
Functions that end in `_with_config` take a validated `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchstone import heartbeat
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import is_model_folder, resolve_model_folder
from torchstone.checkpoint.model_folder import NotNativeError, check_model_folder, load_model, read_model_config
from torchstone.config.load import from_dict, load_config, to_dict
from torchstone.config.schema import Config, Device, Dtype, ParallelConfig, Purpose, SystemConfig
from torchstone.data.inspect import inspect_sources
from torchstone.data.loader import open_sources, tokenize_source
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import Pattern, check_target, save_tokenizer
from torchstone.data.train_tokenizer import train_tokenizer as train_bpe
from torchstone.demo.builtin import data_file
from torchstone.diagnose import collectives
from torchstone.models.execution import ExecutionOptions, check_fallback_execution
from torchstone.models.sizing import build_sized_decoder_config
from torchstone.observe.console import Console
from torchstone.parallel.build import stage_layer_ranges
from torchstone.parallel.mesh import init_distributed, is_distributed, resolve_dims, translate_comm_errors
from torchstone.training import run_folder
from torchstone.training.checks import translate_out_of_memory
from torchstone.training.evaluate import Question, evaluate_file, generate_answers
from torchstone.training.loop import Callback, Run, TrainResult, train_loop
from torchstone.training.setup import (
    build_run,
    check_row_length,
    check_vocabulary,
    open_data,
    select_device,
    tokenizer_path,
)
from torchstone.training.stop import handle_stop_signals

# Default maximum row length for evaluation; a model with fewer positions lowers it.
EVALUATION_LENGTH = 1024


def train(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Trains to the end of the run; calling it again resumes a run that was stopped."""
    return train_with_config(_load_and_validate(config, overrides, preset), callbacks)


def train_with_config(config: Config, callbacks: Sequence[Callback] = ()) -> TrainResult:
    with handle_stop_signals(), translate_comm_errors():
        if is_distributed() and not heartbeat.has_launcher() and not dist.is_initialized():
            # torchrun or srun started the ranks, so no launcher has prepared the data. One process per host does it
            # now, so that no process group waits during tokenization.
            heartbeat.report_phase("preparing the data")
            prepare_with_config(config)
        return _train(config, callbacks)


def _train(config: Config, callbacks: Sequence[Callback]) -> TrainResult:
    device, system = select_device(config.system), config.system
    # The launcher names a rank that hangs, so it must notice before the process group times out.
    timeout = timedelta(seconds=system.hang_timeout * (2 if heartbeat.has_launcher() else 1))
    join_timeout = timedelta(seconds=system.join_timeout)
    heartbeat.report_phase("joining the other ranks")
    with ExitStack() as stack:
        is_mixed = config.training.precision == "bf16"
        ctx = stack.enter_context(init_distributed(config.parallel, device, is_mixed, timeout, join_timeout))
        stack.enter_context(run_folder.lock_output_dir(config, ctx))
        console = stack.enter_context(run_folder.open_console(config, ctx, device))
        with translate_out_of_memory("the model", device):
            run = build_run(config, console, device, ctx)
        if ctx.is_main:
            run_folder.save_config(config, run.progress.step > 0, console)
        if run.schedule.is_done(run.progress) and run.progress.pending_metrics is None:
            console.info(
                f"the run in {run.output_dir} is complete: step {run.progress.step} of {run.schedule.total_steps}"
            )
            return TrainResult(run.progress.step, run.checkpoint, None, None, None)
        for line in _describe_run(run):
            console.info(line)
        return train_loop(run, callbacks)


def destroy_process_group() -> None:
    """Destroys the process group, if there is one, before the process exits."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_parallel_dims(config: Config, world_size: int) -> None:
    """Raises UsageError if the parallel sizes do not fit the number of processes or the model."""
    dims = resolve_dims(config.parallel, world_size)
    if config.model.path is None:
        # Neither vocabulary nor context length matters for this check.
        decoder_config = build_sized_decoder_config(config.model, vocab_size=8, context_length=8)
    elif is_model_folder(Path(config.model.path)):
        try:
            _, _, decoder_config = read_model_config(Path(config.model.path))
        except NotNativeError:
            check_fallback_execution(ExecutionOptions(tp=dims.tp, pp=dims.pp))
            return
    else:
        # A run: its checkpoint is chosen and checked later.
        return
    stage_layer_ranges(decoder_config, dims, config.parallel)


def prepare(
    config: Config | str | Path | None = None, overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Tokenizes the data of a run into the cache, and returns its counts."""
    return prepare_with_config(_load_and_validate(config, overrides, preset, "data"))


def prepare_with_config(config: Config) -> dict[str, Any]:
    data = open_data(config, _load_tokenizer(config), Console(config.observe.console))
    return {
        "fingerprint": data.fingerprint,
        "shapes": data.formats,
        "samples": len(data.train),
        "tokens": int(data.train.lengths.sum()),
        "validation_samples": len(data.validation) if data.validation is not None else 0,
        "bad_rows": data.counts.bad_rows,
        "dropped_rows": data.counts.dropped,
        "truncated_rows": data.counts.truncated_long,
        "split_rows": data.counts.split_long,
        "cache_dir": config.data.cache_dir,
    }


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
    console, tokenizer, data = Console(config.observe.console), _load_tokenizer(config), config.data
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
) -> dict[str, Any]:
    """Trains a byte-level BPE tokenizer from `data`, saves it as a Hugging Face folder, and returns a report."""
    check_target(Path(folder))
    names = [data_file(name, Path(cache_dir)) for name in ([data] if isinstance(data, str) else data)]
    tokenizer, report = train_bpe(
        names,
        vocab_size,
        special=special,
        chat_template=chat_template,
        pattern=pattern,
        min_frequency=min_frequency,
        max_bytes=max_bytes,
        stop_on_bad_row=not skip_bad_rows,
        console=Console("quiet" if quiet else "auto"),
    )
    save_tokenizer(tokenizer, Path(folder))
    return {"folder": str(folder)} | report


def evaluate(
    source: str,
    data: str,
    questions: int | None = None,
    context_length: int | None = None,
    device: Device = "auto",
    cache_dir: str = "cache/datasets",
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Returns the loss of a model (run, checkpoint or folder) over `data`; for conversations also the exact match."""
    console = Console("quiet" if quiet else "lines")
    torch_device = select_device(SystemConfig(device=device))
    folder = resolve_model_folder(source)
    execution = ExecutionOptions(packed=True, trust_remote_code=trust_remote_code)
    check_model_folder(folder, torch_device, torch.float32, execution)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    path = data_file(data, Path(cache_dir))
    with translate_out_of_memory("the evaluation", torch_device):
        model = load_model(folder, torch_device, execution=execution)
        context_length = context_length or min(EVALUATION_LENGTH, model.max_positions or EVALUATION_LENGTH)
        console.info(f"model {folder}: {model.describe()}; rows of up to {context_length} tokens")
        config = load_config(
            overrides={
                "model.path": source,
                "data.path": data,
                "data.context_length": context_length,
                "data.packing": model.packing_error(context_length) is None,
                "data.cache_dir": cache_dir,
                "training.global_batch_size": 64,
            }
        )
        check_row_length(model, config)
        check_vocabulary(model, tokenizer)
        result = evaluate_file(model, tokenizer, config, path, torch_device, questions, console)
    return {"model": str(folder)} | result


def export(
    source: str, target: str | Path, dtype: Dtype = "auto", verify: bool = True, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes a run, a checkpoint or a folder as a Hugging Face folder, verified by loading it in Transformers."""
    return export_model(source, Path(target), dtype, verify, trust_remote_code)


def doctor(device: Device = "auto", limit: float = collectives.LIMIT, quiet: bool = False) -> dict[str, Any]:
    """Tests the collectives between the ranks of a launch; returns `text` to print and `json` for programs.

    Raises WorkerError with the ranks that do not answer within `limit` seconds. `json` lists wrong values.
    """
    torch_device = select_device(SystemConfig(device=device))
    # Longer than `limit`: at the process group's timeout NCCL ends the process before the silent ranks are named.
    timeout, join_timeout = timedelta(seconds=limit + 60), timedelta(seconds=limit)
    heartbeat.report_phase("joining the other ranks")
    with (
        translate_comm_errors(),
        init_distributed(ParallelConfig(), torch_device, True, timeout, join_timeout) as ctx,
    ):
        console = Console("quiet" if quiet else "lines") if ctx.is_main else Console("none")
        reports = [collectives.measure(torch_device, limit, console.info)]
        if torch_device.type == "cuda":
            # Ranks also use the CPU backend, for small tensors and objects.
            reports.append(collectives.measure(torch.device("cpu"), limit, console.info, sizes=()))
    errors = [str(error) for report in reports if (error := collectives.failure(report)) is not None]
    return {
        "text": "\n".join(collectives.as_text(report) for report in reports),
        "json": {"ok": not errors, "errors": errors, "collectives": [asdict(report) for report in reports]},
    }


class Chat:
    """A conversation with a run, a checkpoint or a Hugging Face folder."""

    def __init__(
        self, source: str, max_new_tokens: int = 256, device: Device = "auto", trust_remote_code: bool = False
    ) -> None:
        folder = resolve_model_folder(source)
        execution = ExecutionOptions(trust_remote_code=trust_remote_code)
        torch_device = select_device(SystemConfig(device=device))
        check_model_folder(folder, torch_device, torch.float32, execution)
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self.model = load_model(folder, torch_device, execution=execution)
        check_vocabulary(self.model, self.tokenizer)
        self.max_new_tokens = max_new_tokens
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        (text,) = generate_answers(self.model, self.tokenizer, [Question(self.messages)], self.max_new_tokens)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def reset(self) -> None:
        self.messages = []


def _load_tokenizer(config: Config) -> Tokenizer:
    folder = resolve_model_folder(config.model.path) if config.model.path else None
    path = tokenizer_path(config, folder)
    return load_tokenizer(path, config.data.chat_template, config.model.trust_remote_code)


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
    sizes, steps, dims = run.data.batch_sizes, run.schedule.total_steps, run.ctx.dims
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
    return [
        f"{'endless' if steps is None else steps} steps{epochs} of {sizes.global_batch_size} samples, "
        f"micro-batches of {micro_batch}, on {run.device}{processes}",
        *mixture,
    ]
