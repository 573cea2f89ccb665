"""Head and loss in one, by Liger's kernel: what `token_loss_sum` gives, without ever having all logits.

The head is applied to a few tokens at a time; their logits are turned into gradients where they lie and forgotten. At
most as much memory as the features have is held for logits, where a vocabulary of 128,000 over a width of 4,096 needs
some thirty times that, and three times over (logits, fp32 copy, gradient). It costs a wait for the device in each
direction, and matrix products in pieces. Gradients are computed in the forward pass: one that is thrown away was paid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstone.loss.cross_entropy import IGNORED


def fused_loss_sum(
    features_BTD: Tensor, head_weight: Tensor, labels_BT: Tensor, softcap: float | None = None, divisor: float = 1.0
) -> Tensor:
    """The sum of the token losses of logits = features @ head / divisor, soft-capped where there is a cap; fp32.

    The head's gradient is summed in fp32 over the pieces, whatever the numbers of the model are.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Kernel

    if divisor != 1.0:
        features_BTD = features_BTD / divisor
    if torch.is_grad_enabled() and head_weight.requires_grad and not features_BTD.requires_grad:
        # The kernel looks at the features alone to see whether gradients are wanted, and would give the head none.
        features_BTD = features_BTD.detach().requires_grad_()
    no_bias, no_weights, no_z_loss, no_smoothing, keep_z_loss = None, None, 0.0, 0.0, False
    return Kernel.apply(
        features_BTD.flatten(0, 1), head_weight, labels_BT.flatten(), no_bias, no_weights, IGNORED,
        no_z_loss, no_smoothing, "sum", softcap, keep_z_loss, torch.float32,
    )[0]  # fmt: skip
