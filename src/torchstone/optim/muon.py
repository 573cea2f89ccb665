"""Muon for the matrices of the blocks, beside AdamW for all other parameters.

The arithmetic is that of torch.optim.Muon: Nesterov momentum, orthogonalized by a Newton-Schulz iteration in bf16, and
a learning rate adjusted to the matrix's shape. It is restated here because torch.optim.Muon orthogonalizes parameters,
and this one projections, the whole matrices of the unfused model. Orthogonalizing the shards of a matrix, or q, k and v
as one fused matrix, would be a different optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchstone.optim.adamw import AdamW, OptimizerState
from torchstone.optim.clip import scale_gradients, to_local

MOMENTUM = "momentum_buffer"
MUON_STATE = OptimizerState("Muon", (), (MOMENTUM,))
# torch.optim.Muon's defaults.
NS_COEFFICIENTS, NS_STEPS, NS_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Projection(NamedTuple):
    """Name and shape of a projection, and the rows of a parameter's local tensor that this rank holds of it."""

    name: str
    shape: tuple[int, ...]
    rows: slice


class ProjectionExchange(Protocol):
    """Turns shards into whole projections and back (parallel/projections.py)."""

    # By name of the parameter. A fused parameter has several projections.
    projections: Mapping[str, Sequence[Projection]]
    # How many projections to pass to `orthogonalize` at once.
    batch_size: int

    def orthogonalize(self, names: Sequence[str], shards: Sequence[Tensor]) -> list[Tensor]:
        """Takes this rank's bf16 shards of projections and returns its shards of the orthogonalized projections.

        All ranks that hold a shard of one of them must call it with the same names.
        """


class MatrixShard(NamedTuple):
    """What this rank updates of one projection."""

    projection: Projection
    parameter: nn.Parameter
    group: dict[str, Any]


class Muon(torch.optim.Optimizer):
    """Muon for the parameters of `groups`; `adamw` updates its own. Both have the same `state`."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        adamw: AdamW,
        projections: Mapping[nn.Parameter, Sequence[Projection]],
        exchange: ProjectionExchange,
    ) -> None:
        self.adamw, self.exchange, self.groups = adamw, exchange, list(groups)
        # The groups are shared with AdamW, so a learning rate that is set here is set there.
        super().__init__([*self.groups, *adamw.param_groups], {})
        adamw.state = self.state
        shards = [
            MatrixShard(projection, parameter, group)
            for group in self.groups
            for parameter in group["params"]
            for projection in projections[parameter]
        ]
        # The same order on all ranks. Projections of one batch have equal sizes, and the ranks equal work.
        self.shards = sorted(shards, key=lambda each: (-math.prod(each.projection.shape), each.projection.name))
        self.matrices = frozenset(projections)

    def clip_and_step(self, coefficient: Tensor) -> None:
        """Multiplies the gradients by `coefficient` and updates the parameters; does nothing if it is NaN.

        That waits for the device. Deciding there would take passes over all gradients, weights and updates.
        """
        if coefficient.isfinite():
            scale_gradients((p for group in self.param_groups for p in group["params"]), coefficient)
            self.step()
            self.adamw.update_copies()

    def reset_state(self) -> None:
        """Drops all moments and step counts, including those of AdamW, which share this state."""
        self.adamw.reset_state()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.adamw.step()
        for group in self.groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_momentum(parameter, group)
        shards, size = [each for each in self.shards if each.parameter.grad is not None], self.exchange.batch_size
        for start in range(0, len(shards), size):
            self._update_matrices(shards[start : start + size])
        return loss

    def _update_momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Updates the momentum with the gradient, and decays the weights."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter.grad)
        to_local(state[MOMENTUM]).lerp_(to_local(parameter.grad), 1 - group["momentum"])
        to_local(parameter).mul_(1 - group["lr"] * group["weight_decay"])

    def _update_matrices(self, shards: Sequence[MatrixShard]) -> None:
        names = [each.projection.name for each in shards]
        updates = self.exchange.orthogonalize(names, [self._nesterov(each) for each in shards])
        for (projection, parameter, group), update in zip(shards, updates, strict=True):
            lr = adjust_lr(group["lr"], group["adjust_lr_fn"], projection.shape)
            to_local(parameter)[projection.rows].add_(update, alpha=-lr)

    def _nesterov(self, shard: MatrixShard) -> Tensor:
        """The gradient plus momentum, in bf16 as the Newton-Schulz iteration needs it."""
        projection, parameter, group = shard
        gradient = to_local(parameter.grad)[projection.rows]
        momentum = to_local(self.state[parameter][MOMENTUM])[projection.rows]
        return gradient.lerp(momentum, group["momentum"]).bfloat16()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Moves the singular values of a whole bf16 matrix close to one, by a quintic Newton-Schulz iteration."""
    a, b, c = NS_COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        gram_update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram_update, x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def adjust_lr(lr: float, adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """`original` is Keller Jordan's adjustment; `match_rms_adamw` gives updates the RMS of AdamW's (Moonlight)."""
    rows, columns = shape
    if adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * (0.2 * math.sqrt(max(rows, columns)))
