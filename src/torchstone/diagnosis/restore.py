"""Changes of the model for a while: a diagnosis trains the one model that there is, and leaves it as it was.

Adapters get random values. While the factor of LoRA or OSFT that starts at zero is zero, the other one has neither an
effect nor a gradient, and a mistake in either would not show.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchstone.optim.clip import to_local
from torchstone.parallel.local_shards import local_shards
from torchstone.rng import fork_rng
from torchstone.training.run import Run
from torchstone.tuning.lora import LORA_B, is_adapter_parameter, split_parameter_name
from torchstone.tuning.osft import OSFT_Z

# A copy of the weights stays on the GPU if this many times its size is free, and else on the CPU.
FREE_MEMORY_FACTOR = 6
# Standard deviation of the random values for adapters.
ADAPTER_STD = 0.02


@contextmanager
def restore_after(run: Run) -> Iterator[None]:
    """Puts back what training changes: weights, moments, learning rates, gradients, buffers, random numbers, mode."""
    run.runner.reshard()
    model, optimizer, was_training = run.model, run.optimizer, run.model.module.training
    tensors = [to_local(parameter.detach()) for _, parameter in model.trained_parameters()]
    tensors += [buffer for part in model.model_parts for buffer in part.buffers() if buffer.is_floating_point()]
    keep_on = run.device if has_room(tensors, run.device) else torch.device("cpu")
    values = [tensor.to(keep_on, copy=True) for tensor in tensors]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        with fork_rng(run.device):
            yield
    finally:
        model.clear_gradients()
        run.runner.reshard()
        optimizer.reset_state()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        refresh_copies(run)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        model.train(was_training)


def has_room(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether the device has memory for a copy of the weights, with moments, gradients and activations beside it."""
    size = sum(tensor.nbytes for tensor in tensors)
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > FREE_MEMORY_FACTOR * size


@torch.no_grad()
def refresh_copies(run: Run) -> None:
    """Updates the copies that the module computes with, after a change of master weights."""
    if run.model.master_weights is not None:
        for master, copy in run.model.master_weights.copies.items():
            if master.requires_grad:
                copy.copy_(master)


@torch.no_grad()
def randomize_adapters(run: Run) -> None:
    """Adds random values to the factors that start at zero, the same in every layout."""
    for name, parameter in zero_factors(run):
        for shard in local_shards(run.model.decoder_config, name, parameter):
            generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
            values = ADAPTER_STD * torch.randn(shard.shape, generator=generator)
            shard.tensor.add_(values[shard.index].to(shard.tensor))
    if run.runner.projection is not None:
        run.runner.projection.project_parameters()
    refresh_copies(run)


def zero_factors(run: Run) -> list[tuple[str, Tensor]]:
    """The factors that start at zero."""
    return [
        (name, parameter.detach())
        for name, parameter in run.model.trained_parameters()
        if is_adapter_parameter(name) and split_parameter_name(name)[2] in (LORA_B, OSFT_Z)
    ]


@contextmanager
def randomized_adapters(run: Run) -> Iterator[None]:
    """Random values for the factors that start at zero, within the context."""
    with restore_after(run):
        randomize_adapters(run)
        yield


@contextmanager
def zeroed_adapters(run: Run) -> Iterator[None]:
    """The model as it was before adapters were added, within the context."""
    with restore_after(run), torch.no_grad():
        for _, factor in zero_factors(run):
            factor.zero_()
        yield
