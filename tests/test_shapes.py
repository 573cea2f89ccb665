"""Row shapes, chat templates and loss masks: exactly the words that are meant are trained."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import write_rows
from torchstone.data.cache import BuildSettings, TokenCache, find_source, open_cache
from torchstone.data.formats import IGNORED, check_train_on
from torchstone.data.template import TEMPLATES, ChatTemplate, named_template
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye"},
]


SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}


def opened(
    rows: list[dict], tokenizer: Tokenizer, folder: Path, train_on: str = "assistant", limit: int | None = None,
    form: str = "auto", on_long: str = "drop",
) -> TokenCache:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    source = find_source(str(write_rows(folder / "rows.jsonl", rows)), form)
    recipe = tokenizer.recipe(source.shape, limit, on_long, train_on)
    return open_cache(source, recipe, BuildSettings(folder / "cache", workers=0), Console("quiet"))


def marked(cache: TokenCache, tokenizer: Tokenizer, index: int = 0) -> str:
    """The text of a sequence with its trained tokens in brackets; the first token is never predicted."""
    sequence, text, inside = cache.sequence(index), "", False
    for number, (i, label) in enumerate(zip(sequence.ids, sequence.labels, strict=True)):
        trained = bool(label != IGNORED and number > 0)
        text += ("⟦" if trained else "⟧") if trained != inside else ""
        text += tokenizer.hf.decode([i])
        inside = trained
    return text + ("⟧" if inside else "")


class TestShapes:
    """The same conversation in every shape becomes the same tokens and the same mask."""

    WANTED = (
        "<|system|>Be brief.<|end|><|user|>Hello.<|end|><|assistant|>⟦Hi<|end|>⟧<|user|>And now?<|end|>"
        "<|assistant|>⟦Bye<|end|>⟧"
    )

    @pytest.mark.parametrize(
        ("shape", "row"),
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
    def test_conversations(self, tokenizer: Tokenizer, tmp_path: Path, shape: str, row: dict) -> None:
        cache = opened([row], tokenizer, tmp_path)
        assert cache.shape == shape
        assert marked(cache, tokenizer) == self.WANTED
        assert marked(opened([row], tokenizer, tmp_path / "named", form=shape), tokenizer) == self.WANTED

    def test_an_alpaca_input_follows_its_instruction(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = opened([{"instruction": "Sum", "input": "1 2", "output": "3"}], tokenizer, tmp_path)
        assert marked(cache, tokenizer) == "<|user|>Sum\n\n1 2<|end|><|assistant|>⟦3<|end|>⟧"

    def test_a_prompt_and_completion_of_text_have_no_template(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = opened([{"prompt": "One two", "completion": " three"}], tokenizer, tmp_path)
        assert marked(cache, tokenizer) == "One two⟦ three<|endoftext|>⟧"
        assert cache.counts.straddling_tokens == 0

    def test_a_token_across_prompt_and_completion_is_trained_and_counted(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        cache = opened([{"prompt": "One two ", "completion": "three"}], tokenizer, tmp_path)
        assert marked(cache, tokenizer) == "One two⟦ three<|endoftext|>⟧"
        assert cache.counts.straddling_tokens == 1

    def test_a_prompt_and_completion_of_messages_train_the_completion(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        cache = opened([{"prompt": TURNS[:4], "completion": TURNS[4:]}], tokenizer, tmp_path)
        assert marked(cache, tokenizer) == self.WANTED.replace("⟦Hi<|end|>⟧", "Hi<|end|>")

    @pytest.mark.parametrize("key", ["text", "document"])
    def test_a_text_is_trained_as_a_whole(self, tokenizer: Tokenizer, tmp_path: Path, key: str) -> None:
        cache = opened([{key: "A b c."}], tokenizer, tmp_path)
        first, rest = tokenizer.hf.decode([cache.ids[0]]), tokenizer.hf.decode(cache.ids[1:])
        assert marked(cache, tokenizer) == f"{first}⟦{rest}⟧"
        assert rest.endswith("<|endoftext|>")

    def test_tools_reach_the_template(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        source = (
            "{% if tools %}T:{{ tools | tojson }};{% endif %}{% for m in messages %}[{{ m.role }}]"
            "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ f.name }}({{ f.arguments | tojson }})"
            "{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        (tmp_path / "tools.jinja").write_text(source)
        with_tools = load_tokenizer(Path(tokenizer.source), str(tmp_path / "tools.jinja"))
        messages = [
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"z": 1}}}]},
            {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "Noon"},
        ]
        tools = [{"type": "function", "function": {"name": "now"}}]
        wanted = f'T:{json.dumps(tools)};[user]Time?;[assistant]⟦now({{"z": 1}});⟧[tool]12;[assistant]⟦Noon;⟧'
        for number, given in enumerate((tools, json.dumps(tools))):
            cache = opened([{"messages": messages, "tools": given}], with_tools, tmp_path / str(number))
            assert marked(cache, with_tools) == wanted
            theirs = with_tools.hf.apply_chat_template(messages, tools=tools, tokenize=True).input_ids
            assert cache.ids.tolist() == theirs

    def test_tools_that_a_template_leaves_out_are_no_silent_loss(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
        rows = [{"messages": [TURNS[1], call]}, {"messages": TURNS, "tools": [{"function": {"name": "now"}}]}]
        for number, what in enumerate(("the tool calls", "the tools")):
            with pytest.raises(DataError, match=f"leaves out {what} of this row"):
                opened([rows[number]], tokenizer, tmp_path / str(number))

    def test_chatml_writes_tools_and_calls(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        chatml = load_tokenizer(Path(tokenizer.source), "chatml")
        now = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
        calls = [now, {"name": "bare", "arguments": {}}]
        messages = [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "Noon"},
        ]  # fmt: skip
        tools = [{"type": "function", "function": {"name": "now"}}, {"name": "bare"}]
        text = marked(opened([{"messages": messages, "tools": tools}], chatml, tmp_path), chatml)
        assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
        assert '\n{"type": "function", "function": {"name": "now"}}\n{"name": "bare"}\n</tools>' in text
        assert (
            '<|im_start|>assistant\n⟦<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "bare", "arguments": {}}\n</tool_call><|im_end|>\n⟧<|im_start|>tool\n12'
        ) in text
        assert text.count("<|im_start|>system") == 1

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"messages": []}, "messages is empty"),
            ({"messages": "hello"}, "messages is empty or not a list"),
            ({"messages": [{"content": "a"}]}, "message 0 has no role"),
            ({"messages": [{"role": "asistant", "content": "a"}]}, "has the role 'asistant'.*\n.*\n.*'assistant'"),
            ({"messages": [{"role": "Assistant", "content": "a"}]}, "message 0 has the role 'Assistant'"),
            ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
            ({"messages": [{"role": "assistant", "content": None}]}, "has no text content"),
            ({"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}, "content that is not text"),
            ({"messages": [{"role": "assistant", "content": "a\0b"}]}, "a NUL at character 1"),
            ({"messages": TURNS, "tools": "{"}, "tools is a string that is not JSON"),
            ({"messages": TURNS, "tools": 3}, "tools is not a list"),
            ({"messages": TURNS, "unmask": "yes"}, "unmask is true or false"),
            ({"messages": TURNS, "tools": [3]}, "tools is not a list of objects"),
            ({"messages": TURNS, "system": "Another."}, "two system messages"),
            ({"messages": TURNS, "system": 3}, "system is not a string"),
            ({"messages": [{"role": "gpt", "content": "a"}]}, "has the role 'gpt'.*\n.*\n.*'assistant'"),
            ({"messages": [TURNS[1], {"role": "assistant", "content": " "}]}, "message 1 \\(assistant\\) is empty"),
            ({"messages": [{"role": "u\ud800", "content": "a"}, TURNS[2]]}, "half of a surrogate pair"),
            ({"conversations": [{"from": "nobody", "value": "a"}]}, "turn 0 is from 'nobody'"),
            ({"conversations": []}, "conversations is empty"),
            ({"instruction": "a", "output": ""}, "output is empty"),
            ({"instruction": 3, "output": "a"}, "instruction is not a string"),
            ({"instruction": "a", "output": "b", "history": ["x"]}, "history is a list of pairs"),
            ({"prompt": "a", "completion": ""}, "completion is empty"),
            ({"prompt": "a", "completion": [{"role": "assistant", "content": "a"}]}, "completion is neither text nor"),
            ({"prompt": [], "completion": []}, "completion is empty"),
            ({"txt": "a"}, "no known row shape: its keys are txt"),
        ],
    )  # fmt: skip
    def test_a_row_that_cannot_be_trained_on_says_why(
        self, tokenizer: Tokenizer, tmp_path: Path, row: dict, reason: str
    ) -> None:
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}") as caught:
            opened([row], tokenizer, tmp_path)
        assert "the row begins {" in str(caught.value)

    def test_a_named_shape_is_not_guessed(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        row = {"messages": TURNS, "text": "plain"}
        assert opened([row], tokenizer, tmp_path / "a", form="text").counts.trained_tokens > 0
        with pytest.raises(DataError, match="shape 'alpaca', this one has no instruction and no output"):
            opened([row], tokenizer, tmp_path / "b", form="alpaca")


class TestMasks:
    @pytest.mark.parametrize(
        ("train_on", "wanted"),
        [
            ("last", ["", "", "", "", "Bye<|end|>"]),
            ("user", ["", "Hello.<|end|>", "", "And now?<|end|>", ""]),
            ("user, assistant", ["", "Hello.<|end|>", "Hi<|end|>", "And now?<|end|>", "Bye<|end|>"]),
            ("system", ["Be brief.<|end|>", "", "", "", ""]),
        ],
    )  # fmt: skip
    def test_what_is_trained_is_a_choice(
        self, tokenizer: Tokenizer, tmp_path: Path, train_on: str, wanted: list[str]
    ) -> None:
        cache = opened([{"messages": TURNS}], tokenizer, tmp_path, train_on)
        whole = ""
        for turn, trained in zip(TURNS, wanted, strict=True):
            said = f"{turn['content']}<|end|>"
            whole += f"<|{turn['role']}|>" + (f"⟦{said}⟧" if trained == said else said)
        assert marked(cache, tokenizer) == whole

    def test_all_is_everything_that_can_be_predicted(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        text = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in TURNS)
        cache = opened([{"messages": TURNS}], tokenizer, tmp_path, "all")
        assert marked(cache, tokenizer) == text.replace("<|system|>", "<|system|>⟦") + "⟧"

    def test_messages_may_say_themselves(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        turns = [dict(turn) for turn in TURNS]
        turns[1]["train"] = True
        turns[2]["weight"] = 0
        cache = opened([{"messages": turns}], tokenizer, tmp_path / "a", "flag")
        assert marked(cache, tokenizer) == (
            "<|system|>Be brief.<|end|><|user|>⟦Hello.<|end|>⟧<|assistant|>Hi<|end|><|user|>And now?<|end|>"
            "<|assistant|>⟦Bye<|end|>⟧"
        )
        turns[2]["weight"] = 0.5
        with pytest.raises(DataError, match="message 2: train is true or false"):
            opened([{"messages": turns}], tokenizer, tmp_path / "b", "flag")
        with pytest.raises(DataError, match="no message is flagged"):
            opened([{"messages": [TURNS[1], TURNS[2] | {"train": False}]}], tokenizer, tmp_path / "c", "flag")

    def test_a_row_may_be_unmasked(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """All but the system message; a row beside it keeps its mask."""
        rows = [
            {"messages": TURNS, "unmask": True},
            {"messages": TURNS, "unmask": False},
            {"messages": TURNS[1:3], "unmask": True},
        ]
        cache = opened(rows, tokenizer, tmp_path)
        assert marked(cache, tokenizer, 0) == (
            "<|system|>Be brief.<|end|>⟦<|user|>Hello.<|end|><|assistant|>Hi<|end|><|user|>And now?<|end|>"
            "<|assistant|>Bye<|end|>⟧"
        )
        assert marked(cache, tokenizer, 1) == TestShapes.WANTED
        assert marked(cache, tokenizer, 2) == "<|user|>⟦Hello.<|end|><|assistant|>Hi<|end|>⟧"

    @pytest.mark.parametrize("train_on", ["asistant", "lasst", "", "assistant,usr", "last,assistant", "all,flag"])
    def test_a_misspelt_choice_is_refused(self, train_on: str) -> None:
        with pytest.raises(UsageError, match="names no role or choice|stand alone"):
            check_train_on(train_on)
        for known in ("assistant", "last", "all", "flag", "critic", "assistant,tool"):
            check_train_on(known)

    def test_each_choice_is_a_cache_of_its_own(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        keys = {opened([{"messages": TURNS}], tokenizer, tmp_path, t).key for t in ("assistant", "last", "all", "user")}
        assert len(keys) == 4

    def test_a_prompt_of_text_may_be_unmasked_or_all_trained(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        row = {"prompt": "One two", "completion": " three<|endoftext|>"}
        first, rest = tokenizer.hf.decode(tokenizer.encode("One two")[:1]), "One two three<|endoftext|>"
        whole = f"{first}⟦{rest.removeprefix(first)}⟧"
        # An end of text that is there already is not written twice.
        assert marked(opened([row], tokenizer, tmp_path / "a"), tokenizer) == "One two⟦ three<|endoftext|>⟧"
        assert marked(opened([row], tokenizer, tmp_path / "b", "all"), tokenizer) == whole
        assert marked(opened([row | {"unmask": True}], tokenizer, tmp_path / "c"), tokenizer) == whole
        lists = {"prompt": TURNS[:4], "completion": TURNS[4:], "unmask": True}
        assert marked(opened([lists], tokenizer, tmp_path / "d"), tokenizer).count("⟦<|user|>Hello.") == 1

    def test_a_long_conversation_is_dropped_cut_or_split(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        whole = opened([{"messages": TURNS}], tokenizer, tmp_path / "whole")
        size, rows = int(whole.lengths[0]), [{"messages": TURNS}, {"messages": TURNS[1:3]}]
        limit = size - 2
        dropped = opened(rows, tokenizer, tmp_path / "d", limit=limit)
        assert (len(dropped), dropped.counts.dropped_long, dropped.counts.split_long) == (1, 1, 0)
        cut = opened(rows, tokenizer, tmp_path / "t", limit=limit, on_long="truncate")
        assert cut.sequence(0).ids.tolist() == whole.ids[:limit].tolist()
        assert (cut.counts.truncated_long, cut.counts.cropped_tokens) == (1, 2)
        parts = opened(rows, tokenizer, tmp_path / "s", limit=10, on_long="split")
        pieces = [parts.sequence(n) for n in range(len(parts)) if parts.origin(n).endswith(":1")]
        lost = parts.counts.cropped_tokens
        assert parts.counts.split_long == 1
        assert sum(len(piece.ids) for piece in pieces) + lost == size
        assert all(len(piece.ids) <= 10 and piece.loss_tokens > 0 for piece in pieces)
        assert parts.counts.dropped_pieces == -(-size // 10) - len(pieces)
        assert parts.counts.dropped == parts.counts.dropped_untrained == 0
        assert parts.counts.trained_tokens == sum(parts.loss_tokens)

    def test_a_split_text_loses_nothing(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        whole = opened([{"text": "some words " * 30}], tokenizer, tmp_path / "a")
        split = opened([{"text": "some words " * 30}], tokenizer, tmp_path / "b", limit=16, on_long="split")
        assert split.ids.tolist() == whole.ids.tolist()
        assert split.lengths.max() == 16
        assert split.counts.cropped_tokens == split.counts.dropped == 0


class TestTemplates:
    def test_an_unstable_template_is_refused_with_the_first_token_that_differs(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """The last answer shows its thoughts, earlier ones do not."""
        source = (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}(hm){% endif %}"
            "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        (tmp_path / "t.jinja").write_text(source)
        thinking = load_tokenizer(Path(tokenizer.source), str(tmp_path / "t.jinja"))
        with pytest.raises(DataError) as caught:
            opened([{"messages": TURNS}], thinking, tmp_path)
        message = str(caught.value)
        assert "rows.jsonl:1: the chat template renders message 2 differently once more follows" in message
        shorter = thinking.encode("<|system|>Be brief.<|end|><|user|>Hello.<|end|><|assistant|>")
        found = thinking.hf.convert_tokens_to_ids("(")
        assert f"the first token that differs is number {len(shorter)}: 'H'" in message
        assert f"where alone it is '(' (id {found})" in message
        assert "data.train_on last" in message
        cache = opened([{"messages": TURNS}], thinking, tmp_path / "last", "last")
        assert marked(cache, thinking).endswith(
            "<|assistant|>Hi<|end|><|user|>And now?<|end|><|assistant|>⟦(hm)Bye<|end|>⟧"
        )

    def test_a_template_without_an_end_is_stopped(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torchstone.data import template

        monkeypatch.setattr(template, "SECONDS", 0.3)
        loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        began = time.monotonic()
        with pytest.raises(DataError, match=r"did not end within 0.3 s"):
            ChatTemplate(loops, {}).prompt(TURNS)
        assert time.monotonic() - began < 60
        (tmp_path / "loops.jinja").write_text(loops)
        endless = load_tokenizer(Path(tokenizer.source), str(tmp_path / "loops.jinja"))
        with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template did not end"):
            opened([{"messages": TURNS}], endless, tmp_path)
        assert ChatTemplate("fine", {}).prompt(TURNS) == "fine"

    @pytest.mark.parametrize("source", ["{{ 'x' * 99999999 }}", "{{ [1] * 99999999 }}", "{{ 9 ** 99999999 }}"])
    def test_a_template_cannot_fill_the_memory_by_multiplying(self, source: str) -> None:
        with pytest.raises(DataError, match="would make something of"):
            ChatTemplate(source, {}).prompt(TURNS)
        assert ChatTemplate("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 1.5 }}", {}).prompt(TURNS) == "---10244.5"

    @pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
    def test_built_in_templates_are_transformers_own_rendering_and_prefix_stable(
        self, tokenizer: Tokenizer, name: str
    ) -> None:
        source, special = named_template(name), {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        template = ChatTemplate(source, special)
        rendered = template.conversation(TURNS)
        hf = load_tokenizer(Path(tokenizer.source)).hf
        hf.bos_token = "<|endoftext|>"
        assert rendered.text == hf.apply_chat_template(TURNS, chat_template=source, tokenize=False)
        prompt = hf.apply_chat_template(TURNS[:4], chat_template=source, tokenize=False, add_generation_prompt=True)
        assert template.prompt(TURNS[:4]) == prompt
        answers = [rendered.text[start:end] for start, end in rendered.trained]
        assert [answer[: len(said)] for answer, said in zip(answers, ("Hi", "Bye"), strict=True)] == ["Hi", "Bye"]
        assert all(0 < len(answer) - len(said) < 20 for answer, said in zip(answers, ("Hi", "Bye"), strict=True))

    def test_a_template_is_named_by_file_or_name(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jinja").write_text("mine")
        assert named_template(str(tmp_path / "mine.jinja")) == "mine"
        with pytest.raises(UsageError, match="neither a file nor a built-in template.*\n.*chatml"):
            named_template("chatlm")
        (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="is not UTF-8"):
            named_template(str(tmp_path / "binary.jinja"))

    def test_marks_that_are_not_one_token_are_known(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.broken_marks == []
        assert load_tokenizer(Path(tokenizer.source), "chatml").broken_marks == ["<|im_start|>", "<|im_end|>"]

    def test_a_chosen_template_is_trained_with_and_saved_with_the_model(
        self, settings: Any, chat_file: Path, tmp_path: Path
    ) -> None:
        from torchstone import api
        from torchstone.config import load_config

        overrides = settings(
            data__path=str(chat_file), data__chat_template="chatml", data__context_length=64, training__max_steps=1
        )
        outcome = api.train(load_config(overrides=overrides))
        assert outcome.checkpoint is not None
        saved = load_tokenizer(outcome.checkpoint)
        assert saved.hf.chat_template == named_template("chatml")
        assert "<|im_start|>assistant" in saved.template.prompt([{"role": "user", "content": "a"}])


def test_a_tool_call_is_no_answer_to_compare(llama_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It is trained on, but has no words that could be right or wrong."""
    from torchstone import api

    folder = tmp_path / "model"
    shutil.copytree(llama_dir, folder)
    load_tokenizer(Path(tokenizer.source), "chatml").save(folder)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"messages": [TURNS[1], call]}, {"messages": TURNS[1:3]}]
    path = write_rows(tmp_path / "calls.jsonl", rows)
    found = api.evaluate(str(folder), str(path), context_length=256, device="cpu", cache_dir=str(tmp_path), quiet=True)
    assert (found["samples"], found["questions"]) == (2, 1)
