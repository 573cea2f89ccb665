"""`discover_batch_size`: the batch size for a training loop of one's own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchstone.batchsize.cache import CachedProbe
from torchstone.batchsize.probe import MemoryBudget, ModuleProbe
from torchstone.batchsize.run_discovery import package_versions
from torchstone.batchsize.search import Measurements, SearchResult, fastest_size, find_largest, is_saturated
from torchstone.config.schema import AutoBatchConfig, parse_memory
from torchstone.errors import OutOfMemoryError, UsageError
from torchstone.observe.allocator import allocated_bytes
from torchstone.observe.console import Console
from torchstone.training.memory import size_text


class DefaultGroup:
    """The ranks of torch.distributed's default process group, or one process."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        if world_size > 1 and not dist.is_initialized():
            raise UsageError(
                f"ddp_world_size is {world_size}, but there is no process group",
                "call torch.distributed.init_process_group first",
            )
        self.is_main, self.world_size, self.device = rank == 0, world_size, device

    def all_reduce_max_each(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(value) for value in tensor.tolist()]

    def all_gather_object(self, value: Any) -> list[Any]:
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def discover_batch_size(
    model: nn.Module,
    max_seq_len: int,
    device: torch.device | str,
    safety_margin: float = 0.85,
    ddp_rank: int = 0,
    ddp_world_size: int = 1,
    use_cache: bool = True,
    cache_key_components: Mapping[str, Any] | None = None,
    *,
    memory_limit: str | int | None = None,
    max_batch_size: int = 1024,
    time_limit: float = 120.0,
) -> int:
    """The rows per device with which a token takes the least time, of those that fit; the smallest as fast to 1 %.

    `model` maps ids [B, T] to logits, and is on `device`. Its steps are those of AdamW on rows of `max_seq_len` tokens;
    nothing of it has changed afterwards. A step may take `safety_margin` of the memory that is free, or of
    `memory_limit`, such as 8GiB. After `time_limit` seconds no further size is tried. All ranks call it, and get the
    same size, which fits on all of them. Measurements are kept in $TORCHSTONE_CACHE for the same model, device and
    `cache_key_components`.
    """
    start, device = time.perf_counter(), torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch sees no CUDA device", "use device='cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    memory_limit = None if memory_limit is None else str(memory_limit)
    _check_arguments(max_seq_len, safety_margin, memory_limit, max_batch_size)
    actual = next((parameter.device for parameter in model.parameters()), device)
    if device.type not in ("cpu", "cuda") or device != actual:
        raise UsageError(
            f"device is {device}, but the model is on {actual}", "use the device of the model: cpu or cuda"
        )
    ranks = DefaultGroup(ddp_rank, ddp_world_size, device)
    resident = allocated_bytes(device, model.parameters())
    budget = MemoryBudget(AutoBatchConfig(margin=safety_margin, memory_limit=memory_limit), device, resident)
    probe, console = ModuleProbe(model, max_seq_len, ranks, budget), Console("auto" if ranks.is_main else "none")
    key = _cache_key(model, max_seq_len, device, ddp_world_size, cache_key_components or {})
    cached = CachedProbe(probe, key, use_cache, console.warn)

    def should_stop(measured: Measurements) -> bool:
        is_late = ranks.all_reduce_max_each([int(time.perf_counter() - start > time_limit)])[0] > 0
        return is_late or is_saturated(measured)

    try:
        with probe.without_trace():
            result = find_largest(cached.measure, max_batch_size, cached.base_load(), budget.max_load, should_stop)
    finally:
        cached.save()
    size = _choose(result, budget, max_seq_len, device)
    console.info(f"Auto-discovery found device_batch_size={size}: {cached.describe(time.perf_counter() - start)}")
    return size


def _check_arguments(max_seq_len: int, safety_margin: float, memory_limit: str | None, max_batch_size: int) -> None:
    if max_seq_len < 2 or max_batch_size < 1:
        raise UsageError(
            f"max_seq_len {max_seq_len} must be at least 2, and max_batch_size {max_batch_size} at least 1"
        )
    if not 0 < safety_margin <= 1:
        raise UsageError(f"safety_margin {safety_margin} must be more than 0 and at most 1")
    if memory_limit is not None and (parse_memory(memory_limit) or 0) < 2**20:
        raise UsageError(f"memory_limit {memory_limit!r} is not at least 1MiB", "use a unit, such as 8GiB")


def _choose(result: SearchResult, budget: MemoryBudget, max_seq_len: int, device: torch.device) -> int:
    fitting = {size: each.seconds / size for size, each in result.measured.items() if each.fits}
    if fitting:
        return fastest_size(fitting, fitting.__getitem__)
    load = result.measured[1].load
    needs = "is out of memory" if math.isinf(load) else f"needs {size_text(load * budget.margin * budget.memory)}"
    if load > budget.max_load:
        raise OutOfMemoryError(
            f"not even one row of {max_seq_len} tokens fits: it {needs}, and may take {budget.margin:.0%} of the "
            f"{size_text(budget.memory)} of {device}{' (memory_limit)' if budget.limit == budget.memory else ''}",
            "use a shorter max_seq_len or a smaller model",
        )
    # The margin is for larger sizes: it never makes a size zero.
    return 1


def _cache_key(
    model: nn.Module, max_seq_len: int, device: torch.device, world_size: int, components: Mapping[str, Any]
) -> dict[str, Any]:
    shapes = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    buffers = [[name, list(buffer.shape), str(buffer.dtype)] for name, buffer in model.named_buffers()]
    # Of a model of Transformers; a config that is printed has its attention implementation.
    settings = [str(getattr(model, name, None)) for name in ("config", "is_gradient_checkpointing")]
    return {
        "versions": package_versions(),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "world_size": world_size,
        "model": [str(model), shapes, buffers, settings],
        "max_seq_len": max_seq_len,
        "components": dict(components),
    }
