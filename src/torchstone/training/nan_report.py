"""The report of a step with NaN or infinite numbers: which gradients, which module, which rows; the banner; the files.

All ranks take part. Each prints the banner in its own log and writes its own files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchstone.checkpoint.save import hf_name
from torchstone.data.loader import StepBatch
from torchstone.errors import NumericalError, first_line
from torchstone.heartbeat import report_phase
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.runner import Runner
from torchstone.training.checks import WHAT_TO_TRY
from torchstone.training.nan_dump import copy_gradients, write_dump
from torchstone.training.replay import Origin, find_origin
from torchstone.training.run import Run
from torchstone.training.step import StepResult, describe_numbers, non_finite_gradients
from torchstone.training.step_rows import Row, describe_rows, indices_of_step, rows_of_micro_batch, rows_of_step

# A NaN makes nearly all gradients bad: what began it is the first bad module.
MAX_VALUES, MAX_TENSORS, MAX_NAMES = 5, 5, 5
# Elements that are counted at once: the flags of a whole gradient may not fit.
CHUNK = 1 << 24
# No weight of a model that works is larger.
ABSURD_WEIGHT = 1e4
BLOWN_UP = "the last updates blew up the weights: lower --optim.learning_rate"
WIDE, NARROW = "=" * 80, "=" * 40


@dataclass(frozen=True)
class BadTensor:
    """A gradient that is not finite: its Hugging Face name, its shape, what its shards have, and on which ranks."""

    name: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    values: list[str]
    ranks: tuple[int, ...]


class LargestWeight(NamedTuple):
    size: float
    name: str

    def __str__(self) -> str:
        return f"{self.size:.3g} ({self.name})"


@dataclass(frozen=True)
class NanReport:
    """`tensors`: the bad gradients, if they were still there or came again when the step was repeated; `names`: of all
    of them. `origin` is None if it was finite then, or failed (`replay_error`). `rows`: those of the micro-batch in
    which it began, else of the step."""

    step: int
    result: StepResult
    names: list[str]
    tensors: list[BadTensor]
    origin: Origin | None
    replay_error: str | None
    rows: list[Row]
    is_compiled: bool
    largest_weight: LargestWeight

    @property
    def has_blown_up(self) -> bool:
        """Whether updates have made the weights so large that rows and precision do not matter."""
        return self.step > 1 and ABSURD_WEIGHT < self.largest_weight.size < math.inf

    @property
    def kind(self) -> str:
        numbers = (self.result.loss, self.result.grad_norm)
        return "NaN" if any(tensor.nan for tensor in self.tensors) or any(map(math.isnan, numbers)) else "INF"

    @property
    def title(self) -> str:
        what = "GRADIENT" if self.names else "LOSS" if not math.isfinite(self.result.loss) else "GRADIENT NORM"
        return f"{self.kind} {what} DETECTED"

    @property
    def first_bad_module(self) -> str:
        if self.origin is not None:
            return str(self.origin)
        if self.replay_error is not None:
            return f"not known: the step could not be repeated ({self.replay_error})"
        repeated = "all numbers were finite when the step was repeated"
        repeated += " without torch.compile" if self.is_compiled else ""
        if self.names:
            # Backwards, bad numbers spread to the modules before.
            return f"{self.names[-1].rpartition('.')[0]}: the gradient of its weight, but {repeated}"
        return f"not known: {repeated}"


def report_nan(
    run: Run, step: int, batch: StepBatch, result: StepResult, rng_states: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """Repeats the step, whose weights are still those before it, prints the banner, writes the files, and returns a
    summary, and what to do if the weights tell. Raises NumericalError if this rank cannot repeat it while others may
    wait for it."""
    report_phase(f"looking for the cause of the NaN in step {step}")
    runner = run.runner
    names, tensors = non_finite_gradients(runner, result), bad_gradients(runner)
    gradients, origin, error, largest = copy_gradients(run, names), None, None, largest_weight(runner)
    run.console.info(f"{describe_numbers(step, result)}: repeating the step to find the first bad module")
    try:
        origin = find_origin(runner, batch, rng_states)
    except Exception as failure:
        # It must not hide the NaN.
        error = first_line(failure)
    can_go_on = error is None or run.ctx.mesh is None
    if can_go_on and not tensors:
        tensors, gradients = bad_gradients(runner), copy_gradients(run, names)
    rows = _rows_of_origin(run, batch, origin) if can_go_on else rows_of_step(run, batch)
    is_compiled = run.model.choices["model.compile"].value != "none"
    report = NanReport(step, result, names, tensors, origin, error, rows, is_compiled, largest)
    for line in [*banner(report, run.console.process), f"Rows: {describe_rows(rows)}", ""]:
        run.console.info(line)
    header = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "bad_gradients": names,
        "first_bad_module": report.first_bad_module,
        "rows": [list(row) for row in rows],
    }
    lines = write_dump(run, header, batch, rng_states, gradients)
    for line in lines:
        run.console.info(line)
    summary = f"first bad module: {report.first_bad_module}{describe_gradients(runner, result, names)}; {lines[-1]}"
    if not can_go_on:
        raise NumericalError(f"{describe_numbers(step, result)}; {summary}", WHAT_TO_TRY)
    # Other rows or another precision would not help.
    return summary, f"the largest weight is {largest}: {BLOWN_UP}" if report.has_blown_up else None


def largest_weight(runner: Runner) -> LargestWeight:
    """The weight of all ranks with the largest magnitude; 0 if there is none. All ranks must call it."""
    model, own = runner.model, [LargestWeight(0.0, "")]
    for name, parameter in model.named_parameters():
        for shard in local_shards(model.decoder_config, name, parameter.detach()):
            if shard.tensor.numel() and shard.tensor.is_floating_point():
                size = torch.stack(shard.tensor.aminmax()).abs().max().item()
                own.append(LargestWeight(size, hf_name(model, shard.name)))
    # NaN, which no comparison orders, counts as the largest.
    return max(runner.ctx.all_gather_object(max(own, key=_order)), key=_order)


def _order(weight: LargestWeight) -> float:
    return math.inf if math.isnan(weight.size) else weight.size


def describe_gradients(runner: Runner, result: StepResult, names: list[str] | None = None) -> str:
    names = non_finite_gradients(runner, result) if names is None else names
    verb = "gradient is" if len(names) == 1 else "gradients are"
    return f"; {len(names)} {verb} not finite, such as {', '.join(names[:3])}" if names else ""


def bad_gradients(runner: Runner) -> list[BadTensor]:
    """The gradients that are not finite now, with the shards of all ranks. All ranks must call it."""
    model, own = runner.model, list[tuple[tuple[int, ...], BadTensor]]()
    for name, parameter in model.trained_parameters():
        for shard in [] if parameter.grad is None else local_shards(model.decoder_config, name, parameter.grad):
            tensor = shard.tensor.detach()
            if not tensor.numel() or torch.stack(tensor.aminmax()).isfinite().all():
                continue
            parts = tensor.flatten().split(CHUNK)
            nan, inf = (sum(int(count(part).sum()) for part in parts) for count in (torch.isnan, torch.isinf))
            values = [_value_text(value) for value in parts[0][:MAX_VALUES].tolist()]
            bad = BadTensor(hf_name(model, shard.name), shard.shape, nan, inf, values, (runner.ctx.rank,))
            own.append((shard.offset, bad))
    # Replicas of a shard are counted once.
    shards: dict[tuple[str, tuple[int, ...]], BadTensor] = {}
    for offset, bad in (each for rank in runner.ctx.all_gather_object(own) for each in rank):
        shards[bad.name, offset] = _merge(shards.get((bad.name, offset)), bad, max)
    merged: dict[str, BadTensor] = {}
    for (name, _), bad in shards.items():
        merged[name] = _merge(merged.get(name), bad, lambda a, b: a + b)
    return list(merged.values())


def banner(report: NanReport, process: str) -> list[str]:
    """The lines to print; `process` is its name, such as `GPU 6`."""
    lines = [
        WIDE, f"{report.title} [{process}]", WIDE,
        f"Step: {report.step}", f"Loss: {report.result.loss:.4f}", f"Gradient Norm: {report.result.grad_norm:.4f}", "",
    ]  # fmt: skip
    if report.names:
        lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW]
        lines += [f"⚠️  Gradients with {report.kind} ({len(report.names)} layers):"]
        for tensor in report.tensors[:MAX_TENSORS]:
            values, size = ", ".join(f"'{value}'" for value in tensor.values), math.prod(tensor.shape)
            lines.append(f"  • {tensor.name} (shape: {torch.Size(tensor.shape)})")
            lines.append(f"    Grad values: [{values}{', ...' if size > len(tensor.values) else ''}]")
            lines.append(f"    NaN count: {tensor.nan}/{size}")
            lines += [f"    Inf count: {tensor.inf}/{size}"] if tensor.inf else []
        lines += [f"  • and {len(report.tensors) - MAX_TENSORS} more"] if len(report.tensors) > MAX_TENSORS else []
        more = ", ..." if len(report.names) > MAX_NAMES else ""
        names = ", ".join(f"'{name}'" for name in report.names[:MAX_NAMES])
        lines += ["", f"Total layers with {report.kind} gradients: {len(report.names)}"]
        lines += [f"Affected layers: [{names}{more}]"]
        ranks = sorted({rank for tensor in report.tensors for rank in tensor.ranks})
        lines += [f"Affected ranks: {ranks}"] if ranks else []
        lines += [NARROW]
    lines += ["", f"First bad module: {report.first_bad_module}", f"Largest weight: {report.largest_weight}"]
    return [*lines, BLOWN_UP.capitalize()] if report.has_blown_up else lines


def _rows_of_origin(run: Run, batch: StepBatch, origin: Origin | None) -> list[Row]:
    if origin is None or origin.micro_batch is None:
        return rows_of_step(run, batch)
    own: list[Row] = []
    if origin.rank == run.ctx.rank:
        own = rows_of_micro_batch(run, run.data.train, indices_of_step(run, batch), batch, origin.micro_batch)
    return list(run.ctx.all_gather_object(own)[origin.rank])


def _merge(first: BadTensor | None, second: BadTensor, join: Callable[[int, int], int]) -> BadTensor:
    if first is None:
        return second
    ranks = (*first.ranks, *second.ranks)
    return replace(first, nan=join(first.nan, second.nan), inf=join(first.inf, second.inf), ranks=ranks)


def _value_text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
