"""Tiny random models of every family, several shapes each, made by Transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.1,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def longrope_factors(start: float) -> list[float]:
    return [start + 0.25 * n for n in range(4)]


FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = rope("longrope", short_factor=longrope_factors(1.0), long_factor=longrope_factors(2.0))
# Rows in the tests have up to 40 tokens, most of them fewer than 24.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "grouped": {},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
        # Ids in the tests are drawn from the whole vocabulary, so the pad token occurs in text.
        "pad in text": {"pad_token_id": 3},
        "pad in text, tied": {"pad_token_id": 5, "tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        "head size": {"head_dim": 12, "tie_word_embeddings": True},
        "linear": rope("linear", factor=4.0),
        "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=16),
        "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=12),
        "yarn, long heads": rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0)
                            | {"head_dim": 32},
        "yarn, own ends": rope("yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=24.0, beta_slow=2.0,
                               mscale=1.0, mscale_all_dim=0.7, truncate=False),
        "dynamic": rope("dynamic", factor=3.0) | {"max_position_embeddings": 12},
        "dynamic, never beyond": rope("dynamic", factor=3.0),
    },
    "mistral": {
        "window": {"sliding_window": 6},
        "no window": {"sliding_window": None, "tie_word_embeddings": True},
        "head size": {"sliding_window": 7, "head_dim": 16, "num_key_value_heads": 1},
    },
    "qwen2": {
        "plain": {},
        "windows above": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "tied yarn": rope("yarn", factor=2.0, original_max_position_embeddings=16) | {"tie_word_embeddings": True},
    },
    "qwen3": {
        "head size": {"head_dim": 16},
        "biases": {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8},
        "windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "num_key_value_heads": 1},
    },
    "granite": {
        "multipliers": {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
                        "logits_scaling": 3.0},
        "biases": {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "attention_multiplier": 0.35,
                   "logits_scaling": 0.7, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "ungrouped": {"residual_multiplier": 1.7, "num_key_value_heads": 4},
    },
    "smollm3": {
        "every second": {"no_rope_layer_interval": 2},
        "windows": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
                    "tie_word_embeddings": False},
        "biases": {"no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True},
    },
    "olmo2": {
        "grouped": {},
        "biases": {"attention_bias": True, "num_key_value_heads": 4},
        "tied linear": rope("linear", factor=2.0) | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    },
    "gemma2": {
        "caps": {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 6, "attn_logit_softcapping": 2.0,
                 "final_logit_softcapping": 3.0},
        "no caps": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "attn_logit_softcapping": None,
                    "final_logit_softcapping": None, "tie_word_embeddings": False, "pad_token_id": 0},
        "biases": {"head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 7, "attention_bias": True,
                   "num_key_value_heads": 1, "layer_types": [FULL, SLIDING, FULL]},
    },
    "gemma3_text": {
        "alternating": {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 6,
                        "layer_types": [SLIDING, FULL, SLIDING]},
        "two ropes": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
                      "layer_types": [SLIDING, SLIDING, FULL],
                      "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
                                          FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}}},
        "untied": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 40, "tie_word_embeddings": False,
                   "final_logit_softcapping": 4.0, "attention_bias": True, "num_key_value_heads": 4},
    },
    "phi3": {
        "plain": {"num_key_value_heads": 4, "pad_token_id": 7},
        "window": {"sliding_window": 7, "tie_word_embeddings": True},
        "partial": rope("default", partial_rotary_factor=0.5),
        "longrope": LONGROPE | {"original_max_position_embeddings": 12},
        "longrope, never beyond": LONGROPE | {"original_max_position_embeddings": 64},
    },
    "gpt2": {
        "plain": {},
        "inner": {"n_inner": 40, "activation_function": "gelu"},
        "untied": {"tie_word_embeddings": False, "n_head": 2},
    },
}  # fmt: skip
CASES = [(family, shape) for family, shapes in SHAPES.items() for shape in shapes]
# Beyond twelve tokens, RoPE depends on the row's length there, so documents cannot be packed.
LENGTH_DEPENDENT = [("llama", "dynamic"), ("phi3", "longrope")]
CAPPED = [("gemma2", "caps"), ("gemma2", "biases")]


def make_model(folder: Path, family: str, shape: str = "", **changes: Any) -> Path:
    """Norms and biases are random too: a test must see if one is used for another."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    settings = SHAPES[family][shape] if shape else {}
    torch.manual_seed(0)
    # Configs change the dictionaries they get.
    config = AutoConfig.for_model(family, **copy.deepcopy(sizes | settings | changes))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.0 if name.endswith("bias") or "gemma" in family else 1.0, 0.2)
    model.save_pretrained(folder)
    return folder
