"""Training a tokenizer: every text decodes exactly, the same data gives the same file, chat templates work."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from caches import build_cache
from tiny import write_rows
from torchstone.data.encode import TokenSequence
from torchstone.data.inspect import inspect_sources, print_report
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.data.train_tokenizer import PATTERNS, check_target, save_tokenizer, train_tokenizer
from torchstone.demo.corpus import corpus_rows
from torchstone.errors import DataError, UsageError

BOS = "<|begin_of_text|>"
MIXED = "Straße, naïve café: 日本語の文章 한국어 слово 12345 don't I'LL\r\n\t x  \n\n"
# Characters that together have every byte of UTF-8.
EVERY_BYTE = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 61), *range(0xE000, 0x110000, 4093), 0x10FFFF]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [*corpus_rows(400), *({"text": MIXED * 3} for _ in range(5))]
    return write_rows(tmp_path_factory.mktemp("corpus") / "text.jsonl", rows)


@pytest.fixture(scope="module", params=PATTERNS)
def trained(request: pytest.FixtureRequest, corpus: Path) -> Any:
    return train_tokenizer([str(corpus)], 600, pattern=request.param)[0]


class TestTexts:
    def test_every_text_decodes_exactly(self, trained: Any) -> None:
        assert set(EVERY_BYTE.encode()) == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
        rng = random.Random(5)
        texts = [EVERY_BYTE, MIXED, "👩‍🚀🏽 emoji 😀", " ", "\n", "<|endoftext|> and <|pad|>", "a" * 3000]
        texts += ["".join(rng.choices(EVERY_BYTE, k=50)) for _ in range(100)]
        for text in texts:
            ids = trained.backend_tokenizer.encode(text, add_special_tokens=False).ids
            assert trained.decode(ids, skip_special_tokens=False) == text
            assert max(ids) < 600

    def test_every_byte_is_a_token_and_the_size_is_exact(self, trained: Any) -> None:
        from tokenizers import pre_tokenizers

        vocabulary = trained.get_vocab()
        assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
        assert sorted(vocabulary.values()) == list(range(600))
        assert (trained.eos_token, trained.pad_token, trained.bos_token) == (
            "<|endoftext|>",
            "<|pad|>",
            "<|begin_of_text|>",
        )

    def test_the_report_has_the_measured_figures(self, corpus: Path) -> None:
        hf, report = train_tokenizer([str(corpus)], 600)
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        size = sum(len(text.encode()) for text in texts)
        tokens = sum(len(hf.backend_tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        assert report["measured"] == {
            "vocab_size": 600,
            "special_tokens": {"<|endoftext|>": 0, "<|pad|>": 1, "<|begin_of_text|>": 2},
            "texts": 405,
            "bytes": size,
            "bytes_per_token": size / tokens,
            "sample_texts": 405,
            "sample_bytes": size,
            "sample_tokens": tokens,
        }
        assert size / tokens > 2.5
        assert (len(report["notes"]), report["bad_rows"]) == (1, 0)


class TestFolder:
    def test_the_same_data_gives_the_same_file(self, corpus: Path, tmp_path: Path) -> None:
        for name in ("one", "two"):
            save_tokenizer(train_tokenizer([str(corpus)], 500, chat_template="chatml")[0], tmp_path / name)
        files = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
        for name in files:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    def test_transformers_loads_it_again(self, corpus: Path, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        hf, _ = train_tokenizer([str(corpus)], 500, chat_template="llama3", special=["<|code|>"])
        save_tokenizer(hf, tmp_path / "new")
        again = AutoTokenizer.from_pretrained(str(tmp_path / "new"), local_files_only=True)
        assert again.get_vocab() == hf.get_vocab()
        assert again.chat_template == hf.chat_template
        assert (again.eos_token_id, again.pad_token_id, again.bos_token) == (0, 1, "<|begin_of_text|>")
        assert again.all_special_ids == hf.all_special_ids == [2, 0, 1, 3, 4, 5, 6]
        for text in (MIXED, EVERY_BYTE, "<|code|> x"):
            assert again(text)["input_ids"] == [2, *hf.backend_tokenizer.encode(text, add_special_tokens=False).ids]

    def test_existing_files_are_not_overwritten(self, corpus: Path, tmp_path: Path) -> None:
        hf, _ = train_tokenizer([str(corpus)], 300)
        (tmp_path / "empty").mkdir()
        save_tokenizer(hf, tmp_path / "empty")
        before = {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
        (tmp_path / "file").write_text("mine")
        for name in ("empty", "file"):
            with pytest.raises(UsageError, match="exists and is not an empty folder"):
                save_tokenizer(hf, tmp_path / name)
            with pytest.raises(UsageError, match="exists and is not an empty folder"):
                check_target(tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before
        assert (tmp_path / "file").read_text() == "mine"


class TestBos:
    ROWS: ClassVar = {
        "text": {"text": "Once upon"},
        "document": {"document": "Once upon"},
        "prompt": {"prompt": "Once", "completion": " upon"},
        "messages": {"messages": [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " upon"}]},
    }

    def encode(self, tokenizer: Tokenizer, folder: Path, row_format: str) -> TokenSequence:
        path = write_rows(folder / f"{row_format}.jsonl", [self.ROWS[row_format]])
        return build_cache(path, tokenizer).sequence(0)

    @pytest.mark.parametrize("template", ["chatml", "llama3"])
    def test_a_text_begins_with_one_bos_and_its_first_token_is_learned(
        self, corpus: Path, tmp_path: Path, template: str
    ) -> None:
        hf, report = train_tokenizer([str(corpus)], 500, chat_template=template)
        save_tokenizer(hf, tmp_path / "new")
        tokenizer = load_tokenizer(tmp_path / "new")
        bos, ids = tokenizer.hf.bos_token_id, tokenizer.encode("Once upon")
        assert (report["bos_token"], report["notes"][0].split(" (")[0]) == (BOS, f"every text begins with {BOS}")
        for row_format in ("text", "document"):
            sequence = self.encode(tokenizer, tmp_path, row_format)
            assert sequence.ids.tolist() == sequence.labels.tolist() == [bos, *ids, tokenizer.eos_id]
            assert sequence.loss_tokens == len(ids) + 1
        assert self.encode(tokenizer, tmp_path, "prompt").ids.tolist() == [bos, *ids, tokenizer.eos_id]
        # A template decides for itself.
        chat = self.encode(tokenizer, tmp_path, "messages").ids.tolist()
        assert chat.count(bos) == (1 if template == "llama3" else 0)
        assert tokenizer.hf("")["input_ids"] == [bos]

    def test_without_bos_the_tokenizer_is_as_it_was(self, corpus: Path, tmp_path: Path) -> None:
        hf, report = train_tokenizer([str(corpus)], 500, chat_template="chatml", bos=False)
        assert (hf.bos_token, report["bos_token"]) == (None, None)
        assert hf(MIXED)["input_ids"] == hf.backend_tokenizer.encode(MIXED, add_special_tokens=False).ids
        assert list(report["measured"]["special_tokens"]) == ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
        assert "begin without a BOS token" in report["notes"][0]
        save_tokenizer(hf, tmp_path / "new")
        tokenizer = load_tokenizer(tmp_path / "new")
        ids = [*tokenizer.encode("Once upon"), tokenizer.eos_id]
        assert self.encode(tokenizer, tmp_path, "text").ids.tolist() == ids
        # A template that writes a BOS has one, but texts begin without it.
        hf, _ = train_tokenizer([str(corpus)], 500, chat_template="llama3", bos=False)
        assert hf.bos_token == BOS
        assert hf("Once upon")["input_ids"][0] != hf.bos_token_id


class TestConversations:
    @pytest.mark.parametrize(
        ("template", "special", "expected"),
        [
            ("chatml", ["<|im_start|>", "<|im_end|>"],
             "<|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n⟦Hello<|im_end|>↵⟧\n"),
            ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
             "<|begin_of_text|><|start_header_id|>user<|end_header_id|>↵\n↵\nHi<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>↵\n↵\n⟦Hello<|eot_id|>⟧\n"),
            ("plain", [], "User: Hi↵\nAssistant:⟦ Hello<|endoftext|>↵⟧\n"),
            ("alpaca", [], "### Instruction:↵\nHi↵\n↵\n### Response:↵\n⟦Hello<|endoftext|>↵\n↵⟧\n"),
        ],
    )  # fmt: skip
    def test_built_in_templates_work(
        self, corpus: Path, tmp_path: Path, template: str, special: list[str], expected: str
    ) -> None:
        hf, report = train_tokenizer([str(corpus)], 600, chat_template=template)
        assert list(report["measured"]["special_tokens"]) == ["<|endoftext|>", "<|pad|>", BOS, *special]
        assert list(report["measured"]["special_tokens"].values()) == list(range(3 + len(special)))
        save_tokenizer(hf, tmp_path / "new")
        tokenizer = load_tokenizer(tmp_path / "new")
        for token, number in report["measured"]["special_tokens"].items():
            assert tokenizer.encode(token) == [number]
            assert number in tokenizer.hf.all_special_ids
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        cache = build_cache(write_rows(tmp_path / "chat.jsonl", [{"messages": messages}]), tokenizer, max_length=64)
        output: list[str] = []
        print_report(inspect_sources([cache], tokenizer, 64, 1), output.append, use_color=False)
        assert f"trained\n{expected}\n" in "".join(output)
        assert tokenizer.stop_ids == sorted({0, *(report["measured"]["special_tokens"][t] for t in special[-1:])})
        ids = tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == cache.sequence(0).ids.tolist()

    def test_tokens_that_a_template_renders_are_special(self, corpus: Path, tmp_path: Path) -> None:
        path = tmp_path / "own.jinja"
        path.write_text(
            "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        )
        _, report = train_tokenizer([str(corpus)], 300, chat_template=str(path), special=["<|x|>", "<|end|>"])
        assert list(report["measured"]["special_tokens"]) == [
            "<|endoftext|>", "<|pad|>", BOS, "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|x|>",
        ]  # fmt: skip


class TestSources:
    @pytest.mark.parametrize(
        ("row", "texts"),
        [
            ({"text": "ab cd"}, 1),
            ({"document": "ab cd"}, 1),
            ({"messages": [{"role": "user", "content": "ab"},
                           {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]},
                           {"role": "tool", "content": " cd"}]}, 2),
            ({"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": " cd"}]}, 2),
            ({"instruction": "ab", "output": " cd"}, 2),
            ({"prompt": "ab", "completion": " cd"}, 1),
        ],
        ids=["text", "document", "messages", "sharegpt", "alpaca", "prompt"],
    )  # fmt: skip
    def test_every_row_format_has_texts(self, tmp_path: Path, row: dict[str, Any], texts: int) -> None:
        hf, report = train_tokenizer([str(write_rows(tmp_path / "rows.jsonl", [row] * 4))], 300)
        assert (report["measured"]["bytes"], report["measured"]["texts"]) == (4 * 5, 4 * texts)
        # Three pairs are merged: a and b, c and d, and the space with cd.
        assert {"ab", "cd", "Ġcd"} <= set(hf.get_vocab())
        assert report["measured"]["vocab_size"] == 256 + 3 + 3
        assert report["asked_vocab_size"] == 300
        assert "the vocabulary has 262 tokens, not 300" in report["notes"][1]

    def test_several_sources_are_read_in_turn(self, tmp_path: Path) -> None:
        first = write_rows(tmp_path / "a.jsonl", [{"text": "aa " * 100}] * 50)
        second = write_rows(tmp_path / "b.jsonl", [{"text": "bb " * 100}] * 3)
        hf, report = train_tokenizer([str(first), str(second)], 300, max_bytes=2500)
        assert (report["measured"]["texts"], report["measured"]["bytes"]) == (9, 2700)
        assert {"aa", "bb"} <= set(hf.get_vocab())
        assert train_tokenizer([str(first), str(second)], 300)[1]["measured"]["texts"] == 53

    def test_token_ids_are_refused(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2]}])
        with pytest.raises(UsageError, match="ids.jsonl: its rows are token ids, not text"):
            train_tokenizer([str(path)], 300)

    def test_a_bad_row_stops_or_is_counted(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"text": "ab"}, {"text": 3}, {"text": "cd"}])
        with path.open("a") as file:
            file.write("{\n")
        with pytest.raises(DataError, match=r"t.jsonl:2: text is not a string\n(.*\n)*.*--skip-bad-rows"):
            train_tokenizer([str(path)], 300)
        _, report = train_tokenizer([str(path)], 300, stop_on_bad_row=False)
        assert (report["bad_rows"], report["measured"]["texts"]) == (2, 2)
        assert [(bad["line"], bad["file"]) for bad in report["first_bad_rows"]] == [(2, str(path)), (4, str(path))]

    def test_any_error_about_a_row_can_be_skipped(self, tmp_path: Path) -> None:
        user = {"role": "user", "content": "ab"}
        rows = [{"messages": [user]}, {"messages": [user], "tools": "[" * 100_000}, {"\ud800": 1}]
        path = write_rows(tmp_path / "t.jsonl", rows)
        _, report = train_tokenizer([str(path)], 300, stop_on_bad_row=False)
        assert (report["bad_rows"], report["measured"]["texts"]) == (2, 1)
        assert [bad["reason"].split(":")[0] for bad in report["first_bad_rows"]] == [
            "tools is a string that is not JSON",
            "the format of this data is 'messages', but this row has no messages; its keys are \\ud800",
        ]

    def test_data_without_text_is_refused(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"messages": [{"role": "user", "content": ""}]}])
        with pytest.raises(DataError, match="t.jsonl: there is no text"):
            train_tokenizer([str(path)], 300)


class TestSizes:
    def test_the_smallest_vocabulary_has_bytes_and_special_tokens(self, corpus: Path) -> None:
        with pytest.raises(UsageError, match="the minimum is 261: 256 bytes and 5 special tokens"):
            train_tokenizer([str(corpus)], 260, chat_template="chatml")
        hf, report = train_tokenizer([str(corpus)], 261, chat_template="chatml")
        assert len(hf) == report["measured"]["vocab_size"] == 261
        ids = hf.backend_tokenizer.encode(MIXED, add_special_tokens=False).ids
        assert len(ids) == len(MIXED.encode())

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"special": [" "]}, "' ' cannot be a special token"),
            ({"special": ["a"]}, "'a' cannot be a special token"),
            ({"pattern": "gpt5"}, "unknown pattern 'gpt5'"),
            ({"chat_template": "nobody"}, "'nobody' is neither a file nor a built-in template"),
        ],
    )
    def test_wrong_options_are_refused(self, corpus: Path, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            train_tokenizer([str(corpus)], 400, **options)

    def test_the_sample_is_small_and_evenly_spaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchstone.data.train_tokenizer.SAMPLE_SIZE", 1000)
        path = write_rows(tmp_path / "t.jsonl", [{"text": f"{n:03d} {'x' * 36}"} for n in range(400)])
        measured = train_tokenizer([str(path)], 300)[1]["measured"]
        assert (measured["texts"], measured["bytes"]) == (400, 400 * 40)
        # Every 16th of 400 texts of 40 bytes.
        assert (measured["sample_texts"], measured["sample_bytes"]) == (25, 1000)
