"""The protocol by which Torchstone is compared with Transformers and torch.optim, and its limits.

Adam turns rounding noise on near-zero gradients into steps of full size, so "weights equal after N steps" says little
by itself. Two forms are used:

- step-locked: before each step both sides get the reference's weights and moments. Then only one step's arithmetic
  differs, and loss, gradient norm and every gradient are compared;
- free-running: both sides go their own way from the same start, with an eps that keeps Adam from amplifying noise.

The reference is written out here in plain torch: Transformers' model, one padded batch per micro-batch, the loss as a
sum over the global count, `clip_grad_norm_`, `torch.optim.AdamW`. Nothing of the package is used in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_LIMIT = 1e-6
NORM_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-5
ZERO_LIMIT = 1e-8
FREE_LOSS_LIMIT = 2e-6
FREE_WEIGHT_LIMIT = 5e-6
# Soft caps differ between Transformers' own backends by more than the rest.
CAPPED_LOSS_LIMIT = 2e-5
CAPPED_WEIGHT_LIMIT = 1e-4
LONG_LOSS_LIMIT = 1e-5

FREE_RUNNING = {"steps": 5, "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
LONG_RUNNING = {"steps": 50, "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}

# A sequence: its ids and its labels as Transformers has them.
Sequence = tuple[list[int], list[int]]
MicroBatches = list[list[Sequence]]


@dataclass
class StepNumbers:
    """Loss, norm before clipping, and the gradients as the optimizer gets them, after clipping."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


# One optimizer step of a side under test: takes the micro-batches, returns the numbers with Transformers' names.
OurStep = Callable[[MicroBatches], StepNumbers]


def random_batches(
    count: int, vocabulary: int, seed: int, accumulation: int = 4, longest: int = 24
) -> list[MicroBatches]:
    """Steps of `accumulation` micro-batches with uneven sizes, lengths and loss tokens; one micro-batch has none."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        micro_batches = []
        for number in range(accumulation):
            sequences = []
            for _ in range(int(rng.integers(1, 4))):
                ids = rng.integers(0, vocabulary, int(rng.integers(2, longest))).tolist()
                keep = rng.random(len(ids)) < (0.0 if number == 2 else rng.uniform(0.2, 1.0))
                sequences.append((ids, [i if k else -100 for i, k in zip(ids, keep, strict=True)]))
            micro_batches.append(sequences)
        steps.append(micro_batches)
    return steps


class Reference:
    """Transformers and torch.optim in a plain loop."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, alone: bool = False
    ) -> None:
        """With `alone` every sequence is its own batch, for models in which a row depends on its neighbours' length."""
        self.model, self.optimizer, self.max_norm, self.alone = model, optimizer, max_norm, alone

    def step(self, micro_batches: MicroBatches) -> StepNumbers:
        if self.alone:
            micro_batches = [[sequence] for batch in micro_batches for sequence in batch]
        count = sum(label != -100 for batch in micro_batches for _, labels in batch for label in labels[1:])
        self.optimizer.zero_grad()
        total = 0.0
        for sequences in micro_batches:
            longest = max(len(ids) for ids, _ in sequences)
            ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in sequences])
            labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in sequences])
            mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in sequences])
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
            )
            loss = losses.sum() / count
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        return StepNumbers(total, norm.item(), gradients)


def reference_adamw(model: nn.Module, weight_decay: float, **settings: Any) -> torch.optim.AdamW:
    """AdamW without decay on what has one dimension and on embeddings: the package's default, written out."""
    embeddings = ("embed_tokens", "transformer.wte", "transformer.wpe")
    kept = [p for n, p in model.named_parameters() if p.dim() == 1 or any(word in n for word in embeddings)]
    decayed = [p for p in model.parameters() if all(p is not other for other in kept)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **settings)


@dataclass
class Worst:
    """The largest differences seen, for the documentation's figures. What is not a number is the largest of all."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    weight: float = 0.0

    def see(self, **differences: float) -> None:
        for name, value in differences.items():
            setattr(self, name, max(getattr(self, name), value if math.isfinite(value) else math.inf))


def assert_step_locked(
    reference: Reference,
    ours: OurStep,
    lock: Callable[[Reference], None],
    steps: list[MicroBatches],
    zeros: Collection[str] = (),
) -> Worst:
    """`lock` gives our side the reference's weights and moments. Gradients named in `zeros` are zero by mathematics, so
    that both sides hold rounding alone, and must be next to nothing beside the norm of all gradients."""
    worst = Worst()
    for batches in steps:
        lock(reference)
        got = ours(copy.deepcopy(batches))
        wanted = reference.step(batches)
        assert got.gradients.keys() == wanted.gradients.keys()
        worst.see(loss=relative(got.loss, wanted.loss), norm=relative(got.grad_norm, wanted.grad_norm))
        for name, gradient in wanted.gradients.items():
            if name in zeros:
                assert max(got.gradients[name].norm(), gradient.norm()) <= ZERO_LIMIT * wanted.grad_norm, name
            else:
                worst.see(gradient=distance(got.gradients[name], gradient))
    assert worst.loss <= LOSS_LIMIT, worst
    assert worst.norm <= NORM_LIMIT, worst
    assert worst.gradient <= GRADIENT_LIMIT, worst
    return worst


def assert_free_running(
    reference: Reference,
    ours: OurStep,
    our_weights: Callable[[], dict[str, Tensor]],
    steps: list[MicroBatches],
    loss_limit: float = FREE_LOSS_LIMIT,
    weight_limit: float = FREE_WEIGHT_LIMIT,
) -> Worst:
    worst = Worst()
    for batches in steps:
        got, wanted = ours(copy.deepcopy(batches)), reference.step(batches)
        worst.see(loss=relative(got.loss, wanted.loss))
    weights = our_weights()
    for name, parameter in reference.model.named_parameters():
        worst.see(weight=(weights[name] - parameter).abs().max().item())
    assert worst.loss <= loss_limit, worst
    assert worst.weight <= weight_limit, worst
    return worst


def assert_long_running(reference: Reference, ours: OurStep, steps: list[MicroBatches]) -> Worst:
    worst = Worst()
    for batches in steps:
        got, wanted = ours(copy.deepcopy(batches)), reference.step(batches)
        worst.see(loss=relative(got.loss, wanted.loss))
    assert worst.loss <= LONG_LOSS_LIMIT, worst
    return worst


def relative(got: float, wanted: float) -> float:
    return abs(got - wanted) / abs(wanted) if wanted != 0 else abs(got)


def distance(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over norm; a reference of zeros must be met exactly."""
    difference, norm = (got - wanted).norm().item(), wanted.norm().item()
    return difference / norm if norm != 0 else (math.inf if difference != 0 else 0.0)
