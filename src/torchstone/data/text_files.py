"""Plain text and CSV: the documents of a .txt file, and the records of a .csv or .tsv file with their lines.

A large text is read in pieces, so that it needs neither its size in memory nor a single process. A record of a CSV file
may have line breaks within quotes, so only the csv module knows where it ends: records are parsed while they are read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO

PIECE_BYTES = 1 << 21
# The limit of a record in bytes. A quote that is never closed would read the rest of the file into one field.
MAX_RECORD = 1 << 26


def read_pieces(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yields the text in pieces of at most PIECE_BYTES, and whether a piece is the last one.

    A piece ends after a line break, or else after a space. Where it ends depends only on where it starts.
    """
    rest = b""
    while block := rest + stream.read(PIECE_BYTES + 1 - len(rest)):
        is_last = len(block) <= PIECE_BYTES
        end = len(block) if is_last else _last_break(block)
        yield block[:end], is_last
        rest = block[end:]


def _last_break(block: bytes) -> int:
    for separator in (b"\n", b" "):
        if end := block.rfind(separator, 0, PIECE_BYTES) + 1:
            return end
    # Bytes 10xxxxxx continue a character of UTF-8, which has at most four bytes.
    ends = range(PIECE_BYTES, max(0, PIECE_BYTES - 4), -1)
    return next((end for end in ends if block[end] & 0xC0 != 0x80), PIECE_BYTES)


def read_records(stream: IO[bytes], delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yields the first line of each record, and its fields or what is wrong with it. Blank lines are not records.

    Bytes that are not UTF-8 become lone surrogates (`surrogateescape`). Raises ValueError for a record that is too
    long, and for a quote that is not closed: everything after it would be one field.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD))
    size = 0

    def read_lines() -> Iterator[str]:
        nonlocal size
        bom = "\ufeff"
        while line := stream.readline(MAX_RECORD + 1):
            size += len(line)
            if size > MAX_RECORD:
                raise ValueError(f"a record has more than {MAX_RECORD} bytes: it may have a quote that is not closed")
            yield line.decode("utf-8", "surrogateescape").removeprefix(bom)
            bom = ""

    reader = csv.reader(read_lines(), delimiter=delimiter, strict=True)
    while True:
        line, size = reader.line_num + 1, 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = reader.line_num
            if "unexpected end" in str(error):
                raise ValueError(
                    f'the quote that opens in line {line} is not closed (write "" for a quote within quotes)'
                ) from None
            yield line, f"not CSV: {error}" + (f" (lines {line} to {last} are read as one row)" if last > line else "")
            continue
        if fields:
            yield line, fields
