"""Row formats, recognized by their keys or set with `data.format`.

A row is read as one of four things: a text, a prompt with its completion, a conversation, or token ids with labels. All
rows of a data source have one format. Any other row is an error that names its line: mixing formats by accident
is how masks go wrong.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchstone.data.sources import NO_COLUMNS, Row, unique_keys
from torchstone.errors import UsageError

IGNORE_INDEX = -100
# In characters. Tokenizers need about a hundred times the size of a text.
MAX_TEXT = 1 << 25
RowFormat = Literal["tokens", "messages", "sharegpt", "alpaca", "prompt", "text", "document", "lines"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
Message = dict[str, Any]

# The keys of each format, in the order in which formats are tried.
FORMAT_KEYS: dict[RowFormat, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "document": ("document",),
    # Every line of a text file; detection never gets here.
    "lines": ("text",),
}
TEXT_FORMATS: tuple[RowFormat, ...] = ("text", "document", "lines")
CHAT_FORMATS: tuple[RowFormat, ...] = ("messages", "sharegpt", "alpaca")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "tool_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
# The value of such a turn is a call, or a list of calls, as JSON.
SHAREGPT_CALLS = ("function_call", "tool_call")


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and the text that must follow it, without a chat template."""

    prompt: str
    completion: str
    unmask: bool = False


class Arguments(dict[str, Any]):
    """The arguments of a call, and the JSON text that they were parsed from."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


@dataclass(frozen=True)
class Conversation:
    """`unmask` trains on everything but the system message. Messages before `train_from` are not trained on."""

    messages: list[Message]
    tools: list[Any] | None = None
    unmask: bool = False
    train_from: int = 0


# Names that other datasets give to the columns of a row format; `suggest_columns` knows them.
PROMPT_NAMES = {"question", "query", "problem", "prompt", "instruction", "input", "user", "source", "context"}
COMPLETION_NAMES = {"answer", "response", "solution", "completion", "output", "assistant", "target", "reply"}
TEXT_NAMES = {"content", "contents", "body", "article", "story", "passage", "raw_content", "code"}


PREFERENCE_KEYS = {"chosen", "rejected"}


def detect_format(row: Row, columns: Mapping[str, str] = NO_COLUMNS) -> RowFormat:
    """The first format whose keys the row has. If columns are mapped, the format has at least one of them."""
    for row_format, keys in FORMAT_KEYS.items():
        if all(key in row.value for key in keys) and (not columns or columns.keys() & {*keys}):
            return row_format
    if row.value.keys() >= PREFERENCE_KEYS:
        raise row.error(
            "this is preference data (chosen and rejected), which is not supported: there is no DPO",
            f"to train on the chosen answers only: {_chosen_columns(row.value)}",
        )
    formats = ", or ".join(dict.fromkeys(" and ".join(keys) for keys in FORMAT_KEYS.values()))
    raise row.error(
        f"unknown row format: its keys are {', '.join(row.value) or 'none'}",
        f"{suggest_columns(row.value)}\n  a row has {formats}; --data.format sets the format",
    )


def _chosen_columns(value: dict[str, Any]) -> str:
    if type(value.get("prompt")) is type(value["chosen"]):
        return _columns_flag(prompt="prompt", completion="chosen")
    return _columns_flag(**{"messages" if isinstance(value["chosen"], list) else "text": "chosen"})


def suggest_columns(value: dict[str, Any]) -> str:
    """The --data.columns that a row with these keys may need, from their names and the types of their values."""

    def find(names: set[str], type_: type) -> str | None:
        return next((key for key in value if key.lower() in names and isinstance(value[key], type_)), None)

    strings = [key for key, inner in value.items() if isinstance(inner, str)]
    for key, inner in value.items():
        first = inner[0] if isinstance(inner, list) and inner else None
        if isinstance(first, dict) and ("role" in first or "from" in first):
            return _columns_flag(**{"messages" if "role" in first else "conversations": key})
    question, answer = find(PROMPT_NAMES, str), find(COMPLETION_NAMES, str)
    if question is None and answer is None and len(strings) == 2 and not find(TEXT_NAMES, str):
        question, answer = strings
    if question and answer:
        return (
            f"{_columns_flag(instruction=question, output=answer)} for a chat model: a question and its answer in the "
            f"chat template\n  {_columns_flag(prompt=question, completion=answer)} for text that goes on: the two are "
            "joined as they are, without a template"
        )
    name = find(TEXT_NAMES, str) or (strings[0] if len(strings) == 1 else "NAME")
    return _columns_flag(text=name) + (" with the name of the column to train on" if name == "NAME" else "")


def _columns_flag(**columns: str) -> str:
    return f"use --data.columns {shlex.quote(','.join(f'{name}={column}' for name, column in columns.items()))}"


def read_text(row: Row, row_format: RowFormat) -> str:
    _check_keys(row, row_format)
    (key,) = FORMAT_KEYS[row_format]
    text = row.value[key]
    if not isinstance(text, str):
        raise row.error(f"{key} is not a string")
    if not text:
        raise row.error(f"{key} is empty")
    return check_encodable(row, text)


def read_prompt(row: Row) -> PromptCompletion | Conversation:
    """Strings are concatenated as they are; lists of messages are a conversation trained on the completion only."""
    _check_keys(row, "prompt")
    prompt, completion = row.value["prompt"], row.value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        if not completion:
            raise row.error("completion is empty: nothing in this row would be trained on")
        conversation = _read_messages(row, [*prompt, *completion])
        train_from = len(conversation.messages) - len(completion)
        return Conversation(conversation.messages, conversation.tools, conversation.unmask, train_from)
    _check_no_images(row, row.value)
    for key, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise row.error(f"{key} is not a string; both prompt and completion are strings, or lists of messages")
    if not completion:
        raise row.error("completion is empty: nothing in this row would be trained on")
    return PromptCompletion(check_encodable(row, prompt), check_encodable(row, completion), _read_unmask(row))


def read_conversation(row: Row, row_format: RowFormat) -> Conversation:
    _check_keys(row, row_format)
    if row_format == "alpaca":
        return _read_messages(row, _alpaca_messages(row))
    return _read_messages(row, _sharegpt_messages(row) if row_format == "sharegpt" else row.value["messages"])


def read_tokens(row: Row, vocab_size: int) -> tuple[list[int], list[int]]:
    """ids, and labels as in Transformers: one per id, not shifted, -100 where nothing is learned."""
    _check_keys(row, "tokens")
    ids = row.value["input_ids"]
    labels = ids if row.value.get("labels") is None else row.value["labels"]
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise row.error(f"{name} is not a list of integers")
    if not ids or len(ids) != len(labels):
        raise row.error(f"{len(ids)} input_ids and {len(labels)} labels: their numbers must be equal and not zero")
    if row.value.get("len", len(ids)) != len(ids):
        raise row.error(f"len is {row.value['len']!r}, but there are {len(ids)} input_ids")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    outside += [i for i in labels if i != IGNORE_INDEX and not 0 <= i < vocab_size]
    if outside:
        raise row.error(f"id {outside[0]} is outside the vocabulary of {vocab_size}")
    return ids, labels


def select_train_messages(row: Row, conversation: Conversation, train_on: str) -> list[int]:
    """The indices of the messages to train on: by role, or the last answer. A message's own flag overrides this.

    `weight` is such a flag, and with `flag` also `train`.
    """
    messages = conversation.messages
    roles = ("assistant",) if train_on in ("last", "flag") else tuple(role.strip() for role in train_on.split(","))
    indices = [index for index, message in enumerate(messages) if message["role"] in roles]
    if train_on == "last":
        indices = indices[-1:]
    indices = [index for index in indices if index >= conversation.train_from]
    flags = read_flags(row, messages, ("train", "weight") if train_on == "flag" else ("weight",))
    if flags:
        turned_on, turned_off = {i for i, flag in flags.items() if flag}, {i for i, flag in flags.items() if not flag}
        indices = sorted({*indices, *turned_on} - turned_off)
    for index in indices:
        values = [value for key, value in messages[index].items() if key not in ("role", "train", "weight", "name")]
        if not any(value.strip() if isinstance(value, str) else value for value in values):
            raise row.error(f"message {index} ({messages[index]['role']}) is empty: only its end would be trained on")
    if not indices:
        has_flags = train_on == "flag" or flags
        reason = "no message is flagged for training" if has_flags else f"no {' or '.join(roles)} message"
        raise row.error(f"{reason}: nothing in this row would be trained on")
    return indices


def read_flags(row: Row, messages: list[Message], names: tuple[str, ...] = ("weight",)) -> dict[int, bool]:
    """Maps the index of each flagged message to its flag. `names` are the keys of flags, in order of priority."""
    flags = {}
    for index, message in enumerate(messages):
        name = next((name for name in names if message.get(name) is not None), None)
        if name is not None:
            if message[name] not in (0, 1):
                raise row.error(f"message {index}: {name} must be 0 or 1 (or true or false), not {message[name]!r}")
            flags[index] = bool(message[name])
    return flags


def check_train_on(train_on: str) -> None:
    """Raises UsageError for a misspelled choice, which would be taken for a role that no message has."""
    parts = [part.strip() for part in train_on.split(",")]
    if len(parts) > 1 and {"last", "all", "flag"} & set(parts):
        raise UsageError(
            f"data.train_on {train_on!r}: last, all and flag cannot be combined", "only roles can be in a list"
        )
    for name in parts:
        similar = _similar(name, ("last", "all", "flag", *ROLES))
        if not name or (similar and similar[0] != name):
            raise UsageError(
                f"data.train_on {train_on!r} is not a known role or choice",
                f"did you mean {similar[0]!r}?" if similar else "use all, last, flag, or roles such as assistant,tool",
            )


def check_encodable(row: Row, text: str) -> str:
    """Raises BadRow for text that is very long, or has NUL or lone surrogates, which are not valid Unicode."""
    if len(text) > MAX_TEXT:
        raise row.error(
            f"a text of more than {MAX_TEXT >> 20} Mi characters: encoding it would take gigabytes",
            "split it into several rows, or write it to a .txt file, which is read in pieces",
        )
    if text.isascii():
        if "\0" not in text:
            return text
    else:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise row.error(f"lone surrogate at character {error.start}: not valid Unicode") from None
    if "\0" in text:
        raise row.error(f"NUL character at position {text.index(chr(0))}")
    return text


def _similar(name: str, known: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.75)


def _read_messages(row: Row, values: Any) -> Conversation:
    _check_turns(row, "messages", values)
    _check_no_images(row, row.value, *values)
    messages = [_read_message(row, index, message) for index, message in enumerate(values)]
    system = row.value.get("system")
    if system is not None and not isinstance(system, str):
        raise row.error("system is not a string")
    if system and messages[0]["role"] == "system":
        raise row.error("two system messages: one in system and one in the messages")
    if system:
        messages.insert(0, {"role": "system", "content": check_encodable(row, system)})
    return Conversation(messages, _read_tools(row), _read_unmask(row))


def _check_turns(row: Row, name: str, turns: Any) -> None:
    if isinstance(turns, str) and turns:
        raise row.error(
            f"{name} is a string, not a list",
            "if it is JSON, parse it and write the rows as JSONL or parquet; a CSV file cannot have lists",
        )
    if not isinstance(turns, list) or not turns:
        raise row.error(f"{name} is empty or not a list")


def _read_unmask(row: Row) -> bool:
    unmask = row.value.get("unmask", False)
    if not isinstance(unmask, bool):
        raise row.error(f"unmask must be true or false, not {unmask!r}")
    return unmask


def _read_message(row: Row, index: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        is_sharegpt = isinstance(message, dict) and {"from", "value"} <= message.keys()
        hint = (
            "from and value are the keys of ShareGPT: add --data.columns conversations=messages, or rename the column "
            "to conversations"
        )
        raise row.error(f"message {index} has no role", hint if is_sharegpt else None)
    role = message["role"]
    if role not in ROLES:
        similar = [SHAREGPT_ROLES[role]] if role in SHAREGPT_ROLES else _similar(role.lower(), ROLES)
        if similar:
            raise row.error(f"message {index} has the role {role!r}", f"did you mean {similar[0]!r}?")
    content = message.get("content")
    if isinstance(content, list):
        content = _join_parts(row, index, content)
        message = {**message, "content": content}
    # Other names stay: some templates know only these.
    if reasoning := message.get("reasoning") or message.get("thinking"):
        message = {**message, "reasoning_content": message.get("reasoning_content") or reasoning}
    if call := message.get("function_call"):
        calls = [{"type": "function", "function": call}]
        message = {**message, "tool_calls": message.get("tool_calls") or calls}
    if message.get("tool_calls"):
        message = _parse_calls(row, index, message)
        if content is None:
            # A template would write null as the word None.
            return {**message, "content": ""}
    if not isinstance(content, str):
        raise row.error(f"message {index} ({role}) has no text content")
    check_encodable(row, content)
    return message


def _join_parts(row: Row, index: int, parts: list[Any]) -> str:
    """Joins the texts of multi-part content, as used where a message may also have images."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise row.error(f"message {index} has content that is not text")
    return "".join(part["text"] for part in parts)


def _parse_calls(row: Row, index: int, message: Message) -> Message:
    """Parses arguments that are JSON strings, as in OpenAI's API. Templates would quote them a second time."""

    def parse_arguments(function: Any) -> Any:
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return function
        name = f"message {index}: the arguments of a call"
        arguments = _parse_json(row, name, function["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise row.error(f"{name} are not an object")
        return {**function, "arguments": Arguments(arguments, function["arguments"])}

    def parse_call(call: Any) -> Any:
        call = parse_arguments(call)
        return {**call, "function": parse_arguments(call["function"])} if "function" in call else call

    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise row.error(f"message {index}: tool_calls is not a list of objects")
    parsed = {"tool_calls": [parse_call(call) for call in calls]}
    if message.get("function_call"):
        parsed["function_call"] = parse_arguments(message["function_call"])
    return {**message, **parsed}


def _parse_json(row: Row, name: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise row.error(f"{name} is a string that is not JSON: {error}") from None


def restore_argument_texts(value: Any) -> Any:
    """Messages with the JSON text of arguments, where they were parsed from one."""
    if isinstance(value, Arguments):
        return value.text
    if isinstance(value, dict):
        return {key: restore_argument_texts(inner) for key, inner in value.items()}
    return [restore_argument_texts(inner) for inner in value] if isinstance(value, list) else value


def _read_tools(row: Row) -> list[Any] | None:
    tools = row.value.get("tools")
    if isinstance(tools, str) and tools:
        tools = _parse_json(row, "tools", tools)
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.error("tools is not a list of objects")
    return tools


def _sharegpt_messages(row: Row) -> list[Message]:
    turns = row.value["conversations"]
    _check_turns(row, "conversations", turns)
    messages = []
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if speaker not in SHAREGPT_ROLES:
            raise row.error(
                f"turn {index} is from {speaker!r}",
                f"use one of {', '.join(SHAREGPT_ROLES)}, or a message with role and content",
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if speaker in SHAREGPT_CALLS:
            content: Message = {"content": None, "tool_calls": _sharegpt_calls(row, index, turn.get("value"))}
        else:
            content = {"content": turn.get("value")}
        messages.append({**others, "role": SHAREGPT_ROLES[speaker], **content})
    return messages


def _sharegpt_calls(row: Row, index: int, value: Any) -> list[Any]:
    calls = _parse_json(row, f"turn {index}", value) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or any(not isinstance(call, dict) or "name" not in call or "arguments" not in call for call in calls):
        raise row.error(f"turn {index} is a call without name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _alpaca_messages(row: Row) -> list[Message]:
    """Instruction and input are one question, separated by a blank line; `history` has earlier turns."""
    value = row.value
    for key in ("instruction", "output"):
        if not isinstance(value[key], str):
            raise row.error(f"{key} is not a string")
    if not value["output"]:
        raise row.error("output is empty: nothing in this row would be trained on")
    input_text = value.get("input") or ""
    if not isinstance(input_text, str):
        raise row.error("input is not a string")
    history, messages = value.get("history") or [], []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise row.error("history is not a list of [question, answer] pairs")
    for pair in history:
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = f"{value['instruction']}\n\n{input_text}" if input_text else value["instruction"]
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": value["output"]}]


def _check_no_images(row: Row, *values: Any) -> None:
    if any(isinstance(value, dict) and value.get("images") for value in values):
        raise row.error("this row has images, which are not read")


def _check_keys(row: Row, row_format: RowFormat) -> None:
    missing = [key for key in FORMAT_KEYS[row_format] if key not in row.value]
    if missing:
        raise row.error(
            f"the format of this data is {row_format!r}, but this row has no {' and no '.join(missing)}; its keys are "
            f"{', '.join(row.value) or 'none'}"
        )
