"""inspect-data shows what training does: marks at the labels, counts that add up, data that cannot do harm."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

import caches
from tiny import chat_row, write_rows
from torchstone import api
from torchstone.data.cache import TokenCache
from torchstone.data.inspect import escape, html_page, inspect_sources, print_report
from torchstone.data.tokenize import Tokenizer

HOSTILE = "[red]a[/red]\x1b[2J\x1b]0;t\x07\x9b\u202e\r<script>alert('x')</script>&amp;⟦b⟧"
build_cache = partial(caches.build_cache, max_length=64, stop_on_bad_row=False)


def inspect(cache: TokenCache, tokenizer: Tokenizer, rows: int = 1, **options: Any) -> tuple[dict, dict]:
    """The report, and its only source."""
    report = inspect_sources([cache], tokenizer, 64, rows, **options)
    (source,) = report["sources"]
    return report, source


def console_text(report: dict[str, Any], use_color: bool = False) -> str:
    parts: list[str] = []
    print_report(report, parts.append, use_color)
    return "".join(parts)


def tokens_file(path: Path, lengths: list[int]) -> Path:
    return write_rows(path, [{"input_ids": [7] * length} for length in lengths])


@pytest.fixture
def hostile(tmp_path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    path = write_rows(tmp_path / "hostile.jsonl", [chat_row(HOSTILE, HOSTILE), chat_row("a", HOSTILE[::-1])])
    with path.open("a") as file:
        file.write('{"messages": [{"role": "\\u001b[2J<b>", "content": 1}]}\n')
    return inspect_sources([build_cache(path, tokenizer, max_length=None)], tokenizer, 512, rows=5)


class TestFigures:
    def test_figures_are_those_of_the_cache(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [chat_row("Hi", "Hello there"), chat_row("x " * 90, "y"), {"messages": []}]
        rows += [chat_row("Who?", "Me"), {"text": "a"}]
        cache = build_cache(write_rows(tmp_path / "chat.jsonl", rows), tokenizer)
        report, source = inspect(cache, tokenizer, rows=9)
        lengths = [len(cache.sequence(n).ids) for n in range(2)]
        trained = [cache.sequence(n).loss_tokens for n in range(2)]
        names = ("format", "files", "rows", "sequences", "tokens", "trained_tokens")
        assert {name: source[name] for name in names} == {
            "format": "messages", "files": 1, "rows": 5, "sequences": 2, "tokens": sum(lengths),
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
        assert report["total"]["tokens"] == source["tokens"]
        assert json.loads(json.dumps(report)) == report

    def test_lengths_and_their_histogram(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        lengths = [2, 3, 10, 11, 20, 21, 95, 101]
        cache = build_cache(tokens_file(tmp_path / "t.jsonl", lengths), tokenizer, max_length=None)
        _, source = inspect(cache, tokenizer)
        assert source["lengths"] == {
            "min": 2, "mean": sum(lengths) / 8, "median": 15.5, "p90": pytest.approx(95 + 0.3 * 6),
            "p99": pytest.approx(95 + 0.93 * 6), "max": 101, "context_length_needed": 128,
        }  # fmt: skip
        assert [(e["low"], e["high"], e["count"]) for e in source["histogram"]] == [
            (1, 10, 3), (11, 20, 2), (21, 30, 1), (31, 40, 0), (41, 50, 0), (51, 60, 0), (61, 64, 0), (65, 70, 0),
            (71, 80, 0), (81, 90, 0), (91, 100, 1), (101, 110, 1),
        ]  # fmt: skip

    @pytest.mark.parametrize("longest", [2, 12, 13, 100, 5000])
    def test_every_sequence_is_in_one_bin(self, tokenizer: Tokenizer, tmp_path: Path, longest: int) -> None:
        lengths = [2, *(max(2, longest * n // 7) for n in range(1, 8)), 2, 3]
        cache = build_cache(tokens_file(tmp_path / "t.jsonl", lengths), tokenizer, max_length=None)
        _, source = inspect(cache, tokenizer)
        histogram = source["histogram"]
        assert sum(entry["count"] for entry in histogram) == len(lengths) == source["sequences"]
        assert [entry["low"] for entry in histogram] == [1, *(entry["high"] + 1 for entry in histogram[:-1])]
        assert histogram[-1]["low"] <= max(lengths) <= histogram[-1]["high"]
        assert len(histogram) <= 15

    def test_a_long_tail_does_not_hide_the_rest(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        cache = build_cache(tokens_file(tmp_path / "t.jsonl", [30, 40, 60, 150, 9000]), tokenizer, max_length=None)
        _, source = inspect(cache, tokenizer)
        counts = {(entry["low"], entry["high"]): entry["count"] for entry in source["histogram"] if entry["count"]}
        assert counts == {(1, 50): 2, (51, 64): 1, (101, 200): 1, (5001, 10000): 1}

    @pytest.mark.parametrize("on_long_row", ["drop", "truncate", "split"])
    def test_lengths_are_those_before_rows_are_cut(
        self, tokenizer: Tokenizer, tmp_path: Path, on_long_row: str
    ) -> None:
        lengths = [10, 64, 65, 500, 600, 3000]
        cache = build_cache(tokens_file(tmp_path / "t.jsonl", lengths), tokenizer, on_long_row=on_long_row)
        report, source = inspect(cache, tokenizer)
        assert (source["lengths"]["max"], source["lengths"]["median"]) == (3000, 282.5)
        assert sum(entry["count"] for entry in source["histogram"]) == 6
        assert sum(entry["count"] for entry in source["histogram"] if entry["low"] > 64) == 4
        keys = ("context_length", "rows", "dropped_tokens", "truncated_tokens")
        assert [tuple(entry[key] for key in keys) for entry in source["context_lengths"]] == [
            (64, 4, 4165, 4165 - 4 * 64),
            (512, 2, 3600, 3600 - 2 * 512),
            (1024, 1, 3000, 3000 - 1024),
            (2048, 1, 3000, 952),
            (4096, 0, 0, 0),
        ]
        entry = source["context_lengths"][1]
        shares = (entry["rows_share"], entry["dropped_share"], entry["truncated_share"])
        assert shares == (2 / 6, 3600 / sum(lengths), 2576 / sum(lengths))
        for text in (console_text(report), Page(html_page(report)).text):
            for cell in (
                "64 (now)",
                "2,048",
                "2 (33.3 %)",
                "3,600 (84.9 %)",
                "2,576 (60.8 %)",
                "data.context_length 64",
            ):
                assert cell in text

    def test_text_is_split_and_loses_nothing(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"text": "word " * 90}])
        for on_long_row in ("split", "drop"):
            source = inspect(build_cache(path, tokenizer, max_length=16, on_long_row=on_long_row), tokenizer)[1]
            assert (source["is_split"], source["context_lengths"] == []) == (on_long_row == "split",) * 2
        report, source = inspect(build_cache(path, tokenizer, max_length=16, on_long_row="split"), tokenizer)
        for text in (console_text(report), Page(html_page(report)).text):
            assert "and loses nothing" in text
            assert "tokens lost if dropped" not in text

    def test_a_source_of_long_rows_is_refused_not_kept(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        report, source = inspect(build_cache(tokens_file(tmp_path / "t.jsonl", [70, 80, 90]), tokenizer), tokenizer)
        assert ([entry["count"] for entry in source["dropped"]], source["notes"]) == ([3], [])
        assert source["refused"] == "none of its 3 rows has a loss token"
        text = console_text(report)
        assert "a run refuses this source: none of its 3 rows has a loss token\ndropped 3: rows longer" in text
        assert "kept" not in text
        assert source["refused"] in Page(html_page(report)).text

    def test_a_cache_of_an_earlier_version_is_built_again_to_know_the_long_rows(
        self, tokenizer_dir: Path, tmp_path: Path
    ) -> None:
        path = tokens_file(tmp_path / "t.jsonl", [10, 70, 80])
        settings = {
            "model.tokenizer": str(tokenizer_dir), "data.path": str(path), "data.cache_dir": str(tmp_path / "cache"),
            "data.context_length": 64, "observe.console": "quiet",
        }  # fmt: skip
        prepared = api.prepare(overrides=settings)
        (meta,) = (tmp_path / "cache").glob("*/meta.json")
        content = json.loads(meta.read_text())
        del content["checksums"]["row_lengths.bin"]
        meta.write_text(json.dumps(content))
        (meta.parent / "row_lengths.bin").unlink()
        assert api.prepare(overrides=settings) == prepared
        assert not (meta.parent / "row_lengths.bin").exists()
        (source,) = api.inspect_data(overrides=settings)["sources"]
        assert source["lengths"]["max"] == 80
        assert api.prepare(overrides=settings) == prepared


class TestExamples:
    def test_runs_add_up_to_the_trained_tokens(self, tokenizer: Tokenizer, chat_file: Path, text_file: Path) -> None:
        both = [build_cache(chat_file, tokenizer), build_cache(text_file, tokenizer, max_length=None)]
        for cache, source in zip(both, inspect_sources(both, tokenizer, 64, 1000)["sources"], strict=True):
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
    def test_examples_are_spread_over_the_source(
        self, tokenizer: Tokenizer, chat_file: Path, rows: int, lines: list[int]
    ) -> None:
        _, source = inspect(build_cache(chat_file, tokenizer), tokenizer, rows)
        assert [example["origin"] for example in source["examples"]] == [f"{chat_file}:{line}" for line in lines]

    def test_a_character_of_several_tokens_is_shown_whole(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        euro = tokenizer.encode("€")
        assert len(euro) == 3
        cache = build_cache(write_rows(tmp_path / "c.jsonl", [chat_row("a€b", "\ufffd😀\ufffdé")]), tokenizer)
        (example,) = inspect(cache, tokenizer)[1]["examples"]
        assert [run["text"] for run in example["runs"]] == ["<|user|>a€b<|end|><|assistant|>", "\ufffd😀\ufffdé<|end|>"]
        assert {"ids": euro, "text": "€"} in example["runs"][0]["pieces"]

    def test_a_character_across_the_mask_is_broken_but_not_lost(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("a€b")
        rows = [
            {"input_ids": ids, "labels": [-100] * 2 + ids[2:]},
            {"input_ids": tokenizer.encode("€"), "labels": ids[:3]},
        ]
        cache = build_cache(write_rows(tmp_path / "t.jsonl", rows), tokenizer)
        across, first = inspect(cache, tokenizer, rows=2)[1]["examples"]
        assert [(run["text"], run["tokens"]) for run in across["runs"]] == [("a\ufffd", 2), ("\ufffd\ufffdb", 3)]
        # Nothing predicts the first token, although it has a label; the ids are shown, not the labels.
        assert [(run["text"], run["trained"]) for run in first["runs"]] == [("\ufffd", False), ("\ufffd\ufffd", True)]

    def test_spaces_at_the_edge_of_a_run_are_shown(self, tmp_path: Path) -> None:
        """Decoders such as Llama 2's drop a space at the start of a text, and have tokens for bytes."""
        names = ["<s>", "▁Hello", "▁world", "!", "<0xE2>", "<0x82>", "<0xAC>"]
        backend = Backend(models.BPE({name: n for n, name in enumerate(names)}, []))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        other = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "other")
        ids = [1, 2, 2, 3, 4, 5, 6, 2]
        rows = [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]}]
        cache = build_cache(write_rows(tmp_path / "t.jsonl", rows), other)
        (example,) = inspect(cache, other)[1]["examples"]
        assert [run["text"] for run in example["runs"]] == ["Hello world", " world!€ world"]
        (cut,) = inspect(cache, other, max_tokens=2)[1]["examples"]
        assert [run["text"] for run in cut["runs"]] == ["Hello", "", "", " world"]

    def test_an_id_without_text_is_shown(self, tmp_path: Path) -> None:
        backend = Backend(models.BPE({"a": 0, "b": 2}, []))
        backend.decoder = decoders.Fuse()
        gap = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "gap")
        cache = build_cache(write_rows(tmp_path / "t.jsonl", [{"input_ids": [0, 1, 2, 1]}]), gap)
        (example,) = inspect(cache, gap)[1]["examples"]
        assert [run["text"] for run in example["runs"]] == ["a", "<id 1>b<id 1>"]

    def test_the_middle_of_a_long_example_is_omitted_and_counted(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("0123456789")
        labels = [-100] * 4 + ids[4:7] + [-100] * 3
        cache = build_cache(write_rows(tmp_path / "t.jsonl", [{"input_ids": ids, "labels": labels}]), tokenizer)
        report, source = inspect(cache, tokenizer, max_tokens=5)
        runs = source["examples"][0]["runs"]
        assert [(run["text"], run["trained"], run["tokens"], run["left_out"]) for run in runs] == [
            ("012", False, 3, False),
            ("", False, 1, True),
            ("", True, 3, True),
            ("", False, 1, True),
            ("89", False, 2, False),
        ]
        assert "\n012\n[… 5 tokens omitted, 3 of them trained …]\n89\n" in console_text(report)
        assert "[… 5 tokens omitted, 3 of them trained …]" in html_page(report)


class TestConsole:
    def test_answers_and_their_ends_are_marked(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = tmp_path / "chat.jsonl"
        turns = [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi\nyou"},
            {"role": "assistant", "content": "Yes\n"}, {"role": "user", "content": "7"},
            {"role": "assistant", "content": "8"},
        ]  # fmt: skip
        cache = build_cache(write_rows(path, [{"messages": turns}]), tokenizer)
        report, _ = inspect(cache, tokenizer)
        assert console_text(report) == (
            f"{path}: messages, 1 file\n\n"
            f"example 1, {path}:1: 27 tokens, 6 trained\n"
            "<|system|>Be kind.<|end|><|user|>Hi↵\nyou<|end|><|assistant|>⟦Yes↵\n<|end|>⟧"
            "<|user|>7<|end|><|assistant|>⟦8<|end|>⟧\n\n"
            "  rows             1\n  sequences        1\n  tokens          27\n  trained tokens   6  (22.2 %)\n"
            "length of the rows in tokens: 27 shortest, 27 median, 27.0 mean, 27 at 90 %, 27 at 99 %, 27 longest\n"
            "the longest row has 27 tokens: data.context_length 32 (now 64) holds all\n"
            "    1-5  0\n   6-10  0\n  11-15  0\n  16-20  0\n  21-25  0\n"
            f"  26-30  1  {'█' * 30}\n"
            "  context_length  longer rows  tokens lost if dropped  if truncated\n"
            "               8  1 (100.0 %)            27 (100.0 %)   19 (70.4 %)\n"
            "              16  1 (100.0 %)            27 (100.0 %)   11 (40.7 %)\n"
            "              32    0 (0.0 %)               0 (0.0 %)     0 (0.0 %)\n"
            "        64 (now)    0 (0.0 %)               0 (0.0 %)     0 (0.0 %)\n\n"
        )
        colored = console_text(report, use_color=True)
        assert "\x1b[2m<|user|>7<|end|><|assistant|>\x1b[0m\x1b[1;32m8<|end|>\x1b[0m" in colored
        assert "\x1b[1;32mYes↵\x1b[0m\n\x1b[1;32m<|end|>\x1b[0m" in colored
        assert "⟦" not in colored

    def test_a_mark_ends_before_the_line_break(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        ids = tokenizer.encode("a\n\nb")
        cache = build_cache(
            write_rows(tmp_path / "t.jsonl", [{"input_ids": ids, "labels": [*ids[:-1], -100]}]), tokenizer
        )
        assert "a⟦↵\n↵⟧\nb\n" in console_text(inspect(cache, tokenizer)[0])

    def test_dropped_rows_are_shown_with_examples(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        rows = [chat_row("Hi", "Hello"), chat_row("x " * 90, "y"), {"messages": []}]
        cache = build_cache(write_rows(tmp_path / "chat.jsonl", rows), tokenizer)
        text = console_text(inspect(cache, tokenizer)[0])
        assert f"    such as {tmp_path}/chat.jsonl:3: messages is empty or not a list\n" in text
        assert f"    such as {cache.counts.examples[0]}\n" in text
        assert "dropped 1: rows longer than data.context_length 64." in text

    def test_truncated_rows_are_shown(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "chat.jsonl", [chat_row("Hi", "Hello " * 40), chat_row("x " * 90, "y")])
        cache = build_cache(path, tokenizer, on_long_row="truncate")
        _, source = inspect(cache, tokenizer)
        assert [(entry["count"], entry["examples"]) for entry in source["notes"]] == [(1, cache.counts.examples)]
        assert f"which loses {source['cropped_tokens']} tokens" in source["notes"][0]["why"]
        assert [entry["count"] for entry in source["dropped"]] == [1] == [source["dropped_untrained"]]

    @pytest.mark.parametrize("use_color", [False, True])
    def test_data_cannot_control_the_terminal(self, hostile: dict[str, Any], use_color: bool) -> None:
        text = console_text(hostile, use_color)
        for code in ("\x1b[1;32m", "\x1b[2m", "\x1b[0m"):
            text = text.replace(code, "")
        assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} == {"\n"}
        assert "[red]a[/red]␛[2J␛]0;t␇\\x9b\\u202e␍<script>" in text
        # Brackets in the data are escaped.
        assert text.count("⟦") == text.count("⟧") == (0 if use_color else 2)

    def test_emoji_and_other_scripts_are_not_escaped(self) -> None:
        plain = "👨‍👩‍👧 日本語 نص می‌خواهم [bold]"
        assert escape(plain) == plain
        assert escape("a\tb\n\x7f\u2028\ufeff") == "a→\tb↵\n␡\\u2028\\ufeff"


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
    def test_data_is_never_markup(self, hostile: dict[str, Any]) -> None:
        page = Page(html_page(hostile))
        assert page.tags <= {
            "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "ul", "li", "table", "tr", "td",
            "div", "pre", "mark", "span",
        }  # fmt: skip
        assert page.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class", "style", "title"}
        assert page.text.count("<script>alert('x')</script>&amp;") == 2
        assert "\x1b" not in html_page(hostile)
        assert "␛[2J<b>" in page.text

    def test_the_page_shows_what_the_console_shows(self, tokenizer: Tokenizer, chat_file: Path) -> None:
        report, source = inspect(build_cache(chat_file, tokenizer), tokenizer, rows=3)
        html = html_page(report)
        page = Page(html)
        runs = [run for example in source["examples"] for run in example["runs"]]
        assert page.marked[1:] == [run["text"] for run in runs if run["trained"]]
        ids = [i for run in runs for piece in run["pieces"] for i in piece["ids"]]
        assert [int(title.split(":")[0].split()[1]) for title in page.titles] == ids
        assert f"{source['tokens']:,}" in page.text
        assert "http://" not in html
        assert "https://" not in html
        assert "prefers-color-scheme: dark" in html

    def test_the_page_is_written_besides_the_text(
        self, tokenizer_dir: Path, chat_file: Path, tmp_path: Path, torchstone: Callable[..., tuple[int, str, str]]
    ) -> None:
        args = ("--model.tokenizer", tokenizer_dir, "--data.path", chat_file, "--data.cache_dir", tmp_path / "cache")
        code, text, _ = torchstone("inspect-data", *args)
        assert code == 0
        page = tmp_path / "page.html"
        code, out, err = torchstone("inspect-data", *args, "--html", page)
        assert (code, out) == (0, text)
        assert err.endswith(f"wrote {page}\n")
        assert page.read_text().startswith("<!doctype html>")

    def test_a_file_name_need_not_be_utf_8(
        self, tokenizer_dir: Path, chat_file: Path, tmp_path: Path, torchstone: Callable[..., tuple[int, str, str]]
    ) -> None:
        path = tmp_path / os.fsdecode(b"a\xff.jsonl")
        path.write_bytes(chat_file.read_bytes())
        args = ("--model.tokenizer", tokenizer_dir, "--data.path", path, "--data.cache_dir", tmp_path / "cache")
        code, _, err = torchstone("inspect-data", *args, "--html", tmp_path / "page.html", "--observe.console", "quiet")
        assert code == 0, err
        assert r"a\udcff.jsonl:1" in (tmp_path / "page.html").read_text()
