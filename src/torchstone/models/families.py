"""The model families of the native decoder: how a Hugging Face config becomes a `DecoderConfig`.

An entry of `FAMILIES` says how its family differs from the common settings and which keys a new model needs beyond
sizes. The config is read through Transformers' own class, so defaults and old spellings mean the same here. A setting
that the decoder does not compute is refused: ignoring it would train a different model than the file describes.

The names of a family's weights are in checkpoint/weight_names.py. docs/families.md shows how to add a family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, LayerSpec
from torchstone.models.rope import Rope, RopeType

HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_new",
}
# Families with a different config key for the activation. They ignore a leftover `hidden_act`.
ACTIVATION_KEYS = {
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
    "gpt2": "activation_function",
}
# A config.json with larger values is damaged; building its model would take all memory or never end. Every layer,
# expert and label becomes a Python object; several families have their own keys for them.
MAX_COUNT, MAX_SIZE = 2**11, 2**30
COUNT_KEY = re.compile(r"((n|num|decoder|encoder)_(\w+_)?layers?|(n|num)_(\w+_)?(blocks|experts|labels))")
SIZE_KEY = re.compile(r"(\w+_)?(size|dim|embd|inner|heads?|positions|position_embeddings|width)")
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
# Our names for the sizes, and the config keys of most families.
SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}


@dataclass(frozen=True)
class Family:
    """`overrides` returns what differs from `_common_settings`; `new_model_keys` the config keys of a new model."""

    architecture: str
    overrides: Callable[[Any], dict[str, Any]]
    size_keys: dict[str, str] = field(default_factory=lambda: SIZE_KEYS)
    new_model_keys: Callable[[dict[str, Any]], dict[str, Any]] = lambda sizes: {}

    def decoder_config(self, hf_config: dict[str, Any]) -> DecoderConfig:
        """The decoder that a config.json describes."""
        from transformers import AutoConfig

        if hf_config.get("quantization_config"):
            raise UsageError("its weights are quantized and cannot be trained", "use the unquantized model")
        keys = {key: value for key, value in hf_config.items() if key != "model_type"}
        config = AutoConfig.for_model(hf_config["model_type"], **keys)
        if getattr(config, "rope_parameters", None):
            # Transformers repeats this when it builds the model: a top-level original length then takes precedence.
            config.standardize_rope_params()
        _require(config, is_causal=True)
        return DecoderConfig(**(_common_settings(config) | self.overrides(config)))


def check_sizes(value: Any, key: str = "") -> None:
    """Raises ValueError if a size anywhere in a config.json is absurd."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            check_sizes(item, name)
    is_count = COUNT_KEY.fullmatch(key) is not None
    limit = MAX_COUNT if is_count else MAX_SIZE
    # Other keys, such as the number of training tokens, build nothing.
    if type(value) is int and value > limit and (is_count or SIZE_KEY.fullmatch(key)):
        raise ValueError(f"{key} is {value}, more than {limit}")


def family_of(hf_config: dict[str, Any]) -> Family:
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(f"model_type {model_type!r} is not a native family", f"native families: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def new_hf_config(model_type: str, **sizes: Any) -> dict[str, Any]:
    """The config.json of a new model: its sizes, and Transformers' defaults for the family.

    Keys that every Transformers config has with its default value are left out.
    """
    from transformers import AutoConfig, PretrainedConfig

    family = FAMILIES[model_type]
    keys = {family.size_keys[name]: value for name, value in sizes.items() if name in family.size_keys}
    # Special tokens come from the tokenizer, not from the family's defaults.
    no_special_tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(model_type, **(no_special_tokens | keys | family.new_model_keys(sizes))).to_dict()
    defaults = PretrainedConfig().to_dict()
    config = {
        key: value
        for key, value in config.items()
        if value is not None and (key not in defaults or value != defaults[key])
    }
    return config | {"architectures": [family.architecture]}


def dropout_warning(hf_config: dict[str, Any]) -> str | None:
    """A warning if config.json asks for dropout, which the native decoder does not apply."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**hf_config)
    dropouts = {key: getattr(config, key) for key in DROPOUT_KEYS if getattr(config, key, None)}
    if not dropouts:
        return None
    names = ", ".join(f"{key} {value}" for key, value in dropouts.items())
    return f"config.json asks for dropout ({names}); the native decoder trains without it"


def _common_settings(config: Any) -> dict[str, Any]:
    """What all families share. Keys that Transformers' model of a family ignores are ignored here too."""
    heads = config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "mlp_width": getattr(config, "intermediate_size", None),
        "max_positions": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "padding_idx": _padding_idx(config),
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": _activation(config),
    }


def _padding_idx(config: Any) -> int | None:
    """Negative ids count from the end, as in torch. None for an id outside the vocabulary."""
    idx = config.pad_token_id
    if idx is None or not -config.vocab_size <= idx < config.vocab_size:
        return None
    return idx % config.vocab_size


def uniform_layers(config: Any, window: int | None = None, partial_rotary: bool = False) -> tuple[LayerSpec, ...]:
    return (LayerSpec(window, _rope(config, config.rope_parameters, partial_rotary)),) * config.num_hidden_layers


def layers_by_type(config: Any) -> tuple[LayerSpec, ...]:
    """A window where `layer_types` says sliding_attention, and a RoPE per type where the config has several."""
    types = config.layer_types
    if len(types) != config.num_hidden_layers:
        raise UsageError(f"layer_types has {len(types)} entries for {config.num_hidden_layers} layers")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UsageError(f"the native decoder does not support layer_types {sorted(unknown)}")
    is_nested = any(key in config.rope_parameters for key in ("full_attention", "sliding_attention"))
    ropes = {
        layer_type: _rope(config, config.rope_parameters[layer_type] if is_nested else config.rope_parameters)
        for layer_type in set(types)
    }
    return tuple(
        LayerSpec(config.sliding_window if layer_type == "sliding_attention" else None, ropes[layer_type])
        for layer_type in types
    )


def _rope(config: Any, parameters: dict[str, Any], partial_rotary: bool = False) -> Rope:
    """RoPE from the config's rope_parameters, old spellings already normalized by Transformers."""
    rope_type, share = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial_rotary:
        raise UsageError(f"the native decoder does not support partial_rotary_factor {share} for this family")
    if rope_type not in get_args(RopeType):
        raise UsageError(f"the native decoder does not support RoPE scaling {rope_type!r}")
    base = {"rope_type": rope_type, "rope_theta": parameters["rope_theta"], "partial_rotary_factor": share}
    if rope_type == "default":
        return Rope(**base)
    if rope_type == "linear":
        return Rope(factor=parameters["factor"], **base)
    if rope_type == "dynamic":
        original = config.max_position_embeddings
        return Rope(factor=parameters["factor"], original_max_position_embeddings=original, **base)
    original = parameters["original_max_position_embeddings"]
    if rope_type == "llama3":
        return Rope(
            factor=parameters["factor"], original_max_position_embeddings=original,
            low_freq_factor=parameters["low_freq_factor"], high_freq_factor=parameters["high_freq_factor"], **base,
        )  # fmt: skip
    # The default factor is the ratio of the lengths.
    factor = parameters.get("factor") or config.max_position_embeddings / original
    if rope_type == "yarn":
        return Rope(
            factor=factor, original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(parameters, factor),
            beta_slow=parameters.get("beta_slow") or 1, beta_fast=parameters.get("beta_fast") or 32,
            truncate=parameters.get("truncate", True), **base,
        )  # fmt: skip
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        factor=factor, original_max_position_embeddings=original, attention_factor=attention_factor,
        short_factor=tuple(parameters["short_factor"]), long_factor=tuple(parameters["long_factor"]), **base,
    )  # fmt: skip


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    one, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1.0)


def _activation(config: Any) -> str:
    name = getattr(config, ACTIVATION_KEYS.get(config.model_type, "hidden_act"))
    if name not in HF_ACTIVATIONS:
        raise UsageError(f"the native decoder does not support the activation {name!r}")
    return HF_ACTIVATIONS[name]


def _require(config: Any, **settings: Any) -> None:
    """Raises UsageError if a setting differs from the only value that the decoder supports."""
    for key, value in settings.items():
        if getattr(config, key, value) not in (value, None):
            raise UsageError(f"the native decoder does not support {key} {getattr(config, key)!r}")


def attention_biases(config: Any) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}


def _llama(config: Any) -> dict[str, Any]:
    return attention_biases(config) | {"mlp_bias": config.mlp_bias, "layers": uniform_layers(config)}


def _mistral(config: Any) -> dict[str, Any]:
    # With several layer types Transformers builds a Ministral.
    layer_type = "full_attention" if config.sliding_window is None else "sliding_attention"
    _require(config, layer_types=[layer_type] * config.num_hidden_layers)
    return {"layers": uniform_layers(config, config.sliding_window)}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True, "layers": layers_by_type(config)}


def _qwen3(config: Any) -> dict[str, Any]:
    return attention_biases(config) | {"qk_norm": "head", "layers": layers_by_type(config)}


def _granite(config: Any) -> dict[str, Any]:
    return _llama(config) | {
        "embed_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention_scale": config.attention_multiplier,
        "logit_divisor": config.logits_scaling,
    }


def _smollm3(config: Any) -> dict[str, Any]:
    """A 0 in no_rope_layers is a layer without RoPE."""
    layers = layers_by_type(config)
    if not config.use_sliding_window and any(layer.window is not None for layer in layers):
        # Transformers' attention kernels disagree: eager and sdpa apply the windows of layer_types, flash does not.
        raise UsageError("the native decoder does not support layer_types with windows without use_sliding_window")
    return _llama(config) | {
        "layers": tuple(
            LayerSpec(layer.window, layer.rope if has_rope else None)
            for layer, has_rope in zip(layers, config.no_rope_layers, strict=False)
        )
    }


def _olmo2(config: Any) -> dict[str, Any]:
    return attention_biases(config) | {
        "layers": uniform_layers(config),
        "norm": "rms_fp32",
        "has_pre_norm": False,
        "has_post_norm": True,
        "qk_norm": "all",
        "rope_in_fp32": True,
    }


def _gemma2(config: Any) -> dict[str, Any]:
    _require(config, use_bidirectional_attention=False)
    return attention_biases(config) | {
        "layers": layers_by_type(config),
        "norm": "rms_plus_one",
        "has_post_norm": True,
        "embed_scale": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    # Transformers' Gemma 3 reads attn_logit_softcapping but does not apply it.
    _require(config, attn_logit_softcapping=None)
    return _gemma2(config) | {"qk_norm": "head"}


def _phi3(config: Any) -> dict[str, Any]:
    return {"layers": uniform_layers(config, config.sliding_window, partial_rotary=True)}


def _gpt2(config: Any) -> dict[str, Any]:
    _require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {
        "kv_heads": config.n_head,
        "head_dim": config.n_embd // config.n_head,
        "mlp_width": config.n_inner or 4 * config.n_embd,
        "layers": (LayerSpec(rope=None),) * config.n_layer,
        "norm": "layer",
        "norm_eps": config.layer_norm_epsilon,
        "is_gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "has_learned_positions": True,
        "padding_idx": None,
    }


GPT2_SIZE_KEYS = {
    "vocab_size": "vocab_size", "width": "n_embd", "depth": "n_layer", "heads": "n_head", "mlp_width": "n_inner",
    "max_positions": "n_positions", "tied": "tie_word_embeddings",
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _new_rope(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]}}


def _new_llama(sizes: dict[str, Any]) -> dict[str, Any]:
    return _new_rope(sizes) | {"rms_norm_eps": 1e-5}


def _new_granite(sizes: dict[str, Any]) -> dict[str, Any]:
    return _new_rope(sizes) | {"attention_multiplier": sizes["head_dim"] ** -0.5}


def _new_gemma2(sizes: dict[str, Any]) -> dict[str, Any]:
    return _new_rope(sizes) | _new_gemma3(sizes)


def _new_gemma3(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": sizes["head_dim"]}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama, new_model_keys=_new_llama),
    "mistral": Family("MistralForCausalLM", _mistral, new_model_keys=_new_rope),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, new_model_keys=_new_rope),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, new_model_keys=_new_rope),
    "granite": Family("GraniteForCausalLM", _granite, new_model_keys=_new_granite),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, new_model_keys=_new_rope),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2, new_model_keys=_new_rope),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, new_model_keys=_new_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, new_model_keys=_new_gemma3),
    "phi3": Family("Phi3ForCausalLM", _phi3, new_model_keys=_new_rope),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, size_keys=GPT2_SIZE_KEYS, new_model_keys=lambda sizes: NO_DROPOUT),
}
