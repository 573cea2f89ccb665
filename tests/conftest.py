"""Fixtures of most tests: tiny models, a tokenizer, small data. Nothing is downloaded."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny import make_llama, write_rows
from torchstone import api, cli
from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.builtin import tokenizer_folder
from torchstone.demo.corpus import chat_rows, corpus_rows
from torchstone.training import loop

# More threads add in another order: with two, the suite stands in for another machine. Ranks have one thread.
torch.set_num_threads(int(os.environ.get("TORCHSTONE_TEST_THREADS", "1")))

# Tests start processes in other folders, where a relative path would mean something else.
if "PYTHONPATH" in os.environ:
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

# nohup and the background jobs of a shell ignore these, and every process that a test starts would too.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

GPU_TESTS = Path(__file__).parent / "gpu_tests"
Command = Callable[..., tuple[int, str, str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in gpu_tests/ need a CUDA device and are skipped without one."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is false"))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder("demo:tokenizer", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Path]:
    """The folder of a tiny random model, by family and shape. Tests must not change it."""
    from tiny_families import make_model

    return cache(lambda case: make_model(tmp_path_factory.mktemp(case[0]), *case))


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A Hugging Face folder of a tiny random Llama with the demo's tokenizer."""
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "text.jsonl", corpus_rows(60))


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "chat.jsonl", chat_rows(30))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What runs keep for others is not left in the user's cache."""
    os.environ.setdefault("TORCHSTONE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def young_garbage() -> Iterator[None]:
    """A run begins with a collection of all garbage. Among all that the tests import it takes a quarter of a second,
    more than the steps of a short run. In this process it is one of young garbage; in others it is what it is. Old
    garbage could hold memory of a GPU, so with one nothing changes."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(loop, "gc", SimpleNamespace(**vars(gc) | {"collect": lambda _=1: gc.collect(1)}))
        yield


@pytest.fixture
def sync_mode() -> Iterator[None]:
    """A test may make it an error to wait for the GPU."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def reset_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, text_file: Path) -> dict[str, Any]:
    """Overrides: two layers, short rows."""
    return {
        "model.depth": 2, "model.width": 32, "model.heads": 4, "model.tokenizer": str(tokenizer_dir),
        "data.path": str(text_file), "data.context_length": 32,
        "data.cache_dir": str(tmp_path_factory.getbasetemp() / "datasets"), "training.global_batch_size": 4,
        "observe.console": "quiet", "system.device": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory, short_run: dict[str, Any]) -> Path:
    """The checkpoint of a small model, to be tuned."""
    changes = {"training.max_steps": 2, "output_dir": str(tmp_path_factory.mktemp("base") / "run")}
    checkpoint = api.train(overrides=short_run | changes).checkpoint
    assert checkpoint is not None
    return checkpoint


@pytest.fixture
def settings(tmp_path: Path, short_run: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Overrides for a short run. `training__max_steps=2` sets training.max_steps."""
    own = {"training.max_steps": 6, "optim.learning_rate": 1e-3, "output_dir": str(tmp_path / "run")}

    def make(**changes: Any) -> dict[str, Any]:
        return short_run | own | {key.replace("__", "."): value for key, value in changes.items()}

    return make


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, stdout and stderr of the main function of a program, in this process."""

    def run(main: Callable[[], None], *argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def torchstone(run_main: Command) -> Command:
    """Exit code, stdout and stderr of `torchstone ARGS`, in this process."""
    return partial(run_main, cli.main, "torchstone")
