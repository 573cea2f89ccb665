"""Makes tiny models and files for tests, and reads files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchstone.data.sources import NO_COLUMNS, BadRow, Row, find_files, parse_rows, read_chunks
from torchstone.data.tokenize import Tokenizer

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


def make_llama(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    """Saves a random Llama as Transformers does; the same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(TINY_LLAMA | changes))).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def make_scripted_llama(folder: Path, tokenizer: Tokenizer, chain: list[int], **changes: Any) -> Path:
    """Saves a Llama that follows every token of `chain` by the next one, whatever comes before; tokens are distinct."""
    from safetensors.torch import load_file, save_file

    assert len(set(chain)) == len(chain) <= TINY_LLAMA["hidden_size"]
    file = make_llama(folder, tokenizer, **changes) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()
    for dim, token in enumerate(chain):
        tensors["model.embed_tokens.weight"][token, dim] = 1.0
        if dim:
            tensors["lm_head.weight"][token, dim - 1] = 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def chat_row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(name: str | Path, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Row]:
    """Yields every row of a path; raises the first bad one."""
    for chunk in read_chunks(find_files(str(name)), columns=columns):
        for row in parse_rows(chunk, columns):
            if isinstance(row, BadRow):
                raise row
            yield row


def flags(overrides: dict[str, Any]) -> list[str]:
    """Overrides as command-line arguments."""
    keys = [f"--{key}={value}" for key, value in overrides.items() if key != "output_dir"]
    return [*keys, f"--output-dir={overrides['output_dir']}"]
