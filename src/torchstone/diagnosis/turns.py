"""The texts of a row, and which of them should be trained on, from its raw keys and the settings alone.

This is the reference for the loss mask, so it shares no code with what makes the mask: no chat template, no offsets, no
row reader. It knows the rules of docs/data.md only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchstone.data.formats import SHAREGPT_CALLS, SHAREGPT_ROLES, TEXT_FORMATS, RowFormat

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "function_call")


@dataclass(frozen=True)
class Turn:
    """A message of a row: who says it, and whether it should be trained on. A row of text is a single one.

    Templates write `reasoning` before its text, and `calls` after it: names of functions, keys and texts of arguments.
    """

    role: str
    text: str
    is_trained: bool
    reasoning: str = ""
    calls: tuple[str, ...] = ()


def read_turns(row_format: RowFormat, value: dict[str, Any], train_on: str) -> list[Turn]:
    """The texts of a row in order; none if it has token ids."""
    if row_format == "tokens":
        return []
    if row_format in TEXT_FORMATS:
        return [Turn("text", value["document" if row_format == "document" else "text"], True)]
    is_all, unmask = train_on == "all", value.get("unmask") is True
    if row_format == "prompt" and isinstance(value["prompt"], str):
        return [Turn("user", value["prompt"], is_all or unmask), Turn("assistant", value["completion"], True)]
    messages = read_messages(row_format, value)
    first = len(messages) - len(value["completion"]) if row_format == "prompt" else 0
    if is_all or unmask:
        chosen = [not (unmask and number == 0 and m["role"] == "system") for number, m in enumerate(messages)]
    else:
        roles = {"assistant"} if train_on in ("last", "flag") else {role.strip() for role in train_on.split(",")}
        chosen = [m["role"] in roles and number >= first for number, m in enumerate(messages)]
        if train_on == "last":
            last = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            chosen = [is_chosen and number == last for number, is_chosen in enumerate(chosen)]
    flags = ("train", "weight") if train_on == "flag" and not (is_all or unmask) else ("weight",)
    turns = []
    for message, is_chosen in zip(messages, chosen, strict=True):
        flag = next((message[name] for name in flags if message.get(name) is not None), None)
        if flag is not None:
            is_chosen = bool(flag) and (is_chosen or not (is_all or unmask))
        turns.append(_read_turn(message, is_chosen))
    return turns


def read_messages(row_format: RowFormat, value: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row of conversations, as the file has them."""
    if row_format == "alpaca":
        question = value["instruction"] + (f"\n\n{value['input']}" if value.get("input") else "")
        pairs = [*(value.get("history") or []), (question, value["output"])]
        messages = [
            {"role": role, "content": text}
            for question, answer in pairs
            for role, text in (("user", question), ("assistant", answer))
        ]
    elif row_format == "prompt":
        messages = [*value["prompt"], *value["completion"]]
    else:
        messages = [_rename(turn) for turn in value["conversations" if row_format == "sharegpt" else "messages"]]
    system = value.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _rename(message: dict[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return message
    renamed = {**message, "role": SHAREGPT_ROLES[message["from"]], "content": message["value"]}
    if message["from"] in SHAREGPT_CALLS:
        calls = json.loads(message["value"]) if isinstance(message["value"], str) else message["value"]
        renamed |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return renamed


def _read_turn(message: dict[str, Any], is_trained: bool) -> Turn:
    """The turn of a message. The text of a call without content is the name of its function."""
    content, functions = message.get("content"), message.get("tool_calls") or []
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    if not functions and message.get("function_call"):
        functions = [message["function_call"]]
    # Templates drop the reasoning of earlier turns, so it is a text of its own.
    reasoning, _, text = (content or "").rpartition("</think>")
    reasoning = reasoning.partition("<think>")[2] or reasoning
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), reasoning)
    calls = [text for function in functions for text in _read_call(function.get("function") or function)]
    if not text and calls:
        text = calls.pop(0)
    return Turn(message["role"], text, is_trained, reasoning, tuple(calls))


def _read_call(function: dict[str, Any]) -> Iterator[str]:
    arguments = function.get("arguments")
    yield function.get("name") or ""
    yield from _read_strings(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)


def _read_strings(value: Any) -> Iterator[str]:
    """The keys and texts in JSON, in order. Numbers are written in several ways."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _read_strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _read_strings(inner)
