"""Attention: which keys a query may see, and the kernel that computes it.

A token attends to itself and to earlier tokens of its own document, at most `window` of them where its layer has a
sliding window. All backends give the same result:

| backend | how documents are separated | where it runs |
|---|---|---|
| eager | [T, T] mask, plain matrix products | anywhere; materializes all scores |
| sdpa | no mask if a row is one document, otherwise a [T, T] mask | anywhere; no soft cap |
| flash | cu_seqlens: torch's variable-length kernel | CUDA, bf16 or fp16; no soft cap |
| flash-attn, fa3 | cu_seqlens: the flash-attn packages | where installed; soft caps too |
| fa4 | none, or cu_seqlens: the package flash-attn-4 | Hopper and Blackwell, where installed; soft caps too |
| flex | block mask, compiled | CUDA; soft caps too |

`build_masks` computes what a backend needs to know about a batch, once for all layers and outside of compiled code.

Shapes: B rows, T queries, S keys, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.errors import UsageError
from torchstone.models.choice import AS_REQUESTED, Choice
from torchstone.models.flash_attention_4 import flash_attention, flash_attention_4_error
from torchstone.models.tensors import dtype_name

AttentionBackend = Literal["sdpa", "flash", "flex", "eager", "flash-attn", "fa3", "fa4"]
BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
# The doc_id of padding.
PADDING_DOC_ID = -1
VARLEN_BACKENDS = ("flash", "flash-attn", "fa3", "fa4")
BACKEND_MODULES = {
    "flash-attn": "flash_attn.flash_attn_interface",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute.interface",
}
BACKEND_PACKAGES = {"flash-attn": "flash-attn", "fa3": "flash-attn-3", "fa4": "flash-attn-4"}


# (q_BHTE, k_BKSE, v_BKSE, mask, spec) -> out_BHTE.
Kernel = Callable[[Tensor, Tensor, Tensor, "AttentionMask", "AttentionSpec"], Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes, independent of the batch."""

    backend: AttentionBackend
    scale: float
    window: int | None = None
    softcap: float | None = None
    # Computes the attention of a batch with cu_seqlens or a block mask; None for sdpa and eager.
    kernel: Kernel | None = field(default=None, compare=False)


class AttentionMask(NamedTuple):
    """Which keys each query sees in one batch, in the form its backend needs. If nothing is set: plain causal."""

    attn_mask: Tensor | None = None
    """[B, 1, T, S], for sdpa and eager."""
    cu_seqlens: Tensor | None = None
    """Cumulative document lengths over all rows, int32, for the variable-length kernels."""
    max_seqlen: int = 0
    """An upper bound on the length of a document."""
    block_mask: Any = None
    """FlexAttention's BlockMask."""


class DocumentLimits(NamedTuple):
    """Upper bounds on the number and length of the documents in a batch. With them no kernel waits for the device."""

    documents: int
    length: int


class KVCache:
    """Keys, values and doc_ids of the tokens read so far, for generation."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.doc_ids: Tensor | None = None

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends to a layer's keys and values and returns all of them."""
        if layer in self.keys:
            keys, values = torch.cat((self.keys[layer], keys), dim=2), torch.cat((self.values[layer], values), dim=2)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def update_doc_ids(self, doc_ids_BT: Tensor) -> Tensor:
        """Appends doc_ids and returns those of all keys."""
        self.doc_ids = doc_ids_BT if self.doc_ids is None else torch.cat((self.doc_ids, doc_ids_BT), dim=1)
        return self.doc_ids


def build_masks(
    kinds: set[tuple[AttentionBackend, int | None]],
    doc_ids_BT: Tensor | None,
    positions_BT: Tensor,
    kv_cache: KVCache | None,
    limits: DocumentLimits | None = None,
) -> dict[tuple[AttentionBackend, int | None], AttentionMask]:
    """Returns a batch's mask for every kind of layer (backend, window). With a cache it is always an `attn_mask`."""
    if kv_cache is not None:
        if doc_ids_BT is None:
            raise ValueError("a cache needs doc_ids to tell padding from text")
        key_doc_ids_BS = kv_cache.update_doc_ids(doc_ids_BT)
        return {kind: AttentionMask(attn_mask=build_attn_mask(doc_ids_BT, key_doc_ids_BS, kind[1])) for kind in kinds}
    masks = {}
    # With limits the same for all batches: whether there is a mask decides between two graphs.
    longest = max(positions_BT.shape[1], 0 if limits is None else limits.length)
    for backend, window in kinds:
        if backend == "fa4" and doc_ids_BT is None:
            mask = AttentionMask()
        elif backend in VARLEN_BACKENDS:
            mask = _varlen_mask(doc_ids_BT, positions_BT, limits)
        elif backend == "flex":
            mask = AttentionMask(block_mask=_flex_block_mask(doc_ids_BT, positions_BT, window))
        elif doc_ids_BT is None and (window is None or window >= longest):
            mask = AttentionMask()
        else:
            mask_doc_ids_BT = torch.zeros_like(positions_BT) if doc_ids_BT is None else doc_ids_BT
            mask = AttentionMask(attn_mask=build_attn_mask(mask_doc_ids_BT, mask_doc_ids_BT, window))
        masks[backend, window] = mask
    return masks


def build_attn_mask(query_doc_ids_BT: Tensor, key_doc_ids_BS: Tensor, window: int | None) -> Tensor:
    """Which keys each query may see, [B, 1, T, S], from the doc_ids of both. The last T keys are the queries' own."""
    T, S = query_doc_ids_BT.shape[1], key_doc_ids_BS.shape[1]
    in_range = torch.ones(T, S, dtype=torch.bool, device=key_doc_ids_BS.device).tril(S - T)
    if window is not None:
        in_range = in_range.triu(S - T - window + 1)
    return ((query_doc_ids_BT[:, :, None] == key_doc_ids_BS[:, None, :]) & in_range)[:, None]


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: AttentionMask, spec: AttentionSpec) -> Tensor:
    """Softmax attention with grouped key/value heads, [B, H, T, E]."""
    if spec.kernel is not None and mask.attn_mask is None:
        return spec.kernel(q_BHTE, k_BKSE, v_BKSE, mask, spec)
    if spec.backend == "eager" or spec.softcap is not None:
        return _eager_attention(q_BHTE, k_BKSE, v_BKSE, mask.attn_mask, spec)
    enable_gqa = q_BHTE.shape[1] != k_BKSE.shape[1]
    if enable_gqa and mask.attn_mask is not None and q_BHTE.is_cuda:
        # With a mask, CUDA's fused kernels do not support GQA, and the math kernel materializes all scores.
        k_BKSE, v_BKSE = _repeat_kv(k_BKSE, q_BHTE.shape[1]), _repeat_kv(v_BKSE, q_BHTE.shape[1])
        enable_gqa = False
    return F.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        mask.attn_mask,
        is_causal=mask.attn_mask is None,
        scale=spec.scale,
        enable_gqa=enable_gqa,
    )


@cache
def load_kernel(backend: AttentionBackend) -> Kernel | None:
    """Returns a backend's own kernel, or None; imports it once per process. Never called in compiled code."""
    if backend == "flash":
        return _torch_kernel()
    if backend == "fa4":
        return _flash_attention_4
    if backend in BACKEND_MODULES:
        return _flash_attn_kernel(BACKEND_MODULES[backend])
    return _flex_kernel() if backend == "flex" else None


def choose_backend(
    requested: str, packed: bool, window: int | None, softcap: float | None, head_dim: int,
    device: torch.device, dtype: torch.dtype,
) -> Choice:  # fmt: skip
    """Returns the backend for a model on a device, and the reason; raises if a requested backend cannot run."""

    def unsupported_reason(backend: AttentionBackend) -> str | None:
        return _unsupported_reason(backend, softcap, head_dim, device, dtype)

    if requested != "auto":
        return _check_requested(requested, unsupported_reason, softcap)
    if device.type == "cpu":
        return Choice("sdpa", "on a CPU") if softcap is None else Choice("eager", "sdpa has no soft cap")
    if packed or window is not None or softcap is not None:
        reason = "packed documents" if packed else "sliding windows" if window else "a soft cap"
        for backend in ("fa4", "fa3", "flash-attn", "flash", "flex"):
            if unsupported_reason(backend) is None:
                return Choice(backend, reason)
        if softcap is not None:
            return Choice("eager", f"sdpa has no soft cap; flex {unsupported_reason('flex')}")
        return Choice("sdpa", f"{reason}; flash {unsupported_reason('flash')}")
    return Choice("sdpa" if unsupported_reason("fa4") else "fa4", "one document per row")


def _check_requested(
    requested: str, unsupported_reason: Callable[[AttentionBackend], str | None], softcap: float | None
) -> Choice:
    backend = next(name for name in BACKENDS if name == requested)
    reason = unsupported_reason(backend)
    if reason is not None:
        usable = [name for name in BACKENDS if unsupported_reason(name) is None]
        raise UsageError(f"model.attention {requested} {reason}", f"available here: auto, {', '.join(usable)}")
    if backend == "sdpa" and softcap is not None:
        return Choice("eager", "sdpa was requested, but it has no soft cap, which this model needs")
    return Choice(backend, AS_REQUESTED)


def _unsupported_reason(
    backend: AttentionBackend, softcap: float | None, head_dim: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a backend cannot compute this attention here, as a sentence that starts with the verb; None if it can."""
    if backend in ("eager", "sdpa"):
        return None
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device.type}"
    if backend in BACKEND_MODULES and not _is_installed(backend):
        return f"needs the package {BACKEND_PACKAGES[backend]}, which is not installed"
    if backend == "flex":
        # Its Triton kernels need blocks of at least 16.
        return None if head_dim >= 16 else f"needs a head_dim of at least 16, not {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16, not in {dtype_name(dtype)}"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 and at most 256, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of the Ampere generation or later"
    if backend == "fa4":
        generation = torch.cuda.get_device_capability(device)[0]
        return _fa4_unsupported_reason(softcap, head_dim, generation) or flash_attention_4_error()
    if backend == "flash" and softcap is not None:
        return "has no soft cap, which this model needs"
    return None


def _fa4_unsupported_reason(softcap: float | None, head_dim: int, generation: int) -> str | None:
    """What version 4.0.0b36 asserts. `generation`: 9 is Hopper, 10 and 11 Blackwell, 12 its GPUs for desktops."""
    if not 9 <= generation <= 12:
        return "needs a GPU of the Hopper or Blackwell generation"
    if generation in (10, 11) and 128 < head_dim < 256:
        return f"needs a head_dim of at most 128, or 256, on Blackwell, not {head_dim}"
    if softcap is not None and (generation == 12 or (generation in (10, 11) and head_dim == 256)):
        return f"has no soft cap for a head_dim of {head_dim} on this GPU, which this model needs"
    return None


def _is_installed(backend: AttentionBackend) -> bool:
    try:
        if backend == "fa4":
            # flash-attn has a folder flash_attn.cute, too.
            version(BACKEND_PACKAGES[backend])
        return find_spec(BACKEND_MODULES[backend]) is not None
    except ModuleNotFoundError:
        # The package, or the folder of the module.
        return False


def _repeat_kv(x_BKSE: Tensor, heads: int) -> Tensor:
    return x_BKSE.repeat_interleave(heads // x_BKSE.shape[1], dim=1)


def _eager_attention(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    k_BHSE, v_BHSE = _repeat_kv(k_BKSE, q_BHTE.shape[1]), _repeat_kv(v_BKSE, q_BHTE.shape[1])
    scores = q_BHTE @ k_BHSE.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is None:
        T, S = scores.shape[-2:]
        mask = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(q_BHTE.dtype) @ v_BHSE


def _varlen_mask(doc_ids_BT: Tensor | None, positions_BT: Tensor, limits: DocumentLimits | None) -> AttentionMask:
    """All rows as one sequence of B x T tokens: a document starts at every row and wherever the doc_id changes.

    With fewer documents than `limits` allow, the last ones are empty.
    """
    B, T = positions_BT.shape
    if doc_ids_BT is None:
        cu_seqlens = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=positions_BT.device)
        return AttentionMask(cu_seqlens=cu_seqlens, max_seqlen=max(T, 0 if limits is None else limits.length))
    is_start = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    is_start[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    if limits is None:
        starts = is_start.flatten().nonzero().flatten()
    else:
        # nonzero() would wait until the device knows their number.
        index = torch.arange(B * T, device=doc_ids_BT.device)
        starts = torch.where(is_start.flatten(), index, B * T).sort().values[: limits.documents]
    cu_seqlens = torch.cat((starts, starts.new_full((1,), B * T))).to(torch.int32)
    # The number of documents differs from batch to batch.
    mark_dynamic(cu_seqlens, 0)
    # The kernels only need a bound. Powers of two keep the number of compilations small.
    longest = min(T, 1 << (int(cu_seqlens.diff().max()) - 1).bit_length()) if limits is None else limits.length
    return AttentionMask(cu_seqlens=cu_seqlens, max_seqlen=longest)


def _torch_kernel() -> Kernel:
    # It imports Dynamo, which takes as long as torch itself.
    from torch.nn.attention.varlen import varlen_attn

    # From torch 2.12 on.
    supports_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def kernel(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: AttentionMask, spec: AttentionSpec) -> Tensor:
        q, k, v = _flatten_rows(q_BHTE), _flatten_rows(k_BKSE), _flatten_rows(v_BKSE)
        gqa: dict[str, bool] = {}
        if q.shape[1] != k.shape[1]:
            if supports_gqa:
                gqa = {"enable_gqa": True}
            else:
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = varlen_attn(
            q, k, v, mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen,
            scale=spec.scale, window_size=_window_size(spec), **gqa,
        )  # fmt: skip
        return _unflatten_rows(out, q_BHTE)

    return kernel


def _flash_attn_kernel(package: str) -> Kernel:
    """flash_attn_varlen_func of the flash-attn 2 or 3 package."""
    function = import_module(package).flash_attn_varlen_func

    def kernel(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: AttentionMask, spec: AttentionSpec) -> Tensor:
        out = function(
            _flatten_rows(q_BHTE), _flatten_rows(k_BKSE), _flatten_rows(v_BKSE),
            mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen,
            softmax_scale=spec.scale, causal=True, window_size=_window_size(spec), softcap=spec.softcap or 0.0,
        )  # fmt: skip
        # Some versions of FlashAttention 3 also return the softmax's log-sum-exp.
        return _unflatten_rows(out[0] if isinstance(out, tuple) else out, q_BHTE)

    return kernel


def _flash_attention_4(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: AttentionMask, spec: AttentionSpec
) -> Tensor:
    options = mask.cu_seqlens, mask.max_seqlen, spec.scale, spec.window, spec.softcap or 0.0
    if mask.cu_seqlens is None:
        return flash_attention(*(x.transpose(1, 2) for x in (q_BHTE, k_BKSE, v_BKSE)), *options)[0].transpose(1, 2)
    return _unflatten_rows(flash_attention(*map(_flatten_rows, (q_BHTE, k_BKSE, v_BKSE)), *options)[0], q_BHTE)


def _flatten_rows(x_BHTE: Tensor) -> Tensor:
    """[B, H, T, E] -> [B x T, H, E]"""
    return x_BHTE.transpose(1, 2).flatten(0, 1)


def _unflatten_rows(out: Tensor, like_BHTE: Tensor) -> Tensor:
    return out.unflatten(0, (like_BHTE.shape[0], like_BHTE.shape[2])).transpose(1, 2)


def _window_size(spec: AttentionSpec) -> tuple[int, int]:
    """A window of w tokens is the token itself and the w - 1 before it."""
    return (-1, 0) if spec.window is None else (spec.window - 1, 0)


def _flex_block_mask(doc_ids_BT: Tensor | None, positions_BT: Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    B, T = positions_BT.shape

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        return visible if doc_ids_BT is None else visible & (doc_ids_BT[b, query] == doc_ids_BT[b, key])

    mask_batch_size = None if doc_ids_BT is None else B
    return create_block_mask(mask_mod, mask_batch_size, None, T, T, device=positions_BT.device)


def mark_dynamic(tensor: Tensor, *dims: int) -> None:
    """Compiled code that gets `tensor` is compiled once for all sizes of these dimensions, except 1."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def specialize_floats() -> None:
    """Makes Dynamo treat floats as constants. Otherwise it makes a second model's soft cap a graph input, and fails."""
    torch._dynamo.config.specialize_float = True


def _flex_kernel() -> Kernel:
    from torch.nn.attention.flex_attention import flex_attention

    specialize_floats()
    # Uncompiled, flex_attention materializes every score.
    compiled_flex_attention = torch.compile(flex_attention)

    def kernel(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: AttentionMask, spec: AttentionSpec) -> Tensor:
        softcap = spec.softcap

        def score_mod(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.tanh(score / softcap) * softcap

        return compiled_flex_attention(
            q_BHTE, k_BKSE, v_BKSE, score_mod=None if softcap is None else score_mod, block_mask=mask.block_mask,
            scale=spec.scale, enable_gqa=q_BHTE.shape[1] != k_BKSE.shape[1],
        )  # fmt: skip

    return kernel
