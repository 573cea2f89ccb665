"""Tokenizers, loaded by Transformers: every folder that works there works here."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from torchstone.atomic import read_json_or_empty, translate_os_errors
from torchstone.data.encode import EncodingConfig, find_special_affixes, is_library_error
from torchstone.data.formats import CHAT_FORMATS, Message, RowFormat
from torchstone.data.sources import NO_COLUMNS
from torchstone.data.template import ChatTemplate, load_template
from torchstone.errors import TorchstoneError, UsageError

# How tokenizers with byte fallback name a single byte.
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
MAX_VOCAB_SIZE = 1 << 22
# An answer to find in what a template renders.
PROBE = "torchstone-probe"
# The parts of a tokenizer.json that decide how a text is split.
SPLITTING = ("normalizer", "pre_tokenizer")
# Transformers' name for a tokenizer that is exactly its tokenizer.json.
PLAIN_CLASS = "TokenizersBackend"


class Tokenizer:
    """A Transformers tokenizer with the few things that training needs. `template_name`: the file or the built-in name
    of its chat template, if it is not the one in its folder."""

    def __init__(self, hf: Any, path: str, template_name: str | None = None) -> None:
        self.hf = hf
        self.path = path
        self.template_name = template_name
        if not getattr(hf, "is_fast", False):
            raise UsageError(f"{path}: the tokenizer has no tokenizer.json (a fast tokenizer is needed)")
        # A saved tokenizer may have the truncation and padding of an earlier call.
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
        self.warnings: list[str] = []
        if getattr(hf.backend_tokenizer.model, "dropout", None):
            hf.backend_tokenizer.model.dropout = None
            self.warnings.append(f"{path}: the dropout of the tokenizer is off: the same text gives the same tokens")
        outside = [i for ids in self._affixes for i in ids if i >= self.size]
        if outside:
            raise UsageError(
                f"{path}: the tokenizer adds the token {outside[0]} to every text, but its vocabulary has {self.size}",
                "its tokenizer.json is damaged; copy or download it again",
            )
        for name in hf.chat_template if isinstance(hf.chat_template, dict) else ():
            if not re.fullmatch(r"[\w .-]{1,100}", name):
                raise UsageError(f"{path}: the chat template {name!r:.100} cannot be saved in a file of that name")
        self.stop_ids = self._find_stop_ids()

    @cached_property
    def size(self) -> int:
        """The largest id + 1. The number of tokens may be smaller: some vocabularies have gaps."""
        token, largest = max(self.hf.get_vocab().items(), key=operator.itemgetter(1))
        if largest >= MAX_VOCAB_SIZE:
            raise UsageError(
                f"{self.path}: the token {token!r} has the id {largest}, but ids must be below {MAX_VOCAB_SIZE}: an "
                "embedding has a row for every id",
                "the tokenizer.json is damaged; copy or download it again",
            )
        return largest + 1

    @property
    def eos_id(self) -> int:
        if self.hf.eos_token_id is None:
            raise UsageError(f"{self.path}: the tokenizer has no eos_token, which separates documents")
        return self.hf.eos_token_id

    @property
    def pad_id(self) -> int:
        """Any id works: nothing attends to padding and nothing predicts it."""
        candidates = [i for i in (self.hf.pad_token_id, self.hf.eos_token_id) if i is not None]
        return candidates[0] if candidates else 0

    def _find_stop_ids(self) -> list[int]:
        """Tokens that end an answer: eos, and the token with which the template ends an assistant turn."""
        ids = set() if self.hf.eos_token_id is None else {self.hf.eos_token_id}
        if self.hf.chat_template:
            messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
            try:
                end = self.template.render_text(messages).rpartition(PROBE)[2]
                ids.update([i for i in self.encode(end) if i in self.hf.all_special_ids][:1])
            except TorchstoneError as error:
                self.warnings.append(f"only the eos token ends an answer: {error.message}")
        return sorted(ids)

    @cached_property
    def text_prefix(self) -> list[int]:
        """The special tokens that the tokenizer itself puts before every text, such as BOS."""
        return self._affixes[0]

    @cached_property
    def _affixes(self) -> tuple[list[int], list[int]]:
        with self._translate_errors():
            return find_special_affixes(self.hf.backend_tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        if not self.hf.chat_template:
            raise UsageError(
                f"{self.path}: the data has conversations, but the tokenizer has no chat template",
                "set a file or a built-in template, such as --data.chat_template chatml",
            )
        if not isinstance(self.hf.chat_template, str):
            raise UsageError(
                f"{self.path}: the tokenizer has several chat templates: {', '.join(self.hf.chat_template)}",
                "save one of them to a file and set --data.chat_template FILE",
            )
        try:
            return ChatTemplate(self.hf.chat_template, self.hf.special_tokens_map)
        except UsageError as error:
            source = f"the tokenizer {self.path}" if self.template_name is None else self.template_name
            raise UsageError(f"{error.message} (in {source})", "set another --data.chat_template") from None

    @cached_property
    def unknown_template_tokens(self) -> list[str]:
        """Special tokens `<|name|>` of the chat template that are not single tokens of this tokenizer."""
        tokens = dict.fromkeys(re.findall(r"<\|\w+\|>", self.template.source))
        return [token for token in tokens if len(self.encode(token)) > 1]

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """The number of UTF-8 bytes that each token adds to a text, [size]. A special token adds none."""
        backend, names = self.hf.backend_tokenizer, self.hf.convert_ids_to_tokens(range(self.size))
        if "ByteLevel" in repr(backend.decoder):
            # Every character of a token's name stands for a byte.
            counts = [len(name or "") for name in names]
        else:
            # A token may lose a space at the start of a text, so it is decoded after another one.
            before = self.encode("a")
            texts = backend.decode_batch([[*before, number] for number in range(self.size)], skip_special_tokens=False)
            start = len(backend.decode(before, skip_special_tokens=False).encode())
            counts = [max(0, len(text.encode()) - start) for text in texts]
            counts = [1 if BYTE_TOKEN.fullmatch(name or "") else n for name, n in zip(names, counts, strict=True)]
        for number, token in self.hf.added_tokens_decoder.items():
            counts[number] = 0 if token.special else len(token.content.encode())
        return np.array(counts)

    def encode(self, text: str) -> list[int]:
        with self._translate_errors():
            return self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not is_library_error(error) or isinstance(error, (TorchstoneError, MemoryError)):
                raise
            raise UsageError(f"{self.path}: the tokenizer cannot encode a text: {error}") from None

    def encoding_config(
        self,
        row_format: RowFormat,
        max_length: int | None,
        on_long_row: str,
        train_on: str = "assistant",
        columns: Mapping[str, str] = NO_COLUMNS,
    ) -> EncodingConfig:
        has_template = row_format in CHAT_FORMATS or (row_format == "prompt" and isinstance(self.hf.chat_template, str))
        # `size` refuses huge ids first: to_str() loops up to the largest id.
        return EncodingConfig(
            vocab_size=self.size,
            tokenizer=self.hf.backend_tokenizer.to_str(),
            eos_id=self.hf.eos_token_id if row_format in (*CHAT_FORMATS, "tokens") else self.eos_id,
            template=self.template.source if has_template else None,
            special_tokens=dict(self.hf.special_tokens_map) if has_template else {},
            row_format=row_format,
            max_length=max_length,
            on_long_row=on_long_row,
            train_on=train_on if row_format in CHAT_FORMATS or row_format == "prompt" else "",
            columns=dict(columns),
        )

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        with translate_os_errors(folder):
            self.hf.save_pretrained(folder)

    def is_replaced_beside(self, model_type: str) -> bool:
        """Whether Transformers' AutoTokenizer splits texts differently in a folder of such a model.

        For some types (qwen2) it ignores the tokenizer's class, and replaces parts of the tokenizer.json by those of
        the original models.
        """
        from transformers.models.auto import tokenization_auto

        replaced = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
        if model_type not in replaced or type(self.hf).__name__ != PLAIN_CLASS:
            return False
        with TemporaryDirectory() as folder:
            self.save(Path(folder))
            Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}))
            other = tokenization_auto.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        own, its = (json.loads(hf.backend_tokenizer.to_str()) for hf in (self.hf, other))
        return any(own[part] != its[part] for part in SPLITTING)


def load_tokenizer(
    folder: Path,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Tokenizer:
    """Loads the tokenizer of a folder; `chat_template` (a file or a built-in name) replaces its template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise UsageError(
            f"tokenizer folder {folder} does not exist", "set --model.tokenizer to a folder with tokenizer.json"
        )
    try:
        # trust_remote_code is always passed: without it Transformers would ask on the terminal.
        loader = PreTrainedTokenizerFast if _is_plain(folder) else AutoTokenizer
        hf = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except BaseException as error:
        # Transformers and tokenizers raise all kinds of errors for damaged files.
        if not is_library_error(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise UsageError(f"{folder}: Transformers cannot read the tokenizer: {message}") from None
    if chat_template is not None:
        hf.chat_template = load_template(chat_template)
    tokenizer = Tokenizer(hf, str(folder), chat_template)
    if warn is not None:
        for warning in tokenizer.warnings:
            warn(warning)
    return tokenizer


def tokenizer_warnings(tokenizer: Tokenizer, model_type: str) -> list[str]:
    """About a tokenizer that Transformers does not load beside a model of this type."""
    if not tokenizer.is_replaced_beside(model_type):
        return []
    return [
        f"Transformers' AutoTokenizer splits texts as the first {model_type} models did, whatever tokenizer.json says: "
        "in Transformers, load this tokenizer by PreTrainedTokenizerFast.from_pretrained(FOLDER)"
    ]


def _is_plain(folder: Path) -> bool:
    """Whether the folder names the class of tokenizers that are exactly their tokenizer.json, as a saved run does:
    beside some models AutoTokenizer would ignore that."""
    config = read_json_or_empty(folder / "tokenizer_config.json")
    return config.get("tokenizer_class") == PLAIN_CLASS and "auto_map" not in config
