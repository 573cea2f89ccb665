"""The training loop: steps to the end of the run, and between them validation, metrics and checkpoints.

After every step, in this order: callbacks, validation if due, the line in metrics.jsonl, samples of text if due, the
checkpoint if due. So a checkpoint is never ahead of the metrics, which are synced before it is committed. If a run is
killed, metrics.jsonl may have lines after the last checkpoint; resuming removes them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from torchstone.atomic import read_json_or_empty
from torchstone.checkpoint.load import CHECKPOINTS
from torchstone.checkpoint.manifest import checkpoint_name
from torchstone.checkpoint.save import BEST_FILE, best_step, mark_best, prune_checkpoints, save_checkpoint
from torchstone.data.loader import StepBatch
from torchstone.errors import NumericalError, StoppedBySignal
from torchstone.heartbeat import end_startup, report_phase
from torchstone.launch.memory_limit import remove_limit
from torchstone.observe.metrics import MetricsFile, memory_bytes
from torchstone.optim.schedule import lr_at_step
from torchstone.training.bad_steps import ComputedStep, judge_step, max_loss_of_update
from torchstone.training.checks import check_saved_state, translate_out_of_memory
from torchstone.training.malloc import keep_freed_memory
from torchstone.training.memory import UPDATING, describe_fit
from torchstone.training.out_of_memory import training_attempts, validation_attempts
from torchstone.training.run import Callback, Run, TrainResult
from torchstone.training.sample_text import generate_samples
from torchstone.training.step import compute_gradients, measure_osft, optimizer_step, record_event, validation_loss
from torchstone.training.step_log import StartedStep, StepLog
from torchstone.training.stop import handle_stop_signals

# In steps. Python would collect in the middle of a step, on each rank at another time.
COLLECT_EVERY = 50


def train_loop(run: Run, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Trains to the end of the run. A signal saves a checkpoint and raises `StoppedBySignal`.

    On CUDA the host prepares the next step while the device computes: the numbers of a step are read after the next one
    was started, unless something needs them at once.
    """
    progress, first_step = run.progress, run.progress.step + 1
    with ExitStack() as stack, _training_session(run, callbacks) as metrics_file:
        log = StepLog(run, callbacks, metrics_file)
        # A signal interrupted the validation of this step: repeat it.
        if progress.pending_metrics is not None:
            log.metrics, progress.pending_metrics = progress.pending_metrics, None
            _validate_log_save(run, log)
        run.sync_stop_request()
        report_phase(f"waiting for the batch of step {first_step}")
        log.restart_clock()
        with log.finished_on_error():
            for batch in _batches(run):
                if run.should_stop() or run.schedule.is_done(progress):
                    break
                for callback in callbacks:
                    callback.on_step_begin(run, progress.step + 1)
                started = _start_step(run, batch, log)
                if started is not None:
                    log.add(started)
                report_phase(f"waiting for the other ranks after step {progress.step}")
                run.request_save_if_due()
                run.sync_stop_request()
                if started is None:
                    continue
                is_due = _is_due(run, batch.samples)
                is_first = progress.step == first_step
                if is_due or is_first or not log.is_delayed:
                    log.read()
                    if is_first:
                        _log_startup(run)
                        stack.enter_context(keep_freed_memory(run.device))
                    _validate_log_save(run, log)
                    log.restart_clock()
                if is_due:
                    # That may have taken long: a signal must not wait for another step.
                    run.sync_stop_request()
                if progress.step % COLLECT_EVERY == 0:
                    gc.collect(1)
                report_phase(f"waiting for the batch of step {progress.step + 1}")
        log.finish()
        run.sync_stop_request()
        if run.stop_request.signal is not None:
            _save_and_raise(run, log)
    for callback in callbacks:
        callback.on_end(run)
    stopped = run.stop_request.reason or run.early_stop_reason
    if run.stop_request.reason is not None:
        run.console.info(f"stopped after step {progress.step}: {stopped}")
    return TrainResult(progress.step, run.checkpoint, log.metrics.get("loss"), log.metrics.get("val_loss"), stopped)


def _batches(run: Run) -> Iterator[StepBatch]:
    """The batches of the steps that are left. When one is skipped, the data of the run ends later."""
    end: int | None = 0
    while end != run.schedule.total_samples:
        end = run.schedule.total_samples
        batches = run.data.batches(
            run.config, run.progress.samples, end, run.ctx.dp_rank, run.ctx.dims.dp,
            pin_memory=run.device.type == "cuda",
        )  # fmt: skip
        for batch in batches:
            yield batch
            if end != run.schedule.total_samples:
                break


def _start_step(run: Run, batch: StepBatch, log: StepLog) -> StartedStep | None:
    """Computes a step, and updates the weights; None if the batch was skipped."""
    progress, optim = run.progress, run.config.optim
    step = progress.step + 1
    report_phase(f"computing step {step}", step)
    run.stop_request.step = step
    lr = lr_at_step(progress.step, run.schedule.total_steps, optim)
    attempts = training_attempts(run, batch)
    while not attempts.is_done:
        with attempts:
            result = compute_gradients(run.runner, attempts.batch, step)
    computed = ComputedStep(step, attempts.batch, result, log.loss_limit(), attempts.rng_states)
    if not log.is_delayed and not judge_step(run, computed):
        return None
    report_phase(f"{UPDATING} {step}")
    max_loss = max_loss_of_update(computed, run.config.debug)
    optimizer_step(run.runner, run.optimizer, result, step, lr, optim.max_grad_norm, max_loss, log.unread_result)
    batch = computed.batch
    progress.step = step
    progress.samples += batch.samples
    progress.tokens += batch.tokens
    progress.loss_tokens += batch.loss_tokens
    osft_error = measure_osft(run.runner, step)
    end, memory, splits = record_event(run.device), memory_bytes(run.device), progress.oom_splits
    return StartedStep(computed, lr, run.epoch, progress.tokens, memory, splits, end, osft_error)


def _log_startup(run: Run) -> None:
    """Logs the seconds of each phase from the start of this process to the end of its first step."""
    phases = end_startup()
    text = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items() if seconds >= 0.05)
    if phases:
        run.console.info(f"{sum(phases.values()):.1f} s from the start to the end of step {run.progress.step}: {text}")


@contextmanager
def _training_session(run: Run, callbacks: Sequence[Callback]) -> Iterator[MetricsFile]:
    metrics_file = _open_metrics(run)
    samples_path = run.output_dir / "samples.jsonl"
    if run.sample_prompts or samples_path.exists():
        # A run without samples also removes those after its checkpoint.
        run.samples_file = _open_lines(run, samples_path)
    run.model.train()
    run.saved_at = time.monotonic()
    run.console.begin(run.schedule.total_steps, run.progress.step)
    # The objects made so far are never garbage. Later ones are collected between steps.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for callback in callbacks:
            callback.on_start(run)
        with (
            handle_stop_signals(run.stop_request),
            translate_out_of_memory(None, run.device, partial(describe_fit, run)),
        ):
            yield metrics_file
    finally:
        gc.enable()
        gc.unfreeze()
        run.console.end()
        metrics_file.close()
        if run.samples_file is not None:
            run.samples_file.close()


def _open_metrics(run: Run) -> MetricsFile:
    path, last_step = run.output_dir / "metrics.jsonl", run.progress.last_logged_step
    file = _open_lines(run, path)
    if file.missing_steps:
        run.console.warn(
            f"{path} lacks {file.missing_steps} of the steps up to {last_step}, after which the run resumes: these "
            "lines are lost"
        )
    return file


def _open_lines(run: Run, path: Path) -> MetricsFile:
    last_step, first_step = run.progress.last_logged_step, run.checkpoint_info.get("metrics_start", 0) + 1
    file = MetricsFile(path, last_step, run.ctx.is_main, first_step)
    if file.removed_lines:
        run.console.info(f"{path.name}: removed {file.removed_lines} lines after step {last_step}")
    if file.moved_to is not None:
        run.console.info(f"{path.name} of an earlier attempt is now {file.moved_to}")
    return file


def _validate_log_save(run: Run, log: StepLog) -> None:
    """After a step: validates if due, writes the metrics line, samples text and saves a checkpoint if due."""
    schedule, progress, metrics, step_samples = run.schedule, run.progress, log.metrics, log.metrics["samples"]
    if run.data.validation and schedule.is_due(schedule.validation, progress, step_samples, _is_final_step(run)):
        try:
            metrics["val_loss"] = validate(run, log.callbacks)
            metrics |= {f"val_loss/{name}": loss for name, loss in run.val_losses.items() if name}
            run.sync_stop_request()
        except ValidationInterruptedError:
            progress.pending_metrics = metrics
            return
    if run.early_stop_reason is not None:
        metrics["stopped"] = run.early_stop_reason
    log.write()
    _log_samples(run)
    if run.early_stop_reason is not None:
        run.console.info(f"stopping early: {run.early_stop_reason}")
    is_best = run.config.checkpoint.save_best and progress.best_step == progress.step
    is_due = schedule.is_due(schedule.checkpoint, progress, step_samples, _is_final_step(run))
    if is_due or is_best or run.stop_request.save:
        _save_checkpoint(run, log)


def _is_due(run: Run, step_samples: int) -> bool:
    """Whether anything but the next step comes after this one: validation, samples, a checkpoint, the end."""
    schedule, progress, every = run.schedule, run.progress, run.config.observe.sample_every_steps
    is_final = _is_final_step(run) or run.stop_request.signal is not None
    events = (schedule.validation, schedule.checkpoint)
    return (
        is_final
        or run.stop_request.save
        or (every is not None and progress.step % every == 0)
        or any(schedule.is_due(event, progress, step_samples, is_final) for event in events)
    )


def _log_samples(run: Run) -> None:
    """Lets the model continue its prompts, if due. Nothing of the training state changes."""
    every, step = run.config.observe.sample_every_steps, run.progress.step
    if run.samples_file is None or every is None or step % every:
        return
    report_phase(f"sampling text after step {step}")
    texts = generate_samples(run.runner, run.tokenizer, run.sample_prompts, run.config.observe.sample_tokens)
    for prompt, text in zip(run.sample_prompts, texts, strict=True):
        run.samples_file.write({"step": step, "prompt": prompt.text, "text": text})
        run.console.info(f"sample after step {step}: {prompt.text!r} -> {text!r}")


def _is_final_step(run: Run) -> bool:
    return run.schedule.is_done(run.progress) or run.stop_request.reason is not None


class ValidationInterruptedError(Exception):
    """A signal arrived during validation."""


def validate(run: Run, callbacks: Sequence[Callback] = ()) -> float:
    """Computes the loss of every validation set, and returns that of the first one, which decides."""

    def batches(name: str) -> Iterator[StepBatch]:
        for batch in run.data.validation_batches(name, run.ctx.dp_rank, run.ctx.dims.dp):
            run.sync_stop_request()
            if run.stop_request.signal is not None:
                raise ValidationInterruptedError
            report_phase(f"validating after step {run.progress.step}")
            yield batch

    def forward(name: str, batch: StepBatch) -> Tensor:
        attempts = validation_attempts(run, batch, name)
        while not attempts.is_done:
            with attempts:
                loss = run.runner.forward(attempts.batch.micro_batches)
        return loss

    start_time = time.perf_counter()
    losses = {
        name: validation_loss(run.runner, batches(name), partial(forward, name))[0] for name in run.data.validation
    }
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise NumericalError(
                f"the validation loss{f' of {name}' if name else ''} after step {run.progress.step} is {loss}",
                "resume from an earlier checkpoint with a lower --optim.learning_rate",
            )
    run.val_losses, loss = losses, next(iter(losses.values()))
    run.progress.count_validation(loss)
    for callback in callbacks:
        callback.on_validation(run, loss)
    run.eta.add_validation(time.perf_counter() - start_time)
    return loss


def _save_checkpoint(run: Run, log: StepLog) -> None:
    start_time, root, step = time.perf_counter(), run.output_dir / CHECKPOINTS, run.progress.step
    report_phase(f"saving step {step}")
    # A checkpoint on the disk must not be ahead of the metrics there.
    log.metrics_file.sync()
    if log.metrics_file.is_deleted:
        run.console.warn("metrics.jsonl was removed while the run was writing to it: its lines are lost")
    check_saved_state(step, run.runner, run.optimizer, run.checkpoint)
    is_complete = run.schedule.is_done(run.progress) and run.progress.pending_metrics is None
    state = run.progress.to_dict() | run.checkpoint_info | {"is_complete": is_complete}
    run.checkpoint = save_checkpoint(root, step, run.model, run.tokenizer, run.optimizer, state, run.ctx)
    if run.ctx.is_main:
        # The checkpoint has it.
        remove_limit(run.output_dir)
    mark_best_checkpoint(run)
    keep_last, protected = run.config.checkpoint.keep_last, (run.checkpoint, run.resumed_from)
    removed = prune_checkpoints(root, keep_last, protected, run.console.warn) if run.ctx.is_main else []
    run.console.info(f"saved {run.checkpoint}" + (f", removed steps {removed}" if removed else ""))
    for callback in log.callbacks:
        callback.on_checkpoint(run, run.checkpoint)
    run.eta.add_save(time.perf_counter() - start_time)
    run.saved_at, run.stop_request.local_save, run.stop_request.save = time.monotonic(), False, False


def mark_best_checkpoint(run: Run) -> None:
    """Marks the best checkpoint, unless it is marked already.

    A resumed run does it too: the previous process may have been killed before that, or best.json may be damaged.
    """
    root, step, loss = run.output_dir / CHECKPOINTS, run.progress.best_step, run.progress.best_loss
    if not run.ctx.is_main or step is None or loss is None or not (root / checkpoint_name(step)).is_dir():
        return
    is_damaged = (root / BEST_FILE).exists() and best_step(root, run.console.warn) is None
    is_marked = read_json_or_empty(root / BEST_FILE) == {"step": step, "val_loss": loss}
    if (run.config.checkpoint.save_best or is_damaged) and not is_marked:
        try:
            mark_best(root, step, loss)
        except OSError as error:
            run.console.warn(f"{root / BEST_FILE} could not be written: {error}")


def _save_and_raise(run: Run, log: StepLog) -> NoReturn:
    signal, progress = run.stop_request.signal, run.progress
    assert signal is not None
    if progress.step == 0:
        raise StoppedBySignal(
            f"stopped by {signal.name} before the first step: there is nothing to save", "run the same command to start"
        )
    is_saved = run.checkpoint is not None and run.checkpoint.name == checkpoint_name(progress.step)
    if not is_saved or progress.pending_metrics is not None:
        _save_checkpoint(run, log)
    how_to_resume = "the same command" if run.config.checkpoint.resume != "never" else "--checkpoint.resume auto"
    raise StoppedBySignal(
        f"stopped by {signal.name} after step {progress.step}, saved in {run.checkpoint}",
        f"{how_to_resume} resumes from there",
    )
