"""Data files to rows: every kind of file gives the same rows with their lines, and every damage is named."""

from __future__ import annotations

import gzip
import io
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tiny import read_rows, write_rows
from torchstone.data import json_array, sources
from torchstone.data.cache import open_source
from torchstone.data.sources import (
    BadRow,
    Row,
    count_rows,
    find_files,
    parse_rows,
    read_chunks,
    truncate_chunk,
)
from torchstone.errors import DataError, UsageError

ROWS = [{"text": f"row {n} " + "x" * (n * 7 % 50)} for n in range(100)]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def compress_zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


WRITERS: dict[str, Callable[[Path, list[dict]], object]] = {
    "a.jsonl": lambda path, rows: path.write_bytes(jsonl(rows)),
    "a.ndjson": lambda path, rows: path.write_bytes(jsonl(rows).rstrip(b"\n")),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(jsonl(rows))),
    "two-members.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress(jsonl(rows[:30])) + gzip.compress(jsonl(rows[30:]))
    ),
    "array.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "pretty.json": lambda path, rows: path.write_text("\ufeff \n" + json.dumps(rows, indent=4) + "\n"),
    "array.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "a.jsonl.zst": lambda path, rows: path.write_bytes(compress_zstd(jsonl(rows))),
    "a.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 200)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 7)
    monkeypatch.setattr(sources, "TABLE_ROWS", 7)


class TestFiles:
    @pytest.mark.parametrize("name", WRITERS)
    @pytest.mark.usefixtures("small_chunks")
    def test_every_kind_of_file_has_the_same_rows_and_resumes_after_any_chunk(self, tmp_path: Path, name: str) -> None:
        files = [tmp_path / name, write_rows(tmp_path / "more.jsonl", ROWS[:9])]
        WRITERS[name](files[0], ROWS)
        assert [(row.line, row.value) for row in read_rows(files[0])] == list(enumerate(ROWS, start=1))
        chunks = list(read_chunks(files))
        assert len(chunks) > 10
        for number, chunk in enumerate(chunks):
            assert list(read_chunks(files, chunk.end)) == chunks[number + 1 :]

    def test_a_datasets_folder_has_the_same_rows(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(ROWS)
        table.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
        assert [row.value for row in read_rows(tmp_path / "one")] == ROWS
        assert [row.value for row in read_rows(tmp_path / "splits")] == ROWS
        assert [row.value for row in read_rows(tmp_path / "splits/test")] == ROWS[:1]
        # A selection is stored as indices beside the rows.
        table.select([5, 2, 9]).save_to_disk(tmp_path / "chosen")
        assert [row.value for row in read_rows(tmp_path / "chosen")] == [ROWS[5], ROWS[2], ROWS[9]]
        datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "untrained")
        with pytest.raises(UsageError, match="no split named train"):
            find_files(str(tmp_path / "untrained"))

    def test_folders_and_globs(self, tmp_path: Path) -> None:
        (tmp_path / "inner/.hidden").mkdir(parents=True)
        for name in ("b.jsonl", "a.jsonl.gz", "inner/c.parquet", "notes.txt", "inner/.hidden/d.jsonl", ".e.jsonl"):
            (tmp_path / name).touch()
        names = [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path))]
        assert names == ["a.jsonl.gz", "b.jsonl", "inner/c.parquet"]
        assert find_files(f"{tmp_path}/*.jsonl") == [tmp_path / "b.jsonl"]
        assert find_files(f"{tmp_path}/**/*.parquet") == [tmp_path / "inner/c.parquet"]
        for name, reason in (("*.csv", "no file matches"), ("z.jsonl", "does not exist"), ("inner/.hidden/x", "exist")):
            with pytest.raises(UsageError, match=reason):
                find_files(f"{tmp_path}/{name}")
        (tmp_path / "empty").mkdir()
        with pytest.raises(UsageError, match="no data files"):
            find_files(str(tmp_path / "empty"))

    @pytest.mark.parametrize("name", ["array.json", "a.parquet", "dictionary.parquet", "datasets"])
    @pytest.mark.usefixtures("small_chunks")
    def test_a_chunk_has_few_bytes_however_little_they_take_on_disk(self, tmp_path: Path, name: str) -> None:
        texts = ["x" * 10_000] * 100
        if name.endswith(".parquet"):
            column = pa.array(texts)
            column = column.dictionary_encode() if name == "dictionary.parquet" else column
            pq.write_table(pa.table({"text": column}), tmp_path / name)
        elif name == "datasets":
            pytest.importorskip("datasets").Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / name)
        else:
            WRITERS[name](tmp_path / name, [{"text": text} for text in texts])
        chunks = list(read_chunks([tmp_path / name]))
        assert [count_rows(chunk) for chunk in chunks] == [1] * 100
        assert [row.value["text"] for row in read_rows(tmp_path / name)] == texts
        assert [chunk.end for chunk in read_chunks([tmp_path / name], chunks[4].end)] == [c.end for c in chunks[5:]]

    @pytest.mark.parametrize(
        ("name", "content", "num_rows"),
        [
            ("spaces.json", b'[{"text": "a"},' + b" " * (1 << 22) + b'{"text": "b"}]', 2),
            ("keys.jsonl", b'{"text": "a", ' + b",".join(b'"%d": 1' % n for n in range(40_000)) + b', "39999": 2}', 1),
            ("header.csv", b",".join(b"%d" % n for n in range(40_000)) + b"\n1\n", 1),
        ],
    )
    def test_the_time_does_not_grow_with_the_square_of_the_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, num_rows: int
    ) -> None:
        monkeypatch.setattr(json_array, "BLOCK_BYTES", 1 << 9)
        (tmp_path / name).write_bytes(content)
        start = time.process_time()
        assert len([row for chunk in read_chunks([tmp_path / name]) for row in parse_rows(chunk)]) == num_rows
        assert time.process_time() - start < 2

    def test_nulls_of_a_table_are_left_out(self, tmp_path: Path) -> None:
        rows = [{"messages": [{"role": "user", "content": "a", "name": None}], "tools": None}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        (row,) = read_rows(tmp_path / "a.parquet")
        assert row.value == {"messages": [{"role": "user", "content": "a"}]}

    def test_columns_without_a_meaning_are_not_read(self, tmp_path: Path) -> None:
        """Python cannot even hold this timestamp."""
        times = pa.array([2**62], type=pa.timestamp("us"))
        pq.write_table(pa.table({"text": ["a"], "when": times}), tmp_path / "a.parquet")
        assert [row.value for row in read_rows(tmp_path / "a.parquet")] == [{"text": "a"}]
        pq.write_table(pa.table({"when": times, "who": ["a"]}), tmp_path / "b.parquet")
        assert [list(row.value) for row in read_rows(tmp_path / "b.parquet")] == [["when", "who"]]

    @pytest.mark.parametrize(
        ("names", "columns", "keys"),
        [
            (("prompt", "completion"), {}, {"prompt", "completion", "images"}),
            (("messages", "text"), {}, {"messages", "text", "images"}),
            (("q", "a"), {"instruction": "q", "output": "a"}, {"instruction", "output", "images"}),
            (("text",), {}, {"text"}),
            (("body",), {"text": "body"}, {"text"}),
            (("question", "answer"), {}, {"question", "answer", "images"}),
        ],
    )
    def test_images_of_conversations_are_not_overlooked(
        self, tmp_path: Path, names: tuple[str, ...], columns: dict[str, str], keys: set[str]
    ) -> None:
        """Without known columns, all names are shown."""
        pq.write_table(pa.table({key: ["a"] for key in names} | {"images": [["a.png"]]}), tmp_path / "a.parquet")
        (row,) = read_rows(tmp_path / "a.parquet", columns)
        assert row.value.keys() == keys

    def test_an_unreadable_value_is_the_fault_of_its_row(self, tmp_path: Path) -> None:
        times = pa.array([0, 2**62, None], type=pa.timestamp("us"))
        pq.write_table(pa.table({"text": ["a", "b", "c"], "system": times}), tmp_path / "a.parquet")
        (chunk,) = read_chunks([tmp_path / "a.parquet"])
        first, bad, last = parse_rows(chunk)
        assert isinstance(bad, BadRow)
        assert str(bad).startswith(f"{tmp_path}/a.parquet:2: cannot be read: date value out of range")
        assert [row.value["text"] for row in (first, last) if not isinstance(row, BadRow)] == ["a", "c"]
        assert open_source(str(tmp_path / "a.parquet")).row_format == "text"

    def test_unused_columns_of_a_parquet_file_are_not_read_from_disk(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        columns = {"image": [b"\x01" * 1000] * 50, "text": ["a"] * 50}
        pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
        content = bytearray(path.read_bytes())
        content[4:60] = b"\xff" * 56
        path.write_bytes(content)
        assert [row.value for row in read_rows(path)] == [{"text": "a"}] * 50

    def test_a_mapped_column_is_read_and_may_be_the_unreadable_one(self, tmp_path: Path) -> None:
        times = pa.array([0, 2**62], type=pa.timestamp("us"))
        columns = {"text": ["a", "b"], "content": ["c", "d"], "time": times}
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        mapping = {"text": "content"}
        assert [row.value for row in read_rows(tmp_path / "a.parquet", mapping)] == [{"text": "c"}, {"text": "d"}]
        mapping = {"text": "time"}
        (chunk,) = read_chunks([tmp_path / "a.parquet"], columns=mapping)
        _, bad = parse_rows(chunk, mapping)
        assert isinstance(bad, BadRow)
        assert "cannot be read: date value" in str(bad)

    @pytest.mark.usefixtures("small_chunks")
    def test_chunks_are_counted_and_truncated_by_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'\n{"a": 1}\n  \n{"a": 2}\n{"a": 3}\n\n')
        (chunk,) = read_chunks([path])
        assert count_rows(chunk) == 3
        assert [row.line for row in parse_rows(truncate_chunk(chunk, 2))] == [2, 4]
        blank = chunk._replace(payload=b'\xef\xbb\xbf\n\x0c\n{"a": 1}\n\x0b \n{"a": 2}\n')
        assert count_rows(blank) == len(list(parse_rows(blank))) == len(list(parse_rows(truncate_chunk(blank, 2)))) == 2
        WRITERS["a.parquet"](tmp_path / "a.parquet", ROWS)
        table = next(read_chunks([tmp_path / "a.parquet"]))
        assert [row.value for row in parse_rows(truncate_chunk(table, 3))] == ROWS[:3]

    def test_byte_order_marks_blank_lines_and_a_missing_last_newline_are_harmless(self, tmp_path: Path) -> None:
        path = tmp_path / "bom.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n \t\n\xef\xbb\xbf{"text": "b"}\n{"text": "c"}')
        assert [(row.line, row.value["text"]) for row in read_rows(path)] == [(1, "a"), (4, "b"), (5, "c")]

    def test_a_line_of_ten_megabytes_is_a_row(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "long.jsonl", [{"text": "a"}, {"text": "x" * 10_000_000}, {"text": "b"}])
        assert [(row.line, len(row.value["text"])) for row in read_rows(path)] == [(1, 1), (2, 10_000_000), (3, 1)]

    @pytest.mark.parametrize("block_bytes", [1, 3, 50, 1000])
    def test_an_array_is_read_the_same_in_blocks_of_any_size(
        self, block_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(json_array, "BLOCK_BYTES", block_bytes)
        values = [*ROWS[:5], {"text": 'ä日\U0001f600 [],{}"\\'}, [1, 2], 12, "x"]
        for indent in (None, 1):
            text = json.dumps(values, indent=indent, ensure_ascii=False)
            lines = list(json_array.array_lines(io.BytesIO(text.encode())))
            assert [json.loads(line) for line in lines] == values
            assert not any(b"\n" in line for line in lines)


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "line", "reason"),
        [
            (b'{"text": "a"}\n{"text": \n', 2, "not JSON"),
            (b'{"text": "a"}\n\n[1]\n', 3, "a row must be an object {…}, not an array"),
            (b'{"text": "a"}\n"b"\n', 2, "a row must be an object {…}, not a string"),
            (b'{"text": "a"}\n{"text": "\xff"}\n', 2, "not UTF-8 at byte 10"),
            (b'{"text": "a"}\n{"text": "a\x00b"}\n', 2, "NUL byte at character 11"),
            (b'{"text": "a"}\n' + b"\x00" * 50, 2, "NUL byte at character 0"),
            (b'{"text": "a"}\n{"text": "b"}{"text": "c"}\n', 2, "not JSON: Extra data"),
            (b'{"text": "a"}\n' + b"[" * 100_000, 2, "not JSON"),
            (b'{"text": "a"}\n{"text": "cut o', 2, "not JSON: Unterminated string"),
        ],
    )
    def test_a_bad_line_leaves_the_other_lines_readable(
        self, tmp_path: Path, content: bytes, line: int, reason: str
    ) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(content)
        (chunk,) = read_chunks([path])
        good, bad = parse_rows(chunk)
        assert not isinstance(good, BadRow)
        assert isinstance(bad, BadRow)
        assert (bad.line, bad.exit_code) == (line, 3)
        assert bad.reason.startswith(reason)
        assert str(bad).startswith(f"{path}:{line}: {reason}")
        with pytest.raises(BadRow):
            list(read_rows(path))

    @pytest.mark.parametrize(
        ("element", "reason"),
        [
            ('{"tools": ' + "[" * 100_000 + '"]\\""' + "]" * 100_000 + "}", "not JSON: maximum recursion depth"),
            ("[" * 100_000 + "]" * 100_000, "not JSON: maximum recursion depth"),
            ('{"n": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
            ("9" * 5000, "not JSON: Exceeds the limit"),
            ('{"text": "a", "text": "b"}', "not JSON: the key 'text' occurs twice in one object"),
            ('{"text": "a", "b": [{"c": 1, "d": 2, "c": 3}]}', "not JSON: the key 'c' occurs twice in one object"),
        ],
        ids=["deep", "deep-list", "digits", "number", "key", "inner-key"],
    )
    @pytest.mark.parametrize("block_bytes", [1 << 20, 7000])
    def test_json_that_python_cannot_read_is_a_bad_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, element: str, reason: str, block_bytes: int
    ) -> None:
        """In lines and in an array; the rows around it are read."""
        monkeypatch.setattr(json_array, "BLOCK_BYTES", block_bytes)
        (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{element}\n{{"text": "b"}}\n')
        (tmp_path / "a.json").write_text(f'[{{"text": "a"}}, {element}, {{"text": "b"}}]')
        for name in ("a.jsonl", "a.json"):
            rows = [row for chunk in read_chunks([tmp_path / name]) for row in parse_rows(chunk)]
            assert [row.line for row in rows] == [1, 2, 3]
            assert isinstance(rows[1], BadRow)
            assert rows[1].reason.startswith(reason)
            assert [row.value["text"] for row in (rows[0], rows[2]) if isinstance(row, Row)] == ["a", "b"]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
    @pytest.mark.usefixtures("small_chunks")
    def test_a_line_that_is_too_long_is_a_bad_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
        path = tmp_path / name
        rows = [*ROWS[:20], {"text": "y" * 5000}, *ROWS[20:30], {"text": "z" * 5000}]
        WRITERS[name](path, rows)
        chunks = list(read_chunks([path]))
        parsed = [row for chunk in chunks for row in parse_rows(chunk)]
        assert [row.line for row in parsed] == list(range(1, 33))
        assert [row.value for row in parsed if isinstance(row, Row)] == ROWS[:30]
        bad = [row for row in parsed if isinstance(row, BadRow)]
        assert [(row.line, row.reason) for row in bad] == [(line, "the line is longer than 0 MiB") for line in (21, 32)]
        assert all(row.raw.startswith('{"text": "') and len(row.raw) <= 100 for row in bad)
        for number, chunk in enumerate(chunks):
            assert list(read_chunks([path], chunk.end)) == chunks[number + 1 :]
        assert sum(map(count_rows, chunks)) == 32

    def test_a_line_of_gigabytes_is_not_held_in_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 22)
        with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
            for _ in range(64):
                file.write(b"x" * (1 << 20))
        tracemalloc.start()
        try:
            (chunk,) = read_chunks([tmp_path / "a.jsonl.gz"])
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()
        assert (chunk.kind, chunk.first_line) == ("long", 1)

    def test_an_error_shows_only_the_start_of_a_row(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b'{"text": "' + b"y" * 10_000_000 + b"\n")
        with pytest.raises(BadRow) as caught:
            list(read_rows(path))
        assert len(str(caught.value)) < 400
        assert 'the row starts with {"text": "yyyy' in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ('[{"text": "a"}, {"text": "b"} {"text": "c"}]', "after element 2: expected ','"),
            ('[{"text": "a"}, {"text": "b"}', "after element 2: the array has no closing bracket"),
            ('[{"text": "a"}]\n[{"text": "b"}]', "after element 1: unexpected .* after the array"),
            ('[{"text": "a"}]\n{"text": "b"}\n', "after element 1: unexpected .* after the array"),
            ("[] \n\n x", "after element 0: unexpected 'x' after the array"),
            ('[{"text": "a"}, {"text": }]', "after element 1: Expecting value"),
            ('[{"text": "a"}, {"text": "b"', "after element 1: Expecting"),
        ],
    )
    def test_a_syntax_error_in_an_array_is_named_with_the_element(
        self, tmp_path: Path, content: str, reason: str
    ) -> None:
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=reason):
            list(read_rows(tmp_path / "a.json"))

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
    def test_a_truncated_compressed_file_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        WRITERS[name](path, ROWS * 50)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match=f"{name}: damaged or truncated"):
            list(read_rows(path))

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
    def test_contents_that_do_not_fit_the_file_name_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 10)
        with pytest.raises(DataError, match=name):
            list(read_rows(tmp_path / name))

    def test_unsupported_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.md").write_text("hello")
        with pytest.raises(UsageError, match=r".md files are not supported"):
            find_files(str(tmp_path / "a.md"))
        save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=r"model.safetensors: .safetensors files are not supported"):
            find_files(str(tmp_path / "model.safetensors"))
        (tmp_path / "model.safetensors").rename(tmp_path / "weights.v2")
        with pytest.raises(DataError, match=r"weights.v2: is a binary file, which is not supported"):
            list(read_rows(tmp_path / "weights.v2"))
        (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
        with pytest.raises(DataError, match=r"its contents are .gz data"):
            list(read_rows(tmp_path / "a.jsonl"))

    def test_a_damaged_parquet_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path, compression="none", use_dictionary=False)
        content = bytearray(path.read_bytes())
        content[4:60] = b"\xff" * 56
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a.parquet: damaged after row 0"):
            list(read_rows(path))

    def test_a_parquet_file_with_a_column_twice_or_not_utf_8_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
        with pytest.raises(DataError, match="a.parquet: the column 'text' occurs twice"):
            list(read_rows(path))
        pq.write_table(pa.table({"text": ["a"], "name": ["b"]}), path, store_schema=False)
        path.write_bytes(path.read_bytes().replace(b"name", b"na\xffe"))
        with pytest.raises(DataError, match="a.parquet: not a readable parquet file"):
            list(read_rows(path))

    @pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"splits": [1]}', "[" * 100_000])
    def test_a_damaged_list_of_splits_is_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "dataset_dict.json").write_text(content)
        with pytest.raises(DataError, match="dataset_dict.json: not a list of splits"):
            find_files(str(tmp_path))

    def test_utf_16_is_refused_with_the_command_that_converts_it(self, tmp_path: Path) -> None:
        path = tmp_path / "$(touch x).json"
        path.write_text('{"text": "a"}\n', encoding="utf-16")
        with pytest.raises(DataError, match=r"UTF-16.*\n.*iconv .* '\$\(touch x\).json' > NEW.json"):
            list(read_rows(path))
