"""Batched generation from a decoder with a key/value cache, greedy or sampled.

Prompts are padded on the left, so that every row writes its next token in the same column. Padding is a separate
document that no other token attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchstone.errors import NumericalError, UsageError
from torchstone.models.attention import PADDING_DOC_ID, KVCache
from torchstone.models.decoder import Decoder

# Gets the new token of each row, -1 for a row that has ended.
TokenCallback = Callable[[list[int]], None]


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    on_tokens: TokenCallback | None = None,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, up to the first stop token (excluded). Temperature 0 is greedy.

    `on_tokens` is called after every step.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty")
    # A row ends when there are no more position embeddings.
    max_positions = decoder.config.max_positions if decoder.config.has_learned_positions else None
    if max_positions is not None and max(map(len, prompts), default=0) >= max_positions:
        raise UsageError(f"a prompt fills all of the model's {max_positions} positions")
    device = decoder.tok_embed.weight.device
    ids, positions, doc_ids = _left_pad(prompts, device)
    stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    kv_cache = KVCache()
    history = [(ids, positions, doc_ids)]
    columns: list[Tensor] = []
    for _ in range(max_new_tokens):
        if columns and _switches_to_long_rope(decoder, positions):
            # The cached keys were rotated with different frequencies: recompute all of them.
            kv_cache = KVCache()
            ids, positions, doc_ids = (torch.cat(parts, dim=1) for parts in zip(*history, strict=True))
        # Every token makes the keys longer by one, and compiled code would recompile each time.
        with torch.compiler.set_stance("force_eager"):
            logits = decoder(ids, positions, doc_ids, kv_cache, partial(_last_logits, decoder)).float()
        tokens = sample_token(logits, temperature, generator, top_p, top_k)
        done |= torch.isin(tokens, stops)
        columns.append(torch.where(done, -1, tokens))
        if on_tokens is not None:
            on_tokens(columns[-1].tolist())
        ids, positions, doc_ids = tokens[:, None], positions[:, -1:] + 1, torch.zeros_like(tokens)[:, None]
        if max_positions is not None:
            done |= positions[:, 0] >= max_positions - 1
            positions = positions.clamp(max=max_positions - 1)
        if bool(done.all()):
            break
        history.append((ids, positions, doc_ids))
    if not columns:
        return [[] for _ in prompts]
    return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def _switches_to_long_rope(decoder: Decoder, positions_B1: Tensor) -> bool:
    """Whether a row just became longer than longrope's original length. Transformers' Phi-3 checks the same."""
    ropes = {layer.rope for layer in decoder.config.layers if layer.rope is not None and layer.rope.long_factor}
    return any(bool((positions_B1 == rope.original_max_position_embeddings).any()) for rope in ropes)


def sample_token(
    logits: Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Tensor:
    """Returns the next token of each row of logits [B, V]."""
    if bool(logits.isnan().any()):
        raise NumericalError("the model's logits are NaN", "its weights have NaN or overflow")
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = next_token_probabilities(logits, temperature, top_p, top_k)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def next_token_probabilities(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """The distribution that `sample_token` draws from: as in Transformers, temperature, then top-k, then top-p."""
    scores = logits / temperature
    if top_k > 0 or top_p < 1:
        # Imported here: training needs none of it.
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        no_ids = torch.empty(len(scores), 0, dtype=torch.long)
        scores = scores if top_k == 0 else TopKLogitsWarper(top_k)(no_ids, scores)
        scores = scores if top_p == 1 else TopPLogitsWarper(top_p)(no_ids, scores)
    return scores.softmax(dim=-1)


def _last_logits(decoder: Decoder, x_BTD: Tensor, head_weight: Tensor) -> Tensor:
    """The logits of the last position, [B, V]. Those of a whole prompt could fill the memory."""
    return decoder.compute_logits(x_BTD[:, -1:])[:, 0]


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    positions = torch.zeros_like(ids)
    doc_ids = torch.full_like(ids, PADDING_DOC_ID)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        ids[row, start:] = torch.tensor(list(prompt))
        positions[row, start:] = torch.arange(len(prompt))
        doc_ids[row, start:] = 0
    return ids.to(device), positions.to(device), doc_ids.to(device)
