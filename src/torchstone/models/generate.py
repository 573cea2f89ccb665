"""Batched generation from a decoder with a key/value cache, greedy or sampled.

Prompts are padded on the left, so that every row writes its next token in the same column. Padding is a separate
document that no other token attends to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchstone.errors import UsageError
from torchstone.models.attention import PADDING_DOC_ID, KVCache
from torchstone.models.decoder import Decoder


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, up to the first stop token (excluded). Temperature 0 is greedy."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty")
    if decoder.config.has_learned_positions:
        # Generation ends when there are no more position embeddings.
        positions_left = decoder.config.max_positions - max(map(len, prompts), default=0)
        if positions_left < 1:
            raise UsageError(f"a prompt fills all of the model's {decoder.config.max_positions} positions")
        max_new_tokens = min(max_new_tokens, positions_left)
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
            logits = decoder(ids, positions, doc_ids, kv_cache)[:, -1].float()
        tokens = sample_token(logits, temperature, generator)
        done |= torch.isin(tokens, stops)
        columns.append(torch.where(done, -1, tokens))
        if bool(done.all()):
            break
        ids, positions, doc_ids = tokens[:, None], positions[:, -1:] + 1, torch.zeros_like(tokens)[:, None]
        history.append((ids, positions, doc_ids))
    if not columns:
        return [[] for _ in prompts]
    return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def _switches_to_long_rope(decoder: Decoder, positions_B1: Tensor) -> bool:
    """Whether a row just became longer than longrope's original length. Transformers' Phi-3 checks the same."""
    ropes = {layer.rope for layer in decoder.config.layers if layer.rope is not None and layer.rope.long_factor}
    return any(bool((positions_B1 == rope.original_max_position_embeddings).any()) for rope in ropes)


def sample_token(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Returns the next token of each row of logits [B, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


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
