"""Trains a byte-level BPE tokenizer from the same data sources as training.

It can encode every text (all 256 bytes are in the vocabulary) and decodes it exactly, which is verified on a sample.
Texts are streamed: only the table of distinct words grows with the data. The same data gives the same tokenizer.json,
byte for byte. From conversations it uses the contents of the messages; every `<|name|>` that the chat template writes
becomes a special token. The tokenizer begins every text with a BOS token, as nanochat does: without one, a model never
learns how a text starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torchstone.atomic import new_folder, translate_os_errors
from torchstone.data.cache import DataSource, columns_per_path, open_source
from torchstone.data.formats import (
    TEXT_FORMATS,
    Message,
    PromptCompletion,
    RowFormat,
    read_conversation,
    read_prompt,
    read_text,
)
from torchstone.data.sources import BadRow, Row, parse_rows, read_row, size_on_disk
from torchstone.data.template import ChatTemplate, load_template
from torchstone.data.tokenize import MAX_VOCAB_SIZE
from torchstone.data.word_encoder import CL100K, GPT2, O200K, QWEN2, build_word_encoder
from torchstone.errors import DataError, UsageError
from torchstone.observe.console import Console

Pattern = Literal["gpt2", "gpt4", "gpt4o", "qwen2"]
PATTERNS: dict[Pattern, str] = {"gpt2": GPT2, "gpt4": CL100K, "gpt4o": O200K, "qwen2": QWEN2}
EOS, PAD, BOS = "<|endoftext|>", "<|pad|>", "<|begin_of_text|>"
NO_BOS_NOTE = "texts begin without a BOS token: their first token is never learned"
NUM_BYTES = 256
BATCH_BYTES = 1 << 20
# Characters of the sample that the tokenizer is verified on: of one text, and of all texts.
SAMPLE_TEXT_SIZE, SAMPLE_SIZE = 20_000, 2_000_000
MAX_BAD_ROWS_SHOWN = 3
SKIP_HINT = "--skip-bad-rows leaves such rows out"


def train_tokenizer(
    names: Sequence[str],
    vocab_size: int,
    *,
    special: Sequence[str] = (),
    chat_template: str | None = None,
    bos: bool = True,
    pattern: Pattern = "gpt4",
    min_frequency: int = 2,
    max_bytes: int | None = None,
    stop_on_bad_row: bool = True,
    columns: Sequence[Mapping[str, str]] = (),
    console: Console | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns a Transformers tokenizer of at most `vocab_size` tokens, and a report.

    `special` are tokens besides those of the template, which is a file or the name of a built-in one. With `bos` the
    tokenizer puts a BOS token before a text, but not before what a chat template renders. Sources are read
    row by row in turn, so that `max_bytes` of text contain some of each. `columns` are those of `data.columns`.
    """
    if pattern not in PATTERNS:
        raise UsageError(f"unknown pattern {pattern!r}", f"use one of {', '.join(get_args(Pattern))}")
    template = None if chat_template is None else load_template(chat_template)
    notes: list[str] = []
    tokens = _special_tokens(template, special, bos, notes)
    _check_sizes(names, vocab_size, min_frequency, tokens)
    console = console or Console("quiet")
    sources = [
        _open_text_source(name, stop_on_bad_row, mapping)
        for name, mapping in zip(names, columns_per_path(columns, names), strict=True)
    ]
    for note in [note for source in sources for note in source.notes]:
        console.info(note)
    reader = _TextReader(sources, max_bytes, stop_on_bad_row, console)
    backend = _train_bpe(reader, vocab_size, tokens, PATTERNS[pattern], min_frequency)
    if bos:
        _add_bos(backend)
    hf = _to_transformers(backend, tokens, template)
    size = len(hf)
    notes.append(f"every text begins with {BOS} (--no-bos leaves it out)" if bos else NO_BOS_NOTE)
    if size < vocab_size:
        notes.append(
            f"the vocabulary has {size} tokens, not {vocab_size}: no other pair of tokens occurs {min_frequency} times "
            "within a word"
        )
    report = {
        "sources": [source.name for source in sources],
        "pattern": pattern,
        "chat_template": chat_template,
        "bos_token": BOS if bos else None,
        "asked_vocab_size": vocab_size,
        "measured": {
            "vocab_size": size,
            "special_tokens": {token: hf.convert_tokens_to_ids(token) for token in tokens},
            "texts": reader.num_texts,
            "bytes": reader.num_bytes,
            **_verify(hf, reader.sample.texts),
        },
        "bad_rows": reader.num_bad_rows,
        "first_bad_rows": reader.first_bad_rows,
        "notes": notes,
    }
    return hf, report


def save_tokenizer(hf: Any, folder: Path) -> None:
    """Writes a Hugging Face folder atomically."""
    check_target(folder)
    with new_folder(folder) as work, translate_os_errors(folder):
        hf.save_pretrained(work)


def check_target(folder: Path) -> None:
    """Raises UsageError if the folder is not new or empty. Call it before training the tokenizer."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists and is not an empty folder", "use a new folder, or remove it first")


def _check_sizes(names: Sequence[str], vocab_size: int, min_frequency: int, tokens: list[str]) -> None:
    if not names:
        raise UsageError("no training data", "add --data FILE")
    if min_frequency < 1 or vocab_size > MAX_VOCAB_SIZE:
        raise UsageError(f"vocab_size must be at most {MAX_VOCAB_SIZE}, and min_frequency at least 1")
    minimum = NUM_BYTES + len(tokens)
    if vocab_size < minimum:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small",
            f"the minimum is {minimum}: {NUM_BYTES} bytes and {len(tokens)} special tokens ({', '.join(tokens)})",
        )


def _open_text_source(name: str, stop_on_bad_row: bool, columns: Mapping[str, str]) -> DataSource:
    try:
        source = open_source(name, "auto", stop_on_bad_row, columns)
    except BadRow as error:
        raise error.with_hint(SKIP_HINT) from None
    if source.row_format == "tokens":
        raise UsageError(f"{name}: its rows are token ids, not text", "use the text they came from")
    return source


def _special_tokens(template: str | None, more: Sequence[str], bos: bool, notes: list[str]) -> list[str]:
    """All special tokens in the order of their ids."""
    for token in more:
        # A single character could be one of the letters that stand for bytes.
        if len(token.strip()) < 2:
            raise UsageError(
                f"{token!r} cannot be a special token", "a special token has at least two characters, such as <|name|>"
            )
    has_bos = bos or (template is not None and re.search(r"\bbos_token\b", template))
    return list(dict.fromkeys([EOS, PAD, *([BOS] if has_bos else []), *_template_tokens(template, notes), *more]))


def _template_tokens(template: str | None, notes: list[str]) -> list[str]:
    """Every `<|name|>` in the source of a template or in what it renders."""
    if template is None:
        return []
    chat_template = ChatTemplate(template, {"eos_token": EOS, "pad_token": PAD, "bos_token": BOS})
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tool: Message = {"role": "tool", "content": "c"}
    texts = [template]
    for messages in ([user, answer], [{"role": "system", "content": "d"}, user, answer], [user, answer, tool]):
        # Not every template takes every role.
        try:
            texts.append(chat_template.render_prompt(messages))
        except DataError as error:
            reason = str(error)
    if len(texts) == 1:
        notes.append(f"the chat template renders no conversation, only its source is searched for tokens: {reason}")
    return [token for text in texts for token in re.findall(r"<\|\w+\|>", text)]


class _TextSample:
    """An evenly spaced sample of a stream of texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._size, self._count, self._every = 0, 0, 1

    def add(self, text: str) -> None:
        if self._count % self._every == 0:
            self.texts.append(text[:SAMPLE_TEXT_SIZE])
            self._size += len(self.texts[-1])
        self._count += 1
        if self._size > SAMPLE_SIZE:
            self.texts, self._every = self.texts[::2], 2 * self._every
            self._size = sum(map(len, self.texts))


@dataclass
class _TextReader:
    """Reads the texts of some sources, and counts them."""

    sources: list[DataSource]
    max_bytes: int | None
    stop_on_bad_row: bool
    console: Console
    num_texts: int = 0
    num_bytes: int = 0
    num_bad_rows: int = 0
    first_bad_rows: list[dict[str, Any]] = field(default_factory=list)
    sample: _TextSample = field(default_factory=_TextSample)
    bytes_done: list[int] = field(default_factory=list)

    def batches(self) -> Iterator[list[str]]:
        """Batches of about a megabyte."""
        total = sum(size_on_disk(path) for source in self.sources for path in source.files)
        self.bytes_done = [0] * len(self.sources)
        batch: list[str] = []
        next_batch = BATCH_BYTES
        with self.console.progress("reading text", total) as progress:
            for text in self._read_in_turn():
                batch.append(text)
                if self.num_bytes >= next_batch:
                    yield batch
                    batch, next_batch = [], self.num_bytes + BATCH_BYTES
                    progress(sum(self.bytes_done), f"{self.num_texts:,} texts")
        if batch:
            yield batch
        self.console.info(f"read {self.num_texts:,} texts, {self.num_bytes / 1e6:,.1f} MB; merging pairs of tokens")

    def _read_in_turn(self) -> Iterator[str]:
        readers = [self._read_source(number, source) for number, source in enumerate(self.sources)]
        while readers:
            for reader in list(readers):
                texts = next(reader, None)
                if texts is None:
                    readers.remove(reader)
                    continue
                for text in texts:
                    if self.max_bytes is not None and self.num_bytes >= self.max_bytes:
                        return
                    self.num_texts += 1
                    self.num_bytes += len(text.encode())
                    self.sample.add(text)
                    yield text

    def _read_source(self, number: int, source: DataSource) -> Iterator[list[str]]:
        """The texts of each row of a source."""
        file_starts = [0]
        for path in source.files:
            file_starts.append(file_starts[-1] + size_on_disk(path))
        for chunk in source.read_chunks():
            for row in parse_rows(chunk, source.columns):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    yield read_row(row, lambda row: _row_texts(row, source.row_format))
                except BadRow as error:
                    if self.stop_on_bad_row:
                        raise error.with_hint(SKIP_HINT) from None
                    self._count_bad_row(error)
            self.bytes_done[number] = file_starts[chunk.end.file] + chunk.bytes_done

    def _count_bad_row(self, bad: BadRow) -> None:
        self.num_bad_rows += 1
        if len(self.first_bad_rows) < MAX_BAD_ROWS_SHOWN:
            self.first_bad_rows.append({"file": str(bad.path), "line": bad.line, "reason": bad.reason})


def _row_texts(row: Row, row_format: RowFormat) -> list[str]:
    """The texts of a row as they will be encoded. A message without content, such as a tool call, has none."""
    if row_format in TEXT_FORMATS:
        return [read_text(row, row_format)]
    value = read_prompt(row) if row_format == "prompt" else read_conversation(row, row_format)
    if isinstance(value, PromptCompletion):
        return [value.prompt + value.completion]
    return [message["content"] for message in value.messages if message.get("content")]


def _train_bpe(reader: _TextReader, vocab_size: int, tokens: list[str], pattern: str, min_frequency: int) -> Any:
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
    backend.train_from_iterator(reader.batches(), trainer)
    if not reader.num_texts:
        raise DataError(f"{', '.join(source.name for source in reader.sources)}: there is no text")
    return backend


def _add_bos(backend: Any) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )


def _to_transformers(backend: Any, tokens: list[str], template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    named = {"eos_token": EOS, "pad_token": PAD} | ({"bos_token": BOS} if BOS in tokens else {})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[token for token in tokens if token not in named.values()],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _verify(hf: Any, texts: list[str]) -> dict[str, Any]:
    """Checks that every text decodes exactly; returns the bytes per token."""
    backend = hf.backend_tokenizer
    if build_word_encoder(backend) is None:
        raise RuntimeError("the word encoder does not support the new tokenizer")
    size, count = 0, 0
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        if hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != text:
            raise RuntimeError(f"the new tokenizer does not decode the text that starts with {text[:80]!r}")
        size, count = size + len(text.encode()), count + len(ids)
    return {"bytes_per_token": size / count, "sample_texts": len(texts), "sample_bytes": size, "sample_tokens": count}
