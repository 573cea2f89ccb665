"""The part of the data that the checks look at: rows as the files have them, and as the tokens that training gets.

It is bounded, and the same every time: rows from a few chunks, spread over the files of each source, and the samples of
one step. Reading it takes a tenth of a second, for data of any size. Documents come from the token cache: `data_order`
and `batch` measure what becomes of them later.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from torchstone.data.cache import LINES_PER_FILE, TokenCache
from torchstone.data.formats import IGNORE_INDEX, RowFormat
from torchstone.data.loader import StepBatch
from torchstone.data.samples import BestFitSamples, ConcatSamples, Samples, SequenceSamples, StreamSamples
from torchstone.data.sources import (
    CHUNK_BYTES,
    DELIMITERS,
    Chunk,
    Row,
    file_type,
    parse_rows,
    read_chunks,
    size_on_disk,
)
from torchstone.diagnosis.batch_contents import DocumentLocation, FoundDocument, read_micro_batches
from torchstone.diagnosis.check import SkipCheck
from torchstone.diagnosis.turns import Turn, read_turns
from torchstone.training.run import Run

# Rows of a source, and the chunks of about 2 MB they are from. Each of many sources has less, but at least MIN_ROWS.
MAX_ROWS, MAX_CHUNKS, MIN_ROWS = 64, 8, 8
# A row may have been left out, so more are parsed.
PARSED_PER_ROW = 4
# At most this many chunks are skipped between two that are sampled.
MAX_CHUNK_STEP = 4
# Tokens of the step that is looked at; tokens of all sources where tokens are counted.
MAX_STEP_TOKENS, MAX_TOKENS = 1 << 18, 1 << 24
# A failure concerns at least this share of what was looked at, unless a single case is one.
MAX_WRONG = 0.05
CachedSamples = SequenceSamples | StreamSamples | BestFitSamples


@dataclass(frozen=True)
class SampledRow:
    """A row of a file, its texts, and its documents in order: one, unless the row was split."""

    row: Row
    cache: TokenCache
    turns: list[Turn]
    documents: list[FoundDocument]

    @property
    def origin(self) -> str:
        return f"{self.row.path}:{self.row.line}"

    @property
    def row_format(self) -> RowFormat:
        return self.cache.row_format


def train_parts(samples: Samples) -> list[tuple[int, CachedSamples]]:
    """The number of the first sample of each source, and its samples."""
    parts = samples.parts if isinstance(samples, ConcatSamples) else [samples]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    return [(int(start), part) for start, part in zip(starts, parts, strict=False) if isinstance(part, CachedSamples)]


def sequence_numbers(part: CachedSamples) -> np.ndarray:
    """Which sequences of its cache a source uses: not those that are held out."""
    return part.documents if isinstance(part, BestFitSamples) else part.indices


def sample_rows(run: Run, formats: tuple[RowFormat, ...]) -> list[SampledRow]:
    """Some training rows of each source that has one of `formats`. Raises SkipCheck without any."""
    parts = [part for _, part in train_parts(run.data.train) if part.cache.row_format in formats]
    rows = [row for part in parts for row in _rows_of_part(run, part, len(parts))]
    if not rows:
        raise SkipCheck(f"no training row is of the formats {', '.join(formats)}")
    return rows


def sample_sequences(
    run: Run, formats: tuple[RowFormat, ...], count: int
) -> Iterator[tuple[TokenCache, str, np.ndarray, np.ndarray]]:
    """About `count` sequences, spread over all of each source: its cache, file:line, ids, and labels (not shifted).

    Only the first sequence of a row that was split, and also of rows that are held out."""
    caches = [part.cache for _, part in train_parts(run.data.train) if part.cache.row_format in formats]
    for cache in caches:
        chosen = np.linspace(0, len(cache) - 1, max(MIN_ROWS, count // len(caches))).astype(np.int64)
        for number in np.unique(np.searchsorted(cache.origins, cache.origins[chosen])).tolist():
            sequence = cache.sequence(number)
            yield cache, cache.origin(number), sequence.ids, sequence.labels


def search_sequences(
    run: Run, formats: tuple[RowFormat, ...], count: int, is_found: Callable[[np.ndarray, np.ndarray], bool]
) -> tuple[int, list[str]]:
    """How many sequences are looked at, and the file:line of those whose ids and labels are what is searched."""
    found = [(origin, is_found(ids, labels)) for _, origin, ids, labels in sample_sequences(run, formats, count)]
    return len(found), [origin for origin, is_one in found if is_one]


def sample_step(run: Run) -> tuple[np.ndarray, StepBatch, list[FoundDocument]]:
    """The first samples of the next step, the micro-batches that they become, and the documents of those."""
    sampler = run.data.sampler(run.config, run.progress.samples)
    indices = sampler.take(min(MAX_ROWS, len(run.data.train)))
    ends = np.cumsum(run.data.train.lengths[indices])
    indices = indices[: max(1, int((ends <= MAX_STEP_TOKENS).sum()))]
    batch = run.data.step_batch(run.data.train, indices, run.progress.samples)
    return indices, batch, read_micro_batches(batch.micro_batches, 0)[0]


def is_cut(run: Run, row: SampledRow) -> bool:
    """Whether a row may lack its end, or is split."""
    return len(row.documents) != 1 or len(row.documents[0].ids) >= run.config.data.context_length


def decode(run: Run, ids: np.ndarray | list[int]) -> str:
    numbers = np.asarray(ids, dtype=np.int64).tolist()
    return run.tokenizer.hf.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def name_token(run: Run, number: int) -> str:
    return f"{run.tokenizer.hf.convert_ids_to_tokens(number)} (id {number})"


def inspect_command(run: Run, origin: str) -> str:
    """A command that shows the row at `origin` last."""
    data, (path, _, line) = run.config.data, origin.rpartition(":")
    words = ["torchstone", "inspect-data", "--model.tokenizer", run.tokenizer.path, "--data.path", path]
    words += ["--data.context_length", str(data.context_length)]
    if data.chat_template is not None:
        words += ["--data.chat_template", data.chat_template]
    if data.train_on != "assistant":
        words += ["--data.train_on", data.train_on]
    if len(data.format) == 1 and data.format[0] != "auto":
        words += ["--data.format", data.format[0]]
    if len(data.columns) == 1:
        words += ["--data.columns", ",".join(f"{name}={column}" for name, column in data.columns[0].items())]
    if (kind := file_type(Path(path))) != ".txt":
        # The first line of a CSV file is its header.
        words += ["--data.max_samples", str(max(1, int(line) - (kind in DELIMITERS)))]
    return shlex.join([*words, "--rows", "2"])


def look_for_change(path: str) -> str:
    """What to do about a mistake that no setting makes."""
    return f"no setting does this: look for a change in {path}, and report it if there is none"


def _rows_of_part(run: Run, part: CachedSamples, num_parts: int) -> Iterator[SampledRow]:
    cache, numbers = part.cache, sequence_numbers(part)
    chunks = _choose_chunks(cache, max(1, MAX_CHUNKS // num_parts))
    count = -(-max(MIN_ROWS, MAX_ROWS // max(1, num_parts // 4)) // max(1, len(chunks)))
    for chunk in chunks:
        file, rows = cache.source.files.index(chunk.path), _parse_some(chunk, cache, PARSED_PER_ROW * count)
        keys = np.array([file * LINES_PER_FILE + row.line for row in rows], dtype=np.int64)
        # The sequences of each row: none if it was left out. All are on one side of a validation split.
        starts, ends = np.searchsorted(cache.origins, keys), np.searchsorted(cache.origins, keys, side="right")
        is_used = (starts < ends) & np.isin(starts, numbers, kind="table")
        for place in _spread(np.flatnonzero(is_used), count).tolist():
            documents = [_read_document(cache, number) for number in range(starts[place], ends[place])]
            turns = read_turns(cache.row_format, rows[place].value, run.config.data.train_on)
            yield SampledRow(rows[place], cache, turns, documents)


def _choose_chunks(cache: TokenCache, max_chunks: int) -> list[Chunk]:
    """The first chunk of some files, or some chunks of a single one."""
    files = _spread(np.arange(len(cache.source.files)), max_chunks)
    count, chunks = max(1, max_chunks // len(files)), list[Chunk]()
    for path in (cache.source.files[file] for file in files):
        step = min(MAX_CHUNK_STEP, max(1, size_on_disk(path) // (count * CHUNK_BYTES)))
        stream = read_chunks([path], text_lines=cache.row_format == "lines", columns=cache.source.columns)
        chunks += islice(stream, 0, count * step, step)
    return chunks


def _parse_some(chunk: Chunk, cache: TokenCache, count: int) -> list[Row]:
    """Some of the rows of a chunk. Parsing all lines would take most of the time."""
    parts = [chunk]
    if chunk.kind in ("lines", "text_lines"):
        lines = chunk.payload.split(b"\n")
        chosen = _spread(np.arange(len(lines)), count).tolist()
        parts = [chunk._replace(payload=lines[n], first_line=chunk.first_line + n) for n in chosen]
    return [row for part in parts for row in parse_rows(part, cache.source.columns) if isinstance(row, Row)]


def _read_document(cache: TokenCache, number: int) -> FoundDocument:
    """A document as a micro-batch should have it: its labels shifted once."""
    sequence = cache.sequence(number)
    labels = np.append(sequence.labels[1:], IGNORE_INDEX)
    return FoundDocument(DocumentLocation(0, 0, 0, 0), sequence.ids, labels, np.arange(len(labels)))


def _spread(values: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]
