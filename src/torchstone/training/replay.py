"""Repeats a step to find where its numbers go bad: the first module with finite inputs whose output, or else whose
gradient, is not finite.

Weights, batch and random numbers are those of the step; compiled modules run eagerly. Hooks on every module keep flags
on the device, and one transfer at the end reads them. If a module and one in it are both candidates, the inner one
counts. A replay takes about twice the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import set_checkpoint_early_stop

from torchstone.checkpoint.save import hf_name
from torchstone.data.loader import StepBatch
from torchstone.models.model import Model
from torchstone.optim.clip import to_local
from torchstone.parallel.local_shards import unfused_names
from torchstone.parallel.runner import Runner
from torchstone.rng import set_rng_states

LOSS = "the head or the loss"
KINDS = ("inputs", "outputs", "output gradients", "input gradients")


class Stage(IntEnum):
    """Where a module's numbers go bad, in the order of a step."""

    BAD_WEIGHT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    WEIGHT = 4


STAGE_TEXTS = {
    Stage.BAD_WEIGHT: "its weights are not finite",
    Stage.FORWARD: "its output",
    Stage.LOSS: "its gradient",
    Stage.BACKWARD: "the gradient of its input",
    Stage.WEIGHT: "the gradient of its weight",
}


class Origin(NamedTuple):
    """Where numbers go bad: in which module, and in which micro-batch of which rank (None: not known).

    `order`: of what was computed on that rank, in the forward pass."""

    stage: Stage
    module: str
    micro_batch: int | None
    rank: int
    order: int = 0

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f", micro-batch {self.micro_batch + 1}"
        return f"{self.module}: {STAGE_TEXTS[self.stage]} (rank {self.rank}{where})"


@dataclass(eq=False)
class Call:
    """One call of a module. `flags`, on the device, say whether its tensors are finite; `is_finite` whether all of a
    kind are, once they are read."""

    name: str
    micro_batch: int | None
    parent: Call | None
    # When it began and ended, counted in beginnings and ends.
    start: int
    end: int = 0
    flags: dict[str, list[Tensor]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    is_finite: dict[str, bool] = field(default_factory=dict)


def find_origin(runner: Runner, batch: StepBatch, rng_states: Mapping[str, Tensor]) -> Origin | None:
    """Repeats a step on all ranks, which must call it together, and leaves its gradients. None if all is finite."""
    runner.model.clear_gradients()
    set_rng_states(rng_states, runner.device)
    calls: list[Call] = []
    # Without the early stop, hooks after a module run in recomputation too.
    with torch.compiler.set_stance("force_eager"), set_checkpoint_early_stop(False), _traced(runner, batch, calls):
        loss = runner.forward_backward(batch.micro_batches, batch.loss_tokens)
    return _first_origin(runner, _own_origin(runner, calls, bool(loss.isfinite())))


def module_name(model: Model, name: str) -> str:
    """The name in Transformers: of a container, what the names of its parameters begin with."""
    if name == "head" and model.decoder_config is not None:
        return "lm_head"
    parts = [
        hf_name(model, unfused).split(".")[:-1]
        for parameter_name, parameter in model.named_parameters()
        if parameter_name.startswith(f"{name}.")
        for unfused in unfused_names(model.decoder_config, parameter_name, parameter)
    ]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in same) or name.removeprefix("hf.")


@contextmanager
def _traced(runner: Runner, batch: StepBatch, calls: list[Call]) -> Iterator[None]:
    """Hooks on all modules of this rank, as long as the context is open."""
    stack, counter = list[Call](), count()
    # A pipeline computes all micro-batches in one call.
    indices = {} if runner.pipeline is not None else {id(each): i for i, each in enumerate(batch.micro_batches)}

    def before(name: str, args: Any, kwargs: Any) -> Any:
        call = Call(name, indices.get(id(runner.running)), stack[-1] if stack else None, next(counter))
        call.flags["inputs"] += _flags((args, kwargs))
        calls.append(call)
        stack.append(call)
        return _with_hooks((args, kwargs), call.flags["input gradients"])

    def after(output: Any) -> None:
        call = stack.pop()
        call.end = next(counter)
        call.flags["outputs"] += _flags(output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                _add_hook(tensor, call.flags["output gradients"])

    with ExitStack() as hooks:
        for part in runner.model.model_parts:
            for name, module in part.named_modules():
                pre_hook, hook = _module_hooks(name, before, after)
                hooks.callback(module.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(hook).remove)
        yield


def _module_hooks(
    name: str, before: Callable[[str, Any, Any], Any], after: Callable[[Any], None]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda _, args, kwargs: before(name, args, kwargs), lambda _, args, output: after(output)


def _with_hooks(values: Any, flags: list[Tensor]) -> Any:
    """Views of the tensors in `values`, whose gradients are those of this use of the tensors; `flags` gets theirs."""

    def view(tensor: Tensor) -> Tensor:
        return _add_hook(tensor.view_as(tensor), flags) if tensor.requires_grad else tensor

    return tree_map_only(Tensor, view, values)


def _add_hook(tensor: Tensor, flags: list[Tensor]) -> Tensor:
    tensor.register_hook(lambda gradient: flags.append(_is_finite(gradient)))
    return tensor


def _flags(values: Any) -> list[Tensor]:
    return [_is_finite(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(tensor: Tensor) -> Tensor:
    local = to_local(tensor.detach())
    if not local.numel():
        return torch.ones((), dtype=torch.bool, device=local.device)
    # Without temporary tensors; NaN propagates.
    return torch.stack(local.aminmax()).isfinite().all()


def _own_origin(runner: Runner, calls: list[Call], is_loss_finite: bool) -> Origin | None:
    """The origin that this rank sees."""
    ctx = runner.ctx
    bad_weights = _read_flags(runner, calls)
    forward = [call for call in calls if _loses(call, "inputs", "outputs")]
    if forward:
        return _origin(runner, min(_innermost(forward), key=lambda call: call.end), Stage.FORWARD)
    # Stages without the loss get their gradients from the next one.
    has_loss = ctx.pp_rank == ctx.dims.pp - 1
    reached = [call for call in calls if not call.is_finite["output gradients"]]
    if has_loss and not is_loss_finite:
        return Origin(Stage.LOSS, LOSS, min((call.micro_batch or 0 for call in reached), default=None), ctx.rank)
    backward = [call for call in calls if _loses(call, "output gradients", "input gradients")]
    if backward:
        first = min(_innermost(backward), key=lambda call: (call.micro_batch or 0, -call.start))
        return _origin(runner, first, Stage.BACKWARD)
    called, spoiled = {call.name for call in calls}, {call.name for call in reached}
    for name in reversed(bad_weights):
        module = name.rpartition(".")[0]
        while module and module not in called:
            # Its parent uses the weight.
            module = module.rpartition(".")[0]
        if module not in spoiled:
            return Origin(Stage.WEIGHT, module_name(runner.model, module), None, ctx.rank)
    if reached and has_loss:
        return Origin(Stage.LOSS, LOSS, min(call.micro_batch or 0 for call in reached), ctx.rank)
    return None


def _read_flags(runner: Runner, calls: list[Call]) -> list[str]:
    """Sets `is_finite` of the calls; returns the names of the parameters whose gradients are not finite."""
    weights = [(name, parameter) for name, parameter in runner.model.trained_parameters() if parameter.grad is not None]
    gradients = [_is_finite(to_local(parameter.grad)) for _, parameter in weights]
    flags = [flag for call in calls for kind in KINDS for flag in call.flags[kind]] + gradients
    # One transfer from the device.
    values = iter(torch.stack(flags).tolist() if flags else ())
    for call in calls:
        for kind in KINDS:
            # Not all(): it would stop reading at the first False.
            call.is_finite[kind] = sum(next(values) for _ in call.flags[kind]) == len(call.flags[kind])
    return [name for (name, _), is_finite in zip(weights, values, strict=True) if not is_finite]


def _loses(call: Call, before: str, after: str) -> bool:
    return call.is_finite[before] and not call.is_finite[after]


def _innermost(calls: list[Call]) -> list[Call]:
    outer = set()
    for call in calls:
        parent = call.parent
        while parent is not None:
            outer.add(id(parent))
            parent = parent.parent
    return [call for call in calls if id(call) not in outer]


def _origin(runner: Runner, call: Call, stage: Stage) -> Origin:
    name = module_name(runner.model, call.name) if call.name else LOSS
    parameters = [
        parameter
        for part in runner.model.model_parts
        for module_, module in part.named_modules()
        if module_ == call.name
        for parameter in module.parameters(recurse=False)
    ]
    if stage is Stage.FORWARD and not all(_is_finite(parameter).item() for parameter in parameters):
        stage = Stage.BAD_WEIGHT
    order = call.start if stage is Stage.BACKWARD else call.end
    return Origin(stage, name, call.micro_batch, runner.ctx.rank, order)


def _first_origin(runner: Runner, own: Origin | None) -> Origin | None:
    """The first origin over all ranks: the forward pass precedes the backward pass, which begins at the last pipeline
    stage."""
    ctx = runner.ctx
    found = [(origin, pp_rank) for origin, pp_rank in ctx.all_gather_object((own, ctx.pp_rank)) if origin is not None]

    def order(each: tuple[Origin, int]) -> tuple[int, int, int, int, int]:
        origin, pp_rank = each
        # The backward pass begins at the last stage, with the last call.
        sign = 1 if origin.stage in (Stage.BAD_WEIGHT, Stage.FORWARD) else -1
        return origin.stage, sign * pp_rank, origin.micro_batch or 0, sign * origin.order, origin.rank

    return min(found, key=order)[0] if found else None
