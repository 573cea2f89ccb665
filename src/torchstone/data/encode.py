"""Rows to ids with labels.

A `Recipe` is all that decides what a row becomes. It holds plain values only: a hash of it names the result, and any
process can encode by it without Transformers or torch, which take a second and hundreds of megabytes to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchstone.data.formats import (
    IGNORED,
    PLAIN,
    Completion,
    Conversation,
    Shape,
    conversation_of,
    encodable,
    prompt_of,
    text_of,
    tokens_of,
    trained_messages,
)
from torchstone.data.sources import BadRow, Chunk, Row, rows
from torchstone.data.template import ChatTemplate, NotPrefixStable, Rendered
from torchstone.data.words import WordEncoder, word_encoder
from torchstone.errors import DataError, UsageError

EXAMPLES = 5
CALLS = ("tool_calls", "function_call")


@dataclass
class Encoded:
    """One sequence: ids, and a label for each as Transformers has them (not shifted; -100 is not learned)."""

    ids: np.ndarray
    labels: np.ndarray

    @property
    def loss_tokens(self) -> int:
        """Labels that are really predicted: the first one has nothing before it."""
        return int((self.labels[1:] != IGNORED).sum())

    def part(self, start: int, stop: int) -> Encoded:
        return Encoded(self.ids[start:stop], self.labels[start:stop])


@dataclass(frozen=True)
class Recipe:
    """`tokenizer` is a tokenizer.json; `limit` the longest sequence; `train_on` what of a conversation is learned."""

    tokenizer: str
    vocab_size: int
    eos_id: int | None
    template: str | None
    special_tokens: dict[str, str]
    shape: Shape
    limit: int | None
    on_long_row: str
    train_on: str = "assistant"

    @property
    def id_type(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def has_labels(self) -> bool:
        """Text is its own labels."""
        return self.shape not in PLAIN


@dataclass
class Counts:
    """What became of the rows; printed, kept in the cache and in the metrics.

    `dropped_untrained` are rows of which nothing that is trained was left after cutting, `dropped_pieces` such pieces
    of rows that were kept otherwise. `untrained` are sequences without a label: they are kept, and teach nothing.
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
    examples: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.bad_rows + self.dropped_long + self.dropped_untrained

    def add(self, other: Counts) -> None:
        for name in (f.name for f in fields(self) if f.name != "examples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples = [*self.examples, *other.examples][:EXAMPLES]


class Bad(NamedTuple):
    """A bad row as it travels between processes."""

    line: int
    reason: str
    hint: str | None
    raw: str


@dataclass
class Part:
    """What a chunk became: sequences one after another, their lengths, and the lines they came from."""

    ids: np.ndarray
    labels: np.ndarray | None
    lengths: np.ndarray
    loss_tokens: np.ndarray
    lines: np.ndarray
    counts: Counts
    bad: list[Bad]


class Encoder:
    """Chunks to parts, by a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.counts = Counts()

    def chunk(self, chunk: Chunk) -> Part:
        self.counts = Counts()
        good: list[Row] = []
        bad: list[BadRow] = []
        for row in rows(chunk):
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                good.append(row)
        self.counts.rows = len(good) + len(bad)
        sequences: list[tuple[int, Encoded]] = []
        for row, found in zip(good, self._encoded(good), strict=True):
            if isinstance(found, BadRow):
                bad.append(found)
            else:
                sequences += [(row.line, piece) for piece in self._fit(row, found)]
        return self._part(sequences, sorted(bad, key=lambda row: row.line))

    def _part(self, sequences: list[tuple[int, Encoded]], bad: list[BadRow]) -> Part:
        empty: np.ndarray = np.zeros(0, dtype=np.int64)
        ids = np.concatenate([empty, *(s.ids for _, s in sequences)]).astype(self.recipe.id_type)
        labels = None
        if self.recipe.has_labels:
            labels = np.concatenate([empty, *(s.labels for _, s in sequences)]).astype(np.int32)
        loss_tokens = np.array([s.loss_tokens for _, s in sequences], dtype=np.int64)
        self.counts.sequences, self.counts.tokens = len(sequences), len(ids)
        self.counts.trained_tokens, self.counts.bad_rows = int(loss_tokens.sum()), len(bad)
        self.counts.untrained = int((loss_tokens == 0).sum())
        return Part(
            ids,
            labels,
            np.array([len(s.ids) for _, s in sequences], dtype=np.int64),
            loss_tokens,
            np.array([line for line, _ in sequences], dtype=np.int64),
            self.counts,
            [Bad(row.line, row.reason, row.more, row.raw) for row in bad],
        )

    def _encoded(self, good: list[Row]) -> list[Encoded | BadRow]:
        shape = self.recipe.shape
        if shape in PLAIN:
            return self._batch(good, lambda row: text_of(row, shape), self._texts)
        if shape == "tokens":
            return self._batch(good, lambda row: tokens_of(row, self.recipe.vocab_size), self._tokens)
        return self._batch(good, self._rendered, self._conversations)

    def _batch(
        self,
        good: list[Row],
        read: Callable[[Row], Any],
        encode: Callable[[list[Row], list[Any]], Iterable[Encoded | BadRow]],
    ) -> list[Encoded | BadRow]:
        """`encode` over what `read` makes of the rows, and the errors of those it cannot read, in the rows' order."""
        found: list[Any] = []
        for row in good:
            try:
                found.append(read(row))
            except BadRow as error:
                found.append(error)
        readable = [number for number, value in enumerate(found) if not isinstance(value, BadRow)]
        encoded = encode([good[n] for n in readable], [found[n] for n in readable])
        for number, value in zip(readable, encoded, strict=True):
            found[number] = value
        return found

    def _texts(self, good: list[Row], texts: list[str]) -> Iterable[Encoded]:
        end = self.recipe.eos_id
        assert end is not None
        before, after = self._around
        by_word = self._by_word(texts)
        whole = [text for text, known in zip(texts, by_word, strict=True) if known is None]
        others = iter(self.backend.encode_batch_fast(whole, add_special_tokens=False))
        for known in by_word:
            ids = before + (next(others).ids if known is None else known) + after
            array = np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int64)
            yield Encoded(array, array)

    def _tokens(self, good: list[Row], found: list[Any]) -> Iterable[Encoded]:
        return [Encoded(np.array(t.ids, dtype=np.int64), np.array(t.labels, dtype=np.int64)) for t in found]

    def _rendered(self, row: Row) -> Rendered | Completion:
        recipe = self.recipe
        value = prompt_of(row) if recipe.shape == "prompt" else conversation_of(row, recipe.shape)
        if isinstance(value, Completion):
            return value
        try:
            rendered = self._render(row, value)
            encodable(row, rendered.text)
            self._check_tools(row, value, rendered.text)
            return rendered
        except NotPrefixStable as error:
            raise row.error(error.message, self._difference(error)) from None
        except BadRow:
            raise
        except DataError as error:
            raise row.error(error.message, error.hint) from None

    def _render(self, row: Row, conversation: Conversation) -> Rendered:
        messages, tools = conversation.messages, conversation.tools
        if self.recipe.train_on == "all" or conversation.unmask:
            return self.template.everything(messages, tools, but_system=conversation.unmask)
        return self.template.conversation(messages, trained_messages(row, conversation, self.recipe.train_on), tools)

    def _check_tools(self, row: Row, conversation: Conversation, text: str) -> None:
        """A template that knows nothing of tools leaves them out without a word: the text is the same without them."""
        messages, tools = conversation.messages, conversation.tools
        plain = [{key: value for key, value in m.items() if key not in CALLS} for m in messages]
        for what, there, without in (
            ("the tools", tools is not None, lambda: self.template.text(messages, None)),
            ("the tool calls", plain != messages, lambda: self.template.text(plain, tools)),
        ):
            if there and without() == text:
                raise row.error(
                    f"the chat template leaves out {what} of this row",
                    "one that writes them is --data.chat_template chatml",
                )

    def _conversations(self, good: list[Row], found: list[Any]) -> Iterable[Encoded | BadRow]:
        """A conversation comes with its special tokens; around a prompt and completion the tokenizer puts its own."""
        texts = [v.prompt + v.completion if isinstance(v, Completion) else v.text for v in found]
        for row, value, (listed, offsets) in zip(good, found, self._with_offsets(texts), strict=True):
            ids = np.array(listed, dtype=np.int64)
            if isinstance(value, Completion):
                start = 0 if value.unmask or self.recipe.train_on == "all" else len(value.prompt)
                trained = self._trained(offsets, [(start, len(value.prompt) + len(value.completion))])
                ids, trained = self._completed(ids, trained)
            else:
                trained = self._trained(offsets, value.trained)
            if trained[1:].any():
                yield Encoded(ids, np.where(trained, ids, IGNORED))
            else:
                yield row.error("no token of this row would be trained")

    def _with_offsets(self, texts: list[str]) -> Iterable[tuple[list[int], np.ndarray]]:
        by_word = self._by_word(texts)
        whole = [text for text, known in zip(texts, by_word, strict=True) if known is None]
        others = iter(self.backend.encode_batch(whole, add_special_tokens=False))
        for text, known in zip(texts, by_word, strict=True):
            if known is not None and self._words is not None:
                yield known, self._words.offsets(text, known)
            else:
                encoding = next(others)
                yield encoding.ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _by_word(self, texts: list[str]) -> list[list[int] | None]:
        return [None] * len(texts) if self._words is None else self._words.encode_batch(texts)

    def _completed(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before, after = self._around
        end = self.recipe.eos_id
        assert end is not None
        ended = after[-1:] == [end] or (not after and ids[-1:].tolist() == [end])
        after = after if ended else [*after, end]
        return (
            np.concatenate([np.array(before, dtype=np.int64), ids, np.array(after, dtype=np.int64)]),
            np.concatenate([np.zeros(len(before), dtype=bool), trained, np.ones(len(after), dtype=bool)]),
        )

    def _trained(self, offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
        """A token belongs to the answer when it ends inside it: the model must produce it to go on."""
        trained: np.ndarray = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            inside = (offsets[:, 1] > start) & (offsets[:, 1] <= end) & (offsets[:, 0] < end)
            self.counts.straddling_tokens += int((inside & (offsets[:, 0] < start)).sum())
            trained |= inside
        return trained

    def _fit(self, row: Row, sequence: Encoded) -> list[Encoded]:
        limit, size = self.recipe.limit, len(sequence.ids)
        if limit is None or size <= limit:
            return [sequence]
        if len(self.counts.examples) < EXAMPLES:
            self.counts.examples.append(f"{row.path}:{row.line} ({size} tokens)")
        if self.recipe.on_long_row == "drop":
            self.counts.dropped_long += 1
            return []
        starts = range(0, size, limit) if self.recipe.on_long_row == "split" else (0,)
        pieces = [sequence.part(start, start + limit) for start in starts]
        # Of a text nothing is lost, not even a last token that no other predicts.
        kept = [piece for piece in pieces if piece.loss_tokens > 0 or self.recipe.shape in PLAIN]
        self.counts.cropped_tokens += size - sum(len(piece.ids) for piece in kept)
        if not kept:
            self.counts.dropped_untrained += 1
        elif len(pieces) > 1:
            self.counts.split_long += 1
            self.counts.dropped_pieces += len(pieces) - len(kept)
        else:
            self.counts.truncated_long += 1
        return kept

    def _difference(self, error: NotPrefixStable) -> str:
        """The first token that is not the same, for a person to recognise."""
        shorter = self.backend.encode(error.shorter, add_special_tokens=False)
        longer = self.backend.encode(error.longer, add_special_tokens=False)
        pairs = zip(shorter.ids, longer.ids, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(shorter.ids), len(longer.ids)))
        return (
            f"the first token that differs is number {at}: {_token(longer, error.longer, at)} where alone it is "
            f"{_token(shorter, error.shorter, at)}"
            + ("" if self.recipe.train_on == "last" else "; data.train_on last trains only on the last answer of each")
        )

    @cached_property
    def backend(self) -> Any:
        """The tokenizer without what it puts around a text and without its trimming of offsets, which hides spaces."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.recipe.tokenizer)
        backend.post_processor = None
        return backend

    @cached_property
    def _words(self) -> WordEncoder | None:
        return word_encoder(self.backend)

    @cached_property
    def template(self) -> ChatTemplate:
        if self.recipe.template is None:
            raise UsageError(
                "the data holds conversations, but the tokenizer has no chat template",
                "name a file or a built-in one, such as --data.chat_template chatml",
            )
        return ChatTemplate(self.recipe.template, self.recipe.special_tokens)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and after a text, such as a beginning of text."""
        from tokenizers import Tokenizer

        whole = Tokenizer.from_str(self.recipe.tokenizer)
        plain = whole.encode("a", add_special_tokens=False).ids
        special = whole.encode("a", add_special_tokens=True).ids
        at = next(n for n in range(len(special)) if special[n : n + len(plain)] == plain)
        return special[:at], special[at + len(plain) :]


def _token(encoding: Any, text: str, at: int) -> str:
    if at >= len(encoding.ids):
        return "the end"
    start, end = encoding.offsets[at]
    return f"{text[start:end]!r} (id {encoding.ids[at]})"
