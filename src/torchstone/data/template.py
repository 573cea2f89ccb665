"""Conversations to text, and which of its characters are trained.

A template is the tokenizer's own, a file, or one of those in templates/; it is somebody's program, so it runs in
jinja2's sandbox and against the clock. The loss mask comes from rendering prefixes: what a conversation up to an
assistant turn plus the generation prompt renders to is what the model will see when it is asked, and the rest up to
that turn's end is what it must answer. That needs no help from the template, only that a longer conversation begins
with the text of the shorter one; where it does not, the mask would be a guess, and is refused.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchstone.data.formats import Message
from torchstone.errors import DataError, UsageError

TEMPLATES = Path(__file__).parent / "templates"
# Some templates write today's date. Here it stands still: the same rows are the same tokens tomorrow.
DATE = datetime(2025, 1, 1)
# Rendering one conversation takes a fraction of a millisecond; what takes seconds will never end.
SECONDS = 5.0
LARGEST = 10_000_000


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, and no way to fill the memory by multiplying."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            size = abs(right) * left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0
        else:
            times = [value for value in (left, right) if isinstance(value, int)]
            many = [len(value) for value in (left, right) if isinstance(value, Sequence)]
            size = times[0] * many[0] if times and many else 0
        if size > LARGEST:
            raise jinja2.TemplateError(f"{operator} would make something of {size} parts")
        return super().call_binop(context, operator, left, right)


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


class NotPrefixStable(DataError):
    """`longer` should begin with `shorter`, and does not."""

    def __init__(self, number: int, shorter: str, longer: str, prompt: bool = False) -> None:
        what = f"what stands before message {number}" if prompt else f"message {number}"
        after = "that message" if prompt else "more"
        super().__init__(
            f"the chat template renders {what} differently once {after} follows, so what is trained cannot be told "
            "from what is read"
        )
        self.shorter, self.longer = shorter, longer


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = Sandbox(
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

    def text(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        with _time_limit(SECONDS):
            return self._render(messages, tools)

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """What the model reads before it answers."""
        with _time_limit(SECONDS):
            return self._render(messages, tools, add_generation_prompt=True)

    def conversation(
        self, messages: Sequence[Message], trained: Sequence[int] | None = None, tools: list[Any] | None = None
    ) -> Rendered:
        """The conversation with the messages `trained` (by default the assistant's) and the ends of their turns."""
        if trained is None:
            trained = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        with _time_limit(SECONDS):
            text = self._render(messages, tools)
            return Rendered(text, [self._span(messages, number, tools, text) for number in trained])

    def everything(
        self, messages: Sequence[Message], tools: list[Any] | None = None, but_system: bool = False
    ) -> Rendered:
        """The conversation, all of it trained, or all that comes after a system message."""
        with _time_limit(SECONDS):
            text = self._render(messages, tools)
            start = 0
            if but_system and messages[0]["role"] == "system" and len(messages) > 1:
                before = self._render(messages[:1], tools)
                start = len(_beginning(0, before, text))
            return Rendered(text, [(start, len(text))])

    def _span(self, messages: Sequence[Message], number: int, tools: list[Any] | None, text: str) -> tuple[int, int]:
        """Where message `number` is in `text`: from the first character the model must write to the end of its turn."""
        last = number + 1 == len(messages)
        after = text if last else _beginning(number, self._render(messages[: number + 1], tools), text)
        if messages[number]["role"] == "assistant":
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            return len(_beginning(number, before, after, prompt=True)), len(after)
        return self._header(messages[: number + 1], tools, after), len(after)

    def _header(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> int:
        """How much of `text` stays when the last message says something else: what the template puts before it."""
        content = str(messages[-1].get("content") or "")
        other = "b" if content.lstrip()[:1] == "a" else "a"
        changed = self._render([*messages[:-1], {**messages[-1], "content": other}], tools)
        return next((at for at, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), len(text))

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, documents=None,
                **self.special_tokens,
            )  # fmt: skip
        except TimeoutError:
            raise
        except Exception as error:
            # A template is somebody else's program: whatever it raises is about the template or the conversation.
            raise DataError(f"the chat template refused a conversation: {error}") from None


def named_template(name: str) -> str:
    """The source of a template by its file or its name."""
    if Path(name).is_file():
        try:
            return Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"the chat template {name} is not UTF-8: {error}") from None
    built_in = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if name in built_in:
        return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    raise UsageError(
        f"chat template {name!r} is neither a file nor a built-in template", f"there are {', '.join(built_in)}"
    )


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """An end to a template that has none. Signals reach the main thread only, so data is prepared there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Time that the process works, not the clock's: a machine that stalls makes no row bad.
    previous = signal.signal(signal.SIGVTALRM, _out_of_time)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except TimeoutError:
        raise DataError(f"the chat template did not end within {SECONDS:g} s on a conversation") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, previous)


def _out_of_time(number: int, frame: Any) -> None:
    raise TimeoutError


def _beginning(number: int, shorter: str, longer: str, prompt: bool = False) -> str:
    if not longer.startswith(shorter):
        raise NotPrefixStable(number, shorter, longer, prompt)
    return shorter


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)
