"""The loop: steps until the end, and between them validation, metrics and checkpoints.

After every step, in this order: callbacks see it, validation where it is due, the line in metrics.jsonl, the
checkpoint. So a checkpoint is never ahead of the metrics, and a killed run leaves at most lines to cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchstone import post
from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.checkpoint.manifest import folder_name
from torchstone.checkpoint.save import mark_best, remove_old, save_checkpoint
from torchstone.config.schema import Config
from torchstone.data.loader import RunData, StepBatch
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import NumbersError, StoppedBySignal
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.observe.metrics import MetricsFile, memory_bytes
from torchstone.optim.schedule import learning_rate
from torchstone.parallel.mesh import Place
from torchstone.parallel.running import Runner
from torchstone.training.guard import memory_guard
from torchstone.training.length import Length, Outlook, crossed
from torchstone.training.state import Progress
from torchstone.training.step import mean_loss, train_step
from torchstone.training.stop import StopRequest, listen


@dataclass
class Run:
    """Everything a run consists of. Callbacks get it; `run.stop("why")` on any rank ends it after the step in hand."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    data: RunData
    optimizer: torch.optim.Optimizer
    runner: Runner
    length: Length
    progress: Progress
    console: Console
    saved_with: dict[str, Any]
    checkpoint: Path | None = None
    request: StopRequest = field(default_factory=StopRequest)
    outlook: Outlook = field(init=False)

    def __post_init__(self) -> None:
        self.outlook = Outlook(self.config, self.data, self.length, self.progress)

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def place(self) -> Place:
        """Which of the run's processes this one is; `run.place.is_main` is true on the first."""
        return self.runner.place

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def epoch(self) -> float:
        return self.progress.samples / len(self.data.train)

    def stop(self, reason: str) -> None:
        self.request.stop(reason)

    def is_stopping(self) -> bool:
        """Whether the ranks agree that it is to end; all of them have to ask."""
        return self.request.settle(self.place)


class Interrupted(Exception):
    """A signal came during validation."""


class Callback:
    """Override what you want to see. Every rank calls its own. Return values are ignored; `run.stop(reason)` ends the
    run."""

    def on_start(self, run: Run) -> None: ...

    def on_step(self, run: Run, values: dict[str, Any]) -> None: ...

    def on_validation(self, run: Run, loss: float) -> None: ...

    def on_checkpoint(self, run: Run, folder: Path) -> None: ...

    def on_end(self, run: Run) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: where its last checkpoint is, and the last values measured."""

    step: int
    checkpoint: Path | None
    loss: float | None
    val_loss: float | None
    stopped: str | None


def train_loop(run: Run, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Trains to the end of the run. A signal saves and raises `StoppedBySignal`."""
    metrics = MetricsFile(run.output_dir / "metrics.jsonl", run.progress.step, written=run.place.is_main)
    if metrics.removed:
        run.console.say(f"metrics.jsonl: cut {metrics.removed} lines after step {run.progress.step}")
    run.model.train()
    run.console.begin(run.length.steps, run.progress.step)
    for callback in callbacks:
        callback.on_start(run)
    try:
        with listen(run.request), memory_guard(f"step {run.progress.step + 1} or later", run.device):
            outcome = _steps(run, callbacks, metrics)
    finally:
        run.console.end()
        metrics.close()
    for callback in callbacks:
        callback.on_end(run)
    return outcome


def _steps(run: Run, callbacks: Sequence[Callback], metrics: MetricsFile) -> Outcome:
    done: dict[str, Any] = {}
    if run.progress.owed is not None:
        done, before = run.progress.owed["values"], Progress.from_dict(run.progress.owed["before"])
        run.progress.owed = None
        _after_step(run, callbacks, metrics, before, done)
    began = time.perf_counter()
    for batch in run.data.batches(
        run.config, run.progress.samples, run.length.samples, run.place.data_rank, run.place.data_ranks
    ):
        if run.is_stopping() or run.progress.step == run.length.steps:
            break
        before = replace(run.progress)
        done = _one_step(run, batch, began)
        for callback in callbacks:
            callback.on_step(run, done)
        post.enter(f"waiting for the other ranks after step {run.progress.step}")
        run.is_stopping()
        run.outlook.eta.step(time.perf_counter() - began, batch.tokens)
        _after_step(run, callbacks, metrics, before, done)
        began = time.perf_counter()
        post.enter(f"waiting for the batch of step {run.progress.step + 1}")
    run.is_stopping()
    if run.request.signal is not None:
        _stop_by_signal(run, callbacks)
    return Outcome(run.progress.step, run.checkpoint, done.get("loss"), done.get("val_loss"), run.request.reason)


def _after_step(
    run: Run, callbacks: Sequence[Callback], metrics: MetricsFile, before: Progress, values: dict[str, Any]
) -> None:
    """Validation, the metrics line and the checkpoint of a step, where they are due."""
    if _validation_due(run, before):
        try:
            values["val_loss"] = _validate(run, callbacks)
            run.is_stopping()
        except Interrupted:
            run.progress.owed = {"values": values, "before": before.to_dict()}
            return
    metrics.write(values)
    run.console.step(values, run.outlook.seconds_left(run.progress))
    if _checkpoint_due(run, before, improved=run.progress.best_step == run.progress.step):
        _save(run, callbacks)


def _stop_by_signal(run: Run, callbacks: Sequence[Callback]) -> NoReturn:
    assert run.request.signal is not None
    if run.progress.step == 0:
        raise StoppedBySignal(
            f"stopped by {run.request.signal.name} before the first step: there is nothing to save",
            "the same command begins again",
        )
    if run.checkpoint is None or run.checkpoint.name != folder_name(run.progress.step) or run.progress.owed:
        _save(run, callbacks)
    again = "the same command" if run.config.checkpoint.resume != "never" else "--checkpoint.resume auto"
    raise StoppedBySignal(
        f"stopped by {run.request.signal.name} after step {run.progress.step}, saved in {run.checkpoint}",
        f"{again} goes on from there",
    )


def _one_step(run: Run, batch: StepBatch, began: float) -> dict[str, Any]:
    progress, optim = run.progress, run.config.optim
    post.enter(f"computing step {progress.step + 1}", progress.step + 1)
    rate = learning_rate(progress.step, run.length.steps, optim)
    result = train_step(run.runner, run.optimizer, batch, progress.step + 1, rate, optim.max_grad_norm)
    progress.step += 1
    progress.samples += batch.samples
    progress.tokens += batch.tokens
    progress.loss_tokens += batch.loss_tokens
    seconds = time.perf_counter() - began
    return {
        "step": progress.step,
        "loss": result.loss,
        "lr": rate,
        "grad_norm": result.grad_norm,
        "tokens": batch.tokens,
        "loss_tokens": batch.loss_tokens,
        "padding": result.padding,
        "bad_rows": run.data.counts.bad_rows,
        "dropped_rows": run.data.counts.dropped,
        "truncated_rows": run.data.counts.truncated_long,
        "split_rows": run.data.counts.split_long,
        "cropped_tokens": run.data.counts.cropped_tokens,
        "samples": batch.samples,
        "micro_batches": len(batch.micro_batches),
        "epoch": run.epoch,
        "total_tokens": progress.tokens,
        "tok_s": batch.tokens / seconds,
        "step_s": seconds,
        "memory": memory_bytes(run.device),
    }


def _is_last(run: Run) -> bool:
    reached = run.length.steps is not None and run.progress.step >= run.length.steps
    return reached or run.request.reason is not None


def _due(run: Run, before: Progress, steps: int | None, samples: int | None, epochs: float | None) -> bool:
    size = len(run.data.train)
    return (
        crossed(before.step, run.progress.step, steps)
        or crossed(before.samples, run.progress.samples, samples)
        or crossed(before.samples / size, run.progress.samples / size, epochs)
    )


def _validation_due(run: Run, before: Progress) -> bool:
    when = run.config.training
    if run.data.validation is None:
        return False
    every = (when.validate_every_steps, when.validate_every_samples, when.validate_every_epochs)
    return _due(run, before, *every) or (when.validate_at_end and _is_last(run))


def _checkpoint_due(run: Run, before: Progress, improved: bool) -> bool:
    when = run.config.checkpoint
    every = (when.every_steps, when.every_samples, when.every_epochs)
    return _due(run, before, *every) or (when.at_end and _is_last(run)) or (when.save_best and improved)


def _validate(run: Run, callbacks: Sequence[Callback]) -> float:
    def batches() -> Iterator[StepBatch]:
        for batch in run.data.validation_batches(run.place.data_rank, run.place.data_ranks):
            run.is_stopping()
            if run.request.signal is not None:
                raise Interrupted
            post.enter(f"validating after step {run.progress.step}")
            yield batch

    began = time.perf_counter()
    loss, _ = mean_loss(run.runner, batches())
    if not math.isfinite(loss):
        raise NumbersError(
            f"validation after step {run.progress.step}: the loss is {loss}",
            "the weights are no longer numbers to train with; go back to an earlier checkpoint and lower the rate",
        )
    improved = run.progress.best_loss is None or loss < run.progress.best_loss
    if improved:
        run.progress.best_loss, run.progress.best_step = loss, run.progress.step
    for callback in callbacks:
        callback.on_validation(run, loss)
    run.outlook.validated(time.perf_counter() - began, improved)
    return loss


def _save(run: Run, callbacks: Sequence[Callback]) -> None:
    root, when, began = run.output_dir / CHECKPOINTS, run.config.checkpoint, time.perf_counter()
    state = run.progress.to_dict() | run.saved_with
    step, place = run.progress.step, run.place
    post.enter(f"saving step {step}")
    run.checkpoint = save_checkpoint(root, step, run.model, run.tokenizer, run.optimizer, state, place)
    mark_best_of(run)
    removed = remove_old(root, when.keep_last) if place.is_main else []
    run.console.say(f"saved {run.checkpoint}" + (f", removed steps {removed}" if removed else ""))
    for callback in callbacks:
        callback.on_checkpoint(run, run.checkpoint)
    run.outlook.eta.save(time.perf_counter() - began)


def mark_best_of(run: Run) -> None:
    """Marks the best checkpoint that is there. Also done when a run goes on: it may have been killed just before."""
    root, progress = run.output_dir / CHECKPOINTS, run.progress
    if not run.config.checkpoint.save_best or progress.best_step is None or progress.best_loss is None:
        return
    if run.place.is_main and (root / folder_name(progress.best_step)).is_dir():
        mark_best(root, progress.best_step, progress.best_loss)
