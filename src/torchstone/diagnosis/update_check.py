"""Is an update what AdamW makes of the gradients: clipped, corrected for bias, decayed, at the right learning rate?

Two steps of the training loop are computed again in fp64 from the gradients that the optimizer got. Adam hardly depends
on the size of gradients, which would hide mistakes in clipping. So they are clipped to a small norm, and eps is as
large as what is then left of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchstone.config.schema import OptimConfig
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.checked_step import SelectedSamples, select_data
from torchstone.diagnosis.optimizer_checks import parameter_kinds
from torchstone.diagnosis.session import CONSTANT_RATE, Diagnosis, end_after
from torchstone.optim.adamw import ADAMW_STATE
from torchstone.optim.build import state_of
from torchstone.optim.clip import to_local
from torchstone.training.loop import train_loop
from torchstone.training.run import Callback, Run

STEPS, LEARNING_RATE, MAX_NORM = 2, 1e-2, 1e-3
# How many values of a tensor are compared on each rank.
MAX_VALUES = 16_384
# Limit for the error of an update beyond the rounding of the weights, relative to its norm. bf16 moments have 8 bits.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
# (norm of all gradients, a tensor's gradient) -> the clipped gradient.
Clip = Callable[[float, Tensor], Tensor]


@dataclass(frozen=True)
class Formula:
    """What a step of AdamW does to a tensor."""

    betas: tuple[float, float]
    eps: float
    decay: float
    # The weight decay of the optimizer's group.
    group_decay: float = 0.0
    clip: Clip = lambda norm, gradient: min(1.0, MAX_NORM / (norm + 1e-6)) * gradient
    rate: float = LEARNING_RATE
    corrects_bias: bool = True
    is_coupled: bool = False


class Update(NamedTuple):
    """Some values of a tensor before and after an update, and of its gradient."""

    before: Tensor
    gradient: Tensor
    after: Tensor


# (what is wrong, the formula that has the mistake)
MISTAKES: Sequence[tuple[str, Callable[[Formula], Formula]]] = (
    ("gradients are not clipped", lambda f: replace(f, clip=lambda norm, g: g)),
    (
        "gradients are clipped by the square of their norm",
        lambda f: replace(f, clip=lambda norm, g: MAX_NORM / norm**2 * g),
    ),
    (
        "gradients are clipped by value, not by norm",
        lambda f: replace(f, clip=lambda norm, g: g.clamp(-MAX_NORM, MAX_NORM)),
    ),
    (
        "each tensor is clipped by its own norm",
        lambda f: replace(f, clip=lambda norm, g: min(1.0, MAX_NORM / (g.norm().item() + 1e-6)) * g),
    ),
    ("the moments are not corrected for their bias", lambda f: replace(f, corrects_bias=False)),
    ("the betas are swapped", lambda f: replace(f, betas=f.betas[::-1])),
    ("weights do not decay", lambda f: replace(f, decay=0.0)),
    ("weight decay is applied twice", lambda f: replace(f, decay=2 * f.decay)),
    ("tensors decay that should not, or the reverse: see weight_decay", lambda f: replace(f, decay=f.group_decay)),
    ("weight decay is added to the gradient (L2), instead of to the update", lambda f: replace(f, is_coupled=True)),
)  # fmt: skip


def check_update(diagnosis: Diagnosis) -> Finding:
    diagnosis.require("batch")
    recorder = record_updates(diagnosis)
    ctx, optim, worst = diagnosis.ctx, diagnosis.config.optim, recorder.worst_error()
    error, name = max(ctx.all_gather_object(worst))
    unmoved = [each for names in ctx.all_gather_object(recorder.unmoved()) for each in names]
    tensors, limit = len(recorder.formulas), LIMITS.get(diagnosis.run.model.dtype, LIMITS[torch.bfloat16])
    if not ctx.any_rank(tensors > 0):
        raise SkipCheck("the optimizer has no tensors for AdamW")
    left = [each for names in ctx.all_gather_object(recorder.left_gradients) for each in names]
    eps = {group["eps"] for group in diagnosis.run.optimizer.param_groups if "eps" in group}
    wrong_eps = [each for values in ctx.all_gather_object(eps) for each in values if each != optim.eps]
    others = sum(1 for _ in diagnosis.run.model.trained_parameters()) - tensors
    unchecked = f"; {others} of Muon are not checked" if others else ""
    text = f"{STEPS} updates of {tensors} tensors agree with AdamW in fp64 to {error:.1e}{unchecked}"
    values = {"error": error, "limit": limit, "tensors": float(tensors)}
    if error <= limit and not left and not wrong_eps:
        return Finding("pass", text, f"{limit:g}", values=values)
    source = "optim/adamw.py, optim/build.py, optim/clip.py, training/step.py: optimizer_step"
    if unmoved and len(unmoved) == sum(ctx.all_gather_object(tensors)):
        cause = "no tensor moves: updates are not applied"
    elif unmoved:
        cause = f"{unmoved[0]} does not move at all: the optimizer does not have it"
    elif left:
        cause = f"gradients of the step before are still there, such as that of {left[0]}: they are never zeroed"
    elif wrong_eps:
        cause = f"the optimizer has eps {wrong_eps[0]:g}, and optim.eps is {optim.eps:g}"
    else:
        errors = {text: ctx.all_gather_object(recorder.worst_error(change)) for text, change in MISTAKES}
        known = [text for text, each in errors.items() if max(each)[0] <= limit] or recorder.explain_factor(limit)
        cause = " or: ".join(known[:2]) or f"no known mistake explains it; {name} is off most"
    text = f"{STEPS} updates of {tensors} tensors differ from AdamW in fp64 by {error:.1%}"
    return Finding("fail", text, f"{limit:g}", cause, source, "compare a step with torch.optim.AdamW", values)


@dataclass
class UpdateRecorder(Callback):
    """The updates of this rank's tensors, and what they should be."""

    run: Run
    formulas: dict[str, Formula]
    updates: list[dict[str, Update]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    # Names of parameters that have a gradient when a step begins.
    left_gradients: list[str] = field(default_factory=list)

    def on_step_begin(self, run: Run, step: int) -> None:
        for name, parameter in run.model.trained_parameters():
            if parameter.grad is not None and bool((to_local(parameter.grad) != 0).any()):
                self.left_gradients.append(name)

    def on_step(self, run: Run, metrics: dict[str, Any]) -> None:
        self.norms.append(metrics["grad_norm"])

    def record(self, clip_and_step: Callable[[Tensor], None], coefficient: Tensor) -> None:
        parameters = {name: p for name, p in self.run.model.trained_parameters() if name in self.formulas}
        before = {name: _values(parameter) for name, parameter in parameters.items()}
        gradients = {name: _values(p.grad) for name, p in parameters.items() if p.grad is not None}
        clip_and_step(coefficient)
        self.updates.append(
            {name: Update(before[name], gradients[name], _values(parameters[name])) for name in gradients}
        )

    def unmoved(self) -> list[str]:
        """The tensors that no update has moved, though each should."""
        eps = torch.finfo(self.run.model.dtype).eps
        return [
            name
            for name, expected in self.expected(lambda formula: formula)
            if all(
                torch.equal(update.after, update.before) and (value - update.before).norm() > eps * update.before.norm()
                for update, value in zip((each[name] for each in self.updates), expected, strict=True)
            )
        ]

    def worst_error(self, change: Callable[[Formula], Formula] = lambda formula: formula) -> tuple[float, str]:
        """The largest error of a tensor, and its name."""
        worst = (0.0, "nothing")
        for name, expected in self.expected(change):
            eps = torch.finfo(self.run.model.dtype).eps
            for update, value in zip((each[name] for each in self.updates), expected, strict=True):
                size, rounding = (value - update.before).norm().item(), eps * update.before.norm().item()
                difference = max(0.0, (update.after - value).norm().item() - rounding)
                error = 0.0 if difference == 0 else difference / max(size, 1e-30)
                worst = max(worst, (error if math.isfinite(error) else math.inf, name))
        return worst

    def expected(self, change: Callable[[Formula], Formula]) -> Iterator[tuple[str, list[Tensor]]]:
        """The values of each tensor after each update by the formula."""
        for name, formula in self.formulas.items():
            updates = [each[name] for each in self.updates if name in each]
            if len(updates) == len(self.updates):
                yield name, apply_adamw(change(formula), updates, self.norms)

    def explain_factor(self, limit: float) -> list[str]:
        """Whether all updates are one multiple of what they should be, on this rank."""
        factors = []
        for name, expected in self.expected(lambda formula: formula):
            for update, value in zip((each[name] for each in self.updates), expected, strict=True):
                right, actual = value - update.before, update.after - update.before
                if right.norm() > 0:
                    factors.append((actual.dot(right) / right.square().sum()).item())
                    if (actual - factors[-1] * right).norm() > 10 * limit * actual.norm():
                        return []
        if not factors or max(factors) - min(factors) > 10 * limit * abs(factors[0]):
            return []
        if abs(factors[0] + 1) <= 10 * limit:
            return ["updates go uphill: they have the wrong sign"]
        return [f"all updates are {factors[0]:.3g} times what they should be: the learning rate is another one"]


def apply_adamw(formula: Formula, updates: Sequence[Update], norms: Sequence[float]) -> list[Tensor]:
    """The values after each update, in fp64; each begins with the values that were there."""
    (beta1, beta2), rate = formula.betas, formula.rate
    first, second = torch.zeros_like(updates[0].before), torch.zeros_like(updates[0].before)
    results = []
    for step, (update, norm) in enumerate(zip(updates, norms, strict=True), 1):
        gradient = formula.clip(norm, update.gradient)
        decay = 0.0 if formula.is_coupled else formula.decay
        gradient = gradient + formula.decay * update.before if formula.is_coupled else gradient
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if formula.corrects_bias else (1.0, 1.0)
        change = (first / bias1) / ((second / bias2).sqrt() + formula.eps)
        results.append(update.before * (1 - rate * decay) - rate * change)
    return results


def record_updates(diagnosis: Diagnosis) -> UpdateRecorder:
    """Trains two steps, each on half of the samples with labels of the checked step."""
    run, step = diagnosis.run, diagnosis.step
    size = max(1, len(step.labelled) // STEPS)
    samples = SelectedSamples(step.data.train, np.resize(step.labelled, STEPS * size))
    data = select_data(step.data, samples, size, step.data.batch_sizes.micro_batch_rows, run.ctx.dims.dp)
    settings = {"optim.learning_rate": LEARNING_RATE, "optim.max_grad_norm": MAX_NORM, **CONSTANT_RATE}
    settings |= end_after(STEPS)
    eps = MAX_NORM / math.sqrt(run.model.parameter_count)
    recorder = UpdateRecorder(run, formulas(run, diagnosis.config.optim, eps))
    with diagnosis.trial(run, data, settings) as trial, _with_eps(run, eps):
        original = run.optimizer.clip_and_step
        run.optimizer.clip_and_step = lambda coefficient: recorder.record(original, coefficient)  # type: ignore[method-assign]
        try:
            train_loop(trial, [recorder])
        finally:
            del run.optimizer.clip_and_step
    return recorder


def formulas(run: Run, optim: OptimConfig, eps: float) -> dict[str, Formula]:
    """The formula of each tensor of this rank that AdamW updates, without the projection of OSFT."""
    kinds = parameter_kinds(run)
    groups = [(parameter, group) for group in run.optimizer.param_groups for parameter in group["params"]]
    scales = {parameter: group.get("lr_scale", 1.0) for parameter, group in groups}
    decays = {parameter: group["weight_decay"] for parameter, group in groups}
    return {
        name: Formula(
            betas=optim.betas,
            eps=eps,
            decay=0.0 if kinds[name] in optim.no_decay else optim.weight_decay,
            group_decay=decays.get(parameter, 0.0),
            rate=LEARNING_RATE * scales.get(parameter, 1.0),
        )
        for name, parameter in run.model.trained_parameters()
        if state_of(run.optimizer, parameter) is ADAMW_STATE
    }


@contextmanager
def _with_eps(run: Run, eps: float) -> Iterator[None]:
    groups = [(group, group["eps"]) for group in run.optimizer.param_groups if "eps" in group]
    try:
        for group, _ in groups:
            group["eps"] = eps
        yield
    finally:
        for group, value in groups:
            group["eps"] = value


def _values(tensor: Tensor | None) -> Tensor:
    """Some values of this rank's shard, spread over it."""
    values = to_local(tensor).detach().flatten()
    return values[:: max(1, len(values) // MAX_VALUES)].double().cpu()
