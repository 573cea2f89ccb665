"""Byte-level BPE, each distinct word encoded once.

A byte-level tokenizer cuts a text into words by a pattern and encodes every word by itself, so a text is its words'
ids one after another. Nearly all words of a text have been seen before: looking them up is more than twice as fast as
encoding the text (benchmarks/data). The ids are the tokenizer's own, word by word. Where this could differ in the least
from encoding the text as a whole, it is not done: other kinds of tokenizer, patterns not listed here, and characters
whose class may depend on the version of the Unicode tables.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from itertools import chain
from typing import Any
from unicodedata import is_normalized

import numpy as np
import regex

# The patterns of the families in use, as their tokenizer.json has them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = (GPT2, CL100K, QWEN2, O200K)
# What Unicode's classes are within ASCII; the longer names first.
ASCII_CLASSES = {
    r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}": "A-Z",
    r"\p{Ll}\p{Lm}\p{Lo}\p{M}": "a-z",
    r"\p{L}": "A-Za-z",
    r"\p{N}": "0-9",
}
# Characters that were all assigned, and classed as they are now, long before any table in use. Left out: control
# characters, of which some tables make spaces, and letters that are another's capital in some tables only.
SETTLED = regex.compile(
    r"[\t\n\r\x20-\x7e\xa1-\xac\xae-\u012f\u0132-\u017e\u0180-\u0233\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481"
    r"\u048c-\u04c4\u05d0-\u05ea\u2010-\u2027\u2030-\u2046\u20a0-\u20ac\u2190-\u21ff\u2200-\u22ff\u3001-\u3003"
    r"\u3005-\u301c\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5d]*+"
)
REMEMBERED = 1 << 20
# Longer ones, such as base64 or genes, hardly come again, and would fill the memory.
LONGEST_REMEMBERED = 64


class WordEncoder:
    """Texts to ids by way of their words; `None` for a text that must be encoded as a whole.

    `special` tokens are cut out of a text before it is cut into words; a text with a `refused` one is not done here.
    """

    def __init__(self, backend: Any, pattern: str, special: dict[str, int], refused: list[str]) -> None:
        self._backend = backend
        self._words = regex.compile(pattern)
        self._ascii_words = re.compile(_for_ascii(pattern))
        self._special = special
        self._cut, self._refused = _any_of(list(special)), _any_of(refused)
        self._known: dict[str, list[int]] = {token: [i] for token, i in special.items()}

    def encode_batch(self, texts: list[str]) -> list[list[int] | None]:
        """The ids of every text. All the words that are new in them are learned at once."""
        cut = [self._cut_up(text) for text in texts]
        if len(self._known) > REMEMBERED:
            self._known = {token: [i] for token, i in self._special.items()}
        known = self._known
        unknown = dict.fromkeys(word for words in cut if words is not None for word in words if word not in known)
        alone = self._learn(list(unknown))
        found = [
            list(chain.from_iterable(map(known.__getitem__, words)))
            if words is not None and (alone or all(word in known for word in words))
            else None
            for words in cut
        ]
        for word in unknown:
            if len(word) > LONGEST_REMEMBERED:
                known.pop(word, None)
        return found

    def offsets(self, text: str, ids: list[int]) -> np.ndarray:
        """Where in `text` each of its tokens begins and ends, in characters: an array of pairs.

        A token is a run of bytes, so their lengths added up are where they end.
        """
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        assert not ids or ends[-1] == len(text.encode()), f"the tokens of {text[:80]!r} do not add up to it"
        if text.isascii():
            return np.stack([ends - sizes, ends], axis=1)
        starts_character = (np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0) != 0x80
        character = np.cumsum(starts_character) - 1
        return np.stack([character[ends - sizes], character[ends - 1] + 1], axis=1)

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The bytes of every token; in a byte-level vocabulary each is written as one letter."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        sizes: np.ndarray = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
        for token, i in vocabulary.items():
            sizes[i] = len(token.encode()) if token in self._special else len(token)
        return sizes

    def _cut_up(self, text: str) -> list[str] | None:
        """The words of a text, its special tokens among them."""
        if SETTLED.fullmatch(text) is None or not is_normalized("NFC", text):
            return None
        if self._refused is not None and self._refused.search(text):
            return None
        find = (self._ascii_words if text.isascii() else self._words).findall
        if self._cut is None or self._cut.search(text) is None:
            return find(text)
        return list(chain.from_iterable([p] if p in self._special else find(p) for p in self._cut.split(text)))

    def _learn(self, words: list[str]) -> bool:
        """A word that the tokenizer itself would cut again does not stand alone: texts with it are not done here."""
        encodings = self._backend.encode_batch(words, add_special_tokens=False)
        alone = [(word, e.ids) for word, e in zip(words, encodings, strict=True) if e.word_ids[-1] == 0]
        self._known.update(alone)
        return len(alone) == len(words)


def word_encoder(backend: Any) -> WordEncoder | None:
    """For a byte-level BPE with a pattern that is known here; None for any other tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    settings = json.loads(backend.to_str())
    model, pattern = settings["model"], _pattern(settings.get("pre_tokenizer"))
    if model["type"] != "BPE" or model.get("dropout") or pattern is None:
        return None
    if settings.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    if any(model.get(key) for key in ("end_of_word_suffix", "continuing_subword_prefix", "unk_token", "byte_fallback")):
        return None
    if not set(ByteLevel.alphabet()) <= model["vocab"].keys():
        # A byte without a token is dropped, or becomes one that says nothing of its length.
        return None
    special, refused = {}, []
    for token in settings["added_tokens"]:
        if any(token[key] for key in ("single_word", "lstrip", "rstrip", "normalized")):
            refused.append(token["content"])
        else:
            special[token["content"]] = token["id"]
    return WordEncoder(backend, pattern, special, refused)


def _any_of(tokens: list[str]) -> re.Pattern[str] | None:
    """The longest of them that begins at a place."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None


def _for_ascii(pattern: str) -> str:
    """The same pattern for texts of ASCII alone, in which classes are ranges; Python's own engine is faster with it."""
    for name, letters in ASCII_CLASSES.items():
        pattern = re.sub(rf"\[([^\]]*){re.escape(name)}", rf"[\g<1>{letters}", pattern)
        pattern = pattern.replace(name, f"[{letters}]")
    return pattern


def _pattern(cutter: dict[str, Any] | None) -> str | None:
    """The pattern by which texts are cut, where cutting is all that is done before bytes become letters."""
    steps = [] if cutter is None else cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if steps[0].get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or split["type"] != "Split" or steps[1].get("use_regex", True):
        return None
    pattern = split["pattern"].get("Regex")
    return pattern if pattern in PATTERNS and split["behavior"] == "Isolated" and not split["invert"] else None
