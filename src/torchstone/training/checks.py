"""Errors that end a run: a loss or gradient that is not finite, and out of memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchstone.errors import NumericalError, OutOfMemoryError
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


def check_memory(needed: int, parameters: int, device: torch.device) -> None:
    """Raises if this rank's device has less memory than `needed` bytes, the least for `parameters` parameters."""
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        # The ranks of a machine share its memory.
        memory = _host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed > memory:
        raise OutOfMemoryError(
            f"{parameters / 1e9:.2f}B parameters need at least {needed / 1e9:,.1f} GB per process, without "
            f"activations, but {device} has {memory / 1e9:,.1f} GB",
            "use a smaller model, --training.precision bf16-pure, or more GPUs (--parallel.dp_shard shards the model)",
        )


def _host_memory() -> int:
    """The memory and swap of this machine, or the limit of its container."""
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path).read_text().strip() if Path(path).is_file() else ""
        total = min(total, int(limit)) if limit.isdecimal() else total
    return total


@contextmanager
def translate_out_of_memory(activity: str, device: torch.device) -> Iterator[None]:
    """Turns torch's out-of-memory errors during `activity` into ours. For the CPU torch has no exception type."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        lines = str(error).splitlines()
        on_cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise OutOfMemoryError(
            f"{activity} does not fit on {device}: {lines[0] if lines else 'out of memory'}",
            "use a smaller training.batch_size (or max_tokens_per_gpu), data.context_length or model; "
            "a smaller batch_size does not change the global batch",
        ) from None
