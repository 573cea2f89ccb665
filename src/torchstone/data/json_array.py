"""A file that is one JSON array, as the lines it would be as JSONL, read a piece at a time.

The elements are found by parsing them, so they are parsed twice; a fault cannot be stepped over, so the first one ends
the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

BLOCK = 1 << 20
# What is not an element within so many characters is taken for a fault.
LONGEST = 1 << 28
NOT_SPACE = re.compile(r"[^ \t\r\n]")


def begins_array(beginning: bytes) -> bool:
    """Whether a file with this beginning is an array of objects, and not lines of JSON."""
    return re.match(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|\]|$)", beginning) is not None


def array_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Every element as one line; ValueError where there is neither an element nor the end."""
    decoder, text = json.JSONDecoder(), _Text(stream)
    text.take("[")
    more = text.next() != "]"
    while more:
        element = text.element(decoder)
        # Within a string a line break is written \n, so one that is seen stands between tokens.
        yield element.replace("\n", " ").replace("\r", " ").encode()
        more = text.next() != "]"
        if more:
            text.take(",")
            text.next()
    text.take("]")
    text.end()


class _Text:
    """What has been read of the stream; what lies before `at` has been used."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.at = "", 0

    def more(self) -> bool:
        block = self._stream.read(BLOCK)
        self.buffer, self.at = self.buffer[self.at :] + self._decoder.decode(block, final=not block), 0
        return bool(block)

    def next(self) -> str:
        """The next character that is not space; it stays."""
        while True:
            found = NOT_SPACE.search(self.buffer, self.at)
            if found:
                self.at = found.start()
                return self.buffer[self.at]
            if not self.more():
                raise ValueError("the array has no end")

    def end(self) -> None:
        while not (found := NOT_SPACE.search(self.buffer, self.at)):
            self.at = len(self.buffer)
            if not self.more():
                return
        raise ValueError(f"after the array comes {self.buffer[found.start() : found.start() + 20]!r}")

    def take(self, character: str) -> None:
        if self.next() != character:
            raise ValueError(f"{character!r} expected, not {self.buffer[self.at : self.at + 20]!r}")
        self.at += 1

    def element(self, decoder: json.JSONDecoder) -> str:
        while True:
            try:
                _, end = decoder.raw_decode(self.buffer, self.at)
            except ValueError:
                # Tried again when there is twice as much, not after every block: an element may be large.
                size = len(self.buffer) - self.at
                if size > LONGEST or not self.more():
                    raise
                while len(self.buffer) < 2 * size and self.more():
                    continue
                continue
            size = end - self.at
            # What ends with the buffer may go on, as a number does.
            if end < len(self.buffer) or not self.more():
                self.at += size
                return self.buffer[self.at - size : self.at]
