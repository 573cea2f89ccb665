"""The shapes a row may have, recognised by their keys.

A shape turns a row into one of three things: a text, a conversation, or ids with labels. All rows of a file have one
shape; a row of another is an error that names its line, because mixing them by accident is how masks go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchstone.data.sources import Row
from torchstone.errors import DataError

IGNORED = -100
Shape = Literal["text", "messages", "tokens"]
KEYS: dict[str, Shape] = {"input_ids": "tokens", "messages": "messages", "text": "text"}


@dataclass(frozen=True)
class Tokens:
    """A pre-tokenized row: `labels` as Transformers has them, one per id, -100 where nothing is learned."""

    ids: list[int]
    labels: list[int]


def shape_of(row: Row) -> Shape:
    for key, shape in KEYS.items():
        if key in row.value:
            return shape
    raise row.error(f"no known row shape: its keys are {', '.join(row.value) or 'none'}",
                    f"a row has one of the keys {', '.join(KEYS)}")  # fmt: skip


def text_of(row: Row) -> str:
    if "text" not in row.value:
        raise _wrong_shape(row, "text")
    text = row.value["text"]
    if not isinstance(text, str):
        raise row.error("text is not a string")
    if not text:
        raise row.error("text is empty")
    return _encodable(row, text)


def messages_of(row: Row) -> list[dict[str, Any]]:
    if "messages" not in row.value:
        raise _wrong_shape(row, "messages")
    messages = row.value["messages"]
    if not isinstance(messages, list) or not messages:
        raise row.error("messages is empty or not a list")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.error(f"message {number} has no role")
        if not isinstance(message.get("content"), str):
            raise row.error(f"message {number} ({message['role']}) has no text content")
        _encodable(row, message["content"])
    if all(message["role"] != "assistant" for message in messages):
        raise row.error("no assistant message: nothing in this row would be trained")
    return messages


def tokens_of(row: Row, vocab_size: int) -> Tokens:
    if "input_ids" not in row.value:
        raise _wrong_shape(row, "tokens")
    ids = row.value["input_ids"]
    labels = row.value.get("labels", ids)
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise row.error(f"{name} is not a list of whole numbers")
    if not ids or len(ids) != len(labels):
        raise row.error(f"{len(ids)} input_ids and {len(labels)} labels: they are as many, and not none")
    if row.value.get("len", len(ids)) != len(ids):
        raise row.error(f"len says {row.value['len']!r}, but there are {len(ids)} input_ids")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    outside += [i for i in labels if i != IGNORED and not 0 <= i < vocab_size]
    if outside:
        raise row.error(f"id {outside[0]} is outside the vocabulary of {vocab_size}")
    return Tokens(ids, labels)


def _encodable(row: Row, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise row.error(f"half of a surrogate pair at character {error.start}: not text that can be written") from None
    return text


def _wrong_shape(row: Row, expected: Shape) -> DataError:
    return row.error(
        f"the rows before this one are of shape {expected!r}, this one has the keys {', '.join(row.value)}"
    )
