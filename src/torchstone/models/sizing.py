"""The sizes of a new model from one setting, `model.depth`.

Width grows with depth (64 per layer) and heads with width, so models of all depths keep proportions that train well
with the same settings. Every size can be set instead; the resolved sizes are logged. Everything else is Transformers'
default for a new model of the family (families.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from torchstone.config.schema import ModelConfig
from torchstone.errors import UsageError
from torchstone.models.decoder import Decoder, DecoderConfig
from torchstone.models.families import FAMILIES, new_hf_config

# Families without RoPE, or with two RoPEs.
WITHOUT_ROPE_THETA = ("gpt2", "gemma3_text")


def build_sized_hf_config(model: ModelConfig, vocab_size: int, context_length: int) -> dict[str, Any]:
    """The config.json of the new model that `model` describes."""
    assert model.depth is not None
    width = model.width or 64 * model.depth
    heads = model.heads or max(1, width // (64 if width <= 1024 else 128))
    kv_heads = model.kv_heads or heads
    _check_heads(model, width, heads, kv_heads)
    if model.rope_theta != ModelConfig.rope_theta and model.family in WITHOUT_ROPE_THETA:
        raise UsageError(f"model.rope_theta does not apply to family {model.family}", "leave out model.rope_theta")
    mlp_width = 4 * width if model.family == "gpt2" else 64 * math.ceil(width * 8 / 3 / 64)
    return new_hf_config(
        model.family,
        vocab_size=vocab_size,
        width=width,
        depth=model.depth,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=model.mlp_width or mlp_width,
        tied=model.tied,
        max_positions=max(context_length, 1024),
        rope_theta=model.rope_theta,
    )


def build_sized_decoder_config(model: ModelConfig, vocab_size: int, context_length: int) -> DecoderConfig:
    return FAMILIES[model.family].decoder_config(build_sized_hf_config(model, vocab_size, context_length))


def resolve_init_std(model: ModelConfig, width: int) -> float:
    """The small initialization of Nguyen and Salazar (2019), which needs no tuning for each width."""
    return model.init_std or math.sqrt(2 / (5 * width))


def describe(config: DecoderConfig) -> str:
    return (
        f"{parameter_count(config) / 1e6:.2f}M parameters: depth {config.depth}, width {config.width}, "
        f"{config.heads} heads ({config.kv_heads} key/value) of {config.head_dim}, mlp {config.mlp_width}, "
        f"vocabulary {config.vocab_size}, {'tied' if config.tied else 'untied'} head"
    )


def parameter_count(config: DecoderConfig) -> int:
    """The number of parameters, counted on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def _check_heads(model: ModelConfig, width: int, heads: int, kv_heads: int) -> None:
    if width % heads or (width // heads) % 2:
        divisors = (h for h in range(1, width // 2 + 1) if width % h == 0 and width // h % 2 == 0)
        raise UsageError(
            f"model.width {width} does not split into {heads} heads of an even head_dim",
            "use an even --model.width" if width % 2 else f"use --model.heads {_first(divisors)}",
        )
    if heads % kv_heads:
        raise UsageError(
            f"model.kv_heads {kv_heads} does not divide model.heads {heads}",
            f"use --model.kv_heads {_first(k for k in range(1, heads + 1) if heads % k == 0)}",
        )
    if kv_heads != heads and "kv_heads" not in FAMILIES[model.family].size_keys:
        raise UsageError(f"family {model.family} has no grouped key/value heads", "leave out model.kv_heads")


def _first(values: Iterable[int]) -> str:
    numbers = list(islice(values, 13))
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
