"""Runs micro-batches through a model in any parallel layout; returns loss sums and accumulates gradients.

A loss sum is this rank's share. It is zero on ranks without the last pipeline stage, and on all tp ranks but the first,
because they compute the same sum. The sum over all ranks is the loss sum of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from torchstone.config.schema import ParallelConfig
from torchstone.data.collate import MicroBatch
from torchstone.loss.cross_entropy import token_loss_sum
from torchstone.models.attention import DocumentLimits
from torchstone.models.decoder import Decoder
from torchstone.models.model import Model
from torchstone.parallel.fsdp import reduces_once_per_step, reshard, set_fsdp_sync
from torchstone.parallel.local_shards import is_owner
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelContext
from torchstone.parallel.pipeline import Pipeline
from torchstone.tuning.osft import SubspaceProjection


def micro_batch_loss(
    module: nn.Module,
    x: Tensor,
    positions_BT: Tensor,
    doc_ids_BT: Tensor | None,
    labels_BT: Tensor,
    loss_tokens: int | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """The sum of the token losses of one micro-batch. The logits, the largest tensor of a step, are freed on return;
    a module with a `fused_loss` never has all of them, and none of tokens without a label if it knows `loss_tokens`.

    `grad_scale`: what the sum will be multiplied by, so that its gradients are rounded once."""
    fused_loss = getattr(module, "fused_loss", None)
    if fused_loss is not None:
        return module(
            x,
            positions_BT,
            doc_ids_BT,
            loss_fn=partial(fused_loss, labels_BT=labels_BT, loss_tokens=loss_tokens, grad_scale=grad_scale),
        )
    return token_loss_sum(module(x, positions_BT, doc_ids_BT), labels_BT)


class Runner:
    """A model in its parallel layout. `packed`: whether rows may hold several documents."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        packed: bool,
        ctx: ParallelContext = SINGLE_PROCESS,
        parallel: ParallelConfig | None = None,
        fsdp_roots: Sequence[nn.Module] = (),
        pipeline: Pipeline | None = None,
        longest_document: int = 0,
    ) -> None:
        self.model, self.device, self.packed, self.ctx = model, device, packed, ctx
        self.parallel = parallel or ParallelConfig()
        self.fsdp_roots, self.pipeline = list(fsdp_roots), pipeline
        self._reduces_once = reduces_once_per_step(self.parallel, ctx.dims.dp_shard)
        # The length that no document of the run exceeds, if it is known: one number for compiled code.
        self.longest_document = longest_document
        # Set for OSFT.
        self.projection: SubspaceProjection | None = None
        # The micro-batch that is being computed, or that failed; of a pipeline, the largest one.
        self.running: MicroBatch | None = None

    @cached_property
    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank counts, with their names: a replicated one counts on one rank only."""
        model = self.model
        return [each for each in model.trained_parameters() if is_owner(model.decoder_config, *each)]

    @cached_property
    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that another rank counts."""
        model = self.model
        return [each for each in model.trained_parameters() if not is_owner(model.decoder_config, *each)]

    def forward_backward(self, batches: Sequence[MicroBatch], loss_tokens: int) -> Tensor:
        """Returns this rank's share of the loss sum; accumulates gradients of (sum over all ranks) / `loss_tokens`."""
        with self._document_limits(batches), self._loss_parallel(), self._track_running(batches):
            if self.pipeline is not None:
                return self._own_share(self.pipeline.forward_backward(batches, self.packed, 1.0 / loss_tokens))
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for index, batch in enumerate(batches):
                self.running, is_last = batch, index == len(batches) - 1
                set_fsdp_sync(self.fsdp_roots, is_last, self._reduces_once, self.parallel.zero)
                loss = micro_batch_loss(self.model.module, *self._inputs(batch), grad_scale=1 / loss_tokens)
                (loss / loss_tokens).backward()
                total += loss.detach()
        return self._own_share(total)

    @torch.no_grad()
    def forward(self, batches: Iterable[MicroBatch]) -> Tensor:
        """This rank's share of the loss sum, without gradients."""
        batches = list(batches)
        with self._document_limits(batches), self._loss_parallel(), self._track_running(batches):
            if self.pipeline is not None:
                return self._own_share(self.pipeline.forward(batches, self.packed))
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch in batches:
                self.running = batch
                total += micro_batch_loss(self.model.module, *self._inputs(batch))
        return self._own_share(total)

    @torch.no_grad()
    def greedy_tokens(self, ids_BT: Tensor, positions_BT: Tensor, last_B: Tensor) -> list[int]:
        """The most likely token after position `last_B` of each row. All ranks call it with the same rows.

        Not for pipelines, whose stages return losses.
        """
        module, rows, last_B = self.model.module, torch.arange(len(ids_BT)), last_B.to(self.device)
        inputs = ids_BT.to(self.device), positions_BT.to(self.device)

        def last_logits(x_BTD: Tensor, _: Tensor) -> Tensor:
            """Only those of `last_B`: the logits of all positions could fill the memory."""
            if not isinstance(x_BTD, DTensor):
                return module.compute_logits(x_BTD[rows, last_B][:, None])
            x_B1D = x_BTD.full_tensor()[rows, last_B][:, None]
            x_B1D = DTensor.from_local(x_B1D, x_BTD.device_mesh, [Replicate()], run_check=False)
            return module.compute_logits(x_B1D).full_tensor()

        # Rows of a new shape would be compiled.
        with torch.compiler.set_stance("force_eager"):
            if isinstance(module, Decoder):
                logits_BV = module(*inputs, loss_fn=last_logits)[:, 0]
            else:
                logits_BV = module(*inputs)[rows, last_B]
        return logits_BV.argmax(dim=-1).tolist()

    def reshard(self) -> None:
        """Call it after `forward`, which leaves some parameters gathered: the optimizer updates only the shards."""
        for root in self.fsdp_roots:
            reshard(root)

    @contextmanager
    def _document_limits(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Tells the decoders what they would otherwise have to ask the device. It holds for these batches only."""
        decoders = [part for part in self.model.model_parts if isinstance(part, Decoder)]
        if self.device.type == "cpu" or self.pipeline is not None:
            # A pipeline adds padding of its own.
            decoders = []
        for decoder in decoders:
            decoder.document_limits = document_limits(batches, self.packed, self.longest_document)
        try:
            yield
        finally:
            for decoder in decoders:
                decoder.document_limits = None

    @contextmanager
    def _track_running(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """`running` stays set after an error in a micro-batch, and only then."""
        self.running = None if self.pipeline is None else max(batches, key=lambda batch: batch.ids.numel())
        yield
        self.running = None

    def _inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int | None]:
        # gloo aborts the process if the ranks' shards of a row have different lengths.
        assert batch.ids.shape[1] % self.ctx.dims.tp == 0, "the row length is not a multiple of parallel.tp"
        # Not counted on a GPU: that would wait for the device.
        loss_tokens = None if batch.counts is None and batch.labels.is_cuda else batch.get_counts().loss_tokens
        batch = batch.to(self.device)
        return batch.ids, batch.positions, batch.doc_ids if self.packed else None, batch.labels, loss_tokens

    def _own_share(self, total: Tensor) -> Tensor:
        return total if self.ctx.tp_rank == 0 else torch.zeros_like(total)

    def _loss_parallel(self) -> AbstractContextManager[None]:
        return loss_parallel() if self.ctx.dims.tp > 1 else nullcontext()


def document_limits(batches: Sequence[MicroBatch], packed: bool, longest_document: int) -> DocumentLimits:
    """Bounds for all documents of `batches`: powers of two, or `longest_document`, so that there are few of them."""
    # Without packing, a row is one document, its padding included.
    sizes = [batch.get_counts()[1:] if packed else tuple(batch.ids.shape) for batch in batches]
    documents, length = (max(numbers) for numbers in zip(*sizes, strict=True))
    return DocumentLimits(
        _power_of_two(documents), longest_document if length <= longest_document else _power_of_two(length)
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
