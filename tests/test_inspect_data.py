"""What inspect-data says is what training does: marks where labels are, counts that add up, data that only prints."""

from __future__ import annotations

import json
import unicodedata
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tiny import write_rows
from torchstone.data.cache import BuildSettings, TokenCache, find_source, open_cache
from torchstone.data.inspect import html_page, inspect_sources, printable, show_console
from torchstone.data.tokenize import Tokenizer
from torchstone.observe.console import Console

HOSTILE = "[red]a[/red]\x1b[2J\x1b]0;t\x07\x9b\u202e\r<script>alert('x')</script>&amp;⟦b⟧"


def opened(path: Path, tokenizer: Tokenizer, limit: int | None = 64, on_long: str = "drop") -> TokenCache:
    source = find_source(str(path), stop_on_bad_row=False)
    recipe = tokenizer.recipe(source.shape, limit, on_long, "assistant")
    settings = BuildSettings(path.parent / "cache", workers=0, stop_on_bad_row=False)
    return open_cache(source, recipe, settings, Console("quiet"))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def console_text(found: dict[str, Any], colour: bool = False) -> str:
    written: list[str] = []
    show_console(found, written.append, colour)
    return "".join(written)


def tokens_file(path: Path, lengths: list[int]) -> Path:
    return write_rows(path, [{"input_ids": [7] * length} for length in lengths])


@pytest.fixture
def hostile(tmp_path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    path = write_rows(tmp_path / "hostile.jsonl", [chat(HOSTILE, HOSTILE), chat("a", HOSTILE[::-1])])
    with path.open("a") as file:
        file.write('{"messages": [{"role": "\\u001b[2J<b>", "content": 1}]}\n')
    return inspect_sources([opened(path, tokenizer, limit=None, on_long="")], tokenizer, 512, rows=5)


class TestFigures:
    def test_they_are_those_of_the_cache(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [chat("Hi", "Hello there"), chat("x " * 90, "y"), {"messages": []}, chat("Who?", "Me"), {"text": "a"}]
        cache = opened(write_rows(tmp_path / "chat.jsonl", rows), tokenizer)
        found = inspect_sources([cache], tokenizer, 64, rows=9)
        (source,) = found["sources"]
        lengths = [len(cache.sequence(n).ids) for n in range(2)]
        trained = [cache.sequence(n).loss_tokens for n in range(2)]
        assert {name: source[name] for name in ("shape", "files", "rows", "sequences", "tokens", "trained_tokens")} == {
            "shape": "messages", "files": 1, "rows": 5, "sequences": 2, "tokens": sum(lengths),
            "trained_tokens": sum(trained),
        }  # fmt: skip
        assert source["trained_share"] == sum(trained) / sum(lengths)
        assert (source["bad_rows"], source["dropped_long"], source["truncated_long"]) == (2, 1, 0)
        assert [(bad["file"], bad["line"]) for bad in source["first_bad_rows"]] == [
            (str(tmp_path / "chat.jsonl"), 3),
            (str(tmp_path / "chat.jsonl"), 5),
        ]
        assert [entry["count"] for entry in source["dropped"]] == [2, 1]
        assert [example.split(": ")[0] for example in source["dropped"][0]["examples"]] == [
            f"{tmp_path}/chat.jsonl:3",
            f"{tmp_path}/chat.jsonl:5",
        ]
        assert source["dropped"][1]["examples"] == cache.counts.examples
        assert "data.context_length 64" in source["dropped"][1]["why"]
        assert "data.on_long_row truncate" in source["dropped"][1]["why"]
        assert found["total"]["tokens"] == source["tokens"]
        assert json.loads(json.dumps(found)) == found

    def test_lengths_and_their_histogram(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        lengths = [2, 3, 10, 11, 20, 21, 95, 101]
        found = inspect_sources(
            [opened(tokens_file(tmp_path / "t.jsonl", lengths), tokenizer, None, "")], tokenizer, 0, 0
        )
        (source,) = found["sources"]
        assert source["lengths"] == {
            "min": 2, "mean": sum(lengths) / 8, "median": 15.5, "p90": pytest.approx(95 + 0.3 * 6),
            "p99": pytest.approx(95 + 0.93 * 6), "max": 101,
        }  # fmt: skip
        assert [(e["low"], e["high"], e["count"]) for e in source["histogram"]] == [
            (1, 10, 3), (11, 20, 2), (21, 30, 1), (31, 40, 0), (41, 50, 0), (51, 60, 0), (61, 70, 0), (71, 80, 0),
            (81, 90, 0), (91, 100, 1), (101, 110, 1),
        ]  # fmt: skip

    @pytest.mark.parametrize("longest", [1, 2, 12, 13, 100, 4096, 5000])
    def test_every_sequence_is_in_one_bin(self, tokenizer: Tokenizer, tmp_path: Path, longest: int) -> None:
        lengths = [2, *(max(2, longest * n // 7) for n in range(1, 8)), 2, 3]
        cache = opened(tokens_file(tmp_path / "t.jsonl", lengths), tokenizer, None, "")
        (source,) = inspect_sources([cache], tokenizer, 0, 0)["sources"]
        histogram = source["histogram"]
        assert sum(entry["count"] for entry in histogram) == len(lengths) == source["sequences"]
        assert [entry["low"] for entry in histogram] == [1, *(entry["high"] + 1 for entry in histogram[:-1])]
        assert histogram[-1]["low"] <= max(lengths) <= histogram[-1]["high"]
        assert len(histogram) <= 15

    def test_a_long_tail_does_not_hide_the_rest(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = opened(tokens_file(tmp_path / "t.jsonl", [30, 40, 60, 150, 9000]), tokenizer, None, "")
        (source,) = inspect_sources([cache], tokenizer, 0, 0)["sources"]
        counts = {(entry["low"], entry["high"]): entry["count"] for entry in source["histogram"] if entry["count"]}
        assert counts == {(1, 50): 2, (51, 100): 1, (101, 200): 1, (5001, 10000): 1}


class TestExamples:
    def test_runs_add_up_to_what_is_trained(self, tokenizer: Tokenizer, chat_file: Path, text_file: Path) -> None:
        caches = [opened(chat_file, tokenizer), opened(text_file, tokenizer, None, "")]
        for cache, source in zip(caches, inspect_sources(caches, tokenizer, 64, 1000)["sources"], strict=True):
            assert len(source["examples"]) == len(cache)
            for index, example in enumerate(source["examples"]):
                runs, ids = example["runs"], cache.sequence(index).ids.tolist()
                assert sum(run["tokens"] for run in runs) == len(ids) == example["tokens"]
                trained = sum(run["tokens"] for run in runs if run["trained"])
                assert trained == example["trained"] == cache.loss_tokens[index] > 0
                assert not runs[0]["trained"]
                assert all(a["trained"] != b["trained"] for a, b in pairwise(runs))
                assert "".join(run["text"] for run in runs) == tokenizer.hf.decode(ids)
                assert [i for run in runs for piece in run["pieces"] for i in piece["ids"]] == ids
                assert example["origin"] == cache.origin(index)

    @pytest.mark.parametrize(("rows", "lines"), [(0, []), (1, [1]), (2, [1, 30]), (4, [1, 10, 20, 30])])
    def test_they_are_spread_over_the_source(
        self, tokenizer: Tokenizer, chat_file: Path, rows: int, lines: list[int]
    ) -> None:
        (source,) = inspect_sources([opened(chat_file, tokenizer)], tokenizer, 64, rows)["sources"]
        assert [example["origin"] for example in source["examples"]] == [f"{chat_file}:{line}" for line in lines]

    def test_a_character_of_several_tokens_is_whole(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        euro = tokenizer.encode("€")
        assert len(euro) == 3
        cache = opened(write_rows(tmp_path / "c.jsonl", [chat("a€b", "\ufffd😀\ufffdé")]), tokenizer)
        (example,) = inspect_sources([cache], tokenizer, 64, 1)["sources"][0]["examples"]
        assert [run["text"] for run in example["runs"]] == ["<|user|>a€b<|end|><|assistant|>", "\ufffd😀\ufffdé<|end|>"]
        assert {"ids": euro, "text": "€"} in example["runs"][0]["pieces"]

    def test_a_character_across_the_mask_is_broken_and_not_lost(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("a€b")
        rows = [
            {"input_ids": ids, "labels": [-100] * 2 + ids[2:]},
            {"input_ids": tokenizer.encode("€"), "labels": ids[:3]},
        ]
        cache = opened(write_rows(tmp_path / "t.jsonl", rows), tokenizer)
        across, first = inspect_sources([cache], tokenizer, 64, 2)["sources"][0]["examples"]
        assert [(run["text"], run["tokens"]) for run in across["runs"]] == [("a\ufffd", 2), ("\ufffd\ufffdb", 3)]
        # The first token has a label, and nothing that could predict it; other labels do not change what is shown.
        assert [(run["text"], run["trained"]) for run in first["runs"]] == [("\ufffd", False), ("\ufffd\ufffd", True)]

    def test_spaces_at_the_edge_of_a_run_stay_with_any_tokenizer(self, tmp_path: Path) -> None:
        """Decoders of the Llama 2 kind drop the space a text begins with, and write bytes as tokens of their own."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models
        from transformers import PreTrainedTokenizerFast

        names = ["<s>", "▁Hello", "▁world", "!", "<0xE2>", "<0x82>", "<0xAC>"]
        backend = Backend(models.BPE({name: n for n, name in enumerate(names)}, []))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        other = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "other")
        ids = [1, 2, 2, 3, 4, 5, 6, 2]
        rows = [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]}]
        cache = opened(write_rows(tmp_path / "t.jsonl", rows), other)
        (example,) = inspect_sources([cache], other, 64, 1)["sources"][0]["examples"]
        assert [run["text"] for run in example["runs"]] == ["Hello world", " world!€ world"]
        (cut,) = inspect_sources([cache], other, 64, 1, limit=2)["sources"][0]["examples"]
        assert [run["text"] for run in cut["runs"]] == ["Hello", "", "", " world"]

    def test_an_id_without_text_is_seen(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models
        from transformers import PreTrainedTokenizerFast

        backend = Backend(models.BPE({"a": 0, "b": 2}, []))
        backend.decoder = decoders.Fuse()
        gap = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "gap")
        cache = opened(write_rows(tmp_path / "t.jsonl", [{"input_ids": [0, 1, 2, 1]}]), gap)
        (example,) = inspect_sources([cache], gap, 64, 1)["sources"][0]["examples"]
        assert [run["text"] for run in example["runs"]] == ["a", "<id 1>b<id 1>"]

    def test_the_middle_of_a_long_one_is_left_out_and_counted(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("0123456789")
        labels = [-100] * 4 + ids[4:7] + [-100] * 3
        cache = opened(write_rows(tmp_path / "t.jsonl", [{"input_ids": ids, "labels": labels}]), tokenizer)
        found = inspect_sources([cache], tokenizer, 64, 1, limit=5)
        runs = found["sources"][0]["examples"][0]["runs"]
        assert [(run["text"], run["trained"], run["tokens"], run["left_out"]) for run in runs] == [
            ("012", False, 3, False),
            ("", False, 1, True),
            ("", True, 3, True),
            ("", False, 1, True),
            ("89", False, 2, False),
        ]
        assert "\n012\n[… 5 tokens left out, 3 of them trained …]\n89\n" in console_text(found)
        assert "[… 5 tokens left out, 3 of them trained …]" in html_page(found)


class TestConsole:
    def test_only_the_answer_and_its_end_are_marked(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = tmp_path / "chat.jsonl"
        turns = [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi\nyou"},
            {"role": "assistant", "content": "Yes\n"}, {"role": "user", "content": "7"},
            {"role": "assistant", "content": "8"},
        ]  # fmt: skip
        cache = opened(write_rows(path, [{"messages": turns}]), tokenizer)
        found = inspect_sources([cache], tokenizer, 64, 1)
        assert console_text(found) == (
            f"{path}: messages, 1 file\n\n"
            f"example 1, {path}:1: 27 tokens, 6 trained\n"
            "<|system|>Be kind.<|end|><|user|>Hi↵\nyou<|end|><|assistant|>⟦Yes↵\n<|end|>⟧"
            "<|user|>7<|end|><|assistant|>⟦8<|end|>⟧\n\n"
            "  rows             1\n  sequences        1\n  tokens          27\n  trained tokens   6  (22.2 %)\n"
            "length in tokens: 27 shortest, 27 median, 27.0 mean, 27 at 90 %, 27 at 99 %, 27 longest\n"
            "    1-5  0\n   6-10  0\n  11-15  0\n  16-20  0\n  21-25  0\n"
            f"  26-30  1  {'█' * 30}\n\n"
        )
        coloured = console_text(found, colour=True)
        assert "\x1b[2m<|user|>7<|end|><|assistant|>\x1b[0m\x1b[1;32m8<|end|>\x1b[0m" in coloured
        assert "\x1b[1;32mYes↵\x1b[0m\n\x1b[1;32m<|end|>\x1b[0m" in coloured
        assert "⟦" not in coloured

    def test_a_mark_ends_before_the_line_break(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("a\n\nb")
        cache = opened(write_rows(tmp_path / "t.jsonl", [{"input_ids": ids, "labels": [*ids[:-1], -100]}]), tokenizer)
        assert "a⟦↵\n↵⟧\nb\n" in console_text(inspect_sources([cache], tokenizer, 64, 1))

    def test_what_was_dropped_is_said_with_examples(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [chat("Hi", "Hello"), chat("x " * 90, "y"), {"messages": []}]
        cache = opened(write_rows(tmp_path / "chat.jsonl", rows), tokenizer)
        text = console_text(inspect_sources([cache], tokenizer, 64, 1))
        assert f"    such as {tmp_path}/chat.jsonl:3: messages is empty or not a list\n" in text
        assert f"    such as {cache.counts.examples[0]}\n" in text
        assert "dropped 1: rows longer than data.context_length 64." in text

    def test_what_was_cut_is_said(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "chat.jsonl", [chat("Hi", "Hello " * 40), chat("x " * 90, "y")])
        cache = opened(path, tokenizer, 64, "truncate")
        (source,) = inspect_sources([cache], tokenizer, 64, 1)["sources"]
        assert [(entry["count"], entry["examples"]) for entry in source["notes"]] == [(1, cache.counts.examples)]
        assert f"which loses {source['cropped_tokens']} tokens" in source["notes"][0]["why"]
        assert [entry["count"] for entry in source["dropped"]] == [1] == [source["dropped_untrained"]]

    @pytest.mark.parametrize("colour", [False, True])
    def test_data_cannot_steer_the_terminal(self, hostile: dict[str, Any], colour: bool) -> None:
        text = console_text(hostile, colour)
        for code in ("\x1b[1;32m", "\x1b[2m", "\x1b[0m"):
            text = text.replace(code, "")
        steering = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}
        assert steering == {"\n"}
        assert "[red]a[/red]␛[2J␛]0;t␇\\x9b\\u202e␍<script>" in text
        # The marks of the console are told from the same characters in the data.
        assert text.count("⟦") == text.count("⟧") == (0 if colour else 2)

    def test_emoji_and_writing_are_left_as_they_are(self) -> None:
        plain = "👨‍👩‍👧 日本語 نص می‌خواهم [bold]"
        assert printable(plain) == plain
        assert printable("a\tb\n\x7f\u2028\ufeff") == "a→\tb↵\n␡\\u2028\\ufeff"


class Page(HTMLParser):
    """The tags of a page, its text, and the text between <mark> and </mark>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.titles: list[str] = []
        self.text = ""
        self.marked: list[str] = []
        self._in_mark = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value or "" for name, value in attrs if name == "title"]
        if tag == "mark":
            self._in_mark = True
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_mark = self._in_mark and tag != "mark"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_mark:
            self.marked[-1] += data


class TestPage:
    def test_data_is_text_and_never_markup(self, hostile: dict[str, Any]) -> None:
        page = Page(html_page(hostile))
        assert page.tags <= {
            "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "ul", "li", "table", "tr", "td",
            "div", "pre", "mark", "span",
        }  # fmt: skip
        assert page.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class", "style", "title"}
        assert page.text.count("<script>alert('x')</script>&amp;") == 2
        assert "\x1b" not in html_page(hostile)
        assert "␛[2J<b>" in page.text

    def test_it_shows_what_the_console_shows(self, tokenizer: Tokenizer, chat_file: Path) -> None:
        found = inspect_sources([opened(chat_file, tokenizer)], tokenizer, 64, 3)
        page = Page(html_page(found))
        (source,) = found["sources"]
        assert page.marked[1:] == [r["text"] for e in source["examples"] for r in e["runs"] if r["trained"]]
        ids = [i for e in source["examples"] for r in e["runs"] for p in r["pieces"] for i in p["ids"]]
        assert [int(title.split(":")[0].split()[1]) for title in page.titles] == ids
        assert f"{source['tokens']:,}" in page.text
        assert "http://" not in html_page(found)
        assert "https://" not in html_page(found)
        assert "prefers-color-scheme: dark" in html_page(found)
