"""Row formats, chat templates and loss masks: exactly the intended tokens are trained."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchstone
from caches import cache_rows
from tiny import write_rows
from torchstone.data import formats, render_limits
from torchstone.data.cache import TokenCache
from torchstone.data.formats import IGNORE_INDEX, check_train_on
from torchstone.data.template import TEMPLATES, ChatTemplate, load_template
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import DataError, UsageError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye"},
]
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
OLD_CALL = "{% if m.function_call %}CALL {{ m.function_call.name }}{% endif %}"


def marked_text(cache: TokenCache, tokenizer: Tokenizer, index: int = 0) -> str:
    """The text of a sequence with its trained tokens in brackets; nothing predicts the first token."""
    sequence, text, inside = cache.sequence(index), "", False
    for number, (i, label) in enumerate(zip(sequence.ids, sequence.labels, strict=True)):
        trained = bool(label != IGNORE_INDEX and number > 0)
        text += ("⟦" if trained else "⟧") if trained != inside else ""
        text += tokenizer.hf.decode([i])
        inside = trained
    return text + ("⟧" if inside else "")


class TestFormats:
    """The same conversation in every format becomes the same tokens and the same mask."""

    EXPECTED = (
        "<|system|>Be brief.<|end|><|user|>Hello.<|end|><|assistant|>⟦Hi<|end|>⟧<|user|>And now?<|end|>"
        "<|assistant|>⟦Bye<|end|>⟧"
    )

    @pytest.mark.parametrize(
        ("row_format", "row"),
        [
            ("messages", {"messages": TURNS}),
            ("messages", {"messages": TURNS[1:], "system": "Be brief."}),
            ("messages", {"messages": [t | {"content": [{"type": "text", "text": t["content"]}]} for t in TURNS]}),
            ("sharegpt", {"conversations": [{"from": SPEAKERS[t["role"]], "value": t["content"]} for t in TURNS]}),
            ("sharegpt", {"conversations": TURNS}),
            ("alpaca", {"instruction": "And now?", "input": "", "output": "Bye", "system": "Be brief.",
                        "history": [["Hello.", "Hi"]]}),
        ],
        ids=["messages", "system-column", "parts", "sharegpt", "sharegpt-roles", "alpaca"],
    )  # fmt: skip
    def test_conversations(self, tokenizer: Tokenizer, tmp_path: Path, row_format: str, row: dict) -> None:
        cache = cache_rows([row], tokenizer, tmp_path)
        assert cache.row_format == row_format
        assert marked_text(cache, tokenizer) == self.EXPECTED
        assert cache.ids.tolist() == tokenizer.hf.apply_chat_template(TURNS, tokenize=True).input_ids
        explicit = cache_rows([row], tokenizer, tmp_path / "explicit", row_format=row_format)
        assert marked_text(explicit, tokenizer) == self.EXPECTED

    def test_an_alpaca_input_follows_its_instruction(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = cache_rows([{"instruction": "Sum", "input": "1 2", "output": "3"}], tokenizer, tmp_path)
        assert marked_text(cache, tokenizer) == "<|user|>Sum\n\n1 2<|end|><|assistant|>⟦3<|end|>⟧"

    @pytest.mark.parametrize(
        ("prompt", "completion", "straddling"), [("One two", " three", 0), ("One two ", "three", 1)]
    )
    def test_a_completion_of_text_is_trained_without_a_template(
        self, tokenizer: Tokenizer, tmp_path: Path, prompt: str, completion: str, straddling: int
    ) -> None:
        """With a token that spans prompt and completion, which is counted."""
        cache = cache_rows([{"prompt": prompt, "completion": completion}], tokenizer, tmp_path)
        assert marked_text(cache, tokenizer) == "One two⟦ three<|endoftext|>⟧"
        assert cache.counts.straddling_tokens == straddling

    def test_a_completion_of_messages_is_trained(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = cache_rows([{"prompt": TURNS[:4], "completion": TURNS[4:]}], tokenizer, tmp_path)
        assert marked_text(cache, tokenizer) == self.EXPECTED.replace("⟦Hi<|end|>⟧", "Hi<|end|>")

    @pytest.mark.parametrize("key", ["text", "document"])
    def test_a_text_is_trained_as_a_whole(self, tokenizer: Tokenizer, tmp_path: Path, key: str) -> None:
        cache = cache_rows([{key: "A b c."}], tokenizer, tmp_path)
        first, rest = tokenizer.hf.decode([cache.ids[0]]), tokenizer.hf.decode(cache.ids[1:])
        assert marked_text(cache, tokenizer) == f"{first}⟦{rest}⟧"
        assert rest.endswith("<|endoftext|>")

    def test_tools_reach_the_template(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        source = (
            "{% if tools %}T:{{ tools | tojson }};{% endif %}{% for m in messages %}[{{ m.role }}]"
            "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ f.name }}({{ f.arguments | tojson }})"
            "{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        (tmp_path / "tools.jinja").write_text(source)
        with_tools = load_tokenizer(Path(tokenizer.path), str(tmp_path / "tools.jinja"))
        messages = [
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"z": 1}}}]},
            {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "Noon"},
        ]
        tools = [{"type": "function", "function": {"name": "now"}}]
        expected = f'T:{json.dumps(tools)};[user]Time?;[assistant]⟦now({{"z": 1}});⟧[tool]12;[assistant]⟦Noon;⟧'
        for number, value in enumerate((tools, json.dumps(tools))):
            cache = cache_rows([{"messages": messages, "tools": value}], with_tools, tmp_path / str(number))
            assert marked_text(cache, with_tools) == expected
            ids = with_tools.hf.apply_chat_template(messages, tools=tools, tokenize=True).input_ids
            assert cache.ids.tolist() == ids

    def test_what_a_template_drops_is_an_error(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
        source = (
            "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"
        )
        (tmp_path / "t.jinja").write_text(source)
        chosen = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        rows = {
            "tool calls": {"messages": [TURNS[1], call]},
            "tools": {"messages": TURNS, "tools": [{"function": {"name": "now"}}]},
            "reasoning": {"messages": [TURNS[1], TURNS[2] | {"reasoning_content": "Hm."}]},
            **{
                f"{role} messages": {"messages": [TURNS[1], {"role": role, "content": "x"}, TURNS[2]]}
                for role in ("developer", "tool", "critic", "system")
            },
        }
        for name, row in rows.items():
            with pytest.raises(DataError, match=f"the chat template drops the {name} of this row"):
                cache_rows([row], chosen, tmp_path / name)
        empty = {"messages": [TURNS[1], TURNS[2] | {"reasoning_content": None, "tool_calls": []}], "tools": []}
        assert marked_text(cache_rows([empty], tokenizer, tmp_path / "empty"), tokenizer) == (
            "<|user|>Hello.<|end|><|assistant|>⟦Hi<|end|>⟧"
        )

    def test_texts_that_a_template_changes_are_not_dropped(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        source = (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper | replace(' ', '_') }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        (tmp_path / "t.jinja").write_text(source)
        chosen = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        cache = cache_rows([{"messages": TURNS}], chosen, tmp_path / "cache")
        assert cache.counts.bad_rows == 0

    @pytest.mark.parametrize(
        ("source", "header"),
        [
            ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", "<|assistant|>"),
            (
                "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
                " {{ m.content }}</s>{% endif %}{% endfor %}",
                "",
            ),
        ],
    )
    def test_a_header_that_is_trained_is_a_warning(
        self, tokenizer: Tokenizer, tmp_path: Path, source: str, header: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "t.jinja").write_text(source)
        chosen = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        assert chosen.template.trained_header() == header
        assert tokenizer.template.trained_header() == ""
        values = {"model.tokenizer": str(tokenizer.path), "data.chat_template": str(tmp_path / "t.jinja")}
        rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}])
        torchstone.prepare(overrides=values | {"data.path": str(rows), "data.cache_dir": str(tmp_path / "cache")})
        assert ("is trained on with every answer" in capsys.readouterr().err) == bool(header)

    def test_any_role_is_allowed_that_the_template_renders(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """The template of the demo writes any name."""
        row = {"messages": [{"role": "critic", "content": "Bad."}, TURNS[2]]}
        text = "<|critic|>Bad.<|end|><|assistant|>⟦Hi<|end|>⟧"
        assert marked_text(cache_rows([row], tokenizer, tmp_path / "a"), tokenizer) == text
        trained = cache_rows([row], tokenizer, tmp_path / "b", "critic,assistant")
        assert marked_text(trained, tokenizer) == text.replace("Bad.<|end|>", "⟦Bad.<|end|>⟧")

    def test_chatml_renders_tools_and_calls(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        chatml = load_tokenizer(Path(tokenizer.path), "chatml")
        now = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
        calls = [now, {"name": "bare", "arguments": {}}]
        messages = [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "Noon"},
        ]  # fmt: skip
        tools = [{"type": "function", "function": {"name": "now"}}, {"name": "bare"}]
        text = marked_text(cache_rows([{"messages": messages, "tools": tools}], chatml, tmp_path), chatml)
        assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
        assert '\n{"type": "function", "function": {"name": "now"}}\n{"name": "bare"}\n</tools>' in text
        assert (
            '<|im_start|>assistant\n⟦<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "bare", "arguments": {}}\n</tool_call><|im_end|>\n⟧<|im_start|>tool\n12'
        ) in text
        assert text.count("<|im_start|>system") == 1

    def test_arguments_in_a_string_are_parsed(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """As in OpenAI's API. A template would quote them again."""
        chatml = load_tokenizer(Path(tokenizer.path), "chatml")

        def row(arguments: Any) -> dict:
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return {"messages": [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [call]}]}

        rows = [row('{"x": [1, "y"]}'), row({"x": [1, "y"]}), row(""), row("{}")]
        texts = [marked_text(cache_rows([r], chatml, tmp_path / str(n)), chatml) for n, r in enumerate(rows)]
        assert '⟦<tool_call>\n{"name": "f", "arguments": {"x": [1, "y"]}}\n</tool_call><|im_end|>\n⟧' in texts[0]
        assert texts[0] == texts[1]
        assert '"arguments": {}}' in texts[2]
        assert texts[2] == texts[3]
        call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": [1, "y"]}'}}
        cache = cache_rows([{"messages": [TURNS[1], call]}], chatml, tmp_path / "old")
        assert marked_text(cache, chatml) == texts[0]
        for number, (value, reason) in enumerate([("{x", "is a string that is not JSON"), ("[1]", "not an object")]):
            with pytest.raises(DataError, match=f"rows.jsonl:1: message 1: the arguments of a call.*{reason}"):
                cache_rows([row(value)], chatml, tmp_path / f"bad-{number}")

    @pytest.mark.parametrize(
        "calls",
        [
            OLD_CALL,
            "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}",
            OLD_CALL + "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}",
        ],
        ids=["function_call", "tool_calls", "both"],
    )
    def test_a_function_call_is_rendered_once(self, tokenizer: Tokenizer, tmp_path: Path, calls: str) -> None:
        """Whichever of its two names a template knows."""
        (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}" + calls + ";{% endfor %}")
        chosen = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
        cache = cache_rows([{"messages": [TURNS[1], call]}], chosen, tmp_path)
        assert marked_text(cache, chosen) == "Hello.;⟦CALL f;⟧"

    def test_a_template_that_concatenates_arguments_gets_their_text(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        source = (
            "{% for m in messages %}{% if m.content %}{{ m.content }};{% endif %}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name + ' ' + c.function.arguments }};{% endfor %}{% endfor %}"
        )
        (tmp_path / "t.jinja").write_text(source)
        chosen = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        call = {"function": {"name": "f", "arguments": '{"x":  1.10}'}}
        turns = [TURNS[1], {"role": "assistant", "tool_calls": [call]}, *TURNS[3:]]
        assert marked_text(cache_rows([{"messages": turns}], chosen, tmp_path), chosen) == (
            'Hello.;⟦f {"x":  1.10};⟧And now?;⟦Bye;⟧'
        )
        call["function"]["arguments"] = {"x": 1}  # type: ignore[assignment]
        with pytest.raises(DataError, match=r'refuses this conversation: can only concatenate str \(not "dict"\)'):
            cache_rows([{"messages": turns}], chosen, tmp_path / "b")

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
    def test_chatml_renders_reasoning(self, tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
        chatml = load_tokenizer(Path(tokenizer.path), "chatml")
        turns = [TURNS[1], TURNS[2] | {name: "Greet."}, TURNS[3], TURNS[4]]
        assert marked_text(cache_rows([{"messages": turns}], chatml, tmp_path), chatml) == (
            "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n⟦<think>\nGreet.\n</think>\n\nHi<|im_end|>\n⟧"
            "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n⟦Bye<|im_end|>\n⟧"
        )

    @pytest.mark.parametrize(
        "value", ['{"name": "f", "arguments": {"x": 1}}', '[{"name": "f", "arguments": "{\\"x\\": 1}"}]']
    )
    def test_sharegpt_calls_and_their_results(self, tokenizer: Tokenizer, tmp_path: Path, value: str) -> None:
        chatml = load_tokenizer(Path(tokenizer.path), "chatml")
        turns = [("human", "Hello."), ("function_call", value), ("observation", "12"), ("gpt", "Noon")]
        row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
        assert marked_text(cache_rows([row], chatml, tmp_path / "a"), chatml) == (
            "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n"
            '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n⟧<|im_start|>tool\n12<|im_end|>\n'
            "<|im_start|>assistant\n⟦Noon<|im_end|>\n⟧"
        )
        row["conversations"][1]["value"] = "f(1)"
        with pytest.raises(DataError, match="rows.jsonl:1: turn 1 is a string that is not JSON"):
            cache_rows([row], chatml, tmp_path / "b")

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"messages": []}, "messages is empty"),
            ({"messages": []}, "messages is empty or not a list"),
            ({"messages": "hello"}, "messages is a string, not a list"),
            ({"conversations": "[{}]"}, "conversations is a string, not a list"),
            ({"messages": [{"content": "a"}]}, "message 0 has no role"),
            ({"messages": [{"role": "asistant", "content": "a"}]}, "has the role 'asistant'.*\n.*\n.*'assistant'"),
            ({"messages": [{"role": "Assistant", "content": "a"}]}, "message 0 has the role 'Assistant'"),
            ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
            ({"messages": [{"role": "assistant", "content": None}]}, "has no text content"),
            ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "content that is not text"),
            ({"messages": [{"role": "assistant", "content": "a\0b"}]}, "NUL character at position 1"),
            ({"messages": TURNS, "tools": "{"}, "tools is a string that is not JSON"),
            ({"messages": TURNS, "tools": 3}, "tools is not a list"),
            ({"messages": TURNS, "tools": {}}, "tools is not a list"),
            ({"messages": TURNS, "images": ["a.png"]}, "this row has images, which are not read"),
            ({"prompt": "a", "completion": "b", "images": ["a.png"]}, "this row has images"),
            ({"messages": [TURNS[1] | {"images": ["a.png"]}, TURNS[2]]}, "this row has images"),
            ({"messages": TURNS, "unmask": "yes"}, "unmask must be true or false"),
            ({"messages": TURNS, "tools": [3]}, "tools is not a list of objects"),
            ({"messages": TURNS, "system": "Another."}, "two system messages"),
            ({"messages": TURNS, "system": 3}, "system is not a string"),
            ({"messages": [{"role": "gpt", "content": "a"}]}, "has the role 'gpt'.*\n.*\n.*'assistant'"),
            ({"messages": [TURNS[1], {"role": "assistant", "content": " "}]}, "message 1 \\(assistant\\) is empty"),
            ({"messages": [{"role": "u\ud800", "content": "a"}, TURNS[2]]}, "lone surrogate at character 3"),
            ({"messages": TURNS, "tools": "[" * 100_000}, "tools is a string that is not JSON: maximum recursion"),
            ({"messages": [TURNS[1], TURNS[2] | {"tool_calls": "f()"}]}, "message 1: tool_calls is not a list of"),
            ({"conversations": [{"from": "function_call", "value": "{}"}]}, "turn 0 is a call without name and"),
            ({"\ud800": 1}, r"unknown row format: its keys are \\ud800"),
            ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "lone surrogate at character 0"),
            ({"conversations": [{"from": "nobody", "value": "a"}]}, "turn 0 is from 'nobody'"),
            ({"conversations": []}, "conversations is empty"),
            ({"instruction": "a", "output": ""}, "output is empty"),
            ({"instruction": 3, "output": "a"}, "instruction is not a string"),
            ({"instruction": "a", "output": "b", "history": ["x"]}, "history is not a list of"),
            ({"instruction": "a", "output": "b", "history": 7}, "history is not a list of"),
            ({"prompt": "a", "completion": ""}, "completion is empty"),
            ({"prompt": "a", "completion": [{"role": "assistant", "content": "a"}]}, "completion is not a string"),
            ({"prompt": [], "completion": []}, "completion is empty"),
            ({"text": ""}, "text is empty"),
            ({"text": 3}, "text is not a string"),
            ({"text": "a \ud800 b"}, "lone surrogate at character 2"),
            ({"input_ids": [1, 2], "len": "2"}, "len is '2', but there are 2 input_ids"),
            ({"input_ids": [1, 2], "len": 3}, "len is 3"),
            ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
            ({"input_ids": [1, 2.0]}, "input_ids is not a list of integers"),
            ({"input_ids": [1, 999]}, "id 999 is outside the vocabulary"),
            ({"txt": "a"}, "unknown row format: its keys are txt"),
            ({"chosen": "a", "rejected": "b"}, "preference data .*not supported.*\n.*\n.*--data.columns text=chosen"),
            (
                {"prompt": "q", "chosen": "a", "rejected": "b"},
                "preference data .*not supported.*\n.*\n.*--data.columns prompt=prompt,completion=chosen",
            ),
            ({"prompt": "q", "chosen": TURNS, "rejected": TURNS}, "preference .*\n.*\n.*columns messages=chosen"),
        ],
    )  # fmt: skip
    def test_a_bad_row_is_named_with_the_reason(
        self, tokenizer: Tokenizer, tmp_path: Path, row: dict, reason: str
    ) -> None:
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}") as caught:
            cache_rows([row], tokenizer, tmp_path)
        assert "the row starts with {" in str(caught.value)

    def test_the_value_of_a_sharegpt_turn_is_its_content(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yo", "content": "no"}]
        cache = cache_rows([{"conversations": turns}], tokenizer, tmp_path)
        assert marked_text(cache, tokenizer) == "<|user|>a<|end|><|assistant|>⟦yo<|end|>⟧"

    @pytest.mark.parametrize("row", [{"x" * 10**6: 1}, {"messages": [{"role": "tool" * 10**6, "content": "a"}]}])
    def test_an_error_is_short_however_long_the_keys_of_a_row(
        self, tokenizer: Tokenizer, tmp_path: Path, row: dict
    ) -> None:
        with pytest.raises(DataError) as caught:
            cache_rows([row], tokenizer, tmp_path)
        assert len(str(caught.value)) < 4000

    @pytest.mark.parametrize("row", [{"text": "abc " * 300}, {"prompt": "abc " * 300, "completion": "a"}])
    def test_a_very_long_text_is_a_bad_row(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict
    ) -> None:
        monkeypatch.setattr(formats, "MAX_TEXT", 1000)
        with pytest.raises(DataError, match="rows.jsonl:1: a text of more than"):
            cache_rows([row], tokenizer, tmp_path)

    def test_an_explicit_format_is_not_detected(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        row = {"messages": TURNS, "text": "plain"}
        assert cache_rows([row], tokenizer, tmp_path / "a", row_format="text").counts.trained_tokens > 0
        with pytest.raises(DataError, match="is 'alpaca', but this row has no instruction and no output"):
            cache_rows([row], tokenizer, tmp_path / "b", row_format="alpaca")

    def test_all_rows_of_a_source_have_one_format(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="rows.jsonl:2: the format of this data is 'text'"):
            cache_rows([{"text": "a"}, {"messages": TURNS}], tokenizer, tmp_path)


class TestMasks:
    @pytest.mark.parametrize(
        ("train_on", "trained"),
        [("last", [4]), ("user", [1, 3]), ("user, assistant", [1, 2, 3, 4]), ("system", [0])],
    )
    def test_train_on_selects_messages(
        self, tokenizer: Tokenizer, tmp_path: Path, train_on: str, trained: list[int]
    ) -> None:
        cache = cache_rows([{"messages": TURNS}], tokenizer, tmp_path, train_on)
        expected = ""
        for index, turn in enumerate(TURNS):
            content = f"{turn['content']}<|end|>"
            expected += f"<|{turn['role']}|>" + (f"⟦{content}⟧" if index in trained else content)
        assert marked_text(cache, tokenizer) == expected

    def test_train_on_all_trains_everything_that_is_predicted(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        text = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in TURNS)
        cache = cache_rows([{"messages": TURNS}], tokenizer, tmp_path, "all")
        assert marked_text(cache, tokenizer) == text.replace("<|system|>", "<|system|>⟦") + "⟧"

    def test_train_on_flag_follows_the_flags_of_messages(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        turns = [dict(turn) for turn in TURNS]
        turns[1]["train"] = True
        turns[2]["weight"] = 0
        cache = cache_rows([{"messages": turns}], tokenizer, tmp_path / "a", "flag")
        assert marked_text(cache, tokenizer) == (
            "<|system|>Be brief.<|end|><|user|>⟦Hello.<|end|>⟧<|assistant|>Hi<|end|><|user|>And now?<|end|>"
            "<|assistant|>⟦Bye<|end|>⟧"
        )
        turns[2]["weight"] = 0.5
        with pytest.raises(DataError, match="message 2: weight must be 0 or 1"):
            cache_rows([{"messages": turns}], tokenizer, tmp_path / "b", "flag")
        with pytest.raises(DataError, match="no message is flagged"):
            cache_rows([{"messages": [TURNS[1], TURNS[2] | {"train": False}]}], tokenizer, tmp_path / "c", "flag")

    @pytest.mark.parametrize(
        ("train_on", "weights", "expected"),
        [
            ("assistant", {2: 0}, "SU[Hi]U⟦Bye⟧"),
            ("assistant", {2: 0, 4: 1}, "SU[Hi]U⟦Bye⟧"),
            ("assistant", {1: 0, 2: 1.0, 4: False}, "SU⟦Hi⟧U[Bye]"),
            ("last", {2: 1}, "SU⟦Hi⟧U⟦Bye⟧"),
            ("last", {2: None}, "SU[Hi]U⟦Bye⟧"),
        ],
    )
    def test_the_weight_of_a_message_masks_or_trains_it(
        self, tokenizer: Tokenizer, tmp_path: Path, train_on: str, weights: dict, expected: str
    ) -> None:
        turns = [turn | ({"weight": weights[n]} if n in weights else {}) for n, turn in enumerate(TURNS)]
        for short, text in {"[": "<|assistant|>", "]": "<|end|>", "⟦": "<|assistant|>⟦", "⟧": "<|end|>⟧"}.items():
            expected = expected.replace(short, text)
        expected = expected.replace("S", "<|system|>Be brief.<|end|>")
        expected = expected.replace("U", "<|user|>Hello.<|end|>", 1).replace("U", "<|user|>And now?<|end|>", 1)
        assert marked_text(cache_rows([{"messages": turns}], tokenizer, tmp_path, train_on), tokenizer) == expected

    @pytest.mark.parametrize("weight", [0.5, 2, -1, "1", [1]])
    def test_any_other_weight_is_an_error(self, tokenizer: Tokenizer, tmp_path: Path, weight: Any) -> None:
        row = {"messages": [TURNS[1], TURNS[2] | {"weight": weight}]}
        for train_on in ("assistant", "all"):
            with pytest.raises(DataError, match="rows.jsonl:1: message 1: weight must be 0 or 1"):
                cache_rows([row], tokenizer, tmp_path / train_on, train_on)

    def test_a_weight_of_zero_masks_a_message_where_everything_is_trained(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        turns = [*TURNS[:2], TURNS[2] | {"weight": 0}, TURNS[3], TURNS[4] | {"weight": 1}]
        expected = (
            "<|system|>⟦Be brief.<|end|><|user|>Hello.<|end|>⟧<|assistant|>Hi<|end|>⟦<|user|>And now?<|end|>"
            "<|assistant|>Bye<|end|>⟧"
        )
        assert marked_text(cache_rows([{"messages": turns}], tokenizer, tmp_path / "a", "all"), tokenizer) == expected
        unmasked = cache_rows([{"messages": turns, "unmask": True}], tokenizer, tmp_path / "b")
        assert marked_text(unmasked, tokenizer) == expected.replace("⟦Be brief.<|end|>", "Be brief.<|end|>⟦")
        with pytest.raises(DataError, match="no message is flagged for training"):
            cache_rows([{"messages": turns[:3]}], tokenizer, tmp_path / "c")

    def test_unmask_trains_everything_but_the_system_message(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [
            {"messages": TURNS, "unmask": True},
            {"messages": TURNS, "unmask": False},
            {"messages": TURNS[1:3], "unmask": True},
        ]
        cache = cache_rows(rows, tokenizer, tmp_path)
        assert marked_text(cache, tokenizer, 0) == (
            "<|system|>Be brief.<|end|>⟦<|user|>Hello.<|end|><|assistant|>Hi<|end|><|user|>And now?<|end|>"
            "<|assistant|>Bye<|end|>⟧"
        )
        assert marked_text(cache, tokenizer, 1) == TestFormats.EXPECTED
        assert marked_text(cache, tokenizer, 2) == "<|user|>⟦Hello.<|end|><|assistant|>Hi<|end|>⟧"

    @pytest.mark.parametrize("train_on", ["asistant", "lasst", "", "assistant,usr", "last,assistant", "all,flag"])
    def test_a_misspelled_choice_is_refused(self, train_on: str) -> None:
        with pytest.raises(UsageError, match="is not a known role or choice|cannot be combined"):
            check_train_on(train_on)
        for known in ("assistant", "last", "all", "flag", "critic", "assistant,tool"):
            check_train_on(known)

    def test_a_prompt_of_text_is_trained_with_unmask_or_all(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        row = {"prompt": "One two", "completion": " three<|endoftext|>"}
        first, rest = tokenizer.hf.decode(tokenizer.encode("One two")[:1]), "One two three<|endoftext|>"
        whole = f"{first}⟦{rest.removeprefix(first)}⟧"
        # An eos at the end of the completion is not added again.
        assert marked_text(cache_rows([row], tokenizer, tmp_path / "a"), tokenizer) == "One two⟦ three<|endoftext|>⟧"
        assert marked_text(cache_rows([row], tokenizer, tmp_path / "b", "all"), tokenizer) == whole
        assert marked_text(cache_rows([row | {"unmask": True}], tokenizer, tmp_path / "c"), tokenizer) == whole
        lists = {"prompt": TURNS[:4], "completion": TURNS[4:], "unmask": True}
        assert marked_text(cache_rows([lists], tokenizer, tmp_path / "d"), tokenizer).count("⟦<|user|>Hello.") == 1

    def test_a_long_conversation_is_dropped_truncated_or_split(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        whole = cache_rows([{"messages": TURNS}], tokenizer, tmp_path / "whole")
        size, rows = int(whole.lengths[0]), [{"messages": TURNS}, {"messages": TURNS[1:3]}]
        dropped = cache_rows(rows, tokenizer, tmp_path / "drop", max_length=size - 2)
        assert (len(dropped), dropped.counts.dropped_long, dropped.counts.split_long) == (1, 1, 0)
        truncated = cache_rows(rows, tokenizer, tmp_path / "truncate", max_length=size - 2, on_long_row="truncate")
        assert truncated.sequence(0).ids.tolist() == whole.ids[: size - 2].tolist()
        assert (truncated.counts.truncated_long, truncated.counts.cropped_tokens) == (1, 2)
        split = cache_rows(rows, tokenizer, tmp_path / "split", max_length=10, on_long_row="split")
        pieces = [split.sequence(n) for n in range(len(split)) if split.origin(n).endswith(":1")]
        assert split.counts.split_long == 1
        assert sum(len(piece.ids) for piece in pieces) + split.counts.cropped_tokens == size
        assert all(len(piece.ids) <= 10 and piece.loss_tokens > 0 for piece in pieces)
        assert split.counts.dropped_pieces == -(-size // 10) - len(pieces)
        assert split.counts.dropped == split.counts.dropped_untrained == 0
        assert split.counts.trained_tokens == sum(split.loss_tokens)

    def test_a_split_text_loses_nothing(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [{"text": "some words " * 30}]
        whole = cache_rows(rows, tokenizer, tmp_path / "a")
        split = cache_rows(rows, tokenizer, tmp_path / "b", max_length=16, on_long_row="split")
        assert split.ids.tolist() == whole.ids.tolist()
        assert split.lengths.max() == 16
        assert split.counts.cropped_tokens == split.counts.dropped == 0


class TestTemplates:
    def test_an_unstable_template_is_refused_with_the_first_token_that_differs(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """Its last answer shows its thoughts, earlier ones do not. With `last` the mask is still known."""
        source = (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}(hm){% endif %}"
            "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        (tmp_path / "t.jinja").write_text(source)
        thinking = load_tokenizer(Path(tokenizer.path), str(tmp_path / "t.jinja"))
        with pytest.raises(DataError) as caught:
            cache_rows([{"messages": TURNS}], thinking, tmp_path)
        message = str(caught.value)
        assert "rows.jsonl:1: the chat template renders message 2 differently if another message follows" in message
        number = len(thinking.encode("<|system|>Be brief.<|end|><|user|>Hello.<|end|><|assistant|>"))
        assert f"the first token that differs is number {number}: 'H'" in message
        assert f"instead of '(' (id {thinking.hf.convert_tokens_to_ids('(')})" in message
        assert "--data.train_on last" in message
        cache = cache_rows([{"messages": TURNS}], thinking, tmp_path / "last", "last")
        assert marked_text(cache, thinking).endswith(
            "<|assistant|>Hi<|end|><|user|>And now?<|end|><|assistant|>⟦(hm)Bye<|end|>⟧"
        )

    def test_a_prompt_that_depends_on_its_answer_is_refused(self) -> None:
        source = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        with pytest.raises(DataError, match="renders the prompt before message 2 differently if that message follows"):
            ChatTemplate(source, {}).render_conversation(TURNS[:3])

    def test_an_endless_template_is_stopped(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(render_limits, "TIME_LIMIT", 0.3)
        loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        (tmp_path / "loops.jinja").write_text(loops)
        endless = load_tokenizer(Path(tokenizer.path), str(tmp_path / "loops.jinja"))
        with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template took more than 0.3 s"):
            cache_rows([{"messages": TURNS}], endless, tmp_path)
        assert ChatTemplate("fine", {}).render_prompt(TURNS) == "fine"

    @pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages[0] + 1 }}"])
    def test_errors_in_a_template_are_data_errors(self, source: str) -> None:
        """Also access to Python's internals."""
        with pytest.raises(DataError, match="the chat template refuses this conversation"):
            ChatTemplate(source, {}).render_prompt(TURNS)

    def test_generation_tags_and_loop_controls_are_supported(self) -> None:
        source = (
            "{% for m in messages %}{% if m['role'] == 'system' %}{% continue %}{% endif %}[{{ m['role'] }}]"
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }};{% endgeneration %}"
            "{% else %}{{ m['content'] }};{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        rendered = ChatTemplate(source, {}).render_conversation(TURNS[:3])
        assert rendered.text == "[user]Hello.;[assistant]Hi;"
        assert [rendered.text[start:end] for start, end in rendered.train_spans] == ["Hi;"]

    @pytest.mark.parametrize(
        "source",
        [
            "{% if tools is not none %}TOOLS{% endif %}{{ messages | tojson(ensure_ascii=true) }}"
            "{{ messages[0]['content'] is string }}",
            # Blocks on lines of their own leave no blank lines; special tokens have names.
            "{{ eos_token }}\n{% for m in messages %}\n  {% if m['role'] == 'user' %}\n[{{ m['content'] }}]\n"
            "  {% else %}\n<{{ m['content'] | tojson }}>{{ pad_token }}\n  {% endif %}\n{% endfor %}\n",
        ],
    )
    def test_templates_render_as_in_transformers(self, tokenizer: Tokenizer, source: str) -> None:
        messages = [{"role": "user", "content": "ä"}, {"role": "assistant", "content": "<ü>"}]
        expected = tokenizer.hf.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert ChatTemplate(source, tokenizer.hf.special_tokens_map).render_text(messages) == expected

    def test_the_date_in_a_template_is_fixed(self) -> None:
        assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render_prompt([]) == "01 Jan 2025"

    @pytest.mark.parametrize(
        "expression",
        ["n.x ~ n.x", "n.x + n.x", "n.x * 9", "[n.x, n.x] | join", "n.x.replace('x', n.x)", "[n.x, [n.x]] | string",
         "n.x | center(99999999999)", "n.x.ljust(99999999999)", "'%99999999999d' | format(1)",
         "n.x | indent(9999999, blank=true)", "'{:99999999999}'.format(1)", "'%99999999999d' % 1",
         "[n.x] | tojson(indent=99999999999)"],
    )  # fmt: skip
    def test_a_template_cannot_fill_the_memory(self, expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(render_limits, "MEMORY_LIMIT", 1 << 26)
        loop = "{% set n = namespace(x='x\n') %}{% for i in range(99) %}{% set n.x = EXPRESSION %}{% endfor %}"
        chat_template = ChatTemplate(loop.replace("EXPRESSION", expression), {})
        before = resource.getrlimit(resource.RLIMIT_AS)
        with pytest.raises(DataError, match="needs more than 64 MiB"):
            chat_template.render_prompt(TURNS)
        assert resource.getrlimit(resource.RLIMIT_AS) == before
        assert len("x" * (1 << 27)) == 1 << 27

    @pytest.mark.parametrize("source", ["{{ 9 ** 99999999 }}", "{{ (" + "(" * 9999 + "1" + ")" * 9999 + ") }}"])
    def test_a_template_that_cannot_be_compiled_is_refused(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """jinja2 evaluates constants when it compiles."""
        monkeypatch.setattr(render_limits, "TIME_LIMIT", 0.2)
        with pytest.raises(UsageError, match="the chat template is invalid"):
            ChatTemplate(source, {})

    def test_the_error_names_the_line_and_where_the_template_is_from(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        file = tmp_path / "mine.jinja"
        file.write_text("{% for m in messages %}\n{{ m['role'] ")
        match = "the chat template is invalid in line 2: unexpected end"
        with pytest.raises(UsageError, match=rf"{match}.* \(in {file}\)\n"):
            _ = load_tokenizer(Path(tokenizer.path), str(file)).template
        folder = shutil.copytree(tokenizer.path, tmp_path / "tok")
        shutil.copy(file, folder / "chat_template.jinja")
        with pytest.raises(UsageError, match=rf"{match}.* \(in the tokenizer {folder}\)\n"):
            _ = load_tokenizer(folder).template

    def test_a_template_cannot_write_much_more_than_the_conversation(self) -> None:
        """A thousand rows that become a megabyte each would fill the memory too. A long conversation may be long."""
        with pytest.raises(DataError, match="it writes 999,900 characters for a conversation of"):
            ChatTemplate("{% for n in range(100) %}{{ 'x' * 9999 }}{% endfor %}", {}).render_prompt(TURNS)
        messages = [{"role": "user", "content": "x" * 200_000}]
        assert len(ChatTemplate("{{ messages[0]['content'] * 10 }}", {}).render_prompt(messages)) == 2_000_000
        with pytest.raises(DataError, match="it writes 4,000,000 characters for a conversation of 200,"):
            ChatTemplate("{{ messages[0]['content'] * 20 }}", {}).render_prompt(messages)

    def test_a_template_that_python_cannot_interrupt_ends_the_process(self, tokenizer: Tokenizer) -> None:
        """The comparison of nested lists is a single operation, and takes 2^60 steps."""
        nest = "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
        source = "{% set n = namespace(a=[1], b=[1]) %}" + nest + "{{ n.a == n.b }}"
        code = (
            "from torchstone.data import render_limits as limits; from torchstone.data.template import ChatTemplate\n"
            "limits.TIME_LIMIT, limits.KILL_AFTER = 0.1, 0.2\n"
            f"ChatTemplate({source!r}, {{}}).render_prompt([])"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGPROF

    @pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
    def test_built_in_templates_render_as_in_transformers(self, tokenizer: Tokenizer, name: str) -> None:
        source, special = load_template(name), {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        hf = load_tokenizer(Path(tokenizer.path)).hf
        hf.bos_token = "<|endoftext|>"
        chat_template = ChatTemplate(source, special)
        rendered = chat_template.render_conversation(TURNS)
        assert rendered.text == hf.apply_chat_template(TURNS, chat_template=source, tokenize=False)
        prompt = hf.apply_chat_template(TURNS[:4], chat_template=source, tokenize=False, add_generation_prompt=True)
        assert chat_template.render_prompt(TURNS[:4]) == prompt
        assert not prompt.endswith(" "), "a model never sees this token before an answer"
        for (start, end), answer in zip(rendered.train_spans, ("Hi", "Bye"), strict=True):
            # A space before it is part of the token of its first word, as in generation.
            assert rendered.text[start:end].lstrip(" ").startswith(answer)
            assert 0 < end - start - len(answer) < 20

    def test_a_template_is_a_file_or_a_built_in_name(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jinja").write_text("mine")
        assert load_template(str(tmp_path / "mine.jinja")) == "mine"
        with pytest.raises(UsageError, match="neither a file nor a built-in template.*\n.*chatml"):
            load_template("chatlm")
        (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="is not UTF-8"):
            load_template(str(tmp_path / "binary.jinja"))

    def test_template_tokens_outside_the_vocabulary_are_found(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.unknown_template_tokens == []
        chatml = load_tokenizer(Path(tokenizer.path), "chatml")
        assert chatml.unknown_template_tokens == ["<|im_start|>", "<|im_end|>"]

    def test_they_are_named_first_where_the_rows_become_too_long_by_them(
        self, settings: Any, chat_file: Path, tmp_path: Path
    ) -> None:
        overrides = settings(data__path=str(chat_file), data__chat_template="llama3", data__context_length=32)
        with pytest.raises(DataError, match="has a token to train on") as caught:
            torchstone.prepare(overrides=overrides | {"data.cache_dir": str(tmp_path / "cache")})
        assert caught.value.hint is not None
        assert re.match(
            r"the chat template writes <\|start_header_id\|>, .*, <\|eot_id\|>, which are not single tokens of this "
            r"tokenizer: set a --data.chat_template .*; \d+ are longer than data.context_length",
            caught.value.hint,
        )

    def test_a_chosen_template_is_saved_with_the_model(self, settings: Any, chat_file: Path, tmp_path: Path) -> None:
        overrides = settings(
            data__path=str(chat_file), data__chat_template="chatml", data__context_length=64, training__max_steps=1
        )
        result = torchstone.train(overrides=overrides)
        assert result.checkpoint is not None
        saved = load_tokenizer(result.checkpoint)
        assert saved.hf.chat_template == load_template("chatml")
        assert "<|im_start|>assistant" in saved.template.render_prompt([{"role": "user", "content": "a"}])


def test_tool_calls_are_not_compared_with_answers(llama_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They are trained, but have no text that could be right or wrong."""
    folder = tmp_path / "model"
    shutil.copytree(llama_dir, folder)
    load_tokenizer(Path(tokenizer.path), "chatml").save(folder)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"messages": [TURNS[1], call]}, {"messages": TURNS[1:3]}]
    path = write_rows(tmp_path / "calls.jsonl", rows)
    result = torchstone.evaluate(
        str(folder), str(path), context_length=256, device="cpu", cache_dir=str(tmp_path), quiet=True
    )
    assert (result["samples"], result["questions"]) == (2, 1)
