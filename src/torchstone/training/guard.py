"""Numbers that went wrong stop the run before they reach the weights."""

from __future__ import annotations

import math

from torch import nn

from torchstone.errors import NumbersError


def check_numbers(step: int, loss: float, grad_norm: float, module: nn.Module) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    bad = [
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    found = (
        f"{len(bad)} gradients are not finite, the first {', '.join(bad[:3])}" if bad else "all gradients are finite"
    )
    raise NumbersError(
        f"step {step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}; stopped before they reached the weights",
        f"{found}; try a lower --optim.learning_rate, a longer --optim.warmup_steps, or --training.precision fp32",
    )
