"""Checks of the loss mask: does a row train on its answers, on all of them, and on their ends?

Trained tokens are decoded and compared with the texts of the raw row (turns.py). Templates and tokenizers may change
spaces, and a template may rewrite a text. So spaces do not count, and a text is wrong only if it is in the row, and on
the wrong side of the mask.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from torchstone.data.formats import CHAT_FORMATS, IGNORE_INDEX, ROW_FORMATS, TEXT_FORMATS, Message, RowFormat
from torchstone.diagnosis.batch_checks import check_label_shift
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.sampled_rows import (
    MAX_WRONG,
    Document,
    SampledRow,
    decode,
    inspect_command,
    is_cut,
    name_token,
    sample_rows,
    sample_sequences,
)
from torchstone.diagnosis.turns import Turn
from torchstone.errors import TorchstoneError
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

ANSWER_FORMATS: tuple[RowFormat, ...] = (*CHAT_FORMATS, "prompt")
# Of all rows: more that are truncated fail, not only warn.
MANY_CUT = 0.5
EMPTY_THINKING = re.compile(r"<((?:think|thought|reason)[\w:]*)>\s*</\1>")
# Of a shorter text, in characters, one cannot tell where it is; of a longer row, in tokens, only the end is decoded.
MIN_TEXT, MAX_DECODED = 4, 4096
QUESTION: list[Message] = [{"role": "user", "content": "a"}]
# Some templates end an answer with several tokens. Generation stops at the first stop token.
MAX_END_TOKENS = 8


class ComparedTurn(NamedTuple):
    row: SampledRow
    turn: Turn
    is_wrong: bool


def check_loss_mask(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    turns = compare_turns(run)
    answers, others = ([t for t in turns if t.turn.is_trained == is_trained] for is_trained in (True, False))
    if not answers:
        raise SkipCheck("no answer can be compared with its row: all are cut, or rewritten by the chat template")
    untrained, unmasked = [t for t in answers if t.is_wrong], [t for t in others if t.is_wrong]
    rest = sum(t.is_trained for row in sample_rows(run, ANSWER_FORMATS) for t in row.turns) - len(answers)
    finding = Finding(
        "pass",
        f"{len(answers) - len(untrained)} of {len(answers)} answers are trained in full, "
        f"{len(others) - len(unmasked)} of {len(others)} other texts are masked"
        + (f"; {rest} other answers are too short to compare, cut, or rewritten by the template" if rest else ""),
        limit="all",
        values={"answers": len(answers), "untrained": len(untrained), "others": len(others), "unmasked": len(unmasked)},
    )
    if not untrained and not unmasked:
        return finding
    row, turn, _ = [*untrained, *unmasked][0]
    shares = len(untrained) / len(answers), len(unmasked) / max(1, len(others))
    roles = [" and ".join(sorted({t.turn.role for t in wrong})) for wrong in (untrained, unmasked)]
    return replace(
        finding,
        status="fail" if max(shares) > MAX_WRONG else "warn",
        cause=f"{_describe_mask(*shares, *roles)}, such as {turn.text.strip()[:60]!r} of {turn.role}",
        source=f"{row.origin} (data.train_on {run.config.data.train_on})",
        next_step=inspect_command(run, row.origin),
    )


def compare_turns(run: Run) -> list[ComparedTurn]:
    """The texts of rows that are not cut, and whether each is on the wrong side of the mask."""
    turns = []
    for row in sample_rows(run, ANSWER_FORMATS):
        if is_cut(run, row) or not row.documents[0].trained:
            continue
        whole, trained, masked = _split_text(run, row.documents[0])
        for turn in row.turns:
            text = _squeeze(decode(run, run.tokenizer.encode(turn.text.strip())))
            if text and text in whole:
                is_wrong = text not in (trained if turn.is_trained else masked)
                turns.append((len(text), ComparedTurn(row, turn, is_wrong)))
    # A short text is often in another one.
    long = [turn for length, turn in turns if length >= MIN_TEXT]
    return long if any(turn.turn.is_trained for turn in long) else [turn for _, turn in turns]


def _split_text(run: Run, document: Document) -> tuple[str, str, str]:
    """The text without spaces: all of it, what is trained, and what is masked. NUL stands for what is left out."""
    ids, labels, ranges = document.ids, document.labels, document.trained
    # Nothing predicts the first token. It belongs to what follows it.
    trained = [np.concatenate((ids[:1] if start == 0 else ids[:0], labels[start:end])) for start, end in ranges]
    # With the first trained token, which may have begun in the prompt.
    starts, ends = [0, *(end + 1 for _, end in ranges)], [*(start + 2 for start, _ in ranges), len(ids)]
    masked = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    texts = ["\0".join(_squeeze(decode(run, part)) for part in parts) for parts in ([ids], trained, masked)]
    return texts[0], texts[1], texts[2]


def _describe_mask(untrained: float, unmasked: float, untrained_roles: str, unmasked_roles: str) -> str:
    if untrained > 0.5 and unmasked > 0.5:
        return "the mask is inverted: questions are trained and answers are masked"
    if untrained and unmasked:
        return f"the mask leaves out texts of {untrained_roles}, and trains on texts of {unmasked_roles}"
    if untrained:
        return f"the mask leaves out a part of {untrained:.0%} of the texts of {untrained_roles}, or all of them"
    return f"{unmasked:.0%} of the texts that should be masked are trained, those of {unmasked_roles}"


class RowEnd(NamedTuple):
    """How a row ends: with an end token that is trained, or masked, or with none; and its last trained tokens."""

    row: SampledRow
    kind: Literal["trained", "masked", "missing"]
    token: int
    trained: frozenset[int]


def check_end_of_turn(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    _require_right_labels(diagnosis)
    ends = measure_ends(run)
    if not ends:
        raise SkipCheck("no row that is looked at should end with an end token")
    kinds = Counter(end.kind for end in ends)
    finding = Finding(
        "pass",
        f"{kinds['trained']} of {len(ends)} rows end with a trained {_names(run, ends, 'trained') or 'end token'}",
        limit=f"{1 - MAX_WRONG:.0%}",
        values={"rows": len(ends), "masked": kinds["masked"], "missing": kinds["missing"]},
    )
    if kinds["masked"] + kinds["missing"] <= MAX_WRONG * len(ends):
        return finding
    kind: Literal["masked", "missing"] = "masked" if kinds["masked"] >= kinds["missing"] else "missing"
    row = next(end.row for end in ends if end.kind == kind)
    is_template = row.row_format in CHAT_FORMATS
    if kind == "missing" and is_template and run.tokenizer.unknown_template_tokens:
        raise SkipCheck("the end token of the chat template is not a token: see template_tokens")
    cause = "no end token follows the answers"
    is_pad = any(end.kind == "masked" and end.token == run.tokenizer.hf.pad_token_id for end in ends)
    if kind == "masked":
        cause = f"{_names(run, ends, 'masked')} ends {kinds['masked']} rows, but is masked (label -100)"
        cause += "; it is also the pad token, whose labels some tools mask" if is_pad else ""
    advice = "unmask it in labels; "
    if is_template:
        advice = "let the chat template write the end token with the answer, not with the message after it; "
    return replace(
        finding,
        # Labels are the choice of whoever wrote them, unless it is the known accident.
        status="warn" if row.row_format == "tokens" and not is_pad else "fail",
        cause=f"{cause}: the model never learns to stop",
        source=f"{template_name(run)} ({row.origin})" if is_template else row.origin,
        next_step=advice + inspect_command(run, row.origin),
    )


def measure_ends(run: Run) -> list[RowEnd]:
    """How rows end: those with an answer at the end of what is trained, whole texts, and token ids with an eos."""
    ends = []
    for row in sample_rows(run, ROW_FORMATS):
        trained = [turn for turn in row.turns if turn.is_trained]
        is_text, is_tokens = row.row_format in TEXT_FORMATS, row.row_format == "tokens"
        is_whole = row.row.has_text_end if is_text else not is_cut(run, row)
        if is_whole and (is_text or is_tokens or (trained and trained[-1].role == "assistant")):
            end = _find_end(run, row)
            # Ids may be a part of a text.
            if end is not None and not (is_tokens and end.kind == "missing"):
                ends.append(end)
    return ends


def _find_end(run: Run, row: SampledRow) -> RowEnd | None:
    """Looks at the last trained token that is not a space, and at the masked one after it."""
    document, hf = row.documents[-1], run.tokenizer.hf
    if not document.trained:
        return None
    end_ids = {hf.eos_token_id, *run.tokenizer.stop_ids}
    if row.row_format in ANSWER_FORMATS:
        # Of an answer also other added tokens, unless they are a part of it.
        end_ids |= {
            number for number, token in hf.added_tokens_decoder.items() if token.content not in row.turns[-1].text
        }
    start, end = document.trained[-1]
    last, following = _skip_spaces(run, document.labels[start:end][::-1]), _skip_spaces(run, document.ids[end + 1 :])
    tokens = frozenset(document.labels[max(start, end - MAX_END_TOKENS) : end].tolist())
    if last in end_ids:
        return RowEnd(row, "trained", last, tokens)
    is_masked = following in end_ids
    return RowEnd(row, "masked" if is_masked else "missing", following, tokens)


def check_stop_tokens(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    _require_right_labels(diagnosis)
    ends = [end for end in measure_ends(run) if end.kind == "trained"]
    if not ends:
        raise SkipCheck("no row ends with a trained end token: see end_of_turn")
    stops = set(run.tokenizer.stop_ids) & _saved_stop_ids(run)
    missing = [end for end in ends if not stops & end.trained]
    finding = Finding(
        "pass",
        f"rows end with {_names(run, ends, 'trained')}; generation stops at "
        + (", ".join(name_token(run, token) for token in sorted(stops)) or "no token"),
        limit="every token that ends rows",
        values={"rows": len(ends), "missing": len(missing)},
    )
    if len(missing) <= MAX_WRONG * len(ends):
        return finding
    row, token = missing[0].row, missing[0].token
    cause = f"generation does not stop at {name_token(run, token)}, so the model writes on after its answer"
    next_step = "make it the eos_token in tokenizer_config.json, or add it to eos_token_id in generation_config.json; "
    if token not in run.tokenizer.hf.all_special_ids:
        cause += "; for the tokenizer it is an ordinary token"
        next_step = "make it a special token ('special': true in tokenizer.json) and the eos_token; "
    next_step += inspect_command(run, row.origin)
    source = f"{run.tokenizer.path}, {template_name(run)}"
    return replace(finding, status="fail", cause=cause, source=source, next_step=next_step)


def _saved_stop_ids(run: Run) -> set[int]:
    """The tokens in generation_config.json of the checkpoints, where other programs read them."""
    if run.model.generation_config is None:
        return set(run.tokenizer.stop_ids)
    stops = json.loads(run.model.generation_config).get("eos_token_id")
    return set(stops if isinstance(stops, list) else [] if stops is None else [stops])


def check_prompt_boundary(diagnosis: Diagnosis) -> Finding:
    """For generation a prompt is tokenized alone. In training, a token may span its end and the start of the answer."""
    run = diagnosis.run
    _require_right_labels(diagnosis)
    rows, spanning = 0, list[SampledRow]()
    chat_prompt = generation_prompt(run)
    for row in sample_rows(run, ANSWER_FORMATS):
        is_text = isinstance(row.row.value.get("prompt"), str)
        prompt = row.turns[0].text if is_text else chat_prompt
        first = next((turn for turn in row.turns if turn.is_trained), None)
        if prompt and first and first.role == "assistant" and row.documents[0].trained and not is_cut(run, row):
            rows += 1
            last_of_prompt = row.documents[0].ids[row.documents[0].trained[0][0]]
            if last_of_prompt != run.tokenizer.encode(prompt)[-1]:
                spanning.append(row)
    if not rows:
        raise SkipCheck("no row has a prompt before its answer")
    finding = Finding(
        "pass",
        f"in {len(spanning)} of {rows} rows a token spans the end of the prompt and the start of the answer",
        limit=f"{MAX_WRONG:.0%}",
        values={"rows": rows, "spanning": len(spanning)},
    )
    if len(spanning) <= MAX_WRONG * rows:
        return finding
    row = spanning[0]
    is_text = row.row_format == "prompt" and isinstance(row.row.value["prompt"], str)
    end = (row.turns[0].text if is_text else chat_prompt)[-12:]
    cause = f"prompts end with {end!r}, but the last token of that is another one if an answer follows"
    advice = "end prompts where a token ends: a space belongs to the completion; "
    if not is_text:
        advice = "let the chat template write the last space of the generation prompt as a part of the answer; "
    source = row.origin if is_text else f"{template_name(run)} ({row.origin})"
    return replace(
        finding, status="warn", cause=cause, source=source, next_step=advice + inspect_command(run, row.origin)
    )


def template_name(run: Run) -> str:
    """Where the chat template comes from."""
    return "data.chat_template" if run.config.data.chat_template else f"the chat template of {run.tokenizer.path}"


def generation_prompt(run: Run) -> str:
    """A rendered question with its generation prompt; empty without a template that renders a question alone."""
    try:
        return run.tokenizer.template.render_prompt(QUESTION)
    except TorchstoneError:
        return ""


def check_thinking(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    rows, empty = 0, list[str]()
    for _, origin, ids, labels in sample_sequences(run, (*ANSWER_FORMATS, "tokens"), 256):
        rows += 1
        # Padding stands for masked tokens, so that trained ones do not get together.
        trained = np.where(labels == IGNORE_INDEX, run.data.pad_id, ids)
        if EMPTY_THINKING.search(decode(run, trained[-MAX_DECODED:])):
            empty.append(origin)
    if not rows:
        raise SkipCheck("text has no answers")
    finding = Finding(
        "pass",
        f"{len(empty)} of {rows} rows train on an empty block of reasoning, such as <think></think>",
        limit="none",
        values={"rows": rows, "empty": len(empty)},
    )
    if not empty:
        return finding
    writes_it = "think>" in str(run.tokenizer.hf.chat_template or "")
    return replace(
        finding,
        status="warn",
        cause="the model learns to answer without reasoning"
        + (": the chat template writes an empty block if a message has no reasoning" if writes_it else ""),
        source=f"{template_name(run)} ({empty[0]})" if writes_it else empty[0],
        next_step="give the messages reasoning_content, use a chat template without the block, or leave it so if the "
        f"model should not reason; {inspect_command(run, empty[0])}",
    )


def check_cut_answers(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    if set(run.data.formats) & set(TEXT_FORMATS):
        raise SkipCheck("text may be cut: it goes on in the next row")
    counts, length = run.data.counts, run.config.data.context_length
    cut, rows = counts.truncated_long + counts.split_long, max(1, counts.rows)
    finding = Finding(
        "pass",
        f"{cut:,} of {rows:,} rows are cut at data.context_length {length}",
        limit=f"{MAX_WRONG:.0%}",
        values={"rows": rows, "cut": cut},
    )
    if cut <= MAX_WRONG * rows:
        return finding
    return replace(
        finding,
        status="fail" if counts.truncated_long > MANY_CUT * rows else "warn",
        cause="a cut answer has no end, so the model learns to stop anywhere, or not at all",
        source=f"data.on_long_row {run.config.data.on_long_row}, such as {', '.join(counts.examples[:3])}",
        next_step="raise data.context_length (torchstone inspect-data shows how long rows are), or use "
        "--data.on_long_row drop",
    )


def _require_right_labels(diagnosis: Diagnosis) -> None:
    """Raises SkipCheck if labels are wrong: then nothing can be said about where they start and end."""
    for name, check in (("label_shift", check_label_shift), ("loss_mask", check_loss_mask)):
        if _fails(check, diagnosis):
            raise SkipCheck(f"the labels are wrong: see {name}")


def _fails(check: Callable[[Diagnosis], Finding], diagnosis: Diagnosis) -> bool:
    try:
        return check(diagnosis).status == "fail"
    except SkipCheck:
        return False


def _skip_spaces(run: Run, ids: np.ndarray) -> int:
    """The first token that is not a space, or -1."""
    return next((int(token) for token in ids if decode(run, [int(token)]).strip()), -1)


def _names(run: Run, ends: list[RowEnd], kind: str) -> str:
    """The end tokens, the most frequent first."""
    tokens = Counter(end.token for end in ends if end.kind == kind)
    return ", ".join(name_token(run, token) for token, _ in tokens.most_common())


def _squeeze(text: str) -> str:
    return "".join(text.split())


def check_pretokenized_mask(diagnosis: Diagnosis) -> Finding:
    """Rows of ids have labels of their own: are those of the answers there where the chat template begins an answer?"""
    run = diagnosis.run
    marker = _answer_marker(run)
    if not marker:
        raise SkipCheck("no chat template writes something of its own before an answer")
    rows, masked, prompts_trained = 0, list[str](), 0
    for _, origin, ids, labels in sample_sequences(run, ("tokens",), 64):
        values, is_trained = ids.tolist(), labels != IGNORE_INDEX
        starts = [at for at in range(len(marker), len(values)) if values[at - len(marker) : at] == marker]
        if starts and is_trained.any():
            rows += 1
            prompts_trained += bool(is_trained[: starts[0]].any())
            masked += [] if is_trained[starts].any() else [origin]
    if not rows:
        raise SkipCheck("no rows of token ids have answers of this chat template")
    text = decode(run, np.array(marker))
    finding = Finding(
        "pass",
        f"in {rows - len(masked)} of {rows} rows of ids the first token after {text!r} is trained",
        limit="half of the rows",
        values={"rows": rows, "masked": len(masked), "prompts_trained": prompts_trained},
    )
    if 2 * len(masked) <= rows:
        return finding
    prompts = f", and in {prompts_trained} rows tokens before it are trained" if prompts_trained else ""
    return replace(
        finding,
        status="warn",
        cause=f"in {len(masked)} rows the first token of every answer is masked{prompts}: the mask may be inverted or "
        "shifted",
        source=f"labels of {masked[0]}",
        next_step=f"see which tokens are trained: {inspect_command(run, masked[0])}",
    )


def _answer_marker(run: Run) -> list[int]:
    """The ids that the chat template writes between a question and its answer; empty without any."""
    try:
        template, encode = run.tokenizer.template, run.tokenizer.encode
        question, prompt = encode(template.render_text(QUESTION)), encode(template.render_prompt(QUESTION))
    except TorchstoneError:
        return []
    return prompt[len(question) :] if prompt[: len(question)] == question else []
