"""Text from a decoder: prompts of different lengths at once, with a key/value cache, greedy or sampled.

Prompts are padded on the left so that every row writes its next token in the same column; padding is its own document
and is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchstone.errors import UsageError
from torchstone.models.attention import PADDING, KeyValueCache
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
    """The new tokens of each prompt, up to (and without) the first stop token. Temperature 0 takes the likeliest."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("an empty prompt has nothing to continue")
    if decoder.config.learned_positions:
        # Where the table of positions ends, so does the text.
        room = decoder.config.max_positions - max(map(len, prompts), default=0)
        if room < 1:
            raise UsageError(f"a prompt fills all of the model's {decoder.config.max_positions} positions")
        max_new_tokens = min(max_new_tokens, room)
    device = decoder.tok_embed.weight.device
    ids, positions, docs = _left_padded(prompts, device)
    stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = KeyValueCache()
    text = [(ids, positions, docs)]
    columns: list[Tensor] = []
    for _ in range(max_new_tokens):
        if columns and _turns_otherwise(decoder, positions):
            # Keys of what was read so far were turned by other angles: read it all again.
            cache = KeyValueCache()
            ids, positions, docs = (torch.cat(parts, dim=1) for parts in zip(*text, strict=True))
        # Every token makes the keys longer by one: compiling would begin anew each time.
        with torch.compiler.set_stance("force_eager"):
            logits = decoder(ids, positions, docs, cache)[:, -1].float()
        chosen = _choose(logits, temperature, generator)
        done |= torch.isin(chosen, stops)
        columns.append(torch.where(done, -1, chosen))
        if bool(done.all()):
            break
        ids, positions, docs = chosen[:, None], positions[:, -1:] + 1, torch.zeros_like(chosen)[:, None]
        text.append((ids, positions, docs))
    if not columns:
        return [[] for _ in prompts]
    return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def _turns_otherwise(decoder: Decoder, positions_B1: Tensor) -> bool:
    """Whether a row has just become longer than longrope's original length, as Transformers' Phi-3 looks for it too."""
    ropes = {layer.rope for layer in decoder.config.layers if layer.rope is not None and layer.rope.long_factors}
    return any(bool((positions_B1 == rope.original_positions).any()) for rope in ropes)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    positions = torch.zeros_like(ids)
    docs = torch.full_like(ids, PADDING)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        ids[row, start:] = torch.tensor(list(prompt))
        positions[row, start:] = torch.arange(len(prompt))
        docs[row, start:] = 0
    return ids.to(device), positions.to(device), docs.to(device)
