"""Pipeline parallelism: the layers in stages, on torch.distributed.pipelining.

A stage is a decoder with a range of the layers. The last one computes the sum of the token losses, so logits never
leave it. The micro-batches of a step pass through the stages by torch's schedules: 1F1B, or interleaved with several
stages per rank. Schedules need micro-batches of equal shape, and a multiple of pp of them; the rest is padding. The
cost, besides the bubble at both ends of a step: all rows of a step are as long as its longest one.

A tied embedding is in the first and in the last stage. Both get the sum of their gradients, so they stay identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchstone.data.collate import LENGTH_MULTIPLE, PADDING_DOC_ID, MicroBatch
from torchstone.data.formats import IGNORE_INDEX
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.optim.clip import to_local
from torchstone.parallel.mesh import ParallelContext

if TYPE_CHECKING:
    # Imported where needed: it takes a second.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

# Rows are padded to a multiple of this, so that there are few shapes and few schedules.
PIPELINE_LENGTH_MULTIPLE = 64
# Each schedule has buffers for all of its micro-batches.
MAX_SCHEDULES = 8
# ids, labels, positions and doc_ids of padding.
PADDING_VALUES = (0, IGNORE_INDEX, 0, PADDING_DOC_ID)
# micro_batch_loss of parallel/runner.py.
MicroBatchLoss = Callable[..., Tensor]


def split_layers(config: DecoderConfig, num_stages: int, stage_layers: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: as configured, or such that the slowest stage is as fast as possible.

    The cost of a layer or of the head is its number of parameters; an embedding lookup costs nothing.
    """
    depth = config.depth
    if num_stages > depth:
        raise UsageError(
            f"{num_stages} pipeline stages are more than the model's {depth} layers",
            f"use --parallel.pp (x stages_per_rank) of at most {depth}",
        )
    if stage_layers and sum(stage_layers) != depth:
        raise UsageError(f"parallel.stage_layers adds up to {sum(stage_layers)}, but the model has {depth} layers")
    sizes = list(stage_layers) or _balanced_sizes(depth, num_stages, _head_cost_in_layers(config))
    ends = [sum(sizes[: n + 1]) for n in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _head_cost_in_layers(config: DecoderConfig) -> float:
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    layer = attention + (3 if config.is_gated else 2) * config.width * config.mlp_width
    return config.vocab_size * config.width / layer


def _balanced_sizes(depth: int, num_stages: int, head_cost: float) -> list[int]:
    """At least one layer per stage; the last also has the head. Among equally fast splits, the most even one."""
    if num_stages == 1:
        return [depth]
    estimate = max(1, min(depth - num_stages + 1, round((depth + head_cost) / num_stages - head_cost)))
    candidates = [n for n in (estimate - 1, estimate, estimate + 1) if 1 <= n <= depth - num_stages + 1]
    last = min(candidates, key=lambda n: (max(n + head_cost, -(-(depth - n) // (num_stages - 1))), -n))
    each, remainder = divmod(depth - last, num_stages - 1)
    return [each + (n < remainder) for n in range(num_stages - 1)] + [last]


def stage_indices(pp_rank: int, pp: int, num_stages: int) -> list[int]:
    """The stages of one rank: every pp-th from its own index on."""
    return list(range(pp_rank, num_stages, pp))


class StageModule(nn.Module):
    """What one stage computes: hidden states, or in the last stage the sum of the token losses."""

    def __init__(self, decoder: Decoder, micro_batch_loss: MicroBatchLoss) -> None:
        super().__init__()
        self.decoder, self.micro_batch_loss = decoder, micro_batch_loss
        # What the loss is multiplied by.
        self.grad_scale = 1.0

    def forward(self, x: Tensor, positions: Tensor, labels: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        if not self.decoder.has_head:
            return self.decoder(x, positions, doc_ids)
        loss = self.micro_batch_loss(self.decoder, x, positions, doc_ids, labels, grad_scale=self.grad_scale)
        return torch.stack([loss])


class Pipeline:
    """The stages of this rank, and a schedule for every shape of micro-batches."""

    def __init__(
        self,
        stage_modules: dict[int, StageModule],
        num_stages: int,
        interleaved: bool,
        ctx: ParallelContext,
        device: torch.device,
        sequence_shards: int,
    ) -> None:
        """`sequence_shards`: number of shards, along the sequence, of the hidden states between stages."""
        assert ctx.mesh is not None
        self.stage_modules, self.num_stages, self.interleaved = stage_modules, num_stages, interleaved
        self.ctx, self.device, self.sequence_shards = ctx, device, sequence_shards
        self.mesh = ctx.mesh["pp"]
        self._schedules: dict[tuple[int, ...], _PipelineSchedule] = {}
        self._scale = 1.0
        self._losses: list[Tensor] = []
        tied = next(iter(stage_modules.values())).decoder.config.tied
        self._tied_group = _first_and_last_stage_group(ctx.mesh) if tied else None

    def forward_backward(self, batches: Sequence[MicroBatch], packed: bool, scale: float) -> Tensor:
        """Returns the same as `forward`; accumulates the gradients of that sum times `scale`."""
        self._scale = scale
        for stage in self.stage_modules.values():
            stage.grad_scale = scale
        loss_sum = self._run(batches, packed, is_training=True)
        self._sum_tied_gradients()
        return loss_sum

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch], packed: bool) -> Tensor:
        """The sum of the token losses of all micro-batches on ranks with the last stage, and zero on the others."""
        return self._run(batches, packed, is_training=False)

    def added_padding(self, batches: Sequence[MicroBatch]) -> int:
        """The tokens that equal shapes add to these micro-batches."""
        computed = math.prod(padded_shape(batches, self.mesh.size(), self.ctx.dims.tp))
        return computed - sum(batch.ids.numel() for batch in batches)

    def forget_schedules(self) -> None:
        """Frees the buffers of all shapes so far."""
        self._schedules.clear()

    def _run(self, batches: Sequence[MicroBatch], packed: bool, is_training: bool) -> Tensor:
        # Copied first: the tensors of the loader are pinned, so that nothing waits for the device.
        batches = [batch.to(self.device) for batch in batches]
        batches = pad_to_equal_shapes(batches, self.mesh.size(), self.ctx.dims.tp)
        rows, length = batches[0].ids.shape
        ids, labels, positions, doc_ids = (
            torch.cat(tensors) for tensors in zip(*(batch.tensors for batch in batches), strict=True)
        )
        kwargs = {"positions": positions, "labels": labels} | ({"doc_ids": doc_ids} if packed else {})
        args = (ids,) if 0 in self.stage_modules else ()
        schedule = self._schedule(rows, length, len(batches), is_training)
        self._losses = []
        if is_training:
            schedule.step(*args, target=labels, return_outputs=False, **kwargs)
        else:
            schedule.eval(*args, target=labels, **kwargs)
        return sum(self._losses, torch.zeros((), dtype=torch.float64, device=self.device))

    def _schedule(self, rows: int, length: int, num_micro_batches: int, is_training: bool) -> _PipelineSchedule:
        """The schedule for a shape. Stages set up buffers in the first run, so validation has its own schedules."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

        key = (rows, length, num_micro_batches, is_training)
        if key in self._schedules:
            # Most recently used last.
            self._schedules[key] = self._schedules.pop(key)
        else:
            if len(self._schedules) == MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            stages = [self._torch_stage(index, stage, rows, length) for index, stage in self.stage_modules.items()]
            self._schedules[key] = (
                ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=self._scaled_loss, scale_grads=False)
                if self.interleaved
                else Schedule1F1B(stages[0], num_micro_batches, loss_fn=self._scaled_loss, scale_grads=False)
            )
        return self._schedules[key]

    def _torch_stage(self, index: int, stage: StageModule, rows: int, length: int) -> PipelineStage:
        """Builds a stage with example inputs and outputs; without them torch runs an extra step to infer shapes."""
        from torch.distributed.pipelining import PipelineStage

        decoder = stage.decoder
        dtype = decoder.compute_dtype or next(decoder.parameters()).dtype
        hidden_states = torch.empty(
            rows, length // self.sequence_shards, decoder.config.width, dtype=dtype, device="meta"
        ).requires_grad_()
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta").requires_grad_()
        return PipelineStage(
            stage,
            index,
            self.num_stages,
            self.device,
            group=self.mesh.get_group(),
            input_args=ids if decoder.has_embedding else hidden_states,
            output_args=loss if decoder.has_head else hidden_states,
        )

    def _scaled_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        self._losses.append(loss.detach().double().sum())
        return loss.sum() * self._scale

    def _sum_tied_gradients(self) -> None:
        """Gives the tied embedding of the first stage and head of the last stage the sum of their gradients."""
        if self._tied_group is None:
            return
        modules = [self.stage_modules[0].decoder.tok_embed] if 0 in self.stage_modules else []
        last = self.num_stages - 1
        modules += [self.stage_modules[last].decoder.head] if last in self.stage_modules else []
        for module in modules:
            if not module.weight.requires_grad:
                return
            dist.all_reduce(to_local(module.weight.grad), group=self._tied_group)


def padded_shape(batches: Sequence[MicroBatch], pp: int, tp: int) -> tuple[int, int, int]:
    """The number of micro-batches, their rows, and the length of these, as a pipeline computes them."""
    length = max(batch.ids.shape[1] for batch in batches)
    multiple = math.lcm(PIPELINE_LENGTH_MULTIPLE if length > PIPELINE_LENGTH_MULTIPLE else LENGTH_MULTIPLE, tp)
    rows = max(len(batch.ids) for batch in batches)
    return -(-len(batches) // pp) * pp, rows, -(-length // multiple) * multiple


def pad_to_equal_shapes(batches: Sequence[MicroBatch], pp: int, tp: int) -> list[MicroBatch]:
    """Pads micro-batches to one shape, and their number to a multiple of pp."""
    number, rows, length = padded_shape(batches, pp, tp)
    padded = [_pad(batch, rows, length) for batch in batches]
    return padded + [_padding_like(padded[0])] * (number - len(padded))


def _pad(batch: MicroBatch, rows: int, length: int) -> MicroBatch:
    pad = (0, length - batch.ids.shape[1], 0, rows - len(batch.ids))
    return MicroBatch(
        *(F.pad(tensor, pad, value=value) for tensor, value in zip(batch.tensors, PADDING_VALUES, strict=True))
    )


def _padding_like(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        *(torch.full_like(tensor, value) for tensor, value in zip(batch.tensors, PADDING_VALUES, strict=True))
    )


def _first_and_last_stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of this pipeline's first and last rank. All ranks must call it."""
    pairs = list(zip(mesh.mesh[0].flatten().tolist(), mesh.mesh[-1].flatten().tolist(), strict=True))
    group, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in pairs])
    return group
