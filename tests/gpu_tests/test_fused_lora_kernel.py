"""On a GPU: the kernels of fused LoRA compute what their references do, compiled blocks what the plain path does."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fused_lora_cases import (
    Case,
    assert_as_exact,
    compare,
    draw,
    errors,
    logits_and_gradients,
    make_inputs,
    make_pair,
    results_of_kernels,
)
from parity import distance
from torchstone.models.decoder import Decoder
from torchstone.models.execution import apply_activation_checkpointing, compile_decoder
from torchstone.tuning import fused_lora_kernel
from torchstone.tuning.fused_lora import fuse_lora

DEVICE = torch.device("cuda")
# The width of the MLP is no multiple of a block of columns.
SIZES: dict[str, Any] = {"width": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp_width": 1544}
LENGTH = 500


@pytest.mark.parametrize("tokens", [1000, 16384])
@pytest.mark.parametrize("width", [1000, 8192, 14336])
@pytest.mark.parametrize("rank", [4, 16, 64])
def test_kernels_in_bf16(tokens: int, width: int, rank: int) -> None:
    """As far from fp64 as their references, which round at the same places."""
    for name, (ours, plain) in compare(Case(tokens, width, (rank, rank, rank), dtype=torch.bfloat16), DEVICE).items():
        assert ours <= 1.2 * plain, name


@pytest.mark.parametrize("ranks", [(4, 16, 20), (0, 4, 5), (5, 4, 0)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_ranks_and_activations(ranks: tuple[int, int, int], activation: str) -> None:
    for dtype, floor in ((torch.bfloat16, 0.0), (torch.float32, 1e-6)):
        for name, (ours, plain) in compare(Case(1100, 1000, ranks, activation, dtype), DEVICE).items():
            assert ours <= 1.2 * plain + floor, (dtype, name)


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (5, 72), (65, 64)])
def test_less_than_a_block(tokens: int, width: int) -> None:
    """Of few values, some may round differently by chance: half a bit of bf16 is 2e-3."""
    for name, (ours, plain) in compare(Case(tokens, width, (16, 16, 16), dtype=torch.bfloat16), DEVICE).items():
        assert ours <= 2 * plain + 2e-3, name


def test_the_same_input_gives_the_same_bits() -> None:
    inputs = draw(Case(5000, 4096, (16, 16, 16), dtype=torch.bfloat16), DEVICE)
    first, second = (results_of_kernels(inputs.to(torch.bfloat16), "silu") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts launches, also those of compiled code."""
    counts: Counter[str] = Counter()
    for name in ("launch_activation", "launch_activation_backward"):
        launch = getattr(fused_lora_kernel, name)

        def count(*args: Any, name: str = name, launch: Any = launch) -> Any:
            counts[name] += 1
            return launch(*args)

        monkeypatch.setattr(fused_lora_kernel, name, count)
    return counts


def make_gpu_pair(**options: Any) -> tuple[Decoder, Decoder]:
    plain, fused = make_pair(rank=16, dtype=torch.bfloat16, **(SIZES | options))
    return plain.to(DEVICE), fused.to(DEVICE)


@pytest.mark.usefixtures("reset_dynamo")
class TestCompiledBlocks:
    @pytest.mark.parametrize("mode", ["none", "elementwise", "selective", "full"])
    def test_gradients_are_as_exact_as_those_of_the_plain_path(self, mode: str, launches: Counter[str]) -> None:
        plain, fused = make_gpu_pair()
        exact = logits_and_gradients(deepcopy(plain).double(), LENGTH)
        for decoder in (plain, fused):
            apply_activation_checkpointing(decoder, mode)
            compile_decoder(decoder, "block")
        plain_errors = errors(plain, exact, LENGTH)
        assert not launches
        assert_as_exact(errors(fused, exact, LENGTH), plain_errors)
        assert launches["launch_activation"] == (2 if mode in ("none", "elementwise") else 4)
        assert launches["launch_activation_backward"] == 2
        # Rows of other lengths do not compile anything.
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for length in (333, 640):
            exact = logits_and_gradients(deepcopy(make_gpu_pair()[0]).double(), length)
            assert_as_exact(errors(fused, exact, length), errors(plain, exact, length))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    @pytest.mark.parametrize("mode", ["elementwise", "full"])
    def test_the_peak_of_memory_is_lower(self, mode: str) -> None:
        peaks = []
        for decoder in make_gpu_pair(depth=1, mlp_width=8192):
            apply_activation_checkpointing(decoder, mode)
            compile_decoder(decoder, "block", has_fixed_length=True)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                logits_and_gradients(decoder, 4096)
                peak = torch.cuda.max_memory_allocated() - before
            peaks.append(peak)
        assert peaks[1] < peaks[0]


def test_without_compiling_and_without_gradients(launches: Counter[str]) -> None:
    plain, fused = make_gpu_pair()
    exact = logits_and_gradients(deepcopy(plain).double(), LENGTH)
    plain_errors = errors(plain, exact, LENGTH)
    assert_as_exact(errors(fused, exact, LENGTH), plain_errors)
    launches.clear()
    with torch.no_grad():
        logits = fused.eval()(*make_inputs(LENGTH, DEVICE))
    assert distance(logits.double(), exact[0]) <= 1.2 * plain_errors[0]
    assert (launches["launch_activation"], launches["launch_activation_backward"]) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_is_fused_in_bf16_and_plain_in_fp32(dtype: torch.dtype, launches: Counter[str]) -> None:
    plain, fused = (decoder.to(dtype) for decoder in make_gpu_pair())
    fuse_lora(fused)
    results = [logits_and_gradients(decoder, LENGTH) for decoder in (plain, fused)]
    assert bool(launches) == (dtype == torch.bfloat16)
    if dtype == torch.float32:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
