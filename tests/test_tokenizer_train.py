"""A tokenizer of one's own: any text comes back, the same data gives the same file, conversations work at once."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tiny import write_rows
from torchstone.data.cache import BuildSettings, find_source, open_cache
from torchstone.data.inspect import inspect_sources, show_console
from torchstone.data.tokenize import load_tokenizer
from torchstone.data.train_tokenizer import PATTERNS, check_target, save, train_tokenizer
from torchstone.data.words import word_encoder
from torchstone.demo.corpus import corpus_rows
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console

OTHER = "Straße, naïve café: 日本語の文章 한국어 слово 12345 don't I'LL\r\n\t x  \n\n"
# All that may stand in a text: with these characters, every byte that UTF-8 has.
EVERY_BYTE = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 61), *range(0xE000, 0x110000, 4093), 0x10FFFF]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [*corpus_rows(400), *({"text": OTHER * 3} for _ in range(5))]
    return write_rows(tmp_path_factory.mktemp("corpus") / "text.jsonl", rows)


@pytest.fixture(scope="module", params=PATTERNS)
def trained(request: pytest.FixtureRequest, corpus: Path) -> Any:
    return train_tokenizer([str(corpus)], 600, pattern=request.param)[0]


class TestTexts:
    def test_any_text_comes_back(self, trained: Any) -> None:
        assert set(EVERY_BYTE.encode()) == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
        rng = random.Random(5)
        texts = [EVERY_BYTE, OTHER, "👩‍🚀🏽 emoji 😀", " ", "\n", "<|endoftext|> and <|pad|>", "a" * 3000]
        texts += ["".join(rng.choices(EVERY_BYTE, k=50)) for _ in range(100)]
        for text in texts:
            ids = trained.backend_tokenizer.encode(text, add_special_tokens=False).ids
            assert trained.decode(ids, skip_special_tokens=False) == text
            assert max(ids) < 600

    def test_encoding_by_words_is_the_same(self, trained: Any) -> None:
        backend = trained.backend_tokenizer
        words = word_encoder(backend)
        assert words is not None
        rng = random.Random(6)
        letters = "aeinrst AB'' \n\t.,-!(0123é日本한слß"
        texts = ["".join(rng.choices(letters, k=rng.randint(1, 80))) for _ in range(1000)]
        found = words.encode_batch(texts)
        whole = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
        assert [ids for ids in found if ids is not None] == [
            ids for ids, known in zip(whole, found, strict=True) if known is not None
        ]
        assert sum(ids is not None for ids in found) > 800

    def test_every_byte_is_a_token_and_the_size_is_exact(self, trained: Any) -> None:
        from tokenizers import pre_tokenizers

        vocabulary = trained.get_vocab()
        assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
        assert sorted(vocabulary.values()) == list(range(600))
        assert (trained.eos_token, trained.pad_token, trained.bos_token) == ("<|endoftext|>", "<|pad|>", None)

    def test_words_that_were_seen_are_short(self, corpus: Path) -> None:
        hf, found = train_tokenizer([str(corpus)], 600)
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        size = sum(len(text.encode()) for text in texts)
        tokens = sum(len(hf.backend_tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        assert found["measured"] == {
            "vocab_size": 600,
            "special_tokens": {"<|endoftext|>": 0, "<|pad|>": 1},
            "texts": 405,
            "bytes": size,
            "bytes_per_token": size / tokens,
            "sample_texts": 405,
            "sample_bytes": size,
            "sample_tokens": tokens,
        }
        assert size / tokens > 2.5
        assert (found["notes"], found["bad_rows"]) == ([], 0)


class TestFolder:
    def test_the_same_data_gives_the_same_file(self, corpus: Path, tmp_path: Path) -> None:
        for name in ("one", "two"):
            save(train_tokenizer([str(corpus)], 500, chat_template="chatml")[0], tmp_path / name)
        files = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
        for name in files:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    def test_transformers_loads_it_again(self, corpus: Path, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        hf, _ = train_tokenizer([str(corpus)], 500, chat_template="llama3", special=["<|code|>"])
        save(hf, tmp_path / "new")
        again = AutoTokenizer.from_pretrained(str(tmp_path / "new"), local_files_only=True)
        assert again.get_vocab() == hf.get_vocab()
        assert again.chat_template == hf.chat_template
        assert (again.eos_token_id, again.pad_token_id, again.bos_token) == (0, 1, "<|begin_of_text|>")
        assert again.all_special_ids == hf.all_special_ids == [2, 0, 1, 3, 4, 5, 6]
        for text in (OTHER, EVERY_BYTE, "<|code|> x"):
            assert again(text)["input_ids"] == hf.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def test_nothing_is_overwritten(self, corpus: Path, tmp_path: Path) -> None:
        hf, _ = train_tokenizer([str(corpus)], 300)
        (tmp_path / "empty").mkdir()
        save(hf, tmp_path / "empty")
        before = {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
        (tmp_path / "file").write_text("mine")
        for name in ("empty", "file"):
            with pytest.raises(UsageError, match="exists and is not an empty folder"):
                save(hf, tmp_path / name)
            with pytest.raises(UsageError, match="exists and is not an empty folder"):
                check_target(tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before
        assert (tmp_path / "file").read_text() == "mine"


class TestConversations:
    @pytest.mark.parametrize(
        ("template", "special", "shown"),
        [
            ("chatml", ["<|im_start|>", "<|im_end|>"],
             "<|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n⟦Hello<|im_end|>↵⟧\n"),
            ("llama3", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
             "<|begin_of_text|><|start_header_id|>user<|end_header_id|>↵\n↵\nHi<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>↵\n↵\n⟦Hello<|eot_id|>⟧\n"),
            ("plain", [], "User: Hi↵\nAssistant:⟦ Hello<|endoftext|>↵⟧\n"),
            ("alpaca", [], "### Instruction:↵\nHi↵\n↵\n### Response:↵\n⟦Hello<|endoftext|>↵\n↵⟧\n"),
        ],
    )  # fmt: skip
    def test_they_work_at_once(
        self, corpus: Path, tmp_path: Path, template: str, special: list[str], shown: str
    ) -> None:
        hf, found = train_tokenizer([str(corpus)], 600, chat_template=template)
        assert list(found["measured"]["special_tokens"]) == ["<|endoftext|>", "<|pad|>", *special]
        assert list(found["measured"]["special_tokens"].values()) == list(range(2 + len(special)))
        save(hf, tmp_path / "new")
        tokenizer = load_tokenizer(tmp_path / "new")
        for token, number in found["measured"]["special_tokens"].items():
            assert tokenizer.encode(token) == [number]
            assert number in tokenizer.hf.all_special_ids
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        source = find_source(str(write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])))
        recipe = tokenizer.recipe(source.shape, 64, "drop")
        cache = open_cache(source, recipe, BuildSettings(tmp_path / "cache", workers=0), Console("quiet"))
        written: list[str] = []
        show_console(inspect_sources([cache], tokenizer, 64, 1), written.append, colour=False)
        assert f"trained\n{shown}\n" in "".join(written)
        assert tokenizer.stop_ids == sorted({0, *(found["measured"]["special_tokens"][t] for t in special[-1:])})
        ids = tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == cache.sequence(0).ids.tolist()

    def test_a_template_that_makes_tokens_of_roles(self, corpus: Path, tmp_path: Path) -> None:
        path = tmp_path / "own.jinja"
        path.write_text(
            "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        )
        _, found = train_tokenizer([str(corpus)], 300, chat_template=str(path), special=["<|x|>", "<|end|>"])
        assert list(found["measured"]["special_tokens"]) == [
            "<|endoftext|>", "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|x|>",
        ]  # fmt: skip


class TestSources:
    def test_every_shape_gives_its_text(self, tmp_path: Path) -> None:
        rows: dict[str, list[Any]] = {
            "text": [{"text": "ab cd"}],
            "document": [{"document": "ab cd"}],
            "messages": [
                {
                    "messages": [
                        {"role": "user", "content": "ab"},
                        {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]},
                        {"role": "tool", "content": " cd"},
                    ]
                }
            ],
            "sharegpt": [{"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": " cd"}]}],
            "alpaca": [{"instruction": "ab", "output": " cd"}],
            "prompt": [{"prompt": "ab", "completion": " cd"}],
        }
        texts = {"text": 1, "document": 1, "messages": 2, "sharegpt": 2, "alpaca": 2, "prompt": 1}
        for shape, of_shape in rows.items():
            path = write_rows(tmp_path / f"{shape}.jsonl", of_shape * 4)
            hf, found = train_tokenizer([str(path)], 300)
            assert (found["measured"]["bytes"], found["measured"]["texts"]) == (4 * 5, 4 * texts[shape])
            # Three pairs are joined: a and b, c and d, and the space with cd.
            assert {"ab", "cd", "Ġcd"} <= set(hf.get_vocab())
            assert found["measured"]["vocab_size"] == 256 + 2 + 3
            assert found["asked_vocab_size"] == 300
            assert "fills a vocabulary of 261, not of 300" in found["notes"][0]

    def test_compressed_files_are_the_same(self, corpus: Path, tmp_path: Path) -> None:
        with gzip.open(tmp_path / "text.jsonl.gz", "wb") as file:
            file.write(corpus.read_bytes())
        plain, packed = (train_tokenizer([str(p)], 400)[0] for p in (corpus, tmp_path / "text.jsonl.gz"))
        assert plain.backend_tokenizer.to_str() == packed.backend_tokenizer.to_str()

    def test_several_sources_are_read_in_turn(self, tmp_path: Path) -> None:
        first = write_rows(tmp_path / "a.jsonl", [{"text": "aa " * 100}] * 50)
        second = write_rows(tmp_path / "b.jsonl", [{"text": "bb " * 100}] * 3)
        hf, found = train_tokenizer([str(first), str(second)], 300, max_bytes=2500)
        assert (found["measured"]["texts"], found["measured"]["bytes"]) == (9, 2700)
        assert {"aa", "bb"} <= set(hf.get_vocab())
        assert train_tokenizer([str(first), str(second)], 300)[1]["measured"]["texts"] == 53

    def test_ids_are_refused(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2]}])
        with pytest.raises(UsageError, match="ids.jsonl: its rows are token ids already"):
            train_tokenizer([str(path)], 300)

    def test_a_bad_row_stops_or_is_counted(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"text": "ab"}, {"text": 3}, {"text": "cd"}])
        with path.open("a") as file:
            file.write("{\n")
        with pytest.raises(DataError, match="t.jsonl:2: text is not a string"):
            train_tokenizer([str(path)], 300)
        _, found = train_tokenizer([str(path)], 300, stop_on_bad_row=False)
        assert (found["bad_rows"], found["measured"]["texts"]) == (2, 2)
        assert [(bad["line"], bad["file"]) for bad in found["first_bad_rows"]] == [(2, str(path)), (4, str(path))]

    def test_no_text_at_all_is_said(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"messages": [{"role": "user", "content": ""}]}])
        with pytest.raises(DataError, match="t.jsonl: no text to learn from"):
            train_tokenizer([str(path)], 300)


class TestSizes:
    def test_the_least_vocabulary_has_bytes_and_special_tokens(self, corpus: Path) -> None:
        with pytest.raises(UsageError, match="the least possible is 260: 256 bytes and 4 special tokens"):
            train_tokenizer([str(corpus)], 259, chat_template="chatml")
        hf, found = train_tokenizer([str(corpus)], 260, chat_template="chatml")
        assert len(hf) == found["measured"]["vocab_size"] == 260
        ids = hf.backend_tokenizer.encode(OTHER, add_special_tokens=False).ids
        assert len(ids) == len(OTHER.encode())

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"special": [" "]}, "' ' cannot be a special token"),
            ({"special": ["a"]}, "'a' cannot be a special token"),
            ({"pattern": "gpt5"}, "no pattern 'gpt5'"),
            ({"chat_template": "nobody"}, "'nobody' is neither a file nor a built-in template"),
        ],
    )
    def test_what_cannot_be_is_refused(self, corpus: Path, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            train_tokenizer([str(corpus)], 400, **changes)

    def test_the_sample_stays_small_and_spread(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchstone.data.train_tokenizer.SAMPLE", 1000)
        path = write_rows(tmp_path / "t.jsonl", [{"text": f"{n:03d} {'x' * 36}"} for n in range(400)])
        measured = train_tokenizer([str(path)], 300)[1]["measured"]
        assert (measured["texts"], measured["bytes"]) == (400, 400 * 40)
        # Every 16th of 400 texts of 40 bytes.
        assert (measured["sample_texts"], measured["sample_bytes"]) == (25, 1000)
