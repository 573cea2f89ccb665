"""The CUDA kernel of AdamW (optim/adamw.py), in Triton. Imported only where it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def update(
    tensors: Sequence[Tensor],
    coefficient: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates `tensors`: parameter, gradient (which is only read), exp_avg, exp_avg_sq, and a copy of the parameter.

    `coefficient` multiplies the gradient; if it is NaN, nothing changes.
    """
    # The kernel goes through memory and does not know strides.
    assert all(t.is_contiguous() for t in tensors) or len({t.stride() for t in tensors}) == 1
    count, (beta1, beta2) = tensors[0].numel(), betas
    with torch.cuda.device(tensors[0].device):
        adamw_kernel[(triton.cdiv(count, BLOCK),)](
            *tensors, coefficient, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps, lr / (1 - beta1**step),
            (1 - beta2**step) ** 0.5, count, BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def adamw_kernel(  # type: ignore[no-untyped-def]
    parameter_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, copy_ptr, coefficient_ptr,
    decay, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, correction, count, BLOCK: tl.constexpr,
):  # fmt: skip
    coefficient = tl.load(coefficient_ptr).to(tl.float32)
    if coefficient != coefficient:
        return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    gradient = tl.load(gradient_ptr + index, mask).to(tl.float32) * coefficient
    parameter = tl.load(parameter_ptr + index, mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + index, mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + index, mask).to(tl.float32)
    parameter -= decay * parameter
    exp_avg += one_minus_beta1 * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * gradient * gradient
    parameter -= step_size * exp_avg / (tl.sqrt_rn(exp_avg_sq) / correction + eps)
    tl.store(parameter_ptr + index, parameter, mask)
    tl.store(exp_avg_ptr + index, exp_avg, mask)
    tl.store(exp_avg_sq_ptr + index, exp_avg_sq, mask)
    # If there is no copy, this is the parameter again.
    tl.store(copy_ptr + index, parameter, mask)
