"""Puts back what a check changes: a diagnosis trains on the one model that there is, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchstone.optim.clip import to_local
from torchstone.rng import fork_rng
from torchstone.training.run import Run

# A copy of the weights stays on the GPU if this many times its size is free, and else on the CPU.
FREE_MEMORY_FACTOR = 6


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
    """After a change of master weights: the module computes with copies of them."""
    if run.model.master_weights is not None:
        for master, copy in run.model.master_weights.copies.items():
            if master.requires_grad:
                copy.copy_(master)
