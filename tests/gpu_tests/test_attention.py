"""Every attention backend on the GPU against eager: forward and backward, in bf16, on the problems of the CPU tests.

What bf16 may cost is measured, not chosen: eager in bf16 is so far from eager in fp32, and a backend may be as far.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_cases import PROBLEMS, apart, solve
from torchstone.errors import UsageError
from torchstone.models.attention import choose

CUDA = torch.device("cuda")
BACKENDS = ("sdpa", "flash", "flex", "flash-attn", "fa3")


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_equal_eager_in_bf16(backend: str, name: str, head_size: int) -> None:
    problem = replace(PROBLEMS[name], head_size=head_size)
    try:
        choose(backend, True, problem.window, problem.softcap, head_size, CUDA, torch.bfloat16)
    except UsageError as error:
        pytest.skip(error.message)
    exact = solve(problem, "eager", CUDA, torch.float32)
    spread = apart(solve(problem, "eager", CUDA, torch.bfloat16), exact)
    assert 1e-4 < spread < 2e-2
    assert apart(solve(problem, backend, CUDA, torch.bfloat16), exact) <= 2 * spread


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_equal_eager_in_fp32(backend: str, name: str) -> None:
    problem = replace(PROBLEMS[name], head_size=64)
    assert apart(solve(problem, backend, CUDA), solve(problem, "eager", CUDA)) <= 1e-5
