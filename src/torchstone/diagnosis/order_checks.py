"""A check of the samples and their order: they have every document once and whole, an epoch has every sample once, the
next one another order, and a resumed run goes on where it was.

It counts what the sampler of the run draws, without a model, and knows nothing about how the sampler makes its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchstone.data.samples import Samples
from torchstone.diagnosis.check import Finding
from torchstone.diagnosis.sampled_rows import CachedSamples, look_for_change, sequence_numbers, train_parts
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

# Two epochs are drawn, or this many samples of more.
MAX_DRAWS, MAX_TAKES = 100_000, 500
# Fewer samples may have the same order twice by accident.
MIN_SHUFFLED = 10
# A part of the data, and how many draws it takes to see that its samples are not among them.
PARTS, MIN_DRAWS = 8, 1000
# How many samples are compared after each place at which a run is resumed, and with the documents at three places.
RESUMED, NEIGHBORS = 64, 16


def check_data_order(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    data, shuffle = run.data, run.config.data.shuffle
    # Without weights all sources are drawn as one.
    sizes, weights = (data.sizes, data.weights) if data.weights else ([len(data.train)], [1.0])
    shares = np.array(weights) / sum(weights)
    epochs = np.ceil(np.array(sizes) / shares)
    draws = _draw(run, 0, min(MAX_DRAWS, int(2 * epochs.max())))
    starts = np.cumsum([0, *sizes])
    sources = np.searchsorted(starts, draws, side="right") - 1
    cause = None
    if draws.min() < 0 or draws.max() >= starts[-1]:
        cause = f"sample {draws.max()} is drawn, but there are {starts[-1]:,}"
    for number, size in enumerate(sizes if cause is None else ()):
        own = draws[sources == number] - starts[number]
        cause = cause or _describe_epochs(own[:size], own[size : 2 * size], size, shuffle)
    cause = cause or _describe_shares(sources, shares) or _describe_resumed(run, draws, sizes)
    if cause is None and len(draws) <= sizes[0] == starts[-1]:
        cause = _describe_epochs(draws, _draw(run, sizes[0], len(draws)), sizes[0], shuffle)
    for first, part in train_parts(data.train):
        cause = cause or _describe_documents(run, part) or _describe_samples(data.train, first, part)
    finding = Finding(
        "pass",
        f"{len(draws):,} draws from {', '.join(f'{n:,}' for n in sizes)} samples: "
        f"{', '.join(f'{min(2, len(draws) / epoch):.3g}' for epoch in epochs)} epochs",
        limit="each document in one sample, each sample once per epoch, in a new order if data.shuffle; resumed where "
        "it was",
        values={"samples": int(starts[-1]), "draws": len(draws), "distinct": len(np.unique(draws))},
    )
    if cause is None:
        return finding
    source = "data/sampler.py, data/samples.py"
    return finding.with_cause(cause, source, look_for_change(source))


def _draw(run: Run, consumed: int, count: int) -> np.ndarray:
    """What a run draws after `consumed` samples, taken step by step."""
    sampler = run.data.sampler(run.config, consumed)
    step = max(run.data.batch_sizes.global_batch_size, count // MAX_TAKES)
    return np.concatenate([sampler.take(min(step, count - start)) for start in range(0, count, step)])


def _describe_documents(run: Run, part: CachedSamples) -> str | None:
    """What is wrong with the documents of a source: each must be used once, unless it is held out."""
    cache, numbers = part.cache, sequence_numbers(part)
    is_used: np.ndarray = np.zeros(len(cache), dtype=bool)
    is_used[numbers] = True
    if repeated := len(numbers) - int(is_used.sum()):
        return f"{repeated:,} documents of {cache.source.name} are in several samples"
    for _, each in (each for samples in run.data.validation.values() for each in train_parts(samples)):
        if each.cache.folder == cache.folder:
            is_used[sequence_numbers(each)] = True
    missing = len(cache) - int(is_used.sum())
    return f"{missing:,} documents of {cache.source.name} are in no sample" if missing else None


def _describe_samples(train: Samples, first: int, part: CachedSamples) -> str | None:
    """What is wrong with some samples of a source: they must be its documents, one after another, cut at the lengths of
    the samples, and nothing may join two documents."""
    numbers, starts = sequence_numbers(part), np.cumsum([0, *part.lengths])
    lengths = part.cache.lengths[numbers].astype(np.int64)
    ends, size = np.cumsum(lengths), len(part)
    if starts[-1] != ends[-1]:
        return f"the samples of {part.cache.source.name} have {starts[-1]:,} tokens, its documents {ends[-1]:,}"
    places = [(0, NEIGHBORS), (size // 2, size // 2 + NEIGHBORS), (size - NEIGHBORS, size)]
    for sample in sorted({n for start, stop in places for n in range(max(0, start), min(size, stop))}):
        start, stop = starts[sample : sample + 2]
        documents = slice(np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop) + 1)
        before = ends[documents][0] - lengths[documents][0]
        ids = np.concatenate([part.cache.sequence(int(number)).ids for number in numbers[documents]])
        found = [sequence.ids for sequence in train.get(first + sample)]
        has_ends = np.array_equal(start + np.cumsum([len(each) for each in found]), np.minimum(ends[documents], stop))
        if not has_ends or not np.array_equal(np.concatenate(found), ids[start - before : stop - before]):
            return f"sample {sample:,} of {part.cache.source.name} does not have the tokens of its documents"
    return None


def _describe_epochs(first: np.ndarray, second: np.ndarray, size: int, shuffle: bool) -> str | None:
    """What is wrong with the draws of two epochs of `size` samples, or the first of them."""
    if not shuffle:
        is_right = np.array_equal(first, np.arange(len(first))) and np.array_equal(second, np.arange(len(second)))
        return None if is_right else "data.shuffle is off, but samples are not drawn in the order of the files"
    distinct, both = len(np.unique(first)), len(np.unique(np.concatenate((first, second))))
    if len(first) == len(second) == size > distinct == both:
        return f"{size - distinct:,} of {size:,} samples are never drawn, and others several times in an epoch"
    for own in (first, second):
        if (differ := len(np.unique(own))) < len(own):
            return f"an epoch draws samples again: only {differ:,} of {len(own):,} draws differ"
    counts = np.bincount(first * PARTS // size, minlength=PARTS)
    if len(first) >= MIN_DRAWS and counts.min() < counts.mean() / 2:
        return f"the first {len(first):,} samples leave out a part of the data: of its {PARTS} parts they have {counts}"
    common = min(len(first), len(second))
    if common >= MIN_SHUFFLED and np.array_equal(first[:common], second[:common]):
        return "every epoch has the same order"
    return None


def _describe_shares(sources: np.ndarray, shares: np.ndarray) -> str | None:
    """Weighted sources: after any number of draws each has its share, but for a sample per source."""
    for number, share in enumerate(shares):
        due = share * np.arange(1, len(sources) + 1)
        if np.abs(np.cumsum(sources == number) - due).max() > len(shares):
            found = float((sources == number).mean())
            return f"source {number + 1} has {found:.1%} of the samples, but its share by data.weights is {share:.1%}"
    return None


def _describe_resumed(run: Run, draws: np.ndarray, sizes: Sequence[int]) -> str | None:
    step, epoch = run.data.batch_sizes.global_batch_size, sum(sizes)
    places = {1, step, 3 * step, len(draws) // 3, epoch - 1, epoch, epoch + 1, len(draws) - step}
    for place in sorted(place for place in places if 0 < place < len(draws)):
        expected = draws[place : place + RESUMED]
        resumed = _draw(run, place, len(expected))
        if not np.array_equal(resumed, expected):
            return _describe_gap(draws, resumed, place)
    # With more samples than are drawn, the end of an epoch is looked at by itself.
    if not np.array_equal(_draw(run, epoch - 1, 1 + RESUMED)[1:], _draw(run, epoch, RESUMED)):
        return f"a run that is resumed after {epoch:,} samples goes on with other samples"
    return None


def _describe_gap(draws: np.ndarray, resumed: np.ndarray, place: int) -> str:
    """By how many samples a resumed run is off."""
    words = f"a run that is resumed after {place:,} samples"
    for other in sorted(np.flatnonzero(draws == resumed[0]).tolist(), key=lambda other: abs(other - place)):
        following = draws[other : other + len(resumed)]
        if other != place and np.array_equal(following, resumed[: len(following)]):
            return f"{words} {'leaves out' if other > place else 'repeats'} {abs(other - place):,} samples"
    return f"{words} goes on with other samples"
