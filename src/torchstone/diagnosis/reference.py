"""The definition of the loss and its gradients, written out: what all checks of losses and gradients compare with.

For each document one forward pass of a row of its own, without packing or padding; labels shifted once, those of -100
left out; the cross-entropies in fp32, summed over all documents and divided by their number. It shares no code with the
loader, the collation, the runner and the losses of the package, only the model, which is `Diagnosis.reference_run`.

Each rank computes every n-th document, and the results are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.data.formats import IGNORE_INDEX
from torchstone.diagnosis.batch_contents import Document
from torchstone.models.model import Model
from torchstone.parallel.mesh import ParallelContext

# The definition, and mistakes to compare with: labels not shifted, shifted twice, or on every token; targets with the
# id of padding left out.
Variant = Literal["right", "not shifted", "shifted twice", "all tokens", "without pad id"]
VARIANTS: tuple[Variant, ...] = ("right", "not shifted", "shifted twice", "all tokens", "without pad id")


@dataclass(frozen=True)
class LossSums:
    """The loss sum of every document and its number of loss tokens, by variant."""

    sums: dict[Variant, np.ndarray]
    counts: dict[Variant, np.ndarray]

    @property
    def loss(self) -> float:
        """The loss of the step."""
        return float(self.sums["right"].sum() / self.counts["right"].sum())


class Reference:
    """Losses and gradients of documents by a model that each rank holds as a whole. All ranks must call its methods
    together."""

    def __init__(self, model: Model, device: torch.device, pad_id: int, ctx: ParallelContext) -> None:
        self.model, self.module, self.device, self.pad_id, self.ctx = model, model.module, device, pad_id, ctx

    @torch.no_grad()
    def losses(self, documents: Sequence[Document]) -> LossSums:
        sums = torch.zeros(len(VARIANTS), len(documents), dtype=torch.float64)
        counts = torch.zeros_like(sums)

        def compute(number: int) -> None:
            document = documents[number]
            logits_TV = compute_logits(self.module, document.ids, self.device)
            for variant, name in enumerate(VARIANTS):
                labels = target_labels(document, name, self.pad_id)
                sums[variant, number] = loss_sum(logits_TV, labels)
                counts[variant, number] = int((labels != IGNORE_INDEX).sum())

        self._distribute(len(documents), compute)
        both = self.ctx.all_reduce_sum(torch.stack([sums, counts])).numpy()
        return LossSums(*(dict(zip(VARIANTS, values, strict=True)) for values in both))

    def gradients(
        self, documents: Sequence[Document], weights: Sequence[float] | np.ndarray, variant: Variant = "right"
    ) -> dict[str, Tensor]:
        """The gradients of the sum over documents of weight x loss sum, by the name of the unfused parameter."""
        trained = dict(self.model.trained_parameters())

        def compute(number: int) -> None:
            labels = target_labels(documents[number], variant, self.pad_id)
            if weights[number] and (labels != IGNORE_INDEX).any():
                loss = loss_sum(compute_logits(self.module, documents[number].ids, self.device), labels)
                (loss * float(weights[number])).backward()

        self._distribute(len(documents), compute)
        gradients = {}
        for name, parameter in trained.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
            if self.ctx.world_size > 1:
                dist.all_reduce(gradient)
            gradients[name] = gradient.cpu()
        return gradients

    def _distribute(self, number: int, compute: Callable[[int], None]) -> None:
        """Calls `compute` for this rank's documents; an error of one rank, such as no memory, is raised on all."""
        error = None
        try:
            for each in range(self.ctx.rank, number, self.ctx.world_size):
                compute(each)
        except Exception as failure:
            error = failure
        self.ctx.raise_on_all_ranks(error)


def compute_logits(module: nn.Module, ids: np.ndarray, device: torch.device) -> Tensor:
    """The logits [T, V] of one document in a row of its own."""
    ids_BT = torch.from_numpy(ids.astype(np.int64))[None].to(device)
    positions_BT = torch.arange(ids_BT.shape[1], device=device)[None]
    return module(ids_BT, positions_BT)[0]


def target_labels(document: Document, variant: Variant, pad_id: int) -> np.ndarray:
    """The token that each position must predict."""
    if variant == "not shifted":
        return document.shifted(0)
    if variant == "shifted twice":
        return document.shifted(2)
    if variant == "all tokens":
        return document._replace(labels=document.ids).shifted(1)
    labels = document.shifted(1)
    return np.where(labels == pad_id, IGNORE_INDEX, labels) if variant == "without pad id" else labels


def loss_sum(logits_TV: Tensor, labels: np.ndarray) -> Tensor:
    """The sum of -log p of the labels that are not -100."""
    kept = torch.from_numpy(labels != IGNORE_INDEX).to(logits_TV.device)
    targets = torch.from_numpy(labels).to(logits_TV.device)[kept]
    return F.cross_entropy(logits_TV.float()[kept], targets, reduction="sum")


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12) if np.isfinite(value) else float("inf")
