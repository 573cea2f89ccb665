"""Numbers and lists in messages: plurals, ranks, and the first of many items."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: int, noun: str, separator: str = "") -> str:
    """`1 row`, `2000 rows`; `2,000 rows` with the separator `,`."""
    return f"{count:{separator}} {noun}{'' if count == 1 else 's'}"


def list_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def list_first(items: Sequence[object], most: int = 4) -> str:
    """`a, b and 3 more`, with at most `most` items by name."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(map(str, items[:most]))}{more}"
