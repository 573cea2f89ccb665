"""The data of a run: from sources to the micro-batches of each optimizer step.

A step's batch depends only on how many samples were drawn before it. So it can be built ahead in threads, and going on
after a stop, on any number of ranks, needs one number.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchstone.config.schema import ROWS_OF_CHAT, ROWS_OF_TEXT, Config, DataConfig
from torchstone.data.cache import BuildSettings, Source, TokenCache, find_source, open_cache
from torchstone.data.collate import BUCKET, PADDING, MicroBatch, collate
from torchstone.data.encode import Counts
from torchstone.data.formats import CHAT, PLAIN, Shape, check_train_on
from torchstone.data.packing import Batching, Plan, batching
from torchstone.data.sampler import InfiniteSampler, MixedSampler, Sampler
from torchstone.data.samples import BestFitRows, Samples, StreamRows, WholeSequences, split, together
from torchstone.data.tokenize import Tokenizer
from torchstone.observe.console import Console


@dataclass
class StepBatch:
    """One rank's micro-batches of an optimizer step and their padding; other counts are of the step on all ranks."""

    micro_batches: list[MicroBatch]
    samples: int
    tokens: int
    loss_tokens: int
    padding: int
    first_sample: int


@dataclass
class RunData:
    """Samples to train and validate on. `packed` says whether a row may hold several sequences, `multiple` of how many
    tokens rows are a multiple."""

    train: Samples
    validation: Samples | None
    batching: Batching
    names: list[str]
    shapes: list[Shape]
    sizes: list[int]
    weights: list[float]
    packed: bool
    fingerprint: str
    pad_id: int
    counts: Counts
    multiple: int = BUCKET

    def sampler(self, seed: int, shuffle: bool, drawn: int = 0) -> Sampler:
        if self.weights:
            return MixedSampler(self.sizes, self.weights, seed, shuffle, drawn)
        return InfiniteSampler(len(self.train), seed, shuffle, drawn)

    def mixture(self, samples: int) -> list[str]:
        """What each source contributes to a run of so many samples, in words; nothing where there are no weights."""
        if not self.weights:
            return []
        drawn = MixedSampler(self.sizes, self.weights).drawn_from(samples)
        return [
            f"{name}: {100 * weight / sum(self.weights):.1f} % of the samples, each seen {count / size:.2f} times"
            for name, weight, count, size in zip(self.names, self.weights, drawn, self.sizes, strict=True)
        ]

    def batches(
        self, config: Config, drawn: int, last_sample: int | None, rank: int = 0, ranks: int = 1
    ) -> Iterator[StepBatch]:
        """The steps' batches from sample `drawn` on; the last one may be smaller, so that `last_sample` is the end."""
        sampler = self.sampler(config.training.seed, config.data.shuffle, drawn)

        def draws() -> Iterator[tuple[int, np.ndarray]]:
            while last_sample is None or sampler.drawn < last_sample:
                size = self.batching.global_batch_size
                size = size if last_sample is None else min(size, last_sample - sampler.drawn)
                first = sampler.drawn
                yield first, sampler.take(size)

        def build(draw: tuple[int, np.ndarray]) -> StepBatch:
            return self.step_batch(self.train, draw[1], draw[0], rank, ranks)

        return _ahead(build, draws(), config.data.num_workers)

    def validation_batches(self, rank: int = 0, ranks: int = 1) -> Iterator[StepBatch]:
        assert self.validation is not None
        size = self.batching.global_batch_size
        for at in range(0, len(self.validation), size):
            members = np.arange(at, min(at + size, len(self.validation)))
            yield self.step_batch(self.validation, members, at, rank, ranks)

    def step_batch(self, samples: Samples, members: np.ndarray, first: int, rank: int = 0, ranks: int = 1) -> StepBatch:
        plan: Plan = self.batching.plan(members, samples.lengths, ranks)
        micro_batches = [
            collate([[s for i in row for s in samples.get(i)] for row in each[rank]], self.pad_id, self.multiple)
            for each in plan
        ]
        return StepBatch(
            micro_batches,
            samples=len(members),
            tokens=int(samples.lengths[members].sum()),
            loss_tokens=int(samples.loss_tokens[members].sum()),
            padding=sum(int((batch.doc_ids == PADDING).sum()) for batch in micro_batches),
            first_sample=first,
        )


def load_data(
    config: Config,
    tokenizer: Tokenizer,
    train: Sequence[str],
    validation: Sequence[str] | None,
    console: Console,
    ranks: int = 1,
    shares: int = 1,
) -> RunData:
    """Tokenizes what is not tokenized yet and lays out the samples, for so many data ranks, and rows that can be cut
    into so many shares."""
    data, seed = config.data, config.training.seed
    sources = find_sources(data, train)
    packed = data.packing and any(source.shape not in PLAIN for source in sources)
    text = all(source.shape in PLAIN for source in sources)
    rows = ROWS_OF_TEXT if text else ROWS_OF_CHAT
    numbers = batching(config.training, packed, data.context_length, rows, ranks)
    caches = [open_source(data, source, tokenizer, console, max_rows=data.max_samples) for source in sources]
    chosen = [split(cache.origins, data.validation_split, seed) for cache in caches]
    parts = [_samples(data, cache, members) for cache, (members, _) in zip(caches, chosen, strict=True)]
    held_out = [_samples(data, cache, out) for cache, (_, out) in zip(caches, chosen, strict=True) if len(out)]
    if validation is not None:
        for source in find_sources(data, validation, validation=True):
            cache = open_source(data, source, tokenizer, console)
            held_out.append(_samples(data, cache, np.arange(len(cache))))
    counts = Counts()
    for cache in caches:
        counts.add(cache.counts)
    return RunData(
        train=together(parts),
        validation=together(held_out) if held_out else None,
        batching=numbers,
        names=[source.title for source in sources],
        shapes=[source.shape for source in sources],
        sizes=[len(part) for part in parts],
        weights=list(data.weights),
        packed=data.packing,
        fingerprint=_fingerprint(data, caches),
        pad_id=tokenizer.pad_id,
        counts=counts,
        # Shared out, an operation is planned anew for every shape that comes up: fewer of them, then.
        multiple=BUCKET if shares == 1 else math.lcm(8 * BUCKET, shares),
    )


def find_sources(
    data: DataConfig, names: Sequence[str], validation: bool = False, look_only: bool = False
) -> list[Source]:
    """Where there is a shape for each path, those of the validation data are recognised."""
    for_all = data.format[0] if len(data.format) == 1 else "auto"
    forms = data.format if len(data.format) > 1 and not validation else (for_all,) * len(names)
    return [
        find_source(name, form, data.on_bad_row == "stop" and not look_only)
        for name, form in zip(names, forms, strict=True)
    ]


def open_source(
    data: DataConfig, source: Source, tokenizer: Tokenizer, console: Console, look_only: bool = False,
    max_rows: int | None = None,
) -> TokenCache:  # fmt: skip
    """The tokenized `source`; what became of its rows is said. One that is only looked at is never refused."""
    check_train_on(data.train_on)
    streamed = source.shape in PLAIN and data.packing and data.text_packing == "stream"
    on_long = ("split" if source.shape in PLAIN else "drop") if data.on_long_row == "auto" else data.on_long_row
    limit = None if streamed else data.context_length
    if streamed and data.on_long_row in ("drop", "truncate") and not look_only:
        console.warn(
            f"{source.title}: data.on_long_row {data.on_long_row} does not apply to it: packed text is one stream, cut "
            "every data.context_length tokens (data.text_packing best-fit keeps documents whole)"
        )
    if source.shape in CHAT:
        for token in tokenizer.broken_marks:
            console.warn(f"the chat template writes {token}, which is not one token of {tokenizer.source}")
    recipe = tokenizer.recipe(source.shape, limit, "" if limit is None else on_long, data.train_on)
    stop = data.on_bad_row == "stop" and not look_only
    settings = BuildSettings(Path(data.cache_dir), data.prepare_workers, stop)
    cache = open_cache(source, recipe, settings, console, max_rows)
    if not look_only:
        report_counts(cache, console)
        cache.refuse_if_untrained()
    return cache


def report_counts(cache: TokenCache, console: Console) -> None:
    counts, name = cache.counts, cache.source.title
    share = 100 * counts.trained_tokens / max(1, counts.tokens)
    console.say(f"{name}: {counts.rows} rows, {counts.tokens} tokens, {share:.1f} % of them trained on")
    such_as = f", such as {', '.join(counts.examples[:3])}" if counts.examples else ""
    for number, what in (
        (counts.bad_rows, f"were bad and left out; they are in {cache.quarantine}"),
        (
            counts.dropped_long,
            f"dropped, being longer than data.context_length{such_as} (data.on_long_row says otherwise)",
        ),
        (counts.truncated_long, f"cut to data.context_length{such_as}: {counts.cropped_tokens} tokens lost"),
        (counts.split_long, f"cut into pieces of data.context_length{such_as}: {counts.cropped_tokens} tokens lost"),
        (
            counts.dropped_untrained,
            f"dropped, nothing to train on being left of them within data.context_length{such_as}",
        ),
        (counts.untrained if cache.shape == "tokens" else 0, "have no label to learn from; they are kept"),
    ):
        if number:
            console.warn(f"{name}: {number} of {counts.rows} rows {what}")
    if counts.straddling_tokens:
        console.warn(f"{name}: {counts.straddling_tokens} tokens lie across a prompt and its answer: trained on")


def _samples(data: DataConfig, cache: TokenCache, members: np.ndarray) -> Samples:
    if cache.shape in PLAIN and data.packing:
        layout = StreamRows if data.text_packing == "stream" else BestFitRows
        return layout(cache, members, data.context_length)
    return WholeSequences(cache, members)


def _fingerprint(data: DataConfig, caches: list[TokenCache]) -> str:
    """Names the samples and their order: the contents of every source, and how they are laid out and mixed."""
    decides = [cache.key for cache in caches]
    if data.packing and any(cache.shape in PLAIN for cache in caches):
        decides.append(data.text_packing)
    decides += [f"{weight / sum(data.weights):.9f}" for weight in data.weights]
    return hashlib.sha256("\0".join(decides).encode()).hexdigest()


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
