"""Attention backends against eager, forward and backward, in every kind of row; and which backend is chosen.

On a CPU this tests sdpa. The kernels that need a GPU are in tests/gpu_tests/test_attention.py, on the same cases.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import torchstone.models.attention as attention
from attention_cases import CASES, make_inputs, max_distance, run_attention
from attention_stand_ins import fa4_backward, fa4_forward, flash_attn_stand_in
from tiny_families import VOCABULARY, make_model
from torchstone.checkpoint.model_folder import load_model
from torchstone.errors import UsageError
from torchstone.models.attention import (
    AttentionMask,
    AttentionSpec,
    attend,
    build_attn_mask,
    build_masks,
    choose_backend,
    load_kernel,
)
from torchstone.models.choice import Choice
from torchstone.models.execution import ExecutionOptions
from torchstone.models.flash_attention_4 import flash_attention, flash_attention_4_error, flash_attention_backward

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_sdpa_equals_eager_forward_and_backward(name: str) -> None:
    assert max_distance(run_attention(CASES[name], "sdpa", CPU), run_attention(CASES[name], "eager", CPU)) <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_eager_equals_a_softmax_over_the_visible_tokens(name: str) -> None:
    """The reference goes token by token, in fp64, without any mask."""
    case = CASES[name]
    (q, k, v), positions, doc_ids = make_inputs(case, CPU, torch.float64)
    # The same random values, drawn in fp32.
    out = run_attention(case, "eager", CPU)[0].double()
    doc_ids = torch.zeros_like(positions) if doc_ids is None else doc_ids
    group_size = case.heads // case.kv_heads
    for row in range(positions.shape[0]):
        for t in [t for t in range(case.length) if doc_ids[row, t] >= 0]:
            visible = [s for s in range(t + 1) if doc_ids[row, s] == doc_ids[row, t]]
            visible = [s for s in visible if case.window is None or t - s < case.window]
            for head in range(case.heads):
                scores = k[row, head // group_size, visible] @ q[row, head, t] * case.scale
                if case.softcap is not None:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                expected = scores.softmax(0) @ v[row, head // group_size, visible]
                assert (out[row, head, t] - expected).abs().max().item() <= 1e-5


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_sdpa_and_eager_give_a_model_the_same_logits_and_gradients(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, family)
    ids = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))
    doc_ids = torch.tensor([[0] * 12 + [1] * 18, [0] * 25 + [-1] * 5])
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None].repeat(2, 1)
    positions[1] = torch.arange(30) * (doc_ids[1] == 0)
    results = []
    for backend in ("eager", "sdpa"):
        model = load_model(folder, CPU, dtype, ExecutionOptions(attention=backend)).module
        logits = model(ids, positions, doc_ids)
        logits.float().square().mean().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert max_distance(results[1], results[0]) <= (1e-5 if dtype == FP32 else 3e-2)


def test_a_document_does_not_depend_on_its_neighbors_in_the_row() -> None:
    for backend in ("eager", "sdpa"):
        (q, k, v), positions, doc_ids = make_inputs(CASES["packed"], CPU, FP32)
        mask = build_masks({(backend, None)}, doc_ids, positions, None)[backend, None]
        before = attend(q, k, v, mask, AttentionSpec(backend, 0.3))
        changed = v.detach().clone()
        changed[0, :, :7] += 100
        after = attend(q, k, changed, mask, AttentionSpec(backend, 0.3))
        assert torch.equal(before[0, :, 7:], after[0, :, 7:])
        assert not torch.equal(before[0, :, :7], after[0, :, :7])


def test_a_row_of_one_document_needs_no_mask() -> None:
    positions = torch.zeros(2, 8, dtype=torch.long)
    assert build_masks({("sdpa", None)}, None, positions, None)["sdpa", None].attn_mask is None
    assert build_masks({("sdpa", 8)}, None, positions, None)["sdpa", 8].attn_mask is None
    mask = build_masks({("sdpa", 3)}, None, positions, None)["sdpa", 3].attn_mask
    assert mask is not None
    assert mask[0, 0].int().tolist()[5] == [0, 0, 0, 1, 1, 1, 0, 0]


def test_new_tokens_see_the_cache_within_their_window() -> None:
    keys = torch.tensor([[-1, -1, 0, 0, 0, 0, 0]])
    queries = keys[:, -2:]
    assert build_attn_mask(queries, keys, None)[0, 0].int().tolist() == [[0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert build_attn_mask(queries, keys, 3)[0, 0].int().tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]


def varlen_mask(doc_ids: Tensor | None, positions: Tensor) -> AttentionMask:
    return build_masks({("flash", None)}, doc_ids, positions, None)["flash", None]


class TestCuSeqlens:
    def test_a_document_starts_at_every_row_and_every_new_doc_id(self) -> None:
        doc_ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
        mask = varlen_mask(doc_ids, torch.zeros_like(doc_ids))
        assert (mask.cu_seqlens.tolist(), mask.max_seqlen) == ([0, 3, 5, 6, 12], 6)

    def test_equal_doc_ids_in_two_rows_are_two_documents(self) -> None:
        doc_ids = torch.zeros(3, 4, dtype=torch.long)
        assert varlen_mask(doc_ids, doc_ids).cu_seqlens.tolist() == [0, 4, 8, 12]
        assert varlen_mask(None, doc_ids).cu_seqlens.tolist() == [0, 4, 8, 12]

    @pytest.mark.parametrize(("lengths", "bound"), [((5, 3, 40), 48), ((5, 3, 9, 31), 32)])
    def test_max_seqlen_is_a_power_of_two_or_the_row_length(self, lengths: tuple[int, ...], bound: int) -> None:
        doc_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
        assert varlen_mask(doc_ids, doc_ids).max_seqlen == bound


class TestChoice:
    @pytest.fixture(autouse=True)
    def without_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "find_spec", lambda name: None)

    @pytest.mark.parametrize(
        ("packed", "window", "softcap", "backend"),
        [(True, None, None, "sdpa"), (False, 5, None, "sdpa"), (True, None, 30.0, "eager")],
    )
    def test_auto_on_a_cpu(self, packed: bool, window: int | None, softcap: float | None, backend: str) -> None:
        assert choose_backend("auto", packed, window, softcap, 64, CPU, FP32).value == backend

    def test_sdpa_becomes_eager_for_a_soft_cap_with_the_reason(self) -> None:
        choice = choose_backend("sdpa", False, None, 30.0, 64, CPU, FP32)
        assert choice == Choice("eager", "sdpa was requested, but it has no soft cap, which this model needs")

    @pytest.mark.parametrize("requested", ["flash", "flex", "flash-attn", "fa3", "fa4"])
    def test_a_backend_that_cannot_run_is_refused_with_those_that_can(self, requested: str) -> None:
        with pytest.raises(UsageError, match=f"model.attention {requested} runs on CUDA devices, not on cpu") as caught:
            choose_backend(requested, False, None, None, 64, CPU, FP32)
        assert (caught.value.exit_code, caught.value.hint) == (2, "available here: auto, sdpa, eager")

    @pytest.mark.parametrize("requested", ["flash-attn", "fa3", "fa4"])
    def test_a_package_that_is_not_installed(self, requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        with pytest.raises(
            UsageError, match=f"model.attention {requested} needs the package flash-attn.*not installed"
        ):
            choose_backend(requested, False, None, None, 64, CUDA, BF16)

    @pytest.mark.parametrize(
        ("packed", "window", "softcap", "head_dim", "dtype", "backend"),
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
    def test_auto_on_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch, packed: bool, window: int | None, softcap: float | None,
        head_dim: int, dtype: torch.dtype, backend: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert choose_backend("auto", packed, window, softcap, head_dim, CUDA, dtype).value == backend

    def test_gpus_before_ampere_have_no_variable_length_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choose_backend("auto", True, None, None, 64, CUDA, BF16).value == "flex"
        with pytest.raises(UsageError, match="Ampere"):
            choose_backend("flash", True, None, None, 64, CUDA, BF16)


class TestPackages:
    """The flash-attn packages are not installed here; a stand-in has the signature of each."""

    @pytest.fixture(params=["flash-attn", "fa3", "fa4"])
    def backend(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        module = ModuleType(attention.BACKEND_MODULES[request.param])
        if request.param == "fa4":
            module.__dict__.update(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
            monkeypatch.setattr("torchstone.models.flash_attention_4._interface", lambda: module)
        else:
            function = flash_attn_stand_in(returns_pair=request.param == "fa3")
            module.__dict__.update(flash_attn_varlen_func=function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(attention, "flash_attention_4_error", lambda: None)
        load_kernel.cache_clear()
        yield request.param
        load_kernel.cache_clear()

    @pytest.mark.parametrize("name", CASES)
    def test_they_equal_eager(self, name: str, backend: Any) -> None:
        assert max_distance(run_attention(CASES[name], backend, CPU), run_attention(CASES[name], "eager", CPU)) <= 1e-6

    def test_auto_takes_an_installed_package_for_packed_rows(
        self, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed = attention.BACKEND_MODULES[backend]
        monkeypatch.setattr(attention, "find_spec", lambda name: True if name == installed else None)
        monkeypatch.setattr(attention, "version", lambda package: "4.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert choose_backend("auto", True, None, None, 64, CUDA, BF16).value == backend
        one_document = choose_backend("auto", False, None, None, 64, CUDA, BF16).value
        assert one_document == ("fa4" if backend == "fa4" else "sdpa")

    def test_fa4_is_one_node_of_a_compiled_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("interface")
        module.__dict__.update(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
        monkeypatch.setattr("torchstone.models.flash_attention_4._interface", lambda: module)
        expected = [run_attention(case, "eager", CPU) for case in CASES.values()]
        monkeypatch.setattr("attention_cases.attend", torch.compile(attend, fullgraph=True, backend="aot_eager"))
        for case, values in zip(CASES.values(), expected, strict=True):
            torch.compiler.reset()
            assert max_distance(run_attention(case, "fa4", CPU), values) <= 1e-6

    @pytest.mark.parametrize("packed", [True, False])
    def test_the_operators_of_fa4_return_what_the_compiler_expects(
        self, monkeypatch: pytest.MonkeyPatch, packed: bool
    ) -> None:
        """Also for queries and keys that are dense but not contiguous, as partial rotary makes them."""
        module = ModuleType("interface")
        module.__dict__.update(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
        monkeypatch.setattr("torchstone.models.flash_attention_4._interface", lambda: module)
        q, k, v = (torch.randn(2, heads, 6, 8).transpose(1, 2) for heads in (4, 2, 2))
        cu_seqlens = None
        if packed:
            q, k, v = (x[0] for x in (q, k, v))
            cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
        options = (cu_seqlens, 6, 0.3, None, 0.0)
        assert not q.is_contiguous()
        out, lse = flash_attention(q, k, v, *options)
        torch.library.opcheck(flash_attention, (q, k, v, *options), test_utils="test_faketensor")
        args = (q, k, v, out, torch.randn_like(out), lse, *options)
        torch.library.opcheck(flash_attention_backward, args, test_utils="test_faketensor")

    @pytest.mark.parametrize(
        ("generation", "head_dim", "softcap", "reason"),
        [
            (9, 256, 50.0, None), (9, 192, None, None), (10, 128, 50.0, None), (10, 256, None, None),
            (10, 192, None, "at most 128, or 256"), (10, 256, 50.0, "no soft cap for a head_dim of 256"),
            (12, 64, 50.0, "no soft cap"), (12, 64, None, None),
        ],
    )  # fmt: skip
    def test_auto_does_not_take_fa4_where_it_would_fail(
        self, monkeypatch: pytest.MonkeyPatch, generation: int, head_dim: int, softcap: float | None, reason: str | None
    ) -> None:
        pretend_that_all_are_installed(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
        choice = choose_backend("auto", True, None, softcap, head_dim, CUDA, BF16)
        assert (choice.value == "fa4") == (reason is None)
        if reason is not None:
            with pytest.raises(UsageError, match=reason):
                choose_backend("fa4", True, None, softcap, head_dim, CUDA, BF16)

    def test_fa4_needs_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_that_all_are_installed(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with pytest.raises(UsageError, match="needs a GPU of the Hopper or Blackwell generation"):
            choose_backend("fa4", False, None, None, 64, CUDA, BF16)

    @pytest.mark.parametrize(
        ("distribution", "reason"),
        [
            (None, "needs the package flash-attn-4, which is not installed"),
            ("flash_attn_4-4.0.dist-info", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ],
    )
    def test_auto_does_not_take_what_cannot_be_imported(
        self, distribution: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """flash-attn 2.8 brings a folder flash_attn/cute whose dependencies it does not install."""
        write_package(tmp_path / "flash_attn/cute/interface.py", "import nowhere")
        write_package(tmp_path / "flash_attn/flash_attn_interface.py", "def flash_attn_varlen_func(): ...")
        if distribution is None:
            # Also where it is installed.
            monkeypatch.setattr(attention, "version", Mock(side_effect=PackageNotFoundError))
        else:
            (tmp_path / distribution).mkdir()
            (tmp_path / distribution / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        flash_attention_4_error.cache_clear()
        monkeypatch.setenv("TORCHSTONE_CACHE", str(tmp_path))
        # Set first, so that they are restored.
        for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        try:
            assert choose_backend("auto", True, None, None, 64, CUDA, BF16).value == "flash-attn"
            assert choose_backend("auto", False, None, None, 64, CUDA, BF16).value == "sdpa"
            with pytest.raises(UsageError, match=f"model.attention fa4 {reason}"):
                choose_backend("fa4", True, None, None, 64, CUDA, BF16)
            # Its compiled kernels are kept for the next run.
            folder = None if distribution is None else str(tmp_path / "flash-attention-4")
            assert os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") == folder
        finally:
            flash_attention_4_error.cache_clear()
            for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
                del sys.modules[name]


def pretend_that_all_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    monkeypatch.setattr(attention, "version", lambda package: "4.0")
    monkeypatch.setattr(attention, "flash_attention_4_error", lambda: None)


def write_package(module: Path, text: str) -> None:
    module.parent.mkdir(parents=True, exist_ok=True)
    (module.parent / "__init__.py").touch()
    module.write_text(text)
