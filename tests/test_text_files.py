"""Text and CSV files: documents, lines and records are rows with their lines, in every place that reads data."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers.processors import TemplateProcessing

from caches import build_cache
from tiny import read_rows, write_rows
from torchstone import api
from torchstone.data import sources, text_files
from torchstone.data.cache import open_source
from torchstone.data.sources import BadRow, ReadPosition, count_rows, parse_rows, read_chunks, truncate_chunk
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.errors import DataError, UsageError

RECORDS = [{"question": f'{n}: "why",\nand {"x" * (n * 7 % 50)}?', "answer": f"é{n}\r\n"} for n in range(60)]


def table(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer"], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(RECORDS)
    return text.getvalue().encode()


FILES = {
    "a.csv": lambda: b"\xef\xbb\xbf" + table(","),
    "a.tsv": lambda: table("\t"),
    "a.csv.gz": lambda: gzip.compress(table(",")),
    "a.tsv.zst": lambda: pa.compress(table("\t"), "zstd", asbytes=True),
}


@pytest.fixture
def bos_tokenizer(tokenizer_dir: Path) -> Tokenizer:
    hf = load_tokenizer(tokenizer_dir).hf
    bos = ("<|user|>", hf.convert_tokens_to_ids("<|user|>"))
    hf.backend_tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[bos])
    return Tokenizer(hf, "with bos")


class TestTables:
    @pytest.mark.parametrize("name", FILES)
    def test_records_have_the_line_they_start_at_and_reading_resumes_after_any_chunk(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
        monkeypatch.setattr(sources, "CHUNK_ROWS", 7)
        monkeypatch.setattr(sources, "TABLE_ROWS", 7)
        path = tmp_path / name
        path.write_bytes(FILES[name]())
        rows = list(read_rows(path))
        assert [row.value for row in rows] == RECORDS
        # A record has a line break in its question, and one in its answer.
        assert [row.line for row in rows] == [2 + 3 * n for n in range(60)]
        chunks = list(read_chunks([path]))
        assert len(chunks) > 8
        assert sum(map(count_rows, chunks)) == 60
        assert [row.value for row in parse_rows(truncate_chunk(chunks[0], 2))] == RECORDS[:2]
        for number, chunk in enumerate(chunks):
            rest = [each._replace(bytes_done=0) for each in read_chunks([path], chunk.end)]
            assert rest == [each._replace(bytes_done=0) for each in chunks[number + 1 :]]

    def test_only_the_first_line_has_a_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("\ufefftext\n\ufeffa\n")
        assert [row.value for row in read_rows(tmp_path / "a.csv")] == [{"text": "\ufeffa"}]

    def test_a_field_may_be_a_whole_book(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(f'text\n"{"word, " * 50_000}"\n')
        assert [len(row.value["text"]) for row in read_rows(tmp_path / "a.csv")] == [300_000]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"one field", "1 fields, but the header has 2"),
            (b"a,b,c", "3 fields, but the header has 2"),
            (b'"a" b,c', "not CSV: ',' expected"),
            (b"a,\xff", "not UTF-8"),
        ],
    )
    def test_a_bad_record_leaves_the_others_readable(self, tmp_path: Path, line: bytes, reason: str) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes(b"text,id\n\nx,1\n" + line + b"\ny,2\n")
        (chunk,) = read_chunks([path])
        rows = list(parse_rows(chunk))
        assert [row.line for row in rows] == [3, 4, 5]
        (bad,) = [row for row in rows if isinstance(row, BadRow)]
        assert str(bad).startswith(f"{path}:4: {reason}")

    def test_rows_after_a_quote_are_not_lost_silently(self, tmp_path: Path) -> None:
        """The rows up to the next quote become one, and without another quote all rows to the end."""
        path = tmp_path / "a.csv"
        path.write_text('text\nx\n"open\ny\nz\n')
        with pytest.raises(DataError, match=r"a.csv: after line 2: the quote that opens in line 3 is not closed"):
            open_source(str(path), stop_on_bad_row=False)
        path.write_text('text\nx\n"open\ny\n"again\nz\n')
        (chunk,) = read_chunks([path])
        _, bad, last = parse_rows(chunk)
        assert isinstance(bad, BadRow)
        assert str(bad) == f"{path}:3: not CSV: ',' expected after '\"' (lines 3 to 5 are read as one row)"
        assert not isinstance(last, BadRow)

    @pytest.mark.parametrize("record", [b"y" * 100_000, b'"y\n",' * 1000])
    def test_one_endless_record_is_refused_before_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes
    ) -> None:
        monkeypatch.setattr(text_files, "MAX_RECORD", 1000)
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text\nx\n" + record))
        with pytest.raises(DataError, match=r"a.csv.gz: after line 2: a record has more than 1000 bytes"):
            list(read_rows(tmp_path / "a.csv.gz"))

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"text,text\na,b\n", "has 'text' twice"), (b"", "it needs a header"), (b"te\xffxt\na\n", "is not UTF-8")],
    )
    def test_a_header_that_does_not_name_the_columns_is_refused(
        self, tmp_path: Path, content: bytes, reason: str
    ) -> None:
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(DataError, match=f"a.csv:1: .*{reason}"):
            list(read_rows(tmp_path / "a.csv"))


class TestTexts:
    def test_a_file_is_one_document_to_the_last_byte(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes("\ufeffOnce upon\r\n\r\na time é.\n".encode())
        cache = build_cache(path, tokenizer)
        assert (cache.row_format, len(cache), cache.origin(0)) == ("text", 1, f"{path}:1")
        assert tokenizer.hf.decode(cache.sequence(0).ids) == "Once upon\r\n\r\na time é.\n<|endoftext|>"

    def test_with_format_lines_every_line_is_a_document(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        path = tmp_path / "a.txt.gz"
        path.write_bytes(gzip.compress("\ufeff one \r\n\n \t\nTwo é.".encode()))
        cache = build_cache(path, tokenizer, "lines")
        texts = [tokenizer.hf.decode(cache.sequence(n).ids) for n in range(len(cache))]
        assert texts == [" one <|endoftext|>", "Two é.<|endoftext|>"]
        assert [cache.origin(n) for n in range(2)] == [f"{path}:1", f"{path}:4"]
        assert build_cache(path, tokenizer).key != cache.key

    def test_format_lines_is_for_text_files(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
        with pytest.raises(UsageError, match=r"a.jsonl: data.format lines is for .txt files"):
            open_source(str(path), "lines")

    @pytest.mark.parametrize(
        "text",
        [
            "\n".join(f"日本{n} é" for n in range(50)),
            " ".join(f"日本{n}é" for n in range(50)),
            "日本" * 50,
            # The last piece is blank, and the first one.
            "x" * 64 + "\n",
            " " * 64 + "word",
        ],
        ids=["lines", "spaces", "no breaks", "blank end", "blank start"],
    )
    def test_a_large_file_is_read_in_pieces_that_are_the_same_after_resuming(
        self, tmp_path: Path, bos_tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the first piece starts the text, and only the last one ends it."""
        monkeypatch.setattr(text_files, "PIECE_BYTES", 64)
        path = tmp_path / "a.txt"
        path.write_text(text)
        chunks = list(read_chunks([path]))
        assert all(len(chunk.payload) <= 64 for chunk in chunks)
        assert b"".join(chunk.payload for chunk in chunks) == text.encode()
        for number, chunk in enumerate(chunks):
            assert list(read_chunks([path], chunk.end)) == chunks[number + 1 :]
        rows = [row for chunk in chunks for row in parse_rows(chunk)]
        assert not any(isinstance(row, BadRow) for row in rows)
        assert [row.line for row in rows] == [1 + text[: text.index(row.value["text"])].count("\n") for row in rows]
        cache = build_cache(path, bos_tokenizer)
        ids = [cache.sequence(n).ids.tolist() for n in range(len(cache))]
        assert len(ids) == len(chunks) > 1
        all_ids = [i for sequence in ids for i in sequence]
        (bos,) = bos_tokenizer.text_prefix
        assert (ids[0][0], ids[-1][-1]) == (bos, bos_tokenizer.eos_id)
        assert not {bos, bos_tokenizer.eos_id} & {*all_ids[1:-1]}
        assert bos_tokenizer.hf.decode(all_ids[1:-1]) == text

    def test_a_byte_that_is_not_utf_8_is_named_with_its_line(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"one\ntwo\nth\xffree\n")
        with pytest.raises(BadRow, match=r"a.txt:3: not UTF-8 at byte 10"):
            list(read_rows(tmp_path / "a.txt"))
        chunk = next(read_chunks([tmp_path / "a.txt"], ReadPosition(), text_lines=True))
        assert [isinstance(row, BadRow) for row in parse_rows(chunk)] == [False, False, True]

    def test_utf_16_and_empty_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("hello", encoding="utf-16")
        with pytest.raises(DataError, match=r"UTF-16.*\n.*iconv .* > NEW.txt"):
            list(read_rows(tmp_path / "a.txt"))
        (tmp_path / "a.txt").write_text(" \n")
        with pytest.raises(DataError, match="the data is empty"):
            open_source(str(tmp_path / "a.txt"))


class TestFolders:
    def test_text_and_tables_are_read_if_there_is_nothing_else(self, tmp_path: Path) -> None:
        notes: list[str] = []
        (tmp_path / "b.txt").write_text("b")
        (tmp_path / "a.txt").write_text("a")
        assert [path.name for path in sources.find_files(str(tmp_path), None, notes.append)] == ["a.txt", "b.txt"]
        (tmp_path / "t.csv").write_text("text\na\n")
        assert [path.name for path in sources.find_files(str(tmp_path), None, notes.append)] == ["t.csv"]
        write_rows(tmp_path / "r.jsonl", [{"text": "r"}])
        assert notes == [
            f"{tmp_path}: left out 2 .txt files, such as {tmp_path}/a.txt: the folder has .csv files (use a glob to "
            "read the others)"
        ]
        assert [path.name for path in sources.find_files(str(tmp_path), None, notes.append)] == ["r.jsonl"]
        assert len(notes) == 2
        assert [path.name for path in sources.find_files(f"{tmp_path}/*.txt")] == ["a.txt", "b.txt"]

    def test_whatever_is_left_out_is_named(self, tmp_path: Path) -> None:
        notes: list[str] = []
        folder = tmp_path / "data"
        (folder / ".git").mkdir(parents=True)
        write_rows(folder / "a.jsonl", [{"text": "a"}])
        for name in ("b.jsonl.bz2", ".c.jsonl"):
            (folder / name).touch()
        (folder / "part2").symlink_to(tmp_path)
        assert [path.name for path in sources.find_files(str(folder), None, notes.append)] == ["a.jsonl"]
        assert len(notes) == 1
        assert notes[0].startswith(f"{folder}: left out 4 hidden entries, links to folders and files of other types")
        (folder / "c.jsonl").symlink_to("gone.jsonl")
        with pytest.raises(UsageError, match="c.jsonl is a broken link"):
            sources.find_files(str(folder))

    def test_the_token_cache_is_left_out_before_it_has_tokens(self, tmp_path: Path) -> None:
        """A start that was interrupted while the files were hashed leaves JSON files behind."""
        write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
        (tmp_path / "cache/hashes").mkdir(parents=True)
        (tmp_path / "cache/hashes/0.json").write_text("{}")
        assert open_source(str(tmp_path), cache_dir=tmp_path / "cache").files == [tmp_path / "rows.jsonl"]

    def test_a_folder_with_its_own_output_trains_on_the_same_rows_again(
        self, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Cache, run, checkpoint and exported model are below the data folder; two starts see the same data."""
        monkeypatch.chdir(tmp_path)
        tokenizer.save(tmp_path / "tokenizer")
        write_rows(tmp_path / "rows.jsonl", [{"text": f"row {n} of the data"} for n in range(20)])
        settings: dict[str, Any] = {
            "model.depth": 1, "model.tokenizer": "tokenizer", "data.path": ".", "data.context_length": 32,
            "training.max_steps": 1, "training.global_batch_size": 2, "system.device": "cpu", "output_dir": "out/run",
        }  # fmt: skip
        api.train(overrides=settings)
        api.export("out/run", tmp_path / "exported", verify=False)
        capsys.readouterr()
        result = api.prepare(overrides=settings)
        assert result["fingerprint"] == api.prepare(overrides=settings | {"data.path": "rows.jsonl"})["fingerprint"]
        log = capsys.readouterr().err
        for folder, kind in (
            ("cache/datasets", "a token cache"),
            ("out/run", "a run"),
            ("exported", "a model"),
            ("tokenizer", "a tokenizer"),
        ):
            assert f"left out {folder}, which is {kind}\n" in log
        with pytest.raises(UsageError, match=r"no data files in the folder out\n.*left out out/run, which is a run"):
            sources.find_files("out")


class TestCommands:
    @pytest.mark.parametrize("name", ["story.txt", "story.csv"])
    def test_train_prepare_inspect_and_the_tokenizer_read_them(
        self, tmp_path: Path, tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = "Once upon a time there was a word. " * 20
        Path(name).write_text(text if name.endswith("txt") else f'id,story\n1,"{text}"\n')
        columns = "" if name.endswith("txt") else "text=story"
        tokenizer.save(tmp_path / "tokenizer")
        settings: dict[str, Any] = {
            "model.depth": 1, "model.tokenizer": "tokenizer", "data.path": name, "data.context_length": 32,
            "data.columns": columns, "training.max_steps": 1, "system.device": "cpu", "output_dir": "run",
        }  # fmt: skip
        assert api.prepare(overrides=settings)["tokens"] == len(tokenizer.encode(text)) + 1
        (source,) = api.inspect_data(overrides=settings, rows=1, tokens=None)["sources"]
        assert "".join(run["text"] for run in source["examples"][0]["runs"]) == f"{text}<|endoftext|>"
        assert api.train(overrides=settings).step == 1
        report = api.train_tokenizer(name, "new", 300, quiet=True, columns=columns)
        assert (report["measured"]["texts"], report["measured"]["bytes"]) == (1, len(text))
        assert json.loads(json.dumps(report)) == report

    def test_a_text_is_not_split_for_validation_into_few_pieces(
        self, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_text("One line.\nAnother line.\nAnd a third.\n")
        settings: dict[str, Any] = {
            "model.tokenizer": str(tokenizer_dir), "data.path": str(path), "data.validation_split": 0.3,
            "data.cache_dir": str(tmp_path / "cache"), "observe.console": "quiet",
        }  # fmt: skip
        with pytest.raises(DataError, match=r"0.3 of 1 rows leaves none for training\n.*--data.format lines"):
            api.prepare(overrides=settings)
        one_row = {"data.path": str(write_rows(tmp_path / "a.jsonl", [{"text": "One line."}]))}
        with pytest.raises(DataError, match=r"leaves none for training\n  use --data.validation_path$"):
            api.prepare(overrides=settings | one_row)
        lines = {"data.format": "lines", "data.packing": False}
        result = api.prepare(overrides=settings | lines)
        assert (result["samples"], result["validation_samples"]) == (2, 1)
        # A large text has some pieces, and no share is smaller than one of them.
        monkeypatch.setattr(text_files, "PIECE_BYTES", 64)
        path.write_text("A line.\n" * 40)
        settings |= {"data.context_length": 32}
        with pytest.raises(DataError, match=r"0.05 of 5 rows holds out 1\n.*--data.validation_path.*--data.format li"):
            api.prepare(overrides=settings | {"data.validation_split": 0.05})
        result = api.prepare(overrides=settings | {"data.validation_split": 0.2})
        assert result["validation_samples"] / result["samples"] == pytest.approx(0.25, abs=0.05)
        result = api.prepare(overrides=settings | lines | {"data.validation_split": 0.05})
        assert (result["samples"], result["validation_samples"]) == (38, 2)
