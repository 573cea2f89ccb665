"""The folder of a run: held by one process, with the config that runs in it, and what may not change in between."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from torchstone import post
from torchstone.checkpoint.manifest import read_json, write_json
from torchstone.config.load import to_dict
from torchstone.config.schema import Config
from torchstone.data.loader import RunData
from torchstone.errors import CheckpointError, TorchstoneError, UsageError
from torchstone.observe.console import Console
from torchstone.parallel.mesh import ALONE, Place

LOGS = "logs"
DATA_CHANGED = (
    "the samples are not the same (what the files hold, the tokenizer, its template, what is trained of a row, the "
    "longest row, the number of rows, the layout of text, or the weights)"
)


@contextmanager
def held(config: Config, place: Place = ALONE) -> Iterator[None]:
    """The output folder, held by this run alone: by the first of its processes."""
    folder, error = Path(config.output_dir), None
    with ExitStack() as stack:
        if place.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                error = UsageError(f"another process is training into {folder}", "choose another --output-dir")
        place.together(error)
        yield


@contextmanager
def console_of(config: Config, place: Place = ALONE) -> Iterator[Console]:
    """What this process says: on the terminal if it is the first, or all are to be heard, and in its log always."""
    heard, observe = place.is_main or config.observe.ranks == "all", config.observe
    # A bar is one process's.
    style = "lines" if config.observe.ranks == "all" and observe.console in ("auto", "bar") else observe.console
    with ExitStack() as stack:
        if post.HERE.launched:
            # All that a launched worker writes goes to its log already.
            log: TextIO = sys.stderr
        else:
            path = log_path(config, place.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", buffering=1, encoding="utf-8"))
        # The number of the GPU, as whoever started this process gave it; else that of the process.
        number = os.environ.get("GPU_RANK", "")
        label = int(number) if number.isdecimal() else place.rank
        shown = style if heard else "none"
        console = Console(shown, observe.log_every_steps, label=label, terminal=post.HERE.terminal, log=log)
        console.record(f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()}, process {os.getpid()}")
        try:
            yield console
        except BaseException as error:
            if not post.HERE.launched:
                told = str(error) if isinstance(error, TorchstoneError) else "".join(traceback.format_exception(error))
                console.record(f"error: {told}", "WARNING")
            raise


def log_path(config: Config, rank: int) -> Path:
    return post.log_file(Path(config.output_dir) / LOGS, rank)


def record_config(config: Config, going_on: bool, console: Console) -> None:
    """Keeps the config beside the run, and says what is no longer as it was when the run began."""
    path = Path(config.output_dir) / "config.json"
    if going_on and path.is_file():
        # What is shown changes nothing of the run.
        before, now = ({k: v for k, v in each.items() if k != "observe"} for each in (read_json(path), to_dict(config)))
        for line in differences(before, now):
            console.warn(f"the run in {config.output_dir} was started with {line}")
    write_json(path, to_dict(config))


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key} {old}, and goes on with {new}")
    return lines


def identity(config: Config, data: RunData) -> dict[str, Any]:
    """What a checkpoint can only go on with: the model it began as, and which sample comes when."""
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


def check_identity(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    changed = [
        f"{key} was {saved.get(key)}, is {now[key]}" if key != "data" else DATA_CHANGED
        for key in now
        if saved.get(key) != now[key]
    ]
    if changed:
        raise CheckpointError(
            f"{checkpoint} is of a run with another model, data or order of samples: {'; '.join(changed)}",
            f"to go on from its weights with other settings, start a new run: --model.path {checkpoint} "
            "--output-dir NEW",
        )
