"""The texts of a row, and which of them should be trained on, from its raw keys and the settings alone.

This is the reference for the loss mask, so it shares no code with what makes the mask: no chat template, no offsets, no
row reader. It knows the rules of docs/data.md only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchstone.data.formats import SHAREGPT_CALLS, SHAREGPT_ROLES, TEXT_FORMATS, RowFormat


@dataclass(frozen=True)
class Turn:
    """A text of a row: who says it, and whether it should be trained on. A row of text is a single one."""

    role: str
    text: str
    is_trained: bool


def read_turns(row_format: RowFormat, value: dict[str, Any], train_on: str) -> list[Turn]:
    """The texts of a row in order; none if it has token ids."""
    if row_format == "tokens":
        return []
    if row_format in TEXT_FORMATS:
        return [Turn("text", value["document" if row_format == "document" else "text"], True)]
    is_all, unmask = train_on == "all", value.get("unmask") is True
    if row_format == "prompt" and isinstance(value["prompt"], str):
        return [Turn("user", value["prompt"], is_all or unmask), Turn("assistant", value["completion"], True)]
    messages = _read_messages(row_format, value)
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
        turns.append(Turn(message["role"], _read_text(message), is_chosen))
    return turns


def _read_messages(row_format: RowFormat, value: dict[str, Any]) -> list[dict[str, Any]]:
    if row_format == "alpaca":
        pairs = [*(value.get("history") or []), (value["instruction"], value["output"])]
        messages = [
            {"role": role, "content": text}
            for question, answer in pairs
            for role, text in (("user", question), ("assistant", answer))
        ]
        if value.get("input"):
            messages.insert(-1, {"role": "user", "content": value["input"]})
    elif row_format == "prompt":
        messages = [*value["prompt"], *value["completion"]]
    else:
        messages = [_rename(turn) for turn in value["conversations" if row_format == "sharegpt" else "messages"]]
    system = value.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _rename(message: dict[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return message
    # Calls are rendered from their JSON, so their text is not compared.
    text = "" if message["from"] in SHAREGPT_CALLS else message["value"]
    return {**message, "role": SHAREGPT_ROLES[message["from"]], "content": text}


def _read_text(message: dict[str, Any]) -> str:
    """The content, after its reasoning: templates drop the reasoning of earlier turns. Of a call alone, its name."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    if not content and message.get("tool_calls"):
        call = message["tool_calls"][0]
        content = (call.get("function") or call).get("name")
    return (content or "").rpartition("</think>")[2]
