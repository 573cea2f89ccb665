"""Whole projections for Muon, in any parallel layout.

The ranks of a pipeline stage share the work. n ranks take n projections at a time: each rank receives one of them from
the others' shards (an all-to-all), orthogonalizes it, and sends every rank its slice of the result (another
all-to-all). So each projection is computed once, on one rank, from the same values as in a single process, and replicas
stay identical. A rank never holds more than one whole projection. Both exchanges are in bf16, which loses nothing: the
iteration begins by rounding to bf16, and returns bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchstone.models.model import Model
from torchstone.models.tensors import slice_at
from torchstone.optim.build import parameter_kind
from torchstone.optim.muon import Projection, orthogonalize
from torchstone.parallel.local_shards import TensorSlice, local_rows
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext


class ShardedProjections:
    """The projections of the model's matrices on this rank and, from all ranks, who holds which slice of them.

    All ranks must create it together.
    """

    def __init__(self, model: Model, ctx: ParallelContext = SINGLE_PROCESS) -> None:
        kinds, own = model.parameter_kinds(), dict[str, TensorSlice]()
        projections: dict[str, list[Projection]] = {}
        for name, parameter in model.named_parameters():
            if parameter_kind(name, parameter, kinds) == "matrix":
                rows = local_rows(model.decoder_config, name, parameter)
                projections[name] = [Projection(s.name, s.shape, slice(r.start, r.stop)) for s, r in rows]
                own |= {each.name: each for each, _ in rows}
        self.projections: Mapping[str, Sequence[Projection]] = projections
        self.batch_size, self.rank, self.group = ctx.world_size // ctx.dims.pp, 0, None
        if self.batch_size == 1:
            return
        assert ctx.mesh is not None
        if ctx.dims.pp > 1:
            self.group, _ = dist.new_subgroups_by_enumeration(ctx.mesh.mesh.flatten(1).tolist())
        self.rank = dist.get_rank(self.group)
        ranks: list[tuple[int, dict[str, TensorSlice]]] = [(0, {})] * self.batch_size
        dist.all_gather_object(ranks, (ctx.mesh["dp_replicate"].get_local_rank(), own), self.group)
        self._replicas = [replica for replica, _ in ranks]
        self._slices = {name: [slices[name] for _, slices in ranks] for name in own}
        self._holders: dict[TensorSlice, list[int]] = {}
        for slices in self._slices.values():
            for rank, each in enumerate(slices):
                self._holders.setdefault(each, []).append(rank)

    def orthogonalize(self, names: Sequence[str], shards: Sequence[Tensor]) -> list[Tensor]:
        """The rank of each projection is its index in `names`."""
        if self.batch_size == 1:
            return [orthogonalize(shard) for shard in shards]
        to_owners = [
            shard if self._source(self._slices[name][self.rank], owner) == self.rank else shard[:0]
            for owner, (name, shard) in enumerate(zip(names, shards, strict=True))
        ]
        slices = self._slices[names[self.rank]] if self.rank < len(names) else []
        sources = [self._source(each, self.rank) == rank for rank, each in enumerate(slices)]
        sizes = [torch.Size(each.size).numel() * is_source for each, is_source in zip(slices, sources, strict=True)]
        received = self._all_to_all(to_owners, sizes, shards[0].device)
        results = list[Tensor]()
        if slices:
            whole = torch.empty(slices[0].shape, dtype=torch.bfloat16, device=shards[0].device)
            for each, values in zip(slices, received, strict=True):
                if values.numel():
                    whole[slice_at(each.offset, each.size)].copy_(values.view(each.size))
            update = orthogonalize(whole)
            results = [update[slice_at(each.offset, each.size)] for each in slices]
        updates = self._all_to_all(results, [shard.numel() for shard in shards], shards[0].device)
        return [update.view_as(shard) for update, shard in zip(updates, shards, strict=False)]

    def _source(self, wanted: TensorSlice, owner: int) -> int:
        """The rank that sends a slice to the owner of its projection: of those that hold it, one of its own replica."""
        return min(self._holders[wanted], key=lambda rank: (self._replicas[rank] != self._replicas[owner], rank))

    def _all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Sends a tensor to every rank, and returns the tensors from every rank, which have `sizes` elements."""
        padding = [0] * self.batch_size
        input_splits = [tensor.numel() for tensor in tensors] + padding[len(tensors) :]
        output_splits = [*sizes, *padding[len(sizes) :]]
        source = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=device), *(each.flatten() for each in tensors)])
        target = torch.empty(sum(output_splits), dtype=torch.bfloat16, device=device)
        dist.all_to_all_single(target, source, output_splits, input_splits, self.group)
        return list(target.split(output_splits))
