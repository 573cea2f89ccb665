"""Byte-level BPE with a cache of encoded words.

A byte-level tokenizer splits a text into words by a pattern and encodes every word separately, so the ids of a text are
those of its words. Nearly all words of a text have been seen before, and looking them up is more than twice as fast as
encoding the text (benchmarks/data). The ids are the tokenizer's own. Where the result could differ at all from encoding
the whole text, the cache is not used: other kinds of tokenizers, patterns other than those below, and characters whose
class may depend on the version of the Unicode tables.
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

# The patterns of common tokenizers, as in their tokenizer.json.
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
# Unicode classes restricted to ASCII; the longer names first.
ASCII_CLASSES = {
    r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}": "A-Z",
    r"\p{Ll}\p{Lm}\p{Lo}\p{M}": "a-z",
    r"\p{L}": "A-Za-z",
    r"\p{N}": "0-9",
}
# Characters with the same class in all versions of the Unicode tables in use. Excluded: control characters, which some
# tables class as spaces, and letters whose capital exists in some tables only.
STABLE_CHARACTERS = regex.compile(
    r"[\t\n\r\x20-\x7e\xa1-\xac\xae-\u012f\u0132-\u017e\u0180-\u0233\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481"
    r"\u048c-\u04c4\u05d0-\u05ea\u2010-\u2027\u2030-\u2046\u20a0-\u20ac\u2190-\u21ff\u2200-\u22ff\u3001-\u3003"
    r"\u3005-\u301c\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5d]*+"
)
MAX_CACHED_WORDS = 1 << 20
# Longer words, such as base64, rarely repeat and would fill the memory.
MAX_CACHED_LENGTH = 64


class WordEncoder:
    """Encodes texts word by word.

    `special` tokens are split off before the words. Texts with one of the `unsupported` tokens are not encoded here.
    """

    def __init__(self, tokenizer: Any, pattern: str, special: dict[str, int], unsupported: list[str]) -> None:
        self._tokenizer = tokenizer
        self._word_pattern = regex.compile(pattern)
        self._ascii_word_pattern = re.compile(_ascii_pattern(pattern))
        self._special = special
        self._special_pattern, self._unsupported_pattern = _any_of(list(special)), _any_of(unsupported)
        self._cache: dict[str, list[int]] = {token: [i] for token, i in special.items()}

    def encode_batch(self, texts: list[str]) -> list[list[int] | None]:
        """The ids of every text; None for a text that must be encoded as a whole."""
        split_texts = [self._split_words(text) for text in texts]
        if len(self._cache) > MAX_CACHED_WORDS:
            self._cache = {token: [i] for token, i in self._special.items()}
        cache = self._cache
        new_words = dict.fromkeys(
            word for words in split_texts if words is not None for word in words if word not in cache
        )
        has_all = self._encode_words(list(new_words))
        ids = [
            list(chain.from_iterable(map(cache.__getitem__, words)))
            if words is not None and (has_all or all(word in cache for word in words))
            else None
            for words in split_texts
        ]
        for word in new_words:
            if len(word) > MAX_CACHED_LENGTH:
                cache.pop(word, None)
        return ids

    def offsets(self, text: str, ids: list[int]) -> np.ndarray:
        """The start and end of each token in `text`, in characters.

        A token is a sequence of bytes, so the cumulative sum of the token sizes is where they end.
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
        """The number of bytes of every token; a byte-level vocabulary writes each byte as one letter."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        sizes: np.ndarray = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
        for token, i in vocabulary.items():
            sizes[i] = len(token.encode()) if token in self._special else len(token)
        return sizes

    def _split_words(self, text: str) -> list[str] | None:
        """The words of a text, including special tokens."""
        if STABLE_CHARACTERS.fullmatch(text) is None or not is_normalized("NFC", text):
            return None
        if self._unsupported_pattern is not None and self._unsupported_pattern.search(text):
            return None
        find = (self._ascii_word_pattern if text.isascii() else self._word_pattern).findall
        special = self._special_pattern
        if special is None or special.search(text) is None:
            return find(text)
        return list(chain.from_iterable([p] if p in self._special else find(p) for p in special.split(text)))

    def _encode_words(self, words: list[str]) -> bool:
        """Caches the ids of words; False if some are not cached because the tokenizer would split them again."""
        encodings = self._tokenizer.encode_batch(words, add_special_tokens=False)
        single = [(word, e.ids) for word, e in zip(words, encodings, strict=True) if e.word_ids[-1] == 0]
        self._cache.update(single)
        return len(single) == len(words)


def build_word_encoder(tokenizer: Any) -> WordEncoder | None:
    """A word encoder for a byte-level BPE with one of the patterns above; None for any other tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    settings = json.loads(tokenizer.to_str())
    model, pattern = settings["model"], _split_pattern(settings.get("pre_tokenizer"))
    if model["type"] != "BPE" or model.get("dropout") or pattern is None:
        return None
    if settings.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    if any(model.get(key) for key in ("end_of_word_suffix", "continuing_subword_prefix", "unk_token", "byte_fallback")):
        return None
    if not set(ByteLevel.alphabet()) <= model["vocab"].keys():
        # A byte without a token would be dropped or become an unknown token of a different size.
        return None
    special, unsupported = {}, []
    for token in settings["added_tokens"]:
        if any(token[key] for key in ("single_word", "lstrip", "rstrip", "normalized")):
            unsupported.append(token["content"])
        else:
            special[token["content"]] = token["id"]
    return WordEncoder(tokenizer, pattern, special, unsupported)


def _any_of(tokens: list[str]) -> re.Pattern[str] | None:
    """Matches the longest of the tokens at a position."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else None


def _ascii_pattern(pattern: str) -> str:
    """The pattern for ASCII text, with ranges instead of classes: faster, with Python's own engine."""
    for name, letters in ASCII_CLASSES.items():
        pattern = re.sub(rf"\[([^\]]*){re.escape(name)}", rf"[\g<1>{letters}", pattern)
        pattern = pattern.replace(name, f"[{letters}]")
    return pattern


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The pattern of a pre-tokenizer that only splits and maps bytes to letters; None for any other."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if steps[0].get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or split["type"] != "Split" or steps[1].get("use_regex", True):
        return None
    pattern = split["pattern"].get("Regex")
    return pattern if pattern in PATTERNS and split["behavior"] == "Isolated" and not split["invert"] else None
