"""The jobs of the command line, from Python: the same configs, the same errors.

import torchstone
outcome = torchstone.train("run.yaml", {"training.max_steps": 100})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchstone import post, signals
from torchstone.checkpoint.export import export_model
from torchstone.checkpoint.load import is_model_folder, resolve_model_folder
from torchstone.config.load import from_dict, load_config, to_dict
from torchstone.config.schema import Config, Device, Dtype, Job, ParallelConfig, SystemConfig
from torchstone.data.inspect import inspect_sources
from torchstone.data.loader import find_sources, open_source
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import Pattern, check_target
from torchstone.data.train_tokenizer import save as save_tokenizer
from torchstone.data.train_tokenizer import train_tokenizer as learn_tokenizer
from torchstone.demo.builtin import data_file
from torchstone.diagnose import collectives
from torchstone.diagnose.collectives import LIMIT
from torchstone.models.execution import Execution, check_fallback_execution
from torchstone.models.opening import check_folder, load_model
from torchstone.models.sizing import decoder_config
from torchstone.models.weights import NotNative, read_shape
from torchstone.observe.console import Console
from torchstone.parallel.build import check_shape
from torchstone.parallel.mesh import contact, is_worker, layout_of, opened
from torchstone.training import run_folder
from torchstone.training.assemble import assemble, check_rows, check_tokens, open_data, pick_device, tokenizer_path
from torchstone.training.evaluate import Question, answer, evaluate_file
from torchstone.training.guard import memory_guard
from torchstone.training.loop import Callback, Outcome, Run, train_loop

# Longest rows that are evaluated unless told, where the model has so many positions.
EVALUATED_ROWS = 1024


def train(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Trains to the end of the run; starting it again goes on where it was."""
    settings = _settings(config, overrides, preset)
    with signals.listening(), contact():
        if is_worker() and not post.HERE.launched and not dist.is_initialized():
            # Whoever started the ranks has not prepared the data: one process of a host does so now, the others wait
            # for it, and nobody tokenizes while a group waits for its answers.
            post.enter("preparing the data")
            prepare(settings)
        return _train(settings, callbacks)


def _train(settings: Config, callbacks: Sequence[Callback]) -> Outcome:
    device = pick_device(settings.system)
    mixed, system = settings.training.precision == "bf16", settings.system
    # A launcher names the rank that hangs, so it should find it before the others give up waiting for it.
    patience = timedelta(seconds=system.hang_timeout * (2 if post.HERE.launched else 1))
    post.enter("joining the other ranks")
    with ExitStack() as stack:
        join = timedelta(seconds=system.join_timeout)
        place = stack.enter_context(opened(settings.parallel, device, mixed, patience, join))
        stack.enter_context(run_folder.held(settings, place))
        console = stack.enter_context(run_folder.console_of(settings, place))
        with memory_guard("the model", device):
            run = assemble(settings, console, device, place)
        if place.is_main:
            run_folder.record_config(settings, run.progress.step > 0, console)
        complete = run.length.steps is not None and run.progress.step >= run.length.steps
        if complete and run.progress.owed is None:
            console.say(f"the run in {run.output_dir} is complete: step {run.progress.step} of {run.length.steps}")
            return Outcome(run.progress.step, run.checkpoint, None, None, None)
        for line in _plan(run):
            console.say(line)
        return train_loop(run, callbacks)


def leave_group() -> None:
    """Leaves the process group that `train` has opened; for a process that is about to end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_layout(config: Config, world_size: int) -> None:
    """Refuses a layout that does not fit so many processes, or the model, before any is started."""
    layout = layout_of(config.parallel, world_size)
    if config.model.path is None:
        # Neither the vocabulary nor the rows have a say in it.
        shape = decoder_config(config.model, vocab_size=8, context_length=8)
    elif is_model_folder(Path(config.model.path)):
        try:
            _, _, shape = read_shape(Path(config.model.path))
        except NotNative:
            check_fallback_execution(Execution(tp=layout.tp, pp=layout.pp))
            return
    else:
        # A run, whose checkpoint is yet to be chosen and checked.
        return
    check_shape(shape, layout, config.parallel)


def prepare(
    config: Config | str | Path | None = None, overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Tokenizes the data of a run and stops; what it found is returned and kept in the cache."""
    settings = _settings(config, overrides, preset, "data")
    console = Console(settings.observe.console)
    data = open_data(settings, _tokenizer(settings), console)
    return {
        "fingerprint": data.fingerprint,
        "shapes": data.shapes,
        "samples": len(data.train),
        "tokens": int(data.train.lengths.sum()),
        "validation_samples": len(data.validation) if data.validation is not None else 0,
        "bad_rows": data.counts.bad_rows,
        "dropped_rows": data.counts.dropped,
        "truncated_rows": data.counts.truncated_long,
        "split_rows": data.counts.split_long,
        "cache_dir": settings.data.cache_dir,
    }


def inspect_data(
    config: Config | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    rows: int = 5,
    tokens: int | None = 400,
) -> dict[str, Any]:
    """What the data of a run becomes: counts, lengths, what is lost and why, and `rows` rows of each source as runs of
    trained and untrained text. Nothing is refused: bad rows are counted. The tokens are kept in the cache for training.
    """
    settings = _settings(config, overrides, preset, "data")
    console = Console(settings.observe.console)
    tokenizer = _tokenizer(settings)
    data = settings.data
    names = [data_file(name, Path(data.cache_dir)) for name in data.path or ()]
    sources = find_sources(data, names, look_only=True)
    caches = [open_source(data, source, tokenizer, console, True, data.max_samples) for source in sources]
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
    """A byte-level BPE tokenizer from the texts of `data`, as a Hugging Face folder; returns what was measured."""
    check_target(Path(folder))
    names = [data_file(name, Path(cache_dir)) for name in ([data] if isinstance(data, str) else data)]
    tokenizer, found = learn_tokenizer(
        names, vocab_size, special=special, chat_template=chat_template, pattern=pattern, min_frequency=min_frequency,
        max_bytes=max_bytes, stop_on_bad_row=not skip_bad_rows, console=Console("quiet" if quiet else "auto"),
    )  # fmt: skip
    save_tokenizer(tokenizer, Path(folder))
    return {"folder": str(folder)} | found


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
    """The loss of a run, checkpoint or Hugging Face folder over `data`; exact match where rows are conversations."""
    console = Console("quiet" if quiet else "lines")
    place = pick_device(SystemConfig(device=device))
    folder = resolve_model_folder(source)
    execution = Execution(packed=True, trust_remote_code=trust_remote_code)
    check_folder(folder, place, torch.float32, execution)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    path = data_file(data, Path(cache_dir))
    with memory_guard("the evaluation", place):
        model = load_model(folder, place, execution=execution)
        context_length = context_length or min(EVALUATED_ROWS, model.max_positions or EVALUATED_ROWS)
        console.say(f"model {folder}: {model.describe()}; rows of up to {context_length} tokens")
        settings = load_config(
            overrides={
                "model.path": source,
                "data.path": data,
                "data.context_length": context_length,
                "data.packing": model.why_not_packed(context_length) is None,
                "data.cache_dir": cache_dir,
                "training.global_batch_size": 64,
            }
        )
        check_rows(model, settings)
        check_tokens(model, tokenizer)
        found = evaluate_file(model, tokenizer, settings, path, place, questions, console)
    return {"model": str(folder)} | found


def export(
    source: str, target: str | Path, dtype: Dtype = "auto", verify: bool = True, trust_remote_code: bool = False
) -> dict[str, Any]:
    """A Hugging Face folder from a run, a checkpoint or another folder, checked by loading it in Transformers."""
    return export_model(source, Path(target), dtype, verify, trust_remote_code)


def doctor(device: Device = "auto", limit: float = LIMIT, quiet: bool = False) -> dict[str, Any]:
    """Tries the collectives between the processes of a launch: `text` for people, `json` for machines, the same on each
    rank. A rank that does not answer within `limit` seconds, or a wrong value, is an error that names it."""
    place = pick_device(SystemConfig(device=device))
    # NCCL ends a process at the group's own limit, before the silent ranks are named.
    patience, join = timedelta(seconds=limit + 60), timedelta(seconds=limit)
    post.enter("joining the other ranks")
    with contact(), opened(ParallelConfig(), place, mixed=True, timeout=patience, join_timeout=join) as here:
        console = Console("quiet" if quiet else "lines") if here.is_main else Console("none")
        reports = [collectives.measure(place, limit, console.say)]
        if place.type == "cuda":
            # Ranks also agree on small things, over the CPU's backend.
            reports.append(collectives.measure(torch.device("cpu"), limit, console.say, sizes=()))
    errors = [str(error) for report in reports if (error := collectives.failure(report)) is not None]
    return {
        "text": "\n".join(collectives.as_text(report) for report in reports),
        "json": {"ok": not errors, "errors": errors, "collectives": [collectives.as_dict(each) for each in reports]},
    }


class Chat:
    """A conversation with a run, a checkpoint or a Hugging Face folder."""

    def __init__(
        self, source: str, max_new_tokens: int = 256, device: Device = "auto", trust_remote_code: bool = False
    ) -> None:
        folder = resolve_model_folder(source)
        execution = Execution(trust_remote_code=trust_remote_code)
        place = pick_device(SystemConfig(device=device))
        check_folder(folder, place, torch.float32, execution)
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self.model = load_model(folder, place, execution=execution)
        check_tokens(self.model, self.tokenizer)
        self.max_new_tokens = max_new_tokens
        self.messages: list[dict[str, Any]] = []

    def ask(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        (given,) = answer(self.model, self.tokenizer, [Question(self.messages)], self.max_new_tokens)
        self.messages.append({"role": "assistant", "content": given})
        return given

    def reset(self) -> None:
        self.messages = []


def _tokenizer(settings: Config) -> Tokenizer:
    source = resolve_model_folder(settings.model.path) if settings.model.path else None
    named = tokenizer_path(settings, source)
    return load_tokenizer(named, settings.data.chat_template, settings.model.trust_remote_code)


def _settings(
    config: Config | str | Path | None, overrides: Mapping[str, Any] | None, preset: str | None, job: Job = "train"
) -> Config:
    if isinstance(config, Config):
        if overrides or preset:
            raise ValueError("overrides and presets go with a config file, not with a Config that is already whole")
        # Made by hand, it has not been converted or checked yet.
        return from_dict(to_dict(config), job)
    return load_config(config, preset, overrides or {}, job)


def _plan(run: Run) -> list[str]:
    batching, steps = run.data.batching, run.length.steps
    micro = f"{batching.rows} rows" if batching.tokens is None else f"up to {batching.tokens} tokens"
    epochs, mixture = "", list[str]()
    layout = run.place.layout
    where = (
        "" if layout.world_size == 1 else f" ({layout.world_size} processes: {layout}, zero {run.config.parallel.zero})"
    )
    if steps is not None:
        end = run.progress.samples + (steps - run.progress.step) * batching.global_batch_size
        end = end if run.length.samples is None else min(end, run.length.samples)
        epochs = f" ({end / len(run.data.train):.2f} epochs)"
        mixture = run.data.mixture(end)
    return [
        f"{'endless' if steps is None else steps} steps{epochs} of {batching.global_batch_size} samples, "
        f"micro-batches of {micro}, on {run.device}{where}",
        *mixture,
    ]
