"""Encoding word by word is encoding: the same ids as the tokenizer's own, or not done at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from torchstone.data.words import CL100K, GPT2, O200K, QWEN2, SETTLED, word_encoder
from torchstone.demo.corpus import corpus_rows

TEXTS = [row["text"] for row in corpus_rows(200)]
SETTLED_CHARACTERS = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000 and SETTLED.fullmatch(chr(c))]
PIECES = [
    "the", "The", "don't", "I'LL", "  ", "\n", "\r\n", " \n ", "\t", "123", "4567", "1", "!?", "--", "...", "'s", "'",
    " a", "é", "Straße", "naïve", "日本語", "한국어", "ελλ", "Привет", "שלום", "€", "→", "∀x", "“q”", "½", "²", "ª",
]  # fmt: skip


def tokenizer(pattern: str | None, normalizer: Any = None) -> Tokenizer:
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


@pytest.mark.parametrize("pattern", [None, CL100K, QWEN2, O200K], ids=["gpt2", "cl100k", "qwen2", "o200k"])
def test_ids_are_the_tokenizers_own(pattern: str | None) -> None:
    backend = tokenizer(pattern)
    encoder = word_encoder(backend)
    assert encoder is not None
    rng = random.Random(0)
    texts = list(TEXTS)
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 30))) for _ in range(500)]
    special = [*PIECES, "<|end|>", "<|end|><|end|>", " <|end|> ", "<|end|>\n", "<|en", "|>"]
    texts += ["".join(rng.choices(special, k=rng.randint(1, 30))) for _ in range(500)]
    texts += ["".join(rng.choices(SETTLED_CHARACTERS, k=rng.randint(1, 60))) for _ in range(500)]
    texts += ["".join(rng.choices(SETTLED_CHARACTERS[:98], k=rng.randint(1, 60))) for _ in range(500)]
    done = encoder.encode_batch(texts)
    assert sum(ids is None for ids in done) < 0.05 * len(texts)
    for text, ids in zip(texts, done, strict=True):
        if ids is not None:
            encoding = backend.encode(text, add_special_tokens=False)
            assert ids == encoding.ids, repr(text)
            assert encoder.offsets(text, ids).tolist() == [list(pair) for pair in encoding.offsets], repr(text)


def test_every_settled_character_is_cut_as_the_tokenizer_cuts_it() -> None:
    """One after another between letters, digits and spaces: a character of another class would cut them otherwise."""
    backend = tokenizer(CL100K)
    encoder = word_encoder(backend)
    assert encoder is not None
    for at in range(0, len(SETTLED_CHARACTERS), 200):
        text = "".join(f"a{c}b {c}1{c} {c}{c}\n" for c in SETTLED_CHARACTERS[at : at + 200])
        (ids,) = encoder.encode_batch([text])
        assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids
    assert encoder.encode_batch(["plain words, é and 日本"]) != [None]


@pytest.mark.parametrize(
    "text", ["a\x1cb", "a\x85b", "\u017f", "x\u0301", "\U0001f600", "\u1cf2", "a<|strip|>b", "a KATO b", "e\u0301"]
)
def test_what_could_differ_is_left_to_the_tokenizer(text: str) -> None:
    backend = tokenizer(CL100K)
    backend.add_special_tokens([AddedToken("<|strip|>", lstrip=True)])
    backend.add_tokens(["KATO"])
    encoder = word_encoder(backend)
    assert encoder is not None
    assert encoder.encode_batch(["fine", text, "fine"]) == [
        *encoder.encode_batch(["fine"]),
        None,
        backend.encode("fine").ids,
    ]


def test_other_tokenizers_are_left_alone() -> None:
    assert word_encoder(tokenizer(r"[A-Z]|[^A-Z]+")) is None
    assert word_encoder(tokenizer(GPT2, normalizers.Lowercase())) is None
    assert word_encoder(Tokenizer(models.WordLevel({"a": 0}))) is None
    prefixed = tokenizer(None)
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert word_encoder(prefixed) is None
    # A byte that has no token is dropped or becomes one that says nothing of its length: places would be wrong.
    for settings in ({}, {"unk_token": "<unk>"}, {"byte_fallback": True}):
        some = Tokenizer(models.BPE(**settings))
        some.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        some.train_from_iterator(["hello quick fox"], trainers.BpeTrainer(vocab_size=60, show_progress=False))
        assert word_encoder(some) is None
    dropping = tokenizer(None)
    dropping.model.dropout = 0.1
    assert word_encoder(dropping) is None


def test_a_normalizer_that_changes_nothing_settled_is_no_hindrance() -> None:
    backend = tokenizer(QWEN2, normalizers.NFC())
    encoder = word_encoder(backend)
    assert encoder is not None
    assert encoder.encode_batch(["Straße 12 é"])[0] == backend.encode("Straße 12 é").ids


def test_remembered_words_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchstone.data import words

    monkeypatch.setattr(words, "REMEMBERED", 10)
    backend = tokenizer(GPT2)
    encoder = word_encoder(backend)
    assert encoder is not None
    rng = random.Random(1)
    for _ in range(200):
        text = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(4))
        assert encoder.encode_batch([text]) == [backend.encode(text).ids]
        assert len(encoder._known) <= 25


def test_long_words_are_not_remembered() -> None:
    backend = tokenizer(GPT2)
    encoder = word_encoder(backend)
    assert encoder is not None
    text = "short " + "x" * 1000
    assert encoder.encode_batch([text, text]) == [backend.encode(text).ids] * 2
    assert max(map(len, encoder._known)) < 100


def test_patterns_compile_in_both_engines() -> None:
    for pattern in (GPT2, CL100K, QWEN2, O200K):
        assert regex.compile(pattern).findall("It's 1234 o'clock\n") == [
            m for m, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str("It's 1234 o'clock\n")
        ]
