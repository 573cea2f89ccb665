"""Generates text: a prompt to tokens, tokens to text while they are generated, and why the text ends.

This module imports torch nowhere: its options are flags of the command line, whose help must be instant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from torchstone.errors import UsageError

if TYPE_CHECKING:
    import torch

    from torchstone.data.tokenize import Tokenizer
    from torchstone.models.model import Model

DEFAULT_TEMPERATURE = 0.8
TextCallback = Callable[[str], None]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Args:
        temperature: 0 always takes the most likely token, 1 samples from the model's distribution; by default 0 for
            chat and 0.8 for generate, because a text without randomness soon repeats itself.
        top_p: Sample from the most likely tokens that together have this probability.
        top_k: Sample from this many of the most likely tokens; 0 for all.
        seed: Seed of the samples: the same seed gives the same text.
    """

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        # A smaller temperature overflows the logits.
        if self.temperature and not 1e-4 <= self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: must be 0, or at least 0.0001")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: must be more than 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: must be at least 0")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: must be at least 0 and less than 2^63")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            raise UsageError("--top-p and --top-k have no effect at temperature 0", "add --temperature 0.8")


class GeneratedText(NamedTuple):
    """`ended_by`: a stop token, the limit of new tokens, or the end of the model's context."""

    text: str
    ended_by: Literal["stop", "max_tokens", "context"]


class TextStream:
    """Passes text to `on_text` while its tokens come, in complete characters."""

    def __init__(self, tokenizer: Tokenizer, on_text: TextCallback) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._on_text = tokenizer, on_text
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._text = ""

    def add(self, token: int) -> None:
        text = self._decoder.step(self._tokenizer.hf.backend_tokenizer, token)
        if text:
            self._text += text
            self._on_text(text)

    def end(self, text: str) -> None:
        """Passes on what is left of the complete `text`, such as the first bytes of a character without the others."""
        if text.startswith(self._text) and len(text) > len(self._text):
            self._on_text(text[len(self._text) :])


def generate_text(
    model: Model,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingOptions,
    generator: torch.Generator | None = None,
    on_text: TextCallback | None = None,
) -> GeneratedText:
    """Continues the tokens of `prompt` up to a stop token, `max_new_tokens`, or the end of the model's context."""
    positions = model.max_positions
    positions_left = max_new_tokens if positions is None else positions - len(prompt)
    if positions_left < 1:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and the model's context is {positions} tokens",
            "use a shorter prompt; in a chat, /new starts a new conversation",
        )
    stream = None if on_text is None else TextStream(tokenizer, on_text)

    def add_token(tokens: list[int]) -> None:
        if stream is not None and tokens[0] >= 0:
            stream.add(tokens[0])

    limit = min(max_new_tokens, positions_left)
    model.train(False)
    (ids,) = model.generate(
        [prompt],
        limit,
        tokenizer.stop_ids,
        sampling.temperature or 0.0,
        generator,
        sampling.top_p,
        sampling.top_k,
        add_token,
    )
    text = tokenizer.decode(ids)
    if stream is not None:
        stream.end(text)
    if len(ids) < limit:
        return GeneratedText(text, "stop")
    return GeneratedText(text, "max_tokens" if limit == max_new_tokens else "context")


def encode_text_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text to continue, after the special tokens with which every text starts.

    An empty text is the start of a document: BOS, or EOS, which separates documents.
    """
    ids = tokenizer.text_prefix + tokenizer.encode(text)
    if ids:
        return ids
    start = tokenizer.hf.bos_token_id if tokenizer.hf.bos_token_id is not None else tokenizer.hf.eos_token_id
    if start is None:
        raise UsageError(
            f"{tokenizer.path}: the tokenizer has neither a BOS nor an EOS token to start a text from",
            'give a prompt: torchstone generate SOURCE "Once upon a time"',
        )
    return [start]
