"""Head and loss in one Liger kernel: the result of `token_loss_sum` without materializing all logits.

The head is applied to one chunk of tokens at a time; its logits are overwritten with gradients and dropped. A chunk's
logits take at most as much memory as the hidden states. With a vocabulary of 128,000 and a width of 4,096, all logits
would take about thirty times that, and so would their fp32 copy and gradient. The cost is a host synchronization in
each pass and matmuls in chunks. Gradients are computed in the forward pass, even if no backward pass follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstone.loss.cross_entropy import IGNORE_INDEX


def fused_loss_sum(
    hidden_BTD: Tensor,
    head_weight: Tensor,
    labels_BT: Tensor,
    softcap: float | None = None,
    divisor: float = 1.0,
    loss_tokens: int | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """The sum of the token losses of logits = hidden @ head.T / divisor, soft-capped if `softcap` is set; in fp32.

    The head's gradient is accumulated over the chunks in fp32, whatever the model's dtype. `loss_tokens` and
    `grad_scale` are for `chunked_loss_sum`, which has the same interface; the kernel does not need them.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Kernel

    if divisor != 1.0:
        hidden_BTD = hidden_BTD / divisor
    if torch.is_grad_enabled() and head_weight.requires_grad and not hidden_BTD.requires_grad:
        # The kernel checks only the hidden states for requires_grad, and would give the head no gradient.
        hidden_BTD = hidden_BTD.detach().requires_grad_()
    bias, class_weight, lse_square_scale, label_smoothing, return_z_loss = None, None, 0.0, 0.0, False
    return Kernel.apply(
        hidden_BTD.flatten(0, 1), head_weight, labels_BT.flatten(), bias, class_weight, IGNORE_INDEX,
        lse_square_scale, label_smoothing, "sum", softcap, return_z_loss, torch.float32,
    )[0]  # fmt: skip
