"""Which change would make a training step fit on a GPU, by the memory model of parallel/memory_estimate.py.

Weights, gradients and moments are those of the run. The estimate is for the native decoder, without pipelines. Of
several ranks it knows what each change saves on one of them, but not the buffers of their collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchstone.checkpoint.model_folder import block_linears
from torchstone.config.schema import Config, TrainingConfig
from torchstone.data.batch_sizes import BatchSizes
from torchstone.heartbeat import current_phase
from torchstone.loss.chunked import CPU_CHUNK_TOKENS, MAX_CHUNK_TOKENS
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
from torchstone.tuning.quantize import QuantizedLinear, bytes_per_weight

# What the allocator cannot use, and CUDA's own memory.
USABLE = 0.95
# The phase in which batchsize/probe.py measures steps.
FINDING_BATCH_SIZE = "finding the batch size"
# The phase of the optimizer, whose memory does not depend on micro-batches.
UPDATING = "updating the weights in step"
# The shortest data.context_length that is proposed.
MIN_CONTEXT_LENGTH = 128
# How many changes an error lists, and the numbers of GPUs that it proposes.
MAX_CHANGES, GPU_COUNTS = 3, (2, 4, 8)


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


@dataclass(frozen=True)
class Change:
    """A change that makes a step smaller: what to type, and the sizes of the step with it."""

    text: str
    sizes: StepSizes


def rank_changes(sizes: StepSizes, changes: Iterable[Change], memory: int | None, is_measured: bool = False) -> str:
    """The changes that save most by the estimate, each alone, and what they save; also whether a step then fits into
    `memory` bytes, if that is known. `is_measured`: the error has what a step needs, so the estimate is left out."""
    needed, texts = estimate_step_bytes(sizes), list[str]()
    saved = [(needed - estimate_step_bytes(change.sizes), change.text) for change in changes]
    for size, text in sorted(saved, key=lambda each: -each[0])[:MAX_CHANGES]:
        if size > 0:
            fits = memory is not None and needed - size <= USABLE * memory
            texts.append(f"{len(texts) + 1}. {text} ({size_text(size)} less{', which fits' if fits else ''})")
    needs = "" if is_measured else f"a step needs about {size_text(needed)}; "
    if not texts:
        return f"{needs}use a smaller model"
    return f"{needs}these changes save most: {', '.join(texts)}"


def possible_changes(
    run: Run, sizes: StepSizes, flags_for_rows: Callable[[int], str], memory: int | None
) -> list[Change]:
    """All that may make a step smaller, each alone."""
    config, model = run.config, run.model
    shorter, length = config.data.context_length // 2, min(sizes.row_tokens, config.data.context_length // 2)
    changes = [Change("--model.recompute full", replace(sizes, recompute="full"))]
    if sizes.chunk_tokens is None:
        chunk_tokens = CPU_CHUNK_TOKENS if run.device.type == "cpu" else MAX_CHUNK_TOKENS
        changes.append(Change("--model.loss chunked", replace(sizes, chunk_tokens=min(sizes.tokens, chunk_tokens))))
    if sizes.rows > 1:
        text = f"{flags_for_rows(sizes.rows // 2)} (the global batch stays the same)"
        changes.append(Change(text, replace(sizes, rows=sizes.rows // 2, accumulates=True)))
    if shorter >= MIN_CONTEXT_LENGTH:
        changes.append(Change(f"--data.context_length {shorter} in a new run", replace(sizes, row_tokens=length)))
    changes += [
        Change(f"{text} in a new run", smaller)
        for text, smaller in smaller_states(config, model, sizes, run.runner.projection)
    ]
    if run.device.type == "cuda" and config.tuning.quantize_base == "none" and run.ctx.world_size == 1:
        # Every rank would have all of a quantized base.
        changes.append(_shard(sizes, memory))
    return changes


def smaller_states(
    config: Config, model: Model, sizes: StepSizes, projection: SubspaceProjection | None
) -> Iterator[tuple[str, StepSizes]]:
    """Settings with smaller weights, gradients and moments."""
    precision = SMALLER_PRECISION.get(config.training.precision)
    if precision is not None:
        # A trained weight, its gradients and moments have half the bytes; a frozen one is computed with as it is.
        unchanged = frozen_bytes(model, projection)
        yield (
            f"--training.precision {precision}",
            replace(
                sizes,
                state_bytes=(sizes.state_bytes - unchanged) // 2 + 2 * unchanged // sizes.itemsize,
                gradient_bytes=2 * sizes.gradient_bytes // sizes.itemsize,
                accumulation_bytes=0,
                itemsize=2,
            ),
        )
    if config.tuning.method == "full" and config.model.path is not None:
        # Without the adapters, which are small.
        state = sizes.itemsize * sum(to_local(parameter).numel() for _, parameter in model.named_parameters())
        changed = replace(sizes, state_bytes=state, gradient_bytes=0, accumulation_bytes=0, trains_head=False)
        yield "--tuning.method lora", changed
    if config.tuning.method == "lora" and config.tuning.quantize_base == "none" and sizes.tp == 1:
        frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        linears = block_linears({name: tuple(parameter.shape) for name, parameter in frozen.items()})
        weights = [frozen[f"{linear}.weight"] for linear in linears]
        # Every rank has all of a quantized base.
        quantized = sum(weight.numel() for weight in weights) * bytes_per_weight("nf4")
        saved = int(sum(to_local(weight).numel() for weight in weights) * sizes.itemsize - quantized)
        yield "--tuning.quantize_base nf4", replace(sizes, state_bytes=sizes.state_bytes - saved)


def frozen_bytes(model: Model, projection: SubspaceProjection | None = None) -> int:
    """The part of `state_bytes` without gradients and moments: what is frozen."""
    copies = {} if model.master_weights is None else model.master_weights.copies
    frozen = [copies.get(p, p) for _, p in model.named_parameters() if not p.requires_grad]
    linears = [module for part in model.model_parts for module in part.modules() if isinstance(module, QuantizedLinear)]
    total = sum(to_local(tensor).nbytes for tensor in frozen) + sum(p.nbytes for each in linears for p in each.parts)
    return total + (0 if projection is None else projection.nbytes)


def _shard(sizes: StepSizes, memory: int | None) -> Change:
    """Shards over the fewest of GPU_COUNTS that fit, else over the most."""
    for gpus in GPU_COUNTS:
        keys = ("state_bytes", "gradient_bytes", "accumulation_bytes")
        sharded = replace(sizes, **{key: getattr(sizes, key) // gpus for key in keys})
        change = Change(f"--nproc {gpus} ({gpus} GPUs)", sharded)
        if memory is not None and estimate_step_bytes(sharded) <= USABLE * memory:
            break
    return change


def size_text(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def describe_fit(run: Run, shape: Sequence[int] | None = None, is_measured: bool = False) -> str:
    """What to change when a run is out of memory: what fits or saves most, by an estimate, or elsewhere what may help.

    `shape`: rows and tokens of the micro-batch that did not fit, if it is known. Only on a GPU the memory is known.
    `is_measured`: as in `rank_changes`.
    """
    model, device, data, dp = run.model, run.device, run.data, run.ctx.dims.dp
    batch, training, context_length = data.batch_sizes, run.config.training, run.config.data.context_length
    if batch.micro_batch_tokens is not None:
        rows = -(-batch.micro_batch_tokens // context_length)
        accumulates = batch.global_batch_size * data.train.lengths.mean() > dp * batch.micro_batch_tokens
    else:
        assert batch.micro_batch_rows is not None
        rows, accumulates = max(batch.row_counts(dp)), batch.global_batch_size > dp * batch.micro_batch_rows
    # Unpacked rows may be shorter than the context.
    row_tokens = context_length if data.packed else min(context_length, int(data.train.lengths.max()))
    if shape is not None:
        rows = max(shape[0], math.prod(shape) // context_length)
        row_tokens, accumulates = math.prod(shape) // rows, accumulates or run.micro_batch_limit is not None
    flags = partial(size_flags, batch, training, context_length)
    phase = current_phase()
    is_step = phase.startswith(("computing step", UPDATING, FINDING_BATCH_SIZE))
    if not isinstance(model, NativeModel) or run.ctx.dims.pp > 1 or not is_step:
        return _what_helps(model, flags(rows // 2) if rows > 1 else None)
    sizes = _step_sizes(run, model, rows, row_tokens, bool(accumulates))
    is_alone = run.ctx.world_size == 1
    memory = available_memory(device) if device.type == "cuda" and is_alone else None
    is_measured = is_measured or not is_alone
    if phase.startswith(UPDATING):
        # The update needs no activations.
        sizes = replace(sizes, rows=1, row_tokens=1)
        changes = possible_changes(run, sizes, flags, memory)
        changes = [each for each in changes if each.sizes.state_bytes < sizes.state_bytes]
        return rank_changes(sizes, changes, memory, not is_alone)
    ranking = rank_changes(sizes, possible_changes(run, sizes, flags, memory), memory, is_measured)
    if memory is None:
        return ranking
    return f"{hint_to_fit(sizes, memory, flags, SMALLER_PRECISION.get(training.precision))}; {ranking}"


def _step_sizes(run: Run, model: NativeModel, rows: int, row_tokens: int, accumulates: bool) -> StepSizes:
    dtype = model.module.compute_dtype or next(model.module.parameters()).dtype
    return StepSizes(
        config=model.decoder_config,
        layers=sum(len(part.layers) for part in model.model_parts),
        state_bytes=state_bytes(model, run.optimizer, run.runner.projection),
        accumulation_bytes=accumulation_bytes(model),
        accumulates=accumulates,
        row_tokens=row_tokens,
        rows=rows,
        itemsize=dtype.itemsize,
        recompute=model.choices["model.recompute"].value,
        is_compiled=model.choices["model.compile"].value != "none",
        # Liger's chunks are small.
        chunk_tokens=0 if model.choices["model.loss"].value == "liger" else model.chunk_tokens,
        gradient_bytes=gradient_bytes(model),
        attention=model.choices["model.attention"].value,
        has_mask=run.data.packed or model.decoder_config.min_window is not None,
        trains_head=model.tuning is None or model.tuning.is_trained(HEAD),
        has_fused_lora=isinstance(model.tuning, LoraPlan),
        tp=run.ctx.dims.tp,
        sequence=run.config.parallel.sequence,
    )


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
    """Bytes of this rank's weights, gradients and moments in a step with one micro-batch, whether or not they exist
    yet. Includes quantized weights, and the frozen directions of OSFT (`projection`)."""
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
    """Extra bytes for accumulating the gradients of several micro-batches."""
    copies = {} if model.master_weights is None else model.master_weights.copies
    return sum(master.nbytes - copy.nbytes for master, copy in copies.items() if master.requires_grad)
