"""Tokenizers. They are read by Transformers, so every folder that works there works here."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torchstone.data.encode import Recipe
from torchstone.data.formats import CHAT, Message, Shape
from torchstone.data.template import ChatTemplate, named_template
from torchstone.errors import UsageError


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
                "name a file or a built-in one, such as --data.chat_template chatml",
            )
        if not isinstance(self.hf.chat_template, str):
            raise UsageError(
                f"{self.source}: the tokenizer has several chat templates: {', '.join(self.hf.chat_template)}",
                "save the one you mean to a file and name it: --data.chat_template FILE",
            )
        return ChatTemplate(self.hf.chat_template, self.hf.special_tokens_map)

    @cached_property
    def broken_marks(self) -> list[str]:
        """What the chat template writes as a special token, `<|name|>`, and this tokenizer cuts into pieces."""
        written = dict.fromkeys(re.findall(r"<\|\w+\|>", self.template.source))
        return [mark for mark in written if len(self.encode(mark)) > 1]

    def encode(self, text: str) -> list[int]:
        return self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def recipe(self, shape: Shape, limit: int | None, on_long_row: str, train_on: str = "assistant") -> Recipe:
        """All that decides what rows of `shape` become, in plain values."""
        chats = shape in CHAT or (shape == "prompt" and isinstance(self.hf.chat_template, str))
        return Recipe(
            tokenizer=self.hf.backend_tokenizer.to_str(),
            vocab_size=self.size,
            eos_id=self.hf.eos_token_id if shape in (*CHAT, "tokens") else self.eos_id,
            template=self.template.source if chats else None,
            special_tokens=dict(self.hf.special_tokens_map) if chats else {},
            shape=shape,
            limit=limit,
            on_long_row=on_long_row,
            train_on=train_on if shape in CHAT or shape == "prompt" else "",
        )

    def decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)


def load_tokenizer(folder: Path, chat_template: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a folder, with another chat template where one is named (a file, or a built-in one).

    Transformers asks on the terminal whether to run a folder's code unless it is told.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UsageError(
            f"tokenizer folder {folder} does not exist", "model.tokenizer names a folder with tokenizer.json"
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Transformers meets damaged files with whatever they make it stumble over.
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"{folder}: no tokenizer that Transformers can read: {said}") from None
    if chat_template is not None:
        hf.chat_template = named_template(chat_template)
    return Tokenizer(hf, str(folder))
