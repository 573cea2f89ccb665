"""A run: all that belongs to it, what callbacks get, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchstone.config.schema import Config
from torchstone.data.loader import RunData
from torchstone.data.tokenize import Tokenizer
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.observe.eta import EtaEstimator
from torchstone.observe.metrics import MetricsFile
from torchstone.observe.mfu import device_peak_flops
from torchstone.optim.adamw import AdamW
from torchstone.optim.muon import Muon
from torchstone.parallel.mesh import ParallelContext
from torchstone.parallel.runner import Runner
from torchstone.training.sample_text import Prompt
from torchstone.training.schedule import TrainingSchedule
from torchstone.training.state import Progress
from torchstone.training.stop import StopRequest


@dataclass
class Run:
    """The state of a run. Callbacks get it; `run.stop("reason")` ends it after the current step."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    data: RunData
    optimizer: AdamW | Muon
    runner: Runner
    schedule: TrainingSchedule
    progress: Progress
    console: Console
    # Saved in every checkpoint's state.json, together with the progress.
    checkpoint_info: dict[str, Any]
    # The last checkpoint, if there is one.
    checkpoint: Path | None = None
    stop_request: StopRequest = field(default_factory=StopRequest)
    eta: EtaEstimator = field(default_factory=EtaEstimator)
    # The losses of the last validation, by the name of the set.
    val_losses: dict[str, float] = field(default_factory=dict)
    # What the model continues every observe.sample_every_steps steps, and where the texts go.
    sample_prompts: list[Prompt] = field(default_factory=list)
    samples_file: MetricsFile | None = None
    # The checkpoint that this process resumed from. It is kept, whatever checkpoint.keep_last is.
    resumed_from: Path | None = field(init=False)
    # Where the weights were loaded from; None for a new model. Until `first_step` is done they are as they are there.
    weights_folder: Path | None = None
    first_step: int = field(init=False)
    # FLOP/s of one device, for MFU; None if unknown.
    peak_flops: float | None = field(init=False)
    # NaN and Inf that were looked into.
    nan_reports: int = 0
    # When training began or the last checkpoint was saved, by the monotonic clock.
    saved_at: float = 0.0

    def __post_init__(self) -> None:
        self.resumed_from, self.first_step = self.checkpoint, self.progress.step + 1
        precision, peak_tflops = self.config.training.precision, self.config.observe.peak_tflops
        self.peak_flops = device_peak_flops(self.device, precision, peak_tflops)

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def ctx(self) -> ParallelContext:
        """This process's ranks in the mesh; `run.ctx.is_main` is true on rank 0."""
        return self.runner.ctx

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def epoch(self) -> float:
        return self.progress.samples / len(self.data.train)

    @property
    def micro_batch_limit(self) -> int | None:
        """The most tokens of a micro-batch, padding included, since a larger one ran out of memory."""
        return self.progress.micro_batch_limit

    @property
    def early_stop_reason(self) -> str | None:
        return self.schedule.early_stop_reason(self.progress)

    def stop(self, reason: str) -> None:
        self.stop_request.stop(reason)

    def request_save_if_due(self) -> None:
        """When the clock of rank 0 says so, requests a checkpoint; `sync_stop_request` passes it on to all ranks."""
        seconds = self.schedule.checkpoint.every_seconds
        is_due = seconds is not None and time.monotonic() - self.saved_at >= seconds
        self.stop_request.local_save = self.ctx.is_main and is_due

    def should_stop(self) -> bool:
        """What `sync_stop_request` returned last; in a single process, what it returns now."""
        request = self.stop_request
        if self.ctx.world_size == 1:
            self.sync_stop_request()
        return request.signal is not None or request.reason is not None

    def sync_stop_request(self) -> bool:
        """Makes `stop_request` the same on all ranks, which must call it at the same point; returns whether to stop."""
        return self.stop_request.sync(self.ctx)

    def eta_seconds(self) -> float | None:
        """The ETA after a step and its validation, before its checkpoint."""
        schedule, progress = self.schedule, self.progress
        if schedule.total_steps is None:
            return None
        samples = schedule.end(progress)[1] - progress.samples
        tokens = samples * progress.tokens / max(1, progress.trained_samples)
        validations = schedule.count_left(schedule.validation, progress)
        saves = schedule.count_left(schedule.checkpoint, progress)
        return self.eta.seconds_left(tokens, validations, saves)


class Callback:
    """Override what you need. Callbacks run on every rank; `run.stop(reason)` ends the run after the current step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        functions = [name for name, value in vars(cls).items() if name.startswith("on_") and callable(value)]
        unknown = [name for name in functions if not hasattr(Callback, name)]
        if unknown:
            hooks = ", ".join(name for name in vars(Callback) if name.startswith("on_"))
            raise TypeError(f"{cls.__name__}.{unknown[0]} would never be called: the hooks are {hooks}")

    def on_start(self, run: Run) -> None:
        """Before the first step of this process, and again when a run has gone back to a checkpoint
        (debug.on_nan rollback), with a new `run`."""

    def on_step_begin(self, run: Run, step: int) -> None:
        """Before a step is started. On a GPU the step before it may still run."""

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        """After a step, with its line of metrics.jsonl, such as `metrics["step"]` and `metrics["loss"]`. On a GPU the
        next step then waits until this one is computed."""

    def on_validation(self, run: Run, loss: float) -> None:
        """After a validation. `loss` is that of the first set, `run.val_losses` has those of all sets by name."""

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        """When a checkpoint is on the disk."""

    def on_end(self, run: Run) -> None:
        """After the last step, unless a signal or an error ended the run."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: its last step, checkpoint and losses, and why a callback or training.patience stopped it."""

    step: int
    checkpoint: Path | None
    loss: float | None
    val_loss: float | None
    stopped: str | None
