"""A layout of a run, and the memory of its fullest rank.

`Job` is what all layouts of a run have in common; it is made once. A `Layout` is what may differ: the sizes of the
mesh, the ZeRO stage, the rows of a micro-batch and activation checkpointing. Estimating one takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchstone.batchsize.gpus import Gpu
from torchstone.batchsize.meta_model import MetaModel
from torchstone.batchsize.rank_state import ModelState
from torchstone.config.schema import Config, ParallelConfig, resolve_stages_per_rank
from torchstone.models.decoder import HEAD
from torchstone.models.execution import Recompute
from torchstone.parallel.build import stage_layer_ranges
from torchstone.parallel.fsdp import COMPUTE_DTYPE
from torchstone.parallel.memory_estimate import StepMemory, StepSizes, estimate_step
from torchstone.parallel.mesh import ParallelDims
from torchstone.parallel.pipeline import stage_indices
from torchstone.tuning.fused_lora import MAX_RANK
from torchstone.tuning.plan import LoraPlan


@dataclass(frozen=True)
class Job:
    """`step_tokens` are those of an optimizer step, `row_tokens` those of a row in memory."""

    config: Config
    model: MetaModel
    state: ModelState
    gpu: Gpu
    compile: str
    attention: str
    chunk_tokens: int | None
    row_tokens: int
    step_tokens: float
    # The mean length of a token's document.
    mean_length: float
    # The rows of a micro-batch may not exceed the rows of a step.
    step_rows: int
    shares_rows: bool
    # The memory of a rank, at most auto_batch.memory_limit, and the share of it to use.
    memory: int
    usable_share: float

    @property
    def usable(self) -> int:
        return int(self.usable_share * self.memory)

    @property
    def itemsize(self) -> int:
        return COMPUTE_DTYPE[self.config.training.precision].itemsize


@dataclass(frozen=True)
class Layout:
    dims: ParallelDims
    # The settings of the run, with these sizes.
    parallel: ParallelConfig
    rows: int
    recompute: Recompute

    @property
    def stages_per_rank(self) -> int:
        return resolve_stages_per_rank(self.parallel)

    def micro_steps(self, job: Job) -> int:
        """The micro-steps of an optimizer step; in a pipeline a multiple of the pipeline ranks."""
        steps = -(-job.step_rows // (self.rows * self.dims.dp))
        return -(-steps // self.dims.pp) * self.dims.pp

    def busiest_share(self, job: Job) -> float:
        """The share of a step's tokens that the data rank with most rows computes; a pipeline computes padding, too."""
        rows = -(-job.step_rows // self.dims.dp)
        return (rows if self.dims.pp == 1 else self.micro_steps(job) * self.rows) / job.step_rows

    def in_flight(self, job: Job, pp_rank: int) -> float:
        """The micro-batches whose activations a rank keeps, in units of all its layers."""
        steps, ranks_after, stages = self.micro_steps(job), self.dims.pp - 1 - pp_rank, self.stages_per_rank
        if stages == 1:
            return min(steps, ranks_after + 1)
        return min(steps * stages, (stages - 1) * self.dims.pp + 2 * ranks_after + 1) / stages

    def flags(self, job: Job) -> str:
        """What to type, with the same global batch."""
        dims, config = self.dims, job.config
        sizes = {f"parallel.{name}": getattr(dims, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
        flags = {key: size for key, size in sizes.items() if size > 1 or key == "parallel.dp_shard"}
        flags |= {"parallel.zero": self.parallel.zero} if self.parallel.zero != 3 and dims.dp_shard > 1 else {}
        size = self.rows * job.row_tokens if job.shares_rows else self.rows
        flags["training.max_tokens_per_gpu" if job.shares_rows else "training.batch_size"] = size
        flags["model.recompute"] = self.recompute
        return " ".join(f"--{key} {value}" for key, value in flags.items()) + (
            "" if config.training.grad_accum_steps is None else " --training.grad_accum_steps null"
        )


def stage_ranks(job: Job, layout: Layout) -> Iterator[tuple[int, list[range]]]:
    """Every pipeline rank with the layers of its stages. Raises UsageError if the model does not allow the layout."""
    ranges = stage_layer_ranges(job.model.config, layout.dims, layout.parallel)
    for rank in range(layout.dims.pp):
        yield rank, [ranges[index] for index in stage_indices(rank, layout.dims.pp, len(ranges))]


def estimate_layout(job: Job, layout: Layout) -> StepMemory:
    """The memory of the rank that needs most: of balanced pipelines the first, which keeps most micro-batches, or the
    last, which has the head."""
    ends = (0, layout.dims.pp - 1)
    memories = [
        estimate_step(step_sizes(job, layout, rank, stages))
        for rank, stages in stage_ranks(job, layout)
        if rank in ends or layout.parallel.stage_layers
    ]
    return max(memories, key=lambda memory: memory.total)


def fits(job: Job, memory: StepMemory) -> bool:
    """A share is left for what the allocator cannot use, and for CUDA."""
    return memory.total <= job.usable


def step_sizes(job: Job, layout: Layout, pp_rank: int, stages: list[range]) -> StepSizes:
    """`stages`: the layers of this rank's stages."""
    dims, parallel, config, tuning = layout.dims, layout.parallel, job.model.config, job.model.tuning
    rank = job.state.rank_units(dims, parallel, stages)
    root, total = rank.root, rank.total
    micro_steps, in_flight = layout.micro_steps(job), layout.in_flight(job, pp_rank)
    hidden = layout.rows * job.row_tokens * config.width * job.itemsize
    communication = update = 0
    if dims.world_size > 1:
        # One block in use and one on its way; or all.
        blocks = [block.gathered for block in rank.blocks]
        communication = root.gathered + (2 * max(blocks) if parallel.zero == 3 else sum(blocks))
        update = root.reduced
    if dims.tp > 1:
        # Gathered inputs of attention and MLP, or their partial sums.
        communication += 2 * hidden
    if dims.pp > 1:
        # torch has receive buffers for all micro-batches, and keeps the outputs of those in flight.
        ends = 2 * len(stages) - rank.has_embedding - rank.has_head
        shards = dims.tp if parallel.sequence else 1
        communication += int((micro_steps * ends + in_flight * len(stages)) * hidden) // shards
    return StepSizes(
        config=config,
        layers=len(rank.blocks),
        state_bytes=total.weights + total.gradients + total.moments,
        accumulation_bytes=total.accumulation,
        accumulates=micro_steps > 1,
        row_tokens=job.row_tokens,
        rows=layout.rows,
        itemsize=job.itemsize,
        recompute=layout.recompute,
        is_compiled=job.compile != "none",
        chunk_tokens=job.chunk_tokens,
        gradient_bytes=total.gradients,
        optimizer_bytes=total.moments,
        update_bytes=max(total.update, update),
        communication_bytes=communication,
        reduced_bytes=max(block.reduced for block in rank.blocks),
        block_gradient_bytes=max(block.gradients for block in rank.blocks),
        attention=job.attention,
        has_mask=job.config.data.packing or config.min_window is not None,
        has_head=rank.has_head,
        trains_head=tuning is None or tuning.is_trained(HEAD),
        has_fused_lora=_has_fused_lora(job, dims),
        tp=dims.tp,
        sequence=parallel.sequence,
        in_flight=in_flight,
    )


def _has_fused_lora(job: Job, dims: ParallelDims) -> bool:
    """Whether the MLP is computed by tuning/fused_lora.py, which decides in the same way."""
    tuning = job.model.tuning
    if not isinstance(tuning, LoraPlan) or dims.tp > 1 or job.gpu.is_cpu or job.itemsize != 2:
        return False
    adapter, largest = tuning.adapter, max(spec.rank for spec in tuning.adapter.linears.values())
    return not (tuning.frozen or adapter.dropout or adapter.use_dora) and largest <= MAX_RANK


def largest_rows(job: Job, layout: Layout) -> int:
    """The most rows of a micro-batch that fit, at most those of a step; 0 if not even one does."""
    most = -(-job.step_rows // layout.dims.dp)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(job, estimate_layout(job, replace(layout, rows=middle))):
            low = middle
        else:
            high = middle - 1
    return low


def row_counts(job: Job, layout: Layout) -> Iterator[int]:
    """Powers of two, and the rows that each rank has in a step."""
    rows, most = 1, -(-job.step_rows // layout.dims.dp)
    while rows < most:
        yield rows
        rows *= 2
    yield most
