"""Rows for the data benchmarks: long-tailed texts and conversations, with made-up words as frequent as real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 60_000


class Prose:
    """Endless text from a seed, or from a file."""

    def __init__(self, seed: int = 0, text: Path | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._text = text.read_text(encoding="utf-8") if text else None
        letters = list("etaoinshrdlcumwfgypbvkjxqz")
        lengths = self._rng.integers(2, 12, VOCABULARY)
        self._words = ["".join(self._rng.choice(letters, size)) for size in lengths]
        ranks = 1 / np.arange(1, VOCABULARY + 1)
        self._cumulative = np.cumsum(ranks / ranks.sum())

    def document(self, median: int = 1100) -> str:
        """A text with a median of about `median` characters, and at most twenty times as many."""
        size = int(min(20 * median, self._rng.lognormal(np.log(median), 1.0))) + 20
        if self._text is not None:
            at = int(self._rng.integers(0, max(1, len(self._text) - size)))
            return self._text[at : at + size]
        words = [self._words[i] for i in np.searchsorted(self._cumulative, self._rng.random(max(3, size // 6)))]
        for at in range(0, len(words), 12):
            words[at] = words[at].capitalize()
        ends = self._rng.choice([", ", ". ", ".\n", "; ", " 1984 "], len(words) // 12 + 1)
        return "".join(" ".join(words[12 * n : 12 * n + 12]) + end for n, end in enumerate(ends))


def texts(prose: Prose) -> Iterator[dict[str, Any]]:
    while True:
        yield {"text": prose.document()}


def chats(prose: Prose) -> Iterator[dict[str, Any]]:
    while True:
        turns = [prose.document(200) for _ in range(4)]
        roles = ("user", "assistant", "user", "assistant")
        yield {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}


def write(path: Path, rows: Iterator[dict[str, Any]], megabytes: float) -> int:
    """Writes at least `megabytes` of `rows`; returns the bytes written."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            size += file.write(json.dumps(row) + "\n")
            if size >= megabytes * 1e6:
                return size
    return size
