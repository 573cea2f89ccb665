"""Attention inputs on which all backends must agree: packed and padded rows, grouped heads, windows, soft caps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchstone.models.attention import AttentionBackend, AttentionSpec, attend, build_masks, load_kernel


@dataclass(frozen=True)
class AttentionCase:
    """`documents` are the lengths in each row; None means that every row is one sequence of `length`."""

    documents: tuple[tuple[int, ...], ...] | None = None
    length: int = 24
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.3


CASES = {
    "plain": AttentionCase(),
    "grouped": AttentionCase(kv_heads=2),
    "one kv head": AttentionCase(kv_heads=1),
    "window": AttentionCase(window=5),
    "window as long as the row": AttentionCase(window=24),
    "window of two": AttentionCase(window=2, kv_heads=2),
    "padding": AttentionCase(documents=((24,), (13,), (1,))),
    "packed": AttentionCase(documents=((7, 11, 6), (24,), (1, 1, 20)), kv_heads=2),
    "packed and padded": AttentionCase(documents=((7, 9), (3, 3, 3, 3), (24,)), kv_heads=1),
    "packed window": AttentionCase(documents=((14, 10), (2, 22)), window=4, kv_heads=2),
    "packed window and softcap": AttentionCase(documents=((14, 7), (5, 19)), window=6, softcap=1.5, kv_heads=2),
    "softcap": AttentionCase(softcap=2.0),
    "odd length": AttentionCase(documents=((5, 8), (13,)), length=13),
}


def make_inputs(
    case: AttentionCase, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Queries, keys, values; positions; doc_ids (padding is -1)."""
    rows = 3 if case.documents is None else len(case.documents)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        values = torch.randn(rows, heads, case.length, case.head_dim, generator=generator)
        return values.to(device, dtype).requires_grad_()

    qkv = [random(case.heads), random(case.kv_heads), random(case.kv_heads)]
    positions = torch.zeros(rows, case.length, dtype=torch.long, device=device)
    if case.documents is None:
        return qkv, positions, None
    doc_ids = torch.full((rows, case.length), -1)
    for row, sizes in enumerate(case.documents):
        start = 0
        for document, size in enumerate(sizes):
            doc_ids[row, start : start + size] = document
            start += size
    return qkv, positions, doc_ids.to(device)


def run_attention(
    case: AttentionCase, backend: AttentionBackend, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The output and the gradients of q, k and v, computed by one backend. Padding is left out of all of them."""
    (q, k, v), positions, doc_ids = make_inputs(case, device, dtype)
    spec = AttentionSpec(backend, case.scale, case.window, case.softcap, load_kernel(backend))
    mask = build_masks({(backend, case.window)}, doc_ids, positions, None)[backend, case.window]
    out = attend(q, k, v, mask, spec)
    is_text = torch.ones_like(positions, dtype=torch.bool) if doc_ids is None else doc_ids >= 0
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (out * weights * is_text[:, None, :, None]).sum().backward()
    return [out * is_text[:, None, :, None], q.grad, k.grad, v.grad]


def max_distance(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance over all tensors: norm of the difference over norm."""
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(tensors, expected, strict=True)
    )
