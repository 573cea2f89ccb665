"""Renders conversations with a chat template, and finds the characters to train on.

A template is the tokenizer's own, a file, or one of those in templates/. It is third-party code, so it runs in jinja2's
sandbox, with limits on its time, memory and output. The loss mask comes from rendering prefixes: the conversation
before an assistant turn plus the generation prompt is what the model will read, and the rest up to the end of that turn
is what it must write. This needs no help from the template, only that a longer conversation starts with the text of the
shorter one. Where it does not, the mask would be a guess, and the row is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchstone.data.formats import Message, restore_argument_texts
from torchstone.data.render_limits import RenderLimits
from torchstone.errors import DataError, UsageError

TEMPLATES = Path(__file__).parent / "templates"
# Some templates write today's date. Here it is fixed, so that the same rows give the same tokens tomorrow.
FIXED_DATE = datetime(2025, 1, 1)
# A template may write this many characters of its own, and a conversation may grow to this many times its size.
MAX_ADDED, MAX_GROWTH = 100_000, 16


class GenerationTag(Extension):
    """Accepts the `{% generation %}` tag of some templates; it only passes its contents on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class RenderedConversation:
    """The text of a conversation and the spans to train on, [start, end) in characters."""

    text: str
    train_spans: list[tuple[int, int]]


class NotPrefixStableError(DataError):
    """`longer` does not start with `shorter`."""

    def __init__(self, index: int, shorter: str, longer: str, is_prompt: bool = False) -> None:
        text = f"the prompt before message {index}" if is_prompt else f"message {index}"
        after = "that message" if is_prompt else "another message"
        super().__init__(
            f"the chat template renders {text} differently if {after} follows, so the loss mask cannot be determined"
        )
        self.shorter, self.longer = shorter, longer


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = FIXED_DATE.strftime
        environment.filters["tojson"] = _to_json
        # The same rows must give the same tokens.
        del environment.filters["random"], environment.globals["lipsum"]
        self.source = source
        self.special_tokens = special_tokens
        self.limits = RenderLimits()
        try:
            # Compiling also evaluates constant expressions, such as 'a' | center(99999999999).
            self._template = self.limits.run(lambda: environment.from_string(source))
        except Exception as error:
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UsageError(f"the chat template is invalid{line}: {error}") from None

    def render_text(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        return self.limits.run(lambda: self._render(messages, tools))

    def render_prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """What the model reads before it answers: the messages and the generation prompt."""
        return self.limits.run(lambda: self._render(messages, tools, add_generation_prompt=True))

    def trained_header(self) -> str:
        """What stands before every answer and would be trained on, because the template has no generation prompt for
        it; empty if there is none, or if the template refuses the conversation that is tried."""
        question, answer = {"role": "user", "content": "a"}, "A 1 B 2 C 3"
        try:
            prompt, text = (
                self.render_text([question]),
                self.render_text([question, {"role": "assistant", "content": answer}]),
            )
            if self.render_prompt([question]) != prompt or not text.startswith(prompt):
                return ""
        except DataError:
            return ""
        return text[len(prompt) :].partition(answer)[0].strip()

    def render_conversation(
        self, messages: Sequence[Message], trained: Sequence[int] | None = None, tools: list[Any] | None = None
    ) -> RenderedConversation:
        """Renders a conversation to train on the messages `trained` (by default the assistant's) and their ends."""
        indices = trained
        if indices is None:
            indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

        def render() -> RenderedConversation:
            text = self._render(messages, tools)
            return RenderedConversation(text, [self._span(messages, index, tools, text) for index in indices])

        return self.limits.run(render)

    def render_train_on_all(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        except_system: bool = False,
        masked: Sequence[int] = (),
    ) -> RenderedConversation:
        """Renders a conversation to train on all of it, or on everything after the system message.

        Nothing of the messages `masked` is trained on, nor are their headers.
        """

        def render() -> RenderedConversation:
            text = self._render(messages, tools)
            start = 0
            if except_system and messages[0]["role"] == "system" and len(messages) > 1:
                start = len(_check_prefix(0, self._render(messages[:1], tools), text))
            spans = []
            for index in masked:
                before = self._render(messages[:index], tools) if index else ""
                after = self._render(messages[: index + 1], tools)
                spans.append((start, len(_check_prefix(index - 1, before, text))))
                start = len(_check_prefix(index, after, text))
            return RenderedConversation(text, [span for span in [*spans, (start, len(text))] if span[0] < span[1]])

        return self.limits.run(render)

    def _span(self, messages: Sequence[Message], index: int, tools: list[Any] | None, text: str) -> tuple[int, int]:
        """The characters of a message in `text`: from the first one the model must write to the end of its turn."""
        is_last = index + 1 == len(messages)
        after = text if is_last else _check_prefix(index, self._render(messages[: index + 1], tools), text)
        if messages[index]["role"] == "assistant":
            before = self._render(messages[:index], tools, add_generation_prompt=True)
            return len(_check_prefix(index, before, after, is_prompt=True)), len(after)
        return self._header_length(messages[: index + 1], tools, after), len(after)

    def _header_length(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> int:
        """How many characters the template puts before the last message: those that do not depend on its content."""
        content = str(messages[-1].get("content") or "")
        other = "b" if content.lstrip()[:1] == "a" else "a"
        changed = self._render([*messages[:-1], {**messages[-1], "content": other}], tools)
        return next((at for at, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), len(text))

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        """Most templates want the arguments of a call as an object, but some concatenate them as a string."""
        try:
            return self._render_once(messages, tools, add_generation_prompt)
        except DataError:
            with_texts = restore_argument_texts(list(messages))
            if with_texts == messages:
                raise
            return self._render_once(with_texts, tools, add_generation_prompt)

    def _render_once(self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        try:
            text = self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, documents=None,
                **self.special_tokens,
            )  # fmt: skip
            if len(text) > MAX_ADDED:
                _check_size(text, [messages, tools])
            return text
        except MemoryError:
            raise
        except Exception as error:
            # Whatever a template raises is about the template or the conversation.
            raise DataError(f"the chat template refuses this conversation: {error}") from None


def load_template(name: str) -> str:
    """The source of a template, by its file or the name of a built-in one."""
    if Path(name).is_file():
        try:
            return Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"the chat template {name} is not UTF-8: {error}") from None
    built_in = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if name in built_in:
        return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    raise UsageError(
        f"chat template {name!r} is neither a file nor a built-in template", f"built-in: {', '.join(built_in)}"
    )


def _check_prefix(index: int, shorter: str, longer: str, is_prompt: bool = False) -> str:
    if not longer.startswith(shorter):
        raise NotPrefixStableError(index, shorter, longer, is_prompt)
    return shorter


def _check_size(text: str, conversation: list[Any]) -> None:
    size = len(json.dumps(conversation, default=str))
    if len(text) > MAX_ADDED + MAX_GROWTH * size:
        raise ValueError(f"it writes {len(text):,} characters for a conversation of {size:,}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
