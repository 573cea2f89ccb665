"""The loss mask that a row should have: where its texts are among its tokens, and which of these should be trained.

Tokens are decoded one by one. In the text that they have together, the messages of the row (turns.py) are searched in
order, and with them what the chat template writes before an answer and after a message. Templates and tokenizers may
change spaces, and a template may rewrite a text. So spaces do not count, and a text that is not there, or could be in
two places, is not judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from torchstone.data.formats import IGNORE_INDEX, Message
from torchstone.diagnosis.sampled_rows import SampledRow, decode
from torchstone.diagnosis.turns import Turn
from torchstone.errors import TorchstoneError
from torchstone.training.run import Run

# Stands for a text when a template is asked what it writes around it.
PROBE = "torchstone-probe"
# In characters. A shorter text may be anywhere.
MIN_TEXT = 4
EITHER, MASKED, TRAINED = -1, 0, 1
SPACES = [code for code in range(1 << 16) if chr(code).isspace()]


class TemplateTexts(NamedTuple):
    """What a chat template writes around messages; empty where that is unknown."""

    before_question: str = ""
    after_question: str = ""
    # Between what ends a question and the answer.
    header: str = ""
    after_answer: str = ""


@dataclass(frozen=True)
class Part:
    """A text of a turn, or what the template writes before or after it.

    It is at the characters from `start` to `end`, or to `stop` with the spaces after it."""

    turn: int
    kind: Literal["header", "reasoning", "text", "call", "end"]
    text: str
    start: int = 0
    end: int = 0
    stop: int = 0

    @property
    def is_template(self) -> bool:
        return self.kind in ("header", "end")


@dataclass(frozen=True)
class ComparedMask:
    """`expected_mask`: MASKED, TRAINED or EITHER for each token. `part_of_token`: the number of its part, or -1.
    `ends`: the first end token of each answer that should be trained. `mask`: whether each token is trained."""

    row: SampledRow
    parts: Sequence[Part]
    expected_mask: np.ndarray
    part_of_token: np.ndarray
    ends: list[int]
    mask: np.ndarray

    @property
    def turns(self) -> list[int]:
        """The turns that have a text that was found."""
        return sorted({part.turn for part in self.parts if not part.is_template})

    def find_wrong(self, mask: np.ndarray) -> np.ndarray:
        return np.flatnonzero((self.expected_mask != EITHER) & (self.expected_mask != mask))

    @property
    def wrong_texts(self) -> dict[int, Part]:
        """The first text of each turn that is on the wrong side of the mask, by turn."""
        numbers = self.part_of_token[self.find_wrong(self.mask)]
        parts = [self.parts[number] for number in np.unique(numbers[numbers >= 0]).tolist()]
        return {part.turn: part for part in reversed(parts) if not part.is_template}

    @property
    def trained_template(self) -> np.ndarray:
        """Tokens that the template writes, and that are trained."""
        is_template = np.array([*(part.is_template for part in self.parts), True])
        wrong = self.find_wrong(self.mask)
        return wrong[is_template[self.part_of_token[wrong]]]

    def is_right(self, mask: np.ndarray) -> bool:
        return not len(self.find_wrong(mask)) and bool(mask[self.ends].all())


class TokenTexts:
    """The texts of tokens, from `starts` to `stops` in `text`, which has all of them."""

    def __init__(self, run: Run, ids: np.ndarray) -> None:
        pieces = _decode_each(run, ids)
        self.text = "".join(pieces)
        self.text_without_spaces = remove_spaces(self.text)
        self.stops = np.cumsum([len(piece) for piece in pieces])
        self.starts = np.append(0, self.stops[:-1])
        is_word = ~np.isin(np.array([self.text]).view(np.uint32), SPACES)
        self.places = np.flatnonzero(is_word)
        # How many characters before each one are not spaces.
        self.counts = np.append(0, np.cumsum(is_word))

    def inside(self, start: int, stop: int) -> np.ndarray:
        return np.flatnonzero((self.starts >= start) & (self.stops <= stop) & (self.starts < self.stops))

    def overlapping(self, start: int, stop: int) -> np.ndarray:
        return np.flatnonzero((self.stops > start) & (self.starts < stop))

    def locate(self, part: Part, at: int) -> Part:
        """The part at this place in `text_without_spaces`."""
        start, end = int(self.places[at]), int(self.places[at + len(remove_spaces(part.text)) - 1]) + 1
        following = self.text[end : end + len(part.text) - len(part.text.rstrip())]
        return replace(part, start=start, end=end, stop=end + len(following) - len(following.lstrip()))


def read_template(run: Run) -> TemplateTexts:
    """What it writes around a question and an answer."""
    question: Message = {"role": "user", "content": PROBE}
    try:
        template = run.tokenizer.template
        asked, prompt = template.render_text([question]), template.render_prompt([question])
        answered = template.render_text([question, {"role": "assistant", "content": PROBE}])
    except TorchstoneError:
        return TemplateTexts()
    before, _, after = asked.removeprefix(run.tokenizer.hf.bos_token or "").partition(PROBE)
    header = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
    return TemplateTexts(before, after, header, answered.rpartition(PROBE)[2])


def compare_mask(run: Run, row: SampledRow, template: TemplateTexts) -> ComparedMask:
    """Compares the mask of the first document of a row."""
    ids, turns = row.documents[0].ids, row.turns
    is_all = run.config.data.train_on == "all" or row.row.value.get("unmask") is True
    texts = TokenTexts(run, ids)
    # Some decoders give other texts for single tokens.
    is_whole = texts.text_without_spaces == remove_spaces(decode(run, ids))
    parts = _find_parts(run, row, template, texts) if is_whole else []
    expected, part_of_token, ends = np.full(len(ids), EITHER), np.full(len(ids), -1), list[int]()
    for before, after in pairwise([None, *parts, None]):
        if not is_all and _is_masked_between(before, after, turns):
            inside = texts.inside(before.stop if before else 0, after.start if after else len(texts.text))
            expected[inside[texts.counts[texts.starts[inside]] < texts.counts[texts.stops[inside]]]] = MASKED
    for number, part in enumerate(parts):
        is_trained, overlapping = turns[part.turn].is_trained, texts.overlapping(part.start, part.end)
        tokens, value = texts.inside(part.start, part.stop), MASKED
        if part.is_template:
            value = EITHER if is_all or (is_trained and part.kind == "end") else MASKED
        elif is_trained:
            tokens, value = overlapping, TRAINED
        expected[tokens], part_of_token[tokens] = value, number
        if part.kind == "end" and is_trained and turns[part.turn].role == "assistant":
            end_ids = {*run.tokenizer.stop_ids, *run.tokenizer.hf.added_tokens_decoder}
            ends += [token for token in overlapping.tolist() if int(ids[token]) in end_ids][:1]
    # Nothing predicts the first token.
    expected[0] = EITHER
    mask = np.concatenate(([False], row.documents[0].labels[:-1] != IGNORE_INDEX))
    return ComparedMask(row, parts, expected, part_of_token, ends, mask)


def _is_masked_between(before: Part | None, after: Part | None, turns: Sequence[Turn]) -> bool:
    """Whether all is masked between two parts that follow each other, or at the start or the end."""
    first, last = before.turn if before else -1, after.turn if after else len(turns)
    if last - first != 1:
        # Within a turn, or with another one between them that was not found.
        return False
    if before and turns[first].is_trained and (after is None or before.kind != "end"):
        return False
    # A template may write a part of an answer before its text, such as <think></think>.
    return not (after and turns[last].is_trained and turns[last].role == "assistant" and after.kind != "header")


def _find_parts(run: Run, row: SampledRow, template: TemplateTexts, texts: TokenTexts) -> list[Part]:
    """The parts that are in the text, at the only possible place, in order."""
    parts = [part for part in _list_parts(run, row, template, texts.text_without_spaces) if remove_spaces(part.text)]
    targets, places = [remove_spaces(part.text) for part in parts], [-1] * len(parts)
    # At first long texts, which templates seldom drop. A system message may be written elsewhere.
    is_sure = [part.kind == "text" and row.turns[part.turn].role != "system" for part in parts]
    chosen = [n for n, target in enumerate(targets) if is_sure[n] and len(target) >= MIN_TEXT]
    _search(texts.text_without_spaces, targets, chosen, places, 0, len(texts.text_without_spaces))
    for _ in range(2):
        # Then what may be between two of them.
        found = [n for n, place in enumerate(places) if place >= 0]
        for before, after in pairwise([-1, *found, len(parts)]):
            start = places[before] + len(targets[before]) if before >= 0 else 0
            stop = places[after] if after < len(parts) else len(texts.text_without_spaces)
            _search(texts.text_without_spaces, targets, range(before + 1, after), places, start, stop)
    return [texts.locate(part, at) for part, at in zip(parts, places, strict=True) if at >= 0]


def _search(text: str, targets: Sequence[str], chosen: Sequence[int], places: list[int], start: int, stop: int) -> None:
    """Sets the places of the chosen targets that are the same if one searches from the start and from the stop."""
    first, at = dict[int, int](), start
    for number in chosen:
        if (place := text.find(targets[number], at, stop)) >= 0:
            first[number], at = place, place + len(targets[number])
    for number in reversed(chosen):
        if (place := text.rfind(targets[number], start, stop)) >= 0:
            stop = place
            if first.get(number) == place:
                places[number] = place


def _list_parts(run: Run, row: SampledRow, template: TemplateTexts, written: str) -> Iterator[Part]:
    """The parts of a row, in the order in which templates write them."""
    if isinstance(row.row.value.get("prompt"), str):
        template = TemplateTexts()
    ends = {"user": template.after_question, "assistant": template.after_answer}
    for number, turn in enumerate(row.turns):
        if turn.role == "assistant":
            yield Part(number, "header", _as_written(run, template.header, written))
        yield Part(number, "reasoning", _as_written(run, turn.reasoning, written))
        yield Part(number, "text", _as_written(run, turn.text, written))
        for call in turn.calls:
            yield Part(number, "call", _as_written(run, call, written))
        yield Part(number, "end", _as_written(run, ends.get(turn.role, ""), written))


def _as_written(run: Run, text: str, written: str) -> str:
    """The text, or what tokens or JSON make of it, if `written` (without spaces) has that; with the spaces after it."""
    stripped = text.strip()
    if remove_spaces(stripped) in written:
        return text
    forms = [
        decode(run, run.tokenizer.encode(stripped)),
        *(json.dumps(stripped, ensure_ascii=a)[1:-1] for a in (False, True)),
    ]
    return next((form for form in forms if remove_spaces(form) in written), "") + text[len(text.rstrip()) :]


def _decode_each(run: Run, ids: np.ndarray) -> list[str]:
    """The text of each token. If a character has several tokens, the last of them has all of it."""
    different = np.unique(ids).tolist()
    decoded = run.tokenizer.hf.backend_tokenizer.decode_batch([[i] for i in different], skip_special_tokens=False)
    by_id = dict(zip(different, decoded, strict=True))
    texts = list[str]()
    for is_part, group in groupby(ids.tolist(), key=lambda i: "\ufffd" in by_id[i]):
        members = list(group)
        texts += [*[""] * (len(members) - 1), decode(run, members)] if is_part else [by_id[i] for i in members]
    return texts


def remove_spaces(text: str) -> str:
    return "".join(text.split())
