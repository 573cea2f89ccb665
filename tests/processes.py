"""Runs functions in child processes of a forkserver that has already imported all slow modules.

A child starts in a few hundredths of a second, so a test can kill a training run at every step.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchstone import api
from torchstone.config import load_config
from torchstone.testing import forkserver_context
from torchstone.training.run import Callback, Run

TIMEOUT = 120
# Only installed modules: the forkserver does not know the folder of the tests. An optimizer imports torch._dynamo.
PRELOADED = [
    "torchstone.api",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
]


class KillAt(Callback):
    """Kills its own process after a step, or after a checkpoint is complete."""

    def __init__(self, step: int, when: str) -> None:
        self.step, self.when = step, when

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        if self.when == "step" and values["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        if self.when == "checkpoint" and run.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KillWhileSaving(Callback):
    """Kills its own process while it writes a checkpoint: after the files, before the manifest."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, values: dict[str, Any]) -> None:
        if values["step"] == self.step:
            from torchstone.checkpoint import manifest

            manifest._write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def train(overrides: dict[str, Any], callbacks: tuple[Callback, ...] = ()) -> None:
    torch.set_num_threads(1)
    # What was forked is no garbage: it is not looked at when the run begins.
    gc.freeze()
    api.train(load_config(overrides=overrides), callbacks=callbacks)


def run(target: Callable[..., None], *arguments: Any) -> int:
    """Runs `target` in a child process and returns its exit code, negative for a signal. A hang is an error."""
    process = forkserver_context(PRELOADED).Process(target=_guarded, args=(target, *arguments))
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
