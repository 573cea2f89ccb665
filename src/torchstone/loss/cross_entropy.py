"""The sum of the token losses of a micro-batch.

Never a mean: dividing by a micro-batch's own count is how accumulation, packing and uneven ranks come to change a loss.
The step divides once, by the count of the whole global batch.

Vocabulary-parallel logits stay sharded: inside torch's `loss_parallel` the ranks exchange the largest logit, the sum of
exponentials and the target's logit of each token, and nothing else.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORE_INDEX = -100


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy in fp32, summed over the positions whose label is not -100; exactly zero if there are none."""
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss
