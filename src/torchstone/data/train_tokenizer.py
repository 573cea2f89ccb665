"""A byte-level BPE of one's own, from the same sources as training.

Every text can be written with it (all 256 bytes are in the vocabulary) and comes back as it was, which is checked on a
sample before the tokenizer is handed out. Texts are streamed: what grows with the data is the table of its distinct
words only. The same data gives the same tokenizer.json, byte for byte. Conversations are learned by the contents of
their messages; what the chat template puts around them are special tokens, an id each, where it writes `<|name|>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torchstone.atomic import new_folder
from torchstone.data.cache import Source, find_source
from torchstone.data.formats import PLAIN, Completion, Message, Shape, conversation_of, prompt_of, text_of
from torchstone.data.sources import BadRow, Row, chunks, rows, size_on_disk
from torchstone.data.template import ChatTemplate, named_template
from torchstone.data.words import CL100K, GPT2, O200K, QWEN2, word_encoder
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console

Pattern = Literal["gpt2", "gpt4", "gpt4o", "qwen2"]
PATTERNS: dict[Pattern, str] = {"gpt2": GPT2, "gpt4": CL100K, "gpt4o": O200K, "qwen2": QWEN2}
END, PAD, BEGIN = "<|endoftext|>", "<|pad|>", "<|begin_of_text|>"
BYTES = 256
LARGEST_VOCABULARY = 1 << 22
BATCH_BYTES = 1 << 20
# What is kept to be measured and checked, in characters: of one text, and of all together.
SAMPLE_TEXT, SAMPLE = 20_000, 2_000_000
BAD_ROWS_SHOWN = 3


def train_tokenizer(
    names: Sequence[str],
    vocab_size: int,
    *,
    special: Sequence[str] = (),
    chat_template: str | None = None,
    pattern: Pattern = "gpt4",
    min_frequency: int = 2,
    max_bytes: int | None = None,
    stop_on_bad_row: bool = True,
    console: Console | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A Transformers tokenizer of at most `vocab_size` tokens, and what was found.

    `special` are tokens besides those of the template, which is a file or the name of a built-in one. Sources are read
    row by row in turn, so that `max_bytes` of text are some of each.
    """
    if pattern not in PATTERNS:
        raise UsageError(f"no pattern {pattern!r}", f"there are {', '.join(get_args(Pattern))}")
    template = None if chat_template is None else named_template(chat_template)
    tokens = _special_tokens(template, special)
    if not names:
        raise UsageError("no data to learn from", "--data FILE names some")
    if min_frequency < 1 or vocab_size > LARGEST_VOCABULARY:
        raise UsageError(f"vocab_size is at most {LARGEST_VOCABULARY}, min_frequency at least 1")
    least = BYTES + len(tokens)
    if vocab_size < least:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small",
            f"the least possible is {least}: {BYTES} bytes and {len(tokens)} special tokens ({', '.join(tokens)})",
        )
    sources = [_text_source(name, stop_on_bad_row) for name in names]
    reading = _Reading(sources, max_bytes, stop_on_bad_row, console or Console("quiet"))
    backend = _trained(reading, vocab_size, tokens, PATTERNS[pattern], min_frequency)
    hf = _transformers(backend, tokens, template)
    size = len(hf)
    found = {
        "sources": [source.name for source in sources],
        "pattern": pattern,
        "chat_template": chat_template,
        "asked_vocab_size": vocab_size,
        "measured": {
            "vocab_size": size,
            "special_tokens": {token: hf.convert_tokens_to_ids(token) for token in tokens},
            "texts": reading.texts,
            "bytes": reading.bytes,
            **_checked(hf, reading.sample.texts),
        },
        "bad_rows": reading.bad_rows,
        "first_bad_rows": reading.first_bad_rows,
        "notes": [],
    }
    if size < vocab_size:
        found["notes"] = [
            f"the text fills a vocabulary of {size}, not of {vocab_size}: no other pair of tokens occurs "
            f"{min_frequency} times within a word"
        ]
    return hf, found


def save(hf: Any, folder: Path) -> None:
    """Writes a Hugging Face folder, which is whole or not there."""
    check_target(folder)
    with new_folder(folder) as work:
        hf.save_pretrained(work)


def check_target(folder: Path) -> None:
    """Refuses what would be overwritten; better asked before training than after."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists and is not an empty folder", "name a new one, or remove it first")


def _text_source(name: str, stop_on_bad_row: bool) -> Source:
    source = find_source(name, stop_on_bad_row=stop_on_bad_row)
    if source.shape == "tokens":
        raise UsageError(
            f"{name}: its rows are token ids already, there is no text to learn from", "name the text they came from"
        )
    return source


def _special_tokens(template: str | None, more: Sequence[str]) -> list[str]:
    """All special tokens in the order of their ids, each once."""
    for token in more:
        # A single character could be one of the letters that stand for bytes.
        if len(token.strip()) < 2:
            raise UsageError(f"{token!r} cannot be a special token", "one has two characters or more, as <|name|> has")
    begin = [BEGIN] if template is not None and re.search(r"\bbos_token\b", template) else []
    return list(dict.fromkeys([END, PAD, *begin, *_template_tokens(template), *more]))


def _template_tokens(template: str | None) -> list[str]:
    """Every `<|name|>` that a template has in its text or makes of a role."""
    if template is None:
        return []
    known = ChatTemplate(template, {"eos_token": END, "pad_token": PAD, "bos_token": BEGIN})
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tool: Message = {"role": "tool", "content": "c"}
    written = [template]
    for messages in ([user, answer], [{"role": "system", "content": "d"}, user, answer], [user, answer, tool]):
        # Not every template takes every role.
        with suppress(DataError):
            written.append(known.prompt(messages))
    return [token for text in written for token in re.findall(r"<\|\w+\|>", text)]


class _Sample:
    """Texts evenly spread over all that were offered, however many come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._size, self._offered, self._every = 0, 0, 1

    def offer(self, text: str) -> None:
        if self._offered % self._every == 0:
            self.texts.append(text[:SAMPLE_TEXT])
            self._size += len(self.texts[-1])
        self._offered += 1
        if self._size > SAMPLE:
            self.texts, self._every = self.texts[::2], 2 * self._every
            self._size = sum(map(len, self.texts))


@dataclass
class _Reading:
    """The texts of some sources, and what has been read of them."""

    sources: list[Source]
    max_bytes: int | None
    stop_on_bad_row: bool
    console: Console
    texts: int = 0
    bytes: int = 0
    bad_rows: int = 0
    first_bad_rows: list[dict[str, Any]] = field(default_factory=list)
    sample: _Sample = field(default_factory=_Sample)
    done: list[int] = field(default_factory=list)

    def batches(self) -> Iterator[list[str]]:
        """Texts, about a megabyte at a time."""
        total = sum(size_on_disk(path) for source in self.sources for path in source.files)
        self.done = [0] * len(self.sources)
        batch: list[str] = []
        until = BATCH_BYTES
        with self.console.progress("reading text", total) as progress:
            for text in self._all():
                batch.append(text)
                if self.bytes >= until:
                    yield batch
                    batch, until = [], self.bytes + BATCH_BYTES
                    progress(sum(self.done), f"{self.texts:,} texts")
        if batch:
            yield batch
        self.console.say(f"read {self.texts:,} texts, {self.bytes / 1e6:,.1f} MB; joining pairs of tokens")

    def _all(self) -> Iterator[str]:
        readers = [self._of(number, source) for number, source in enumerate(self.sources)]
        while readers:
            for reader in list(readers):
                texts = next(reader, None)
                if texts is None:
                    readers.remove(reader)
                    continue
                for text in texts:
                    if self.max_bytes is not None and self.bytes >= self.max_bytes:
                        return
                    self.texts += 1
                    self.bytes += len(text.encode())
                    self.sample.offer(text)
                    yield text

    def _of(self, number: int, source: Source) -> Iterator[list[str]]:
        """The texts of each row of a source."""
        before = [0]
        for path in source.files:
            before.append(before[-1] + size_on_disk(path))
        for chunk in chunks(source.files):
            for row in rows(chunk):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    yield _texts(row, source.shape)
                except BadRow as error:
                    if self.stop_on_bad_row:
                        raise
                    self._note(error)
            self.done[number] = before[chunk.end.file] + chunk.done

    def _note(self, bad: BadRow) -> None:
        self.bad_rows += 1
        if len(self.first_bad_rows) < BAD_ROWS_SHOWN:
            self.first_bad_rows.append({"file": str(bad.path), "line": bad.line, "reason": bad.reason})


def _texts(row: Row, shape: Shape) -> list[str]:
    """What is encoded as one text is learned as one; a message without content, a tool call, has none."""
    if shape in PLAIN:
        return [text_of(row, shape)]
    value = prompt_of(row) if shape == "prompt" else conversation_of(row, shape)
    if isinstance(value, Completion):
        return [value.prompt + value.completion]
    return [message["content"] for message in value.messages if message.get("content")]


def _trained(reading: _Reading, vocab_size: int, tokens: list[str], pattern: str, min_frequency: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(reading.batches(), trainer)
    if not reading.texts:
        raise DataError(f"{', '.join(source.name for source in reading.sources)}: no text to learn from")
    return backend


def _transformers(backend: Any, tokens: list[str], template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    named = {"eos_token": END, "pad_token": PAD} | ({"bos_token": BEGIN} if BEGIN in tokens else {})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[token for token in tokens if token not in named.values()],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _checked(hf: Any, texts: list[str]) -> dict[str, Any]:
    """Bytes per token on `texts`, every one of which must come back from its ids as it was."""
    backend = hf.backend_tokenizer
    if word_encoder(backend) is None:
        raise RuntimeError("the new tokenizer is not one that is encoded word by word")
    size, count = 0, 0
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        if hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != text:
            raise RuntimeError(f"the new tokenizer does not give back the text that begins {text[:80]!r}")
        size, count = size + len(text.encode()), count + len(ids)
    return {"bytes_per_token": size / count, "sample_texts": len(texts), "sample_bytes": size, "sample_tokens": count}
