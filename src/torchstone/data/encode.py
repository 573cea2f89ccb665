"""Encodes rows into token ids with labels.

An `EncodingConfig` is everything that decides what a row becomes. It has plain values only: their hash is the key of
the token cache, and any process can encode with it without importing Transformers or torch, which would take a second
and hundreds of megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from torchstone.data.formats import (
    IGNORE_INDEX,
    TEXT_FORMATS,
    Conversation,
    Message,
    PromptCompletion,
    RowFormat,
    check_encodable,
    read_conversation,
    read_flags,
    read_prompt,
    read_text,
    read_tokens,
    select_train_messages,
)
from torchstone.data.sources import BadRow, Chunk, Row, parse_rows, read_row
from torchstone.data.template import ChatTemplate, NotPrefixStableError, RenderedConversation
from torchstone.data.word_encoder import WordEncoder, build_word_encoder
from torchstone.errors import DataError, TorchstoneError, UsageError

MAX_EXAMPLES = 5
# The name of a token that no tokenizer has.
LOST = "torchstone-lost"
# How many texts are tried to find what a tokenizer puts around a text.
MAX_PROBES = 100
# Parts of a message that a template may drop, by their keys.
OPTIONAL_PARTS = {
    "tool calls": ("tool_calls", "function_call"),
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
}
# Most templates render these. They are only tried without a message whose text is not found.
BASIC_ROLES = {"system", "user", "assistant"}


@dataclass
class TokenSequence:
    """Ids, and a label for each as in Transformers: not shifted, -100 where nothing is learned."""

    ids: np.ndarray
    labels: np.ndarray

    @property
    def loss_tokens(self) -> int:
        """The number of labels that are predicted. The first one never is: there is nothing before it."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())

    def part(self, start: int, stop: int) -> TokenSequence:
        return TokenSequence(self.ids[start:stop], self.labels[start:stop])


@dataclass(frozen=True)
class EncodingConfig:
    """`tokenizer` is the text of a tokenizer.json, `template` the source of a chat template."""

    tokenizer: str
    vocab_size: int
    eos_id: int | None
    template: str | None
    special_tokens: dict[str, str]
    row_format: RowFormat
    max_length: int | None
    on_long_row: str
    train_on: str = "assistant"
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def id_dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def has_labels(self) -> bool:
        """False for text, whose labels are its ids."""
        return self.row_format not in TEXT_FORMATS

    def cache_key(self) -> dict[str, Any]:
        """The values by their original names, so that the keys of existing caches stay valid."""
        names = {"row_format": "shape", "max_length": "limit"}
        values = {names.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return values if self.columns else {name: value for name, value in values.items() if name != "columns"}


@dataclass
class RowCounts:
    """What became of the rows; printed, and kept in the cache and the metrics.

    `dropped_untrained` are rows without a loss token after cutting; `dropped_pieces` are such pieces of rows that are
    otherwise kept. `untrained` are sequences without loss tokens: they are kept, but nothing is learned from them.
    """

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bad_rows: int = 0
    dropped_long: int = 0
    truncated_long: int = 0
    split_long: int = 0
    cropped_tokens: int = 0
    dropped_untrained: int = 0
    dropped_pieces: int = 0
    untrained: int = 0
    straddling_tokens: int = 0
    lost_characters: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.bad_rows + self.dropped_long + self.dropped_untrained

    def add(self, other: RowCounts) -> None:
        for name in (f.name for f in fields(self) if f.name != "examples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples = [*self.examples, *other.examples][:MAX_EXAMPLES]


class BadRowRecord(NamedTuple):
    """A bad row in a form that can be pickled."""

    line: int
    reason: str
    hint: str | None
    raw: str


@dataclass
class EncodedChunk:
    """The concatenated sequences of a chunk, their lengths, and the lines they came from.

    `row_lengths` has the tokens of every good row before it is cut or dropped.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    lengths: np.ndarray
    row_lengths: np.ndarray
    loss_tokens: np.ndarray
    lines: np.ndarray
    counts: RowCounts
    bad_rows: list[BadRowRecord]


class Encoder:
    """With `stop_on_bad_row` the rows of a chunk after a bad one are not encoded."""

    def __init__(self, config: EncodingConfig, stop_on_bad_row: bool = False) -> None:
        self.config, self.stop_on_bad_row = config, stop_on_bad_row
        self.counts = RowCounts()

    def encode_chunk(self, chunk: Chunk) -> EncodedChunk:
        self.counts = RowCounts()
        rows: list[Row] = []
        bad_rows: list[BadRow] = []
        for row in parse_rows(chunk, self.config.columns):
            if not isinstance(row, BadRow):
                rows.append(row)
                continue
            bad_rows.append(row)
            if self.stop_on_bad_row:
                break
        self.counts.rows = len(rows) + len(bad_rows)
        sequences: list[tuple[int, TokenSequence]] = []
        row_lengths: list[int] = []
        for row, encoded in zip(rows, self._encode_rows(rows), strict=not self.stop_on_bad_row):
            if isinstance(encoded, BadRow):
                bad_rows.append(encoded)
            else:
                row_lengths.append(len(encoded.ids))
                sequences += [(row.line, sequence) for sequence in self._fit_length(row, encoded)]
        return self._to_chunk(sequences, row_lengths, sorted(bad_rows, key=lambda row: row.line))

    def _to_chunk(
        self, sequences: list[tuple[int, TokenSequence]], row_lengths: list[int], bad_rows: list[BadRow]
    ) -> EncodedChunk:
        empty: np.ndarray = np.zeros(0, dtype=np.int64)
        ids = np.concatenate([empty, *(s.ids for _, s in sequences)])
        if ids.max(initial=0) >= self.config.vocab_size:
            raise UsageError(f"the tokenizer gives the id {ids.max()}, but its vocabulary has {self.config.vocab_size}")
        ids = ids.astype(self.config.id_dtype)
        labels = None
        if self.config.has_labels:
            labels = np.concatenate([empty, *(s.labels for _, s in sequences)]).astype(np.int32)
        loss_tokens = np.array([s.loss_tokens for _, s in sequences], dtype=np.int64)
        self.counts.sequences, self.counts.tokens = len(sequences), len(ids)
        self.counts.trained_tokens, self.counts.bad_rows = int(loss_tokens.sum()), len(bad_rows)
        self.counts.untrained = int((loss_tokens == 0).sum())
        return EncodedChunk(
            ids,
            labels,
            np.array([len(s.ids) for _, s in sequences], dtype=np.int64),
            np.array(row_lengths, dtype=np.int64),
            loss_tokens,
            np.array([line for line, _ in sequences], dtype=np.int64),
            self.counts,
            [BadRowRecord(row.line, row.reason, row.row_hint, row.raw) for row in bad_rows],
        )

    def _encode_rows(self, rows: list[Row]) -> list[TokenSequence | BadRow]:
        row_format = self.config.row_format
        if row_format in TEXT_FORMATS:
            return self._encode_batch(rows, lambda row: read_text(row, row_format), self._encode_texts)
        if row_format == "tokens":
            return self._encode_batch(rows, lambda row: read_tokens(row, self.config.vocab_size), self._encode_tokens)
        return self._encode_batch(rows, self._read_rendered, self._encode_rendered)

    def _encode_batch(
        self,
        rows: list[Row],
        read: Callable[[Row], Any],
        encode: Callable[[list[Row], list[Any]], Iterable[TokenSequence | BadRow]],
    ) -> list[TokenSequence | BadRow]:
        """Applies `read` to each row and `encode` to all that it could read. Errors take the place of their rows."""
        results: list[Any] = []
        with nullcontext() if self.config.template is None else self.template.limits.batch():
            for row in rows:
                try:
                    results.append(read_row(row, read))
                except BadRow as error:
                    results.append(_without_frames(error))
                    if self.stop_on_bad_row:
                        break
        readable = [index for index, value in enumerate(results) if not isinstance(value, BadRow)]
        sequences = self._encode_readable([rows[i] for i in readable], [results[i] for i in readable], encode)
        for index, sequence in zip(readable, sequences, strict=True):
            results[index] = sequence
        return results

    def _encode_readable(
        self,
        rows: list[Row],
        values: list[Any],
        encode: Callable[[list[Row], list[Any]], Iterable[TokenSequence | BadRow]],
    ) -> list[TokenSequence | BadRow]:
        """Encodes all rows at once and, if that fails, one by one: an exception does not say which row it is about."""
        straddling_tokens = self.counts.straddling_tokens
        try:
            return list(encode(rows, values))
        except (TorchstoneError, MemoryError):
            raise
        except BaseException as error:
            if not is_library_error(error):
                raise
            if "memory allocation" in str(error):
                raise MemoryError(str(error)) from None
            if len(rows) == 1:
                return [_without_frames(rows[0].error(f"cannot be tokenized: {type(error).__name__}: {error}"))]
        self.counts.straddling_tokens = straddling_tokens
        return [
            result
            for row, value in zip(rows, values, strict=True)
            for result in self._encode_readable([row], [value], encode)
        ]

    def _encode_texts(self, rows: list[Row], texts: list[str]) -> Iterable[TokenSequence]:
        eos_id = self.config.eos_id
        assert eos_id is not None
        prefix, suffix = self._special_affixes
        by_word = self._encode_by_word(texts)
        remaining = [text for text, ids in zip(texts, by_word, strict=True) if ids is None]
        self.counts.lost_characters += sum(len(self._find_lost(text)) for text in remaining)
        encodings = iter(self.tokenizer.encode_batch_fast(remaining, add_special_tokens=False))
        for row, word_ids in zip(rows, by_word, strict=True):
            ids = next(encodings).ids if word_ids is None else word_ids
            # A piece of a large text file has no special tokens where the text goes on.
            ids = (prefix if row.has_text_start else []) + ids + (suffix if row.has_text_end else [])
            if row.has_text_end and ids[-1:] != [eos_id]:
                ids.append(eos_id)
            array = np.array(ids, dtype=np.int64)
            yield TokenSequence(array, array)

    def _encode_tokens(self, rows: list[Row], values: list[Any]) -> Iterable[TokenSequence]:
        return [TokenSequence(*np.array(ids_and_labels, dtype=np.int64)) for ids_and_labels in values]

    def _read_rendered(self, row: Row) -> RenderedConversation | PromptCompletion:
        row_format = self.config.row_format
        value = read_prompt(row) if row_format == "prompt" else read_conversation(row, row_format)
        if isinstance(value, PromptCompletion):
            return value
        if "tool_calls" in self.template.source:
            # A template that knows both names would write a call twice.
            messages = [{k: v for k, v in m.items() if k != "function_call"} for m in value.messages]
            value = replace(value, messages=messages)
        try:
            rendered = self._render(row, value)
            check_encodable(row, rendered.text)
            self._check_complete(row, value, rendered.text)
            return rendered
        except NotPrefixStableError as error:
            raise row.error(error.message, self._describe_difference(error)) from None
        except BadRow:
            raise
        except DataError as error:
            raise row.error(error.message, error.hint) from None

    def _render(self, row: Row, conversation: Conversation) -> RenderedConversation:
        messages, tools = conversation.messages, conversation.tools
        if self.config.train_on == "all" or conversation.unmask:
            masked = [index for index, flag in read_flags(row, messages).items() if not flag]
            return self.template.render_train_on_all(messages, tools, conversation.unmask, masked)
        trained = select_train_messages(row, conversation, self.config.train_on)
        return self.template.render_conversation(messages, trained, tools)

    def _check_complete(self, row: Row, conversation: Conversation, text: str) -> None:
        """Raises if the template drops a part of the conversation: then the text is the same without it."""
        messages, tools = conversation.messages, conversation.tools
        variants: list[tuple[str, list[Message], list[Any] | None]] = []
        if tools is not None:
            variants.append(("tools", messages, None))
        for name, keys in OPTIONAL_PARTS.items():
            if any(message.get(key) for message in messages for key in keys):
                variants.append((name, [{k: v for k, v in m.items() if k not in keys} for m in messages], tools))
        for role in {message["role"] for message in messages if message["content"]} - BASIC_ROLES:
            variants.append((f"{role} messages", [m for m in messages if m["role"] != role], tools))
        for index, message in enumerate(messages):
            content = str(message["content"] or "").strip()
            if message["role"] in BASIC_ROLES and content not in text:
                changed = [*messages[:index], {**message, "content": f"{content}."}, *messages[index + 1 :]]
                variants.append((f"{message['role']} messages", changed, tools))
        for name, without, tools_left in variants:
            if self._is_same_text(text, without, tools_left):
                raise row.error(
                    f"the chat template drops the {name} of this row",
                    "use a template that renders them, such as --data.chat_template chatml",
                )

    def _is_same_text(self, text: str, messages: list[Message], tools: list[Any] | None) -> bool:
        try:
            return self.template.render_text(messages, tools) == text
        except DataError:
            return False

    def _encode_rendered(self, rows: list[Row], values: list[Any]) -> Iterable[TokenSequence | BadRow]:
        """A rendered conversation already has its special tokens; a prompt with completion gets the tokenizer's own."""
        texts = [v.prompt + v.completion if isinstance(v, PromptCompletion) else v.text for v in values]
        for row, value, text, (id_list, offsets) in zip(
            rows, values, texts, self._encode_with_offsets(texts), strict=True
        ):
            if lost := self._find_lost(text):
                # The offsets of tokens after it may be wrong.
                yield row.error(
                    f"the tokenizer has no token for {lost[0]!r}, so the loss mask could be wrong",
                    "use a tokenizer that knows all bytes",
                )
                continue
            ids = np.array(id_list, dtype=np.int64)
            if isinstance(value, PromptCompletion):
                start = 0 if value.unmask or self.config.train_on == "all" else len(value.prompt)
                is_trained = self._loss_mask(offsets, [(start, len(value.prompt) + len(value.completion))])
                ids, is_trained = self._add_affixes(ids, is_trained)
            else:
                is_trained = self._loss_mask(offsets, value.train_spans)
            if is_trained[1:].any():
                yield TokenSequence(ids, np.where(is_trained, ids, IGNORE_INDEX))
            else:
                yield row.error("no token of this row would be trained on")

    def _encode_with_offsets(self, texts: list[str]) -> Iterable[tuple[list[int], np.ndarray]]:
        by_word = self._encode_by_word(texts)
        remaining = [text for text, ids in zip(texts, by_word, strict=True) if ids is None]
        encodings = iter(self.tokenizer.encode_batch(remaining, add_special_tokens=False))
        for text, word_ids in zip(texts, by_word, strict=True):
            if word_ids is not None and self._word_encoder is not None:
                yield word_ids, self._word_encoder.offsets(text, word_ids)
            else:
                encoding = next(encodings)
                yield encoding.ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _encode_by_word(self, texts: list[str]) -> list[list[int] | None]:
        return [None] * len(texts) if self._word_encoder is None else self._word_encoder.encode_batch(texts)

    def _add_affixes(self, ids: np.ndarray, is_trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        prefix, suffix = self._special_affixes
        eos_id = self.config.eos_id
        assert eos_id is not None
        has_eos = suffix[-1:] == [eos_id] or (not suffix and ids[-1:].tolist() == [eos_id])
        suffix = suffix if has_eos else [*suffix, eos_id]
        return (
            np.concatenate([np.array(prefix, dtype=np.int64), ids, np.array(suffix, dtype=np.int64)]),
            np.concatenate([np.zeros(len(prefix), dtype=bool), is_trained, np.ones(len(suffix), dtype=bool)]),
        )

    def _loss_mask(self, offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
        """True for every token that ends inside a span, even if it starts before the span."""
        is_trained: np.ndarray = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            is_inside = (offsets[:, 1] > start) & (offsets[:, 1] <= end) & (offsets[:, 0] < end)
            self.counts.straddling_tokens += int((is_inside & (offsets[:, 0] < start)).sum())
            is_trained |= is_inside
        return is_trained

    def _fit_length(self, row: Row, sequence: TokenSequence) -> list[TokenSequence]:
        max_length, size = self.config.max_length, len(sequence.ids)
        if max_length is None or size <= max_length:
            return [sequence]
        if len(self.counts.examples) < MAX_EXAMPLES:
            self.counts.examples.append(f"{row.path}:{row.line} ({size} tokens)")
        if self.config.on_long_row == "drop":
            self.counts.dropped_long += 1
            return []
        starts = range(0, size, max_length) if self.config.on_long_row == "split" else (0,)
        pieces = [sequence.part(start, start + max_length) for start in starts]
        # Text keeps every piece, even a single last token that nothing predicts.
        usable = [piece for piece in pieces if piece.loss_tokens > 0 or self.config.row_format in TEXT_FORMATS]
        self.counts.cropped_tokens += size - sum(len(piece.ids) for piece in usable)
        if not usable:
            self.counts.dropped_untrained += 1
        elif len(pieces) > 1:
            self.counts.split_long += 1
            self.counts.dropped_pieces += len(pieces) - len(usable)
        else:
            self.counts.truncated_long += 1
        return usable

    def _describe_difference(self, error: NotPrefixStableError) -> str:
        """The first token that differs."""
        shorter = self.tokenizer.encode(error.shorter, add_special_tokens=False)
        longer = self.tokenizer.encode(error.longer, add_special_tokens=False)
        pairs = zip(shorter.ids, longer.ids, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(shorter.ids), len(longer.ids)))
        hint = "" if self.config.train_on == "last" else "; --data.train_on last trains on the last answer only"
        return (
            f"the first token that differs is number {index}: {_describe_token(longer, error.longer, index)} "
            f"instead of {_describe_token(shorter, error.shorter, index)}{hint}"
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer without its post-processor, which adds special tokens and trims spaces from offsets."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.config.tokenizer)
        tokenizer.post_processor = None
        return tokenizer

    @cached_property
    def _word_encoder(self) -> WordEncoder | None:
        return build_word_encoder(self.tokenizer)

    def _find_lost(self, text: str) -> list[str]:
        """The characters without a token, which vanish."""
        if self._lost_finder is None:
            return []
        encoding = self._lost_finder.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [text[start:end] for number, (start, end) in pairs if number == self.config.vocab_size]

    @cached_property
    def _lost_finder(self) -> Any | None:
        """The tokenizer with a token for what it would drop. None if it drops nothing: it has all bytes, or an unknown
        token, or fails."""
        from tokenizers import Tokenizer
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        model = self.tokenizer.model
        if not isinstance(model, BPE) or model.unk_token or model.byte_fallback:
            return None
        settings = json.loads(self.tokenizer.to_str())
        vocab = settings["model"]["vocab"]
        if set(ByteLevel.alphabet()) <= vocab.keys():
            return None
        vocab[LOST] = self.config.vocab_size
        settings["model"] |= {"unk_token": LOST, "fuse_unk": False}
        return Tokenizer.from_str(json.dumps(settings))

    @cached_property
    def template(self) -> ChatTemplate:
        if self.config.template is None:
            raise UsageError(
                "the data has conversations, but the tokenizer has no chat template",
                "set a file or a built-in template, such as --data.chat_template chatml",
            )
        return ChatTemplate(self.config.template, self.config.special_tokens)

    @cached_property
    def _special_affixes(self) -> tuple[list[int], list[int]]:
        from tokenizers import Tokenizer

        return find_special_affixes(Tokenizer.from_str(self.config.tokenizer))


def find_special_affixes(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer (of the package tokenizers) itself puts before and after a text."""

    def texts() -> Iterator[str]:
        yield "a"
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        yield from (token for token in tokenizer.get_vocab() if token not in added)

    failure: BaseException = UsageError("the tokenizer encodes none of its tokens", "its tokenizer.json may be damaged")
    for text in islice(texts(), MAX_PROBES):
        try:
            plain, special = (tokenizer.encode(text, add_special_tokens=is_special).ids for is_special in (False, True))
        except BaseException as error:
            if not is_library_error(error):
                raise
            failure = error
            continue
        for start in range(len(special) if plain else 0):
            if special[start : start + len(plain)] == plain:
                return special[:start], special[start + len(plain) :]
    raise failure


def is_library_error(error: BaseException) -> bool:
    """Whether a library may have raised an exception about its input: a panic in Rust code is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _without_frames(error: BadRow) -> BadRow:
    """The error without the values of the functions that raised it, which may be large."""
    error.__traceback__ = error.__context__ = None
    return error


def _describe_token(encoding: Any, text: str, index: int) -> str:
    if index >= len(encoding.ids):
        return "the end"
    start, end = encoding.offsets[index]
    return f"{text[start:end]!r} (id {encoding.ids[index]})"
