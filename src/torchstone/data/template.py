"""Conversations to text, and which of its characters are trained.

The template is the tokenizer's own, rendered in jinja2's sandbox. The loss mask comes from rendering prefixes: what a
conversation up to an assistant turn plus the generation prompt renders to is what the model will see when it is asked,
and the rest up to that turn's end is what it must answer. That needs no help from the template, only that a longer
conversation begins with the text of the shorter one; where it does not, the mask would be a guess, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchstone.errors import DataError, UsageError

Message = dict[str, Any]
# Some templates write today's date. Here it stands still: the same rows are the same tokens tomorrow.
DATE = datetime(2025, 1, 1)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words in some templates; here it only passes its contents on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and its trained spans, [start, end) in characters."""

    text: str
    trained: list[tuple[int, int]]


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DATE.strftime
        environment.filters["tojson"] = _to_json
        self.source = source
        self.special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template is not valid: {error}") from None

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the model reads before it answers."""
        return self._render(messages, add_generation_prompt=True)

    def conversation(self, messages: Sequence[Message]) -> Rendered:
        """The whole conversation, trained on what the assistant says and on the end of its turn."""
        text = self._render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            after = self._render(messages[: number + 1])
            for shorter, longer in ((before, after), (after, text)):
                if not longer.startswith(shorter):
                    raise DataError(
                        f"the chat template renders message {number} differently once more messages follow, "
                        "so what is trained cannot be told from what is read",
                        _first_difference(shorter, longer),
                    )
            spans.append((len(before), len(after)))
        return Rendered(text, spans)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **self.special_tokens,
            )  # fmt: skip
        except Exception as error:
            # A template is somebody else's program: whatever it raises is about the template or the conversation.
            raise DataError(f"the chat template refused a conversation: {error}") from None


def _first_difference(shorter: str, longer: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), min(len(shorter), len(longer))
    )
    return f"first difference at character {at}: {shorter[at : at + 30]!r} against {longer[at : at + 30]!r}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)
