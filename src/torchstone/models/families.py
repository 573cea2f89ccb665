"""What each family of models changes, one small entry a family.

An entry says three things: how the family's Hugging Face config becomes a `DecoderConfig` (only what differs from the
usual), what its weights are called on disk, and what a new model of it needs beyond its sizes. The config is read
through Transformers' own class, so that defaults and old spellings mean here what they mean there. A setting that the
decoder does not compute is refused: loading it anyway would train another model than the file describes.

docs/families.md shows how to add one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from torchstone.errors import UsageError
from torchstone.models.decoder import DecoderConfig, LayerKind
from torchstone.models.rope import Rope, RopeKind

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_new",
}
# What the families that call their activation otherwise call it; leftovers of the usual key mean nothing to them.
ACTIVATION_KEYS = {
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
    "gpt2": "activation_function",
}
# Beyond these a config.json is damaged, and building what it describes would take all memory, or for ever.
MOST_LAYERS, LARGEST_SIZE = 10_000, 2**30
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
# What sizing.py calls a size, and what most families' configs call it.
SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}


@dataclass(frozen=True)
class Stored:
    """One matrix (or bias) on disk: ours from top to bottom, and whether it lies there on its side."""

    parts: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """Names are patterns without `.weight` or `.bias`, with `{n}` for the layer: on disk -> here."""

    architecture: str
    differs: Callable[[Any], dict[str, Any]]
    names: dict[str, Stored]
    # Name of the body on disk; a file of the body alone leaves it out.
    prefix: str = "model."
    # Tensors in old files that hold nothing that was trained.
    not_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)
    sizes: dict[str, str] = field(default_factory=lambda: SIZES)
    new: Callable[[dict[str, Any]], dict[str, Any]] = lambda sizes: {}

    def read(self, hf_config: dict[str, Any]) -> DecoderConfig:
        """The decoder that config.json describes."""
        from transformers import AutoConfig

        if hf_config.get("quantization_config"):
            raise UsageError("its weights are quantized, which cannot be trained", "use the unquantized model")
        self._check_sizes(hf_config)
        given = {key: value for key, value in hf_config.items() if key != "model_type"}
        hf = AutoConfig.for_model(hf_config["model_type"], **given)
        if getattr(hf, "rope_parameters", None):
            # Transformers does so again when it builds the model, and an original length that stands alone wins then.
            hf.standardize_rope_params()
        _refuse(hf, is_causal=True)
        return DecoderConfig(**(_usual(hf) | self.differs(hf)))

    def _check_sizes(self, hf_config: dict[str, Any]) -> None:
        for ours, theirs in self.sizes.items():
            value, most = hf_config.get(theirs), MOST_LAYERS if ours == "depth" else LARGEST_SIZE
            if type(value) is int and value > most:
                raise ValueError(f"{theirs} {value} is beyond {most}")

    def stored(self, name: str) -> Stored | None:
        """What a tensor on disk holds, by the names here; None where it is nothing of this family's."""
        module, _, kind = name.rpartition(".")
        number = re.search(r"\.(\d+)\.", f".{module}.")
        pattern = f".{module}.".replace(f".{number.group(1)}.", ".{n}.", 1)[1:-1] if number else module
        found = self.names.get(pattern)
        if found is None or kind not in ("weight", "bias"):
            return None
        layer = number.group(1) if number else ""
        parts = tuple(f"{part.replace('{n}', layer)}.{kind}" for part in found.parts)
        return Stored(parts, found.transposed and kind == "weight")

    def on_disk(self, ours: dict[str, Any]) -> dict[str, Stored]:
        """The tensors that `ours` (by name, nothing fused) make on disk, in the order of ours."""
        places = {part: (theirs, stored) for theirs, stored in self.names.items() for part in stored.parts}
        found: dict[str, Stored] = {}
        for name in ours:
            module, _, kind = name.rpartition(".")
            number = re.search(r"^layers\.(\d+)\.", module)
            layer = number.group(1) if number else ""
            pattern = module.replace(f"layers.{layer}.", "layers.{n}.", 1) if number else module
            assert pattern in places, f"{name} has no name on disk"
            theirs, stored = places[pattern]
            parts = tuple(f"{part.replace('{n}', layer)}.{kind}" for part in stored.parts)
            found[f"{theirs.replace('{n}', layer)}.{kind}"] = Stored(parts, stored.transposed and kind == "weight")
        return found


def family_of(hf_config: dict[str, Any]) -> Family:
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(
            f"model_type {model_type!r} is not a family of the native decoder",
            f"the families are {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def new_config(model_type: str, **sizes: Any) -> dict[str, Any]:
    """config.json of a new model: its sizes, the rest as Transformers has it for the family, written out; what every
    config of Transformers has (labels, what to return) is left out."""
    from transformers import AutoConfig, PretrainedConfig

    family = FAMILIES[model_type]
    named = {family.sizes[key]: value for key, value in sizes.items() if key in family.sizes}
    # Special tokens are the tokenizer's, and not those of the family's first model.
    marks = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    made = AutoConfig.for_model(model_type, **(marks | named | family.new(sizes))).to_dict()
    every = PretrainedConfig().to_dict()
    kept = {
        key: value for key, value in made.items() if value is not None and (key not in every or value != every[key])
    }
    return kept | {"architectures": [family.architecture]}


def dropout_note(hf_config: dict[str, Any]) -> str | None:
    """A decoder computes the same in training and out of it; a config that asks for dropout is told so."""
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**hf_config)
    asked = {key: getattr(hf, key) for key in DROPOUTS if getattr(hf, key, None)}
    if not asked:
        return None
    names = ", ".join(f"{key} {value}" for key, value in asked.items())
    return f"config.json asks for dropout ({names}): the native decoder trains without"


def _usual(hf: Any) -> dict[str, Any]:
    """What all families have in common. Keys that Transformers' model of a family does not look at are not looked at
    here either: files in the wild carry leftovers."""
    heads = hf.num_attention_heads
    return {
        "vocab_size": hf.vocab_size,
        "width": hf.hidden_size,
        "heads": heads,
        "kv_heads": getattr(hf, "num_key_value_heads", None) or heads,
        "head_size": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "mlp_width": getattr(hf, "intermediate_size", None),
        "max_positions": hf.max_position_embeddings,
        "tied": hf.tie_word_embeddings,
        "padding_row": _padding_row(hf),
        "norm_eps": getattr(hf, "rms_norm_eps", None),
        "activation": _activation(hf),
    }


def _padding_row(hf: Any) -> int | None:
    """Negative ids count from the end, as in torch; one beyond the rows is left to the tokenizer's alignment."""
    row = hf.pad_token_id
    if row is None or not -hf.vocab_size <= row < hf.vocab_size:
        return None
    return row % hf.vocab_size


def alike(hf: Any, window: int | None = None, partial: bool = False) -> tuple[LayerKind, ...]:
    return (LayerKind(window, _rope(hf, hf.rope_parameters, partial)),) * hf.num_hidden_layers


def by_type(hf: Any) -> tuple[LayerKind, ...]:
    """A window where `layer_types` says sliding; rotary positions by type where the config has several."""
    kinds = hf.layer_types
    if len(kinds) != hf.num_hidden_layers:
        raise UsageError(f"layer_types has {len(kinds)} entries for {hf.num_hidden_layers} layers")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UsageError(f"layer_types {sorted(unknown)} are not computed by the native decoder")
    nested = any(key in hf.rope_parameters for key in ("full_attention", "sliding_attention"))
    ropes = {kind: _rope(hf, hf.rope_parameters[kind] if nested else hf.rope_parameters) for kind in set(kinds)}
    return tuple(LayerKind(hf.sliding_window if kind == "sliding_attention" else None, ropes[kind]) for kind in kinds)


def _rope(hf: Any, parameters: dict[str, Any], partial: bool = False) -> Rope:
    """Rotary positions as the config has them, old spellings already made new by Transformers."""
    kind, share = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise UsageError(f"partial_rotary_factor {share} is not computed by the native decoder for this family")
    if kind not in get_args(RopeKind):
        raise UsageError(f"RoPE scaling {kind!r} is not computed by the native decoder")
    rope: dict[str, Any] = {"theta": parameters["rope_theta"], "share": share}
    if kind == "default":
        return Rope(**rope)
    if kind == "linear":
        return Rope(kind="linear", factor=parameters["factor"], **rope)
    if kind == "dynamic":
        original = hf.max_position_embeddings
        return Rope(kind="dynamic", factor=parameters["factor"], original_positions=original, **rope)
    original = parameters["original_max_position_embeddings"]
    if kind == "llama3":
        return Rope(
            kind="llama3", factor=parameters["factor"], original_positions=original,
            slow=parameters["low_freq_factor"], fast=parameters["high_freq_factor"], **rope,
        )  # fmt: skip
    # Left out, the stretch is what the lengths say.
    factor = parameters.get("factor") or hf.max_position_embeddings / original
    if kind == "yarn":
        return Rope(
            kind="yarn", factor=factor, original_positions=original, magnitude=_yarn_magnitude(parameters, factor),
            slow=parameters.get("beta_slow") or 1, fast=parameters.get("beta_fast") or 32,
            whole=parameters.get("truncate", True), **rope,
        )  # fmt: skip
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        kind="longrope", factor=factor, original_positions=original, magnitude=magnitude,
        short_factors=tuple(parameters["short_factor"]), long_factors=tuple(parameters["long_factor"]), **rope,
    )  # fmt: skip


def _yarn_magnitude(parameters: dict[str, Any], factor: float) -> float:
    def grown(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    one, all_dimensions = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(one) / grown(all_dimensions) if one and all_dimensions else grown(1.0)


def _activation(hf: Any) -> str:
    name = getattr(hf, ACTIVATION_KEYS.get(hf.model_type, "hidden_act"))
    if name not in ACTIVATIONS:
        raise UsageError(f"the activation {name!r} is not computed by the native decoder")
    return ACTIVATIONS[name]


def _refuse(hf: Any, **computed: Any) -> None:
    """Settings that are computed with one value only."""
    for key, value in computed.items():
        if getattr(hf, key, value) not in (value, None):
            raise UsageError(f"{key} {getattr(hf, key)!r} is not computed by the native decoder")


def attention_biases(hf: Any) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias}


def _llama(hf: Any) -> dict[str, Any]:
    return attention_biases(hf) | {"mlp_bias": hf.mlp_bias, "layers": alike(hf)}


def _mistral(hf: Any) -> dict[str, Any]:
    # With several kinds of layers Transformers takes it for a Ministral.
    kind = "full_attention" if hf.sliding_window is None else "sliding_attention"
    _refuse(hf, layer_types=[kind] * hf.num_hidden_layers)
    return {"layers": alike(hf, hf.sliding_window)}


def _qwen2(hf: Any) -> dict[str, Any]:
    return {"qkv_bias": True, "layers": by_type(hf)}


def _qwen3(hf: Any) -> dict[str, Any]:
    return attention_biases(hf) | {"qk_norm": "head", "layers": by_type(hf)}


def _granite(hf: Any) -> dict[str, Any]:
    return _llama(hf) | {
        "embed_scale": hf.embedding_multiplier,
        "residual_scale": hf.residual_multiplier,
        "attention_scale": hf.attention_multiplier,
        "logit_divisor": hf.logits_scaling,
    }


def _smollm3(hf: Any) -> dict[str, Any]:
    """A zero in no_rope_layers is a layer without positions. Windows count only where they are switched on."""
    return _llama(hf) | {
        "layers": tuple(
            LayerKind(layer.window if hf.use_sliding_window else None, layer.rope if turns else None)
            for layer, turns in zip(by_type(hf), hf.no_rope_layers, strict=False)
        )
    }


def _olmo2(hf: Any) -> dict[str, Any]:
    return attention_biases(hf) | {
        "layers": alike(hf),
        "norm": "rms_wide",
        "norm_before": False,
        "norm_after": True,
        "qk_norm": "all",
        "rope_wide": True,
    }


def _gemma2(hf: Any) -> dict[str, Any]:
    _refuse(hf, use_bidirectional_attention=False)
    return attention_biases(hf) | {
        "layers": by_type(hf),
        "norm": "rms_plus_one",
        "norm_after": True,
        "embed_scale": hf.hidden_size**0.5,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_softcap": hf.attn_logit_softcapping,
        "logit_softcap": hf.final_logit_softcapping,
    }


def _gemma3(hf: Any) -> dict[str, Any]:
    # Transformers reads attn_logit_softcapping here and does not compute it.
    _refuse(hf, attn_logit_softcapping=None)
    return _gemma2(hf) | {"qk_norm": "head"}


def _phi3(hf: Any) -> dict[str, Any]:
    return {"layers": alike(hf, hf.sliding_window, partial=True)}


def _gpt2(hf: Any) -> dict[str, Any]:
    _refuse(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {
        "kv_heads": hf.n_head,
        "head_size": hf.n_embd // hf.n_head,
        "mlp_width": hf.n_inner or 4 * hf.n_embd,
        "layers": (LayerKind(rope=None),) * hf.n_layer,
        "norm": "layer",
        "norm_eps": hf.layer_norm_epsilon,
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "learned_positions": True,
        "padding_row": None,
    }


# Modules of a layer, on disk -> here; several of ours lie one below the other on disk.
Names = dict[str, str | tuple[str, ...]]


def _stored(names: Names, layer: str, transposed: tuple[str, ...] = ()) -> dict[str, Stored]:
    """`names` as patterns for any layer."""
    return {
        f"{layer}.{{n}}.{theirs}": Stored(
            tuple(f"layers.{{n}}.{part}" for part in ((ours,) if isinstance(ours, str) else ours)), theirs in transposed
        )
        for theirs, ours in names.items()
    }


ENDS = {
    "model.embed_tokens": Stored(("tok_embed",)),
    "model.norm": Stored(("norm",)),
    "lm_head": Stored(("head",)),
}
QKV: Names = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
}
OUT_AND_MLP: Names = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
NORMS_BEFORE: Names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
NORMS_AFTER: Names = {
    "post_attention_layernorm": "attention_norm_after",
    "post_feedforward_layernorm": "mlp_norm_after",
}
QK_NORMS: Names = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}

LLAMA_NAMES = ENDS | _stored(NORMS_BEFORE | QKV | OUT_AND_MLP, "model.layers")
QWEN3_NAMES = LLAMA_NAMES | _stored(QK_NORMS, "model.layers")
OLMO2_NAMES = ENDS | _stored(NORMS_AFTER | QK_NORMS | QKV | OUT_AND_MLP, "model.layers")
GEMMA2_NAMES = ENDS | _stored(
    {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"} | NORMS_AFTER | QKV | OUT_AND_MLP,
    "model.layers",
)
GEMMA3_NAMES = GEMMA2_NAMES | _stored(QK_NORMS, "model.layers")
PHI3_NAMES = ENDS | _stored(
    NORMS_BEFORE
    | {
        "self_attn.qkv_proj": ("attention.wq", "attention.wk", "attention.wv"),
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        "mlp.down_proj": "mlp.down",
    },
    "model.layers",
)
GPT2_NAMES = {
    "transformer.wte": Stored(("tok_embed",)),
    "transformer.wpe": Stored(("pos_embed",)),
    "transformer.ln_f": Stored(("norm",)),
    "lm_head": Stored(("head",)),
} | _stored(
    {
        "ln_1": "attention_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": ("attention.wq", "attention.wk", "attention.wv"),
        "attn.c_proj": "attention.wo",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    },
    "transformer.h",
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
GPT2_SIZES = {
    "vocab_size": "vocab_size", "width": "n_embd", "depth": "n_layer", "heads": "n_head", "mlp_width": "n_inner",
    "max_positions": "n_positions", "tied": "tie_word_embeddings",
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _rope_of(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]}}


def _new_gemma(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": sizes["head_size"]}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama, LLAMA_NAMES, new=lambda s: _rope_of(s) | {"rms_norm_eps": 1e-5}),
    "mistral": Family("MistralForCausalLM", _mistral, LLAMA_NAMES, new=_rope_of),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, LLAMA_NAMES, new=_rope_of),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, QWEN3_NAMES, new=_rope_of),
    "granite": Family(
        "GraniteForCausalLM",
        _granite,
        LLAMA_NAMES,
        new=lambda s: _rope_of(s) | {"attention_multiplier": s["head_size"] ** -0.5},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, LLAMA_NAMES, new=_rope_of),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2, OLMO2_NAMES, new=_rope_of),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, GEMMA2_NAMES, new=lambda s: _rope_of(s) | _new_gemma(s)),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, GEMMA3_NAMES, new=_new_gemma),
    "phi3": Family("Phi3ForCausalLM", _phi3, PHI3_NAMES, new=_rope_of),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2,
        GPT2_NAMES,
        prefix="transformer.",
        not_weights=(".attn.bias", ".attn.masked_bias"),
        sizes=GPT2_SIZES,
        new=lambda s: NO_DROPOUT,
    ),
}
