"""Texts that a model writes during training, so that people can read how it changes.

Every `observe.sample_every_steps` steps the model continues the same prompts; the texts go to the log and to
samples.jsonl. Tokens are the most likely ones, so texts of different steps can be compared, and no random number is
drawn: training is the same with and without samples.

Every rank computes the same rows. There is no key/value cache: each new token recomputes its row, which works in every
layout except pipelines. A sample costs the forward passes of `sample_tokens` rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torchstone.config.schema import Config
from torchstone.data.collate import LENGTH_MULTIPLE
from torchstone.data.encode import TokenSequence
from torchstone.data.formats import CHAT_FORMATS, IGNORE_INDEX
from torchstone.data.loader import RunData
from torchstone.data.tokenize import Tokenizer
from torchstone.errors import UsageError
from torchstone.models.model import Model
from torchstone.parallel.runner import Runner
from torchstone.training.generation import encode_text_prompt

# Prompts from the data, and the rows that are searched for them.
MAX_PROMPTS = 3
MAX_ROWS = 100
# The part of a text that is the prompt.
TEXT_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: list[int]


def choose_prompts(config: Config, data: RunData, tokenizer: Tokenizer, model: Model) -> list[Prompt]:
    """observe.sample_prompts, or the first prompts of the validation data, or else of the training data."""
    new_tokens, context_length = config.observe.sample_tokens, config.data.context_length
    prompts = [Prompt(text, _encode(text, data, tokenizer)) for text in config.observe.sample_prompts]
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if prompts and (reason := model.length_error(longest + new_tokens)):
        raise UsageError(
            f"a prompt of observe.sample_prompts has {longest} tokens, too many for observe.sample_tokens "
            f"{new_tokens}: {reason}",
            "use shorter prompts or fewer tokens",
        )
    if not prompts:
        ids = (_prompt_of(sequence) for sequence in _first_sequences(data))
        fitting = [row for row in ids if row and len(row) + new_tokens <= context_length][:MAX_PROMPTS]
        prompts = [Prompt(tokenizer.hf.decode(row, skip_special_tokens=False), row) for row in fitting]
    if not prompts:
        raise UsageError(
            f"no prompt of the data leaves room for observe.sample_tokens {new_tokens} within data.context_length "
            f"{context_length}",
            'use fewer --observe.sample_tokens, or set --observe.sample_prompts "Once upon a time"',
        )
    return prompts


def generate_samples(runner: Runner, tokenizer: Tokenizer, prompts: list[Prompt], new_tokens: int) -> list[str]:
    """The text with which the model continues each prompt. All ranks must call it at the same point."""
    model, lengths = runner.model, [len(prompt.ids) for prompt in prompts]
    multiple = math.lcm(LENGTH_MULTIPLE, runner.ctx.dims.tp)
    longest = max(lengths) + new_tokens
    ids = torch.zeros(len(prompts), -(-longest // multiple) * multiple, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = torch.tensor(prompt.ids)
    # Padding on the right, which no token of a text sees.
    positions = torch.arange(ids.shape[1]).clamp(max=longest - 1).expand_as(ids)
    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    was_training = model.module.training
    model.train(False)
    try:
        for _ in range(new_tokens):
            last = torch.tensor(lengths) - 1
            for row, token in enumerate(runner.greedy_tokens(ids, positions, last)):
                is_done[row] = is_done[row] or token in tokenizer.stop_ids
                if not is_done[row]:
                    texts[row].append(token)
                    ids[row, lengths[row]] = token
                    lengths[row] += 1
            # The same decision on all ranks, even if a GPU has rounded differently.
            if not runner.ctx.any_rank(not all(is_done)):
                break
    finally:
        runner.reshard()
        model.train(was_training)
    # With special tokens: a model that writes them where it should not is worth seeing.
    return [tokenizer.hf.decode(text, skip_special_tokens=False) for text in texts]


def _encode(text: str, data: RunData, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt of the config: a question if the data has conversations, otherwise the start of a text."""
    if data.formats[0] in CHAT_FORMATS:
        return tokenizer.encode(tokenizer.template.render_prompt([{"role": "user", "content": text}]))
    return encode_text_prompt(tokenizer, text)


def _first_sequences(data: RunData) -> Iterator[TokenSequence]:
    """The first conversations or documents. A row of packed text may start in the middle of one."""
    samples = next(iter(data.validation.values()), data.train)
    for index in range(min(len(samples), MAX_ROWS)):
        sequences = samples.get(index)
        yield from sequences if index == 0 or len(sequences) == 1 else sequences[1:]


def _prompt_of(sequence: TokenSequence) -> list[int]:
    """What comes before the first answer; of a text, its first tokens. Empty if there is nothing to continue."""
    trained = np.flatnonzero(sequence.labels[1:] != IGNORE_INDEX) + 1
    if not len(trained):
        return []
    is_text = sequence.labels[0] != IGNORE_INDEX or trained[0] == 1
    size = min(TEXT_PROMPT_TOKENS, len(sequence.ids) // 2) if is_text else trained[0]
    return [int(token) for token in sequence.ids[:size]]
