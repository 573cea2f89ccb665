"""The shapes a row may have, recognised by their keys or named by `data.format`.

A shape turns a row into one of four things: a text, a prompt and its completion, a conversation, or ids with labels.
All rows of a source have one shape; a row of another is an error that names its line, because mixing them by accident
is how masks go wrong.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchstone.data.sources import Row
from torchstone.errors import UsageError

IGNORED = -100
Shape = Literal["tokens", "messages", "sharegpt", "alpaca", "prompt", "text", "document"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
Message = dict[str, Any]

# The keys that make a shape, in the order in which they are looked for.
KEYS: dict[Shape, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "document": ("document",),
}
PLAIN: tuple[Shape, ...] = ("text", "document")
CHAT: tuple[Shape, ...] = ("messages", "sharegpt", "alpaca")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """A pre-tokenized row: `labels` as Transformers has them, one per id, -100 where nothing is learned."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Completion:
    """A text that is read and one that must follow; no template comes between them."""

    prompt: str
    completion: str
    unmask: bool = False


@dataclass(frozen=True)
class Conversation:
    """`unmask` trains on all of it but the system message; `answers_from` leaves turns before that one untrained."""

    messages: list[Message]
    tools: list[Any] | None = None
    unmask: bool = False
    answers_from: int = 0


def shape_of(row: Row) -> Shape:
    for shape, keys in KEYS.items():
        if all(key in row.value for key in keys):
            return shape
    raise row.error(
        f"no known row shape: its keys are {', '.join(row.value) or 'none'}",
        f"a row has {', or '.join(' and '.join(keys) for keys in KEYS.values())}; data.format names one",
    )


def text_of(row: Row, shape: Shape) -> str:
    _check_keys(row, shape)
    (key,) = KEYS[shape]
    text = row.value[key]
    if not isinstance(text, str):
        raise row.error(f"{key} is not a string")
    if not text:
        raise row.error(f"{key} is empty")
    return encodable(row, text)


def prompt_of(row: Row) -> Completion | Conversation:
    """Strings are joined as they are; lists of messages are a conversation of which the completion is trained."""
    _check_keys(row, "prompt")
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        if not completion:
            raise row.error("completion is empty: nothing in this row would be trained")
        whole = _conversation(row, [*prompt, *completion])
        first = len(whole.messages) - len(completion)
        return Conversation(whole.messages, whole.tools, whole.unmask, answers_from=first)
    for key, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise row.error(f"{key} is neither text nor, with the other, a list of messages")
    if not completion:
        raise row.error("completion is empty: nothing in this row would be trained")
    return Completion(encodable(row, prompt), encodable(row, completion), _unmask(row))


def conversation_of(row: Row, shape: Shape) -> Conversation:
    _check_keys(row, shape)
    if shape == "alpaca":
        return _conversation(row, _alpaca(row))
    return _conversation(row, _turns(row) if shape == "sharegpt" else row.value["messages"])


def tokens_of(row: Row, vocab_size: int) -> Tokens:
    _check_keys(row, "tokens")
    ids = row.value["input_ids"]
    labels = ids if row.value.get("labels") is None else row.value["labels"]
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


def trained_messages(row: Row, conversation: Conversation, train_on: str) -> list[int]:
    """Which messages are trained on: by role, the last answer, or as each message itself says (`train`, `weight`)."""
    messages = conversation.messages
    roles = ("assistant",) if train_on in ("last", "flag") else tuple(role.strip() for role in train_on.split(","))
    chosen = [number for number, message in enumerate(messages) if message["role"] in roles]
    if train_on == "last":
        chosen = chosen[-1:]
    if train_on == "flag":
        flags = {
            number: flag for number, message in enumerate(messages) if (flag := _flag(row, number, message)) is not None
        }
        chosen = sorted(
            {*chosen, *(n for n, flag in flags.items() if flag)} - {n for n, flag in flags.items() if not flag}
        )
    chosen = [number for number in chosen if number >= conversation.answers_from]
    for number in chosen:
        said = {key: value for key, value in messages[number].items() if key not in ("role", "train", "weight", "name")}
        if not any(value.strip() if isinstance(value, str) else value for value in said.values()):
            raise row.error(f"message {number} ({messages[number]['role']}) is empty: only its end would be trained")
    if not chosen:
        wanted = "no message is flagged for training" if train_on == "flag" else f"no {' or '.join(roles)} message"
        raise row.error(f"{wanted}: nothing in this row would be trained")
    return chosen


def check_train_on(train_on: str) -> None:
    """A misspelt choice, or one in a list of roles, would be taken for a role that no message has."""
    parts = [part.strip() for part in train_on.split(",")]
    if len(parts) > 1 and {"last", "all", "flag"} & set(parts):
        raise UsageError(f"data.train_on {train_on!r}: last, all and flag stand alone", "a list is of roles")
    for name in parts:
        near = _near(name, ("last", "all", "flag", *ROLES))
        if not name or (near and near[0] != name):
            raise UsageError(
                f"data.train_on {train_on!r} names no role or choice that is known",
                f"did you mean {near[0]!r}? " if near else "it is all, last, flag, or roles such as assistant,tool",
            )


def _near(name: str, known: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.75)


def _flag(row: Row, number: int, message: Message) -> bool | None:
    flag = message.get("train", message.get("weight"))
    if flag is not None and flag not in (0, 1):
        raise row.error(f"message {number}: train is true or false (weight 0 or 1), not {flag!r}")
    return None if flag is None else bool(flag)


def _conversation(row: Row, messages: Any) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise row.error("messages is empty or not a list")
    checked = [_message(row, number, message) for number, message in enumerate(messages)]
    system = row.value.get("system")
    if system is not None and not isinstance(system, str):
        raise row.error("system is not a string")
    if system and checked[0]["role"] == "system":
        raise row.error("there are two system messages, one in system and one in the messages")
    if system:
        checked.insert(0, {"role": "system", "content": encodable(row, system)})
    return Conversation(checked, _tools(row), _unmask(row))


def _unmask(row: Row) -> bool:
    unmask = row.value.get("unmask", False)
    if not isinstance(unmask, bool):
        raise row.error(f"unmask is true or false, not {unmask!r}")
    return unmask


def _message(row: Row, number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise row.error(f"message {number} has no role")
    role = message["role"]
    near = [] if role in ROLES else [SHAREGPT_ROLES[role]] if role in SHAREGPT_ROLES else _near(role.lower(), ROLES)
    if near:
        raise row.error(f"message {number} has the role {role!r}", f"did you mean {near[0]!r}?")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(row, number, content)
        message = {**message, "content": content}
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        # A template would write a null as the word None.
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise row.error(f"message {number} ({role}) has no text content")
    encodable(row, content)
    return message


def _joined(row: Row, number: int, parts: list[Any]) -> str:
    """Content in parts, as it is written where a message may also hold images: the texts, joined."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise row.error(f"message {number} has content that is not text")
    return "".join(part["text"] for part in parts)


def _tools(row: Row) -> list[Any] | None:
    tools = row.value.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise row.error(f"tools is a string that is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.error("tools is not a list of objects")
    return tools


def _turns(row: Row) -> list[Message]:
    turns = row.value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise row.error("conversations is empty or not a list")
    found = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and "role" in turn:
            found.append(turn)
            continue
        said = turn.get("from") if isinstance(turn, dict) else None
        if said not in SHAREGPT_ROLES:
            raise row.error(
                f"turn {number} is from {said!r}", f"it is one of {', '.join(SHAREGPT_ROLES)}, or has role and content"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        found.append({"role": SHAREGPT_ROLES[said], "content": turn.get("value"), **rest})
    return found


def _alpaca(row: Row) -> list[Message]:
    """Instruction and input are one question, apart by a blank line; `history` holds earlier questions and answers."""
    value = row.value
    for key in ("instruction", "output"):
        if not isinstance(value[key], str):
            raise row.error(f"{key} is not a string")
    if not value["output"]:
        raise row.error("output is empty: nothing in this row would be trained")
    given = value.get("input") or ""
    if not isinstance(given, str):
        raise row.error("input is not a string")
    turns = []
    for pair in value.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise row.error("history is a list of pairs of question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = f"{value['instruction']}\n\n{given}" if given else value["instruction"]
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": value["output"]}]


def encodable(row: Row, text: str) -> str:
    if text.isascii():
        if "\0" not in text:
            return text
    else:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise row.error(
                f"half of a surrogate pair at character {error.start}: not text that can be written"
            ) from None
    if "\0" in text:
        raise row.error(f"a NUL at character {text.index(chr(0))} of a text")
    return text


def _check_keys(row: Row, shape: Shape) -> None:
    missing = [key for key in KEYS[shape] if key not in row.value]
    if missing:
        raise row.error(
            f"the rows of this source are of shape {shape!r}, this one has no {' and no '.join(missing)}: its keys are "
            f"{', '.join(row.value) or 'none'}"
        )
