"""Stand-ins for the flash-attn packages, with their signatures: they need a GPU, and are slow here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torchstone.models.attention import AttentionSpec, attend, build_masks


def fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, window_size_left: int | None,
    softcap: float, return_lse: bool, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """_flash_attn_fwd of flash-attn-4: rows, or one sequence with cu_seqlens."""
    assert return_lse
    window = (-1 if window_size_left is None else window_size_left, 0)
    rows, length = q.shape[:2]
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    bound = int(cu_seqlens_q.diff().max()) if max_seqlen_q is None else max_seqlen_q
    function = flash_attn_stand_in(returns_pair=False)
    out = function(*flat, cu_seqlens_q, cu_seqlens_q, bound, bound, softmax_scale, causal, window, softcap)
    is_flat = q.dim() == 3
    lse = q.new_zeros((q.shape[1], rows) if is_flat else (rows, q.shape[2], length), dtype=torch.float32)
    return out.reshape(q.shape), lse, None, None, None  # type: ignore[return-value]


def fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float, causal: bool,
    softcap: float, deterministic: bool = False, **lengths: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    def compute() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "return_lse": True}
        return torch.autograd.grad(fa4_forward(*leaves, **options, **lengths)[0], leaves, dout)

    # Inside of an operator there is no autograd, except in another thread.
    with ThreadPoolExecutor(1) as pool:
        gradients = pool.submit(compute).result()
    # With the strides of the inputs.
    return tuple(torch.empty_like(x).copy_(gradient) for x, gradient in zip((q, k, v), gradients, strict=True))


def flash_attn_stand_in(returns_pair: bool) -> Callable[..., Any]:
    """flash_attn_varlen_func as documented: causal, each sequence alone, a window of (left, right)."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> Any:  # fmt: skip
        assert causal
        assert cu_seqlens_q.dtype == torch.int32
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q == max_seqlen_k
        outputs = []
        for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            qkv = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
            window = None if window_size[0] == -1 else window_size[0] + 1
            doc_ids = torch.zeros(1, stop - start, dtype=torch.long)
            spec = AttentionSpec("eager", softmax_scale, window, softcap or None)
            mask = build_masks({("eager", window)}, doc_ids, doc_ids, None)["eager", window]
            outputs.append(attend(*qkv, mask, spec)[0].transpose(0, 1))
        out = torch.cat(outputs)
        return (out, None) if returns_pair else out

    return function
