"""What a training step needs on a GPU, estimated from the sizes of the model, and which change would make it fit.

The estimate is for the native decoder with compiled or uncompiled blocks: weights, gradients and moments, which are
exact, the activations that the backward pass keeps, one block that is being computed, and the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from torchstone.config.schema import Config, TrainingConfig
from torchstone.data.batch_sizes import BatchSizes
from torchstone.data.loader import RunData
from torchstone.models.decoder import DecoderConfig
from torchstone.models.model import Model, NativeModel
from torchstone.optim.muon import Muon
from torchstone.training.checks import SMALLER_HINT, SMALLER_PRECISION

# What the allocator cannot use, and CUDA's own memory.
USABLE = 0.95


@dataclass(frozen=True)
class StepSizes:
    """What decides the memory of a step on one GPU."""

    config: DecoderConfig
    # Layers, and bytes of weights, gradients and moments, of this rank.
    layers: int
    state_bytes: int
    # Of a micro-batch: one row, or the tokens that share a row, and how many of these.
    row_tokens: int
    rows: int
    itemsize: int
    recompute: str
    is_compiled: bool
    # None: all logits.
    chunk_tokens: int | None

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


def estimate_step_bytes(sizes: StepSizes) -> int:
    kept = sizes.tokens * _kept_per_token(sizes.config, sizes.recompute, sizes.itemsize, sizes.is_compiled)
    block = sizes.tokens * _kept_per_token(sizes.config, "none", sizes.itemsize, sizes.is_compiled)
    return sizes.state_bytes + sizes.layers * kept + max(block, _loss_bytes(sizes))


def _kept_per_token(config: DecoderConfig, recompute: str, itemsize: int, is_compiled: bool) -> int:
    """Bytes that one block keeps of one token for its backward pass."""
    width, mlp, queries, keys, values = config.width, config.mlp_width, *config.qkv_features
    if recompute == "full":
        return itemsize * width
    # Both inputs of the residual stream, queries, keys, values, the output of attention, the MLP's projections.
    elements = 2 * width + 2 * queries + keys + values + 2 * mlp
    if recompute == "selective":
        return itemsize * elements // 2
    if recompute == "none":
        # The outputs of both norms, and what the last projection reads.
        elements += 2 * width + (mlp if config.is_gated else 0)
    # Uncompiled norms keep two fp32 copies of their input.
    return itemsize * elements + (0 if is_compiled else 16 * width)


def _loss_bytes(sizes: StepSizes) -> int:
    vocabulary, width = sizes.config.vocab_size, sizes.config.width
    if sizes.chunk_tokens is None:
        # The logits, their fp32 logarithms and the gradients of both.
        return sizes.tokens * vocabulary * 2 * (sizes.itemsize + 4)
    # A chunk of logits, the head's gradient in fp32, and the gradient of the hidden states.
    return vocabulary * (sizes.chunk_tokens * sizes.itemsize + 4 * width) + sizes.itemsize * sizes.tokens * width


def hint_to_fit(sizes: StepSizes, memory: int, size_flags: Callable[[int], str], smaller_precision: str | None) -> str:
    """The change that would make a step fit into `memory` bytes.

    `size_flags`: the flags for micro-batches of so many rows. `smaller_precision`: one with smaller weights.
    """
    usable = int(USABLE * memory)

    def needs(changed: StepSizes) -> str:
        return f"needs about {estimate_step_bytes(changed) / 2**30:.0f} of {memory / 2**30:.0f} GiB"

    recomputed = replace(sizes, recompute="full")
    if sizes.recompute != "full" and estimate_step_bytes(recomputed) <= usable:
        return f"use --model.recompute full, which {needs(recomputed)}"
    flags = "" if sizes.recompute == "full" else "--model.recompute full and "
    rows = sizes.rows
    while rows > 1:
        rows //= 2
        smaller = replace(recomputed, rows=rows)
        if estimate_step_bytes(smaller) <= usable:
            return f"use {flags}{size_flags(rows)}, which {needs(smaller)}; the global batch stays the same"
    smallest = replace(recomputed, rows=1)
    if sizes.state_bytes > usable:
        precision = "" if smaller_precision is None else f"--training.precision {smaller_precision}, or "
        return (
            f"weights, gradients and moments alone need {sizes.state_bytes / 2**30:.0f} of {memory / 2**30:.0f} GiB: "
            f"use {precision}more GPUs (--parallel.dp_shard shards them)"
        )
    return f"even one row with --model.recompute full {needs(smallest)}: use a shorter --data.context_length"


def describe_fit(model: Model, optimizer: torch.optim.Optimizer, data: RunData, config: Config) -> str:
    """What to change when a step of a run is out of memory."""
    device = next(model.module.parameters()).device
    if not isinstance(model, NativeModel) or device.type != "cuda":
        return SMALLER_HINT
    batch, training, context_length = data.batch_sizes, config.training, config.data.context_length
    if batch.micro_batch_tokens is not None:
        rows = -(-batch.micro_batch_tokens // context_length)
    else:
        rows = min(batch.micro_batch_rows or 1, batch.global_batch_size)
    # Unpacked rows may be shorter than the context.
    row_tokens = context_length if data.packed else min(context_length, int(data.train.lengths.max()))
    dtype = model.module.compute_dtype or next(model.module.parameters()).dtype
    sizes = StepSizes(
        config=model.decoder_config,
        layers=sum(len(part.layers) for part in model.model_parts),
        state_bytes=state_bytes(model, optimizer),
        row_tokens=row_tokens,
        rows=rows,
        itemsize=dtype.itemsize,
        recompute=model.choices["model.recompute"].value,
        is_compiled=model.choices["model.compile"].value != "none",
        # Liger's chunks are small.
        chunk_tokens=0 if model.choices["model.loss"].value == "liger" else model.chunk_tokens,
    )
    memory = torch.cuda.get_device_properties(device).total_memory
    memory = int(memory * torch.cuda.get_per_process_memory_fraction(device))
    flags = partial(size_flags, batch, training, rows, context_length)
    return hint_to_fit(sizes, memory, flags, SMALLER_PRECISION.get(training.precision))


def size_flags(batch: BatchSizes, training: TrainingConfig, rows: int, context_length: int, fewer_rows: int) -> str:
    """The flags that turn micro-batches of `rows` rows into ones of `fewer_rows`, in steps of the same size."""
    if batch.micro_batch_tokens is not None or training.max_tokens_per_gpu is not None:
        size = f"--training.max_tokens_per_gpu {fewer_rows * context_length}"
    else:
        size = f"--training.batch_size {fewer_rows}"
    if training.grad_accum_steps is not None:
        return f"{size} --training.grad_accum_steps {training.grad_accum_steps * rows // fewer_rows}"
    return f"{size} --training.global_batch_size {batch.global_batch_size}"


def state_bytes(model: Model, optimizer: torch.optim.Optimizer) -> int:
    """Of the weights, gradients and moments of this rank, also if they do not exist yet."""
    total, copies = 0, {} if model.master_weights is None else model.master_weights.copies
    for _, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        moments = 1 if isinstance(optimizer, Muon) and local.dim() == 2 else 2
        # The gradient of a single micro-batch has the dtype of the copy.
        copy = copies.get(parameter)
        gradient = local if copy is None else copy
        total += local.nbytes * (1 + moments) + gradient.nbytes + (0 if copy is None else copy.nbytes)
    return total
