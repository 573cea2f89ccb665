"""The token cache: the same with any number of processes, resumed after a kill, never stale, nothing silent."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import selection
import torchstone
from tiny import write_rows
from torchstone.atomic import file_lock, replace_folder, write_text
from torchstone.data import cache as cache_module
from torchstone.data import content_hash as hash_module
from torchstone.data import sources, tokenizer_pool
from torchstone.data.cache import CacheOptions, DataSource, TokenCache, open_cache, open_source
from torchstone.data.content_hash import content_hash
from torchstone.data.encode import Encoder, EncodingConfig
from torchstone.data.loader import log_counts
from torchstone.data.sources import BadRow, Chunk
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import DataError, UsageError, WorkerError
from torchstone.observe.console import Console

FILES = ["ids.bin", "labels.bin", "lengths.bin", "loss_tokens.bin", "origins.bin", "offsets.npy", "bad-rows.jsonl"]
CHUNK_BYTES = 2000
HANG = 120

# Dies of SIGKILL instead of writing one chunk more, with a journal entry after each chunk.
KILLED_BUILD = f"""
import os, pickle, signal, sys
from torchstone.data import cache, sources
from torchstone.observe.console import Console

sources.CHUNK_BYTES, cache.MIN_POOL_BYTES, cache.JOURNAL_SECONDS = {CHUNK_BYTES}, 0, 0.0
chunks, arguments = pickle.load(sys.stdin.buffer)
write_chunk, written = cache._CacheBuilder._write_chunk, []

def write_or_die(*args):
    if len(written) == chunks:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(write_chunk(*args))

cache._CacheBuilder._write_chunk = write_or_die
cache.open_cache(*arguments, Console("quiet"))
"""
# Opens a cache when its input ends, and prints the log.
CONCURRENT_BUILD = """
import pickle, sys
from torchstone.data import cache
from torchstone.observe.console import Console

arguments = pickle.load(sys.stdin.buffer)
print("ready", flush=True)
sys.stdin.buffer.read()
cache.open_cache(*arguments, Console("lines", terminal=sys.stdout))
"""


def arguments_for(
    path: Path, tokenizer: Tokenizer, cache_dir: Path, num_processes: int | None = 0, stop: bool = True,
    max_length: int = 128, on_long_row: str = "drop", train_on: str = "assistant",
) -> tuple[DataSource, EncodingConfig, CacheOptions]:  # fmt: skip
    source = open_source(str(path), stop_on_bad_row=stop)
    encoding = tokenizer.encoding_config(source.row_format, max_length, on_long_row, train_on)
    return source, encoding, CacheOptions(cache_dir, num_processes, stop)


def build_cache(*args: Any, max_rows: int | None = None, console: Console | None = None, **options: Any) -> TokenCache:
    return open_cache(*arguments_for(*args, **options), console or Console("quiet"), max_rows)


def start_python(code: str) -> Any:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def kill_build(chunks: int, *args: Any) -> Path:
    """Builds `chunks` chunks of a cache in a process that is then killed; returns the unfinished folder.

    The tokenizing processes hold the same stdout, so this returns after all of them have ended.
    """
    arguments = arguments_for(*args)
    process = start_python(KILLED_BUILD)
    process.communicate(pickle.dumps((chunks, arguments)), timeout=HANG)
    assert process.returncode == -signal.SIGKILL
    (partial,) = arguments[2].cache_dir.glob(".*.partial")
    return partial


def contents(cache: TokenCache) -> dict[str, bytes]:
    return {name: (cache.folder / name).read_bytes() for name in FILES}


def run_in_thread(job: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def catch_errors() -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catch_errors)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files have many chunks, which go to other processes if there are any."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(cache_module, "MIN_POOL_BYTES", 0)


@pytest.fixture
def encoded_chunks(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks that this process encodes from now on."""
    chunks: list[Chunk] = []
    encode_chunk = Encoder.encode_chunk
    monkeypatch.setattr(Encoder, "encode_chunk", lambda self, chunk: chunks.append(chunk) or encode_chunk(self, chunk))
    return chunks


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", chat_rows(800))


@pytest.fixture(scope="module")
def whole(chats: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """The cache of `chats`, built in one go."""
    return build_cache(chats, tokenizer, tmp_path_factory.mktemp("whole"))


class TestProcesses:
    @pytest.mark.usefixtures("small_chunks")
    def test_any_number_of_processes_writes_the_same_files(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path
    ) -> None:
        for num_processes in (0, 1, 3):
            cache = build_cache(chats, tokenizer, tmp_path / str(num_processes), num_processes)
            assert contents(cache) == contents(whole)

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("num_processes", [0, 1])
    def test_an_exception_about_a_row_makes_it_a_bad_row(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_processes: int
    ) -> None:
        """Of the tokenizer, which encodes many rows at once, and of the format."""
        monkeypatch.setattr(cache_module, "MIN_POOL_BYTES", 0)
        words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"}}
        words |= {"added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}
        rows = [{"text": "a b"}, {"text": "a strange word"}, {"text": "b"}, {"\ud800": 1}]
        path = write_rows(tmp_path / "a.jsonl", rows)
        source, encoding, options = arguments_for(path, tokenizer, tmp_path / "cache", num_processes, stop=False)
        settings = json.loads(encoding.tokenizer) | words | {"post_processor": None, "decoder": None}
        encoding = replace(encoding, tokenizer=json.dumps(settings), eos_id=1)
        cache = open_cache(source, encoding, options, Console("quiet"))
        assert [cache.sequence(n).ids.tolist() for n in range(2)] == [[0, 1], [1]]
        bad_rows = [json.loads(line) for line in cache.bad_rows_path.read_text().splitlines()]
        assert [(row["line"], row["reason"]) for row in bad_rows] == [
            (2, "cannot be tokenized: Exception: WordLevel error: Missing [UNK] token from the vocabulary"),
            (4, "the format of this data is 'text', but this row has no text; its keys are \\ud800"),
        ]

    def test_a_panic_of_the_tokenizer_makes_a_bad_row(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """A panic in Rust code is not an Exception."""
        path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
        source, encoding, options = arguments_for(path, tokenizer, tmp_path / "cache")
        settings = json.loads(encoding.tokenizer) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
        encoding = replace(encoding, tokenizer=json.dumps(settings), row_format="text")
        with pytest.raises(DataError, match=r"a.jsonl:1: cannot be tokenized: PanicException(.*\n)*.*on_bad_row skip"):
            open_cache(source, encoding, options, Console("quiet"))

    def test_the_first_bad_row_of_the_file_is_reported(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """The order of the file decides, not which process finishes first."""
        rows = [*corpus_rows(400), {"text": 3}, *corpus_rows(400), {"text": ""}]
        path = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(BadRow, match=r"rows.jsonl:401: text is not a string") as caught:
            build_cache(path, tokenizer, tmp_path, num_processes=3)
        assert "data.format" not in caught.value.hint

    def test_a_wrong_format_is_not_answered_with_skipping_every_row(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        source, encoding, options = arguments_for(
            write_rows(tmp_path / "rows.jsonl", corpus_rows(4)), tokenizer, tmp_path / "cache"
        )
        with pytest.raises(BadRow) as caught:
            open_cache(source, replace(encoding, row_format="alpaca"), options, Console("quiet"))
        assert "if all rows are like this one, data.format or data.columns is wrong" in caught.value.hint

    @pytest.mark.usefixtures("small_chunks")
    def test_a_process_that_dies_ends_the_build_but_keeps_its_results(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        encoded_chunks: list[Chunk],
    ) -> None:  # fmt: skip
        monkeypatch.setattr(cache_module, "JOURNAL_SECONDS", 0.0)
        write_chunk, written = cache_module._CacheBuilder._write_chunk, []

        def kill_after_20(builder: Any, *args: Any) -> None:
            write_chunk(builder, *args)
            written.append(builder)
            if len(written) == 20:
                (process,) = [p for p in psutil.Process().children() if tokenizer_pool.MAIN in p.cmdline()]
                process.kill()

        with monkeypatch.context() as patch:
            patch.setattr(cache_module._CacheBuilder, "_write_chunk", kill_after_20)
            with pytest.raises(WorkerError, match="a tokenizing process died of signal 9") as caught:
                build_cache(chats, tokenizer, tmp_path, num_processes=1)
        assert caught.value.exit_code == 7
        assert contents(build_cache(chats, tokenizer, tmp_path)) == contents(whole)
        assert len(encoded_chunks) <= len(list(sources.read_chunks([chats]))) - 20

    @pytest.mark.usefixtures("small_chunks")
    def test_a_process_that_dies_at_its_start_is_reported(
        self, tokenizer: Tokenizer, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also when the first message to it is larger than the buffer of a pipe."""
        monkeypatch.setattr(tokenizer_pool, "MAIN", "raise SystemExit(3)")
        hf = load_tokenizer(Path(tokenizer.path)).hf
        hf.chat_template += "{# " + "x" * 3_000_000 + " #}"
        with pytest.raises(WorkerError, match="a tokenizing process died with exit code 3"):
            build_cache(chats, Tokenizer(hf, "large"), tmp_path, num_processes=2)

    @pytest.mark.usefixtures("small_chunks")
    def test_modules_in_the_current_folder_are_not_imported(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "regex.py").write_text("raise SystemExit(9)")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
        assert contents(build_cache(chats, tokenizer, tmp_path, num_processes=1)) == contents(whole)

    @pytest.mark.usefixtures("small_chunks")
    def test_errors_that_are_not_about_a_row_keep_their_type(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        hf = load_tokenizer(Path(tokenizer.path)).hf
        hf.chat_template = None
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        path = write_rows(tmp_path / "rows.jsonl", [{"prompt": messages[:1], "completion": messages[1:]}])
        with pytest.raises(UsageError, match="no chat template.*\n.*chatml"):
            build_cache(path, Tokenizer(hf, "bare"), tmp_path, num_processes=1)

    def test_tokenizing_processes_import_neither_torch_nor_transformers(self) -> None:
        heavy = "{'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
        code = f"import sys, torchstone.data.tokenizer_pool; print(sorted({heavy}))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "[]"

    def test_a_thread_leaves_the_encoding_to_a_process(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time limit of templates needs signals, which reach main threads only."""
        monkeypatch.setattr(cache_module, "TokenizerPool", lambda *_: pytest.fail("started a process"))
        path = write_rows(tmp_path / "rows.jsonl", chat_rows(3))
        with pytest.raises(pytest.fail.Exception, match="started a process"):
            run_in_thread(lambda: build_cache(path, tokenizer, tmp_path / "a", num_processes=None))
        build_cache(path, tokenizer, tmp_path / "b", num_processes=None)

    def test_one_of_several_processes_builds_the_cache(
        self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path
    ) -> None:
        processes = [start_python(CONCURRENT_BUILD) for _ in range(4)]
        for process in processes:
            process.stdin.write(pickle.dumps(arguments_for(text_file, tokenizer, tmp_path)))
            process.stdin.flush()
        assert [process.stdout.readline() for process in processes] == [b"ready\n"] * 4
        for process in processes:
            process.stdin.close()
            # Otherwise communicate() would flush it.
            process.stdin = None
        output = b"".join(process.communicate(timeout=HANG)[0] for process in processes).decode()
        assert [process.returncode for process in processes] == [0] * 4
        assert [line.split()[0] for line in output.splitlines()].count("tokenizing") == 1


class TestKilled:
    @pytest.mark.parametrize(
        ("chunks", "num_processes"),
        [pytest.param(1, 0, marks=selection.the_rest), (7, 0), pytest.param(40, 0, marks=selection.the_rest), (9, 2)],
    )
    def test_the_next_start_finishes_the_build(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        encoded_chunks: list[Chunk], chunks: int, num_processes: int,
    ) -> None:  # fmt: skip
        """And the tokenizing processes end with their parent: `kill_build` waits for them."""
        partial = kill_build(chunks, chats, tokenizer, tmp_path, num_processes)
        assert json.loads((partial / "journal.json").read_text())["counts"]["rows"] > 0
        monkeypatch.setattr(sources, "CHUNK_BYTES", CHUNK_BYTES)
        finished = build_cache(chats, tokenizer, tmp_path)
        assert contents(finished) == contents(whole)
        assert finished.counts == whole.counts
        assert len(encoded_chunks) == len(list(sources.read_chunks([chats]))) - chunks
        assert not partial.exists()

    @pytest.mark.parametrize("damage", ["written after the journal", "no journal", "short file"])
    def test_an_unfinished_build_with_damaged_files_is_repaired(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path, damage: str
    ) -> None:
        partial = kill_build(5, chats, tokenizer, tmp_path)
        if damage == "written after the journal":
            for name in ("ids.bin", "origins.bin"):
                with (partial / name).open("ab") as file:
                    file.write(b"half of a chunk")
        elif damage == "no journal":
            (partial / "journal.json").write_text('{"key": ')
        else:
            os.truncate(partial / "ids.bin", 10)
        assert contents(build_cache(chats, tokenizer, tmp_path)) == contents(whole)

    @pytest.mark.usefixtures("small_chunks")
    def test_a_bad_row_keeps_the_rows_before_it(
        self, tokenizer: Tokenizer, tmp_path: Path, encoded_chunks: list[Chunk]
    ) -> None:
        """The next start gives the same error at once; with skip it encodes only the rest."""
        path = write_rows(tmp_path / "rows.jsonl", [*corpus_rows(300), {"text": 3}, *corpus_rows(20)])
        counts = []
        for _ in range(2):
            encoded_chunks.clear()
            with pytest.raises(BadRow, match=r"rows.jsonl:301"):
                build_cache(path, tokenizer, tmp_path / "cache")
            counts.append(len(encoded_chunks))
        assert counts[0] > 8
        assert counts[1] == 1
        cache = build_cache(path, tokenizer, tmp_path / "cache", stop=False)
        assert (cache.counts.rows, cache.counts.bad_rows) == (321, 1)
        assert contents(cache) == contents(build_cache(path, tokenizer, tmp_path / "other", stop=False))

    def test_the_next_build_removes_what_a_failed_one_left(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": 3}])
        with pytest.raises(DataError):
            build_cache(path, tokenizer, tmp_path / "cache")
        (partial,) = (tmp_path / "cache").glob(".*.partial")
        # Not while another process works on it.
        with file_lock(tmp_path / "cache" / f"{partial.name[1:33]}.lock"):
            build_cache(write_rows(path, [{"text": "fine"}, {"text": "other"}]), tokenizer, tmp_path / "cache")
            assert partial.is_dir()
        build_cache(write_rows(path, [{"text": "fine"}, {"text": "fine"}]), tokenizer, tmp_path / "cache")
        assert not partial.exists()


class TestKey:
    ROWS = {
        "text": [{"text": "One two three."}, {"text": "Four five, é six."}],
        "messages": [{"messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi"}]}],
        "tokens": [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}],
    }
    # Keys of caches and fingerprints of runs for the rows above, computed with version 0.1; those with messages after
    # the change that the weights of messages are honoured.
    KEYS = {
        "text": "142dd0812130d92670663d6e25ae5eea39d49dd04f0b138cd26bce2d9fc834ad",
        "messages": "a1b550b6a5f08e0d82e3cc59295096b414a9255ca72c822768e9ddd8a2a03ab7",
        "tokens": "85548ee1bdc806e1008126e3f7cd84e7cdb5d5884e7b4a3825639ec581f0c0ca",
    }
    FINGERPRINTS = {
        "text": "df3160539919995c2ee999321fe87cb0142946962be0a18867d0fb5d38897f7e",
        "messages": "be59e57f8c652015ce70490d701cd39e99b2429cb3225c7b0bba9f991e3a19c3",
        "tokens": "7bb9f9966993efa34bbd9b921da6cf05ec55c732e338d0c7e172fc0afe26de97",
        "text messages": "8fbeb8af6dfca19efb1d63c339290f34639bf362cbeb936b6cd7050071e9fc33",
    }

    @pytest.mark.parametrize("formats", FINGERPRINTS)
    def test_keys_and_fingerprints_of_version_0_1_are_kept(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: str
    ) -> None:
        """Otherwise runs would refuse to resume. A deliberate change increases CODE_VERSION and these values change."""
        # Both depend on the version of tokenizers, and on how it writes tokenizer.json.
        monkeypatch.setattr(cache_module, "version", lambda _: "0.23.3")
        paths = [write_rows(tmp_path / f"{name}.jsonl", self.ROWS[name]) for name in formats.split()]
        overrides: dict[str, Any] = {
            "model.depth": 1, "model.tokenizer": tokenizer.path, "data.path": [str(path) for path in paths],
            "data.cache_dir": str(tmp_path), "data.context_length": 64, "observe.console": "quiet",
        }  # fmt: skip
        if len(paths) > 1:
            overrides |= {"data.weights": [1, 3], "data.text_packing": "best-fit"}
        assert torchstone.prepare(overrides=overrides)["fingerprint"] == self.FINGERPRINTS[formats]
        if len(paths) == 1:
            (meta,) = tmp_path.glob("*/meta.json")
            assert json.loads(meta.read_text())["key"] == self.KEYS[formats]
            assert meta.parent.name == self.KEYS[formats][:32]

    def test_every_input_of_the_encoding_changes_the_key(
        self, tokenizer: Tokenizer, chat_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = [{}, {"max_length": 32}, {"on_long_row": "split"}, {"max_rows": 10}, {"train_on": "last"}]
        keys = [build_cache(chat_file, tokenizer, tmp_path, **each).key for each in options]
        changed = tmp_path / "changed.jsonl"
        changed.write_text(chat_file.read_text().replace("?", "!"))
        keys.append(build_cache(changed, tokenizer, tmp_path).key)
        for change in (
            lambda hf: setattr(hf, "chat_template", hf.chat_template.replace("<|end|>", "<|end|>\n")),
            lambda hf: hf.add_tokens(["KATO"]),
            lambda hf: setattr(hf, "eos_token", "<|end|>"),
        ):
            hf = load_tokenizer(Path(tokenizer.path)).hf
            change(hf)
            keys.append(build_cache(chat_file, Tokenizer(hf, "changed"), tmp_path).key)
        monkeypatch.setattr(cache_module, "CODE_VERSION", cache_module.CODE_VERSION + 1)
        keys.append(build_cache(chat_file, tokenizer, tmp_path).key)
        assert all(a != b for a, b in itertools.combinations(keys, 2))

    def test_inputs_without_effect_do_not_change_the_key(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encoding_config("text", None, "", "last") == tokenizer.encoding_config("text", None, "", "all")
        assert tokenizer.encoding_config("text", None, "").template is None

    @pytest.mark.usefixtures("small_chunks")
    def test_max_rows_limits_the_rows_over_chunks_and_processes(
        self, tokenizer: Tokenizer, chats: Path, whole: TokenCache, tmp_path: Path
    ) -> None:
        for num_processes in (0, 2):
            cache = build_cache(chats, tokenizer, tmp_path / str(num_processes), num_processes, max_rows=333)
            assert (cache.counts.rows, len(cache)) == (333, 333)
            assert cache.ids.tolist() == whole.ids[: len(cache.ids)].tolist()

    def test_a_file_that_changes_while_it_is_read_is_refused(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_rows(tmp_path / "rows.jsonl", corpus_rows(5))
        size, encode_chunk = path.stat().st_size, Encoder.encode_chunk

        def change_file(encoder: Encoder, chunk: Chunk) -> Any:
            if path.stat().st_size == size:
                path.write_text(path.read_text() + '{"text": "one more"}\n')
            return encode_chunk(encoder, chunk)

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode_chunk", change_file)
            with pytest.raises(DataError, match="rows.jsonl changed while it was read"):
                build_cache(path, tokenizer, tmp_path / "cache")
        assert build_cache(path, tokenizer, tmp_path / "cache").counts.rows == 6

    def test_a_file_changed_in_place_with_its_old_date_is_noticed(
        self, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hash_module, "SETTLED_SECONDS", -1.0)
        path = write_rows(tmp_path / "rows.jsonl", [{"text": "one two"}])
        before = path.stat()
        first = build_cache(path, tokenizer, tmp_path / "cache")
        assert list((tmp_path / "cache/hashes").iterdir())
        path.write_text(path.read_text().replace("one", "six"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert build_cache(path, tokenizer, tmp_path / "cache").key != first.key

    def test_hashes_are_cached_for_settled_files_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, hashes = write_rows(tmp_path / "rows.jsonl", [{"text": "one two"}]), tmp_path / "hashes"
        monkeypatch.setattr(hash_module, "SETTLED_SECONDS", 1e9)
        expected = content_hash(path, hashes)
        assert not hashes.exists()
        monkeypatch.setattr(hash_module, "SETTLED_SECONDS", -1.0)
        assert content_hash(path, hashes) == expected
        monkeypatch.setattr(hash_module.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
        assert content_hash(path, hashes) == expected
        (entry,) = hashes.iterdir()
        entry.write_text("{")
        with pytest.raises(pytest.fail.Exception, match="hashed again"):
            content_hash(path, hashes)


class TestFiles:
    def test_a_damaged_cache_is_built_again(self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path) -> None:
        first = build_cache(text_file, tokenizer, tmp_path)
        expected = first.ids.tolist()
        for name, damage in (
            ("ids.bin", lambda content: content[:-10]),
            ("ids.bin", lambda content: b"\x01" + content[1:]),
            ("offsets.npy", lambda content: b""),
            ("meta.json", lambda content: b"{"),
        ):
            path = first.folder / name
            path.write_bytes(damage(path.read_bytes()))
            assert build_cache(text_file, tokenizer, tmp_path).ids.tolist() == expected

    @pytest.mark.parametrize(
        "damage",
        [{"counts": {"rows": "x"}}, {"counts": 5}, {"counts": {"x": 1}}, {"id_type": "object"}, {"id_type": 5}],
    )
    def test_a_cache_whose_description_is_damaged_is_built_again(
        self, tokenizer: Tokenizer, text_file: Path, tmp_path: Path, damage: dict[str, Any]
    ) -> None:
        expected = contents(build_cache(text_file, tokenizer, tmp_path))
        (path,) = tmp_path.glob("*/meta.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
        assert contents(build_cache(text_file, tokenizer, tmp_path)) == expected

    def test_an_unchanged_cache_is_not_checked_again(
        self, tokenizer: Tokenizer, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build_cache(chats, tokenizer, tmp_path, max_rows=50)
        monkeypatch.setattr(cache_module, "_checksum", lambda path: pytest.fail(f"read {path}"))
        build_cache(chats, tokenizer, tmp_path, max_rows=50)

    def test_a_copied_cache_is_used(self, tokenizer: Tokenizer, chats: Path, tmp_path: Path) -> None:
        build_cache(chats, tokenizer, tmp_path / "here", max_rows=50)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        console, lines = Console("lines"), list[str]()
        console.info = lines.append  # type: ignore[method-assign]
        build_cache(chats, tokenizer, tmp_path / "there", max_rows=50, console=console)
        assert [line.split()[0] for line in lines] == ["using"]

    def test_a_read_only_cache_is_used(
        self, tokenizer: Tokenizer, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = build_cache(chats, tokenizer, tmp_path, max_rows=50)
        (first.folder / "checked.json").unlink()
        shutil.rmtree(tmp_path / "hashes", ignore_errors=True)
        monkeypatch.setattr(hash_module, "SETTLED_SECONDS", -1.0)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert build_cache(chats, tokenizer, tmp_path, max_rows=50).key == first.key
        assert not (tmp_path / "hashes").exists()

    def test_threads_may_write_the_same_file(self, tmp_path: Path) -> None:
        def write() -> None:
            for _ in range(50):
                write_text(tmp_path / "file", "whole")

        threads = [threading.Thread(target=run_in_thread, args=(write,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_folder_is_replaced_despite_leftovers_of_a_crash(self, tmp_path: Path) -> None:
        for name in ("a", ".a.replaced", ".a.partial"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name.strip(".")).touch()
        replace_folder(tmp_path / ".a.partial", tmp_path / "a")
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

    def test_skipped_rows_are_counted_and_kept_in_a_file(
        self, tokenizer: Tokenizer, mixed: Path, tmp_path: Path
    ) -> None:
        cache = build_cache(mixed, tokenizer, tmp_path / "cache", stop=False)
        assert (cache.counts.rows, cache.counts.bad_rows, len(cache)) == (28, 8, 20)
        bad_rows = [json.loads(line) for line in cache.bad_rows_path.read_text().splitlines()]
        assert [row["line"] for row in bad_rows] == [1, 3, 5, 7, 9, 11, 13, 15]
        assert {row["file"] for row in bad_rows} == {str(mixed)}
        assert [row["row"] for row in bad_rows[:7]] == [
            '{"text": ', "[1]", *map(json.dumps, map(json.loads, self.BAD[2:6])), "null",
        ]  # fmt: skip
        assert [row["reason"].split(":")[0] for row in bad_rows] == [
            "not JSON", "a row must be an object {…}, not an array", "text is empty", "text is not a string",
            "the format of this data is 'text', but this row has no text; its keys are txt",
            "NUL character at position 1", "a row must be an object {…}, not null", "not UTF-8 at byte 0 of the line",
        ]  # fmt: skip
        clean = write_rows(tmp_path / "clean.jsonl", corpus_rows(20))
        assert cache.ids.tolist() == build_cache(clean, tokenizer, tmp_path / "clean").ids.tolist()
        assert cache.origin(0) == f"{mixed}:2"

    def test_the_name_of_a_file_with_bad_rows_need_not_be_utf_8(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        path = write_rows(tmp_path / os.fsdecode(b"x\xff.jsonl"), [{"text": "a"}, {"txt": 1}])
        cache = build_cache(path, tokenizer, tmp_path / "cache", stop=False)
        assert [json.loads(line)["file"] for line in cache.bad_rows_path.read_text().splitlines()] == [str(path)]

    def test_a_cache_built_with_skip_still_stops_without_it(
        self, tokenizer: Tokenizer, mixed: Path, tmp_path: Path
    ) -> None:
        mixed.write_bytes(mixed.read_bytes().partition(b"\n")[2])
        build_cache(mixed, tokenizer, tmp_path / "cache", stop=False)
        with pytest.raises(BadRow, match=r"mixed.jsonl:2: a row must be an object"):
            build_cache(mixed, tokenizer, tmp_path / "cache", stop=True)

    def test_a_source_without_trained_tokens_is_refused(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        masked = write_rows(tmp_path / "masked.jsonl", [{"input_ids": [1, 2], "labels": [1, -100]}] * 3)
        with pytest.raises(DataError, match=r"masked.jsonl: none of its 3 rows has a token to train on"):
            build_cache(masked, tokenizer, tmp_path, stop=False).check_trainable()
        long = write_rows(tmp_path / "long.jsonl", [{"input_ids": [1] * 200}])
        reason = r"none of its 1 rows has a token to train on\n  1 are longer than .* \(up to 200 tokens\), 0 are bad$"
        with pytest.raises(DataError, match=reason):
            build_cache(long, tokenizer, tmp_path).check_trainable()

    def test_tokens_are_logged_with_the_rows_that_have_them(
        self, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1] * length} for length in (5, 200, 7)])
        log_counts(build_cache(rows, tokenizer, tmp_path), Console("plain"))
        assert "a.jsonl: 2 of 3 rows, 12 tokens" in "".join(capsys.readouterr())

    def test_a_source_without_rows_is_refused(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(DataError, match=r"empty.jsonl: the data is empty"):
            build_cache(tmp_path / "empty.jsonl", tokenizer, tmp_path)
        (tmp_path / "junk.jsonl").write_text("a\nb\n")
        with pytest.raises(DataError, match="junk.jsonl: no row has a known format"):
            build_cache(tmp_path / "junk.jsonl", tokenizer, tmp_path, stop=False)
