"""Checks of the loss mask: does a row train on its answers, on all of them, and on their ends?

The mask is compared with the one that the texts of the raw row ask for (expected_mask.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from torchstone.data.formats import CHAT_FORMATS, IGNORE_INDEX, ROW_FORMATS, TEXT_FORMATS, Message, RowFormat
from torchstone.diagnosis.check import Finding, SkipCheck
from torchstone.diagnosis.expected_mask import ComparedMask, compare_mask, read_template
from torchstone.diagnosis.sampled_rows import (
    MAX_WRONG,
    SampledRow,
    decode,
    inspect_command,
    is_cut,
    name_token,
    sample_rows,
    sample_sequences,
    search_sequences,
)
from torchstone.errors import TorchstoneError
from torchstone.training.run import Run

if TYPE_CHECKING:
    from torchstone.diagnosis.session import Diagnosis

ANSWER_FORMATS: tuple[RowFormat, ...] = (*CHAT_FORMATS, "prompt")
EMPTY_THINKING = re.compile(r"<((?:think|thought|reason)[\w:]*)>\s*</\1>")
# Only this many tokens at the end of a row are decoded.
MAX_DECODED = 4096
QUESTION: list[Message] = [{"role": "user", "content": "a"}]
# Some templates end an answer with several tokens. Generation stops at the first stop token.
MAX_END_TOKENS = 8


def check_loss_mask(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    diagnosis.require("label_shift")
    rows = compare_rows(run)
    turns = [(row, turn, row.row.turns[turn].is_trained) for row in rows for turn in row.turns]
    answers = sum(is_trained for *_, is_trained in turns)
    if not answers:
        raise SkipCheck("no answer can be compared with its row: all are cut, or rewritten by the chat template")
    wrong = sorted([each for each in turns if each[1] in each[0].wrong_texts], key=lambda each: not each[2])
    untrained = sum(is_trained for *_, is_trained in wrong)
    template = [row for row in rows if len(row.trained_template)]
    others, unmasked = len(turns) - answers, len(wrong) - untrained
    rest = sum(t.is_trained for row in sample_rows(run, ANSWER_FORMATS) for t in row.turns) - answers
    finding = Finding(
        "pass",
        f"{answers - untrained} of {answers} answers are trained in full, {others - unmasked} of {others} other texts "
        f"are masked; {len(template)} of {len(rows)} rows train on what the template writes between them"
        + (f"; {rest} other answers are cut, rewritten by the template, or could be at several places" if rest else ""),
        limit="all; none",
        values={
            "answers": answers, "untrained": untrained, "others": others, "unmasked": unmasked,
            "rows": len(rows), "template": len(template),
        },
    )  # fmt: skip
    if not wrong and not template:
        return finding
    row = wrong[0][0] if wrong else template[0]
    shares = untrained / answers, unmasked / max(1, others), len(template) / len(rows)
    cause = _find_shift(rows)
    if wrong:
        cause = cause or _describe_mask(*shares[:2], [(row.row.turns[turn].role, flag) for row, turn, flag in wrong])
        part = row.wrong_texts[wrong[0][1]]
        cause += f", such as {part.text.strip()[:60]!r} ({part.kind} of {row.row.turns[part.turn].role})"
    else:
        cause = f"{cause}: it" if cause else "the mask"
        cause += f" trains on what the chat template writes {_describe_template(run, row)}"
    return finding.with_cause(
        cause,
        f"{row.row.origin} (data.train_on {run.config.data.train_on})",
        inspect_command(run, row.row.origin),
        status="fail" if max(shares) > MAX_WRONG else "warn",
    )


def compare_rows(run: Run) -> list[ComparedMask]:
    """The masks of rows that are not cut, and those that they should have."""
    template = read_template(run)
    rows = [row for row in sample_rows(run, ANSWER_FORMATS) if not is_cut(run, row) and row.documents[0].trained]
    return [compare_mask(run, row, template) for row in rows]


def _describe_mask(untrained: float, unmasked: float, wrong: Sequence[tuple[str, bool]]) -> str:
    """`wrong`: the roles of the texts that are wrong, and whether they should be trained."""
    untrained_roles, unmasked_roles = (
        " and ".join(sorted({role for role, is_trained in wrong if is_trained == each})) for each in (True, False)
    )
    if untrained > 0.5 and unmasked > 0.5:
        return "the mask is inverted: questions are trained and answers are masked"
    if untrained and unmasked:
        return f"the mask leaves out texts of {untrained_roles}, and trains on texts of {unmasked_roles}"
    if untrained:
        return f"the mask leaves out a part of {untrained:.0%} of the texts of {untrained_roles}, or all of them"
    return f"{unmasked:.0%} of the texts that should be masked are trained, those of {unmasked_roles}"


def _describe_template(run: Run, row: ComparedMask) -> str:
    tokens = row.trained_template
    number, following = row.part_of_token[tokens[0]], tokens[tokens - np.arange(len(tokens)) == tokens[0]]
    kind = row.parts[number].kind if number >= 0 else None
    place = {"header": "before an answer", "end": "after a message that is masked"}.get(str(kind), "between messages")
    return f"{place}, such as {decode(run, row.row.documents[0].ids[following])[:60]!r}"


def _find_shift(rows: Sequence[ComparedMask]) -> str | None:
    """How the mask is shifted, if moving its edges by a token corrects nearly all rows that are wrong."""
    wrong = [row for row in rows if len(row.find_wrong(row.mask))]
    for words in _move_edges(wrong[0].mask) if wrong else ():
        if sum(row.is_right(_move_edges(row.mask)[words]) for row in wrong) >= (1 - MAX_WRONG) * len(wrong):
            return f"the mask {words}"
    return None


def _move_edges(mask: np.ndarray) -> dict[str, np.ndarray]:
    """What a mask should be if it is shifted in one of these ways. Nothing shows what was after the last token."""
    previous, following = np.append(False, mask[:-1]), np.append(mask[1:], mask[-1])
    return {
        "begins one token late": mask | following,
        "begins one token early": mask & previous,
        "ends one token late": mask & following,
        "ends one token early": mask | previous,
        "begins and ends one token late": following,
        "begins and ends one token early": previous,
    }


EndKind = Literal["trained", "masked", "missing", "earlier"]
WRONG_ENDS: tuple[EndKind, ...] = ("masked", "missing", "earlier")


class RowEnd(NamedTuple):
    """How a row ends: with an end token that is trained, or masked, or with none; and its last trained tokens.

    `earlier`: with one that is trained, but that of an earlier answer is masked."""

    row: SampledRow
    kind: EndKind
    token: int
    trained: frozenset[int]


def check_end_of_turn(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    diagnosis.require("label_shift", "loss_mask")
    ends = measure_ends(run)
    if not ends:
        raise SkipCheck("no row is known to end with an answer or a text: rows of ids may be parts of one")
    kinds = Counter(end.kind for end in ends)
    right = kinds["trained"] + kinds["earlier"]
    finding = Finding(
        "pass",
        f"{right} of {len(ends)} rows end with a trained {_names(run, ends, 'trained') or 'end token'}; "
        f"{kinds['earlier']} of them mask the end token of an earlier answer",
        limit=f"{1 - MAX_WRONG:.0%}",
        values={"rows": len(ends), **{kind: kinds[kind] for kind in WRONG_ENDS}},
    )
    if len(ends) - kinds["trained"] <= MAX_WRONG * len(ends):
        return finding
    kind = max(WRONG_ENDS, key=lambda each: kinds[each])
    row = next(end.row for end in ends if end.kind == kind)
    is_template = row.row_format in CHAT_FORMATS
    if kind == "missing" and is_template and run.tokenizer.unknown_template_tokens:
        raise SkipCheck("the end token of the chat template is not a token: see template_tokens")
    cause = "no end token follows the answers"
    is_pad = any(end.kind == "masked" and end.token == run.tokenizer.hf.pad_token_id for end in ends)
    if kind == "masked":
        cause = f"{_names(run, ends, 'masked')} ends {kinds['masked']} rows, but is masked (label -100)"
        cause += "; it is also the pad token, whose labels some tools mask" if is_pad else ""
    elif kind == "earlier":
        cause = f"{_names(run, ends, 'earlier')} is masked (label -100) after all answers but the last one"
    advice = "unmask it in labels; "
    if is_template and kind != "earlier":
        advice = "let the chat template write the end token with the answer, not with the message after it; "
    return finding.with_cause(
        f"{cause}: the model never learns to stop",
        f"{template_name(run)} ({row.origin})" if is_template else row.origin,
        advice + inspect_command(run, row.origin),
        # Labels are the choice of whoever wrote them, unless it is the known accident.
        status="warn" if row.row_format == "tokens" and not is_pad else "fail",
    )


def measure_ends(run: Run) -> list[RowEnd]:
    """How rows end: those with an answer at the end of what is trained, whole texts, and token ids with an eos."""
    ends, template = [], read_template(run)
    for row in sample_rows(run, ROW_FORMATS):
        trained = [turn for turn in row.turns if turn.is_trained]
        is_text, is_tokens = row.row_format in TEXT_FORMATS, row.row_format == "tokens"
        is_whole = row.row.has_text_end if is_text else not is_cut(run, row)
        if is_whole and (is_text or is_tokens or (trained and trained[-1].role == "assistant")):
            end = _find_end(run, row)
            # Ids may be a part of a text.
            if end is None or (is_tokens and end.kind == "missing"):
                continue
            if end.kind == "trained" and len(trained) > 1:
                compared = compare_mask(run, row, template)
                masked = [int(row.documents[0].ids[at]) for at in compared.ends if not compared.mask[at]]
                end = end._replace(kind="earlier", token=masked[0]) if masked else end
            ends.append(end)
    return ends


def _find_end(run: Run, row: SampledRow) -> RowEnd | None:
    """Looks at the last trained token that is not a space, and at the masked one after it."""
    document, hf = row.documents[-1], run.tokenizer.hf
    if not document.trained:
        return None
    end_ids = {hf.eos_token_id, *run.tokenizer.stop_ids}
    if row.row_format in ANSWER_FORMATS:
        # Other added tokens may end an answer, too, unless they are a part of it.
        end_ids |= {
            number for number, token in hf.added_tokens_decoder.items() if token.content not in row.turns[-1].text
        }
    start, end = document.trained[-1]
    last, following = _skip_spaces(run, document.labels[start:end][::-1]), _skip_spaces(run, document.ids[end + 1 :])
    tokens = frozenset(document.labels[max(start, end - MAX_END_TOKENS) : end].tolist())
    if last in end_ids:
        return RowEnd(row, "trained", last, tokens)
    if last == -1 and int(document.ids[start]) in end_ids:
        # Only the line break after it is trained.
        return RowEnd(row, "masked", int(document.ids[start]), tokens)
    is_masked = following in end_ids
    return RowEnd(row, "masked" if is_masked else "missing", following, tokens)


def check_stop_tokens(diagnosis: Diagnosis) -> Finding:
    run = diagnosis.run
    diagnosis.require("label_shift", "loss_mask")
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
    next_step = "make it the eos_token in tokenizer_config.json, or list it in additional_special_tokens there; "
    added = run.tokenizer.hf.added_tokens_decoder.get(token)
    if token in run.tokenizer.stop_ids:
        next_step = "add it to eos_token_id in generation_config.json; "
    elif added is None or not added.special:
        cause += "; for the tokenizer it is an ordinary token"
        next_step = "make it a special token ('special': true in tokenizer.json) and the eos_token; "
    elif token not in run.tokenizer.hf.all_special_ids:
        cause += "; it is a special token, but tokenizer_config.json does not name it"
    next_step += inspect_command(run, row.origin)
    source = f"{run.tokenizer.path}, {template_name(run)}"
    return finding.with_cause(cause, source, next_step)


def _saved_stop_ids(run: Run) -> set[int]:
    """The tokens in generation_config.json of the checkpoints, where other programs read them."""
    if run.model.generation_config is None:
        return set(run.tokenizer.stop_ids)
    stops = json.loads(run.model.generation_config).get("eos_token_id")
    return set(stops if isinstance(stops, list) else [] if stops is None else [stops])


def check_prompt_boundary(diagnosis: Diagnosis) -> Finding:
    """For generation a prompt is tokenized alone. In training, a token may span its end and the start of the answer."""
    run = diagnosis.run
    diagnosis.require("label_shift", "loss_mask")
    rows, spanning = 0, list[SampledRow]()
    chat_prompt = generation_prompt(run)
    for row in sample_rows(run, ANSWER_FORMATS):
        is_text = isinstance(row.row.value.get("prompt"), str)
        prompt = row.turns[0].text if is_text else chat_prompt
        first = next((number for number, turn in enumerate(row.turns) if turn.is_trained), 0)
        # After the result of a call a template may write another prompt.
        is_answer = [turn.role for turn in row.turns[max(0, first - 1) : first + 1]] == ["user", "assistant"]
        if prompt and is_answer and row.documents[0].trained and not is_cut(run, row):
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
    return finding.with_cause(cause, source, advice + inspect_command(run, row.origin), "warn")


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

    def is_empty(ids: np.ndarray, labels: np.ndarray) -> bool:
        # Padding stands for masked tokens, so that trained ones do not get together.
        trained = np.where(labels == IGNORE_INDEX, run.data.pad_id, ids)
        return EMPTY_THINKING.search(decode(run, trained[-MAX_DECODED:])) is not None

    rows, empty = search_sequences(run, (*ANSWER_FORMATS, "tokens"), 256, is_empty)
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
    return finding.with_cause(
        "the model learns to answer without reasoning"
        + (": the chat template writes an empty block if a message has no reasoning" if writes_it else ""),
        f"{template_name(run)} ({empty[0]})" if writes_it else empty[0],
        "give the messages reasoning_content, use a chat template without the block, or leave it so if the "
        f"model should not reason; {inspect_command(run, empty[0])}",
        status="warn",
    )


def _skip_spaces(run: Run, ids: np.ndarray) -> int:
    """The first token that is not a space, or -1."""
    return next((int(token) for token in ids if decode(run, [int(token)]).strip()), -1)


def _names(run: Run, ends: list[RowEnd], kind: str) -> str:
    """The end tokens, the most frequent first."""
    tokens = Counter(end.token for end in ends if end.kind == kind)
    return ", ".join(name_token(run, token) for token, _ in tokens.most_common())


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
    return finding.with_cause(
        f"in {len(masked)} rows the first token of every answer is masked{prompts}: the mask may be inverted or "
        "shifted",
        f"labels of {masked[0]}",
        f"see which tokens are trained: {inspect_command(run, masked[0])}",
        status="warn",
    )


def _answer_marker(run: Run) -> list[int]:
    """The ids that the chat template writes between a question and its answer; empty without any."""
    try:
        template, encode = run.tokenizer.template, run.tokenizer.encode
        question, prompt = encode(template.render_text(QUESTION)), encode(template.render_prompt(QUESTION))
    except TorchstoneError:
        return []
    return prompt[len(question) :] if prompt[: len(question)] == question else []
