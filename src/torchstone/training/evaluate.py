"""The loss of a model over a data file and, where the rows hold answers, how many it gives word for word."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from torchstone.config.schema import Config
from torchstone.data.formats import CHAT, Message, Shape, conversation_of
from torchstone.data.loader import load_data
from torchstone.data.sources import read_rows
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import NumbersError
from torchstone.models.model import Model
from torchstone.observe.console import Console
from torchstone.parallel.running import Runner
from torchstone.training.step import mean_loss

QUESTIONS_AT_A_TIME = 64


class Question(NamedTuple):
    """What is said before an answer, and the tools it may call."""

    messages: list[Message]
    tools: list[Any] | None = None


def evaluate_file(
    model: Model,
    tokenizer: Tokenizer,
    config: Config,
    path: str,
    device: torch.device,
    questions: int | None,
    console: Console,
) -> dict[str, Any]:
    """`loss` per token, `tokens` it was taken over, and for conversations `exact_match` over `questions` rows."""
    data = load_data(config, tokenizer, [path], None, console)
    everything = np.arange(len(data.train))
    size = data.batching.global_batch_size
    batches = (data.step_batch(data.train, everything[at : at + size], at) for at in range(0, len(everything), size))
    loss, tokens = mean_loss(Runner(model, device, data.packed), batches)
    if not math.isfinite(loss):
        raise NumbersError(f"{path}: the loss is {loss}", "the model's weights are no longer numbers to compute with")
    found: dict[str, Any] = {"data": path, "loss": loss, "tokens": tokens, "samples": len(everything)}
    found["dropped_rows"] = data.counts.dropped
    (shape,) = data.shapes
    if shape in CHAT and questions != 0:
        found |= exact_match(model, tokenizer, path, shape, questions)
    return found


def exact_match(model: Model, tokenizer: Tokenizer, path: str, shape: Shape, questions: int | None) -> dict[str, Any]:
    """Greedy answers to all but the last message of each row, compared with that last message."""
    asked = []
    for row in read_rows(path):
        conversation = conversation_of(row, shape)
        *before, last = conversation.messages
        # A tool call has no words to compare.
        if last["role"] == "assistant" and last.get("content"):
            asked.append((Question(before, conversation.tools), last["content"]))
        if questions is not None and len(asked) == questions:
            break
    answers = answer(model, tokenizer, [question for question, _ in asked], _longest(tokenizer, asked))
    right = [given.strip() == wanted.strip() for given, (_, wanted) in zip(answers, asked, strict=True)]
    examples = [
        {"question": question.messages[-1].get("content") or "", "answer": given, "wanted": wanted}
        for given, (question, wanted) in list(zip(answers, asked, strict=True))[:8]
    ]
    return {"exact_match": sum(right) / max(1, len(right)), "questions": len(right), "examples": examples}


def answer(model: Model, tokenizer: Tokenizer, questions: list[Question], max_new_tokens: int) -> list[str]:
    prompts = [tokenizer.encode(tokenizer.template.prompt(q.messages, q.tools)) for q in questions]
    was_training = model.module.training
    model.module.eval()
    answers = []
    for at in range(0, len(prompts), QUESTIONS_AT_A_TIME):
        part = prompts[at : at + QUESTIONS_AT_A_TIME]
        answers += [tokenizer.decode(ids) for ids in model.generate(part, max_new_tokens, tokenizer.stop_ids)]
    model.module.train(was_training)
    return answers


def _longest(tokenizer: Tokenizer, asked: list[tuple[Question, str]]) -> int:
    """Room for the longest wanted answer and its end, so that a longer wrong one is not cut into a right one."""
    return 4 + max((len(tokenizer.encode(wanted)) for _, wanted in asked), default=0)
