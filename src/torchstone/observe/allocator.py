"""The memory of tensors: what is allocated now, and the peak of a function, on a GPU and on a CPU.

On CUDA the allocator counts. On a CPU it reports every allocation to torch's profiler, and the peak is the largest sum
of these reports: what tensors and operators allocate, without what malloc keeps in reserve and the code of libraries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchstone.optim.clip import to_local


def allocated_bytes(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """The bytes that torch has on a GPU; on a CPU those of `tensors`, each storage once."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = [to_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes(device: torch.device, function: Callable[[], None], tensors: Callable[[], Iterable[Tensor]]) -> int:
    """The peak while `function` runs. `tensors`: those that exist before it; only a CPU needs them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device)
    before = allocated_bytes(device, tensors())
    # Otherwise kineto, the profiler's library, complains on every CPU that there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return before + largest_sum(profiler)


def largest_sum(profiler: profile) -> int:
    """The largest sum of the sizes that were allocated, less those that were freed, since the profiler began."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        largest = max(largest, total)
    return largest
