"""Escapes text that goes to a terminal or a log.

File names, rows, chat templates, tensor names and a model's answers are other people's text. A terminal would obey the
control characters in it: move the cursor, change the title, hide or fake a line. Every line for people passes through
`escape_message`, and generated text through `escape_controls` if it goes to a terminal; a pipe gets it unchanged. JSON
escapes control characters itself.
"""

from __future__ import annotations

import re
from typing import TextIO

# C0 except tab and newline, DEL, C1, the separators that some terminals treat as a newline, and the characters that
# change the direction of text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Returns `text` with control characters as `\\x1b` or `\\u202e`; newlines and tabs stay."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_message(text: str) -> str:
    """Escapes one message, and indents all its lines but the first, so that a newline in a name cannot fake a line."""
    return re.sub(r"\n(?!  |\n|\Z)", "\n  ", escape_controls(text))


def is_terminal(stream: TextIO | None) -> bool:
    """False for a stream that is closed or missing."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False
