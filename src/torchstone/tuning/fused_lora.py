"""The gated MLP with LoRA in fewer passes over memory, by kernels of its own.

On a GPU the products with A and B are nothing beside those with W, but for each of them the largest tensors of a block,
[tokens, width of the MLP], pass through memory again. Here one operator does it all between the matmuls:

    act, h_down = lora_activation(gate, up, h, B_gate, B_up, A_down)
                  act = activation(gate + B_gate h) * (up + B_up h),  h_down = A_down act

`gate` and `up` are without their updates, and `h` has the products with A of both. They are also all that is saved: the
backward pass computes the activation again, and sums the gradients of the three factors on the way. The scale of an
update is a part of its A. The results are those of lora.py up to rounding: updates are added before they are rounded.

On a GPU, in bf16. All else takes the plain path of lora.py, bit for bit: dropout, DoRA, several adapters on a linear,
merged ones, and tensor parallelism.

Shapes: T tokens, F columns of the MLP, R ranks. A linear without an adapter has rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.models.decoder import ACTIVATIONS, MLP, Decoder
from torchstone.triton_support import triton_error
from torchstone.tuning.lora import base_output, get_factors, project_together

# (gradient of the result, input) -> gradient of the input.
ACTIVATION_BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
# The kernels keep sums of this rank in registers.
MAX_RANK = 64
# The kernels read rows that are aligned to this many bytes.
ALIGNMENT = 16


def fuse_lora(decoder: Decoder, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Multiplies the A of several linears as one matrix, and fuses MLPs whose input is on one of `devices`.

    Without devices all MLPs take the plain path, the reference. On a CPU, for tests, the kernels are plain torch. Not
    with tensor parallelism, which hooks each linear.
    """
    devices = tuple(device for device in devices if device == "cpu" or _has_kernels())
    for block in decoder.layers.values():
        block.attention.project = block.mlp.project = project_together
        if block.mlp.is_gated and not block.mlp.is_fused:
            # A class, as in `add_adapter`.
            block.mlp.__class__ = FusedLoraMLP
            block.mlp.fused_on, block.mlp.activation_name = devices, decoder.config.activation


def _has_kernels() -> bool:
    return torch.version.hip is None and triton_error() is None


class FusedLoraMLP(MLP):
    """What `fuse_lora` makes of a gated MLP."""

    fused_on: tuple[str, ...]
    activation_name: str

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self._can_fuse(x_BTD):
            return super().forward(x_BTD)
        linears = (self.gate, self.up, self.down)
        (gate_A, gate_B), (up_A, up_B), (down_A, down_B) = (scaled_factors(linear, x_BTD) for linear in linears)
        hidden = F.linear(x_BTD, torch.cat((gate_A, up_A)))
        inputs = (base_output(self.gate, x_BTD), base_output(self.up, x_BTD), hidden)
        act_TF, down_hidden_TR = lora_activation(
            *(each.flatten(0, -2) for each in inputs), gate_B, up_B, down_A, self.activation_name
        )
        out_TD = base_output(self.down, act_TF)
        if len(down_A):
            out_TD = out_TD + F.linear(down_hidden_TR, down_B)
        return out_TD.view(*x_BTD.shape[:-1], out_TD.shape[-1])

    def _can_fuse(self, x: Tensor) -> bool:
        if x.device.type not in self.fused_on or (x.is_cuda and x.dtype != torch.bfloat16):
            return False
        adapters = [get_factors(linear) for linear in (self.gate, self.up, self.down)]
        return (
            self.activation_name in ACTIVATION_BACKWARDS
            # A kernel of Liger, if it was asked for.
            and self.kernel is None
            and max(map(len, adapters)) == 1
            and all(
                each.is_plain and each.lora_A.dtype == x.dtype and len(each.lora_A) <= MAX_RANK
                for of_linear in adapters
                for each in of_linear
            )
            and (not x.is_cuda or self.gate.out_features * x.itemsize % ALIGNMENT == 0)
        )


def scaled_factors(linear: nn.Linear, like: Tensor) -> tuple[Tensor, Tensor]:
    """scale * A, and B; of rank 0, with the dtype of `like`, if there is no adapter."""
    for factors in get_factors(linear):
        return factors.lora_A * factors.scale, factors.lora_B
    return like.new_empty(0, linear.in_features), like.new_empty(linear.out_features, 0)


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
    # Only `down` reads act, so that its gradient belongs to nobody else.
    grad_gate_TF = grad_act_TF.contiguous()
    gradients = lora_activation_backward(grad_gate_TF, grad_down_hidden_TR, *ctx.saved_tensors, ctx.activation)
    return grad_gate_TF, *gradients, None


lora_activation.register_autograd(_backward_activation, setup_context=_save_activation)
