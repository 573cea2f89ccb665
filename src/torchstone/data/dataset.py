"""A PyTorch DataLoader of packed batches from pre-tokenized rows, for custom training loops.

`torchstone train` uses loader.py instead, with the same parts: the token cache, the endless sampler, the assignment to
ranks. Batches are in Transformers' form: labels are not shifted, and the first label of every sequence is -100, because
nothing in a packed row predicts it.
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
from torchstone.data.cache import CacheOptions, open_cache, open_source
from torchstone.data.encode import EncodingConfig
from torchstone.data.formats import IGNORE_INDEX
from torchstone.data.sampler import InfiniteSampler
from torchstone.errors import UsageError
from torchstone.observe.console import Console

Sample = dict[str, Any]
MAX_VOCAB_SIZE = 2**31 - 1


class JsonlDataset(Dataset[Sample]):
    """Rows with `input_ids`, and optionally `labels` and `len`, memory-mapped from the token cache."""

    def __init__(
        self, path: str | Path, cache_dir: str | Path = "cache/datasets", vocab_size: int = MAX_VOCAB_SIZE
    ) -> None:
        source = open_source(str(path))
        if source.row_format != "tokens":
            raise UsageError(
                f"{path}: its row format is {source.row_format!r}, but JsonlDataset reads rows with input_ids",
                "torchstone.prepare and torchstone.train read every format",
            )
        encoding = EncodingConfig("", vocab_size, None, None, {}, "tokens", None, "")
        self.cache = open_cache(source, encoding, CacheOptions(Path(cache_dir)), Console("quiet"))
        self.cache.check_trainable()

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> Sample:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
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
    """Turns the samples of a global batch into this rank's micro-batches of at most `max_tokens_per_rank` tokens.

    All ranks have the same number of micro-batches; an empty one is a row of padding without labels. A sample that is
    too long is dropped, named in a warning and counted in `dropped` (per DataLoader worker).
    """

    def __init__(
        self, max_tokens_per_rank: int, rank: int | None = None, world_size: int | None = None, pad_id: int = 0
    ) -> None:
        own_rank, group_size = _rank_and_world_size()
        self.max_tokens_per_rank, self.pad_id = max_tokens_per_rank, pad_id
        self.rank = own_rank if rank is None else rank
        self.world_size = group_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size or max_tokens_per_rank < 1:
            raise ValueError(
                f"invalid rank {self.rank} of {self.world_size}, or max_tokens_per_rank {max_tokens_per_rank}"
            )
        self.dropped = 0

    def __call__(self, batch: list[Sample]) -> list[dict[str, Any]]:
        samples = [sample for sample in batch if len(sample["input_ids"]) <= self.max_tokens_per_rank]
        if len(samples) < len(batch):
            self._warn_dropped([sample for sample in batch if len(sample["input_ids"]) > self.max_tokens_per_rank])
        lengths = [len(sample["input_ids"]) for sample in samples]
        loss_tokens = sum(_count_loss_tokens(sample) for sample in samples)
        micro_batches = batch_lengths_to_minibatches_lpt(lengths, self.max_tokens_per_rank, self.world_size, self.rank)
        return [
            _pack([samples[index] for index in indices if index >= 0], self.pad_id)
            | {"batch_num_loss_counted_tokens": loss_tokens}
            for indices in micro_batches
        ]

    def _warn_dropped(self, dropped: list[Sample]) -> None:
        self.dropped += len(dropped)
        examples = [f"{sample.get('origin', 'a sample')} ({len(sample['input_ids'])} tokens)" for sample in dropped[:3]]
        warnings.warn(
            f"dropped {len(dropped)} samples longer than {self.max_tokens_per_rank} tokens ({self.dropped} so far), "
            f"such as {', '.join(examples)}",
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
    consumed_samples: int = 0,
    num_workers: int = 0,
    cache_dir: str | Path = "cache/datasets",
) -> DataLoader[Sample]:
    """Returns endless global batches of `batch_size` samples, each as this rank's list of packed micro-batches.

    The order is the same on every rank and for every number of ranks. To resume, set `consumed_samples` to the steps
    already taken times `batch_size`.
    """
    dataset = JsonlDataset(data_path, cache_dir)
    return DataLoader(
        dataset,
        batch_size,
        sampler=InfiniteSampler(len(dataset), seed, shuffle, consumed_samples),
        collate_fn=MaxTokensPerRankCollator(max_tokens_per_gpu, rank, world_size, pad_id),
        num_workers=num_workers,
    )


def _rank_and_world_size() -> tuple[int, int]:
    """Rank and world size of the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _count_loss_tokens(sample: Sample) -> int:
    """The number of labels that are predicted. Counted here, because a count in the row may mean something else."""
    return int((torch.as_tensor(sample["labels"])[1:] != IGNORE_INDEX).sum())


def _pack(samples: list[Sample], pad_id: int) -> dict[str, Any]:
    if not samples:
        samples = [{"input_ids": torch.tensor([pad_id]), "labels": torch.tensor([IGNORE_INDEX]), "padding": True}]
    labels = [torch.as_tensor(sample["labels"]).clone() for sample in samples]
    for each in labels:
        each[:1] = IGNORE_INDEX
    sizes = [len(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": _concat([torch.as_tensor(sample["input_ids"]) for sample in samples]),
        "labels": _concat(labels),
        "position_ids": _concat([torch.arange(size) for size in sizes]),
        "doc_ids": torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))[None],
        "num_loss_counted_tokens": sum(int((each != IGNORE_INDEX).sum()) for each in labels),
        "num_samples": sum("padding" not in sample for sample in samples),
    }


def _concat(parts: list[Tensor]) -> Tensor:
    """One row, [1, T]."""
    return torch.cat([part.long() for part in parts])[None]
