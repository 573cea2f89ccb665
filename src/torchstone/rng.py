"""The states of torch's random number generators: of the CPU and, on a GPU, of the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def get_rng_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Puts the states back at the end of the context."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
