"""The word encoder: the same ids as the tokenizer's own, or none at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import selection
from torchstone.data import word_encoder as module
from torchstone.data.word_encoder import CL100K, GPT2, O200K, QWEN2, STABLE_CHARACTERS, WordEncoder, build_word_encoder
from torchstone.demo.corpus import corpus_rows

TEXTS = [row["text"] for row in corpus_rows(200)]
STABLE = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000 and STABLE_CHARACTERS.fullmatch(chr(c))]
PIECES = [
    "the", "The", "don't", "I'LL", "  ", "\n", "\r\n", " \n ", "\t", "123", "4567", "1", "!?", "--", "...", "'s", "'",
    " a", "é", "Straße", "naïve", "日本語", "한국어", "ελλ", "Привет", "שלום", "€", "→", "∀x", "“q”", "½", "²", "ª",
]  # fmt: skip


def train_bpe(pattern: str | None, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE that splits by `pattern`, or by the one that ByteLevel has."""
    backend = Tokenizer(models.BPE())
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, *PIECES], trainer)
    return backend


def make_encoder(backend: Tokenizer) -> WordEncoder:
    encoder = build_word_encoder(backend)
    assert encoder is not None
    return encoder


@pytest.fixture(scope="module")
def cl100k() -> Tokenizer:
    return train_bpe(CL100K)


@pytest.mark.parametrize("pattern", [None, CL100K, QWEN2, O200K], ids=["gpt2", "cl100k", "qwen2", "o200k"])
def test_ids_and_offsets_are_the_tokenizers_own(pattern: str | None) -> None:
    backend = train_bpe(pattern)
    encoder = make_encoder(backend)
    rng = random.Random(0)
    special = [*PIECES, "<|end|>", "<|end|><|end|>", " <|end|> ", "<|end|>\n", "<|en", "|>"]
    texts = list(TEXTS)
    for pieces, longest in ((PIECES, 30), (special, 30), (STABLE, 60), (STABLE[:98], 60)):
        texts += ["".join(rng.choices(pieces, k=rng.randint(1, longest))) for _ in range(500)]
    results = encoder.encode_batch(texts)
    assert sum(ids is None for ids in results) < 0.05 * len(texts)
    for text, ids in zip(texts, results, strict=True):
        if ids is not None:
            encoding = backend.encode(text, add_special_tokens=False)
            assert ids == encoding.ids, repr(text)
            assert encoder.offsets(text, ids).tolist() == [list(pair) for pair in encoding.offsets], repr(text)


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=selection.the_rest)])
def test_every_stable_character_is_split_as_by_the_tokenizer(cl100k: Tokenizer, step: int) -> None:
    """Between letters, digits and spaces, where a character of another class would be split differently.

    Of the ideographs and Hangul syllables, which have one class, every `step`th.
    """
    characters = [c for number, c in enumerate(STABLE) if c < "\u4e00" or number % step == 0]
    starts = range(0, len(characters), 200)
    texts = ["".join(f"a{c}b {c}1{c} {c}{c}\n" for c in characters[start : start + 200]) for start in starts]
    expected = [cl100k.encode(text, add_special_tokens=False).ids for text in texts]
    assert make_encoder(cl100k).encode_batch(texts) == expected


@pytest.mark.parametrize(
    "text", ["a\x1cb", "a\x85b", "\u017f", "x\u0301", "\U0001f600", "\u1cf2", "a<|strip|>b", "a KATO b", "e\u0301"]
)
def test_texts_that_could_differ_are_left_to_the_tokenizer(text: str) -> None:
    backend = train_bpe(CL100K)
    backend.add_special_tokens([AddedToken("<|strip|>", lstrip=True)])
    backend.add_tokens(["KATO"])
    expected = backend.encode("fine").ids
    assert make_encoder(backend).encode_batch(["fine", text, "fine"]) == [expected, None, expected]


def test_other_tokenizers_are_not_supported() -> None:
    prefixed = train_bpe(None)
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    dropping = train_bpe(None)
    dropping.model.dropout = 0.1
    others = [
        train_bpe(r"[A-Z]|[^A-Z]+"),
        train_bpe(GPT2, normalizers.Lowercase()),
        Tokenizer(models.WordLevel({"a": 0})),
        prefixed,
        dropping,
    ]
    # A byte without a token is dropped or becomes a token of another size: offsets would be wrong.
    for settings in ({}, {"unk_token": "<unk>"}, {"byte_fallback": True}):
        incomplete = Tokenizer(models.BPE(**settings))
        incomplete.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        incomplete.train_from_iterator(["hello quick fox"], trainers.BpeTrainer(vocab_size=60, show_progress=False))
        others.append(incomplete)
    assert [build_word_encoder(backend) for backend in others] == [None] * len(others)


def test_nfc_normalization_is_supported() -> None:
    backend = train_bpe(QWEN2, normalizers.NFC())
    assert make_encoder(backend).encode_batch(["Straße 12 é"]) == [backend.encode("Straße 12 é").ids]


def test_the_cache_of_words_is_limited(cl100k: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its number of words, and in their length."""
    monkeypatch.setattr(module, "MAX_CACHED_WORDS", 10)
    encoder = make_encoder(cl100k)
    rng = random.Random(1)
    for _ in range(50):
        text = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(4)) + " " + "x" * 1000
        expected = cl100k.encode(text).ids
        assert encoder.encode_batch([text, text]) == [expected] * 2
        assert len(encoder._cache) <= 25
        assert max(map(len, encoder._cache)) <= module.MAX_CACHED_LENGTH


def test_patterns_match_the_same_in_both_regex_engines() -> None:
    text = "It's 1234 o'clock\n"
    for pattern in (GPT2, CL100K, QWEN2, O200K):
        split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
        assert regex.compile(pattern).findall(text) == [word for word, _ in split]
