"""LoRA in fewer passes over memory: what `LoraLinear` computes, with kernels and a backward pass of its own.

On a GPU the products with A and B are nothing beside those with W, but for each of them tensors of all tokens pass
through memory again. Here

- an update is written first, and the matmul with W adds to it. So is the gradient of an input that several linears
  share: one tensor, to which every linear adds;
- one kernel adds the updates of gate and up, applies the activation, and multiplies the result by the A of down. The
  one of the backward pass computes the activation again, and sums the gradients of the three factors.

fused_lora_ops.py has the operators. Their results are those of lora.py up to rounding; in the MLP the updates are added
before they are rounded.

On a GPU, in bf16. All else takes the plain path of lora.py, bit for bit: dropout, DoRA, several adapters on a linear,
merged ones, tensor parallelism, and linears that are trained themselves or compute in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from torchstone.models.decoder import MLP, Decoder, Project
from torchstone.tuning.fused_lora_ops import ACTIVATION_BACKWARDS, lora_activation, lora_output, lora_project
from torchstone.tuning.lora import LoraLinear, get_factors, project_together

# The kernels keep sums of this rank in registers.
MAX_RANK = 64
# Of the rows that the kernels read, in bytes.
ALIGNMENT = 16


def fuse_lora(decoder: Decoder, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Lets linears with adapters compute as above where their input is on one of `devices`.

    Without devices all take the plain path, the reference. On a CPU, for tests, the kernels are plain torch. Not with
    tensor parallelism, which hooks each linear.
    """
    devices = tuple(device for device in devices if device == "cpu" or _has_kernels())
    for block in decoder.layers.values():
        block.attention.project = block.mlp.project = _project_on(devices)
        if block.mlp.is_gated and not block.mlp.is_fused:
            # A class, as in `add_adapter`.
            block.mlp.__class__ = FusedLoraMLP
            block.mlp.fused_on, block.mlp.activation_name = devices, decoder.config.activation


def _has_kernels() -> bool:
    return find_spec("triton") is not None and torch.version.hip is None


@cache
def _project_on(devices: tuple[str, ...]) -> Project:
    """`project_together`, fused on some devices. One function for all blocks: they share a compiled graph."""

    def project_fused(linears: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
        if not can_fuse(linears, x, devices):
            return project_together(linears, x)
        lora_As, lora_Bs = zip(*map(scaled_factors, linears), strict=True)
        *outputs, _ = lora_project(x.flatten(0, -2), torch.cat(lora_As), *_weights_and_biases(linears), lora_Bs)
        return [output.view(*x.shape[:-1], output.shape[-1]) for output in outputs]

    return project_fused


class FusedLoraMLP(MLP):
    """What `fuse_lora` makes of a gated MLP."""

    fused_on: tuple[str, ...]
    activation_name: str

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self._can_fuse(x_BTD):
            return super().forward(x_BTD)
        (gate_A, gate_B), (up_A, up_B), (down_A, down_B) = map(scaled_factors, (self.gate, self.up, self.down))
        frozen = _weights_and_biases((self.gate, self.up))
        gate_TF, up_TF, hidden_TR = lora_project(x_BTD.flatten(0, -2), torch.cat((gate_A, up_A)), *frozen, [])
        act_TF, down_hidden_TR = lora_activation(gate_TF, up_TF, hidden_TR, gate_B, up_B, down_A, self.activation_name)
        out_TD = lora_output(act_TF, down_hidden_TR, self.down.weight, self.down.bias, down_B)
        return out_TD.view(*x_BTD.shape[:-1], out_TD.shape[-1])

    def _can_fuse(self, x: Tensor) -> bool:
        linears = (self.gate, self.up, self.down)
        return (
            self.activation_name in ACTIVATION_BACKWARDS
            # Liger's, if it was asked for.
            and self.kernel is None
            and can_fuse(linears, x, self.fused_on)
            and all(len(factors.lora_A) <= MAX_RANK for linear in linears for factors in get_factors(linear))
            and (not x.is_cuda or self.gate.out_features * x.itemsize % ALIGNMENT == 0)
        )


def can_fuse(linears: Sequence[nn.Linear], x: Tensor, devices: tuple[str, ...]) -> bool:
    """Whether one has an adapter, and none has what the operators do not compute."""
    if x.device.type not in devices or (x.is_cuda and x.dtype != torch.bfloat16):
        return False
    adapters = [get_factors(linear) for linear in linears]
    factors = [each for of_linear in adapters for each in of_linear]
    return (
        max(map(len, adapters)) == 1
        and all(each.is_plain and each.lora_A.dtype == x.dtype for each in factors)
        and all(_is_frozen(linear) and linear.weight.dtype == x.dtype for linear in linears)
        and len({linear.bias is None for linear in linears}) == 1
    )


def _is_frozen(linear: nn.Linear) -> bool:
    """And plain: FP8 and quantized weights have classes of their own."""
    if type(linear) not in (nn.Linear, LoraLinear):
        return False
    return not (linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad))


def scaled_factors(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """scale * A, and B; of rank 0 if there is no adapter."""
    for factors in get_factors(linear):
        return factors.lora_A * factors.scale, factors.lora_B
    return linear.weight.new_empty(0, linear.in_features), linear.weight.new_empty(linear.out_features, 0)


def _weights_and_biases(linears: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    return [linear.weight for linear in linears], [linear.bias for linear in linears if linear.bias is not None]
