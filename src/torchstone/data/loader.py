"""The data of a run: from a file to the micro-batches of each optimizer step.

A step's batch depends only on how many samples were drawn before it. So it can be built ahead in threads, and going on
after a stop needs one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchstone.config.schema import Config
from torchstone.data.cache import TokenCache, open_cache, shape_of_file
from torchstone.data.collate import PADDING, MicroBatch, collate
from torchstone.data.formats import Shape
from torchstone.data.packing import Batching, Plan, batching
from torchstone.data.sampler import InfiniteSampler
from torchstone.data.samples import Samples, StreamRows, WholeSequences, split
from torchstone.data.tokenize import Counts, Tokenizer
from torchstone.observe.console import Console


@dataclass
class StepBatch:
    """All micro-batches of one optimizer step, and the counts that every one of them is measured by."""

    micro_batches: list[MicroBatch]
    samples: int
    tokens: int
    loss_tokens: int
    padding: int
    first_sample: int


@dataclass
class RunData:
    """Samples to train and validate on. `packed` says whether a row may hold several sequences."""

    train: Samples
    validation: Samples | None
    batching: Batching
    shape: Shape
    packed: bool
    fingerprint: str
    pad_id: int
    counts: Counts

    def batches(self, config: Config, drawn: int, last_sample: int | None) -> Iterator[StepBatch]:
        """The steps' batches from sample `drawn` on; the last one may be smaller, so that `last_sample` is the end."""
        sampler = InfiniteSampler(len(self.train), config.training.seed, config.data.shuffle, drawn)

        def draws() -> Iterator[tuple[int, np.ndarray]]:
            while last_sample is None or sampler.drawn < last_sample:
                size = self.batching.global_batch_size
                size = size if last_sample is None else min(size, last_sample - sampler.drawn)
                first = sampler.drawn
                yield first, sampler.take(size)

        def build(draw: tuple[int, np.ndarray]) -> StepBatch:
            return self.step_batch(self.train, draw[1], draw[0])

        return _ahead(build, draws(), config.data.num_workers)

    def validation_batches(self) -> Iterator[StepBatch]:
        assert self.validation is not None
        size = self.batching.global_batch_size
        for at in range(0, len(self.validation), size):
            members = np.arange(at, min(at + size, len(self.validation)))
            yield self.step_batch(self.validation, members, at)

    def step_batch(self, samples: Samples, members: np.ndarray, first: int) -> StepBatch:
        plan: Plan = self.batching.plan(members, samples.lengths)
        micro_batches = [
            collate([[s for i in row for s in samples.get(i)] for row in rows], self.pad_id) for rows in plan
        ]
        tokens = int(samples.lengths[members].sum())
        return StepBatch(
            micro_batches,
            samples=len(members),
            tokens=tokens,
            loss_tokens=int(samples.loss_tokens[members].sum()),
            padding=sum(int((batch.doc_ids == PADDING).sum()) for batch in micro_batches),
            first_sample=first,
        )


def load_data(config: Config, tokenizer: Tokenizer, train: Path, validation: Path | None, console: Console) -> RunData:
    """Tokenizes what is not tokenized yet and lays out the samples."""
    data, training = config.data, config.training

    def limit(shape: Shape) -> int | None:
        return None if shape == "text" and data.packing else data.context_length

    def opened(path: Path) -> TokenCache:
        return open_cache(path, tokenizer, limit, data.on_long_row, Path(data.cache_dir), console)

    def samples(cache: TokenCache, members: np.ndarray) -> Samples:
        if cache.shape == "text" and data.packing:
            return StreamRows(cache, members, data.context_length)
        return WholeSequences(cache, members)

    numbers = batching(training, shape_of_file(train), data.packing, data.context_length)
    cache = opened(train)
    chosen, held_out = split(len(cache), data.validation_split, training.seed)
    validation_samples = samples(cache, held_out) if len(held_out) else None
    if validation is not None:
        other = opened(validation)
        validation_samples = samples(other, np.arange(len(other)))
    return RunData(
        train=samples(cache, chosen),
        validation=validation_samples,
        batching=numbers,
        shape=cache.shape,
        packed=data.packing,
        fingerprint=cache.key,
        pad_id=tokenizer.pad_id,
        counts=cache.counts,
    )


def _ahead(
    build: Callable[[tuple[int, np.ndarray]], StepBatch], draws: Iterator[tuple[int, np.ndarray]], workers: int
) -> Iterator[StepBatch]:
    """`build` over `draws` in order, up to two batches a worker ahead of the reader."""
    if workers == 0:
        yield from map(build, draws)
        return
    pending: deque[Future[StepBatch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        for draw in draws:
            pending.append(pool.submit(build, draw))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
