"""How many steps and tokens a run has: counted where the data is tokenized or small, otherwise estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from torchstone.config.schema import Config
from torchstone.data.batch_sizes import BatchSizes
from torchstone.data.cache import DataSource, has_cache
from torchstone.data.formats import TEXT_FORMATS
from torchstone.data.loader import choose_batch_sizes, open_sources, source_encoding
from torchstone.data.sources import count_rows, size_on_disk
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.builtin import data_file
from torchstone.observe.console import Console
from torchstone.parallel.mesh import SINGLE_PROCESS, ParallelDims
from torchstone.training.schedule import plan_schedule
from torchstone.training.setup import open_data
from torchstone.training.state import Progress

# Tokenized in less than a second.
SMALL_BYTES = 4_000_000
# Average of English text with a large vocabulary; a guess.
BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class RunLength:
    """`source` says where the numbers come from. None: not known, or the run has no end."""

    batch_sizes: BatchSizes
    shares_rows: bool
    # Tokens of a row in memory; mean document length weighted by tokens.
    row_tokens: int
    mean_length: float
    # Mean tokens of a sample.
    sample_tokens: float
    steps: int | None
    tokens: int | None
    source: str

    @property
    def step_tokens(self) -> float:
        return self.batch_sizes.global_batch_size * self.sample_tokens


def plan_length(config: Config, tokenizer: Tokenizer | None, dims: ParallelDims) -> RunLength:
    """`config`: with batch sizes of numbers."""
    data = config.data
    paths = [data_file(path, Path(data.cache_dir)) for path in data.path or ()]
    sources = open_sources(data, paths)
    is_text = all(source.row_format in TEXT_FORMATS for source in sources)
    shares_rows = data.packing and not is_text
    # With several ranks, the caches are the same.
    if sources and tokenizer is not None and _is_counted(config, sources, tokenizer):
        return _count(config, tokenizer, dims, is_text, shares_rows)
    batch_sizes, _ = choose_batch_sizes(config, is_text, dims.dp)
    length, source = float(data.context_length), "not known: there is no data"
    samples = None
    if sources:
        size = sum(size_on_disk(path) for each in sources for path in each.files)
        rows = sum(map(_estimate_rows, sources))
        tokens = size / BYTES_PER_TOKEN
        if not (is_text and data.packing):
            length = min(length, tokens / max(1, rows))
        samples, source = (
            max(1, round(tokens / length)),
            f"estimated from {size / 1e6:,.0f} MB of data, which is not tokenized",
        )
    steps = _estimate_steps(config, samples, batch_sizes.global_batch_size, length)
    if steps is not None and (samples is None or steps == config.training.max_steps):
        source = "at most: full rows" if samples is None else source
    tokens_of_run = None if steps is None else round(steps * batch_sizes.global_batch_size * length)
    row_tokens = _row_tokens(batch_sizes, data.context_length, data.context_length)
    return RunLength(batch_sizes, shares_rows, row_tokens, length, length, steps, tokens_of_run, source)


def _is_counted(config: Config, sources: list[DataSource], tokenizer: Tokenizer) -> bool:
    """Whether all data is in the token cache, or what is not is small."""
    data = config.data
    missing = [
        source
        for source in sources
        if not has_cache(source, source_encoding(data, source, tokenizer), Path(data.cache_dir), data.max_samples)
    ]
    return sum(size_on_disk(path) for source in missing for path in source.files) <= SMALL_BYTES


def _count(config: Config, tokenizer: Tokenizer, dims: ParallelDims, is_text: bool, shares_rows: bool) -> RunLength:
    """Counts steps and tokens the way `train` does."""
    # Validation data is not needed, but held-out rows are.
    config = replace(config, data=replace(config.data, validation_path=None))
    run_data = open_data(config, tokenizer, Console("quiet"), replace(SINGLE_PROCESS, dims=dims))
    schedule, lengths = plan_schedule(config, run_data, Progress()), run_data.train.lengths
    steps, mean = schedule.total_steps, float(lengths.mean())
    tokens = None
    if steps is not None:
        samples = schedule.end(Progress())[1]
        epochs, rest = divmod(samples, len(lengths))
        # What is drawn of the last epoch is random.
        tokens = int(lengths.sum()) * epochs + round(rest * mean)
    context_length = config.data.context_length
    longest = context_length if config.data.packing else min(context_length, int(lengths.max()))
    documents = _document_lengths(run_data.train, is_text)
    mean_length = float((documents.astype(np.float64) ** 2).sum() / max(1, documents.sum()))
    row_tokens = _row_tokens(run_data.batch_sizes, context_length, longest)
    return RunLength(
        run_data.batch_sizes, shares_rows, row_tokens, min(mean_length, context_length), mean, steps, tokens, "counted"
    )  # fmt: skip


def _document_lengths(samples: object, is_text: bool) -> np.ndarray:
    parts = getattr(samples, "parts", [samples])
    return np.concatenate([part.cache.lengths if is_text else part.lengths for part in parts])


def _row_tokens(batch_sizes: BatchSizes, context_length: int, longest: int) -> int:
    """Packed conversations are one row; it counts as rows of the context length."""
    if batch_sizes.micro_batch_tokens is None:
        return longest
    rows = max(1, batch_sizes.micro_batch_tokens // context_length)
    return -(-batch_sizes.micro_batch_tokens // rows)


def _estimate_rows(source: DataSource) -> float:
    """The number of rows of a source, estimated from its first ones."""
    chunk = next(source.read_chunks(), None)
    if chunk is None:
        return 0.0
    size = sum(map(size_on_disk, source.files))
    return count_rows(chunk) * max(1.0, size / max(1, chunk.bytes_done))


def _estimate_steps(config: Config, samples: int | None, batch_size: int, sample_tokens: float) -> int | None:
    training = config.training
    limits = [] if training.max_steps is None else [training.max_steps]
    if training.max_tokens is not None:
        limits.append(math.ceil(training.max_tokens / (batch_size * sample_tokens)))
    if samples is not None and (training.max_epochs is not None or not limits):
        limits.append(math.ceil((training.max_epochs or 1) * samples / batch_size))
    return None if training.mode == "infinite" else min(limits, default=None)
