"""A whole model from one dial: `model.depth`.

Width grows with depth (64 per layer), heads with width, so that models of all depths keep the proportions that train
well with the same settings. Each size can be given instead; what was derived is printed. What a family has beside its
sizes is as Transformers has it for a new model of that family (families.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchstone.config.schema import ModelConfig
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.families import FAMILIES, new_config

# Families without rotary positions, or with two kinds of them.
NO_ONE_THETA = ("gpt2", "gemma3_text")


def new_hf_config(model: ModelConfig, vocab_size: int, context_length: int) -> dict[str, Any]:
    """config.json of the new model that `model` describes."""
    assert model.depth is not None
    width = model.width or 64 * model.depth
    heads = model.heads or max(1, width // (64 if width <= 1024 else 128))
    kv_heads = model.kv_heads or heads
    if width % heads or (width // heads) % 2:
        raise UsageError(
            f"model.width {width} does not split into {heads} heads of an even size",
            f"heads that do: {_some(h for h in range(1, width // 2 + 1) if width % h == 0 and width // h % 2 == 0)}",
        )
    if heads % kv_heads:
        raise UsageError(
            f"model.kv_heads {kv_heads} does not divide model.heads {heads}",
            f"values that do: {_some(k for k in range(1, heads + 1) if heads % k == 0)}",
        )
    if kv_heads != heads and "kv_heads" not in FAMILIES[model.family].sizes:
        raise UsageError(
            f"model.family {model.family} has as many key/value heads as heads", "leave out model.kv_heads"
        )
    if model.rope_theta != ModelConfig.rope_theta and model.family in NO_ONE_THETA:
        raise UsageError(
            f"model.rope_theta: a new model of the family {model.family} has no use for it",
            "leave out model.rope_theta",
        )
    plain = model.family == "gpt2"
    return new_config(
        model.family,
        vocab_size=vocab_size,
        width=width,
        depth=model.depth,
        heads=heads,
        kv_heads=kv_heads,
        head_size=width // heads,
        mlp_width=model.mlp_width or (4 * width if plain else 64 * math.ceil(width * 8 / 3 / 64)),
        tied=model.tied,
        max_positions=max(context_length, 1024),
        rope_theta=model.rope_theta,
    )


def decoder_config(model: ModelConfig, vocab_size: int, context_length: int) -> DecoderConfig:
    return FAMILIES[model.family].read(new_hf_config(model, vocab_size, context_length))


def init_std(model: ModelConfig, width: int) -> float:
    """The small initialisation of Nguyen and Salazar (2019), which needs no tuning with the width."""
    return model.init_std or math.sqrt(2 / (5 * width))


def describe(config: DecoderConfig, std: float | None = None) -> str:
    head = "tied" if config.tied else "untied"
    text = (
        f"{parameter_count(config) / 1e6:.2f}M parameters: depth {config.depth}, width {config.width}, "
        f"heads {config.heads}/{config.kv_heads} of {config.head_size}, mlp {config.mlp_width}, "
        f"vocabulary {config.vocab_size}, {head} head"
    )
    return text if std is None else f"{text}, init std {std:.4f}"


def parameter_count(config: DecoderConfig) -> int:
    """Counted on a model without memory, so that no family's extras are forgotten."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def _some(numbers: object) -> str:
    found = list(numbers)  # type: ignore[call-overload]
    return ", ".join(str(n) for n in found[:12]) + (" …" if len(found) > 12 else "")
