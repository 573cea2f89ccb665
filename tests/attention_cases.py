"""Attention problems that every backend must solve alike: rows of documents, groups of heads, windows, caps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchstone.models.attention import Backend, Lens, attend, sights


@dataclass(frozen=True)
class Problem:
    """`documents` are the lengths in each row; None means that every row is one sequence of `length`."""

    documents: tuple[tuple[int, ...], ...] | None = None
    length: int = 24
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.3


PROBLEMS = {
    "plain": Problem(),
    "grouped": Problem(kv_heads=2),
    "one key head": Problem(kv_heads=1),
    "window": Problem(window=5),
    "window as long as the row": Problem(window=24),
    "window of two": Problem(window=2, kv_heads=2),
    "padding": Problem(documents=((24,), (13,), (1,))),
    "packed": Problem(documents=((7, 11, 6), (24,), (1, 1, 20)), kv_heads=2),
    "packed and padded": Problem(documents=((7, 9), (3, 3, 3, 3), (24,)), kv_heads=1),
    "packed window": Problem(documents=((14, 10), (2, 22)), window=4, kv_heads=2),
    "packed window and cap": Problem(documents=((14, 7), (5, 19)), window=6, softcap=1.5, kv_heads=2),
    "cap": Problem(softcap=2.0),
    "odd length": Problem(documents=((5, 8), (13,)), length=13),
}


def tensors(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Queries, keys, values; ids; document ids (padding -1)."""
    rows = 3 if problem.documents is None else len(problem.documents)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        made = torch.randn(rows, heads, problem.length, problem.head_size, generator=generator)
        return made.to(device, dtype).requires_grad_()

    qkv = [random(problem.heads), random(problem.kv_heads), random(problem.kv_heads)]
    ids = torch.zeros(rows, problem.length, dtype=torch.long, device=device)
    if problem.documents is None:
        return qkv, ids, None
    docs = torch.full((rows, problem.length), -1)
    for row, sizes in enumerate(problem.documents):
        start = 0
        for document, size in enumerate(sizes):
            docs[row, start : start + size] = document
            start += size
    return qkv, ids, docs.to(device)


def solve(problem: Problem, backend: Backend, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The result and the three gradients, by one backend; what padding gives and gets is left out."""
    (q, k, v), ids, docs = tensors(problem, device, dtype)
    lens = Lens(backend, problem.scale, problem.window, problem.softcap)
    sight = sights({(backend, problem.window)}, docs, ids, None)[backend, problem.window]
    out = attend(q, k, v, sight, lens)
    real = torch.ones_like(ids, dtype=torch.bool) if docs is None else docs >= 0
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (out * weights * real[:, None, :, None]).sum().backward()
    return [out * real[:, None, :, None], q.grad, k.grad, v.grad]


def apart(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of result and gradients, by norm over norm."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, wanted, strict=True))
