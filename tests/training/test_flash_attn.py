"""Attention backends against eager: numbers, forward and backward, in every kind of row; and which is chosen when.

On a CPU that is sdpa; the kernels that need a GPU are in tests/gpu_tests/test_attention.py with the same problems.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torchstone.models.attention as attention
from attention_cases import PROBLEMS, apart, solve, tensors
from tiny_families import VOCABULARY, make_model
from torchstone.errors import UsageError
from torchstone.models.attention import Lens, attend, choose, sights, visible
from torchstone.models.execution import Execution
from torchstone.models.opening import load_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", PROBLEMS)
def test_sdpa_equals_eager_forward_and_backward(name: str) -> None:
    assert apart(solve(PROBLEMS[name], "sdpa", CPU), solve(PROBLEMS[name], "eager", CPU)) <= 1e-6


@pytest.mark.parametrize("name", PROBLEMS)
def test_eager_equals_each_document_alone_written_out(name: str) -> None:
    """Softmax over what a token may see, token by token, in fp64, without any mask."""
    problem = PROBLEMS[name]
    (q, k, v), ids, docs = tensors(problem, CPU, torch.float64)
    got = solve(problem, "eager", CPU)[0].double()
    docs = torch.zeros_like(ids) if docs is None else docs
    groups = problem.heads // problem.kv_heads
    for row in range(ids.shape[0]):
        for t in [t for t in range(problem.length) if docs[row, t] >= 0]:
            seen = [s for s in range(t + 1) if docs[row, s] == docs[row, t]]
            seen = [s for s in seen if problem.window is None or t - s < problem.window]
            for head in range(problem.heads):
                scores = k[row, head // groups, seen] @ q[row, head, t] * problem.scale
                if problem.softcap is not None:
                    scores = torch.tanh(scores / problem.softcap) * problem.softcap
                wanted = scores.softmax(0) @ v[row, head // groups, seen]
                # solve() drew the same numbers in fp32.
                assert (got[row, head, t] - wanted).abs().max().item() <= 1e-5


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_models_give_the_same_logits_and_gradients_by_either_kernel(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, family)
    ids = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))
    docs = torch.tensor([[0] * 12 + [1] * 18, [0] * 25 + [-1] * 5])
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None].repeat(2, 1)
    positions[1] = torch.arange(30) * (docs[1] == 0)
    found = []
    for backend in ("eager", "sdpa"):
        model = load_model(folder, CPU, dtype, Execution(attention=backend)).module
        logits = model(ids, positions, docs)
        logits.float().square().mean().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert apart(found[1], found[0]) <= (1e-5 if dtype == FP32 else 3e-2)


def test_a_document_is_not_changed_by_its_neighbours_in_the_row() -> None:
    for backend in ("eager", "sdpa"):
        problem = PROBLEMS["packed"]
        (q, k, v), ids, docs = tensors(problem, CPU, FP32)
        assert docs is not None
        sight = sights({(backend, None)}, docs, ids, None)[backend, None]
        before = attend(q, k, v, sight, Lens(backend, 0.3))
        other = v.detach().clone()
        other[0, :, :7] += 100
        after = attend(q, k, other, sight, Lens(backend, 0.3))
        assert torch.equal(before[0, :, 7:], after[0, :, 7:])
        assert not torch.equal(before[0, :, :7], after[0, :, :7])


def test_a_row_that_is_one_document_needs_no_mask() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert sights({("sdpa", None)}, None, ids, None)["sdpa", None].mask is None
    assert sights({("sdpa", 8)}, None, ids, None)["sdpa", 8].mask is None
    mask = sights({("sdpa", 3)}, None, ids, None)["sdpa", 3].mask
    assert mask is not None
    assert mask[0, 0].int().tolist()[5] == [0, 0, 0, 1, 1, 1, 0, 0]


def test_new_tokens_see_the_end_of_the_cache_through_their_window() -> None:
    keys = torch.tensor([[-1, -1, 0, 0, 0, 0, 0]])
    assert visible(keys[:, -2:], keys, None)[0, 0].int().tolist() == [[0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert visible(keys[:, -2:], keys, 3)[0, 0].int().tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]


class TestBorders:
    def test_documents_and_rows_begin_at_borders(self) -> None:
        docs = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
        sight = sights({("flash", None)}, docs, torch.zeros_like(docs), None)["flash", None]
        assert sight.borders is not None
        assert (sight.borders.tolist(), sight.longest) == ([0, 3, 5, 6, 12], 6)

    def test_equal_ids_in_two_rows_are_two_documents(self) -> None:
        docs = torch.zeros(3, 4, dtype=torch.long)
        assert sights({("flash", None)}, docs, docs, None)["flash", None].borders.tolist() == [0, 4, 8, 12]
        assert sights({("flash", None)}, None, docs, None)["flash", None].borders.tolist() == [0, 4, 8, 12]

    def test_the_bound_is_a_power_of_two_so_that_few_are_met(self) -> None:
        docs = torch.cat([torch.full((n,), i) for i, n in enumerate((5, 3, 40))])[None]
        assert sights({("flash", None)}, docs, docs, None)["flash", None].longest == 48
        docs = torch.cat([torch.full((n,), i) for i, n in enumerate((5, 3, 9, 31))])[None]
        assert sights({("flash", None)}, docs, docs, None)["flash", None].longest == 32


class TestChoice:
    @pytest.mark.parametrize(
        ("packed", "window", "softcap", "backend"),
        [(True, None, None, "sdpa"), (False, 5, None, "sdpa"), (True, None, 30.0, "eager")],
    )
    def test_on_a_cpu(self, packed: bool, window: int | None, softcap: float | None, backend: str) -> None:
        assert choose("auto", packed, window, softcap, 64, CPU, FP32).backend == backend

    def test_sdpa_with_a_soft_cap_is_computed_plainly_and_said(self) -> None:
        choice = choose("sdpa", False, None, 30.0, 64, CPU, FP32)
        assert (choice.backend, "no soft cap" in choice.reason) == ("eager", True)

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ("flash", "model.attention flash: it runs on CUDA devices, not on cpu"),
            ("flex", "model.attention flex: it runs on CUDA devices"),
            ("flash-attn", "the package flash_attn is not installed"),
            ("fa3", "the package flash_attn_interface is not installed"),
        ],
    )
    def test_what_cannot_run_here_is_refused_with_what_can(self, wanted: str, expected: str) -> None:
        with pytest.raises(UsageError, match=expected) as caught:
            choose(wanted, False, None, None, 64, CPU, FP32)
        assert (caught.value.exit_code, caught.value.hint) == (2, "what works here: auto, sdpa, eager")

    @pytest.mark.parametrize(
        ("packed", "window", "softcap", "head_size", "dtype", "backend"),
        [
            (False, None, None, 64, BF16, "sdpa"),
            (True, None, None, 64, BF16, "flash"),
            (False, 512, None, 64, BF16, "flash"),
            (True, None, None, 64, FP32, "flex"),
            (True, None, None, 80, BF16, "flash"),
            (True, None, None, 36, BF16, "flex"),
            (True, None, None, 8, FP32, "sdpa"),
            (True, 4096, 50.0, 256, BF16, "flex"),
            (False, None, 50.0, 8, FP32, "eager"),
        ],
    )
    def test_on_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch, packed: bool, window: int | None, softcap: float | None,
        head_size: int, dtype: torch.dtype, backend: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert choose("auto", packed, window, softcap, head_size, CUDA, dtype).backend == backend

    def test_an_old_gpu_has_no_variable_lengths(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choose("auto", True, None, None, 64, CUDA, BF16).backend == "flex"
        with pytest.raises(UsageError, match="Ampere"):
            choose("flash", True, None, None, 64, CUDA, BF16)


class TestPackages:
    """flash-attn 2 and 3 are not here; that they are called as they document it is."""

    @pytest.fixture(params=["flash-attn", "fa3"])
    def backend(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = ModuleType(attention.PACKAGES[request.param])
        module.flash_attn_varlen_func = by_the_book(returns_pair=request.param == "fa3")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        yield request.param
        attention.KERNELS.pop(request.param, None)

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_they_give_what_eager_gives(self, name: str, backend: Any) -> None:
        assert apart(solve(PROBLEMS[name], backend, CPU), solve(PROBLEMS[name], "eager", CPU)) <= 1e-6

    def test_auto_takes_the_newest_that_is_installed(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        installed = attention.PACKAGES[backend]
        monkeypatch.setattr(attention, "find_spec", lambda name: True if name == installed else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert choose("auto", True, None, None, 64, CUDA, BF16).backend == backend
        assert choose("auto", False, None, None, 64, CUDA, BF16).backend == "sdpa"


def by_the_book(returns_pair: bool) -> Callable[..., Any]:
    """flash_attn_varlen_func as its documentation has it: causal, each sequence alone, a window of (left, right)."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> Any:  # fmt: skip
        assert causal
        assert cu_seqlens_q.dtype == torch.int32
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q == max_seqlen_k
        parts = []
        for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            problem = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
            window = None if window_size[0] == -1 else window_size[0] + 1
            docs = torch.zeros(1, stop - start, dtype=torch.long)
            lens = Lens("eager", softmax_scale, window, softcap or None)
            mask = sights({("eager", window)}, docs, docs, None)["eager", window]
            parts.append(attend(*problem, mask, lens)[0].transpose(0, 1))
        out = torch.cat(parts)
        return (out, None) if returns_pair else out

    return function
