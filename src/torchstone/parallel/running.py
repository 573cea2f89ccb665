"""Runs micro-batches through a model, whatever its layout: losses out, gradients where they belong.

A sum of token losses is this rank's share of the step's; who has none (a rank without the last stage) has zero, and of
ranks that computed the same one (tp) the first gives it. Summed over all ranks it is the step's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from torchstone.config.schema import ParallelConfig
from torchstone.data.collate import MicroBatch
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.model import Model
from torchstone.parallel.mesh import ALONE, Place
from torchstone.parallel.pipeline import Pipeline
from torchstone.parallel.shard import begin_micro_step, put_back, reduces_once


def micro_loss(
    module: nn.Module, x: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor | None, labels_BT: Tensor
) -> Tensor:
    """The sum of one micro-batch's token losses. The logits end here: the largest tensor of a step is not kept; a
    module with a `fused_loss` never has all of them."""
    fused_loss = getattr(module, "fused_loss", None)
    if fused_loss is not None:
        return module(x, positions_BT, doc_ids_BT, finish=partial(fused_loss, labels_BT=labels_BT))
    return token_loss_sum(module(x, positions_BT, doc_ids_BT), labels_BT)


class Runner:
    """A model in its layout. `packed` says whether rows may hold several documents."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        packed: bool,
        place: Place = ALONE,
        parallel: ParallelConfig | None = None,
        roots: Sequence[nn.Module] = (),
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model, self.device, self.packed, self.place = model, device, packed, place
        self.parallel = parallel or ParallelConfig()
        self.roots, self.pipeline = list(roots), pipeline
        self._once = reduces_once(self.parallel, place.layout.dp_shard)

    def backward(self, batches: Sequence[MicroBatch], divisor: int) -> Tensor:
        """This rank's share of the sum of the token losses; the gradients are of the sum over all ranks, divided."""
        with self._loss_where_logits_lie():
            if self.pipeline is not None:
                return self._counted(self.pipeline.losses(batches, self.packed, 1.0 / divisor))
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for number, batch in enumerate(batches):
                begin_micro_step(self.roots, number == len(batches) - 1, self._once, self.parallel.zero)
                loss = self._loss(batch)
                (loss / divisor).backward()
                total += loss.detach()
        return self._counted(total)

    @torch.no_grad()
    def losses(self, batches: Iterable[MicroBatch]) -> Tensor:
        """The same sum without gradients."""
        with self._loss_where_logits_lie():
            if self.pipeline is not None:
                return self._counted(self.pipeline.losses(list(batches), self.packed, None))
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch in batches:
                total += self._loss(batch)
        return self._counted(total)

    def rest(self) -> None:
        """Parameters back in their shards. A forward pass that no backward pass follows leaves some of them whole, and
        those are not the ones that the optimizer knows."""
        for root in self.roots:
            put_back(root)

    def _loss(self, batch: MicroBatch) -> Tensor:
        # Gloo would end the process where ranks have shares of different lengths.
        assert batch.ids.shape[1] % self.place.layout.tp == 0, "rows are not a multiple of parallel.tp"
        batch = batch.to(self.device)
        docs = batch.doc_ids if self.packed else None
        return micro_loss(self.model.module, batch.ids, batch.positions, docs, batch.labels)

    def _counted(self, total: Tensor) -> Tensor:
        return total if self.place.on("tp") == 0 else torch.zeros_like(total)

    def _loss_where_logits_lie(self) -> AbstractContextManager[None]:
        return loss_parallel() if self.place.layout.tp > 1 else nullcontext()
