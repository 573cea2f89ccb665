"""What each family of models changes, one small entry a family.

An entry says how a Hugging Face config.json becomes a `DecoderConfig` and back, and what the weights are called on disk
(weights.py reads that table both ways). A setting of the config that the decoder does not compute is refused: loading
it anyway would train another model than the file describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, Rope


@dataclass(frozen=True)
class Family:
    """Names are patterns with `{n}` for the layer; the map is one to one, so it is its own inverse."""

    read: Callable[[dict[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    names: dict[str, str]

    def ours(self, theirs: str) -> str | None:
        return _translate(theirs, {value: key for key, value in self.names.items()})

    def theirs(self, ours: str) -> str:
        name = _translate(ours, self.names)
        assert name is not None, f"{ours} has no name on disk"
        return name


def family_of(hf_config: dict[str, Any], source: str) -> Family:
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(
            f"{source}: model_type {model_type!r} is not a family this version trains",
            f"the families are {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def _translate(name: str, table: dict[str, str]) -> str | None:
    number = re.search(r"\.(\d+)\.", name)
    pattern = name.replace(f".{number.group(1)}.", ".{n}.", 1) if number else name
    found = table.get(pattern)
    return found.replace("{n}", number.group(1)) if found and number else found


def _read_llama(hf: dict[str, Any]) -> DecoderConfig:
    heads = hf["num_attention_heads"]
    _refuse_unless(hf, hidden_act=("silu", "swish"), attention_dropout=(0, 0.0, None))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_size=hf.get("head_dim") or hf["hidden_size"] // heads,
        mlp_width=hf["intermediate_size"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=hf.get("tie_word_embeddings", False),
        attention_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        max_positions=hf.get("max_position_embeddings", 2048),
        rope=_read_rope(hf),
    )


def _read_rope(hf: dict[str, Any]) -> Rope:
    """Transformers 5 writes `rope_parameters`; older files `rope_theta` and `rope_scaling`."""
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind != "llama3":
        raise UsageError(f"RoPE scaling {kind!r} is not computed by this version", "it knows default and llama3")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_positions=parameters.get("original_max_position_embeddings")
        or hf.get("original_max_position_embeddings")
        or hf.get("max_position_embeddings", 2048),
    )


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": rope,
    }


def _refuse_unless(hf: dict[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if key in hf and hf[key] not in values:
            raise UsageError(f"{key} {hf[key]!r} is not computed by this version")


LLAMA_NAMES = {
    "tok_embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{n}.attention_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "layers.{n}.mlp_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
} | {
    f"layers.{{n}}.{ours}.{kind}": f"model.layers.{{n}}.{theirs}.{kind}"
    for ours, theirs in {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }.items()
    for kind in ("weight", "bias")
}

FAMILIES = {"llama": Family(_read_llama, _write_llama, LLAMA_NAMES)}
