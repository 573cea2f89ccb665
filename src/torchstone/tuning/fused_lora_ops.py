"""The operators of fused_lora.py, and the references of its kernels (fused_lora_kernel.py) in plain torch.

    gate, up, h = lora_project(x, [A_gate; A_up], [W_gate, W_up])     W x of linears with one input, and all A x
    act, h_down = lora_activation(gate, up, h, B_gate, B_up, A_down)  activation(gate + B_gate h) * (up + B_up h), A act
    y           = lora_output(act, h_down, W_down, B_down)            W_down act + B_down h_down

Weights are frozen: only inputs and factors have gradients. The scale of an update is a part of its A. What the backward
pass keeps is the input x, gate and up without their updates, and the small h. Operators are nodes of a compiled graph,
so that its compiler cannot take apart what they do in place.

Shapes: T tokens, D inputs, F columns of the MLP, R ranks. A linear without an adapter has rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.models.decoder import ACTIVATIONS

# (gradient of the result, input) -> gradient of the input.
ACTIVATION_BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
# Of `launch_product`.
MAX_PRODUCT_RANK = 128


def multiply(left_TR: Tensor, right_RD: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right + bias, where R is small."""
    if left_TR.is_cuda and 0 < len(right_RD) <= MAX_PRODUCT_RANK:
        from torchstone.tuning.fused_lora_kernel import launch_product

        return launch_product(left_TR, right_RD, bias)
    return left_TR @ right_RD if bias is None else torch.addmm(bias, left_TR, right_RD)


@torch.library.custom_op("torchstone::lora_project", mutates_args=())
def lora_project(
    x_TD: Tensor,
    lora_A: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
) -> list[Tensor]:
    """The outputs of linears with one input, and x @ lora_A.T, where `lora_A` has the A of all of them.

    All have a bias, or none. Without `lora_Bs` the outputs are those without the updates.
    """
    hidden_TR = x_TD @ lora_A.t()
    all_biases = biases or [None] * len(weights)
    if not lora_Bs:
        return [*(F.linear(x_TD, *linear) for linear in zip(weights, all_biases, strict=True)), hidden_TR]
    hidden = hidden_TR.split([lora_B.shape[1] for lora_B in lora_Bs], dim=1)
    linears = zip(hidden, weights, all_biases, lora_Bs, strict=True)
    return [*(_add_update(x_TD, *linear) for linear in linears), hidden_TR]


def _add_update(x_TD: Tensor, hidden_TR: Tensor, weight: Tensor, bias: Tensor | None, lora_B: Tensor) -> Tensor:
    if not lora_B.shape[1]:
        return F.linear(x_TD, weight, bias)
    return multiply(hidden_TR, lora_B.t(), bias).addmm_(x_TD, weight.t())


@lora_project.register_fake
def _(
    x_TD: Tensor, lora_A: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], lora_Bs: Sequence[Tensor]
) -> list[Tensor]:
    # Not len(x), which would compile a graph for each number of tokens.
    return [x_TD.new_empty(x_TD.shape[0], len(weight)) for weight in (*weights, lora_A)]


@torch.library.custom_op("torchstone::lora_project_backward", mutates_args=())
def lora_project_backward(
    grads: Sequence[Tensor],
    grad_hidden_TR: Tensor | None,
    x_TD: Tensor,
    lora_A: Tensor,
    hidden_TR: Tensor,
    weights: Sequence[Tensor],
    lora_Bs: Sequence[Tensor],
    has_grad_x: bool,
) -> list[Tensor]:
    """The gradients of lora_A, of lora_Bs and, with `has_grad_x`, of x. `grads`: of the outputs.

    `grad_hidden`: only without `lora_Bs`; with them it follows from `grads`.
    """
    grad_Bs = []
    if grad_hidden_TR is None:
        grad_hidden_TR = torch.empty_like(hidden_TR)
        ranks = [lora_B.shape[1] for lora_B in lora_Bs]
        hidden, grad_hidden = hidden_TR.split(ranks, dim=1), grad_hidden_TR.split(ranks, dim=1)
        for grad, each, grad_each, lora_B in zip(grads, hidden, grad_hidden, lora_Bs, strict=True):
            torch.mm(grad, lora_B, out=grad_each)
            grad_Bs.append(grad.t() @ each)
    grad_A = grad_hidden_TR.t() @ x_TD
    if not has_grad_x:
        return [grad_A, *grad_Bs]
    grad_x_TD = multiply(grad_hidden_TR, lora_A)
    for grad, weight in zip(grads, weights, strict=True):
        grad_x_TD.addmm_(grad, weight)
    return [grad_A, *grad_Bs, grad_x_TD]


@lora_project_backward.register_fake
def _(
    grads: Sequence[Tensor], grad_hidden_TR: Tensor | None, x_TD: Tensor, lora_A: Tensor, hidden_TR: Tensor,
    weights: Sequence[Tensor], lora_Bs: Sequence[Tensor], has_grad_x: bool,
) -> list[Tensor]:  # fmt: skip
    like = [lora_A, *lora_Bs, *([x_TD] if has_grad_x else [])]
    return [x.new_empty(x.shape) for x in like]


def _save_project(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_TD, lora_A, weights, biases, lora_Bs = inputs
    ctx.save_for_backward(x_TD, lora_A, output[-1], *weights, *lora_Bs)
    ctx.weights, ctx.biases = len(weights), len(biases)


def _backward_project(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x_TD, lora_A, hidden_TR, *rest = ctx.saved_tensors
    weights, lora_Bs = rest[: ctx.weights], rest[ctx.weights :]
    grad_hidden_TR = None if lora_Bs else grads[-1]
    grad_A, *gradients = lora_project_backward(
        grads[:-1], grad_hidden_TR, x_TD, lora_A, hidden_TR, weights, lora_Bs, ctx.needs_input_grad[0]
    )
    grad_x_TD = gradients[len(lora_Bs)] if ctx.needs_input_grad[0] else None
    return grad_x_TD, grad_A, [None] * ctx.weights, [None] * ctx.biases, gradients[: len(lora_Bs)]


lora_project.register_autograd(_backward_project, setup_context=_save_project)


@torch.library.custom_op("torchstone::lora_activation", mutates_args=())
def lora_activation(
    gate_TF: Tensor,
    up_TF: Tensor,
    hidden_TR: Tensor,
    gate_B: Tensor,
    up_B: Tensor,
    down_A: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """act = activation(gate + hidden @ gate_B.T) * (up + hidden @ up_B.T), and act @ down_A.T.

    `hidden` has the columns of gate and, after them, those of up.
    """
    if gate_TF.is_cuda:
        from torchstone.tuning.fused_lora_kernel import launch_activation

        return launch_activation(gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A, activation)
    return activate(gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A, activation)


def activate(
    gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor, gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The reference of `launch_activation`."""
    gate, up = _add_updates(gate_TF, up_TF, hidden_TR, gate_B, up_B)
    act_TF = (ACTIVATIONS[activation](gate) * up).to(gate_TF.dtype)
    return act_TF, act_TF @ down_A.t()


def _add_updates(gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor, *factors: Tensor) -> list[Tensor]:
    """gate and up with their updates, in fp32 at least."""
    dtype = torch.promote_types(gate_TF.dtype, torch.float32)
    hidden = hidden_TR.to(dtype).split([lora_B.shape[1] for lora_B in factors], dim=1)
    linears = zip((gate_TF, up_TF), hidden, factors, strict=True)
    return [torch.addmm(base.to(dtype), each, lora_B.t().to(dtype)) for base, each, lora_B in linears]


@lora_activation.register_fake
def _(
    gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor, gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_TF), gate_TF.new_empty(gate_TF.shape[0], len(down_A))


@torch.library.custom_op("torchstone::lora_activation_backward", mutates_args=("grad_act_TF",))
def lora_activation_backward(
    grad_act_TF: Tensor,
    grad_down_hidden_TR: Tensor,
    gate_TF: Tensor,
    up_TF: Tensor,
    hidden_TR: Tensor,
    gate_B: Tensor,
    up_B: Tensor,
    down_A: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Overwrites `grad_act` with the gradient of gate; returns those of up, hidden, gate_B, up_B and down_A.

    In place, because these are the largest tensors of a block.
    """
    inputs = grad_act_TF, grad_down_hidden_TR, gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A, activation
    if gate_TF.is_cuda:
        from torchstone.tuning.fused_lora_kernel import launch_activation_backward

        grad_up_TF, *grad_factors = launch_activation_backward(*inputs)
    else:
        grad_up_TF, *grad_factors = activate_backward(*inputs)
    grad_hidden_TR = torch.empty_like(hidden_TR)
    gate, up = grad_hidden_TR.split([gate_B.shape[1], up_B.shape[1]], dim=1)
    torch.mm(grad_act_TF, gate_B, out=gate)
    torch.mm(grad_up_TF, up_B, out=up)
    return grad_up_TF, grad_hidden_TR, *grad_factors


def activate_backward(
    grad_act_TF: Tensor, grad_down_hidden_TR: Tensor, gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor,
    gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The reference of `launch_activation_backward`."""
    dtype = gate_TF.dtype
    gate, up = _add_updates(gate_TF, up_TF, hidden_TR, gate_B, up_B)
    grad_act = torch.addmm(grad_act_TF.to(gate.dtype), grad_down_hidden_TR.to(gate.dtype), down_A.to(gate.dtype))
    value = ACTIVATIONS[activation](gate)
    grad_act_TF.copy_(ACTIVATION_BACKWARDS[activation](grad_act * up, gate))
    grad_up_TF, act_TF = (grad_act * value).to(dtype), (value * up).to(dtype)
    gate_hidden, up_hidden = hidden_TR.split([gate_B.shape[1], up_B.shape[1]], dim=1)
    grad_factors = grad_act_TF.t() @ gate_hidden, grad_up_TF.t() @ up_hidden, grad_down_hidden_TR.t() @ act_TF
    return grad_up_TF, *grad_factors


@lora_activation_backward.register_fake
def _(
    grad_act_TF: Tensor, grad_down_hidden_TR: Tensor, gate_TF: Tensor, up_TF: Tensor, hidden_TR: Tensor,
    gate_B: Tensor, up_B: Tensor, down_A: Tensor, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = [x.new_empty(x.shape) for x in (up_TF, hidden_TR, gate_B, up_B, down_A)]
    return grads[0], grads[1], grads[2], grads[3], grads[4]


def _save_activation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward_activation(ctx: Any, grad_act_TF: Tensor, grad_down_hidden_TR: Tensor) -> tuple[Tensor | None, ...]:
    # Only `lora_output` reads act, so that its gradient belongs to nobody else.
    grad_gate_TF = grad_act_TF.contiguous()
    gradients = lora_activation_backward(grad_gate_TF, grad_down_hidden_TR, *ctx.saved_tensors, ctx.activation)
    return grad_gate_TF, *gradients, None


lora_activation.register_autograd(_backward_activation, setup_context=_save_activation)


@torch.library.custom_op("torchstone::lora_output", mutates_args=())
def lora_output(x_TF: Tensor, hidden_TR: Tensor, weight: Tensor, bias: Tensor | None, lora_B: Tensor) -> Tensor:
    """x @ weight.T + bias + hidden @ lora_B.T"""
    return _add_update(x_TF, hidden_TR, weight, bias, lora_B)


@lora_output.register_fake
def _(x_TF: Tensor, hidden_TR: Tensor, weight: Tensor, bias: Tensor | None, lora_B: Tensor) -> Tensor:
    return x_TF.new_empty(x_TF.shape[0], len(weight))


def _save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, hidden_TR, weight, _, lora_B = inputs
    ctx.save_for_backward(hidden_TR, weight, lora_B)


def _backward_output(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    hidden_TR, weight, lora_B = ctx.saved_tensors
    return grad_TD @ weight, grad_TD @ lora_B, None, None, grad_TD.t() @ hidden_TR


lora_output.register_autograd(_backward_output, setup_context=_save_output)
