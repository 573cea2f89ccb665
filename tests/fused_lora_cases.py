"""Models with adapters, plain and fused, and the kernels against their references; for the tests on CPU and GPU.

As a program it runs the kernels in Triton's interpreter, which needs no GPU:

    TRITON_INTERPRET=1 python tests/fused_lora_cases.py
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parity import distance
from torchstone.models.decoder import Decoder, DecoderConfig, LayerSpec, init_tensor
from torchstone.tuning.fused_lora import activate, activate_backward, fuse_lora
from torchstone.tuning.lora import LoraAdapter, LoraSpec, add_adapter, is_adapter_parameter

VOCABULARY, WIDTH, MLP_WIDTH = 50, 24, 37
ALL = ("wq", "wk", "wv", "wo", "gate", "up", "down")
SCALE = 1.7


def make_decoder(
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    dtype: torch.dtype = torch.float64,
    depth: int = 2,
    adapters: tuple[str, ...] = ("default",),
    settings: dict[str, Any] | None = None,
    **config: Any,
) -> Decoder:
    """On the plain path. Its factors are not zero, and all have different values."""
    sizes = {"width": WIDTH, "heads": 4, "kv_heads": 2, "head_dim": 6, "mlp_width": MLP_WIDTH}
    decoder = Decoder(DecoderConfig(vocab_size=VOCABULARY, layers=(LayerSpec(),) * depth, **(sizes | config)))
    # Ranks differ between linears, but not between blocks.
    ranks = {name: rank - ALL.index(name) % 2 for name in targets}
    linears = {name: name.split(".")[-1] for name, _ in decoder.named_modules()}
    for name in adapters:
        specs = {name: LoraSpec(ranks[kind], SCALE) for name, kind in linears.items() if kind in ranks}
        add_adapter(decoder, LoraAdapter(name, specs, **(settings or {})))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(init_tensor(decoder.config, name, parameter.shape, std=0.1, seed=0))
            if name.endswith("bias"):
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
            parameter.requires_grad_(is_adapter_parameter(name))
    fuse_lora(decoder, devices=())
    return decoder.to(dtype)


def make_pair(**options: Any) -> tuple[Decoder, Decoder]:
    """The same model, plain and fused."""
    plain, fused = make_decoder(**options), make_decoder(**options)
    fuse_lora(fused, devices=("cpu", "cuda"))
    return plain, fused


def make_inputs(length: int = 11, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    return ids.to(device), torch.arange(length, device=device).expand(2, length)


def logits_and_gradients(decoder: Decoder, length: int = 11) -> list[Tensor]:
    logits = decoder(*make_inputs(length, decoder.head.weight.device))
    trained = [p for p in decoder.parameters() if p.requires_grad]
    return [logits, *torch.autograd.grad(logits.square().mean(), trained)]


def errors(decoder: Decoder, exact: list[Tensor], length: int) -> list[float]:
    """Distances of logits and gradients from those of the same model in fp64."""
    return [distance(x.double(), y) for x, y in zip(logits_and_gradients(decoder, length), exact, strict=True)]


def assert_as_exact(ours: list[float], plain: list[float]) -> None:
    """Rounding is as large as on the plain path, on average and at most."""
    assert sum(ours) <= 1.2 * sum(plain)
    assert max(ours) <= 1.2 * max(plain)


def assert_close(tensors: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for tensor, value in zip(tensors, expected, strict=True):
        assert tensor.dtype == value.dtype
        assert distance(tensor, value) <= limit
        assert value.norm() > 0


class Case(NamedTuple):
    tokens: int
    width: int
    # Of gate, up and down.
    ranks: tuple[int, int, int]
    activation: str = "silu"
    dtype: torch.dtype = torch.float32


# Odd sizes, several splits of tokens and columns, missing adapters. The interpreter cannot multiply in bf16.
INTERPRETED = [
    Case(70, 136, (4, 16, 20)),
    Case(5, 8, (20, 4, 4), "gelu_tanh"),
    Case(130, 200, (0, 4, 5)),
    Case(130, 100, (4, 5, 0), "gelu_tanh"),
    Case(200, 136, (16, 16, 16), "silu", torch.float16),
]
SPLIT = 64


class Inputs(NamedTuple):
    """Of the activation's backward pass; those of the forward pass are the last ones."""

    grad_act: Tensor
    grad_down_hidden: Tensor
    gate: Tensor
    up: Tensor
    hidden: Tensor
    gate_B: Tensor
    up_B: Tensor
    down_A: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """A copy: the backward pass overwrites one of them."""
        return Inputs(*(x.to(dtype, copy=True) for x in self))


def draw(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    (T, F), (gate, up, down) = case[:2], case.ranks
    shapes = [(T, F), (T, down), (T, F), (T, F), (T, gate + up), (F, gate), (F, up), (down, F)]
    tensors = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return Inputs(*tensors[:5], *(x / 4 for x in tensors[5:])).to(case.dtype)


def results_of_kernels(inputs: Inputs, activation: str) -> dict[str, Tensor]:
    from torchstone.tuning.fused_lora_kernel import launch_activation, launch_activation_backward

    act, down_hidden = launch_activation(*inputs[2:], activation)
    gradients = launch_activation_backward(*inputs, activation)
    return _named(act, down_hidden, inputs.grad_act, gradients)


def results_of_references(inputs: Inputs, activation: str) -> dict[str, Tensor]:
    act, down_hidden = activate(*inputs[2:], activation)
    gradients = activate_backward(*inputs, activation)
    return _named(act, down_hidden, inputs.grad_act, gradients)


def _named(act: Tensor, down_hidden: Tensor, grad_gate: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = ("act", "down_hidden", "grad_gate", "grad_up", "grad_gate_B", "grad_up_B", "grad_down_A")
    return dict(zip(names, (act, down_hidden, grad_gate, *gradients), strict=True))


def compare(case: Case, device: torch.device) -> dict[str, tuple[float, float]]:
    """By result: the distance of the kernel from the reference in fp64, and that of the reference in the same dtype."""
    inputs = draw(case, device)
    exact = results_of_references(inputs.to(torch.float64), case.activation)
    plain = results_of_references(inputs.to(case.dtype), case.activation)
    ours = results_of_kernels(inputs.to(case.dtype), case.activation)
    assert all(ours[name].shape == value.shape and ours[name].dtype == case.dtype for name, value in exact.items())
    return {
        name: (distance(ours[name].double(), value), distance(plain[name].double(), value))
        for name, value in exact.items()
    }


if __name__ == "__main__":
    from torchstone.tuning import fused_lora_kernel

    fused_lora_kernel.SPLIT_COLUMNS = fused_lora_kernel.SPLIT_TOKENS = SPLIT
    json.dump([compare(case, torch.device("cpu")) for case in INTERPRETED], sys.stdout)
