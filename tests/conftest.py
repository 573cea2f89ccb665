"""What most tests share: tiny models, a tokenizer, small data. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstone.data.tokenize import Tokenizer, load_tokenizer
from torchstone.demo.builtin import tokenizer_folder
from torchstone.demo.corpus import chat_rows, corpus_rows

torch.set_num_threads(1)

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder("demo:tokenizer", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A Hugging Face folder of a tiny random Llama with the demo's tokenizer."""
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer)


def make_llama(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(TINY_LLAMA | changes))).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "text.jsonl", corpus_rows(60))


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "chat.jsonl", chat_rows(30))


@pytest.fixture
def settings(
    tmp_path: Path, tokenizer_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Overrides for a run that takes a moment: two layers, short rows. Dots are written as double underscores."""

    def make(**changes: Any) -> dict[str, Any]:
        base = {
            "model.depth": 2,
            "model.width": 32,
            "model.heads": 4,
            "model.tokenizer": str(tokenizer_dir),
            "data.path": str(text_file),
            "data.context_length": 32,
            "data.cache_dir": str(tmp_path_factory.getbasetemp() / "datasets"),
            "training.max_steps": 6,
            "training.global_batch_size": 4,
            "optim.learning_rate": 1e-3,
            "observe.console": "quiet",
            "system.device": "cpu",
            "output_dir": str(tmp_path / "run"),
        }
        return base | {key.replace("__", "."): value for key, value in changes.items()}

    return make
