"""What stops a run for good: numbers that went wrong, and memory that ran out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.errors import NumbersError, OutOfMemoryError
from torchstone.parallel.running import Runner


def check_numbers(step: int, loss: float, grad_norm: float, runner: Runner) -> None:
    """Loss and norm are the same on all ranks, so all of them stop here, or none."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    here = [
        name
        for name, parameter in runner.model.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    bad = list(dict.fromkeys(name for names in runner.place.gather(here) for name in names))
    found = (
        f"{len(bad)} gradients are not finite, the first {', '.join(bad[:3])}" if bad else "all gradients are finite"
    )
    raise NumbersError(
        f"step {step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}; stopped before they reached the weights",
        f"{found}; try a lower --optim.learning_rate, a longer --optim.warmup_steps, or --training.precision fp32",
    )


def _is_finite(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())


@contextmanager
def memory_guard(what: str, device: torch.device) -> Iterator[None]:
    """Memory that runs out while `what` is done becomes an error for people; on a CPU torch has no type for it."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        lines = str(error).splitlines()
        on_cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemoryError(
            f"{what} does not fit on {device}: {lines[0] if lines else 'no memory'}",
            "make training.batch_size (or max_tokens_per_gpu), data.context_length or the model smaller; "
            "a smaller batch_size leaves the global batch as it is",
        ) from None
