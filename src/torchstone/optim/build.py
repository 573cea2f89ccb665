"""AdamW over groups of parameters: which decay and which do not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchstone.config.schema import OptimConfig


def kind_of(name: str, parameter: nn.Parameter) -> str:
    """One of the kinds that `optim.no_decay` names. A tied head is the embedding."""
    if name.endswith("bias"):
        return "bias"
    if parameter.dim() == 1:
        return "norm"
    if name.startswith("tok_embed."):
        return "embed"
    return "head" if name.startswith("head.") else "matrix"


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig) -> torch.optim.AdamW:
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in named:
        (kept if kind_of(name, parameter) in optim.no_decay else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.learning_rate,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )
