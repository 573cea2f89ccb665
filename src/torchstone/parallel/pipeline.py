"""Pipeline parallelism: the layers in stages, one after the other, on torch.distributed.pipelining.

A stage is a decoder that holds a run of the layers; the last one ends in the sum of the token losses, so logits never
leave it. A step's micro-batches flow through the stages by torch's schedules (1F1B, or interleaved with several stages
a rank), each micro-batch being four tensors of one shape. Schedules want equal shapes and enough micro-batches: what is
missing is made of padding, which counts for nothing. That is the price, beside the waiting at both ends of a step:
rows of one step are as long as its longest, and a step has at least as many micro-batches as stages.

A tied embedding is in the first and in the last stage; the two get the sum of their gradients, so they stay the same.
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
from torch.distributed.tensor import DTensor

from torchstone.data.collate import BUCKET, PADDING, MicroBatch
from torchstone.data.formats import IGNORED
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.parallel.mesh import Place

if TYPE_CHECKING:
    # To import it takes a second, which runs without pipelines need not wait.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

# Rows of a step are rounded up to a multiple of this, so that schedules are made for few shapes.
WIDTH = 64
# Each has buffers for all of its micro-batches.
KEPT_SCHEDULES = 8
# The ids, labels, positions and documents of padding; id 0 is in every vocabulary.
NOTHING = (0, IGNORED, 0, PADDING)
# From a module, its inputs and the labels to the sum of the token losses.
MicroLoss = Callable[[nn.Module, Tensor, Tensor, Tensor | None, Tensor], Tensor]


def split_layers(config: DecoderConfig, stages: int, asked: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: those asked for, or such that the slowest stage is as fast as can be.

    A layer costs its parameters, the head its own; to look up an embedding costs nothing.
    """
    depth = config.depth
    if stages > depth:
        raise UsageError(
            f"{stages} pipeline stages are more than the model's {depth} layers",
            f"parallel.pp x stages_per_rank can be at most {depth}",
        )
    if asked and sum(asked) != depth:
        raise UsageError(f"parallel.stage_layers add up to {sum(asked)}, and the model has {depth} layers")
    sizes = list(asked) or _balanced(depth, stages, _head_in_layers(config))
    ends = [sum(sizes[: n + 1]) for n in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _head_in_layers(config: DecoderConfig) -> float:
    attention = config.width * config.head_size * 2 * (config.heads + config.kv_heads)
    layer = attention + (3 if config.gated else 2) * config.width * config.mlp_width
    return config.vocab_size * config.width / layer


def _balanced(depth: int, stages: int, head: float) -> list[int]:
    """At least a layer each; the last has the head as well. Of equally fast splits, the most even one."""
    last = max(1, min(depth - stages + 1, round((depth + head) / stages - head)))
    candidates = [n for n in (last - 1, last, last + 1) if 1 <= n <= depth - stages + 1]
    best = min(candidates, key=lambda n: (max(n + head, -(-(depth - n) // max(1, stages - 1))), -n))
    if stages == 1:
        return [depth]
    each, more = divmod(depth - best, stages - 1)
    return [each + (n < more) for n in range(stages - 1)] + [best]


def stages_of(rank: int, ranks: int, stages: int) -> list[int]:
    """The stages of one rank: every `ranks`-th from its own number on."""
    return list(range(rank, stages, ranks))


class Stage(nn.Module):
    """What one stage computes: features to features, or to the sum of the token losses at the end."""

    def __init__(self, decoder: Decoder, micro_loss: MicroLoss) -> None:
        super().__init__()
        self.decoder, self.micro_loss = decoder, micro_loss

    def forward(self, x: Tensor, positions: Tensor, labels: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        if not self.decoder.is_last:
            return self.decoder(x, positions, doc_ids)
        return torch.stack([self.micro_loss(self.decoder, x, positions, doc_ids, labels)])


class Pipeline:
    """The stages of this rank, and the schedules that run them, one for every shape of micro-batches."""

    def __init__(
        self, stages: dict[int, Stage], total: int, interleaved: bool, place: Place, device: torch.device, shares: int
    ) -> None:
        """Features between two stages are a share of each row, one of `shares`."""
        assert place.mesh is not None
        self.stages, self.total, self.interleaved = stages, total, interleaved
        self.place, self.device, self.shares = place, device, shares
        self.mesh = place.mesh["pp"]
        self._schedules: dict[tuple[int, ...], _PipelineSchedule] = {}
        self._scale = 1.0
        self._found: list[Tensor] = []
        tied = next(iter(stages.values())).decoder.config.tied
        self._ends = _ends(place.mesh) if tied else None

    def losses(self, batches: Sequence[MicroBatch], packed: bool, scale: float | None) -> Tensor:
        """The sum of the token losses of all micro-batches, on ranks with the last stage, and zero on others. With a
        `scale`, the gradients of that sum times it are added to the parameters'."""
        even = level(batches, self.mesh.size(), self.place.layout.tp)
        rows, width = even[0].ids.shape
        ids, labels, positions, doc_ids = (torch.cat(parts).to(self.device) for parts in zip(*even, strict=True))
        inputs = {"positions": positions, "labels": labels} | ({"doc_ids": doc_ids} if packed else {})
        first = (ids,) if 0 in self.stages else ()
        schedule = self._schedule(rows, width, len(even), scale is not None)
        self._found = []
        if scale is None:
            with torch.no_grad():
                schedule.eval(*first, target=labels, **inputs)
        else:
            self._scale = scale
            schedule.step(*first, target=labels, return_outputs=False, **inputs)
            self._sum_tied_gradients()
        return sum(self._found, torch.zeros((), dtype=torch.float64, device=self.device))

    def _schedule(self, rows: int, width: int, count: int, training: bool) -> _PipelineSchedule:
        """Its stages prepare what they need the first time they run, so that validation has schedules of its own."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

        key = (rows, width, count, training)
        if key in self._schedules:
            # The one used last is the last to go.
            self._schedules[key] = self._schedules.pop(key)
        else:
            if len(self._schedules) == KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            made = [self._torch_stage(index, stage, rows, width) for index, stage in self.stages.items()]
            self._schedules[key] = (
                ScheduleInterleaved1F1B(made, count, loss_fn=self._scaled, scale_grads=False)
                if self.interleaved
                else Schedule1F1B(made[0], count, loss_fn=self._scaled, scale_grads=False)
            )
        return self._schedules[key]

    def _torch_stage(self, index: int, stage: Stage, rows: int, width: int) -> PipelineStage:
        """With the shapes of what comes in and goes out, so that torch need not find them out by a step of its own."""
        from torch.distributed.pipelining import PipelineStage

        decoder = stage.decoder
        dtype = decoder.computes_in or next(decoder.parameters()).dtype
        features = torch.empty(
            rows, width // self.shares, decoder.config.width, dtype=dtype, device="meta"
        ).requires_grad_()
        ids = torch.empty(rows, width, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta").requires_grad_()
        return PipelineStage(
            stage, index, self.total, self.device, group=self.mesh.get_group(),
            input_args=ids if decoder.is_first else features, output_args=loss if decoder.is_last else features,
        )  # fmt: skip

    def _scaled(self, loss: Tensor, labels: Tensor) -> Tensor:
        self._found.append(loss.detach().double().sum())
        return loss.sum() * self._scale

    def _sum_tied_gradients(self) -> None:
        """The embedding of the first stage and the head of the last, one matrix, both get the sum of both gradients."""
        if self._ends is None:
            return
        ends = [self.stages[0].decoder.tok_embed] if 0 in self.stages else []
        ends += [self.stages[self.total - 1].decoder.head] if self.total - 1 in self.stages else []
        for end in ends:
            gradient = end.weight.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._ends)


def level(batches: Sequence[MicroBatch], ranks: int, tp: int) -> list[MicroBatch]:
    """Micro-batches of one shape, a multiple of the ranks of them, by adding padding: rows, tokens, whole batches."""
    width = max(batch.ids.shape[1] for batch in batches)
    unit = math.lcm(WIDTH if width > WIDTH else BUCKET, tp)
    width = -(-width // unit) * unit
    rows = max(len(batch.ids) for batch in batches)
    even = [_padded(batch, rows, width) for batch in batches]
    return even + [_nothing_like(even[0])] * (-len(even) % ranks)


def _padded(batch: MicroBatch, rows: int, width: int) -> MicroBatch:
    more = (0, width - batch.ids.shape[1], 0, rows - len(batch.ids))
    return MicroBatch(*(F.pad(tensor, more, value=value) for tensor, value in zip(batch, NOTHING, strict=True)))


def _nothing_like(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(*(torch.full_like(tensor, value) for tensor, value in zip(batch, NOTHING, strict=True)))


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The first and the last rank of this pipeline, for those two; every process has to ask."""
    pairs = list(zip(mesh.mesh[0].flatten().tolist(), mesh.mesh[-1].flatten().tolist(), strict=True))
    group, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in pairs])
    return group
