"""The folder of a run: its lock, its logs, its config, and what must not change when it is resumed."""

from __future__ import annotations

import os
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
from torchstone.atomic import lock_run_folder
from torchstone.checkpoint.manifest import read_json, write_json
from torchstone.config.load import to_dict
from torchstone.config.schema import Config
from torchstone.data.loader import RunData
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.observe.console import Console
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext

LOGS = "logs"
CPU = torch.device("cpu")
DATA_CHANGED = (
    "the samples are not the same (data files, tokenizer, chat template, loss mask, data.context_length, "
    "data.max_samples, data.text_packing or data.weights)"
)


@contextmanager
def lock_output_dir(config: Config, ctx: ParallelContext = SINGLE_PROCESS) -> Iterator[None]:
    """The launcher or rank 0 holds the lock; a second run in the same folder is refused on all ranks."""
    error = None
    with ExitStack() as stack:
        if ctx.is_main and not heartbeat.has_launcher_lock():
            try:
                stack.enter_context(lock_run_folder(Path(config.output_dir)))
            except UsageError as refusal:
                error = refusal
        ctx.raise_on_all_ranks(error)
        yield


@contextmanager
def open_console(
    config: Config, ctx: ParallelContext = SINGLE_PROCESS, device: torch.device = CPU
) -> Iterator[Console]:
    """The console of this rank: on the terminal for rank 0 or with observe.ranks all, and always in its log."""
    observe = config.observe
    is_shown = ctx.is_main or observe.ranks == "all"
    # Several ranks cannot share a progress bar.
    style = "lines" if observe.ranks == "all" and observe.console in ("auto", "bar") else observe.console
    with ExitStack() as stack:
        if heartbeat.has_launcher():
            # stderr of a launched worker already goes to its log.
            log: TextIO = sys.stderr
        else:
            path = heartbeat.log_file(Path(config.output_dir) / LOGS, ctx.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", buffering=1, encoding="utf-8"))
        # The GPU number from the launcher or the user, otherwise the rank.
        number = os.environ.get("GPU_RANK", "")
        console = Console(
            style if is_shown else "none",
            observe.log_every_steps,
            label=int(number) if number.isdecimal() else ctx.rank,
            label_name="GPU" if number.isdecimal() or device.type == "cuda" else "rank",
            terminal=heartbeat.terminal(),
            log=log,
        )
        console.log(f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()}, process {os.getpid()}")
        try:
            yield console
        except BaseException as error:
            if not heartbeat.has_launcher():
                is_ours = isinstance(error, TorchstoneError)
                text = str(error) if is_ours else "".join(traceback.format_exception(error))
                console.log(f"error: {text}", "WARNING")
            raise


def save_config(config: Config, is_resumed: bool, console: Console) -> None:
    """Writes config.json, and warns about settings that changed since the run started."""
    path = Path(config.output_dir) / "config.json"
    if is_resumed and path.is_file():
        # The observe section does not change the run.
        old, new = ({k: v for k, v in each.items() if k != "observe"} for each in (read_json(path), to_dict(config)))
        for line in _differences(old, new):
            console.warn(f"changed since {config.output_dir} started: {line}")
    write_json(path, to_dict(config))


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key} {before} is now {after}")
    return lines


def run_identity(config: Config, data: RunData) -> dict[str, Any]:
    """What must stay the same for a checkpoint to resume: the initial model, and the order of the samples."""
    return {
        "data": data.fingerprint,
        "samples": len(data.train),
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "model.init_std": config.model.init_std,
        "training.precision": config.training.precision,
        "training.seed": config.training.seed,
        "data.shuffle": config.data.shuffle,
        "data.packing": config.data.packing,
        "data.context_length": config.data.context_length,
        "data.validation_split": config.data.validation_split,
    }


def check_identity(saved: dict[str, Any], current: dict[str, Any], checkpoint: Path) -> None:
    changes = [
        f"{key} {saved.get(key)} is now {current[key]}" if key != "data" else DATA_CHANGED
        for key in current
        if saved.get(key) != current[key]
    ]
    if changes:
        raise CheckpointError(
            f"{checkpoint} was saved by a run with a different model, data or sample order: {'; '.join(changes)}",
            f"to continue from its weights, start a new run: --model.path {checkpoint} --output-dir NEW",
        )
