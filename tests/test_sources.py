"""Files to rows: every kind of file the same rows, every place known, every damage named."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiny import write_rows
from torchstone.data import json_array, sources
from torchstone.data.sources import BadRow, Position, chunks, find_files, first_rows, read_rows, row_count, rows
from torchstone.errors import DataError, UsageError

ROWS = [{"text": f"row {n} " + "x" * (n * 7 % 50)} for n in range(100)]


def zstd(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)


def lines(values: list[dict]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


WRITERS: dict[str, Callable[[Path, list[dict]], None]] = {
    "a.jsonl": lambda path, values: path.write_bytes(lines(values)) and None,
    "a.ndjson": lambda path, values: path.write_bytes(lines(values).rstrip(b"\n")) and None,
    "a.jsonl.gz": lambda path, values: path.write_bytes(gzip.compress(lines(values))) and None,
    "two-members.jsonl.gz": lambda path, values: (
        path.write_bytes(gzip.compress(lines(values[:30])) + gzip.compress(lines(values[30:]))) and None
    ),
    "array.json": lambda path, values: path.write_text(json.dumps(values)) and None,
    "pretty.json": lambda path, values: path.write_text("\ufeff \n" + json.dumps(values, indent=4) + "\n") and None,
    "array.json.gz": lambda path, values: path.write_bytes(gzip.compress(json.dumps(values).encode())) and None,
    "a.jsonl.zst": lambda path, values: zstd(path, lines(values)),
    "a.parquet": lambda path, values: pq.write_table(pa.Table.from_pylist(values), path, row_group_size=30),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 200)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 7)


class TestFiles:
    @pytest.mark.parametrize("name", WRITERS)
    @pytest.mark.usefixtures("small_chunks")
    def test_every_kind_of_file_has_the_same_rows_with_their_lines(self, tmp_path: Path, name: str) -> None:
        WRITERS[name](tmp_path / name, ROWS)
        found = list(read_rows(tmp_path / name))
        assert [row.value for row in found] == ROWS
        assert [row.line for row in found] == list(range(1, 101))

    @pytest.mark.parametrize("name", WRITERS)
    @pytest.mark.usefixtures("small_chunks")
    def test_reading_goes_on_after_any_chunk(self, tmp_path: Path, name: str) -> None:
        WRITERS[name](tmp_path / name, ROWS)
        files = [tmp_path / name, tmp_path / "more.jsonl"]
        write_rows(files[1], ROWS[:9])
        whole = list(chunks(files))
        assert len(whole) > 10
        for number, chunk in enumerate(whole):
            assert list(chunks(files, chunk.end)) == whole[number + 1 :]

    def test_a_datasets_folder_has_the_same_rows(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(ROWS)
        table.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
        assert [row.value for row in read_rows(tmp_path / "one")] == ROWS
        assert [row.value for row in read_rows(tmp_path / "splits")] == ROWS
        assert [row.value for row in read_rows(tmp_path / "splits/test")] == ROWS[:1]
        # An order of its own, which is kept beside the rows.
        table.select([5, 2, 9]).save_to_disk(tmp_path / "chosen")
        assert [row.value for row in read_rows(tmp_path / "chosen")] == [ROWS[5], ROWS[2], ROWS[9]]
        datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "untrained")
        with pytest.raises(UsageError, match="no split named train"):
            find_files(str(tmp_path / "untrained"))

    def test_folders_and_globs(self, tmp_path: Path) -> None:
        (tmp_path / "inner/.hidden").mkdir(parents=True)
        for name in ("b.jsonl", "a.jsonl.gz", "inner/c.parquet", "notes.txt", "inner/.hidden/d.jsonl"):
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

    def test_nulls_of_a_table_are_columns_that_a_row_does_not_have(self, tmp_path: Path) -> None:
        values = [{"messages": [{"role": "user", "content": "a", "name": None}], "tools": None}]
        pq.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
        (row,) = read_rows(tmp_path / "a.parquet")
        assert row.value == {"messages": [{"role": "user", "content": "a"}]}

    @pytest.mark.usefixtures("small_chunks")
    def test_rows_are_counted_and_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'\n{"a": 1}\n  \n{"a": 2}\n{"a": 3}\n\n')
        (chunk,) = chunks([path])
        assert row_count(chunk) == 3
        blank = chunk._replace(payload=b'\xef\xbb\xbf\n\x0c\n{"a": 1}\n\x0b \n{"a": 2}\n')
        assert row_count(blank) == len(list(rows(blank))) == len(list(rows(first_rows(blank, 2)))) == 2
        assert [row.line for row in rows(first_rows(chunk, 2))] == [2, 4]
        WRITERS["a.parquet"](tmp_path / "a.parquet", ROWS)
        table = next(chunks([tmp_path / "a.parquet"]))
        assert [row.value for row in rows(first_rows(table, 3))] == ROWS[:3]


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "line", "reason"),
        [
            (b'{"text": "a"}\n{"text": \n', 2, "not JSON"),
            (b'{"text": "a"}\n\n[1]\n', 3, "a row is an object {…}, not an array"),
            (b'{"text": "a"}\n"b"\n', 2, "a row is an object {…}, not a string"),
            (b'{"text": "a"}\n{"text": "\xff"}\n', 2, "not UTF-8 at byte 10"),
            (b'{"text": "a"}\n{"text": "a\x00b"}\n', 2, "a NUL byte at character 11"),
            (b'{"text": "a"}\n' + b"\x00" * 50, 2, "a NUL byte at character 0"),
            (b'{"text": "a"}\n{"text": "b"}{"text": "c"}\n', 2, "not JSON: Extra data"),
            (b'{"text": "a"}\n' + b"[" * 100_000, 2, "not JSON"),
            (b'{"text": "a"}\n{"text": "cut o', 2, "not JSON: Unterminated string"),
        ],
    )
    def test_a_bad_line_is_one_lines_problem(self, tmp_path: Path, content: bytes, line: int, reason: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(content)
        (chunk,) = chunks([path])
        good, bad = rows(chunk)
        assert not isinstance(good, BadRow)
        assert isinstance(bad, BadRow)
        assert (bad.line, bad.exit_code) == (line, 3)
        assert bad.reason.startswith(reason)
        assert str(bad).startswith(f"{path}:{line}: {reason}")
        with pytest.raises(BadRow):
            list(read_rows(path))

    def test_the_message_has_the_rows_beginning_and_no_more(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b'{"text": "' + b"y" * 10_000_000 + b"\n")
        with pytest.raises(BadRow) as caught:
            list(read_rows(path))
        assert len(str(caught.value)) < 400
        assert 'the row begins {"text": "yyyy' in str(caught.value)

    def test_byte_order_marks_blank_lines_and_a_missing_last_newline_are_harmless(self, tmp_path: Path) -> None:
        path = tmp_path / "bom.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n \t\n\xef\xbb\xbf{"text": "b"}\n{"text": "c"}')
        assert [(row.line, row.value["text"]) for row in read_rows(path)] == [(1, "a"), (4, "b"), (5, "c")]

    def test_a_line_of_ten_megabytes_is_a_row(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "long.jsonl", [{"text": "a"}, {"text": "x" * 10_000_000}, {"text": "b"}])
        assert [(row.line, len(row.value["text"])) for row in read_rows(path)] == [(1, 1), (2, 10_000_000), (3, 1)]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ('[{"text": "a"}, {"text": "b"} {"text": "c"}]', "after element 2: ',' expected"),
            ('[{"text": "a"}, {"text": "b"}', "after element 2: the array has no end"),
            ('[{"text": "a"}]\n[{"text": "b"}]', "after element 1: after the array comes"),
            ('[{"text": "a"}]\n{"text": "b"}\n', "after element 1: after the array comes"),
            ("[] \n\n x", "after element 0: after the array comes 'x'"),
            ('[{"text": "a"}, {"text": }]', "after element 1: Expecting value"),
            ('[{"text": "a"}, {"text": "b"', "after element 1: Expecting"),
        ],
    )
    def test_a_json_array_that_is_wrong_is_named_with_the_element(
        self, tmp_path: Path, content: str, reason: str
    ) -> None:
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=reason):
            list(read_rows(tmp_path / "a.json"))

    @pytest.mark.parametrize("block", [1, 3, 50, 1000])
    def test_an_array_is_read_the_same_in_pieces_of_any_size(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(json_array, "BLOCK", block)
        values = [*ROWS[:5], {"text": 'ä日\U0001f600 [],{}"\\'}, [1, 2], 12, "x"]
        for indent in (None, 1):
            text = json.dumps(values, indent=indent, ensure_ascii=False)
            found = list(json_array.array_lines(io.BytesIO(text.encode())))
            assert [json.loads(line) for line in found] == values
            assert not any(b"\n" in line for line in found)

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
    def test_a_compressed_file_that_was_cut_off_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        WRITERS[name](path, ROWS * 50)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match=f"{name}: damaged or cut off"):
            list(read_rows(path))

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
    def test_a_file_that_is_not_what_its_name_says_is_named(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 10)
        with pytest.raises(DataError, match=name):
            list(read_rows(tmp_path / name))

    def test_columns_that_nobody_looks_at_do_not_matter(self, tmp_path: Path) -> None:
        times = pa.array([2**62], type=pa.timestamp("us"))
        pq.write_table(pa.table({"text": ["a"], "when": times}), tmp_path / "a.parquet")
        assert [row.value for row in read_rows(tmp_path / "a.parquet")] == [{"text": "a"}]
        pq.write_table(pa.table({"when": times, "who": ["a"]}), tmp_path / "b.parquet")
        assert [list(row.value) for row in read_rows(tmp_path / "b.parquet")] == [["when", "who"]]

    def test_files_of_another_kind_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("hello")
        with pytest.raises(UsageError, match=r".txt files are not read"):
            find_files(str(tmp_path / "a.txt"))
        (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
        with pytest.raises(DataError, match=r"by its contents this is a .gz file"):
            list(read_rows(tmp_path / "a.jsonl"))

    def test_a_message_about_a_row_does_not_steer_the_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "\x1b]0;owned\x07\n')
        with pytest.raises(BadRow) as caught:
            list(read_rows(tmp_path / "a.jsonl"))
        assert "\x1b" not in str(caught.value)
        assert "\\x1b]0;owned" in str(caught.value)

    def test_a_damaged_parquet_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path, compression="none", use_dictionary=False)
        content = bytearray(path.read_bytes())
        content[4:60] = b"\xff" * 56
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a.parquet: damaged after row 0"):
            list(read_rows(path))

    def test_another_encoding_is_told_how_to_become_utf_8(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text('{"text": "a"}\n', encoding="utf-16")
        with pytest.raises(DataError, match="UTF-16.*\n.*iconv"):
            list(read_rows(path))

    def test_a_position_is_a_few_integers(self) -> None:
        assert json.loads(json.dumps(Position(1, 2, 3))) == [1, 2, 3]
