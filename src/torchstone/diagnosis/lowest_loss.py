"""The lowest loss that what is frozen allows, so that a model is not blamed for it.

With LoRA or OSFT the last norm and the head stay as they are: hidden states of one length times a frozen head give
logits of a limited size. In a pretrained model they are large enough for any target; in a random one they are not.
Soft-capped logits have a limit of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from torchstone.diagnosis.session import Diagnosis
from torchstone.models.decoder import HEAD
from torchstone.models.model import NativeModel

STEPS, LEARNING_RATE = 100, 0.1


def lowest_loss(diagnosis: Diagnosis, targets: Sequence[int] | np.ndarray) -> float | None:
    """The lowest mean loss of these targets by the head of the model; 0 if nothing limits it, None if unknown.

    The frozen head gets the best hidden states, found by gradient descent."""
    model = diagnosis.run.model
    if not isinstance(model, NativeModel):
        return None if model.tuning is not None else 0.0
    if model.tuning is None or model.tuning.is_trained(HEAD):
        softcap = model.decoder_config.logit_softcap
        return 0.0 if softcap is None else math.log1p((model.vocab_size - 1) * math.exp(-2 * softcap))
    # An unsharded one.
    decoder = diagnosis.reference_run.model.module
    labels = torch.as_tensor(np.asarray(targets, dtype=np.int64), device=decoder.head.weight.device)
    # The row of a target in the head is near the best hidden state.
    hidden_ND = decoder.head.weight.detach()[labels].float().clone().requires_grad_()
    optimizer = torch.optim.Adam([hidden_ND], lr=LEARNING_RATE * hidden_ND.detach().std().item())
    loss = torch.zeros(())
    for _ in range(STEPS):
        loss = F.cross_entropy(decoder.compute_logits(decoder.norm(hidden_ND[None]))[0], labels)
        (hidden_ND.grad,) = torch.autograd.grad(loss, [hidden_ND])
        optimizer.step()
    return loss.item()
