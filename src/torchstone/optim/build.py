"""AdamW over groups of parameters: which decay and which do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torchstone.config.schema import OptimConfig

# Of the native decoder; a tied head is the embedding.
NATIVE_ROLES = {"tok_embed.weight": "embed", "pos_embed.weight": "embed", "head.weight": "head"}


def kind_of(name: str, parameter: nn.Parameter, roles: Mapping[str, str]) -> str:
    """One of the kinds that `optim.no_decay` names; `roles` says which parameters are embeddings and which the head."""
    if name.endswith("bias"):
        return "bias"
    if parameter.dim() == 1:
        return "norm"
    return roles.get(name, "matrix")


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig, roles: Mapping[str, str] = NATIVE_ROLES
) -> torch.optim.AdamW:
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in named:
        (kept if kind_of(name, parameter, roles) in optim.no_decay else decayed).append(parameter)
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
