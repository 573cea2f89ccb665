"""What the checks of `torchstone diagnose` work on: the run as `torchstone train` builds it, and its references.

All of it comes from `build_run`, in a temporary folder, so nothing is left in the folder of the user's run, and nothing
is resumed. A second and a third model are built when a check first asks for them; where memory does not suffice for
both, one at a time. Checks that train use the user's model, and put it back: loading or compiling another one for each
would take most of the time.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F

from torchstone.config.schema import CheckpointConfig, Config, DebugConfig, ObserveConfig, ParallelConfig
from torchstone.data.loader import RunData, StepBatch
from torchstone.diagnosis.batch_contents import BatchContents, Document, read_contents, step_documents
from torchstone.diagnosis.check import Finding, MissingCheck, SkipCheck
from torchstone.diagnosis.checked_step import CheckedStep, choose_step
from torchstone.diagnosis.reference import LossSums, Reference
from torchstone.diagnosis.restore import randomize_adapters, restore_after
from torchstone.errors import OutOfMemoryError
from torchstone.models.attention import VARLEN_BACKENDS
from torchstone.observe.console import Console
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.rng import fork_rng
from torchstone.training.checks import free_device_memory, out_of_memory_reason, ran_out_of_memory
from torchstone.training.run import Run
from torchstone.training.schedule import plan_schedule
from torchstone.training.setup import build_run
from torchstone.training.state import Progress

RNG_SAMPLE_SIZE = 64
# Settings of a trial, whose learning rate is then the same in every step.
CONSTANT_RATE: Mapping[str, Any] = {
    "optim.schedule": "constant", "optim.warmup_steps": 0, "optim.warmup_ratio": 0.0, "optim.min_lr_ratio": 0.0,
}  # fmt: skip
T = TypeVar("T")


@dataclass
class Diagnosis:
    """`run`: the user's model, data and layout. Checks may leave gradients in it, and nothing else."""

    run: Run
    # Empty, for what checks write. The same on all ranks of a machine.
    folder: Path = Path()
    # Whole steps of the user's size, and no limits of time.
    is_full: bool = False
    # Whether training would. `run` leaves bad rows out.
    stops_at_bad_rows: bool = False
    # What this rank would have drawn next when the run was built.
    rng_sample: tuple[int, ...] = ()
    # What the checks so far have found wrong, by name.
    failed: dict[str, Finding] = field(default_factory=dict)
    # The learning rate at which the loss gets worse, when a check has measured it.
    divergence_rate: float | None = None
    _trial_numbers: Iterator[int] = field(default_factory=count)
    # Why there is no other model.
    _no_memory: str | None = None

    @property
    def ctx(self) -> ParallelContext:
        return self.run.ctx

    @property
    def device(self) -> torch.device:
        return self.run.device

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def is_fp32(self) -> bool:
        """Whether `run` computes in fp32, uncompiled."""
        choices = self.run.model.choices
        return (choices["training.precision"].value, choices["model.compile"].value) == ("fp32", "none")

    def require(self, *names: str) -> None:
        """Skips a check that would only show again what these have found."""
        for name in names:
            if name in self.failed:
                raise SkipCheck(f"{name} failed: repair it first")

    @property
    def is_loss_explained(self) -> bool:
        """Whether the check of the loss failed by a mistake that is known."""
        return "loss" in self.failed and bool(self.failed["loss"].values.get("is_explained"))

    @cached_property
    def fp32_run(self) -> Run:
        """The same layout and kernels in fp32, for strict limits; `run` itself if it is that already, without adapters
        that start at zero."""
        if self.is_fp32 and self.run.model.tuning is None:
            return self.run
        run = self._build(fp32_config(self.config), self.ctx)
        randomize_adapters(run)
        return run

    @cached_property
    def reference_run(self) -> Run:
        """The model alone: one process, fp32, eager attention, all logits, no kernels. reference.py defines with it
        what is right; its own data, runner and optimizer are not used."""
        run = self._build(reference_config(self.config, self.run.data), SINGLE_PROCESS)
        randomize_adapters(run)
        run.model.train(False)
        return run

    @cached_property
    def step(self) -> CheckedStep:
        """The step of most checks: the first samples of the run that have labels."""
        return choose_step(self.run, self.is_full)

    def batch(self, run: Run, data: RunData | None = None) -> StepBatch:
        """This rank's part of the checked step, as the training loop gets it; `data` may have other batch sizes."""
        step, ctx = self.step, run.ctx
        return next(iter((data or step.data).batches(run.config, 0, len(step.indices), ctx.dp_rank, ctx.dims.dp)))

    @cached_property
    def documents(self) -> list[Document]:
        """The documents of the checked step."""
        return step_documents(self.step.data, self.step.indices)

    @cached_property
    def contents(self) -> BatchContents:
        """What the micro-batches of the checked step have, on all ranks."""
        return read_contents(self.documents, self.batch(self.run).micro_batches, self.ctx)

    @property
    def reference(self) -> Reference:
        return Reference(self.reference_run.model, self.device, self.run.data.pad_id, self.ctx)

    @cached_property
    def loss_sums(self) -> LossSums:
        """The loss sums of the checked step, by definition."""
        return self.reference.losses(self.documents)

    @contextmanager
    def trial(self, run: Run, data: RunData, settings: Mapping[str, Any]) -> Iterator[Run]:
        """A new run with other data and settings, on the model and the optimizer of `run`, which is put back."""
        folder = self.folder / f"trial-{next(self._trial_numbers)}"
        folder.mkdir(exist_ok=True)
        config = change(run.config, {"output_dir": str(folder)} | dict(settings))
        with restore_after(run):
            run.optimizer.reset_state()
            schedule = plan_schedule(config, data, Progress())
            yield Run(
                config, run.model, run.tokenizer, data, run.optimizer, run.runner, schedule, Progress(),
                Console("none"), run.checkpoint_info,
            )  # fmt: skip

    def _build(self, config: Config, ctx: ParallelContext) -> Run:
        """Another run. If there is no memory for it, the one that was built before is dropped: a check that uses both
        must have what it needs of one before it asks for the other."""
        while self._no_memory is None:
            run, reason = self._try_to_build(config, ctx)
            if not self.ctx.any_rank(run is None):
                return cast(Run, run)
            del run
            others = [name for name in ("fp32_run", "reference_run") if vars(self).get(name, self.run) is not self.run]
            for name in others:
                del vars(self)[name]
            free_device_memory(self.device)
            if not others:
                self._no_memory = reason or "on another rank"
        raise MissingCheck(f"no memory for another model in fp32: {self._no_memory}")

    def _try_to_build(self, config: Config, ctx: ParallelContext) -> tuple[Run | None, str | None]:
        # `build_run` seeds the random numbers.
        with fork_rng(self.device):
            try:
                return build_run(config, Console("none"), self.device, ctx), None
            except OutOfMemoryError as error:
                return None, error.message
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                return None, out_of_memory_reason(error)


@contextmanager
def open_diagnosis(
    config: Config, console: Console, device: torch.device, ctx: ParallelContext, is_full: bool = False
) -> Iterator[Diagnosis]:
    """Builds the run of `config`. All ranks must call it."""
    with tempfile.TemporaryDirectory(prefix="torchstone-diagnose-") as own, fork_rng(device):
        # The ranks of a machine write to the folder of the first of them.
        host = socket.gethostname()
        folder = next(Path(each) for name, each in ctx.all_gather_object((host, own)) if name == host)
        run = build_run(without_outputs(config, folder), console, device, ctx)
        yield Diagnosis(run, folder, is_full, config.data.on_bad_row == "stop", draw_rng_sample(device))
        # Each removes its own.
        ctx.barrier()


def without_outputs(config: Config, folder: Path) -> Config:
    """A new run that stops at bad numbers, leaves bad rows out, and writes nothing but what it must, into `folder`."""
    return replace(
        config,
        output_dir=str(folder / "run"),
        checkpoint=CheckpointConfig(every_minutes=0, at_end=False, resume="never"),
        observe=ObserveConfig(),
        debug=DebugConfig(on_spike="off", dump_limit="0"),
        data=replace(config.data, on_bad_row="skip"),
    )


def end_after(steps: int | None = None, epochs: float | None = None) -> dict[str, Any]:
    """Settings of a trial: the length of its run, and no other limit."""
    return {
        "training.mode": None, "training.max_steps": steps, "training.max_epochs": epochs, "training.max_tokens": None,
    }  # fmt: skip


def fp32_config(config: Config) -> Config:
    changes: dict[str, Any] = {
        "training.precision": "fp32", "training.fp8_recipe": "tensorwise", "model.compile": "none",
    }  # fmt: skip
    if config.model.attention in VARLEN_BACKENDS:
        # They compute in bf16.
        changes["model.attention"] = "auto"
    return change(config, changes)


def reference_config(config: Config, data: RunData) -> Config:
    changes = {
        "parallel": ParallelConfig(),
        "model.attention": "eager",
        "model.fused": ("auto",),
        "model.recompute": "none",
        "model.loss": "full",
        "model.liger": (),
        # Sizes that divide among the ranks of the layout may not suit a single one.
        "training.global_batch_size": data.batch_sizes.global_batch_size,
        "training.batch_size": None,
        "training.grad_accum_steps": None,
        "training.max_tokens_per_gpu": None,
    }
    return change(fp32_config(config), changes)


def change(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values by key. They are not validated."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        fields: dict[str, Any] = {section: replace(getattr(config, section), **{name: value}) if name else value}
        config = replace(config, **fields)
    return config


def on_first_rank(ctx: ParallelContext, function: Callable[[], T]) -> T:
    """What the first rank returns or raises, on all ranks, which must call it together."""
    outcome: Any = None
    if ctx.is_main:
        try:
            outcome = function()
        except Exception as error:
            outcome = error
    outcome = ctx.all_gather_object(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return cast(T, outcome)


def draw_rng_sample(device: torch.device) -> tuple[int, ...]:
    """A dropout mask that would be drawn now, on the CPU and on the device. The state of the generators stays."""
    with fork_rng(device):
        devices = dict.fromkeys((torch.device("cpu"), device))
        masks = [F.dropout(torch.ones(RNG_SAMPLE_SIZE, device=each)) for each in devices]
        return tuple(int(kept) for mask in masks for kept in (mask > 0).tolist())
