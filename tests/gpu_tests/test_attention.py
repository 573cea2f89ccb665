"""Every attention backend on a GPU against eager: forward and backward, on the cases of the CPU tests.

How far bf16 may be off is measured: a backend may be twice as far from eager in fp32 as eager in bf16 is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import CASES, max_distance, run_attention
from torchstone.errors import UsageError
from torchstone.models.attention import choose_backend

CUDA = torch.device("cuda")
BACKENDS = ("sdpa", "flash", "flex", "flash-attn", "fa3", "fa4")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_equal_eager_in_bf16(backend: Any, name: str, head_dim: int) -> None:
    case = replace(CASES[name], head_dim=head_dim)
    try:
        choose_backend(backend, True, case.window, case.softcap, head_dim, CUDA, torch.bfloat16)
    except UsageError as error:
        pytest.skip(error.message)
    exact = run_attention(case, "eager", CUDA, torch.float32)
    rounding = max_distance(run_attention(case, "eager", CUDA, torch.bfloat16), exact)
    assert 1e-4 < rounding < 2e-2
    assert max_distance(run_attention(case, backend, CUDA, torch.bfloat16), exact) <= 2 * rounding


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_equal_eager_in_fp32(backend: Any, name: str) -> None:
    case = replace(CASES[name], head_dim=64)
    assert max_distance(run_attention(case, backend, CUDA), run_attention(case, "eager", CUDA)) <= 1e-5
