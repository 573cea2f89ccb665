"""The token cache: the same in any number of processes, resumed after a kill, never stale, nothing silent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import processes
from tiny import write_rows
from torchstone.atomic import take_place, write_text
from torchstone.data import cache as cache_module
from torchstone.data import contents, sources
from torchstone.data.cache import BuildSettings, TokenCache, find_source, open_cache
from torchstone.data.encode import Encoder
from torchstone.data.sources import BadRow
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import DataError, UsageError, WorkerError
from torchstone.observe.console import Console

FILES = ["ids.bin", "labels.bin", "lengths.bin", "loss_tokens.bin", "origins.bin", "offsets.npy", "bad-rows.jsonl"]


def opened(
    path: Path, tokenizer: Tokenizer, cache_dir: Path, workers: int | None = 0, stop: bool = True,
    max_rows: int | None = None, console: Console | None = None,
) -> TokenCache:  # fmt: skip
    source = find_source(str(path), stop_on_bad_row=stop)
    settings = BuildSettings(cache_dir, workers, stop)
    return open_cache(
        source, tokenizer.recipe(source.shape, 128, "drop"), settings, console or Console("quiet"), max_rows
    )


def contents_of(cache: TokenCache) -> dict[str, bytes]:
    return {name: (cache.folder / name).read_bytes() for name in FILES}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(cache_module, "BYTES_FOR_WORKERS", 0)


@pytest.fixture(scope="module")
def many_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("many") / "chats.jsonl", chat_rows(3000))


def build_slowly(path: Path, tokenizer_dir: Path, cache_dir: Path, chunks: int, workers: int) -> None:
    """Builds in small chunks with the journal after each, and dies of SIGKILL when it comes to chunk `chunks`."""
    sources.CHUNK_BYTES, cache_module.BYTES_FOR_WORKERS, cache_module.JOURNAL_SECONDS = 2000, 0, 0.0
    wrapped, seen = cache_module._Build._write, [0]

    def write(build: object, *arguments: object) -> None:
        seen[0] += 1
        if seen[0] > chunks:
            os.kill(os.getpid(), signal.SIGKILL)
        wrapped(build, *arguments)  # type: ignore[arg-type]

    cache_module._Build._write = write  # type: ignore[method-assign,assignment]
    opened(path, load_tokenizer(tokenizer_dir), cache_dir, workers)


class TestProcesses:
    @pytest.mark.usefixtures("small_chunks")
    def test_any_number_of_processes_makes_the_same_files(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path
    ) -> None:
        alone = contents_of(opened(many_chats, tokenizer, tmp_path / "0"))
        for workers in (1, 3):
            assert contents_of(opened(many_chats, tokenizer, tmp_path / str(workers), workers)) == alone

    @pytest.mark.usefixtures("small_chunks")
    def test_the_first_bad_row_of_the_file_is_the_one_that_is_named(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """However the processes finish, the file's order decides."""
        rows = [*corpus_rows(400), {"text": 3}, *corpus_rows(400), {"text": ""}]
        path = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(BadRow, match=r"rows.jsonl:401: text is not a string"):
            opened(path, tokenizer, tmp_path, workers=3)

    @pytest.mark.usefixtures("small_chunks")
    def test_a_process_that_dies_ends_the_build_and_not_the_work(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache_module, "JOURNAL_SECONDS", 0.0)
        original, seen = cache_module._Build._write, [0]

        def write(build: cache_module._Build, *arguments: Any) -> None:
            seen[0] += 1
            original(build, *arguments)
            if seen[0] == 20:
                (worker,) = [
                    p for p in psutil.Process().children() if "torchstone.data.workers" in " ".join(p.cmdline())
                ]
                worker.kill()

        with monkeypatch.context() as patch:
            patch.setattr(cache_module._Build, "_write", write)
            with pytest.raises(WorkerError, match="a tokenizing process died of signal 9") as caught:
                opened(many_chats, tokenizer, tmp_path / "a", workers=1)
        assert caught.value.exit_code == 7
        encoded = []
        chunk = Encoder.chunk
        monkeypatch.setattr(Encoder, "chunk", lambda self, c: encoded.append(c) or chunk(self, c))
        monkeypatch.setattr(cache_module, "BYTES_FOR_WORKERS", 10**9)
        finished = opened(many_chats, tokenizer, tmp_path / "a")
        again = len(encoded)
        assert contents_of(finished) == contents_of(opened(many_chats, tokenizer, tmp_path / "b"))
        assert again <= len(encoded) - again - 20

    @pytest.mark.usefixtures("small_chunks")
    def test_a_process_that_dies_at_its_start_is_said(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also when what it should read first is larger than a pipe holds."""
        from torchstone.data import workers

        monkeypatch.setattr(workers, "START", "raise SystemExit(3)")
        hf = load_tokenizer(Path(tokenizer.source)).hf
        hf.chat_template += "{# " + "x" * 3_000_000 + " #}"
        with pytest.raises(WorkerError, match="a tokenizing process died with exit code 3"):
            opened(many_chats, Tokenizer(hf, "large"), tmp_path, workers=2)

    def test_modules_in_the_working_folder_are_not_imported(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "regex.py").write_text("raise SystemExit(9)")
        command = [Path(sys.executable).parent / "torchstone", "prepare", "--model.tokenizer", tokenizer.source]
        if not command[0].exists():
            pytest.skip("torchstone is not installed as a command here")
        command += ["--data.path", str(many_chats), "--data.prepare_workers", "1", "--data.max_samples", "10"]
        big = tmp_path / "big.jsonl"
        big.write_bytes(many_chats.read_bytes() * 20)
        command[command.index(str(many_chats))] = str(big)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.usefixtures("small_chunks")
    def test_errors_that_are_not_about_a_row_come_back_as_they_are(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        hf = load_tokenizer(Path(tokenizer.source)).hf
        hf.chat_template = None
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        path = write_rows(tmp_path / "rows.jsonl", [{"prompt": messages[:1], "completion": messages[1:]}])
        with pytest.raises(UsageError, match="no chat template.*\n.*chatml"):
            opened(path, Tokenizer(hf, "bare"), tmp_path, workers=1)

    def test_workers_import_neither_torch_nor_transformers(self) -> None:
        heavy = "{'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
        code = f"import sys, torchstone.data.workers; print(sorted({heavy}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    def test_a_template_is_timed_in_a_thread_too(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Signals reach main threads only, so a thread has it done by a process."""
        used = []
        monkeypatch.setattr(cache_module, "Workers", lambda *a: used.append(a) or pytest.fail("started"))
        path = write_rows(tmp_path / "rows.jsonl", chat_rows(3))
        with pytest.raises(pytest.fail.Exception):
            run_in_thread(lambda: opened(path, tokenizer, tmp_path / "a", workers=None))
        assert len(used) == 1
        opened(path, tokenizer, tmp_path / "b", workers=None)
        assert len(used) == 1


def run_in_thread(job: Callable[[], object]) -> None:
    caught: list[BaseException] = []

    def guarded() -> None:
        try:
            job()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


class TestKilled:
    @pytest.mark.parametrize(("chunks", "workers"), [(1, 0), (7, 0), (40, 0), (9, 2)])
    def test_the_next_start_finishes_what_was_begun(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        chunks: int, workers: int,
    ) -> None:  # fmt: skip
        killed = tmp_path / "killed"
        code = processes.run(build_slowly, many_chats, Path(tokenizer.source), killed, chunks, workers)
        assert code == -signal.SIGKILL
        (partial,) = killed.glob(".*.partial")
        assert json.loads((partial / "journal.json").read_text())["counts"]["rows"] > 0
        monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
        encoded = []
        original = Encoder.chunk
        monkeypatch.setattr(Encoder, "chunk", lambda self, chunk: encoded.append(chunk) or original(self, chunk))
        finished = opened(many_chats, tokenizer, killed)
        again = len(encoded)
        whole = opened(many_chats, tokenizer, tmp_path / "whole")
        assert contents_of(finished) == contents_of(whole)
        assert finished.counts == whole.counts
        assert again == len(encoded) - again - chunks
        assert not list(killed.glob(".*.partial"))

    def test_what_was_written_after_the_journal_is_written_again(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path
    ) -> None:
        killed = tmp_path / "killed"
        processes.run(build_slowly, many_chats, Path(tokenizer.source), killed, 5, 0)
        (partial,) = killed.glob(".*.partial")
        for name in ("ids.bin", "origins.bin"):
            with (partial / name).open("ab") as file:
                file.write(b"half of a chunk")
        whole = opened(many_chats, tokenizer, tmp_path / "whole")
        assert contents_of(opened(many_chats, tokenizer, killed)) == contents_of(whole)

    @pytest.mark.usefixtures("small_chunks")
    def test_a_bad_row_keeps_what_came_before_it(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same error again at once; and with skip, the rest only."""
        monkeypatch.setattr(cache_module, "BYTES_FOR_WORKERS", 10**9)
        path = write_rows(tmp_path / "rows.jsonl", [*corpus_rows(300), {"text": 3}, *corpus_rows(20)])
        encoded = []
        original = Encoder.chunk
        monkeypatch.setattr(Encoder, "chunk", lambda self, chunk: encoded.append(chunk) or original(self, chunk))
        counts = []
        for _ in range(2):
            before = len(encoded)
            with pytest.raises(BadRow, match=r"rows.jsonl:301"):
                opened(path, tokenizer, tmp_path / "cache")
            counts.append(len(encoded) - before)
        assert counts[0] > 8
        assert counts[1] == 1
        cache = opened(path, tokenizer, tmp_path / "cache", stop=False)
        assert (cache.counts.rows, cache.counts.bad_rows) == (321, 1)
        assert contents_of(cache) == contents_of(opened(path, tokenizer, tmp_path / "other", stop=False))

    @pytest.mark.parametrize("damage", ["journal", "short"])
    def test_a_damaged_beginning_is_begun_again(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, damage: str
    ) -> None:
        killed = tmp_path / "killed"
        processes.run(build_slowly, many_chats, Path(tokenizer.source), killed, 5, 0)
        (partial,) = killed.glob(".*.partial")
        if damage == "journal":
            (partial / "journal.json").write_text('{"key": ')
        else:
            os.truncate(partial / "ids.bin", 10)
        whole = opened(many_chats, tokenizer, tmp_path / "whole")
        assert contents_of(opened(many_chats, tokenizer, killed)) == contents_of(whole)

    def test_processes_end_with_their_parent(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """The parent is killed with SIGKILL in the middle of its work; nobody is left behind."""
        path = write_rows(tmp_path / "big.jsonl", chat_rows(30000))
        code = (
            "import sys; from pathlib import Path; from torchstone.data import cache;"
            "from test_token_cache import opened;"
            "from torchstone.data.tokenize import load_tokenizer; cache.BYTES_FOR_WORKERS = 0;"
            "opened(Path(sys.argv[1]), load_tokenizer(Path(sys.argv[2])), Path(sys.argv[3]), 2)"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code, str(path), tokenizer.source, str(tmp_path / "cache")]
        parent = subprocess.Popen(command, env=environment)
        children = wait_for(lambda: found if len(found := psutil.Process(parent.pid).children()) >= 2 else None)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []


def wait_for(condition: Callable[[], list | None]) -> list:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


class TestKey:
    def test_a_file_that_changes_while_it_is_read_is_refused(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_rows(tmp_path / "rows.jsonl", corpus_rows(5))
        original, added = Encoder.chunk, '{"text": "one more"}\n'

        def chunk(self: Encoder, chunk: Any) -> Any:
            if added not in path.read_text():
                path.write_text(path.read_text() + added)
            return original(self, chunk)

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "chunk", chunk)
            with pytest.raises(DataError, match="was changed while it was read"):
                opened(path, tokenizer, tmp_path / "cache")
        assert opened(path, tokenizer, tmp_path / "cache").counts.rows == 6

    def test_a_cache_that_can_only_be_read_is_read(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = opened(many_chats, tokenizer, tmp_path, max_rows=50)
        (first.folder / "checked.json").unlink()
        shutil.rmtree(tmp_path / "hashes", ignore_errors=True)
        monkeypatch.setattr(contents, "SETTLED_SECONDS", -1.0)
        monkeypatch.setattr(os, "access", lambda *a: False)
        assert opened(many_chats, tokenizer, tmp_path, max_rows=50).key == first.key
        assert not (tmp_path / "hashes").exists()

    def test_what_decides_nothing_is_not_in_the_key(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.recipe("text", None, "", "last") == tokenizer.recipe("text", None, "", "all")
        assert tokenizer.recipe("text", None, "").template is None

    def test_the_number_of_rows_counts(self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path) -> None:
        whole = opened(many_chats, tokenizer, tmp_path)
        some = opened(many_chats, tokenizer, tmp_path, max_rows=100)
        assert (some.counts.rows, len(some)) == (100, 100)
        assert some.key != whole.key
        assert some.ids.tolist() == whole.ids[: len(some.ids)].tolist()

    @pytest.mark.usefixtures("small_chunks")
    def test_rows_are_counted_over_chunks_and_processes(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path
    ) -> None:
        for workers in (0, 2):
            assert opened(many_chats, tokenizer, tmp_path / str(workers), workers, max_rows=777).counts.rows == 777

    def test_a_file_changed_in_place_with_its_old_date_is_noticed(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(contents, "SETTLED_SECONDS", -1.0)
        path = write_rows(tmp_path / "rows.jsonl", [{"text": "one two"}])
        before = path.stat()
        first = opened(path, tokenizer, tmp_path / "cache")
        assert list((tmp_path / "cache/hashes").iterdir())
        path.write_text(path.read_text().replace("one", "six"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert opened(path, tokenizer, tmp_path / "cache").key != first.key

    def test_a_hash_is_not_computed_twice_and_never_remembered_too_early(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_rows(tmp_path / "rows.jsonl", [{"text": "one two"}])
        found = contents.content_hash(path, tmp_path / "memory")
        assert not (tmp_path / "memory").exists()
        monkeypatch.setattr(contents, "SETTLED_SECONDS", -1.0)
        assert contents.content_hash(path, tmp_path / "memory") == found
        monkeypatch.setattr(contents.hashlib, "file_digest", lambda *a: pytest.fail("hashed again"))
        assert contents.content_hash(path, tmp_path / "memory") == found
        (note,) = (tmp_path / "memory").iterdir()
        note.write_text("{")
        with pytest.raises(pytest.fail.Exception, match="hashed again"):
            contents.content_hash(path, tmp_path / "memory")

    def test_a_cache_moved_elsewhere_is_checked_and_used(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path
    ) -> None:
        opened(many_chats, tokenizer, tmp_path / "here", max_rows=50)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        said: list[str] = []
        console = Console("lines")
        console.say = said.append  # type: ignore[method-assign]
        opened(many_chats, tokenizer, tmp_path / "there", max_rows=50, console=console)
        assert [line.split()[0] for line in said] == ["using"]

    def test_a_cache_that_nobody_touched_is_not_read_again(
        self, tokenizer: Tokenizer, many_chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened(many_chats, tokenizer, tmp_path, max_rows=50)
        monkeypatch.setattr(cache_module, "_checksum", lambda path: pytest.fail(f"read {path}"))
        opened(many_chats, tokenizer, tmp_path, max_rows=50)


class TestAtomic:
    def test_threads_may_write_the_same_file(self, tmp_path: Path) -> None:
        def write() -> None:
            for _ in range(50):
                write_text(tmp_path / "note", "whole")

        others = [threading.Thread(target=run_in_thread, args=(write,)) for _ in range(3)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        assert [path.name for path in tmp_path.iterdir()] == ["note"]

    def test_what_an_old_crash_left_is_no_hindrance(self, tmp_path: Path) -> None:
        for name in ("a", ".a.replaced", ".a.partial"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name.strip(".")).touch()
        take_place(tmp_path / ".a.partial", tmp_path / "a")
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["a.partial"]
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


class TestBadRows:
    BAD = ['{"text": ', "[1]", '{"text": ""}', '{"text": 3}', '{"txt": "a"}', '{"text": "a\\u0000b"}', "null", "\ud800"]

    @pytest.fixture
    def mixed(self, tmp_path: Path) -> Path:
        good = [json.dumps(row) for row in corpus_rows(20)]
        lines = [line for pair in zip(self.BAD, good, strict=False) for line in pair] + good[len(self.BAD) :]
        path = tmp_path / "mixed.jsonl"
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        return path

    def test_they_are_skipped_counted_and_kept_when_asked(
        self, tokenizer: Tokenizer, mixed: Path, tmp_path: Path
    ) -> None:
        cache = opened(mixed, tokenizer, tmp_path / "cache", stop=False)
        assert (cache.counts.rows, cache.counts.bad_rows, len(cache)) == (28, 8, 20)
        kept = [json.loads(line) for line in cache.quarantine.read_text().splitlines()]
        assert [row["line"] for row in kept] == [1, 3, 5, 7, 9, 11, 13, 15]
        assert {row["file"] for row in kept} == {str(mixed)}
        assert [row["row"] for row in kept[:7]] == [
            '{"text": ',
            "[1]",
            *map(json.dumps, map(json.loads, self.BAD[2:6])),
            "null",
        ]
        assert [row["reason"].split(":")[0] for row in kept] == [
            "not JSON", "a row is an object {…}, not an array", "text is empty", "text is not a string",
            "the rows of this source are of shape 'text', this one has no text", "a NUL at character 1 of a text",
            "a row is an object {…}, not null", "not UTF-8 at byte 0 of the line",
        ]  # fmt: skip
        clean = write_rows(tmp_path / "clean.jsonl", corpus_rows(20))
        assert cache.ids.tolist() == opened(clean, tokenizer, tmp_path / "clean").ids.tolist()
        assert cache.origin(0) == f"{mixed}:2"

    def test_a_cache_made_by_skipping_does_not_let_them_pass(
        self, tokenizer: Tokenizer, mixed: Path, tmp_path: Path
    ) -> None:
        lines = mixed.read_bytes().splitlines()
        mixed.write_bytes(b"\n".join(lines[1:]))
        opened(mixed, tokenizer, tmp_path / "cache", stop=False)
        with pytest.raises(BadRow, match=r"mixed.jsonl:2: a row is an object"):
            opened(mixed, tokenizer, tmp_path / "cache", stop=True)

    def test_a_source_with_nothing_to_train_on_is_refused(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "masked.jsonl", [{"input_ids": [1, 2], "labels": [1, -100]}] * 3)
        masked = opened(path, tokenizer, tmp_path, stop=False)
        with pytest.raises(DataError, match=r"masked.jsonl: none of its 3 rows has a token to train on"):
            masked.refuse_if_untrained()
        long = opened(write_rows(tmp_path / "long.jsonl", [{"input_ids": [1] * 200}]), tokenizer, tmp_path)
        assert len(long) == 0
        with pytest.raises(DataError, match="none of its 1 rows has a token to train on\n  1 were longer"):
            long.refuse_if_untrained()
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(DataError, match=r"empty.jsonl: no rows"):
            opened(tmp_path / "empty.jsonl", tokenizer, tmp_path)
        (tmp_path / "junk.jsonl").write_text("a\nb\n")
        with pytest.raises(DataError, match="no rows of a known shape"):
            opened(tmp_path / "junk.jsonl", tokenizer, tmp_path, stop=False)
