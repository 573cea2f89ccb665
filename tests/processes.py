"""Runs in processes of their own, from a forkserver that has already imported everything slow.

A child starts in a few hundredths of a second, so a test can afford to kill a training run at every one of its steps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchstone import api
from torchstone.config import load_config
from torchstone.training.loop import Callback, Run

TIMEOUT = 120
# Installed modules only: the forkserver does not see the path of the tests. An optimizer imports torch._dynamo.
PRELOADED = [
    "torchstone.api",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
]


class KillAt(Callback):
    """SIGKILL to this very process: after a step is computed, or after its checkpoint is committed."""

    def __init__(self, step: int, when: str) -> None:
        self.step, self.when = step, when

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        if self.when == "step" and values["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        if self.when == "checkpoint" and run.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KillWhileSaving(Callback):
    """SIGKILL in the middle of writing a checkpoint: its files are there, its name is not."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        if values["step"] == self.step:
            from torchstone.checkpoint import manifest

            manifest._write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def train(overrides: dict[str, Any], callbacks: tuple[Callback, ...] = ()) -> None:
    torch.set_num_threads(1)
    api.train(load_config(overrides=overrides), callbacks=callbacks)


def run(target: Callable[..., None], *arguments: Any) -> int:
    """The exit code of `target` in a process of its own; a negative one is a signal. A hang fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_guarded, args=(target, *arguments))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{target.__name__} did not end within {TIMEOUT} s")
    assert process.exitcode is not None
    return process.exitcode


def _guarded(target: Callable[..., None], *arguments: Any) -> None:
    from torchstone.errors import TorchstoneError

    try:
        target(*arguments)
    except TorchstoneError as error:
        os._exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        os._exit(1)
