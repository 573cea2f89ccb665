"""The data path as PyTorch's DataLoader knows it, for loops of one's own: pre-tokenized rows to packed batches.

`torchstone train` does not go this way (loader.py), but the parts are the same: the token cache, the endless order, the
assignment to ranks. Batches are as Transformers takes them: labels are not shifted, and the first label of every
sequence is -100, because nothing in a packed row predicts it.
"""

from __future__ import annotations

import operator
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchstone.data.assignment import batch_lengths_to_minibatches_lpt
from torchstone.data.cache import BuildSettings, find_source, open_cache
from torchstone.data.encode import Recipe
from torchstone.data.formats import IGNORED
from torchstone.data.sampler import InfiniteSampler
from torchstone.errors import UsageError
from torchstone.observe.console import Console

Sample = dict[str, Any]
LARGEST_VOCABULARY = 2**31 - 1


class JsonlDataset(Dataset[Sample]):
    """Rows of `input_ids`, and perhaps `labels` and `len`, from any source; on disk, mapped, not in memory."""

    def __init__(
        self, path: str | Path, cache_dir: str | Path = "cache/datasets", vocab_size: int = LARGEST_VOCABULARY
    ) -> None:
        source = find_source(str(path))
        if source.shape != "tokens":
            raise UsageError(
                f"{path}: rows of shape {source.shape!r}; JsonlDataset reads rows with input_ids",
                "torchstone.prepare and torchstone.train take every shape",
            )
        recipe = Recipe("", vocab_size, None, None, {}, "tokens", None, "")
        self.cache = open_cache(source, recipe, BuildSettings(Path(cache_dir)), Console("quiet"))
        self.cache.refuse_if_untrained()

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> Sample:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        sequence = self.cache.sequence(index)
        return {
            "input_ids": torch.from_numpy(sequence.ids),
            "labels": torch.from_numpy(sequence.labels),
            "len": len(sequence.ids),
            "num_loss_counted_tokens": sequence.loss_tokens,
            "origin": self.cache.origin(index),
        }


class MaxTokensPerRankCollator:
    """The samples of a global batch to this rank's micro-batches, none of more than `max_tokens_per_rank` tokens.

    Every rank has as many micro-batches as the others; one with nothing to do has a row of padding without labels. A
    sample that is too long by itself is dropped, counted in `dropped` (by each worker of a DataLoader for itself), and
    named in a warning.
    """

    def __init__(
        self, max_tokens_per_rank: int, rank: int | None = None, world_size: int | None = None, pad_id: int = 0
    ) -> None:
        here, everybody = _group()
        self.max_tokens_per_rank, self.pad_id = max_tokens_per_rank, pad_id
        self.rank = here if rank is None else rank
        self.world_size = everybody if world_size is None else world_size
        if not 0 <= self.rank < self.world_size or max_tokens_per_rank < 1:
            raise ValueError(f"rank {self.rank} of {self.world_size}, {max_tokens_per_rank} tokens")
        self.dropped = 0

    def __call__(self, batch: list[Sample]) -> list[dict[str, Any]]:
        kept = [sample for sample in batch if len(sample["input_ids"]) <= self.max_tokens_per_rank]
        if len(kept) < len(batch):
            self._say_dropped([sample for sample in batch if len(sample["input_ids"]) > self.max_tokens_per_rank])
        lengths = [len(sample["input_ids"]) for sample in kept]
        counted = sum(_counted(sample) for sample in kept)
        plan = batch_lengths_to_minibatches_lpt(lengths, self.max_tokens_per_rank, self.world_size, self.rank)
        return [
            _packed([kept[index] for index in indices if index >= 0], self.pad_id)
            | {"batch_num_loss_counted_tokens": counted}
            for indices in plan
        ]

    def _say_dropped(self, dropped: list[Sample]) -> None:
        self.dropped += len(dropped)
        named = [f"{sample.get('origin', 'a sample')} ({len(sample['input_ids'])} tokens)" for sample in dropped[:3]]
        warnings.warn(
            f"{len(dropped)} samples longer than {self.max_tokens_per_rank} tokens dropped ({self.dropped} so far), "
            f"such as {', '.join(named)}",
            stacklevel=3,
        )


def get_data_loader(
    data_path: str | Path,
    batch_size: int,
    max_tokens_per_gpu: int,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    pad_id: int = 0,
    shuffle: bool = True,
    drawn: int = 0,
    num_workers: int = 0,
    cache_dir: str | Path = "cache/datasets",
) -> DataLoader[Sample]:
    """Endless global batches of `batch_size` samples, each as this rank's list of packed micro-batches.

    The order is the same on every rank and for every number of ranks. To go on after a stop, give the number of samples
    that were drawn before it: steps x batch_size.
    """
    dataset = JsonlDataset(data_path, cache_dir)
    return DataLoader(
        dataset,
        batch_size,
        sampler=InfiniteSampler(len(dataset), seed, shuffle, drawn),
        collate_fn=MaxTokensPerRankCollator(max_tokens_per_gpu, rank, world_size, pad_id),
        num_workers=num_workers,
    )


def _group() -> tuple[int, int]:
    """This process's rank and how many there are, where there is a process group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _counted(sample: Sample) -> int:
    """Labels that are really predicted, counted here: a number in the row may mean something else."""
    return int((torch.as_tensor(sample["labels"])[1:] != IGNORED).sum())


def _packed(samples: list[Sample], pad_id: int) -> dict[str, Any]:
    if not samples:
        samples = [{"input_ids": torch.tensor([pad_id]), "labels": torch.tensor([IGNORED]), "padding": True}]
    labels = [torch.as_tensor(sample["labels"]).clone() for sample in samples]
    for each in labels:
        each[:1] = IGNORED
    sizes = [len(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": _row([torch.as_tensor(sample["input_ids"]) for sample in samples]),
        "labels": _row(labels),
        "position_ids": _row([torch.arange(size) for size in sizes]),
        "doc_ids": torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))[None],
        "num_loss_counted_tokens": sum(int((each != IGNORED).sum()) for each in labels),
        "num_samples": sum("padding" not in sample for sample in samples),
    }


def _row(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.long() for part in parts])[None]
