"""Tokenized data on disk: built once, mapped by every process, never stale.

The key is a hash of everything that decides the contents: the file's bytes, the tokenizer and its template, the limit
on length, and the version of this code. A cache is built under a lock in a folder of another name and renamed when
whole, so that a reader sees all of it or nothing. Ids take 2 bytes a token (4 where the vocabulary is larger than
65 536), labels 4 more where they are not simply the ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from torchstone.atomic import locked, new_folder
from torchstone.data.formats import Shape, shape_of
from torchstone.data.sources import Row, content_hash, read_rows
from torchstone.data.tokenize import Counts, Encoded, Encoder, Tokenizer
from torchstone.errors import DataError
from torchstone.observe.console import Console

# Raised whenever the same rows would become other tokens.
CODE_VERSION = 1
ROWS_AT_A_TIME = 1000


class TokenCache:
    """Sequences of ids and labels in mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "meta.json").read_text())
        self.key: str = meta["key"]
        self.shape: Shape = meta["shape"]
        self.counts = Counts(**meta["counts"])
        self.offsets: np.ndarray = np.load(folder / "offsets.npy")
        self.lengths: np.ndarray = np.diff(self.offsets)
        self.loss_tokens: np.ndarray = np.load(folder / "loss_tokens.npy")
        self.ids = _mapped(folder / "ids.bin", np.dtype(meta["id_type"]))
        self.labels = _mapped(folder / "labels.bin", np.dtype(np.int32)) if self.shape != "text" else self.ids

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sequence(self, index: int, start: int = 0, stop: int | None = None) -> Encoded:
        """Sequence `index`, or its tokens from `start` to `stop`."""
        low, high = int(self.offsets[index]), int(self.offsets[index + 1])
        part = slice(low + start, high if stop is None else low + stop)
        return Encoded(self.ids[part].astype(np.int64), self.labels[part].astype(np.int64))


def open_cache(
    path: Path, tokenizer: Tokenizer, limit: Callable[[Shape], int | None], on_long_row: str, cache_dir: Path,
    console: Console,
) -> TokenCache:  # fmt: skip
    """The cache of `path`, built first where it is not there yet. `limit` gives the longest sequence for a shape."""
    shape = shape_of_file(path)
    longest = limit(shape)
    key = _key(path, tokenizer, shape, longest, on_long_row)
    folder = cache_dir / key[:32]
    with locked(cache_dir / f"{key[:32]}.lock"):
        if not _is_whole(folder):
            if folder.exists():
                console.warn(f"{folder} is damaged; building it again")
            console.say(f"tokenizing {path} ({path.stat().st_size / 1e6:.1f} MB) into {folder}")
            _build(folder, key, path, Encoder(tokenizer, shape, longest, on_long_row))
        else:
            console.say(f"using the tokenized {path} in {folder}")
    cache = TokenCache(folder)
    _report_counts(cache.counts, path, console)
    return cache


def shape_of_file(path: Path) -> Shape:
    for row in read_rows(path):
        return shape_of(row)
    raise DataError(f"{path}: no rows", "an empty file has nothing to train on")


def _key(path: Path, tokenizer: Tokenizer, shape: Shape, limit: int | None, on_long_row: str) -> str:
    decides: dict[str, Any] = {
        "contents": content_hash(path),
        "tokenizer": tokenizer.fingerprint,
        "shape": shape,
        "limit": limit,
        "on_long_row": on_long_row,
        "code": CODE_VERSION,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _is_whole(folder: Path) -> bool:
    """There, and every file what it was when it was written; reading them once also warms them up for training."""
    try:
        checksums = json.loads((folder / "meta.json").read_text())["checksums"]
        return all(_checksum(folder / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _build(folder: Path, key: str, path: Path, encoder: Encoder) -> None:
    with new_folder(folder) as work:
        _write(work, key, path, encoder)


def _write(work: Path, key: str, path: Path, encoder: Encoder) -> None:
    id_type = np.dtype(np.uint16 if encoder.tokenizer.size <= 2**16 else np.uint32)
    lengths: list[int] = []
    loss_tokens: list[int] = []
    with (work / "ids.bin").open("wb") as ids, (work / "labels.bin").open("wb") as labels:
        for rows in _in_batches(read_rows(path)):
            for sequence in encoder.encode(rows):
                lengths.append(len(sequence.ids))
                loss_tokens.append(sequence.loss_tokens)
                ids.write(sequence.ids.astype(id_type).tobytes())
                if encoder.shape != "text":
                    labels.write(sequence.labels.astype(np.int32).tobytes())
    if encoder.counts.trained_tokens == 0:
        raise DataError(
            f"{path}: none of its {encoder.counts.rows} rows has a token to train on",
            f"{encoder.counts.dropped_long} were longer than {encoder.limit} tokens; check the labels of the others",
        )
    np.save(work / "offsets.npy", np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
    np.save(work / "loss_tokens.npy", np.array(loss_tokens, dtype=np.int64))
    meta = {
        "key": key,
        "shape": encoder.shape,
        "id_type": id_type.name,
        "source": str(path),
        "counts": dataclasses.asdict(encoder.counts),
        "checksums": {file.name: _checksum(file) for file in work.iterdir()},
    }
    (work / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _report_counts(counts: Counts, path: Path, console: Console) -> None:
    share = 100 * counts.trained_tokens / max(1, counts.tokens)
    console.say(f"{path.name}: {counts.rows} rows, {counts.tokens} tokens, {share:.1f} % of them trained on")
    for number, what in (
        (counts.dropped_long, "dropped, being longer than data.context_length (data.on_long_row truncate keeps them)"),
        (counts.truncated_long, "cut to data.context_length"),
        (counts.dropped_untrained, "dropped, since nothing to train on was left of them within data.context_length"),
    ):
        if number:
            console.warn(
                f"{path.name}: {number} of {counts.rows} rows {what}, such as {', '.join(counts.examples[:3])}"
            )
    if counts.straddling_tokens:
        console.warn(f"{path.name}: {counts.straddling_tokens} tokens lie across a prompt and its answer: trained on")


def _in_batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(islice(rows, ROWS_AT_A_TIME)):
        yield batch


def _mapped(path: Path, kind: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype=kind, mode="r")
