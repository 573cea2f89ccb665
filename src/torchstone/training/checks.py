"""Errors that end a run: a loss or gradient that is not finite, and out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.errors import NumericalError, OutOfMemoryError, is_out_of_memory
from torchstone.parallel.runner import Runner


def check_finite(step: int, loss: float, grad_norm: float, runner: Runner) -> None:
    """Raises if loss or norm is not finite. Both are the same on all ranks, so all ranks raise, or none."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    own_names = [
        name
        for name, parameter in runner.model.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    names = list(dict.fromkeys(name for rank in runner.ctx.all_gather_object(own_names) for name in rank))
    gradients = "all gradients are finite"
    if names:
        gradients = f"{len(names)} gradients are not finite, such as {', '.join(names[:3])}"
    raise NumericalError(
        f"step {step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}; stopped before the weights were updated",
        f"{gradients}; try a lower --optim.learning_rate, a longer --optim.warmup_steps or --training.precision fp32",
    )


def _is_finite(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())


@contextmanager
def translate_out_of_memory(activity: str, device: torch.device) -> Iterator[None]:
    """Turns out-of-memory errors during `activity` into ours."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        lines = str(error).splitlines()
        if not (is_out_of_memory(error) or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemoryError(
            f"{activity} does not fit on {device}: {lines[0] if lines else 'out of memory'}",
            "use a smaller training.batch_size (or max_tokens_per_gpu), data.context_length or model; "
            "a smaller batch_size does not change the global batch",
        ) from None
