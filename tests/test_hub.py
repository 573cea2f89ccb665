"""Models and datasets on the hub, against a local server that speaks its API."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.utils import enable_progress_bars

from hub_server import HubServer, folder_files, hub_server
from tiny import flags, make_llama
from torchstone import api, hub
from torchstone.config import load_config
from torchstone.data.sources import find_files
from torchstone.data.tokenize import Tokenizer
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.errors import CheckpointError, StoppedBySignal, UsageError
from torchstone.observe.console import Console
from torchstone.testing import launch_procs
from torchstone.training.stop import handle_stop_signals

Settings = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]
MODEL = "models/org/llama"
DATA = "datasets/org/rows"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server and an empty cache. HF_ENDPOINT and HF_HOME are read when huggingface_hub is imported, so this process
    needs the constants that they set; child processes get the variables."""
    with hub_server() as server:
        use_endpoint(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def model(name: str, **options: Any) -> hub.Snapshot:
    parsed = hub.parse_model(name)
    assert parsed is not None
    return hub.download_model(parsed, **options)


def rows(items: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in items).encode()


SMALL_MODEL = {
    "config.json": b"{}", "tokenizer.json": b"{} ", "tokenizer_config.json": b"[]", "generation_config.json": b"[ ]",
    "chat_template.jinja": b"a", "model.safetensors": b"weights",
    # Not needed: duplicates of the weights, code, documentation, other folders.
    "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"c", "model.gguf": b"g", "onnx/model.onnx": b"o",
    "original/tokenizer.model": b"t", "modeling_x.py": b"import os", "README.md": b"r", "trainer_state.json": b"s",
}  # fmt: skip
NEEDED = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
SHARDS = [
    "data/train-00000-of-00002-0123456789abcdef.parquet",
    "data/train-00001-of-00002-fedcba9876543210.parquet",
]


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
            ("org/name@main", ("org/name", "main")),
            ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
            ("gpt2", None),
            ("./org/name", None),
            ("/org/name", None),
            ("../name", None),
            ("org/name/", None),
            ("org/name/more", None),
            ("org/na--me", None),
            ("org/name@", None),
            ("demo:tokenizer", None),
        ],
    )
    def test_a_model_is_org_slash_name(self, name: str, expected: tuple[str, str | None] | None) -> None:
        parsed = hub.parse_model(name)
        assert (None if parsed is None else (parsed.repo, parsed.revision)) == expected
        assert parsed is None or str(parsed) == name

    def test_a_folder_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "org" / "name").mkdir(parents=True)
        assert hub.parse_model("org/name") is None

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("hub:org/name", ("org/name", None, "")),
            ("hub:org/name@v1.0", ("org/name", "v1.0", "")),
            ("hub:org/name/data/train-*.parquet", ("org/name", None, "data/train-*.parquet")),
            ("hub:org/name@refs/convert/parquet/default/train", ("org/name", "refs/convert/parquet", "default/train")),
        ],
    )
    def test_a_dataset_may_have_a_revision_and_a_path(self, name: str, expected: tuple[str, str, str]) -> None:
        parsed = hub.parse_data(name)
        assert parsed is not None
        assert (parsed.repo, parsed.revision, parsed.path) == expected
        assert str(parsed) == name

    @pytest.mark.parametrize("name", ["hub:", "hub:name", "hub:org/../x", "hub:org/name/../../x", "hub:org/name/**/x"])
    def test_a_bad_name_shows_the_form(self, name: str) -> None:
        with pytest.raises(UsageError, match="write hub:org/name"):
            hub.parse_data(name)


class TestModelFiles:
    def test_only_needed_files_are_downloaded(self, server: HubServer) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        snapshot = model("org/llama")
        assert str(snapshot.name) == f"org/llama@{sha}"
        assert server.downloads() == NEEDED
        assert (snapshot.folder / "model.safetensors").read_bytes() == b"weights"

    def test_a_tokenizer_needs_no_weights_and_trusted_code_is_included(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL)
        model("org/llama", weights=False, trust_remote_code=True)
        assert server.downloads() == sorted({*NEEDED, "modeling_x.py"} - {"model.safetensors"})

    def test_nothing_but_the_library_is_reported(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        (agent,) = server.user_agents
        assert "torch" not in agent
        assert "agent/" not in agent
        assert not [request for request in server.requests if "org/llama" not in request]

    def test_a_commit_in_the_cache_needs_no_request(self, server: HubServer) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        server.requests.clear()
        assert model(f"org/llama@{sha}").folder.name == sha
        assert server.requests == []

    def test_the_index_names_the_weights(self, server: HubServer) -> None:
        index = {"weight_map": {"a": "part[1].safetensors", "b": "model.safetensors-2.safetensors"}}
        weights = {"part[1].safetensors": b"1", "model.safetensors-2.safetensors": b"2"}
        files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), "x.safetensors": b""}
        server.commit(MODEL, files | weights)
        model("org/llama")
        assert server.downloads() == sorted({*files, *weights} - {"x.safetensors"})

    def test_without_safetensors_the_error_names_what_is_there(self, server: HubServer) -> None:
        server.commit(MODEL, {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        with pytest.raises(UsageError, match=r"no model\.safetensors .* only pytorch_model\.bin\n  pickles .* not re"):
            model("org/llama")
        assert server.downloads() == ["config.json"]

    def test_progress_bars_are_shown_by_a_console_with_bars(
        self, server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # Shows bars without a terminal, and if Transformers has switched them off.
        monkeypatch.setenv("TQDM_POSITION", "-1")
        enable_progress_bars()
        for style in ("lines", "bar"):
            server.commit(MODEL, SMALL_MODEL | {"generation_config.json": style.encode()})
            model("org/llama", console=Console(style))
            assert ("Fetching" in capsys.readouterr().err) == (style == "bar")

    def test_a_branch_that_moved_is_downloaded_again_and_the_log_says_so(
        self, server: HubServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for config in (b"old", b"new"):
            server.commit(MODEL, SMALL_MODEL | {"config.json": config})
            assert (model("org/llama").folder / "config.json").read_bytes() == config
            assert "downloading the config and tokenizer of org/llama to" in capsys.readouterr().err

    def test_a_revision_is_a_branch_or_a_commit(self, server: HubServer) -> None:
        old = server.commit(MODEL, {"config.json": b"old", "model.safetensors": b"1"})
        new = server.commit(MODEL, {"config.json": b"new", "model.safetensors": b"2"})
        side = server.commit(MODEL, {"config.json": b"side", "model.safetensors": b"3"}, branch="side")
        commits = [model(name).folder.name for name in ("org/llama", "org/llama@side", f"org/llama@{old}")]
        assert commits == [new, side, old]


class TestDataFiles:
    def download(self, name: str) -> list[str]:
        folder = Path(constants.HF_HUB_CACHE) / "datasets--org--rows" / "snapshots"
        return [str(path.relative_to(next(folder.iterdir()))) for path in find_files(name)]

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            (
                [*SHARDS, "data/test-00000-of-00001.parquet", "dataset_infos.json", "README.md", ".hidden.jsonl"],
                SHARDS,
            ),
            (["train.jsonl", "test.jsonl", "dev.jsonl"], ["train.jsonl"]),
            (["alpaca.json", "eval/questions.jsonl", "state.json", "dataset_dict.json"], ["alpaca.json"]),
            (["en/c4-train.00000.json.gz", "en/c4-train.00001.json.gz", "en/c4-validation.00000.json.gz"],
             ["en/c4-train.00000.json.gz", "en/c4-train.00001.json.gz"]),
            (["x-0123456789abcdef.jsonl", "x-fedcba9876543210.jsonl", "x-test.jsonl"],
             ["x-0123456789abcdef.jsonl", "x-fedcba9876543210.jsonl"]),
            (["data/[en] train.jsonl"], ["data/[en] train.jsonl"]),
            (["[en]/000.jsonl", "[en]/001.jsonl"], ["[en]/000.jsonl", "[en]/001.jsonl"]),
        ],
    )  # fmt: skip
    def test_the_default_is_the_training_split(self, server: HubServer, files: list[str], expected: list[str]) -> None:
        server.commit(DATA, {name: name.encode() for name in files})
        assert self.download("hub:org/rows") == expected
        assert server.downloads() == expected

    @pytest.mark.parametrize(
        "files",
        [
            ["main/train-00000-of-00001.jsonl", "main/test.jsonl", "socratic/train-00000-of-00001.jsonl"],
            ["data/train_sft.jsonl", "data/train_gen.jsonl"],
            ["rows_1000.jsonl", "rows_52000.jsonl"],
            ["train_100k.jsonl", "train_200k.jsonl"],
            ["wiki-2022.parquet", "wiki-2023.parquet"],
        ],
    )
    def test_several_training_sets_are_not_mixed(self, server: HubServer, files: list[str]) -> None:
        server.commit(DATA, {name: name.encode() for name in files})
        with pytest.raises(UsageError, match="several sets of training files") as caught:
            find_files("hub:org/rows")
        assert all(f"hub:org/rows/{name}" in str(caught.value) for name in files if "test" not in name)
        assert server.downloads() == []

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("a/x.jsonl", ["a/x.jsonl"]),
            ("a/*.jsonl", ["a/x.jsonl", "a/y.jsonl"]),
            ("*.jsonl", ["top.jsonl"]),
            ("a", ["a/b/z.jsonl", "a/x.jsonl", "a/y.jsonl"]),
            ("t/train[1].jsonl", ["t/train[1].jsonl"]),
            ("t/train[12].jsonl", ["t/train1.jsonl"]),
            ("texts", ["texts/a.txt", "texts/b.txt"]),
        ],
    )
    def test_a_path_is_a_file_a_folder_or_a_glob(self, server: HubServer, path: str, expected: list[str]) -> None:
        files = ["a/x.jsonl", "a/y.jsonl", "a/b/z.jsonl", "a/picture.png", "top.jsonl"]
        files += ["t/train1.jsonl", "t/train[1].jsonl", "texts/a.txt", "texts/b.txt"]
        server.commit(DATA, {name: name.encode() for name in files})
        assert self.download(f"hub:org/rows/{path}") == expected
        assert server.downloads() == expected

    def test_a_path_that_matches_nothing_shows_what_there_is(
        self, server: HubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
        sha = server.commit(DATA, {"a/x.jsonl": b"", "README.md": b""})
        for name in ("hub:org/rows/b/*.jsonl", f"hub:org/rows@{sha}/b"):
            with pytest.raises(UsageError, match=r"has no such file\n  for example hub:org/rows.*/a/x\.jsonl"):
                find_files(name)
        assert not caplog.messages


class TestErrors:
    @pytest.mark.parametrize(
        ("refused", "message"),
        [
            ((404, "RepoNotFound"), r"org/llama: no such folder, and no such model on http.*\n  .*hf auth.*HF_TOKEN"),
            ((401, ""), r"org/llama: no such folder, and no such model on http.*\n  .*hf auth login.*HF_TOKEN"),
            ((403, "GatedRepo"), r"only on request \(gated\)\n  ask for it on .*/org/llama, then .*HF_TOKEN"),
            ((401, "GatedRepo"), r"only on request \(gated\)"),
            ((403, "Blocked"), r"answered with an error: .*403 Forbidden: Blocked.*\n  .*HF_TOKEN"),
            ((500, ""), r"it cannot be downloaded from http.*500 Internal Server Error.*\n  check .* HF_ENDPOINT"),
        ],
    )  # fmt: skip
    def test_a_refusal_says_what_to_do(self, server: HubServer, refused: tuple[int, str], message: str) -> None:
        server.refused[MODEL] = refused
        with pytest.raises(UsageError, match=message):
            model("org/llama")

    @pytest.mark.parametrize(
        ("forged", "message"),
        [
            ({"sha": "../../../../ESCAPED"}, "the hub sends '../../../../ESCAPED' instead of a commit"),
            ({"sha": 5}, "the hub sends '5' instead of a commit"),
            ({"sha": None}, "the hub sends 'None' instead of a commit"),
            ({"name": 5}, "files without names"),
        ],
    )
    def test_a_commit_that_is_not_one_is_refused(
        self, server: HubServer, tmp_path: Path, forged: dict[str, object], message: str
    ) -> None:
        server.commit(MODEL, SMALL_MODEL)
        server.forged = forged
        with pytest.raises(UsageError, match=message):
            model("org/llama")
        assert not list(tmp_path.rglob("*ESCAPED*"))

    @pytest.mark.parametrize("index", [b'{"weight_map": {"a": 1}}', b"[" * 100_000])
    def test_a_damaged_index_of_weights(self, server: HubServer, index: bytes) -> None:
        server.commit(MODEL, {"config.json": b"{}", "model.safetensors.index.json": index})
        with pytest.raises(UsageError, match="not an index of weights"):
            model("org/llama")

    def test_an_unknown_revision(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL)
        with pytest.raises(UsageError, match=r"org/llama@v9: there is no revision v9\n  .*/org/llama/tree/main.*tags$"):
            model("org/llama@v9")
        server.commit(DATA, {"x/a.jsonl": b""})
        with pytest.raises(
            UsageError, match=r"there is no revision feature\n.*with a slash in its name, use the commit"
        ):
            find_files("hub:org/rows@feature/x/a.jsonl")

    def test_a_misspelled_folder_lists_its_neighbors(
        self, server: HubServer, torchstone: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        code, _, err = torchstone("export", "runs/min", "there")
        assert code == 2
        assert "runs/min: no such folder, and no such model on http" in err
        assert "(folders in runs: mine)" in err

    def test_an_endpoint_that_cannot_be_reached(self, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        use_endpoint(monkeypatch, UNREACHABLE)
        with pytest.raises(
            UsageError, match=rf"no such folder, and it cannot be downloaded from {UNREACHABLE}: ConnectError"
        ):
            model("org/llama")
        with pytest.raises(UsageError, match=rf"hub:org/rows: it cannot be downloaded from {UNREACHABLE}"):
            find_files("hub:org/rows")

    def test_a_misspelled_folder_is_no_problem_of_the_network(
        self, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        use_endpoint(monkeypatch, UNREACHABLE)
        with pytest.raises(UsageError) as caught:
            model("runs/min")
        assert caught.value.hint.startswith("check the name (folders in runs: mine); for a model on the hub, check the")

    def test_a_hub_that_does_not_answer(
        self, server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.1)
        server.delay = 0.5
        for name in ("org/mispelt", f"org/other@{sha}"):
            with pytest.raises(UsageError, match=f"{name}: no such folder, and it cannot be downloaded.*ReadTimeout"):
                model(name)
        capsys.readouterr()
        assert hub.download_model(hub.HubName("model", "org/llama"), weights=False).folder.name == sha
        asking, warning = capsys.readouterr().err.splitlines()[:2]
        assert asking == f"asking {server.url} for org/llama"
        assert "ReadTimeout" in warning

    def test_an_interrupted_download_is_completed_later(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL | {"model.safetensors": b"0123456789"})
        server.cuts["model.safetensors"] = [4, -1]
        with pytest.raises(
            UsageError, match="503 .*\n  .*run the same command again: files that are complete are kept"
        ):
            model("org/llama")
        server.requests.clear()
        # Now the connection only breaks once: the rest is asked for.
        server.cuts["model.safetensors"] = [4]
        snapshot = model("org/llama")
        assert (snapshot.folder / "model.safetensors").read_bytes() == b"0123456789"
        assert server.downloads() == ["model.safetensors"] * 2


class TestOffline:
    @pytest.fixture
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def test_a_filled_cache_is_used(
        self, server: HubServer, offline: Callable[[], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        server.commit(DATA, {"train.jsonl": b"{}"})
        model("org/llama")
        files = find_files("hub:org/rows")
        server.requests.clear()
        offline()
        capsys.readouterr()
        assert model("org/llama").folder.name == sha
        assert find_files("hub:org/rows") == files
        assert f"HF_HUB_OFFLINE is set): using commit {sha} of the cache" in capsys.readouterr().err
        assert server.requests == []

    def test_what_is_not_in_the_cache_is_an_error(self, server: HubServer, offline: Callable[[], None]) -> None:
        server.commit(MODEL, SMALL_MODEL)
        server.commit(DATA, {"a/1.jsonl": b"{}", "a/2.jsonl": b"{}"})
        model("org/llama", weights=False)
        find_files("hub:org/rows/a/1.jsonl")
        offline()
        for load in (
            lambda: model("org/llama"),
            lambda: model("org/other"),
            lambda: find_files("hub:org/rows/a/*.jsonl"),
        ):
            with pytest.raises(
                UsageError, match=r"it is not completely in the cache .*, and HF_HUB_OFFLINE is set\n  unset"
            ):
                load()

    def test_no_files_are_chosen_because_they_are_in_the_cache(
        self, server: HubServer, offline: Callable[[], None]
    ) -> None:
        server.commit(DATA, {"en/train.jsonl": b"{}", "fr/train.jsonl": b"{}"})
        server.commit("datasets/org/other", {"en/train.jsonl": b"{}", "fr/train.jsonl": b"{}"})
        find_files("hub:org/rows/fr/train.jsonl")
        hf_hub_download("org/other", "fr/train.jsonl", repo_type="dataset")
        offline()
        with pytest.raises(UsageError, match="several sets of training files"):
            find_files("hub:org/rows")
        with pytest.raises(UsageError, match=r"which files it has\n  name them: hub:org/other@\w{40}/PATH"):
            find_files("hub:org/other")

    def test_an_unreachable_hub_is_reported_and_the_cache_is_used(
        self, server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        use_endpoint(monkeypatch, UNREACHABLE)
        capsys.readouterr()
        assert model("org/llama").folder.name == sha
        # The hub is asked once.
        asking, warning = capsys.readouterr().err.splitlines()
        assert asking == f"asking {UNREACHABLE} for org/llama"
        assert warning.startswith("warning: org/llama: cannot reach the hub (ConnectError: ")
        assert warning.endswith(f"using commit {sha} of the cache")

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_busy_hub_is_an_unreachable_one(
        self, server: HubServer, capsys: pytest.CaptureFixture[str], status: int
    ) -> None:
        sha = server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        server.refused[MODEL] = (status, "")
        server.requests.clear()
        assert model("org/llama").folder.name == sha
        assert f"using commit {sha} of the cache" in capsys.readouterr().err
        assert server.requests == ["GET /api/models/org/llama"]


DOWNLOAD = """
import sys
from torchstone import hub
name = hub.parse_model(sys.argv[1])
assert "torch" not in sys.modules
hub.download_model(name)
"""


class TestProcesses:
    def start(self, code: str, *args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code, *args], stdout=pipe, stderr=pipe, text=True)

    def test_ctrl_c_ends_a_download_at_once(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL | {"model.safetensors": bytes(60 << 20)})
        server.pause = 0.02
        process = self.start(DOWNLOAD, "org/llama")
        while server.bytes_sent < 2 << 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode != 0
        # Two of the chunks that huggingface_hub reads.
        assert server.bytes_sent < 30 << 20

    def test_a_signal_is_not_taken_for_an_unreachable_hub(self, server: HubServer) -> None:
        server.commit(MODEL, SMALL_MODEL)
        model("org/llama")
        server.delay = 0.5
        with handle_stop_signals():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(StoppedBySignal):
                model("org/llama")


class TestRuns:
    @pytest.fixture
    def hub_run(self, server: HubServer, settings: Settings, llama_dir: Path) -> dict[str, Any]:
        """A run whose model, tokenizer and data are on the hub."""
        server.commit(MODEL, folder_files(llama_dir))
        server.commit(DATA, {"train.jsonl": rows(corpus_rows(60)), "test.jsonl": rows(corpus_rows(5))})
        names = {"model.path": "org/llama", "data.path": "hub:org/rows"}
        names["data.validation_path"] = "hub:org/rows/test.jsonl"
        base = settings(training__max_steps=2, optim__schedule="constant")
        return {key: value for key, value in base.items() if not key.startswith("model.")} | names

    def test_a_resumed_run_keeps_its_commits(
        self, server: HubServer, hub_run: dict[str, Any], llama_dir: Path, tmp_path: Path, tokenizer: Tokenizer,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        model_sha, data_sha = server.sha(MODEL, "main"), server.sha(DATA, "main")
        api.train(overrides=hub_run)
        pinned = json.loads((tmp_path / "run" / "config.json").read_text())
        assert pinned["model"]["path"] == f"org/llama@{model_sha}"
        assert pinned["data"]["path"] == [f"hub:org/rows@{data_sha}/train.jsonl"]
        assert pinned["data"]["validation_path"] == [f"hub:org/rows@{data_sha}/test.jsonl"]
        again = load_config(overrides=hub_run | {"training.max_steps": 4})
        assert api.describe_defaults(again).startswith("auto on cpu: training.precision fp32 (as in the checkpoint); ")

        # The branches move to another model and other data.
        new_model = make_llama(tmp_path / "new", tokenizer, initializer_range=0.2)
        server.commit(MODEL, folder_files(new_model))
        server.commit(DATA, {"train.jsonl": rows(corpus_rows(30))})
        (tmp_path / "run" / "config.json").unlink()
        # It needs no weights but those of its checkpoint.
        weights = next((tmp_path / "hf").rglob("model.safetensors"))
        weights.resolve().unlink()
        weights.unlink()
        server.requests.clear()
        capsys.readouterr()
        resumed = api.train(overrides=hub_run | {"training.max_steps": 4, "observe.console": "lines"})
        err = capsys.readouterr().err
        assert f"org/llama: the run continues with commit {model_sha}, with which it started" in err
        assert f"the run continues with commit {data_sha}" in err
        assert server.requests == []
        assert resumed.step == 4

        # The same as an uninterrupted run with the same files on disk.
        write = tmp_path / "files"
        write.mkdir()
        (write / "train.jsonl").write_bytes(server.repos[DATA][data_sha]["train.jsonl"])
        local = {
            "model.path": str(llama_dir), "data.path": str(write / "train.jsonl"), "data.validation_path": None,
            "training.max_steps": 4, "output_dir": str(tmp_path / "local"),
        }  # fmt: skip
        expected = api.train(overrides={key: value for key, value in (hub_run | local).items() if value is not None})
        assert resumed.loss == expected.loss

        with pytest.raises(CheckpointError, match=rf"model.path org/llama@{model_sha} is now org/llama@"):
            api.train(overrides=hub_run | {"model.path": f"org/llama@{server.sha(MODEL, 'main')}"})

    def test_a_resumed_run_keeps_several_commits_of_one_dataset(
        self, server: HubServer, hub_run: dict[str, Any], tmp_path: Path
    ) -> None:
        files = server.repos[DATA]["main"]
        server.commit(DATA, files | {"README.md": b"1"}, branch="v1")
        server.commit(DATA, files | {"README.md": b"2"}, branch="v2")
        commits = [server.sha(DATA, branch) for branch in ("v1", "v2")]
        overrides = hub_run | {"training.max_steps": 1, "data.path": "hub:org/rows@v1/train.jsonl"}
        overrides["data.validation_path"] = "hub:org/rows@v2/test.jsonl"
        api.train(overrides=overrides)
        server.commit(DATA, files | {"README.md": b"3"}, branch="v1")
        server.commit(DATA, files | {"README.md": b"4"}, branch="v2")
        assert api.train(overrides=overrides | {"training.max_steps": 2}).step == 2
        data = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
        assert data["path"] + data["validation_path"] == [
            f"hub:org/rows@{commits[0]}/train.jsonl",
            f"hub:org/rows@{commits[1]}/test.jsonl",
        ]
        with pytest.raises(UsageError, match=r"hub:org/rows: the checkpoint has several commits(.*\n).*@COMMIT"):
            api.train(overrides=overrides | {"training.max_steps": 3, "data.path": "hub:org/rows"})

    def test_named_validation_sets_keep_their_commits(
        self, server: HubServer, hub_run: dict[str, Any], text_file: Path, tmp_path: Path
    ) -> None:
        sha, sets = server.sha(DATA, "main"), {"test": "hub:org/rows/test.jsonl", "text": str(text_file)}
        overrides = hub_run | {"data.validation_path": sets, "training.max_steps": 1}
        for steps in (1, 2):
            api.train(overrides=overrides | {"training.max_steps": steps})
            data = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
            assert data["validation_path"] == {"test": [f"hub:org/rows@{sha}/test.jsonl"], "text": [str(text_file)]}
            server.commit(DATA, {"train.jsonl": rows(corpus_rows(30))})

    def test_commands_take_names_on_the_hub(
        self, server: HubServer, torchstone: Command, llama_dir: Path, tmp_path: Path
    ) -> None:
        server.commit(MODEL, folder_files(llama_dir))
        server.commit(DATA, {"train.jsonl": rows(chat_rows(4))})
        cache = ("--cache-dir", tmp_path / "cache")
        data = ("--data", "hub:org/rows")
        code, out, err = torchstone("evaluate", "org/llama", *data, "--questions", 1, "--json", *cache)
        assert code == 0, err
        assert json.loads(out)["data"] == f"hub:org/rows@{server.sha(DATA, 'main')}/train.jsonl"
        assert torchstone("export", "org/llama", tmp_path / "out", "--no-verify")[0] == 0
        assert torchstone("chat", "org/llama", "--prompt", "Hi", "--max-new-tokens", 2)[0] == 0
        assert torchstone("tokenizer", "train", tmp_path / "tok", *data, "--vocab-size", 300, *cache)[0] == 0
        names = ("--model.tokenizer", "org/llama", "--data.path", "hub:org/rows", "--data.cache-dir", tmp_path)
        assert torchstone("inspect-data", *names)[0] == 0

    def test_prepare_needs_no_weights_and_pins_a_config(
        self, server: HubServer, hub_run: dict[str, Any], torchstone: Command, tmp_path: Path
    ) -> None:
        overrides = [f"--{key}={value}" for key, value in hub_run.items() if key != "output_dir"]
        assert torchstone("prepare", *overrides)[0] == 0
        assert "model.safetensors" not in server.downloads()
        assert torchstone("prepare", *overrides, "--pin", tmp_path / "pinned.json")[0] == 0
        assert "model.safetensors" in server.downloads()
        config = load_config(tmp_path / "pinned.json")
        assert config.model.path == f"org/llama@{server.sha(MODEL, 'main')}"

    def test_workers_get_the_commits_and_ask_nothing(
        self, server: HubServer, hub_run: dict[str, Any], tmp_path: Path
    ) -> None:
        overrides = hub_run | {"training.max_steps": 1, "observe.console": "lines"}
        command = [sys.executable, "-m", "torchstone", "train", "--nproc", "1", *flags(overrides)]
        process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.returncode == 0, process.stderr
        pinned = json.loads((tmp_path / "run" / "config.json").read_text())
        assert pinned["model"]["path"] == f"org/llama@{server.sha(MODEL, 'main')}"
        # Only the preparation asked the hub, and only once for each name.
        assert process.stderr.count("downloading the weights of org/llama") == 1
        assert server.requests.count("GET /api/models/org/llama") == 1
        assert server.requests.count("GET /api/datasets/org/rows") == 2
        files = [request for request in server.requests if "/resolve/" in request]
        assert len(files) == len(set(files))

    def test_ranks_of_torchrun_download_once_and_compare_their_commits(
        self, server: HubServer, hub_run: dict[str, Any]
    ) -> None:
        server.commit(MODEL, server.repos[MODEL]["main"] | {"README.md": b"new"}, branch="side")
        where = (constants.ENDPOINT, constants.HF_HUB_CACHE)
        runs = [hub_run, hub_run | {"model.path": "org/llama@side"}]
        errors = launch_procs(train_on_rank, 2, *where, runs, backend=None)
        assert all("rank 1 has other commits from the hub than rank 0" in error for error in errors)
        # The files are the same in both commits, but for one that is not needed.
        assert server.downloads() == sorted(set(server.downloads()))
        assert "model.safetensors" in server.downloads()


def train_on_rank(endpoint: str, cache: str, overrides: list[dict[str, Any]]) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_endpoint(monkeypatch, endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        with pytest.raises(UsageError) as caught:
            api.train(overrides=overrides[int(os.environ["RANK"])])
        return str(caught.value)
