"""Attention: who sees whom, and by which kernel.

A token sees itself and what came before it in its own document. Rows that hold one sequence each need no mask beyond
causality, which is what the fused kernels are fast at; packed rows pay for a [T, T] mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValueCache:
    """Keys, values and document ids of the tokens already read, for generation."""

    def __init__(self, depth: int) -> None:
        self.keys: list[Tensor | None] = [None] * depth
        self.values: list[Tensor | None] = [None] * depth
        self.doc_ids: Tensor | None = None

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old_keys, old_values = self.keys[layer], self.values[layer]
        self.keys[layer] = keys if old_keys is None else torch.cat((old_keys, keys), dim=2)
        self.values[layer] = values if old_values is None else torch.cat((old_values, values), dim=2)
        return self.keys[layer], self.values[layer]


def visible(doc_ids_BT: Tensor | None, cache: KeyValueCache | None = None) -> Tensor | None:
    """Which keys each query may see, [B, 1, T, S]; None where plain causality says it all."""
    if doc_ids_BT is None:
        if cache is not None:
            raise ValueError("a cache needs doc_ids: they tell padding from text")
        return None
    keys_BS = doc_ids_BT
    if cache is not None:
        keys_BS = doc_ids_BT if cache.doc_ids is None else torch.cat((cache.doc_ids, doc_ids_BT), dim=1)
        cache.doc_ids = keys_BS
    T, S = doc_ids_BT.shape[1], keys_BS.shape[1]
    causal = torch.ones(T, S, dtype=torch.bool, device=doc_ids_BT.device).tril(S - T)
    return ((doc_ids_BT[:, :, None] == keys_BS[:, None, :]) & causal)[:, None]


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    """Softmax attention with grouped key/value heads, [B, H, T, E]."""
    if backend == "eager":
        return _eager(q_BHTE, k_BKSE, v_BKSE, mask)
    grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    if grouped and mask is not None and q_BHTE.is_cuda:
        # With a mask, CUDA's fused fp32 kernels take no grouped heads, and the plain one keeps every score.
        groups = q_BHTE.shape[1] // k_BKSE.shape[1]
        k_BKSE, v_BKSE = k_BKSE.repeat_interleave(groups, dim=1), v_BKSE.repeat_interleave(groups, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def _eager(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None) -> Tensor:
    groups = q_BHTE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = k_BKSE.repeat_interleave(groups, dim=1), v_BKSE.repeat_interleave(groups, dim=1)
    scores = q_BHTE @ k_BHSE.transpose(2, 3) * q_BHTE.shape[-1] ** -0.5
    if mask is None:
        T, S = scores.shape[-2:]
        mask = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(q_BHTE.dtype) @ v_BHSE
