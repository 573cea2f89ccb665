"""The folder of a run: its lock, its logs, its config, and what must not change when it is resumed."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import torch

from torchstone import heartbeat
from torchstone.atomic import lock_run_folder, open_without_following, read_json_or_empty
from torchstone.checkpoint.load import CHECKPOINTS, has_moved_base
from torchstone.checkpoint.manifest import list_checkpoints, read_json, write_json
from torchstone.checkpoint.save import STATE_FILE
from torchstone.config.load import to_dict
from torchstone.config.output_dir import check_output_dir
from torchstone.config.schema import LORA_KEYS, OSFT_KEYS, Config
from torchstone.data.loader import RunData
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.observe.console import Console
from torchstone.optim.build import state_of
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.training.memory import size_text
from torchstone.training.run import Run

LOGS = "logs"
CPU = torch.device("cpu")
DATA_CHANGED = (
    "the samples are not the same (data files, tokenizer, chat template, loss mask, data.context_length, "
    "data.max_samples, data.text_packing or data.weights)"
)
# Settings of `tuning` that decide what is trained.
TUNING_KEYS = {
    "full": (),
    "lora": (*LORA_KEYS, "modules_to_save", "adapter", "frozen_adapters", "quantize_base"),
    "osft": OSFT_KEYS,
}


@contextmanager
def lock_output_dir(config: Config, ctx: ParallelContext = SINGLE_PROCESS) -> Iterator[None]:
    """The launcher or rank 0 holds the lock; a second run in the same folder, or a folder that is not for runs, is
    refused on all ranks."""
    error = None
    with ExitStack() as stack:
        if ctx.is_main and not heartbeat.has_launcher_lock():
            try:
                check_output_dir(config)
                stack.enter_context(lock_run_folder(Path(config.output_dir)))
            except UsageError as refusal:
                error = refusal
        ctx.raise_on_all_ranks(error)
        yield


@contextmanager
def open_console(
    config: Config, ctx: ParallelContext = SINGLE_PROCESS, device: torch.device = CPU
) -> Iterator[Console]:
    """The console of this rank: on the terminal for rank 0 or with observe.ranks all, and always in its log.

    A run that is complete writes nothing into its folder. So if it may be, its log is opened when training begins.
    """
    observe = config.observe
    is_shown = ctx.is_main or observe.ranks == "all"
    # Several ranks cannot share a progress bar.
    style = "lines" if observe.ranks == "all" and observe.console in ("auto", "bar") else observe.console
    with ExitStack() as stack:

        def open_log() -> TextIO:
            if heartbeat.has_launcher():
                # stderr of a launched worker already goes to its log.
                return sys.stderr
            path = heartbeat.log_file(Path(config.output_dir) / LOGS, ctx.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(open(path, "a", buffering=1, encoding="utf-8", opener=open_without_following))

        # The GPU number from the launcher or the user, otherwise the rank.
        number = os.environ.get("GPU_RANK", "")
        console = Console(
            style if is_shown else "none",
            observe.log_every_steps,
            label=int(number) if number.isdecimal() else ctx.rank,
            label_name="GPU" if number.isdecimal() or device.type == "cuda" else "rank",
            terminal=heartbeat.terminal(),
            log_opener=open_log,
        )
        if not _may_be_complete(config):
            console.open_log()
        console.log(f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()}, process {os.getpid()}")
        try:
            yield console
        except BaseException as error:
            console.open_log()
            if not heartbeat.has_launcher():
                is_ours = isinstance(error, TorchstoneError)
                text = str(error) if is_ours else "".join(traceback.format_exception(error))
                console.log(f"error: {text}", "WARNING")
            raise


def _may_be_complete(config: Config) -> bool:
    """Whether the newest checkpoint is the last one of a run; the config may have a later end."""
    checkpoints = list_checkpoints(Path(config.output_dir) / CHECKPOINTS)
    return bool(checkpoints) and read_json_or_empty(checkpoints[-1][1] / STATE_FILE).get("is_complete", True)


def warn_about_changes(
    config: Config, checkpoint: Path, old_resolved: dict[str, Any], resolved: dict[str, Any], console: Console
) -> None:
    """Warns about settings that changed since the run started. A damaged config.json is no error: nothing needs it.

    `old_resolved` and `resolved`: what the settings that may be `auto` were, and are now.
    """
    path, new = Path(config.output_dir) / "config.json", to_dict(config)
    try:
        old = read_json(path) if path.exists() else to_dict(config)
    except CheckpointError as error:
        console.warn(f"{error.message}; what changed since the run started is unknown")
        return
    for key in old_resolved.keys() & resolved.keys():
        section, _, name = key.partition(".")
        if isinstance(old.get(section), dict):
            old[section][name], new[section][name] = old_resolved[key], resolved[key]
    for line in _differences(old, new):
        # These do not change the run.
        if not line.startswith(("observe", "preset_batch_keys")):
            since = f"{config.output_dir} was last started" if path.exists() else f"{checkpoint} was saved"
            console.warn(f"changed since {since}: {line}")


def save_config(config: Config, console: Console) -> None:
    path = Path(config.output_dir) / "config.json"
    try:
        write_json(path, to_dict(config))
    except OSError as error:
        console.warn(f"{path} could not be written: {error}")


def warn_about_disk(run: Run) -> None:
    """Warns on rank 0 if the checkpoints that the run will keep, and the one it writes, do not fit on the disk.

    Their size is that of what is trained and its moments; stages of a pipeline count as equal.
    """
    if not run.ctx.is_main:
        return
    tensors = [(p, len(state_of(run.optimizer, p).moments)) for _, p in run.model.trained_parameters()]
    size = run.ctx.dims.pp * sum(p.numel() * p.element_size() * (1 + moments) for p, moments in tensors)
    schedule, keep_last = run.schedule, run.config.checkpoint.keep_last
    limits = [] if keep_last is None else [keep_last + 1 - len(list_checkpoints(run.output_dir / CHECKPOINTS))]
    limits += [] if schedule.total_steps is None else [schedule.count_left(schedule.checkpoint, run.progress)]
    count, free = max(1, min(limits, default=1)), shutil.disk_usage(run.output_dir).free
    if free < count * size:
        several = f", and {count} of them have to fit" if count > 1 else ""
        run.console.warn(
            f"a checkpoint takes about {size_text(size)}{several}, but output_dir {run.output_dir} has only "
            f"{size_text(free)} free: use another --output-dir"
            + (" or a smaller --checkpoint.keep_last" if count > 1 else "")
        )


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        is_same = before == after
        if isinstance(before, dict) and isinstance(after, dict):
            if not prefix:
                lines += _differences(before, after, f"{key}.")
                continue
            # The order of validation sets counts, too: the first one decides.
            is_same = list(before.items()) == list(after.items())
        if not is_same:
            lines.append(f"{prefix}{key} {_value_text(before)} is now {_value_text(after)}")
    return lines


def _value_text(value: Any) -> str:
    """The value as it is typed on the command line: `none` for a setting without a value."""
    return "none" if value is None else str(value)


def run_identity(config: Config, data: RunData) -> dict[str, Any]:
    """What must stay the same for a checkpoint to resume: the initial model, and the order of the samples."""
    return {"data": data.fingerprint, "samples": len(data.train)} | config_identity(config)


def config_identity(config: Config) -> dict[str, Any]:
    """The part of the run's identity that is known without the data."""
    tuning = to_dict(config)["tuning"]
    return {
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "model.init_std": config.model.init_std,
        "training.precision": config.training.precision,
        "training.seed": config.training.seed,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.context_length": config.data.context_length,
        "data.validation_split": config.data.validation_split,
        "tuning.method": config.tuning.method,
    } | {f"tuning.{key}": tuning[key] for key in TUNING_KEYS[config.tuning.method]}


def check_identity(saved: dict[str, Any], current: dict[str, Any], checkpoint: Path) -> None:
    """Raises CheckpointError if one of the values in `current` is not as in the run that saved the checkpoint."""
    # Older checkpoints do not have it.
    saved = {"tuning.method": "full"} | saved
    if "model.path" in current and has_moved_base(checkpoint):
        # Its fingerprint is compared instead, when it is opened.
        saved["model.path"] = current["model.path"]
    changes = [
        f"{key} {_value_text(saved.get(key))} is now {_value_text(current[key])}" if key != "data" else DATA_CHANGED
        for key in current
        if saved.get(key) != current[key]
    ]
    if changes:
        raise CheckpointError(
            f"{checkpoint} was saved by a run with other settings: {'; '.join(changes)}",
            "use the settings of the run to resume it; to continue from its weights in a new run: "
            + (
                f"--tuning.adapter {checkpoint} --model.path MODEL --output-dir NEW"
                if saved["tuning.method"] == current["tuning.method"] == "lora"
                else f"--model.path {checkpoint} --output-dir NEW"
            ),
        )
