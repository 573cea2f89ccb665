"""The numbers of each step: read from the device, given to callbacks, written to metrics.jsonl and the console.

On CUDA they are read when the next step has been started, so that the device never waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchstone.data.loader import StepBatch
from torchstone.observe.metrics import MetricsFile
from torchstone.observe.mfu import flops_per_token
from torchstone.training.bad_steps import (
    WINDOW,
    ComputedStep,
    describe_damage,
    judge_step,
    loss_limit,
    reads_numbers_first,
    remember_loss,
)
from torchstone.training.run import Callback, Run
from torchstone.training.step import StepResult, check_osft_error, record_event


@dataclass(frozen=True)
class StartedStep:
    """A step whose numbers may not be known yet, and the progress after it."""

    computed: ComputedStep
    lr: float
    epoch: float
    total_tokens: int
    # The peak while it was started. On a GPU the allocator knows only the order of the host.
    memory: int
    # How often the run has run out of memory so far, and gone on with smaller micro-batches.
    oom_splits: int
    # On a GPU, after its update.
    end: torch.cuda.Event | None
    # On the host when `end` has passed (`SubspaceProjection.measure`).
    osft_error: Tensor | None = None


class StepLog:
    """Reads the numbers of steps and writes their metrics. `metrics` are those of the last step that was read.

    `is_delayed`: the numbers of a step are read when the next one has been started, and its duration is that on the
    device. If a callback wants them, they are read at once.
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback], metrics_file: MetricsFile) -> None:
        self.run, self.callbacks, self.metrics_file = run, callbacks, metrics_file
        has_callback = any(type(callback).on_step is not Callback.on_step for callback in callbacks)
        # On all ranks alike: they must find a step with NaN at the same point.
        self.is_delayed = run.device.type == "cuda" and not run.ctx.any_rank(has_callback)
        self.is_delayed &= not reads_numbers_first(run.config.debug)
        self.metrics: dict[str, Any] = {}
        self._has_warned = False
        self._unread: StartedStep | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock, self._event = time.perf_counter(), record_event(self.run.device)

    def add(self, started: StartedStep) -> None:
        """Finishes the step before, and keeps `started`, or reads it at once."""
        self.finish()
        self._unread = started
        if not self.is_delayed:
            self.read()

    @contextmanager
    def finished_on_error(self) -> Iterator[None]:
        """An error of the next step does not lose the last one, whose numbers may even explain it."""
        try:
            yield
        except Exception:
            # A device that failed has no numbers; one that waits for a rank that is gone will never have them.
            if self.run.ctx.world_size == 1 or self._is_known():
                with suppress(RuntimeError):
                    self.finish()
            raise

    def _is_known(self) -> bool:
        """Whether the device has finished the last step."""
        return self._unread is not None and (self._unread.end is None or self._unread.end.query())

    @property
    def unread_result(self) -> StepResult | None:
        return None if self._unread is None else self._unread.computed.result

    def loss_limit(self) -> float:
        """The largest loss of the next step that is no spike. The loss just before it does not count: it may not be
        known yet."""
        losses = self.run.progress.recent_losses
        return loss_limit(losses[-WINDOW:] if self._unread is not None else losses[:-1], self.run.config.debug)

    def finish(self) -> None:
        """Reads the last step and writes its metrics, if it has not been read."""
        if self._unread is not None:
            self.read()
            self.write()

    def read(self) -> None:
        """Waits for the numbers of the last step, if it has not been read."""
        started, self._unread = self._unread, None
        if started is None:
            return
        computed = started.computed
        if self.is_delayed:
            judge_step(self.run, computed)
        if not self._has_warned and (damage := describe_damage(self.run, computed, started.lr)) is not None:
            self.run.console.warn(damage)
            self._has_warned = True
        remember_loss(self.run, computed.result.loss)
        if started.end is not None:
            started.end.synchronize()
        if started.osft_error is not None:
            check_osft_error(computed.step, started.osft_error.item())
        now = time.perf_counter()
        seconds = now - self._clock
        if self.is_delayed and self._event is not None and started.end is not None:
            seconds = self._event.elapsed_time(started.end) / 1e3
        self._clock, self._event = now, started.end
        self.metrics = _step_metrics(self.run, started, seconds)
        self.run.eta.add_step(seconds, computed.batch.tokens)
        for callback in self.callbacks:
            callback.on_step(self.run, self.metrics)

    def write(self) -> None:
        """Writes the metrics of the last step that was read."""
        self.metrics_file.write(self.metrics)
        self.run.console.step(self.metrics, self.run.eta_seconds())


def _step_metrics(run: Run, started: StartedStep, seconds: float) -> dict[str, Any]:
    counts, batch, result, progress = run.data.counts, started.computed.batch, started.computed.result, run.progress
    return {
        "step": started.computed.step,
        "loss": result.loss,
        "lr": started.lr,
        "grad_norm": result.grad_norm,
        "tokens": batch.tokens,
        "loss_tokens": batch.loss_tokens,
        "padding": result.padding,
        "bad_rows": counts.bad_rows,
        "dropped_rows": counts.dropped,
        "truncated_rows": counts.truncated_long,
        "split_rows": counts.split_long,
        "cropped_tokens": counts.cropped_tokens,
        "samples": batch.samples,
        "micro_batches": len(batch.micro_batches),
        "oom_splits": started.oom_splits,
        "skipped_steps": progress.skipped_steps,
        "rollbacks": progress.rollbacks,
        "loss_spikes": progress.loss_spikes,
        "epoch": started.epoch,
        "total_tokens": started.total_tokens,
        "tok_s": batch.tokens / seconds,
        "step_s": seconds,
        "mfu": _mfu(run, batch, seconds),
        "memory": started.memory,
    } | ({} if started.osft_error is None else {"osft_error": started.osft_error.item()})


def _mfu(run: Run, batch: StepBatch, seconds: float) -> float | None:
    """None without a known peak, and for the fallback, whose FLOPs are unknown."""
    config = run.model.decoder_config
    if run.peak_flops is None or config is None:
        return None
    share = 1.0 if run.model.tuning is None else run.model.tuning.trained_share
    flops = batch.tokens * flops_per_token(config, batch.mean_length, share)
    return flops / (seconds * run.peak_flops * run.ctx.world_size)
