"""The data of a run: from data sources to the micro-batches of each optimizer step.

The batch of a step depends only on how many samples were drawn before it. So batches can be built ahead in threads, and
resuming, on any number of ranks, needs one number.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from torchstone.config.schema import (
    DEFAULT_CHAT_ROWS,
    DEFAULT_TEXT_ROWS,
    FINE_TUNING_BATCH_SIZE,
    Config,
    DataConfig,
)
from torchstone.data.batch_sizes import BatchSizes, drop_preset_sizes, resolve_batch_sizes
from torchstone.data.cache import (
    FIRST_ROW_HINT,
    CacheOptions,
    DataSource,
    TokenCache,
    columns_per_path,
    open_cache,
    open_source,
)
from torchstone.data.collate import LENGTH_MULTIPLE, PADDING_DOC_ID, BatchShapes, MicroBatch, collate
from torchstone.data.encode import EncodingConfig, RowCounts
from torchstone.data.formats import CHAT_FORMATS, TEXT_FORMATS, RowFormat, check_train_on
from torchstone.data.sampler import InfiniteSampler, MixedSampler, Sampler
from torchstone.data.samples import (
    BestFitSamples,
    Samples,
    SequenceSamples,
    StreamSamples,
    concat_samples,
    split_validation,
)
from torchstone.data.sources import BadRow
from torchstone.data.tokenize import Tokenizer
from torchstone.observe.console import Console

# Rows of text, and rows that are not packed, all get the same length if that takes at most this share of padding.
MAX_FIXED_PADDING = 0.01


@dataclass
class StepBatch:
    """One rank's micro-batches of an optimizer step and their padding. The other counts are over all ranks."""

    micro_batches: list[MicroBatch]
    samples: int
    tokens: int
    loss_tokens: int
    padding: int
    first_sample: int
    # Over the documents of this rank, weighted by their tokens: what the attention of a token costs.
    mean_length: float = 0.0


@dataclass
class RunData:
    """The samples to train and validate on. `packed`: whether a row may hold several sequences.

    `validation` has the samples of each validation set by its name, which is empty for one without a name.
    """

    train: Samples
    validation: dict[str, Samples]
    batch_sizes: BatchSizes
    names: list[str]
    formats: list[RowFormat]
    sizes: list[int]
    weights: list[float]
    packed: bool
    fingerprint: str
    pad_id: int
    counts: RowCounts
    shapes: BatchShapes = field(default_factory=BatchShapes)

    def sampler(self, config: Config, consumed_samples: int = 0) -> Sampler:
        """Draws the training samples in the order of the run."""
        seed, shuffle = config.training.seed, config.data.shuffle
        if self.weights:
            return MixedSampler(self.sizes, self.weights, seed, shuffle, consumed_samples)
        return InfiniteSampler(len(self.train), seed, shuffle, consumed_samples)

    def set_micro_batch(self, size: int, dp: int) -> None:
        """Sets the rows of a micro-batch, or its tokens if conversations share rows. Steps keep their samples."""
        if self.batch_sizes.micro_batch_tokens is not None:
            self.batch_sizes = replace(self.batch_sizes, micro_batch_tokens=size)
            if self.shapes.max_length is not None:
                self.shapes = replace(self.shapes, max_length=size)
            return
        self.batch_sizes = replace(self.batch_sizes, micro_batch_rows=size)
        if self.shapes.row_counts:
            self.shapes = replace(self.shapes, row_counts=self.batch_sizes.row_counts(dp))

    def describe_mixture(self, samples: int) -> list[str]:
        """Lines about each source's share in a run of `samples` samples; none without weights."""
        if not self.weights:
            return []
        draws = MixedSampler(self.sizes, self.weights).samples_per_source(samples)
        return [
            f"{name}: {100 * weight / sum(self.weights):.1f} % of the samples, each seen {count / size:.2f} times"
            for name, weight, count, size in zip(self.names, self.weights, draws, self.sizes, strict=True)
        ]

    def batches(
        self,
        config: Config,
        consumed_samples: int,
        last_sample: int | None,
        dp_rank: int = 0,
        dp: int = 1,
        pin_memory: bool = False,
    ) -> Iterator[StepBatch]:
        """Yields the batches of steps after `consumed_samples`. The last may be smaller, to end at `last_sample`."""
        sampler = self.sampler(config, consumed_samples)

        def draws() -> Iterator[tuple[int, np.ndarray]]:
            while last_sample is None or sampler.consumed_samples < last_sample:
                size = self.batch_sizes.global_batch_size
                size = size if last_sample is None else min(size, last_sample - sampler.consumed_samples)
                first = sampler.consumed_samples
                yield first, sampler.take(size)

        def build(draw: tuple[int, np.ndarray]) -> StepBatch:
            batch = self.step_batch(self.train, draw[1], draw[0], dp_rank, dp)
            pinned = [m.pin_memory() for m in batch.micro_batches] if pin_memory else batch.micro_batches
            return replace(batch, micro_batches=pinned)

        return _build_ahead(build, draws(), config.data.num_workers)

    def validation_batches(self, name: str, dp_rank: int = 0, dp: int = 1) -> Iterator[StepBatch]:
        return self.batches_in_order(self.validation[name], dp_rank, dp)

    def batches_in_order(self, samples: Samples, dp_rank: int = 0, dp: int = 1) -> Iterator[StepBatch]:
        """Yields every sample once. The last batch may be smaller."""
        size = self.batch_sizes.global_batch_size
        for start in range(0, len(samples), size):
            indices = np.arange(start, min(start + size, len(samples)))
            yield self.step_batch(samples, indices, start, dp_rank, dp)

    def step_batch(
        self, samples: Samples, indices: np.ndarray, first_sample: int, dp_rank: int = 0, dp: int = 1
    ) -> StepBatch:
        rows_of_steps = [
            [[sequence for i in row for sequence in samples.get(i)] for row in ranks[dp_rank]]
            for ranks in self.batch_sizes.assign_micro_steps(indices, samples.lengths, dp)
        ]
        micro_batches = [collate(rows, self.pad_id, self.shapes) for rows in rows_of_steps]
        lengths = np.array([len(document.ids) for rows in rows_of_steps for row in rows for document in row])
        return StepBatch(
            micro_batches,
            samples=len(indices),
            tokens=int(samples.lengths[indices].sum()),
            loss_tokens=int(samples.loss_tokens[indices].sum()),
            padding=count_padding(micro_batches),
            first_sample=first_sample,
            mean_length=float((lengths**2).sum() / max(1, lengths.sum())),
        )

    def documents(self, samples: Samples, indices: np.ndarray, dp_rank: int = 0, dp: int = 1) -> list[tuple[str, int]]:
        """Where the documents of the same `step_batch` come from, and their lengths in tokens, in its order."""
        return [
            (origin, len(sequence.ids))
            for ranks in self.batch_sizes.assign_micro_steps(indices, samples.lengths, dp)
            for row in ranks[dp_rank]
            for i in row
            for origin, sequence in zip(samples.origins(i), samples.get(i), strict=True)
        ]


def count_padding(batches: Sequence[MicroBatch]) -> int:
    return sum(int((batch.doc_ids == PADDING_DOC_ID).sum()) for batch in batches)


def load_data(
    config: Config,
    tokenizer: Tokenizer,
    train: Sequence[str],
    validation: Mapping[str, Sequence[str]],
    console: Console,
    dp: int = 1,
    tp: int = 1,
    pad_to_buckets: bool = False,
) -> RunData:
    """Tokenizes what is not tokenized yet, and lays out the samples. `validation` has the paths of each validation set.
    `pad_to_buckets` pads rows to few lengths, for GPUs."""
    data, seed = config.data, config.training.seed
    sources = open_sources(data, train)
    is_text = all(source.row_format in TEXT_FORMATS for source in sources)
    batch_sizes, dropped = choose_batch_sizes(config, is_text, dp)
    if dropped:
        kind = "rows that are not packed" if batch_sizes.micro_batch_tokens is None else "packed conversations"
        console.info(f"{', '.join(dropped)} of the preset is not used: it does not apply to {kind}")
    caches = [tokenize_source(data, source, tokenizer, console, max_rows=data.max_samples) for source in sources]
    splits = [split_validation(cache.origins, data.validation_split, seed, cache.source.num_texts) for cache in caches]
    train_parts = [_make_samples(data, cache, split[0]) for cache, split in zip(caches, splits, strict=True)]
    held_out = [
        _make_samples(data, cache, split[1]) for cache, split in zip(caches, splits, strict=True) if len(split[1])
    ]
    validation_parts = {"": held_out} if held_out else _validation_samples(data, validation, tokenizer, console)
    counts = RowCounts()
    for cache in caches:
        counts.add(cache.counts)
    return RunData(
        train=concat_samples(train_parts),
        validation={name: concat_samples(parts) for name, parts in validation_parts.items()},
        batch_sizes=batch_sizes,
        names=[source.title for source in sources],
        formats=[source.row_format for source in sources],
        sizes=[len(part) for part in train_parts],
        weights=list(data.weights),
        packed=data.packing,
        fingerprint=_fingerprint(data, caches),
        pad_id=tokenizer.pad_id,
        counts=counts,
        shapes=_batch_shapes(
            batch_sizes,
            [*train_parts, *chain(*validation_parts.values())],
            dp,
            _length_multiple(config, tp),
            pad_to_buckets,
        ),
    )


def choose_batch_sizes(config: Config, is_text: bool, dp: int) -> tuple[BatchSizes, list[str]]:
    """The batch sizes for text or for conversations, and the preset's sizes that do not apply to them."""
    shares_rows = config.data.packing and not is_text
    training, dropped = drop_preset_sizes(config.training, config.preset_batch_keys, shares_rows)
    default_rows = DEFAULT_TEXT_ROWS if is_text else DEFAULT_CHAT_ROWS
    default_total = None if config.model.path is None else FINE_TUNING_BATCH_SIZE
    context_length = config.data.context_length
    return resolve_batch_sizes(training, shares_rows, context_length, default_rows, dp, default_total), dropped


def _validation_samples(
    data: DataConfig, validation: Mapping[str, Sequence[str]], tokenizer: Tokenizer, console: Console
) -> dict[str, list[Samples]]:
    """The samples of every path, by the name of its validation set."""
    names = [name for name, paths in validation.items() for _ in paths]
    # All paths at once: data.columns may have one mapping for each.
    sources = open_sources(data, list(chain(*validation.values())), is_validation=True) if validation else []
    samples: dict[str, list[Samples]] = {}
    for name, source in zip(names, sources, strict=True):
        cache = tokenize_source(data, source, tokenizer, console)
        samples.setdefault(name, []).append(_make_samples(data, cache, np.arange(len(cache))))
    return samples


def _length_multiple(config: Config, tp: int) -> int:
    if config.training.precision.startswith("fp8"):
        # The gradient of a weight is a product over all tokens, whose number must be a multiple of 16 in FP8.
        return 2 * LENGTH_MULTIPLE
    # DTensor plans every operation anew for each shape, so with tp there are fewer shapes.
    return LENGTH_MULTIPLE if tp == 1 else math.lcm(8 * LENGTH_MULTIPLE, tp)


def _batch_shapes(
    batch_sizes: BatchSizes, samples: Sequence[Samples], dp: int, multiple: int, pad_to_buckets: bool
) -> BatchShapes:
    if not pad_to_buckets:
        return BatchShapes(multiple)
    if batch_sizes.micro_batch_tokens is not None:
        return BatchShapes(multiple, batch_sizes.micro_batch_tokens)
    lengths = np.concatenate([part.lengths for part in samples])
    longest = int(lengths.max(initial=1))
    has_fixed_length = bool(lengths.mean() >= (1 - MAX_FIXED_PADDING) * longest)
    return BatchShapes(multiple, longest, has_fixed_length, batch_sizes.row_counts(dp))


def open_sources(
    data: DataConfig, names: Sequence[str], is_validation: bool = False, inspect_only: bool = False
) -> list[DataSource]:
    """Opens data sources. If data.format has one entry per path, the formats of validation paths are detected."""
    common = data.format[0] if len(data.format) == 1 else "auto"
    formats = data.format if len(data.format) > 1 and not is_validation else (common,) * len(names)
    columns = columns_per_path(data.columns, names)
    stop_on_bad_row = data.on_bad_row == "stop" and not inspect_only
    try:
        return [
            open_source(name, row_format, stop_on_bad_row, mapping, Path(data.cache_dir))
            for name, row_format, mapping in zip(names, formats, columns, strict=True)
        ]
    except BadRow as error:
        raise error.with_hint(FIRST_ROW_HINT) from None


def tokenize_source(
    data: DataConfig,
    source: DataSource,
    tokenizer: Tokenizer,
    console: Console,
    inspect_only: bool = False,
    max_rows: int | None = None,
) -> TokenCache:
    """The token cache of a source, with log lines about its rows. With `inspect_only` nothing is refused."""
    check_train_on(data.train_on)
    for note in source.notes:
        console.info(note)
    is_stream = _is_stream(data, source)
    if is_stream and data.on_long_row in ("drop", "truncate") and not inspect_only:
        console.warn(
            f"{source.title}: data.on_long_row {data.on_long_row} has no effect on packed text, which is one stream "
            "(--data.text_packing best-fit keeps documents whole)"
        )
    unknown_tokens = tokenizer.unknown_template_tokens if source.row_format in CHAT_FORMATS else []
    for token in unknown_tokens:
        console.warn(f"the chat template writes {token}, which is not a single token of {tokenizer.path}")
    if source.row_format in CHAT_FORMATS and data.train_on != "all" and (header := tokenizer.template.trained_header()):
        console.warn(
            f"the chat template has no generation prompt (it ignores add_generation_prompt): {header!r} is trained on "
            "with every answer, and torchstone chat will not prompt with it"
        )
    encoding = source_encoding(data, source, tokenizer)
    stop_on_bad_row = data.on_bad_row == "stop" and not inspect_only
    options = CacheOptions(Path(data.cache_dir), data.prepare_workers, stop_on_bad_row, needs_row_lengths=inspect_only)
    cache = open_cache(source, encoding, options, console, max_rows)
    if not inspect_only:
        log_counts(cache, console)
        cache.check_trainable(unknown_tokens)
    return cache


def source_encoding(data: DataConfig, source: DataSource, tokenizer: Tokenizer) -> EncodingConfig:
    """How the rows of a source become tokens."""
    if _is_stream(data, source):
        return tokenizer.encoding_config(source.row_format, None, "", data.train_on, source.columns)
    default = "split" if source.row_format in TEXT_FORMATS else "drop"
    on_long_row = default if data.on_long_row == "auto" else data.on_long_row
    return tokenizer.encoding_config(source.row_format, data.context_length, on_long_row, data.train_on, source.columns)


def _is_stream(data: DataConfig, source: DataSource) -> bool:
    return source.row_format in TEXT_FORMATS and data.packing and data.text_packing == "stream"


def log_counts(cache: TokenCache, console: Console) -> None:
    counts, name = cache.counts, cache.source.title
    share = 100 * counts.trained_tokens / max(1, counts.tokens)
    kept = f"{counts.rows - counts.dropped} of " if counts.dropped else ""
    console.info(f"{name}: {kept}{counts.rows} rows, {counts.tokens} tokens, {share:.1f} % of them trained")
    examples = f", such as {', '.join(counts.examples[:3])}" if counts.examples else ""
    lost = f"{counts.cropped_tokens} tokens lost"
    warnings = {
        f"are bad and left out; they are in {cache.bad_rows_path}": counts.bad_rows,
        f"are longer than data.context_length and dropped{examples} (see data.on_long_row)": counts.dropped_long,
        f"are cut to data.context_length{examples}: {lost}": counts.truncated_long,
        f"are split at data.context_length{examples}: {lost}": counts.split_long,
        f"are dropped: no loss token is within data.context_length{examples}": counts.dropped_untrained,
        "have no labels; they are kept": counts.untrained if cache.row_format == "tokens" else 0,
    }
    for text, number in warnings.items():
        if number:
            console.warn(f"{name}: {number} of {counts.rows} rows {text}")
    if counts.lost_characters:
        console.warn(f"{name}: {counts.lost_characters} characters have no token and are left out of the text")
    if counts.straddling_tokens:
        console.warn(f"{name}: {counts.straddling_tokens} tokens span a prompt and its answer; they are trained on")


def _make_samples(data: DataConfig, cache: TokenCache, indices: np.ndarray) -> Samples:
    if cache.row_format in TEXT_FORMATS and data.packing:
        samples = StreamSamples if data.text_packing == "stream" else BestFitSamples
        return samples(cache, indices, data.context_length)
    return SequenceSamples(cache, indices)


def _fingerprint(data: DataConfig, caches: list[TokenCache]) -> str:
    """A hash of the samples and their order: the contents of every source, how they are packed and mixed."""
    inputs = [cache.key for cache in caches]
    if data.packing and any(cache.row_format in TEXT_FORMATS for cache in caches):
        inputs.append(data.text_packing)
    inputs += [f"{weight / sum(data.weights):.9f}" for weight in data.weights]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()


def _build_ahead(
    build: Callable[[tuple[int, np.ndarray]], StepBatch], draws: Iterator[tuple[int, np.ndarray]], num_workers: int
) -> Iterator[StepBatch]:
    """Maps `build` over `draws` in order, up to two batches per worker ahead of the consumer."""
    if num_workers == 0:
        yield from map(build, draws)
        return
    pending: deque[Future[StepBatch]] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="batches") as pool:
        for draw in draws:
            pending.append(pool.submit(build, draw))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
