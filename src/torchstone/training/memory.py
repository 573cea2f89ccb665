"""Which change would make a training step fit on a GPU, by the memory model of parallel/memory_estimate.py.

Weights, gradients and moments are those of the run. The estimate is for the native decoder in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from torchstone.config.schema import TrainingConfig
from torchstone.data.batch_sizes import BatchSizes
from torchstone.heartbeat import current_phase
from torchstone.models.decoder import HEAD
from torchstone.models.model import Model, NativeModel
from torchstone.optim.adamw import AdamW
from torchstone.optim.build import state_of
from torchstone.optim.clip import to_local
from torchstone.optim.muon import Muon
from torchstone.parallel.memory_estimate import StepSizes, estimate_step_bytes
from torchstone.training.checks import SMALLER_PRECISION
from torchstone.training.run import Run
from torchstone.tuning.osft import SubspaceProjection
from torchstone.tuning.plan import LoraPlan
from torchstone.tuning.quantize import QuantizedLinear

# What the allocator cannot use, and CUDA's own memory.
USABLE = 0.95
# The shortest data.context_length that is proposed.
MIN_CONTEXT_LENGTH = 128


def hint_to_fit(
    sizes: StepSizes, memory: int, flags_for_rows: Callable[[int], str], smaller_precision: str | None
) -> str:
    """The change that would make a step fit into `memory` bytes.

    `flags_for_rows`: returns the flags for micro-batches of n rows. `smaller_precision`: one with smaller weights.
    """

    def fits(changed: StepSizes) -> bool:
        return estimate_step_bytes(changed) <= USABLE * memory

    def needs(changed: StepSizes) -> str:
        return f"needs about {estimate_step_bytes(changed) / 2**30:.0f} of {memory / 2**30:.0f} GiB"

    recomputed = replace(sizes, recompute="full")
    if sizes.recompute != "full" and fits(recomputed):
        return f"use --model.recompute full, which {needs(recomputed)}"
    flags = "" if sizes.recompute == "full" else "--model.recompute full and "
    rows = sizes.rows
    while rows > 1:
        rows //= 2
        smaller = replace(recomputed, rows=rows, accumulates=True)
        if fits(smaller):
            return f"use {flags}{flags_for_rows(rows)}, which {needs(smaller)}; the global batch stays the same"
    one_row = replace(recomputed, rows=1, accumulates=recomputed.accumulates or sizes.rows > 1)
    length = sizes.row_tokens
    while length >= 2 * MIN_CONTEXT_LENGTH:
        length //= 2
        if fits(replace(one_row, row_tokens=length)):
            return (
                f"even one row with --model.recompute full {needs(one_row)}: use a shorter --data.context_length, such "
                f"as {length}, in a new run"
            )
    precision = "" if smaller_precision is None else f"--training.precision {smaller_precision} in a new run, or "
    return (
        f"even one short row with --model.recompute full {needs(replace(one_row, row_tokens=length))}, most of it for "
        f"weights, gradients and moments: use {precision}more GPUs (--parallel.dp_shard shards them)"
    )


def describe_fit(run: Run) -> str:
    """What to change when a run is out of memory: on a single GPU what fits, by an estimate, elsewhere what helps."""
    model, device, data, dp = run.model, run.device, run.data, run.ctx.dims.dp
    batch, training, context_length = data.batch_sizes, run.config.training, run.config.data.context_length
    if batch.micro_batch_tokens is not None:
        rows = -(-batch.micro_batch_tokens // context_length)
        accumulates = batch.global_batch_size * data.train.lengths.mean() > dp * batch.micro_batch_tokens
    else:
        assert batch.micro_batch_rows is not None
        rows, accumulates = max(batch.row_counts(dp)), batch.global_batch_size > dp * batch.micro_batch_rows
    flags = partial(size_flags, batch, training, context_length)
    is_estimated = isinstance(model, NativeModel) and device.type == "cuda" and run.ctx.world_size == 1
    if not is_estimated or not current_phase().startswith("computing step"):
        return _what_helps(model, flags(rows // 2) if rows > 1 else None)
    assert isinstance(model, NativeModel)
    # Unpacked rows may be shorter than the context.
    row_tokens = context_length if data.packed else min(context_length, int(data.train.lengths.max()))
    dtype = model.module.compute_dtype or next(model.module.parameters()).dtype
    sizes = StepSizes(
        config=model.decoder_config,
        layers=sum(len(part.layers) for part in model.model_parts),
        state_bytes=state_bytes(model, run.optimizer, run.runner.projection),
        accumulation_bytes=accumulation_bytes(model),
        accumulates=bool(accumulates),
        row_tokens=row_tokens,
        rows=rows,
        itemsize=dtype.itemsize,
        recompute=model.choices["model.recompute"].value,
        is_compiled=model.choices["model.compile"].value != "none",
        # Liger's chunks are small.
        chunk_tokens=0 if model.choices["model.loss"].value == "liger" else model.chunk_tokens,
        gradient_bytes=gradient_bytes(model),
        trains_head=model.tuning is None or model.tuning.is_trained(HEAD),
        has_fused_lora=isinstance(model.tuning, LoraPlan),
    )
    return hint_to_fit(sizes, available_memory(device), flags, SMALLER_PRECISION.get(training.precision))


def _what_helps(model: Model, smaller_flags: str | None) -> str:
    """`smaller_flags`: for smaller micro-batches, if they can be smaller."""
    recompute, loss = model.choices["model.recompute"].value, model.choices["model.loss"].value
    changes = {
        f"{smaller_flags} (the global batch stays the same)": smaller_flags is not None,
        "--model.recompute full": recompute != "full",
        "--model.loss chunked": isinstance(model, NativeModel) and loss == "full",
        "a shorter --data.context_length in a new run": True,
        "a smaller model": True,
    }
    return f"use {', or '.join(change for change, helps in changes.items() if helps)}"


def available_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may have: not those of other processes, nor beyond a limit that is set."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(limit, free + torch.cuda.memory_reserved(device))


def size_flags(batch: BatchSizes, training: TrainingConfig, context_length: int, rows: int) -> str:
    """The flags for micro-batches of `rows` rows, in steps of the same size."""
    if batch.micro_batch_tokens is not None or training.max_tokens_per_gpu is not None:
        size = f"--training.max_tokens_per_gpu {rows * context_length}"
    else:
        size = f"--training.batch_size {rows}"
    # Unless it is unset, it may contradict the two others.
    accumulation = "" if training.grad_accum_steps is None else " --training.grad_accum_steps null"
    return f"{size} --training.global_batch_size {batch.global_batch_size}{accumulation}"


def state_bytes(model: Model, optimizer: AdamW | Muon, projection: SubspaceProjection | None = None) -> int:
    """Of this rank's weights, gradients and moments in a step of one micro-batch, also if they do not exist yet.

    Also of quantized weights, and of the frozen directions of OSFT (`projection`).
    """
    total, copies = 0, {} if model.master_weights is None else model.master_weights.copies
    for _, parameter in model.named_parameters():
        copy = copies.get(parameter)
        if not parameter.requires_grad:
            total += to_local(parameter if copy is None else copy).nbytes
            continue
        moments = len(state_of(optimizer, parameter).moments)
        total += to_local(parameter).nbytes * (1 + moments)
        # A gradient has the dtype that is computed in.
        total += to_local(parameter).nbytes if copy is None else 2 * copy.nbytes
    linears = [module for part in model.model_parts for module in part.modules() if isinstance(module, QuantizedLinear)]
    total += sum(part.nbytes for linear in linears for part in linear.parts)
    return total + (0 if projection is None else projection.nbytes)


def gradient_bytes(model: Model) -> int:
    """How much of `state_bytes` are gradients."""
    copies = {} if model.master_weights is None else model.master_weights.copies
    return sum(to_local(copies.get(parameter, parameter)).nbytes for _, parameter in model.trained_parameters())


def accumulation_bytes(model: Model) -> int:
    """What the sum of several micro-batches' gradients takes beyond the gradients of one."""
    copies = {} if model.master_weights is None else model.master_weights.copies
    return sum(master.nbytes - copy.nbytes for master, copy in copies.items() if master.requires_grad)
