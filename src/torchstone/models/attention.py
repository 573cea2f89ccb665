"""Attention: who sees whom, and by which kernel.

A token sees itself and what came before it in its own document, at most `window` tokens of it where its layer has a
window. Five ways compute that, and give the same numbers:

| backend | documents are kept apart by | where |
|---|---|---|
| eager | a [T, T] mask, plain matrix products | anywhere; keeps every score |
| sdpa | nothing where a row is one document, else a [T, T] mask | anywhere, no soft cap; fast where there is no mask |
| flash | lengths: torch's variable-length kernel never looks across a border | CUDA, bf16 or fp16, no soft cap |
| flash-attn, fa3 | the same, by the flash-attn packages | where they are installed; soft caps too |
| flex | a mask of blocks, compiled | CUDA; soft caps too |

What a backend needs to know of a batch is worked out once for all layers, outside of what is compiled (`sights`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torchstone.errors import UsageError

Backend = Literal["sdpa", "flash", "flex", "eager", "flash-attn", "fa3"]
# The document that padding is.
PADDING = -1
VARIABLE_LENGTH = ("flash", "flash-attn", "fa3")
# From torch 2.12 on.
VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
KERNELS: dict[str, Callable[..., Tensor]] = {}
PACKAGES = {"flash-attn": "flash_attn", "fa3": "flash_attn_interface"}


@dataclass(frozen=True)
class Lens:
    """What one layer's attention is, whatever the batch."""

    backend: Backend
    scale: float
    window: int | None = None
    softcap: float | None = None


class Sight(NamedTuple):
    """Who sees whom in one batch, in the form that the backend wants; all empty where plain causality says it all."""

    mask: Tensor | None = None
    """[B, 1, T, S], for sdpa and eager."""
    borders: Tensor | None = None
    """Where documents begin and end in the row of all rows, int32, for the variable-length kernels."""
    longest: int = 0
    """No document is longer."""
    blocks: Any = None
    """FlexAttention's mask."""


class KeyValueCache:
    """Keys, values and document ids of the tokens already read, for generation."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.doc_ids: Tensor | None = None

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.keys:
            keys, values = torch.cat((self.keys[layer], keys), dim=2), torch.cat((self.values[layer], values), dim=2)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def seen_with(self, doc_ids_BT: Tensor) -> Tensor:
        """Document ids of all keys once the new ones are there."""
        self.doc_ids = doc_ids_BT if self.doc_ids is None else torch.cat((self.doc_ids, doc_ids_BT), dim=1)
        return self.doc_ids


def sights(
    lenses: set[tuple[Backend, int | None]], doc_ids_BT: Tensor | None, like_BT: Tensor, cache: KeyValueCache | None
) -> dict[tuple[Backend, int | None], Sight]:
    """What each kind of layer needs to know of a batch shaped like `like`. With a cache all is seen through a mask."""
    if cache is not None:
        if doc_ids_BT is None:
            raise ValueError("a cache needs doc_ids: they tell padding from text")
        keys_BS = cache.seen_with(doc_ids_BT)
        return {lens: Sight(mask=visible(doc_ids_BT, keys_BS, lens[1])) for lens in lenses}
    found = {}
    for backend, window in lenses:
        open_kernel(backend)
        if backend in VARIABLE_LENGTH:
            found[backend, window] = _borders(doc_ids_BT, like_BT)
        elif backend == "flex":
            found[backend, window] = Sight(blocks=_flex_blocks(doc_ids_BT, like_BT, window))
        elif doc_ids_BT is None and (window is None or window >= like_BT.shape[1]):
            found[backend, window] = Sight()
        else:
            docs_BT = torch.zeros_like(like_BT) if doc_ids_BT is None else doc_ids_BT
            found[backend, window] = Sight(mask=visible(docs_BT, docs_BT, window))
    return found


def visible(queries_BT: Tensor, keys_BS: Tensor, window: int | None) -> Tensor:
    """Which keys each query may see, [B, 1, T, S], from the document ids of both; the last T keys are the queries'."""
    T, S = queries_BT.shape[1], keys_BS.shape[1]
    near = torch.ones(T, S, dtype=torch.bool, device=keys_BS.device).tril(S - T)
    if window is not None:
        near = near.triu(S - T - window + 1)
    return ((queries_BT[:, :, None] == keys_BS[:, None, :]) & near)[:, None]


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sight: Sight, lens: Lens) -> Tensor:
    """Softmax attention with grouped key/value heads, [B, H, T, E]."""
    if sight.borders is not None:
        return _variable_length(q_BHTE, k_BKSE, v_BKSE, sight, lens)
    if sight.blocks is not None:
        return _flex(q_BHTE, k_BKSE, v_BKSE, sight, lens)
    if lens.backend == "eager" or lens.softcap is not None:
        return _eager(q_BHTE, k_BKSE, v_BKSE, sight.mask, lens)
    grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    if grouped and sight.mask is not None and q_BHTE.is_cuda:
        # With a mask, CUDA's fused kernels take no grouped heads, and the plain one keeps every score.
        k_BKSE, v_BKSE = _repeated(k_BKSE, q_BHTE.shape[1]), _repeated(v_BKSE, q_BHTE.shape[1])
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, sight.mask, is_causal=sight.mask is None, scale=lens.scale, enable_gqa=grouped
    )


def open_kernel(backend: Backend) -> None:
    """Gets a kernel that is not torch's own or has to be compiled, once, before a model uses it."""
    if backend in PACKAGES and backend not in KERNELS:
        KERNELS[backend] = _package(PACKAGES[backend])
    elif backend == "flex" and backend not in KERNELS:
        from torch.nn.attention.flex_attention import flex_attention

        # Floats here are a model's constants. A second model's other cap would be taken for an input, and fail.
        torch._dynamo.config.specialize_float = True
        # Without being compiled it would keep every score.
        KERNELS["flex"] = torch.compile(flex_attention)


class Choice(NamedTuple):
    backend: Backend
    reason: str


def choose(
    wanted: str, packed: bool, window: int | None, softcap: float | None, head_size: int,
    device: torch.device, dtype: torch.dtype,
) -> Choice:  # fmt: skip
    """The backend for a model on a device, and why; one that was asked for and cannot do it is refused."""
    why_not = {
        backend: _why_not(backend, softcap, head_size, device, dtype)
        for backend in ("sdpa", "flash", "flex", "eager", "flash-attn", "fa3")
    }
    if wanted != "auto":
        reason = why_not[wanted]
        if reason is not None:
            able = [name for name, other in why_not.items() if other is None]
            raise UsageError(f"model.attention {wanted}: {reason}", f"what works here: auto, {', '.join(able)}")
        if wanted == "sdpa" and softcap is not None:
            return Choice("eager", "sdpa was asked for, but has no soft cap, which this model needs")
        return Choice(wanted, "as asked for")  # type: ignore[arg-type]
    if device.type == "cpu":
        return Choice("sdpa", "on a CPU") if softcap is None else Choice("eager", "sdpa has no soft cap")
    what = "rows hold several documents" if packed else "its layers have windows" if window else "a soft cap"
    if packed or window is not None or softcap is not None:
        for backend in ("fa3", "flash-attn", "flash", "flex"):
            if why_not[backend] is None:
                return Choice(backend, what)
    if softcap is not None:
        return Choice("eager", f"sdpa has no soft cap; {why_not['flex']}")
    if packed or window is not None:
        return Choice("sdpa", f"{what}, and flash {why_not['flash']}")
    return Choice("sdpa", "one document a row")


def _why_not(
    backend: str, softcap: float | None, head_size: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What keeps a backend from computing this attention here."""
    if backend in ("eager", "sdpa"):
        return None
    if backend in PACKAGES and find_spec(PACKAGES[backend]) is None:
        return f"the package {PACKAGES[backend]} is not installed"
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if backend == "flex":
        # Its blocks are powers of two.
        return None if head_size >= 16 else f"it needs heads of 16 or more, not {head_size}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
    if head_size > 256 or head_size % 8:
        return f"it needs heads of a multiple of 8 up to 256, not {head_size}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of the Ampere generation or later"
    if backend == "flash" and softcap is not None:
        return "it has no soft cap, which this model needs"
    return None


def _repeated(x_BKSE: Tensor, heads: int) -> Tensor:
    return x_BKSE.repeat_interleave(heads // x_BKSE.shape[1], dim=1)


def _eager(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, lens: Lens) -> Tensor:
    k_BHSE, v_BHSE = _repeated(k_BKSE, q_BHTE.shape[1]), _repeated(v_BKSE, q_BHTE.shape[1])
    scores = q_BHTE @ k_BHSE.transpose(2, 3) * lens.scale
    if lens.softcap is not None:
        scores = torch.tanh(scores / lens.softcap) * lens.softcap
    if mask is None:
        T, S = scores.shape[-2:]
        mask = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(q_BHTE.dtype) @ v_BHSE


def _borders(doc_ids_BT: Tensor | None, ids_BT: Tensor) -> Sight:
    """All rows in one line; a border at every row's beginning and wherever the document changes."""
    B, T = ids_BT.shape
    if doc_ids_BT is None:
        borders = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=ids_BT.device)
        return Sight(borders=borders, longest=T)
    changes = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    changes[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    borders = torch.cat((starts, starts.new_tensor([B * T]))).to(torch.int32)
    # As many as there are documents: no two batches have the same number.
    torch._dynamo.maybe_mark_dynamic(borders, 0)
    # The kernels only need a bound; few different ones mean few compilations.
    longest = 1 << (int(borders.diff().max()) - 1).bit_length()
    return Sight(borders=borders, longest=min(longest, T))


def _variable_length(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sight: Sight, lens: Lens) -> Tensor:
    B, T = q_BHTE.shape[0], q_BHTE.shape[2]
    # [B, H, T, E] -> [B x T, H, E]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTE, k_BKSE, v_BKSE))
    kernel = _varlen if lens.backend == "flash" else KERNELS[lens.backend]
    # A window of w tokens is oneself and the w - 1 before.
    window = (-1, 0) if lens.window is None else (lens.window - 1, 0)
    out = kernel(q, k, v, sight, lens, window)
    return out.unflatten(0, (B, T)).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: Sight, lens: Lens, window: tuple[int, int]) -> Tensor:
    grouped: dict[str, bool] = {}
    if q.shape[1] != k.shape[1]:
        if VARLEN_TAKES_GROUPS:
            grouped = {"enable_gqa": True}
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return varlen_attn(
        q, k, v, sight.borders, sight.borders, sight.longest, sight.longest,
        scale=lens.scale, window_size=window, **grouped,
    )  # fmt: skip


def _package(name: str) -> Callable[..., Tensor]:
    """flash_attn_varlen_func of the flash-attn 2 or 3 package, called the same way."""
    function = import_module(name).flash_attn_varlen_func

    def kernel(q: Tensor, k: Tensor, v: Tensor, sight: Sight, lens: Lens, window: tuple[int, int]) -> Tensor:
        out = function(
            q, k, v, sight.borders, sight.borders, sight.longest, sight.longest,
            softmax_scale=lens.scale, causal=True, window_size=window, softcap=lens.softcap or 0.0,
        )  # fmt: skip
        # Some versions of the third return the softmax's denominators as well.
        return out[0] if isinstance(out, tuple) else out

    return kernel


def _flex_blocks(doc_ids_BT: Tensor | None, ids_BT: Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    B, T = ids_BT.shape
    docs_BT = doc_ids_BT

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        return seen if docs_BT is None else seen & (docs_BT[b, query] == docs_BT[b, key])

    rows = None if docs_BT is None else B
    return create_block_mask(sees, rows, None, T, T, device=ids_BT.device)


def _flex(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sight: Sight, lens: Lens) -> Tensor:
    cap = lens.softcap

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return KERNELS["flex"](
        q_BHTE, k_BKSE, v_BKSE, score_mod=None if cap is None else capped, block_mask=sight.blocks,
        scale=lens.scale, enable_gqa=q_BHTE.shape[1] != k_BKSE.shape[1],
    )  # fmt: skip
