"""The optimizer and its parameter groups: with and without weight decay, and with Muon also matrices apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from torchstone.config.schema import OptimConfig
from torchstone.optim.adamw import ADAMW_STATE, AdamW, OptimizerState
from torchstone.optim.muon import MUON_STATE, Muon, ProjectionExchange

NamedParameters = list[tuple[str, nn.Parameter]]
Copies = Mapping[nn.Parameter, nn.Parameter]


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
    exchange: ProjectionExchange | None = None,
    copies: Copies | None = None,
    lr_scales: Mapping[str, float] | None = None,
) -> AdamW | Muon:
    """AdamW, or for `optim.name` muon, Muon for the matrices of `exchange` and AdamW for the rest.

    `lr_scales`: by parameter name, learning rates of AdamW as multiples of that of all others.
    """
    parameters = list(named_parameters)
    if optim.name == "adamw":
        return _build_adamw(parameters, optim, kinds, copies, lr_scales or {})
    assert exchange is not None, "Muon needs whole projections"
    is_matrix = {name: name in exchange.projections for name, _ in parameters}
    adamw = _build_adamw([each for each in parameters if not is_matrix[each[0]]], optim, kinds, copies, {})
    groups = _decay_groups([each for each in parameters if is_matrix[each[0]]], optim, kinds)
    learning_rate = optim.learning_rate if optim.muon_learning_rate is None else optim.muon_learning_rate
    for group in groups:
        group |= {"lr": learning_rate, "momentum": optim.muon_momentum, "adjust_lr_fn": optim.muon_adjust_lr_fn}
        if optim.muon_learning_rate is not None:
            group["lr_scale"] = optim.muon_learning_rate / optim.learning_rate
    projections = {parameter: exchange.projections[name] for name, parameter in parameters if is_matrix[name]}
    return Muon(groups, adamw, projections, exchange)


def state_of(optimizer: AdamW | Muon, parameter: nn.Parameter) -> OptimizerState:
    return MUON_STATE if isinstance(optimizer, Muon) and parameter in optimizer.matrices else ADAMW_STATE


def _build_adamw(
    parameters: NamedParameters,
    optim: OptimConfig,
    kinds: Mapping[str, str],
    copies: Copies | None,
    lr_scales: Mapping[str, float],
) -> AdamW:
    groups = []
    for scale in {1.0: None} | dict.fromkeys(lr_scales.values()):
        scaled = [each for each in parameters if lr_scales.get(each[0], 1.0) == scale]
        groups += [group | {"lr_scale": scale} for group in _decay_groups(scaled, optim, kinds)]
    # A pipeline rank without any is part of the run all the same.
    return AdamW(groups or [{"params": []}], copies, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps)


def _decay_groups(parameters: NamedParameters, optim: OptimConfig, kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """The parameters with and without weight decay; no empty group."""
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in parameters:
        (no_decay if parameter_kind(name, parameter, kinds) in optim.no_decay else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": optim.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
