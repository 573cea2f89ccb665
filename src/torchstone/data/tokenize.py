"""Tokenizers, and rows to ids with labels.

The tokenizer is read by Transformers, so every folder that works there works here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchstone.data.formats import IGNORED, Shape, messages_of, text_of, tokens_of
from torchstone.data.sources import Row
from torchstone.data.template import ChatTemplate, Message
from torchstone.errors import DataError, UsageError


@dataclass
class Encoded:
    """One sequence: ids, and a label for each as Transformers has them (not shifted; -100 is not learned)."""

    ids: np.ndarray
    labels: np.ndarray

    @property
    def loss_tokens(self) -> int:
        """Labels that are really predicted: the first one has nothing before it."""
        return int((self.labels[1:] != IGNORED).sum())


class Tokenizer:
    """A Transformers tokenizer with the few things training needs of it."""

    def __init__(self, hf: Any, source: str) -> None:
        self.hf = hf
        self.source = source
        if not getattr(hf, "is_fast", False):
            raise UsageError(f"{source}: the tokenizer has no tokenizer.json (a fast tokenizer is needed)")
        # A saved tokenizer may carry the settings of somebody's last call, which would cut or pad every row here.
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()

    @cached_property
    def size(self) -> int:
        """All ids are smaller than this. The number of tokens would not do: some vocabularies have gaps."""
        return max(self.hf.get_vocab().values()) + 1

    @property
    def eos_id(self) -> int:
        if self.hf.eos_token_id is None:
            raise UsageError(
                f"{self.source}: the tokenizer has no end-of-text token, so documents could not be told apart"
            )
        return self.hf.eos_token_id

    @property
    def pad_id(self) -> int:
        """Any id will do: padding is seen by nobody and predicted by nobody."""
        found = [i for i in (self.hf.pad_token_id, self.hf.eos_token_id) if i is not None]
        return found[0] if found else 0

    @cached_property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the end of text, and the token the template ends an assistant turn with."""
        found = set() if self.hf.eos_token_id is None else {self.hf.eos_token_id}
        if self.hf.chat_template:
            messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            rendered = self.template.conversation(messages)
            answer = rendered.text[slice(*rendered.trained[0])]
            special = [i for i in self.encode(answer.partition("b")[2]) if i in self.hf.all_special_ids]
            found.update(special[:1])
        return sorted(found)

    @cached_property
    def template(self) -> ChatTemplate:
        if not self.hf.chat_template:
            raise UsageError(
                f"{self.source}: the data holds conversations, but the tokenizer has no chat template",
                "use a tokenizer with a chat_template, or rows of shape text or input_ids",
            )
        if not isinstance(self.hf.chat_template, str):
            raise UsageError(f"{self.source}: the tokenizer has several chat templates; keep one")
        return ChatTemplate(self.hf.chat_template, self.hf.special_tokens_map)

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever any text could be tokenized or rendered otherwise."""
        parts = [self.hf.backend_tokenizer.to_str(), str(self.hf.chat_template), json.dumps(self.hf.special_tokens_map)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str], special: bool = False) -> list[Any]:
        """`special` adds what the tokenizer itself puts around a text, such as a beginning of text."""
        return self.hf.backend_tokenizer.encode_batch(texts, add_special_tokens=special)

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UsageError(
            f"tokenizer folder {folder} does not exist", "model.tokenizer names a folder with tokenizer.json"
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # Transformers meets damaged files with whatever they make it stumble over.
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"{folder}: no tokenizer that Transformers can read: {said}") from None
    return Tokenizer(hf, str(folder))


@dataclass
class Counts:
    """What became of the rows; printed, kept in the cache and in the metrics.

    `dropped_untrained` are rows of which nothing that is trained was left after cutting them.
    """

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    dropped_long: int = 0
    truncated_long: int = 0
    dropped_untrained: int = 0
    straddling_tokens: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.dropped_long + self.dropped_untrained


class Encoder:
    """Rows of one shape to `Encoded` sequences, in batches (the tokenizer works on all cores)."""

    def __init__(self, tokenizer: Tokenizer, shape: Shape, limit: int | None, on_long_row: str) -> None:
        self.tokenizer, self.shape, self.limit, self.on_long_row = tokenizer, shape, limit, on_long_row
        self.counts = Counts()

    def encode(self, rows: list[Row]) -> list[Encoded]:
        """Text and ids as they are; conversations with only the assistant's tokens as labels."""
        encoders = {"text": self._texts, "messages": self._conversations, "tokens": self._tokens}
        kept = []
        for row, sequence in zip(rows, encoders[self.shape](rows), strict=True):
            fitted = self._fit(row, sequence)
            self.counts.rows += 1
            if fitted is not None:
                self.counts.sequences += 1
                self.counts.tokens += len(fitted.ids)
                self.counts.trained_tokens += fitted.loss_tokens
                kept.append(fitted)
        return kept

    def _texts(self, rows: list[Row]) -> list[Encoded]:
        end = self.tokenizer.eos_id
        sequences = []
        for encoding in self.tokenizer.encode_batch([text_of(row) for row in rows], special=True):
            found = encoding.ids if encoding.ids[-1:] == [end] else [*encoding.ids, end]
            ids = np.array(found, dtype=np.int64)
            sequences.append(Encoded(ids, ids))
        return sequences

    def _tokens(self, rows: list[Row]) -> list[Encoded]:
        found = [tokens_of(row, self.tokenizer.size) for row in rows]
        return [Encoded(np.array(t.ids, dtype=np.int64), np.array(t.labels, dtype=np.int64)) for t in found]

    def _conversations(self, rows: list[Row]) -> list[Encoded]:
        rendered = []
        for row in rows:
            messages = messages_of(row)
            try:
                rendered.append(self.tokenizer.template.conversation(messages))
            except DataError as error:
                raise row.error(error.message, error.hint) from None
        encodings = self.tokenizer.encode_batch([r.text for r in rendered])
        sequences = []
        for row, conversation, encoding in zip(rows, rendered, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int64)
            trained = self._trained(np.array(encoding.offsets).reshape(-1, 2), conversation.trained)
            if not trained[1:].any():
                raise row.error("no token of this conversation would be trained")
            sequences.append(Encoded(ids, np.where(trained, ids, IGNORED)))
        return sequences

    def _trained(self, offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
        """A token belongs to the answer when it ends inside it: the model must produce it to go on."""
        trained: np.ndarray = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            inside = (offsets[:, 1] > start) & (offsets[:, 1] <= end) & (offsets[:, 0] < end)
            self.counts.straddling_tokens += int((inside & (offsets[:, 0] < start)).sum())
            trained |= inside
        return trained

    def _fit(self, row: Row, sequence: Encoded) -> Encoded | None:
        if self.limit is None or len(sequence.ids) <= self.limit:
            return sequence
        if len(self.counts.examples) < 5:
            self.counts.examples.append(f"{row.path}:{row.line} ({len(sequence.ids)} tokens)")
        if self.on_long_row == "drop":
            self.counts.dropped_long += 1
            return None
        cut = Encoded(sequence.ids[: self.limit], sequence.labels[: self.limit])
        if cut.loss_tokens == 0:
            self.counts.dropped_untrained += 1
            return None
        self.counts.truncated_long += 1
        return cut
