"""The loss of a model over a data file and, if the rows are conversations, the exact-match accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchstone.config.schema import Config
from torchstone.data.formats import CHAT_FORMATS, Message, RowFormat, read_conversation
from torchstone.data.loader import load_data
from torchstone.data.sources import read_rows
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import NumericalError
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.parallel.runner import Runner
from torchstone.training.step import validation_loss

GENERATION_BATCH = 64
MAX_EXAMPLES = 8


class Question(NamedTuple):
    """The messages before an answer, and the tools it may call."""

    messages: list[Message]
    tools: list[Any] | None = None


def evaluate_file(
    model: Model,
    tokenizer: Tokenizer,
    config: Config,
    path: str,
    device: torch.device,
    max_questions: int | None,
    console: Console,
) -> dict[str, Any]:
    """`loss` per token over `tokens`, and for conversations the `exact_match` over at most `max_questions` rows."""
    data = load_data(config, tokenizer, [path], None, console)
    samples = np.arange(len(data.train))
    size = data.batch_sizes.global_batch_size
    batches = (data.step_batch(data.train, samples[at : at + size], at) for at in range(0, len(samples), size))
    loss, tokens = validation_loss(Runner(model, device, data.packed), batches)
    if not math.isfinite(loss):
        raise NumericalError(f"{path}: the loss is {loss}", "the model's weights have NaN or overflow")
    results: dict[str, Any] = {"data": path, "loss": loss, "tokens": tokens, "samples": len(samples)}
    results["dropped_rows"] = data.counts.dropped
    (row_format,) = data.formats
    if row_format in CHAT_FORMATS and max_questions != 0:
        columns = next(iter(config.data.columns), {})
        results |= exact_match(model, tokenizer, path, row_format, max_questions, columns)
    return results


def exact_match(
    model: Model,
    tokenizer: Tokenizer,
    path: str,
    row_format: RowFormat,
    max_questions: int | None,
    columns: Mapping[Any, str],
) -> dict[str, Any]:
    """Generates a greedy answer to each row without its last message, and compares it with that message."""
    questions, expected = list[Question](), list[str]()
    for row in read_rows(path, columns):
        conversation = read_conversation(row, row_format)
        *context, last = conversation.messages
        # A tool call has no text to compare.
        if last["role"] == "assistant" and last.get("content"):
            questions.append(Question(context, conversation.tools))
            expected.append(last["content"])
        if max_questions is not None and len(questions) == max_questions:
            break
    # Enough for the longest answer and its stop token, so that a longer wrong answer is not cut to a correct one.
    max_new_tokens = 4 + max((len(tokenizer.encode(text)) for text in expected), default=0)
    answers = generate_answers(model, tokenizer, questions, max_new_tokens)
    matches = [text.strip() == target.strip() for text, target in zip(answers, expected, strict=True)]
    examples = [
        {"question": question.messages[-1].get("content") or "", "answer": text, "wanted": target}
        for question, text, target in zip(questions, answers, expected, strict=True)
    ]
    return {
        "exact_match": sum(matches) / max(1, len(matches)),
        "questions": len(matches),
        "examples": examples[:MAX_EXAMPLES],
    }


def generate_answers(model: Model, tokenizer: Tokenizer, questions: list[Question], max_new_tokens: int) -> list[str]:
    prompts = [tokenizer.encode(tokenizer.template.render_prompt(q.messages, q.tools)) for q in questions]
    was_training = model.module.training
    model.module.eval()
    answers = []
    for start in range(0, len(prompts), GENERATION_BATCH):
        batch = prompts[start : start + GENERATION_BATCH]
        answers += [tokenizer.decode(ids) for ids in model.generate(batch, max_new_tokens, tokenizer.stop_ids)]
    model.module.train(was_training)
    return answers
