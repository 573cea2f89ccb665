"""Streams the elements of a JSON array as the lines of a JSONL file.

The elements are found by parsing them, so they are parsed twice. A syntax error cannot be skipped: it ends the file. An
element that is JSON, but that Python cannot parse (nested too deeply, a number of thousands of digits), is found by its
brackets; it becomes a bad row when its line is parsed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

BLOCK_BYTES = 1 << 20
# What does not parse within this many characters is a syntax error.
MAX_ELEMENT = 1 << 28
NOT_SPACE = re.compile(r"[^ \t\r\n]")
# A string (or the beginning of one), a bracket, or the comma after an element without brackets.
STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?$)|[\[\]{},]', re.DOTALL)


def starts_with_array(beginning: bytes) -> bool:
    """Whether a file that starts like this is an array of objects, not JSONL."""
    return re.match(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|\]|$)", beginning) is not None


def array_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Every element as one line. Raises ValueError at a syntax error."""
    decoder, text = json.JSONDecoder(), _Text(stream)
    text.expect("[")
    has_more = text.peek() != "]"
    while has_more:
        element = text.element(decoder)
        # Strings have no raw line breaks in JSON, so any line break is between tokens.
        yield element.replace("\n", " ").replace("\r", " ").encode()
        has_more = text.peek() != "]"
        if has_more:
            text.expect(",")
            text.peek()
    text.expect("]")
    text.expect_end()


class _Text:
    """A buffer of the stream; what is before `at` is consumed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.at = "", 0

    def read_more(self, size: int | None = None) -> bool:
        block = self._stream.read(size or BLOCK_BYTES)
        self.buffer, self.at = self.buffer[self.at :] + self._decoder.decode(block, final=not block), 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is not whitespace, without consuming it."""
        while True:
            match = NOT_SPACE.search(self.buffer, self.at)
            if match:
                self.at = match.start()
                return self.buffer[self.at]
            self.at = len(self.buffer)
            if not self.read_more():
                raise ValueError("the array has no closing bracket")

    def expect_end(self) -> None:
        while not (match := NOT_SPACE.search(self.buffer, self.at)):
            self.at = len(self.buffer)
            if not self.read_more():
                return
        raise ValueError(f"unexpected {self.buffer[match.start() : match.start() + 20]!r} after the array")

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"expected {character!r}, not {self.buffer[self.at : self.at + 20]!r}")
        self.at += 1

    def element(self, decoder: json.JSONDecoder) -> str:
        while True:
            try:
                _, end = decoder.raw_decode(self.buffer, self.at)
            except (ValueError, RecursionError) as error:
                end = 0 if isinstance(error, json.JSONDecodeError) else self._end_by_brackets()
                if not end:
                    self._read_more_of_element(error)
                    continue
            size = end - self.at
            # An element at the end of the buffer may continue, as a number can.
            if end < len(self.buffer) or not self.read_more():
                self.at += size
                return self.buffer[self.at - size : self.at]

    def _read_more_of_element(self, error: Exception) -> None:
        """Reads as much again, not only a block: an element may be large. Raises ValueError if there is no more."""
        size = len(self.buffer) - self.at
        if size > MAX_ELEMENT:
            raise ValueError(f"{error} (an element has at most {MAX_ELEMENT >> 20} Mi characters)") from None
        if not self.read_more(max(BLOCK_BYTES, size)):
            raise ValueError(str(error)) from None

    def _end_by_brackets(self) -> int:
        """Where the element ends; 0 if that is not in the buffer."""
        depth = 0
        for match in STRUCTURE.finditer(self.buffer, self.at):
            token = match[0]
            depth += (token in "[{") - (token in "]}")
            if depth == 0 and token in "]}":
                return match.end()
            if depth < 0 or (depth == 0 and token == ","):
                return match.start()
        return 0
