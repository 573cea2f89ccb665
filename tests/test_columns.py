"""data.columns: one spelling everywhere, the columns of the data get our names, and errors show what to type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caches import build_cache
from tiny import read_rows, write_rows
from torchstone import api
from torchstone.config.load import from_dict, load_config, to_dict
from torchstone.data.cache import TokenCache, open_source
from torchstone.data.formats import suggest_columns
from torchstone.data.sources import BadRow
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import DataError, UsageError

MODEL = {"model.depth": 1, "model.tokenizer": "demo:tokenizer", "data.path": "a.jsonl"}
MAPPING = {"prompt": "question", "completion": "answer"}
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f" {n + 1}", "level": n} for n in range(4)]


def sequences(cache: TokenCache) -> list[tuple[list[int], list[int]]]:
    return [(cache.sequence(n).ids.tolist(), cache.sequence(n).labels.tolist()) for n in range(len(cache))]


class TestConfig:
    @pytest.mark.parametrize(
        "value",
        [
            MAPPING, [MAPPING], "prompt=question,completion=answer", " prompt = question, completion = answer,",
            "{prompt: question, completion: answer}", '[{"prompt": "question", "completion": "answer"}]',
        ],
    )  # fmt: skip
    def test_every_spelling_is_the_same_mapping(self, value: Any) -> None:
        config = load_config(overrides=MODEL | {"data.columns": value})
        assert config.data.columns == (MAPPING,)
        assert from_dict(to_dict(config)) == config

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.yaml", "data:\n  columns: {prompt: question, completion: answer}\n"),
            ("a.toml", '[data.columns]\nprompt = "question"\ncompletion = "answer"\n'),
            ("a.json", '{"data": {"columns": [{"prompt": "question", "completion": "answer"}]}}'),
        ],
    )
    def test_files_have_a_mapping(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name, overrides=MODEL).data.columns == (MAPPING,)
        assert load_config(tmp_path / name, overrides=MODEL | {"data.columns": "text=a"}).data.columns == (
            {"text": "a"},
        )
        assert load_config(tmp_path / name, overrides=MODEL | {"data.columns": "none"}).data.columns == ()

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("promt=question", "'promt'\n.*did you mean 'prompt'"),
            ("question", "must be a mapping, not 'question'\n.*prompt=question,completion=answer"),
            ("{prompt: ", "--data.columns:1: not YAML"),
            ("prompt=q,prompt=z", "'prompt=q,prompt=z' has two columns for one name"),
            ("{prompt: q, prompt: z}", "--data.columns:1: duplicate key prompt"),
            ("prompt=", "must be a mapping, not 'prompt='"),
            ([{"prompt": "a"}, {"prompt": "b"}], "does not have one mapping for each path"),
            ([3], "must be a mapping, not 3"),
        ],
    )
    def test_a_wrong_mapping_is_explained(self, value: Any, expected: str) -> None:
        with pytest.raises(UsageError, match=expected):
            load_config(overrides=MODEL | {"data.columns": value})

    def test_a_part_of_a_mapping_does_not_replace_that_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("data:\n  columns: {prompt: question}\n")
        with pytest.raises(UsageError, match=r"unknown key 'data.columns.completion'\n.*data.columns"):
            load_config(tmp_path / "a.yaml", overrides=MODEL | {"data.columns.completion": "answer"})


class TestRows:
    @pytest.mark.parametrize("name", ["q.jsonl", "q.parquet", "q.csv"])
    def test_mapped_rows_are_the_rows_with_our_names(self, tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
        path = tmp_path / name
        if name == "q.jsonl":
            write_rows(path, QUESTIONS)
        elif name == "q.csv":
            lines = [f"{row['level']},{row['answer']},{row['question']}" for row in QUESTIONS]
            path.write_text("\n".join(["level,answer,question", *lines]))
        else:
            times = pa.array([2**62] * 4, type=pa.timestamp("us"))
            pq.write_table(pa.Table.from_pylist(QUESTIONS).append_column("when", times), path)
        rows = [{"prompt": row["question"], "completion": row["answer"]} for row in QUESTIONS]
        expected = build_cache(write_rows(tmp_path / "ours.jsonl", rows), tokenizer)
        cache = build_cache(path, tokenizer, columns=MAPPING)
        assert cache.row_format == "prompt"
        assert sequences(cache) == sequences(expected)
        other = build_cache(path, tokenizer, columns={"prompt": "answer", "completion": "question"})
        assert sequences(other) != sequences(cache)

    def test_paths_of_named_validation_sets_have_their_mappings_in_order(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        first = write_rows(tmp_path / "a.jsonl", [{"question": "What is 1 + 1?", "answer": " 2"}])
        second = write_rows(tmp_path / "b.jsonl", [{"ask": "What is 2 + 2?", "reply": " 4"}] * 2)
        config = {
            "model.tokenizer": str(tokenizer.path), "data.path": [str(first), str(second)],
            "data.columns": [MAPPING, {"prompt": "ask", "completion": "reply"}],
            "data.validation_path": {"one": str(first), "two": str(second)},
            "data.cache_dir": str(tmp_path / "cache"), "observe.console": "quiet",
        }  # fmt: skip
        assert api.prepare(overrides=config)["validation_samples"] == 3
        with pytest.raises(BadRow, match=r"b\.jsonl:1: data.columns takes prompt from 'question'"):
            api.prepare(overrides=config | {"data.validation_path": {"two": str(second), "one": str(first)}})

    def test_without_a_mapping_the_cache_key_is_that_of_earlier_versions(self, tokenizer: Tokenizer) -> None:
        names = {
            "tokenizer", "vocab_size", "eos_id", "template", "special_tokens", "shape", "limit", "on_long_row",
            "train_on",
        }  # fmt: skip
        assert tokenizer.encoding_config("text", None, "").cache_key().keys() == names
        mapped = tokenizer.encoding_config("text", None, "", columns={"text": "content"}).cache_key()
        assert mapped.keys() == names | {"columns"}

    def test_a_mapped_format_wins_over_the_keys_that_a_row_has_anyway(self, tmp_path: Path) -> None:
        row = {"messages": [{"role": "user", "content": "a"}], "text": "b", "content": "c", "prompt": "d"}
        path = write_rows(tmp_path / "a.jsonl", [row])
        assert open_source(str(path)).row_format == "messages"
        source = open_source(str(path), columns={"text": "content"})
        assert source.row_format == "text"
        assert [each.value["text"] for each in read_rows(path, source.columns)] == ["c"]

    def test_messages_in_the_keys_of_sharegpt_get_the_columns_that_read_them(
        self, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
        path = write_rows(tmp_path / "a.jsonl", [{"messages": turns}])
        with pytest.raises(BadRow, match=r"message 0 has no role(.|\n)*--data.columns conversations=messages"):
            build_cache(path, tokenizer)
        assert build_cache(path, tokenizer, columns={"conversations": "messages"}).counts.trained_tokens > 0

    def test_optional_columns_may_be_missing_in_a_row(self, tmp_path: Path) -> None:
        rows = [{"q": "a", "a": "b", "sys": "c"}, {"q": "d", "a": "e"}]
        path = write_rows(tmp_path / "a.jsonl", rows)
        columns = {"instruction": "q", "output": "a", "system": "sys"}
        assert [each.value for each in read_rows(path, columns)] == [
            {"instruction": "a", "output": "b", "system": "c"},
            {"instruction": "d", "output": "e"},
        ]

    def test_a_column_that_a_row_lacks_is_named(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", QUESTIONS)
        expected = (
            "a.jsonl:1: data.columns takes prompt from 'qestion', but the keys are question, answer, level"
            "\n.*\n.*did you mean prompt=question"
        )
        with pytest.raises(BadRow, match=expected):
            list(read_rows(path, {"prompt": "qestion", "completion": "answer"}))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a"])
    @pytest.mark.parametrize("row_format", ["auto", "prompt"])
    def test_an_optional_column_that_no_row_has_is_named(self, tmp_path: Path, name: str, row_format: str) -> None:
        path = tmp_path / name
        if name == "a":
            import datasets

            datasets.Dataset.from_list(QUESTIONS).save_to_disk(path)
        elif name == "a.parquet":
            pq.write_table(pa.Table.from_pylist(QUESTIONS), path)
        elif name == "a.csv":
            path.write_text("question,answer,level\na,b,c\n")
        else:
            write_rows(path, QUESTIONS)
        expected = f"{name}: data.columns takes system from 'levle', but the keys are question, answer, level\n.*level"
        with pytest.raises(DataError, match=expected):
            open_source(str(path), row_format, False, MAPPING | {"system": "levle"})

    def test_several_paths_have_their_own_mappings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_rows(tmp_path / "q.jsonl", QUESTIONS)
        write_rows(tmp_path / "t.jsonl", [{"content": "A text."}] * 3)
        settings = {
            "model.tokenizer": "demo:tokenizer", "data.path": "q.jsonl,t.jsonl", "observe.console": "quiet",
            "data.columns": [MAPPING, {"text": "content"}],
        }  # fmt: skip
        assert api.prepare(overrides=settings)["formats"] == ["prompt", "text"]
        with pytest.raises(UsageError, match="2 column mappings for 1 path"):
            api.train_tokenizer("q.jsonl", "new", columns="[{text: answer}, {text: question}]")

    def test_evaluate_reads_the_same_columns(self, tmp_path: Path, llama_dir: Path) -> None:
        columns = {"instruction": "question", "output": "answer"}
        cache_dir = str(tmp_path / "cache")
        mapped = write_rows(tmp_path / "q.jsonl", QUESTIONS)
        ours = write_rows(
            tmp_path / "ours.jsonl", [{name: row[key] for name, key in columns.items()} for row in QUESTIONS]
        )
        expected = api.evaluate(str(llama_dir), str(ours), 1, 64, "cpu", cache_dir, quiet=True)
        result = api.evaluate(str(llama_dir), str(mapped), 1, 64, "cpu", cache_dir, quiet=True, columns=columns)
        assert {**result, "data": ""} == {**expected, "data": ""}
        assert (result["samples"], result["questions"]) == (4, 1)


class TestSuggestions:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"question": "a", "answer": "b"}, "instruction=question,output=answer for a chat model"),
            ({"id": 7, "Problem": "a", "Solution": "b", "level": "c"}, "instruction=Problem,output=Solution for"),
            ({"en": "a", "de": "b"}, "instruction=en,output=de for"),
            ({"$(rm x)": "a"}, "'text=$(rm x)'"),
            ({"content": "a", "url": "b"}, "text=content"),
            ({"id": 3, "page": "a"}, "text=page"),
            ({"conversation": [{"role": "user", "content": "a"}]}, "messages=conversation"),
            ({"chat": [{"from": "human", "value": "a"}]}, "conversations=chat"),
            ({"a": "b", "c": "d", "e": "f"}, "text=NAME with the name"),
        ],
    )
    def test_the_mapping_to_type_has_the_keys_of_the_row(
        self, tmp_path: Path, row: dict[str, Any], expected: str
    ) -> None:
        assert suggest_columns(row).startswith(f"use --data.columns {expected}")
        with pytest.raises(
            DataError, match=f"a.jsonl:1: unknown row format: .*\n.*\n  use --data.columns {re.escape(expected)}"
        ):
            open_source(str(write_rows(tmp_path / "a.jsonl", [row])))

    def test_a_problem_of_all_rows_is_shown_with_the_first(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", [{"page": f"{n}"} for n in range(1200)])
        with pytest.raises(DataError, match="a.jsonl:1: unknown row format"):
            open_source(str(path), stop_on_bad_row=False)
