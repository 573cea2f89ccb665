"""What is known about a step with NaN or infinite numbers: which gradients, which module, which rows; and the banner.

All ranks take part, and all have the same report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchstone.checkpoint.save import hf_name
from torchstone.data.loader import StepBatch
from torchstone.heartbeat import report_phase
from torchstone.parallel.local_shards import local_shards
from torchstone.parallel.runner import Runner
from torchstone.training.nan_dump import Shards, copy_gradients
from torchstone.training.replay import Origin, find_origin
from torchstone.training.run import Run
from torchstone.training.step import StepResult, non_finite_gradients
from torchstone.training.step_rows import Row, indices_of_step, rows_of_micro_batch

MAX_VALUES, MAX_TENSORS, MAX_NAMES = 5, 20, 50
WIDE, NARROW = "=" * 80, "=" * 40


@dataclass(frozen=True)
class BadTensor:
    """A gradient that is not finite: its Hugging Face name and shape, and what its shards have."""

    name: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    numel: int
    values: list[str]


@dataclass(frozen=True)
class NanReport:
    """`tensors`: the bad gradients, if they were still there or came again in the replay; `names`: of all of them.

    `origin` is None if the replay was finite, or failed (`replay_error`). `rows`: those of the micro-batch in which it
    began, else of the whole step on this rank. `gradients`: for the files.
    """

    step: int
    loss: float
    grad_norm: float
    tensors: list[BadTensor]
    names: list[str]
    origin: Origin | None
    replay_error: str | None
    rows: list[Row]
    gradients: Shards

    @property
    def title(self) -> str:
        is_nan = any(tensor.nan for tensor in self.tensors) or math.isnan(self.loss) or math.isnan(self.grad_norm)
        what = "GRADIENT" if self.names else "LOSS" if not math.isfinite(self.loss) else "GRADIENT NORM"
        return f"{'NaN' if is_nan else 'INF'} {what} DETECTED"


def make_report(run: Run, step: int, batch: StepBatch, result: StepResult, rng_states: Sequence[Tensor]) -> NanReport:
    """Repeats the step, whose weights are still those before it. Leaves the bad gradients, if they come again."""
    report_phase(f"looking for the cause of the NaN in step {step}")
    runner = run.runner
    names = non_finite_gradients(runner, result)
    tensors, origin, error = bad_gradients(runner), None, None
    gradients = copy_gradients(run, names)
    try:
        origin = find_origin(runner, batch, rng_states)
    except Exception as failure:
        # The other ranks would wait for this one.
        if run.ctx.mesh is not None:
            raise
        error = next(iter(str(failure).splitlines()), type(failure).__name__)
    if not tensors:
        tensors, gradients = bad_gradients(runner), copy_gradients(run, names)
    indices = indices_of_step(run, batch)
    if origin is None or origin.micro_batch is None:
        rows = run.data.documents(run.data.train, indices, run.ctx.dp_rank, run.ctx.dims.dp)
    else:
        own = None
        if origin.rank == run.ctx.rank:
            own = rows_of_micro_batch(run, run.data.train, indices, batch, origin.micro_batch)
        rows = run.ctx.all_gather_object(own)[origin.rank]
    return NanReport(step, result.loss, result.grad_norm, tensors, names, origin, error, rows, gradients)


def bad_gradients(runner: Runner) -> list[BadTensor]:
    """The gradients that are not finite now, with the shards of all ranks."""
    model, own = runner.model, list[tuple[tuple[int, ...], BadTensor]]()
    for name, parameter in model.trained_parameters():
        if parameter.grad is None:
            continue
        for shard in local_shards(model.decoder_config, name, parameter.grad):
            tensor = shard.tensor.detach()
            if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                values = [_value_text(value) for value in tensor.flatten()[:MAX_VALUES].tolist()]
                bad = BadTensor(hf_name(model, shard.name), shard.shape, nan, inf, tensor.numel(), values)
                own.append((shard.offset, bad))
    merged: dict[str, BadTensor] = {}
    # Replicas of a shard are the same, up to what is wrong: one of them counts.
    shards = {(bad.name, offset): bad for rank in runner.ctx.all_gather_object(own) for offset, bad in rank}
    for bad in shards.values():
        other = merged.setdefault(bad.name, bad)
        if other is not bad:
            counts = (other.nan + bad.nan, other.inf + bad.inf, other.numel + bad.numel)
            merged[bad.name] = BadTensor(bad.name, bad.shape, *counts, other.values)
    return list(merged.values())


def banner(report: NanReport, label: str) -> list[str]:
    """The lines to print; `label` names the process, such as `GPU 6`."""
    lines = [
        WIDE, f"{report.title} [{label}]", WIDE,
        f"Step: {report.step}", f"Loss: {report.loss:.4f}", f"Gradient Norm: {report.grad_norm:.4f}", "",
    ]  # fmt: skip
    if report.names:
        kind = "NaN" if not report.tensors or any(tensor.nan for tensor in report.tensors) else "Inf"
        lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW]
        lines += [f"⚠️  Gradients with {kind} ({len(report.names)} layers):"]
        for tensor in report.tensors[:MAX_TENSORS]:
            values = ", ".join(f"'{value}'" for value in tensor.values)
            lines.append(f"  • {tensor.name} (shape: {torch.Size(tensor.shape)})")
            lines.append(f"    Grad values: [{values}{', ...' if tensor.numel > len(tensor.values) else ''}]")
            lines.append(f"    NaN count: {tensor.nan}/{tensor.numel}")
            lines += [f"    Inf count: {tensor.inf}/{tensor.numel}"] if tensor.inf else []
        lines += [f"  • and {len(report.tensors) - MAX_TENSORS} more"] if len(report.tensors) > MAX_TENSORS else []
        more = ", ..." if len(report.names) > MAX_NAMES else ""
        names = ", ".join(f"'{name}'" for name in report.names[:MAX_NAMES])
        lines += ["", f"Total layers with {kind} gradients: {len(report.names)}", f"Affected layers: [{names}{more}]"]
        lines += [NARROW]
    return [*lines, "", f"First bad module: {describe_origin(report)}"]


def describe_origin(report: NanReport) -> str:
    if report.origin is not None:
        return str(report.origin)
    if report.replay_error is not None:
        return f"not known: the step could not be repeated ({report.replay_error})"
    repeated = "all numbers were finite when the step was repeated without torch.compile"
    if report.names:
        # Backwards, bad numbers spread to the modules before.
        return f"{report.names[-1].rpartition('.')[0]}: the gradient of its weight, but {repeated}"
    return f"not known: {repeated}"


def _value_text(value: float) -> str:
    return (
        "NaN" if math.isnan(value) else "Inf" if value == math.inf else "-Inf" if value == -math.inf else f"{value:.4g}"
    )
