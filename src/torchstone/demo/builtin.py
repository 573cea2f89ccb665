"""The built-in data and tokenizer: `demo:corpus`, `demo:chat`, `demo:numbers`, what is held out of the last two
(`demo:heldout` and `demo:numbers-heldout`), and `demo:tokenizer`.

They are files, generated on first use and kept with the token cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchstone import atomic
from torchstone.demo.corpus import chat_rows, corpus_rows, number_rows
from torchstone.errors import UsageError

# Increased whenever the rows or the tokenizer change.
VERSION = 1
VOCAB_SIZE = 512
PREFIX = "demo:"

DATA: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "corpus": lambda: corpus_rows(24000),
    "chat": lambda: chat_rows(24000),
    "heldout": lambda: chat_rows(400, seed=3, held_out=True),
    "numbers": lambda: number_rows(24000),
    "numbers-heldout": lambda: number_rows(400, seed=5, held_out=True),
}

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def data_file(name: str, cache_dir: Path) -> str:
    """The file of a `demo:` name; any other path is returned as it is."""
    if not name.startswith(PREFIX):
        return name
    kind = name.removeprefix(PREFIX)
    if kind not in DATA:
        raise UsageError(f"unknown built-in data {name!r}", f"use {', '.join(PREFIX + known for known in DATA)}")
    path = _demo_folder(cache_dir) / f"{kind}.jsonl"
    if not path.is_file():
        with atomic.file_lock(path.with_name(f"{path.name}.lock")):
            if not path.is_file():
                atomic.write_text(path, "".join(json.dumps(row) + "\n" for row in DATA[kind]()))
    return str(path)


def tokenizer_folder(name: str, cache_dir: Path) -> Path:
    """The folder of demo:tokenizer; any other path is returned as it is."""
    if not name.startswith(PREFIX):
        return Path(name)
    if name != f"{PREFIX}tokenizer":
        raise UsageError(f"unknown built-in tokenizer {name!r}", f"use {PREFIX}tokenizer")
    folder = _demo_folder(cache_dir) / "tokenizer"
    if not folder.is_dir():
        with atomic.file_lock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                with atomic.new_folder(folder) as work, atomic.translate_os_errors(folder):
                    make_tokenizer().save_pretrained(work)
    return folder


def make_tokenizer() -> Any:
    """A byte-level BPE trained on the corpus. Capitals and digits are single tokens, so that letters can be counted."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[A-Z0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row["text"] for row in corpus_rows(2000)]
    texts += [row["messages"][0]["content"] for row in chat_rows(1000)]
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _demo_folder(cache_dir: Path) -> Path:
    return cache_dir / f"demo-v{VERSION}"
