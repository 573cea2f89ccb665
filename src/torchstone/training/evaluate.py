"""The loss of a model over a data file and, if the rows are conversations, the exact-match accuracy.

`bits_per_byte` is the loss sum of all loss tokens in bits, divided by the UTF-8 bytes of the text of these tokens. So
it does not depend on the tokenizer, unlike the loss and the perplexity per token. Special tokens (the end of a document
or of a turn) have no bytes, but their loss counts. What has no loss counts in neither: the first token of a document,
and in a conversation everything but the answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from torchstone.config.schema import Config, DataConfig
from torchstone.data.formats import (
    CHAT_FORMATS,
    IGNORE_INDEX,
    PromptCompletion,
    RowFormat,
    read_conversation,
    read_prompt,
)
from torchstone.data.loader import RunData, StepBatch, load_data
from torchstone.data.sources import BadRow, Row, find_files, parse_rows, read_chunks, read_row
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import DataError, NumericalError, UsageError
from torchstone.models.model import Model
from torchstone.observe.console import Console, count_text
from torchstone.parallel.runner import Runner
from torchstone.training.generation import encode_text_prompt
from torchstone.training.step import validation_loss

GENERATION_BATCH = 64
# Right answers among the examples, and wrong ones.
MAX_EXAMPLES = 4


class Question(NamedTuple):
    """What comes before an answer, as text to show and as tokens, and the answer of the data."""

    text: str
    prompt: list[int]
    expected: str


@dataclass(frozen=True)
class AnswerOptions:
    """How questions are answered: how many (None: all), in at most how many tokens (None: enough for the longest
    expected answer), and the pattern that extracts from an answer what is compared."""

    max_questions: int | None = None
    max_new_tokens: int | None = None
    pattern: re.Pattern[str] | None = None


def evaluate_file(
    model: Model,
    tokenizer: Tokenizer,
    config: Config,
    path: str,
    device: torch.device,
    options: AnswerOptions,
    console: Console,
) -> dict[str, Any]:
    """`loss` per token over `tokens`, and for conversations the `exact_match` over the answered rows."""
    data = load_data(config, tokenizer, [path], {}, console)
    (row_format,) = data.formats
    has_answers = row_format in (*CHAT_FORMATS, "prompt")
    if not has_answers and (options.pattern is not None or options.max_new_tokens is not None):
        raise UsageError(f"{path} has no answers: --extract and --max-tokens have no effect on {row_format} rows")
    num_bytes = 0

    def count_bytes(batch: StepBatch) -> None:
        nonlocal num_bytes
        for micro_batch in batch.micro_batches:
            labels = micro_batch.labels[micro_batch.labels != IGNORE_INDEX]
            num_bytes += int(tokenizer.token_bytes[labels.numpy()].sum())

    with console.progress("computing the loss", len(data.train), count_text) as update:
        batches = _batches(data, count_bytes, update)
        loss, tokens = validation_loss(Runner(model, device, data.packed), batches)
    if not math.isfinite(loss):
        raise NumericalError(f"{path}: the loss is {loss}", "the model's weights have NaN or overflow")
    results: dict[str, Any] = {"data": path, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else None}
    results |= {"bits_per_byte": loss * tokens / math.log(2) / num_bytes if num_bytes else None}
    results |= {"tokens": tokens, "bytes": num_bytes, "samples": len(data.train)}
    results["dropped_rows"] = data.counts.dropped
    if has_answers and options.max_questions != 0:
        questions = read_questions(path, row_format, tokenizer, config.data, options.max_questions)
        results |= exact_match(model, tokenizer, questions, options, config.data.context_length, console)
    return results


def _batches(
    data: RunData, count_bytes: Callable[[StepBatch], None], update: Callable[[int, str], None]
) -> Iterator[StepBatch]:
    for batch in data.batches_in_order(data.train):
        count_bytes(batch)
        yield batch
        update(batch.first_sample + batch.samples, "")


def exact_match(
    model: Model,
    tokenizer: Tokenizer,
    questions: list[Question],
    options: AnswerOptions,
    context_length: int,
    console: Console,
) -> dict[str, Any]:
    """Generates a greedy answer to each question, and compares it with the expected one.

    With a pattern, its first match in the answer is compared with its first match in the expected one.
    """
    pattern, expected = options.pattern, [question.expected for question in questions]
    targets = [_extract(text, pattern) for text in expected]
    if pattern is not None and expected and not any(target is not None for target in targets):
        raise UsageError(
            f"--extract {pattern.pattern!r} matches none of the {len(expected)} expected answers",
            f"the first one ends with {expected[0][-60:]!r}",
        )
    if pattern is not None and len(targets) > 1 and len(set(targets)) == 1:
        console.warn(f"--extract {pattern.pattern!r} finds the same in all expected answers: {targets[0]!r}")
    # Enough for the longest answer and its stop token, so that a longer wrong answer is not cut to a correct one.
    longest = max((len(tokenizer.encode(text)) for text in expected), default=0)
    max_new_tokens = options.max_new_tokens or min(4 + longest, context_length)
    answers = generate_answers(model, tokenizer, questions, max_new_tokens, console)
    found = [_extract(text, pattern) for text in answers]
    is_right = [a is not None and a == b for a, b in zip(found, targets, strict=True)]
    examples = [
        {"question": question.text, "answer": answer, "expected": question.expected, "right": right}
        | ({} if pattern is None else {"extracted": text, "expected_extracted": target})
        for question, answer, right, text, target in zip(questions, answers, is_right, found, targets, strict=True)
    ]
    right, wrong = ([e for e in examples if e["right"] == value][:MAX_EXAMPLES] for value in (True, False))
    result: dict[str, Any] = {"exact_match": sum(is_right) / max(1, len(is_right)), "questions": len(questions)}
    if pattern is not None:
        # What the pattern does not find is a wrong answer.
        result |= {"answers_without_match": found.count(None), "expected_without_match": targets.count(None)}
    return result | {"examples": right + wrong}


def generate_answers(
    model: Model, tokenizer: Tokenizer, questions: list[Question], max_new_tokens: int, console: Console
) -> list[str]:
    """The greedy answers. A question that fills the model's context has an empty one."""
    prompts = [question.prompt for question in questions]
    indices = [i for i, prompt in enumerate(prompts) if model.length_error(len(prompt) + 1) is None]
    if len(indices) < len(prompts):
        left_out = len(prompts) - len(indices)
        console.warn(f"{left_out} of {len(prompts)} questions fill the model's context: they count as wrong")
    was_training = model.module.training
    model.train(False)
    answers = [""] * len(prompts)
    # The fallback generates one prompt at a time.
    size = GENERATION_BATCH if model.implementation == "native" else 1
    with console.progress("answering questions", len(indices), count_text) as update:
        for start in range(0, len(indices), size):
            batch, steps = indices[start : start + size], count(1)

            def report(_: list[int], start: int = start, steps: Iterator[int] = steps) -> None:
                update(start, f"token {next(steps)}")

            ids = model.generate(
                [prompts[i] for i in batch],
                _room(model, prompts[batch[0]], max_new_tokens) if size == 1 else max_new_tokens,
                tokenizer.stop_ids,
                on_tokens=report,
            )
            for index, row in zip(batch, ids, strict=True):
                answers[index] = tokenizer.decode(row)
            update(start + len(batch), "")
    model.train(was_training)
    return answers


def _room(model: Model, prompt: list[int], max_new_tokens: int) -> int:
    """How many tokens to generate: `max_new_tokens`, or as many as the model has positions for."""
    if model.max_positions is None or model.length_error(len(prompt) + max_new_tokens) is None:
        return max_new_tokens
    return max(1, model.max_positions - len(prompt))


def read_questions(
    path: str, row_format: RowFormat, tokenizer: Tokenizer, data: DataConfig, limit: int | None
) -> list[Question]:
    """The first `limit` rows that end with an answer. Bad rows were counted, or refused, when the loss was computed."""
    questions: list[Question] = []
    columns: Mapping[Any, str] = next(iter(data.columns), {})
    rows = (row for chunk in read_chunks(find_files(path), columns=columns) for row in parse_rows(chunk, columns))
    for row in islice(rows, data.max_samples):
        if len(questions) == limit:
            break
        if isinstance(row, BadRow):
            continue
        try:
            question = read_row(row, partial(_read_question, row_format, tokenizer))
        except DataError:
            continue
        if question is not None:
            questions.append(question)
    return questions


def _read_question(row_format: RowFormat, tokenizer: Tokenizer, row: Row) -> Question | None:
    content = read_prompt(row) if row_format == "prompt" else read_conversation(row, row_format)
    if isinstance(content, PromptCompletion):
        return Question(content.prompt, encode_text_prompt(tokenizer, content.prompt), content.completion)
    *context, last = content.messages
    # A tool call has no text to compare.
    if not context or last["role"] != "assistant" or not last.get("content"):
        return None
    prompt = tokenizer.encode(tokenizer.template.render_prompt(context, content.tools))
    return Question(context[-1].get("content") or "", prompt, last["content"])


def _extract(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """What is compared: the pattern's first group, or else its whole match; None if it does not match."""
    if pattern is None:
        return text.strip()
    match = pattern.search(text)
    found = "" if match is None else match[1 if pattern.groups else 0] or ""
    # An empty match does not count: a pattern that can match nothing would make every answer right.
    return found.strip() or None
