"""A generated corpus and chat task, always the same, that a tiny model learns in minutes.

The task is about the letters (reverse, first, last, count) of made-up words. A small model can learn such a rule in two
minutes, but not facts or sums. A tenth of all words, chosen by a hash of the word, is held out of the corpus
and the training questions, so a right answer about one of them shows the rule, not memory. Words are in capitals, which
the tokenizer keeps as single letters. A second task, about the digits of numbers, is there to be learned after it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CONSONANTS = "BCDFGHJKLMNPRSTVWZ"
VOWELS = "AEIOU"
HELD_OUT_SHARE = 10

PEOPLE = ("Mira", "Tom", "Anna", "Ben", "Lena", "Paul", "Nora", "Max")
PLACES = ("the river", "the old mill", "the market", "a quiet lake", "the school", "the harbour", "a green hill")
THINGS = ("a sign", "a letter", "a stone", "a map", "a book", "a wooden box", "a small flag")
WEATHER = (
    "It was raining.",
    "The sun was warm.",
    "A cold wind blew.",
    "The evening was calm.",
    "Snow lay on the roofs.",
)


def make_word(rng: random.Random, held_out: bool = False) -> str:
    """A pronounceable word of three to seven letters, from the held-out tenth or from the rest."""
    while True:
        length = rng.randint(3, 7)
        vowel = rng.random() < 0.3
        letters = []
        for _ in range(length):
            letters.append(rng.choice(VOWELS if vowel else CONSONANTS))
            vowel = not vowel if rng.random() < 0.85 else vowel
        word = "".join(letters)
        if is_held_out(word) == held_out:
            return word


def make_number(rng: random.Random, held_out: bool = False) -> str:
    """Three to seven digits, from the held-out tenth or from the rest."""
    while True:
        number = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
        if is_held_out(number) == held_out:
            return number


def is_held_out(word: str) -> bool:
    """Whether a word is held out: the same for a word and its reverse, because each is the answer to the other."""
    return hashlib.sha256(min(word, word[::-1]).encode()).digest()[0] % HELD_OUT_SHARE == 0


def corpus_rows(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Short documents: a scene, a word that a person finds in it, and statements about that word."""
    rng = random.Random(seed)
    for _ in range(count):
        yield {"text": _document(rng)}


def chat_rows(count: int, seed: int = 2, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Questions about one word each, the four tasks in turn, without duplicates."""
    return _question_rows(count, seed, held_out, make_word, TASKS, QUESTIONS)


def number_rows(count: int, seed: int = 4, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Questions about the digits of one number each, two tasks in turn, without duplicates."""
    return _question_rows(count, seed, held_out, make_number, NUMBER_TASKS, NUMBER_QUESTIONS)


def _question_rows(
    count: int,
    seed: int,
    held_out: bool,
    make: Callable[[random.Random, bool], str],
    tasks: dict[str, Callable[[str], str]],
    wordings: Mapping[str, tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    questions: set[str] = set()
    while len(questions) < count:
        task = list(tasks)[len(questions) % len(tasks)]
        word = make(rng, held_out)
        question = rng.choice(wordings[task]).format(word=word)
        if question not in questions:
            questions.add(question)
            yield {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": tasks[task](word)},
                ],
                "task": task,
            }


TASKS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "count": lambda word: str(len(word)),
}

QUESTIONS = {
    "reverse": ("Reverse {word}.", "Spell {word} backwards.", "What is {word} backwards?"),
    "first": ("First letter of {word}?", "Which letter does {word} begin with?", "How does {word} start?"),
    "last": ("Last letter of {word}?", "Which letter does {word} end with?", "How does {word} end?"),
    "count": ("How many letters has {word}?", "Count the letters of {word}.", "How long is {word}?"),
}

NUMBER_TASKS: dict[str, Callable[[str], str]] = {"largest": max, "smallest": min}

NUMBER_QUESTIONS = {
    "largest": ("Largest digit of {word}?", "Which digit of {word} is the largest?"),
    "smallest": ("Smallest digit of {word}?", "Which digit of {word} is the smallest?"),
}

STATEMENTS = (
    "{word} read backwards is {backwards}.",
    "{word} begins with {first} and ends with {last}.",
    "{word} has {count} letters.",
    "The first letter of {word} is {first}.",
    "The last letter of {word} is {last}.",
    "From its end, {word} is {backwards}.",
)


def _document(rng: random.Random) -> str:
    person, word = rng.choice(PEOPLE), make_word(rng)
    scene = f"{person} went to {rng.choice(PLACES)}. {rng.choice(WEATHER)} " if rng.random() < 0.5 else ""
    discovery = f"{person} found {rng.choice(THINGS)} that said {word}. " if rng.random() < 0.5 else ""
    facts = {"word": word, "backwards": word[::-1], "first": word[0], "last": word[-1], "count": len(word)}
    statements = rng.sample(STATEMENTS, rng.randint(2, 4))
    return scene + discovery + " ".join(statement.format(**facts) for statement in statements)
