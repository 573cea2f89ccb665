"""A step that runs out of memory is computed again in smaller micro-batches, with the same result within rounding.

In one process that happens at once: what the failed attempt has left is freed, the random numbers are put back to the
start of the step, and the failed micro-batch is split, like every later one of that size. With several ranks the others
wait for the failed one in a collective. So it leaves the smaller limit in a file and exits with code 4, and the workers
start again from the last checkpoint with smaller micro-batches (launch/memory_limit.py).

The limit is a number of tokens, padding included, because memory follows it whether rows are packed or not. It is part
of the progress: a resumed run splits its batches as an uninterrupted one does, bit for bit. It is dropped when a run
resumes on another device, in another layout, or with other settings that decide the memory.

A step without such an error pays for a copy of the state of the random numbers: 0.6 us on a CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchstone import heartbeat
from torchstone.data.collate import BatchShapes, MicroBatch, collate
from torchstone.data.loader import StepBatch, count_padding
from torchstone.data.samples import Samples
from torchstone.data.split import split_micro_batch, split_step_batch
from torchstone.errors import OutOfMemoryError
from torchstone.launch.memory_limit import MemoryLimit, read_limit, write_limit
from torchstone.parallel.runner import Runner
from torchstone.rng import get_rng_states, set_rng_states
from torchstone.training.checks import is_repairable, out_of_memory_reason, ran_out_of_memory
from torchstone.training.defaults import hardware_settings
from torchstone.training.malloc import return_freed_memory
from torchstone.training.memory import describe_fit
from torchstone.training.run import Run
from torchstone.training.step_rows import describe_rows, indices_of_step, rows_of_micro_batch


class Attempts:
    """Computes a batch, again and again in smaller micro-batches as long as it runs out of memory:

    while not attempts.is_done:
        with attempts:
            loss = runner.forward(attempts.batch.micro_batches)
    """

    def __init__(self, run: Run, batch: StepBatch, samples: Samples, indices: Callable[[], np.ndarray]) -> None:
        """`indices`: which of the `samples` are in the batch; only called for a message."""
        self.run, self.samples, self.indices = run, samples, indices
        self.batch, self.is_done = _split_to_limit(run, batch), False
        # Other ranks could not take part in a second attempt.
        self._can_repeat, self._has_failed = run.ctx.mesh is None, False
        # At the start of the step.
        self.rng_states = get_rng_states(run.device)

    def __enter__(self) -> None:
        if self._has_failed:
            self._clean_up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_done = error is None
        failed = self.run.runner.running
        # Outside of the micro-batches smaller ones would not help.
        if error is None or failed is None or not ran_out_of_memory(error):
            return False
        reason, limit = out_of_memory_reason(error), self._smaller_limit(failed)
        if limit is None or not is_repairable(error):
            raise self._error(failed, reason, describe_fit(self.run, failed.ids.shape)) from None
        if not self._can_repeat:
            raise self._error(failed, reason, _leave_limit(self.run, limit)) from None
        _drop_tracebacks(error)
        self._has_failed = True
        _set_limit(self.run, limit, failed, reason)
        self.batch = _split_to_limit(self.run, self.batch)
        return True

    def _smaller_limit(self, failed: MicroBatch) -> int | None:
        """The size of the larger half of a micro-batch; None if it cannot be split."""
        parts = split_micro_batch(failed, self.run.data.pad_id, self.run.data.shapes)
        limit = max(part.ids.numel() for part in parts)
        return limit if limit < failed.ids.numel() else None

    def _clean_up(self) -> None:
        """Frees what the failed attempt has left, and puts the random numbers back to where it began."""
        self.run.model.clear_gradients()
        # Cycles of objects: the loop has turned automatic collections off.
        gc.collect()
        return_freed_memory()
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()
        set_rng_states(self.rng_states, self.run.device)

    def _error(self, failed: MicroBatch, reason: str, hint: str) -> OutOfMemoryError:
        rows, length = failed.ids.shape
        return OutOfMemoryError(
            f"out of memory on {self.run.device} while {heartbeat.current_phase()}, in a micro-batch of {rows} x "
            f"{length} tokens: {reason}\n  its rows: {self._describe_rows(failed)}",
            hint,
        )

    def _describe_rows(self, failed: MicroBatch) -> str:
        index = next(index for index, batch in enumerate(self.batch.micro_batches) if batch is failed)
        return describe_rows(rows_of_micro_batch(self.run, self.samples, self.indices(), self.batch, index))


def training_attempts(run: Run, batch: StepBatch) -> Attempts:
    """The attempts to compute the next step."""

    return Attempts(run, batch, run.data.train, lambda: indices_of_step(run, batch))


def validation_attempts(run: Run, batch: StepBatch, name: str) -> Attempts:
    """The attempts to compute a batch of a validation set."""
    indices = np.arange(batch.first_sample, batch.first_sample + batch.samples)
    return Attempts(run, batch, run.data.validation[name], lambda: indices)


def limit_settings(runner: Runner) -> dict[str, Any]:
    """What a limit is valid for: the hardware, and what decides how a step is computed."""
    choices = {key: str(choice.value) for key, choice in runner.model.choices.items()}
    return hardware_settings(runner.device, runner.ctx) | choices


def restore_limit(run: Run, saved_settings: dict[str, Any] | None) -> None:
    """Sets the limit to the smallest one: that of the checkpoint (found with `saved_settings`), or what a rank has left
    when it failed. The same on all ranks, also if each machine has a folder of its own."""
    progress, settings = run.progress, run.checkpoint_info["limit_settings"]
    limits = [limit for limit in run.ctx.all_gather_object(read_limit(run.output_dir)) if limit is not None]
    saved = progress.micro_batch_limit
    if saved is not None:
        limits.append(MemoryLimit(saved, progress.step, progress.oom_splits, saved_settings or {}))
    valid = [limit for limit in limits if limit.settings == settings]
    progress.micro_batch_limit = min((limit.tokens for limit in valid), default=None)
    progress.oom_splits = max([progress.oom_splits, *(limit.splits for limit in valid)])
    if progress.micro_batch_limit is not None:
        run.console.info(
            f"micro-batches have at most {progress.micro_batch_limit} tokens: with more, this run was out of memory "
            f"(oom_splits {progress.oom_splits})"
        )
    elif saved is not None:
        saved_settings = saved_settings or {}
        changed = [f"{key} {saved_settings.get(key)}" for key in settings if saved_settings.get(key) != settings[key]]
        run.console.info(
            f"micro-batches are not limited to {saved} tokens any more: memory ran out with {', '.join(changed)}"
        )


def _split_to_limit(run: Run, batch: StepBatch) -> StepBatch:
    """Splits micro-batches that exceed the limit, and adds empty ones, so that all ranks have the same number."""
    limit, data = run.micro_batch_limit, run.data
    if limit is None:
        return batch
    batch = split_step_batch(batch, limit, data.pad_id, data.shapes)
    missing = run.ctx.all_reduce_max(len(batch.micro_batches)) - len(batch.micro_batches)
    if missing == 0:
        return batch
    empty = collate([], data.pad_id, BatchShapes(data.shapes.multiple))
    micro_batches = [*batch.micro_batches, *[empty] * missing]
    return replace(batch, micro_batches=micro_batches, padding=count_padding(micro_batches))


def _set_limit(run: Run, limit: int, failed: MicroBatch, reason: str) -> None:
    run.progress.micro_batch_limit = limit
    run.progress.oom_splits += 1
    rows, length = failed.ids.shape
    modules = [module for part in run.model.model_parts for module in part.modules()]
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)
    masks = " (but for dropout, which draws other masks)" if has_dropout else ""
    run.console.warn(
        f"out of memory while {heartbeat.current_phase()} ({reason}): its micro-batch of {rows} x {length} tokens is "
        f"split, and from now on every one of more than {limit} tokens; what was computed is dropped and computed "
        f"again, and the result is the same within rounding{masks}"
    )


def _leave_limit(run: Run, limit: int) -> str:
    """Writes the limit for the next start; returns what that does."""
    progress = run.progress
    settings = run.checkpoint_info["limit_settings"]
    try:
        write_limit(run.output_dir, MemoryLimit(limit, progress.step + 1, progress.oom_splits + 1, settings))
    except OSError as error:
        return f"the limit for the next start could not be written ({error}); {describe_fit(run)}"
    again = f"micro-batches of at most {limit} tokens, from the last checkpoint"
    if heartbeat.has_launcher():
        return f"the workers start again with {again}"
    return f"start it again, as torchrun --max-restarts does: it continues with {again}"


def _drop_tracebacks(error: BaseException | None) -> None:
    """The tensors of the calls that failed would live as long as the error does."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
