"""Fused LoRA against the plain path: values, gradients, what is saved, what is compiled, and what stays plain.

On a CPU the kernels are plain torch. The Triton kernels run in Triton's interpreter here, and on a GPU in
tests/gpu_tests/test_fused_lora_kernel.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import fused_lora_cases
from fused_lora_cases import (
    ALL,
    INTERPRETED,
    MLP_WIDTH,
    WIDTH,
    assert_as_exact,
    assert_close,
    errors,
    logits_and_gradients,
    make_inputs,
    make_pair,
)
from parity import GRADIENT_LIMIT, distance
from selection import the_rest
from torchstone.config.schema import ParallelConfig
from torchstone.models.decoder import Decoder
from torchstone.models.execution import apply_activation_checkpointing, compile_decoder
from torchstone.models.master_weights import MasterWeights
from torchstone.parallel.fsdp import apply_fsdp, mixed_precision_policy
from torchstone.parallel.mesh import init_distributed
from torchstone.testing import launch_procs
from torchstone.tuning.fused_lora import fuse_lora
from torchstone.tuning.lora import LoraLinear, is_adapter_parameter, merge_adapters

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Counts our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "torchstone":
            self.calls[function.name().removeprefix("torchstone::")] += 1
        return function(*args, **(kwargs or {}))


def count_operators(decoder: Decoder) -> Counter[str]:
    with Operators() as operators:
        logits_and_gradients(decoder)
    return operators.calls


# Of two blocks.
FORWARD = {"lora_activation": 2}
ALL_OPERATORS = FORWARD | {"lora_activation_backward": 2}


CASES: dict[str, dict[str, Any]] = {
    "rank 4": {},
    "rank 16, gelu_tanh": {"rank": 16, "activation": "gelu_tanh"},
    "rank 20, biases": {"rank": 20, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "q and v, gate and up": {"targets": ("wq", "wv", "gate", "up")},
    "k and o, up and down": {"targets": ("wk", "wo", "up", "down")},
    "only down": {"targets": ("down",)},
    "norms after, scaled": {"has_post_norm": True, "residual_scale": 0.5, "qk_norm": "head"},
}


class TestParity:
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, GRADIENT_LIMIT)])
    def test_logits_and_gradients_are_those_of_the_plain_path(
        self, name: str, dtype: torch.dtype, limit: float
    ) -> None:
        plain, fused = make_pair(dtype=dtype, **CASES[name])
        assert_close(logits_and_gradients(fused), logits_and_gradients(plain), limit)

    @pytest.mark.parametrize("rank", [4, 16, 20])
    def test_an_mlp_in_fp32(self, rank: int) -> None:
        x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results = []
        for decoder in make_pair(rank=rank, depth=1, dtype=torch.float32):
            mlp = decoder.layers["0"].mlp
            out = mlp(x)
            trained = [p for p in mlp.parameters() if p.requires_grad]
            results.append([out, *torch.autograd.grad(out.square().mean(), [x, *trained])])
        assert_close(results[1], results[0], 1e-6)

    def test_the_operators_compute_them(self) -> None:
        plain, fused = make_pair()
        assert count_operators(fused) == ALL_OPERATORS
        assert not count_operators(plain)
        only_attention = make_pair(targets=("wq", "wo"))[1]
        assert not count_operators(only_attention)

    def test_weights_that_are_trained_as_well(self) -> None:
        pair = make_pair()
        for decoder in pair:
            for linear in [module for module in decoder.modules() if isinstance(module, LoraLinear)]:
                linear.weight.requires_grad_()
        plain, fused = pair
        assert count_operators(fused) == ALL_OPERATORS
        assert_close(logits_and_gradients(fused), logits_and_gradients(plain), 1e-10)

    def test_the_gradient_of_the_input(self) -> None:
        plain, fused = make_pair(depth=1)
        x = torch.randn(2, 11, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        gradients = []
        for decoder in (plain, fused):
            block = decoder.layers["0"]
            inputs = decoder.build_layer_inputs(make_inputs()[1], None)[0]
            gradients.append(torch.autograd.grad(block(x, inputs).square().mean(), x)[0])
        assert distance(*gradients) <= 1e-10

    def test_a_second_backward_pass_gives_the_same_gradients(self) -> None:
        """The backward pass works in place, but not on what is saved."""
        fused = make_pair()[1]
        loss = fused(*make_inputs()).square().mean()
        trained = [p for p in fused.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, trained, retain_graph=True)
        second = torch.autograd.grad(loss, trained)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_without_gradients(self) -> None:
        plain, fused = make_pair()
        with torch.no_grad(), Operators() as operators:
            logits = fused.eval()(*make_inputs())
        assert operators.calls == FORWARD
        assert distance(logits, plain(*make_inputs())) <= 1e-10

    def test_bf16_is_as_close_to_fp64_as_the_plain_path(self) -> None:
        sizes: dict[str, Any] = {"width": 96, "head_dim": 24, "mlp_width": 256, "rank": 16}
        plain, fused = (decoder.bfloat16() for decoder in make_pair(dtype=torch.float32, **sizes))
        exact = logits_and_gradients(deepcopy(plain).double(), 128)
        assert_as_exact(errors(fused, exact, 128), errors(plain, exact, 128))

    def test_master_weights(self) -> None:
        """Gradients have the dtype of the copies that are computed with, and arrive at the master weights."""
        plain, fused = make_pair(dtype=torch.float32)
        results = []
        for decoder in (plain, fused):
            for name, parameter in decoder.named_parameters():
                if not is_adapter_parameter(name):
                    parameter.data = parameter.data.bfloat16()
            masters = MasterWeights(decoder, torch.bfloat16)
            decoder.compute_dtype = torch.bfloat16
            with Operators() as operators:
                decoder(*make_inputs()).float().square().mean().backward()
            assert operators.calls == (ALL_OPERATORS if decoder is fused else {})
            results.append([p.grad for name, p in masters.parameters.items() if is_adapter_parameter(name)])
        for gradient, expected in zip(results[1], results[0], strict=True):
            assert gradient.dtype == torch.float32
            assert distance(gradient, expected) <= 0.05


def gradients_with_fsdp(precision: str) -> list[list[Tensor]]:
    """Of the plain and the fused path."""
    results = []
    parallel = ParallelConfig(zero=3)
    with init_distributed(parallel, CPU) as ctx:
        for decoder in make_pair(dtype=torch.float32):
            if precision == "bf16":
                for name, parameter in decoder.named_parameters():
                    if not is_adapter_parameter(name):
                        parameter.data = parameter.data.bfloat16()
            decoder.compute_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            policy = mixed_precision_policy(precision)
            apply_fsdp(decoder, decoder.layers.values(), ctx.dp_mesh, 3, policy)
            with Operators() as operators:
                decoder(*make_inputs(11 + ctx.dp_rank)).float().square().mean().backward()
            assert bool(operators.calls) == bool(results)
            results.append([p.grad.full_tensor() for p in decoder.parameters() if p.grad is not None])
    return results


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_fsdp2(precision: str, limit: float) -> None:
    for plain, fused in launch_procs(gradients_with_fsdp, 2, precision):
        assert len(plain) == 2 * 2 * len(ALL)
        assert_close(fused, plain, limit)


@pytest.mark.usefixtures("reset_dynamo")
class TestExecution:
    @pytest.mark.parametrize("mode", ["elementwise", "selective", "full"])
    def test_activation_checkpointing_changes_nothing(self, mode: str) -> None:
        expected = logits_and_gradients(make_pair()[1])
        fused = make_pair()[1]
        apply_activation_checkpointing(fused, mode)
        with Operators() as operators:
            tensors = logits_and_gradients(fused)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
        assert operators.calls["lora_activation"] == (2 if mode == "elementwise" else 4)

    @pytest.mark.parametrize("mode", ["none", "elementwise"])
    def test_of_the_mlp_only_gate_and_up_are_saved(self, mode: str) -> None:
        """Of tensors with a row of the MLP's width for each token. The plain path saves the activation, too."""
        counts = []
        for decoder in make_pair(depth=1):
            apply_activation_checkpointing(decoder, mode)
            storages = set()

            def note(tensor: Tensor, storages: set[int] = storages) -> Tensor:
                if tensor.shape[-1:] == (MLP_WIDTH,) and tensor.numel() == 2 * 11 * MLP_WIDTH:
                    storages.add(tensor.untyped_storage().data_ptr())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                logits = decoder(*make_inputs())
            assert logits.requires_grad
            counts.append(len(storages))
        assert counts == [{"none": 4, "elementwise": 3}[mode], 2]

    @pytest.mark.parametrize(
        "mode", ["elementwise", *(pytest.param(mode, marks=the_rest) for mode in ("none", "selective", "full"))]
    )
    def test_compiled_blocks(self, mode: str) -> None:
        """Without a graph break, which would raise, and without a graph for every length or every block."""
        plain, fused = make_pair(depth=3)
        counter = CompileCounterWithBackend("aot_eager")
        apply_activation_checkpointing(fused, mode)
        compile_decoder(fused, "block", counter)
        for length in (16, 24, 9):
            assert_close(logits_and_gradients(fused, length), logits_and_gradients(plain, length), 1e-10)
        # The first block, whose input has no gradient; the others; the last norm.
        assert counter.frame_count == 3
        with torch.no_grad():
            assert distance(fused(*make_inputs(10)), plain(*make_inputs(10))) <= 1e-10
        assert counter.frame_count == 5
        modules = [module for graph in counter.graphs[:1] for module in graph.modules()]
        operators = Counter(str(node.target) for module in modules for node in module.graph.nodes)
        assert operators["torchstone.lora_activation.default"] == 1

    @the_rest
    def test_a_compiled_backward_pass_works_in_place(self) -> None:
        """A compiled graph is functional: what an operator overwrites would be copied if another one read it."""
        fused = make_pair(depth=1, dtype=torch.float32)[1]
        compile_decoder(fused, "block", has_fixed_length=True)
        _, sources = run_and_get_code(lambda: logits_and_gradients(fused))
        (backward,) = [source for source in sources if "lora_activation_backward.default" in source]
        assert backward.count(f"empty_strided_cpu((22, {MLP_WIDTH})") == 1, "one buffer for the gradients of act, gate"


class TestPlainPath:
    """Bit for bit, and without an operator."""

    @pytest.mark.parametrize(
        "options",
        [
            {"settings": {"dropout": 0.5}},
            {"settings": {"use_dora": True}},
            {"adapters": ("default", "second")},
        ],
        ids=str,
    )
    def test_other_adapters(self, options: dict[str, Any]) -> None:
        self.assert_plain(*make_pair(**options))

    def test_merged_adapters(self) -> None:
        plain, fused = make_pair()
        merge_adapters(plain)
        merge_adapters(fused)
        with Operators() as operators:
            assert torch.equal(fused(*make_inputs()), plain(*make_inputs()))
        assert not operators.calls

    def test_the_default_on_a_cpu(self) -> None:
        plain, fused = make_pair()
        fuse_lora(fused)
        self.assert_plain(plain, fused)

    def assert_plain(self, plain: Decoder, fused: Decoder) -> None:
        # For dropout.
        torch.manual_seed(0)
        expected = logits_and_gradients(plain)
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(logits_and_gradients(fused), expected, strict=True))
        assert not count_operators(fused)

    @pytest.mark.parametrize("options", [{"activation": "gelu"}, {"rank": 66}, {"is_gated": False}], ids=str)
    def test_mlps_without_a_kernel(self, options: dict[str, Any]) -> None:
        self.assert_plain(*make_pair(**options))

    def test_a_kernel_that_was_asked_for(self) -> None:
        fused = make_pair()[1]
        for block in fused.layers.values():
            block.mlp.kernel = block.mlp.gate_activation
        assert not count_operators(fused)["lora_activation"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_in_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is for all kernels of a process."""
    tests = Path(__file__).parent
    path = os.pathsep.join(map(str, (tests, *sys.path)))
    result = subprocess.run(
        [sys.executable, fused_lora_cases.__file__], capture_output=True, text=True, timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    cases = json.loads(result.stdout)
    assert len(cases) == len(INTERPRETED)
    for case, distances in zip(INTERPRETED, cases, strict=True):
        for name, (ours, plain) in distances.items():
            assert ours <= 1.2 * plain + 1e-7, (case, name)
