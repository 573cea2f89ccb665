"""The names of a family's weights in Hugging Face files, and the decoder parameters they hold.

Our parameters are always unfused here. A tensor in a file is one of them, or several stacked along out_features
(Phi-3's qkv_proj), perhaps transposed (GPT-2). So one table serves reading and writing, and how a model runs (fused or
not, sharded or not) never shows in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensorSpec:
    """What one tensor in a file holds: the decoder's parameters, stacked along out_features."""

    parameter_names: tuple[str, ...]
    is_transposed: bool = False


@dataclass(frozen=True)
class WeightNames:
    """`modules` maps names in the file to ours. Names have no `.weight` or `.bias`, and `{n}` for the layer's index."""

    modules: dict[str, StoredTensorSpec]
    # The file of a headless model (AutoModel) leaves this prefix out.
    prefix: str = "model."
    # Tensors in old files that are not trained parameters.
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def is_ignored(self, hf_name: str) -> bool:
        return hf_name.endswith(self.ignored_suffixes)

    def stored_tensor(self, hf_name: str) -> StoredTensorSpec | None:
        """What the tensor `hf_name` holds; None if it is not one of this family's."""
        module, _, kind = hf_name.rpartition(".")
        number = re.search(r"\.(\d+)\.", f".{module}.")
        pattern = f".{module}.".replace(f".{number.group(1)}.", ".{n}.", 1)[1:-1] if number else module
        entry = self.modules.get(pattern)
        if entry is None or kind not in ("weight", "bias"):
            return None
        return _instantiate(entry, number.group(1) if number else "", kind)

    def stored_tensors(self, parameters: Iterable[str]) -> dict[str, StoredTensorSpec]:
        """The tensors that a file with these (unfused) parameters has, in their order."""
        entries = {name: (hf_name, entry) for hf_name, entry in self.modules.items() for name in entry.parameter_names}
        tensors: dict[str, StoredTensorSpec] = {}
        for parameter in parameters:
            module, _, kind = parameter.rpartition(".")
            number = re.search(r"^layers\.(\d+)\.", module)
            layer = number.group(1) if number else ""
            pattern = module.replace(f"layers.{layer}.", "layers.{n}.", 1) if number else module
            assert pattern in entries, f"{parameter} has no Hugging Face name"
            hf_name, entry = entries[pattern]
            tensors[f"{hf_name.replace('{n}', layer)}.{kind}"] = _instantiate(entry, layer, kind)
        return tensors


class FallbackNames(WeightNames):
    """The names of a model in the Transformers fallback: ours are Transformers' with a prefix."""

    def stored_tensor(self, hf_name: str) -> StoredTensorSpec | None:
        return StoredTensorSpec((f"hf.{hf_name}",))

    def stored_tensors(self, parameters: Iterable[str]) -> dict[str, StoredTensorSpec]:
        return {name.removeprefix("hf."): StoredTensorSpec((name,)) for name in parameters}


FALLBACK_NAMES = FallbackNames({})


def _instantiate(entry: StoredTensorSpec, layer: str, kind: str) -> StoredTensorSpec:
    parameters = tuple(f"{name.replace('{n}', layer)}.{kind}" for name in entry.parameter_names)
    return StoredTensorSpec(parameters, entry.is_transposed and kind == "weight")


# The modules of one layer: name in the file -> our name, or several that are stacked there.
LayerModules = dict[str, str | tuple[str, ...]]


def layer_modules(modules: LayerModules, prefix: str, transposed: tuple[str, ...] = ()) -> dict[str, StoredTensorSpec]:
    """`modules` as patterns for any layer below `prefix`."""
    return {
        f"{prefix}.{{n}}.{hf_name}": StoredTensorSpec(
            tuple(f"layers.{{n}}.{name}" for name in ((ours,) if isinstance(ours, str) else ours)),
            hf_name in transposed,
        )
        for hf_name, ours in modules.items()
    }


EMBEDDING_NORM_HEAD = {
    "model.embed_tokens": StoredTensorSpec(("tok_embed",)),
    "model.norm": StoredTensorSpec(("norm",)),
    "lm_head": StoredTensorSpec(("head",)),
}
QKV: LayerModules = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
}
OUT_AND_MLP: LayerModules = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
PRE_NORMS: LayerModules = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
POST_NORMS: LayerModules = {
    "post_attention_layernorm": "attention_norm_after",
    "post_feedforward_layernorm": "mlp_norm_after",
}
GEMMA_PRE_NORMS: LayerModules = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"}
QK_NORMS: LayerModules = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
PHI3_LAYER: LayerModules = {
    "self_attn.qkv_proj": ("attention.wq", "attention.wk", "attention.wv"),
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    "mlp.down_proj": "mlp.down",
}
GPT2_LAYER: LayerModules = {
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_attn": ("attention.wq", "attention.wk", "attention.wv"),
    "attn.c_proj": "attention.wo",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def _usual_names(*layer: LayerModules) -> WeightNames:
    modules: LayerModules = {}
    for part in layer:
        modules |= part
    return WeightNames(EMBEDDING_NORM_HEAD | layer_modules(modules, "model.layers"))


LLAMA = _usual_names(PRE_NORMS, QKV, OUT_AND_MLP)
GPT2 = WeightNames(
    {
        "transformer.wte": StoredTensorSpec(("tok_embed",)),
        "transformer.wpe": StoredTensorSpec(("pos_embed",)),
        "transformer.ln_f": StoredTensorSpec(("norm",)),
        "lm_head": StoredTensorSpec(("head",)),
    }
    | layer_modules(GPT2_LAYER, "transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    prefix="transformer.",
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)
# By model_type.
WEIGHT_NAMES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": _usual_names(PRE_NORMS, QKV, OUT_AND_MLP, QK_NORMS),
    "granite": LLAMA,
    "smollm3": LLAMA,
    "olmo2": _usual_names(POST_NORMS, QK_NORMS, QKV, OUT_AND_MLP),
    "gemma2": _usual_names(GEMMA_PRE_NORMS, POST_NORMS, QKV, OUT_AND_MLP),
    "gemma3_text": _usual_names(GEMMA_PRE_NORMS, POST_NORMS, QKV, OUT_AND_MLP, QK_NORMS),
    "phi3": _usual_names(PRE_NORMS, PHI3_LAYER),
    "gpt2": GPT2,
}
