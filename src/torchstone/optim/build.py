"""AdamW with two parameter groups: with and without weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from torchstone.config.schema import OptimConfig
from torchstone.optim.adamw import AdamW


def parameter_kind(name: str, parameter: nn.Parameter, kinds: Mapping[str, str]) -> str:
    """One of the kinds of `optim.no_decay`. `kinds` has the embeddings and the head, by parameter name."""
    if name.endswith("bias"):
        return "bias"
    if parameter.dim() == 1:
        return "norm"
    return kinds.get(name, "matrix")


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optim: OptimConfig,
    kinds: Mapping[str, str],
    copies: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> AdamW:
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        (no_decay if parameter_kind(name, parameter, kinds) in optim.no_decay else decay).append(parameter)
    groups = [
        {"params": decay, "weight_decay": optim.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    return AdamW(used, copies, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps)
