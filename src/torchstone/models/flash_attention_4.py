"""FlashAttention 4 (the package flash-attn-4) as an operator of torch, so that it is one node of a compiled graph.

Its own functions would break the graph: they compile kernels at first use. The compiled kernels are kept on disk, so
that only the first run on a machine waits for them.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchstone.user_cache import user_cache


@torch.library.custom_op("torchstone::flash_attention_4", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of [B, T, H, E], or of [tokens, H, E] with `cu_seqlens`; returns also the log-sum-exp."""
    out, lse, *_ = _interface()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=True, window_size_left=_left(window), softcap=softcap, return_lse=True,
        **_lengths(cu_seqlens, max_seqlen),
    )  # fmt: skip
    return out, lse


@flash_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, scale: float, window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads_last = q.shape[:-1]
    shape = (heads_last[1], heads_last[0]) if cu_seqlens is not None else (q.shape[0], q.shape[2], q.shape[1])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("torchstone::flash_attention_4_backward", mutates_args=())
def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    scale: float,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _interface()._flash_attn_bwd(
        q, k, v, out, grad_out.contiguous(), lse, scale, True, softcap, window_size_left=_left(window),
        deterministic=torch.are_deterministic_algorithms_enabled(), **_lengths(cu_seqlens, max_seqlen),
    )  # fmt: skip
    # The fake kernel returns contiguous gradients; the real ones have the strides of q, k and v.
    grad_q, grad_k, grad_v = (gradient.contiguous() for gradient in gradients)
    return grad_q, grad_k, grad_v


@flash_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    like_q, like_k, like_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return like_q, like_k, like_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    gradients = flash_attention_backward(q, k, v, out, grad_out, lse, cu_seqlens, *ctx.options)
    return (*gradients, None, *[None] * len(ctx.options))


flash_attention.register_autograd(_backward, setup_context=_save)


@cache
def flash_attention_4_error() -> str | None:
    """Why the installed package cannot be used; None if it can."""
    try:
        _interface()
    except Exception as error:
        # With other versions of its dependencies, it raises all kinds of errors.
        return f"cannot be imported: {type(error).__name__}: {error}"
    return None


@cache
def _interface() -> Any:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(user_cache() / "flash-attention-4"))
    # Its own arguments, which it converts in another way.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    from flash_attn.cute import interface

    return interface


def _left(window: int | None) -> int | None:
    """A window of w tokens is the token itself and the w - 1 before it."""
    return None if window is None else window - 1


def _lengths(cu_seqlens: Tensor | None, max_seqlen: int) -> dict[str, Any]:
    if cu_seqlens is None:
        return {}
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return lengths | {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
