"""The Triton kernel of the chunked loss. chunked.py has its reference: `write_statistics` and `write_gradient`.

One program per token reads its logits twice, first for the largest and the sum of exponentials, then for the gradient,
which it writes over them. A program has as many threads as a multiprocessor likes to have, so that few tokens are in
flight and the second read comes from the L2 cache: the logits pass through memory about twice.

Only chunked.py imports this module, where it needs it: Triton is not installed everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchstone.loss.chunked import Head
from torchstone.loss.cross_entropy import IGNORE_INDEX

MAX_BLOCK, MAX_WARPS = 16384, 32
# Elements of one thread.
ELEMENTS = 16


def launch(
    logits_NV: Tensor, labels_N: Tensor, statistics_3N: Tensor, head: Head, statistics: bool, gradient: bool
) -> None:
    """With `statistics` writes them, otherwise reads them; with `gradient` overwrites the logits with it."""
    tokens, size = logits_NV.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(size))
    num_warps = max(1, min(MAX_WARPS, block // ELEMENTS // 32))
    cross_entropy_kernel[(tokens,)](
        logits_NV, labels_N, statistics_3N, logits_NV.stride(0), statistics_3N.stride(0), head.vocab_start,
        head.vocab_size, 1.0 / head.divisor, head.softcap or 1.0, 1.0 / (head.softcap or 1.0), head.grad_scale,
        SIZE=size, IGNORE=IGNORE_INDEX, HAS_DIVISOR=head.divisor != 1.0, HAS_SOFTCAP=head.softcap is not None,
        STATISTICS=statistics, GRADIENT=gradient, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _scaled(x, scale, softcap, inverse_softcap, HAS_DIVISOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x.to(tl.float32)
    if HAS_DIVISOR:
        x *= scale
    if HAS_SOFTCAP:
        # tanh; the one of libdevice does not run everywhere.
        x = (2.0 * tl.sigmoid(2.0 * x * inverse_softcap) - 1.0) * softcap
    return x


# The number of tokens changes from step to step.
@triton.jit(do_not_specialize=["statistics_stride"])
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, labels, statistics, logits_stride, statistics_stride, vocab_start, vocab_size, scale, softcap,
    inverse_softcap, grad_scale, SIZE: tl.constexpr, IGNORE: tl.constexpr, HAS_DIVISOR: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    target = label - vocab_start
    logits += token * logits_stride
    statistics += token
    if label == IGNORE:
        if GRADIENT:
            for start in range(0, SIZE, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                tl.store(logits + offsets, tl.zeros([BLOCK], dtype=logits.dtype.element_ty), mask=offsets < SIZE)
        return
    if STATISTICS:
        # Read before any thread overwrites it: the reductions below are barriers.
        target_logit = 0.0
        if (target >= 0) & (target < SIZE):
            target_logit = _scaled(tl.load(logits + target), scale, softcap, inverse_softcap, HAS_DIVISOR, HAS_SOFTCAP)
        if (label < 0) | (label >= vocab_size):
            target_logit = float("nan")
        largest = float("-inf")
        total = 0.0
        for start in range(0, SIZE, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offsets, mask=offsets < SIZE, other=0.0, eviction_policy="evict_last")
            x = _scaled(x, scale, softcap, inverse_softcap, HAS_DIVISOR, HAS_SOFTCAP)
            x = tl.where(offsets < SIZE, x, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(x))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest))
            largest = new_largest
        tl.store(statistics, largest)
        tl.store(statistics + statistics_stride, total)
        tl.store(statistics + 2 * statistics_stride, target_logit)
    else:
        largest = tl.load(statistics)
        total = tl.load(statistics + statistics_stride)
    if GRADIENT:
        inverse_total = grad_scale / total
        for start in range(0, SIZE, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offsets, mask=offsets < SIZE, other=0.0, eviction_policy="evict_first")
            x = _scaled(x, scale, softcap, inverse_softcap, HAS_DIVISOR, HAS_SOFTCAP)
            gradient = tl.exp(x - largest) * inverse_total
            gradient = tl.where(offsets == target, gradient - grad_scale, gradient)
            if HAS_SOFTCAP:
                tanh = x * inverse_softcap
                gradient *= 1.0 - tanh * tanh
            if HAS_DIVISOR:
                gradient *= scale
            tl.store(logits + offsets, gradient.to(logits.dtype.element_ty), mask=offsets < SIZE)
