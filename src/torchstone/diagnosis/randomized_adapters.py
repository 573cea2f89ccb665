"""Values for the factors of LoRA and OSFT that start at zero.

While one factor is zero, the other one has neither an effect nor a gradient, and a mistake in either would not show.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchstone.diagnosis.restore import refresh_copies, restore_after
from torchstone.parallel.local_shards import local_shards
from torchstone.training.run import Run
from torchstone.tuning.lora import LORA_B, is_adapter_parameter, split_parameter_name
from torchstone.tuning.osft import OSFT_Z

STD = 0.02


@torch.no_grad()
def randomize_adapters(run: Run) -> None:
    """Gives them random values, the same in every layout."""
    for name, parameter in zero_factors(run):
        for shard in local_shards(run.model.decoder_config, name, parameter):
            generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
            values = STD * torch.randn(shard.shape, generator=generator)
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
    """With these values, for a while."""
    with restore_after(run):
        randomize_adapters(run)
        yield


@contextmanager
def zeroed_adapters(run: Run) -> Iterator[None]:
    """The model as it was before adapters were added, for a while."""
    with restore_after(run), torch.no_grad():
        for _, factor in zero_factors(run):
            factor.zero_()
        yield
