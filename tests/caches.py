"""Builds token caches, for the tests of everything between a row and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny import write_rows
from torchstone.data.cache import CacheOptions, TokenCache, open_cache, open_source
from torchstone.data.tokenize import Tokenizer
from torchstone.observe.console import Console


def build_cache(
    path: Path, tokenizer: Tokenizer, row_format: str = "auto", *, columns: Mapping[str, str] = {},
    max_length: int | None = None, on_long_row: str = "drop", train_on: str = "assistant",
    stop_on_bad_row: bool = True, cache_dir: Path | None = None,
) -> TokenCache:  # fmt: skip
    """The cache of a file, in `cache_dir` or beside the file."""
    source = open_source(str(path), row_format, stop_on_bad_row, columns)
    encoding = tokenizer.encoding_config(source.row_format, max_length, on_long_row, train_on, source.columns)
    options = CacheOptions(cache_dir or path.parent / "cache", num_processes=0, stop_on_bad_row=stop_on_bad_row)
    return open_cache(source, encoding, options, Console("quiet"))


def cache_rows(
    rows: list[dict[str, Any]], tokenizer: Tokenizer, folder: Path, train_on: str = "assistant", **options: Any
) -> TokenCache:
    """The cache of rows, which are written to a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return build_cache(write_rows(folder / "rows.jsonl", rows), tokenizer, train_on=train_on, **options)
