"""The native model: one decoder for all families. What differs between families is data (`DecoderConfig`), not code.

Read it top to bottom. The decoder knows nothing about files, ranks or losses: ids in, logits out. families.py builds a
`DecoderConfig` from a Hugging Face config, sizing.py from a depth. A decoder may hold only a range of the layers, as a
pipeline stage does. One without the first layer takes hidden states as input; one without the last returns them.

`Decoder.forward` has two parts. `build_layer_inputs` computes once per batch what all layers share (cos, sin and the
attention masks); it is never compiled. `compute_hidden_states` and `compute_logits` are the network.

Shapes: B rows, T tokens, S keys, D width, H query heads, K key/value heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.models.attention import (
    AttentionBackend,
    AttentionMask,
    AttentionSpec,
    DocumentLimits,
    KVCache,
    attend,
    build_masks,
    load_kernel,
)
from torchstone.models.rope import CosSin, Rope, apply_rotary, rotary_cos_sin

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new"]
Fusion = Literal["qkv", "gate_up"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    # The same formula in separate operations, each rounded: in bf16 the result differs. GPT-2 uses this one.
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
}
DEFAULT_ROPE = Rope()
EMBEDDING, HEAD = "tok_embed.weight", "head.weight"
# A fused linear layer, and the layers it replaces, stacked along out_features.
FUSED_LINEARS = {
    "attention.wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
}


@dataclass(frozen=True)
class LayerSpec:
    """Settings of one layer: its sliding window, and its RoPE (None: no positions)."""

    window: int | None = None
    rope: Rope | None = DEFAULT_ROPE


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides what a decoder computes."""

    vocab_size: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    layers: tuple[LayerSpec, ...]
    max_positions: int = 2048
    tied: bool = False
    # rms scales after rounding to the model's dtype, rms_fp32 before rounding, rms_plus_one scales by 1 + weight.
    norm: Literal["rms", "rms_fp32", "rms_plus_one", "layer"] = "rms"
    norm_eps: float = 1e-5
    has_pre_norm: bool = True
    has_post_norm: bool = False
    # Queries and keys are normalized per head, or over all heads at once.
    qk_norm: Literal["none", "head", "all"] = "none"
    activation: Activation = "silu"
    is_gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # GPT-2: learned position embeddings. Rows cannot be longer than max_positions.
    has_learned_positions: bool = False
    # Rotate queries and keys in fp32 whatever the model's dtype.
    rope_in_fp32: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    # By default head_dim ** -0.5.
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    # The token whose embedding gets no gradient, as nn.Embedding and Transformers define it.
    padding_idx: int | None = field(default=None, compare=False)

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def min_window(self) -> int | None:
        """The smallest sliding window of a layer."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def qkv_features(self) -> list[int]:
        """out_features of the query, key and value projections."""
        return [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "head_dim", "mlp_width", "max_positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a positive integer")
        for name in (
            "embed_scale",
            "residual_scale",
            "attention_scale",
            "attention_softcap",
            "logit_divisor",
            "logit_softcap",
        ):
            if not isinstance(getattr(self, name), int | float | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a number")
        # At 8 bytes each, torch cannot count the bytes of more.
        elements = self.width * max(self.vocab_size, self.max_positions, sum(self.qkv_features), 2 * self.mlp_width)
        if elements >= 2**60:
            raise ValueError(f"a matrix of the model would have {elements} elements")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        rotary_dims = {layer.rope.rotary_dim(self.head_dim) for layer in self.layers if layer.rope is not None}
        if any(dim % 2 for dim in rotary_dims):
            raise ValueError(
                f"head_dim {self.head_dim} gives an odd number of rotary dimensions; RoPE needs an even one"
            )

    def packing_error(self, max_length: int) -> str | None:
        """Why documents of up to `max_length` tokens would change if they shared a row; None if they would not."""
        for layer in self.layers:
            if layer.rope is not None and layer.rope.depends_on_length(max_length):
                return (
                    f"its RoPE ({layer.rope.rope_type}) depends on the row's length beyond "
                    f"{layer.rope.original_max_position_embeddings} tokens, so a packed document would "
                    "get different frequencies"
                )
        return None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, kind: str) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        # A fused kernel (x, weight) -> output, set by liger.py.
        self.kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        self.weight = nn.Parameter(torch.zeros(width) if kind == "rms_plus_one" else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight)
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms":
            return self.weight * normed.to(x.dtype)
        weight = self.weight.float() + 1.0 if self.kind == "rms_plus_one" else self.weight
        return (weight * normed).to(x.dtype)


def build_norm(config: DecoderConfig, width: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, config.norm)


# The outputs of several linears with the same input.
Project = Callable[[Sequence[nn.Linear], Tensor], Sequence[Tensor]]
# (hidden states, head weight) -> loss.
LossFn = Callable[[Tensor, Tensor], Tensor]


class LayerInputs(NamedTuple):
    """What a layer needs to know about the batch."""

    cos_sin: CosSin | None
    mask: AttentionMask


def project(linears: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    return [linear(x) for linear in linears]


class Attention(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        layer_spec: LayerSpec,
        layer_idx: int,
        attn_backend: AttentionBackend,
        is_fused: bool,
    ) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.spec = AttentionSpec(
            attn_backend, scale, layer_spec.window, config.attention_softcap, load_kernel(attn_backend)
        )
        self.qkv_features = config.qkv_features
        # Selects the key/value heads that this rank's queries read, set by parallel/tensor_parallel.py.
        self.select_kv_heads: Callable[[Tensor], Tensor] | None = None
        # A fused kernel (q, k, cos_sin) -> (q, k), set by liger.py.
        self.rotary_kernel: Callable[[Tensor, Tensor, CosSin], tuple[Tensor, Tensor]] | None = None
        # Another way to compute `project`, set by tuning/.
        self.project: Project = project
        self.is_fused = is_fused
        if is_fused:
            self.wqkv = nn.Linear(config.width, sum(self.qkv_features), bias=config.qkv_bias)
        else:
            self.wq, self.wk, self.wv = (
                nn.Linear(config.width, features, bias=config.qkv_bias) for features in self.qkv_features
            )
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm != "none":
            self.q_norm, self.k_norm = (
                build_norm(config, features if self.qk_norm == "all" else config.head_dim)
                for features in self.qkv_features[:2]
            )

    def forward(self, x_BTD: Tensor, inputs: LayerInputs, kv_cache: KVCache | None = None) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = self._project_qkv(x_BTD)
        if self.select_kv_heads is not None:
            k_BKTE, v_BKTE = self.select_kv_heads(k_BKTE), self.select_kv_heads(v_BKTE)
        if inputs.cos_sin is not None and self.rotary_kernel is not None:
            q_BHTE, k_BKTE = self.rotary_kernel(q_BHTE, k_BKTE, inputs.cos_sin)
        elif inputs.cos_sin is not None:
            q_BHTE, k_BKTE = apply_rotary(q_BHTE, inputs.cos_sin), apply_rotary(k_BKTE, inputs.cos_sin)
        if kv_cache is not None:
            k_BKTE, v_BKTE = kv_cache.update(self.layer_idx, k_BKTE, v_BKTE)
        out_BHTE = attend(q_BHTE, k_BKTE, v_BKTE, inputs.mask, self.spec)
        (out_BTD,) = self.project((self.wo,), out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD

    def _project_qkv(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_fused:
            q, k, v = self.wqkv(x_BTD).split(self.qkv_features, dim=-1)
        else:
            q, k, v = self.project((self.wq, self.wk, self.wv), x_BTD)
        if self.qk_norm == "none":
            return self._split_heads(q), self._split_heads(k), self._split_heads(v)
        if self.qk_norm == "all":
            return self._split_heads(self.q_norm(q)), self._split_heads(self.k_norm(k)), self._split_heads(v)
        return self.q_norm(self._split_heads(q)), self.k_norm(self._split_heads(k)), self._split_heads(v)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig, is_fused: bool) -> None:
        super().__init__()
        self.activation, self.is_gated, self.is_fused = ACTIVATIONS[config.activation], config.is_gated, is_fused
        # Another way to compute `gate_activation`, set by liger.py.
        self.kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        # Another way to compute `project`, set by tuning/.
        self.project: Project = project
        if config.is_gated and is_fused:
            self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=config.mlp_bias)
        else:
            if config.is_gated:
                self.gate = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
            self.up = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self.is_gated:
            return self.down(self.activation(self.up(x_BTD)))
        if self.is_fused:
            gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        else:
            gate, up = self.project((self.gate, self.up), x_BTD)
        return self.down(self.gate_activation(gate, up) if self.kernel is None else self.kernel(gate, up))

    def gate_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class Block(nn.Module):
    """x + attention(x), then x + mlp(x), each with a norm before it, after it, or both."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_spec: LayerSpec,
        layer_idx: int,
        attn_backend: AttentionBackend,
        fusions: set[str],
    ) -> None:
        super().__init__()
        self.layer_spec, self.residual_scale = layer_spec, config.residual_scale
        self.has_pre_norm, self.has_post_norm = config.has_pre_norm, config.has_post_norm
        self.attention = Attention(config, layer_spec, layer_idx, attn_backend, "qkv" in fusions)
        self.mlp = MLP(config, "gate_up" in fusions)
        if self.has_pre_norm:
            self.attention_norm, self.mlp_norm = build_norm(config, config.width), build_norm(config, config.width)
        if self.has_post_norm:
            self.attention_norm_after = build_norm(config, config.width)
            self.mlp_norm_after = build_norm(config, config.width)

    def forward(self, x_BTD: Tensor, inputs: LayerInputs, kv_cache: KVCache | None = None) -> Tensor:
        out_BTD = self.attention(self.attention_norm(x_BTD) if self.has_pre_norm else x_BTD, inputs, kv_cache)
        x_BTD = x_BTD + self._scale(self.attention_norm_after(out_BTD) if self.has_post_norm else out_BTD)
        out_BTD = self.mlp(self.mlp_norm(x_BTD) if self.has_pre_norm else x_BTD)
        return x_BTD + self._scale(self.mlp_norm_after(out_BTD) if self.has_post_norm else out_BTD)

    def _scale(self, out_BTD: Tensor) -> Tensor:
        return out_BTD if self.residual_scale == 1.0 else out_BTD * self.residual_scale


class Decoder(nn.Module):
    """`forward(ids, positions, doc_ids)` returns logits. Labels and losses are the caller's business."""

    def __init__(
        self,
        config: DecoderConfig,
        attn_backend: AttentionBackend = "sdpa",
        fused: tuple[Fusion, ...] = (),
        layers: range | None = None,
    ) -> None:
        """`layers`: those of this decoder. With the first it has the embedding, with the last also norm and head."""
        super().__init__()
        layers = range(config.depth) if layers is None else layers
        self.config, self.has_embedding, self.has_head = config, layers.start == 0, layers.stop == config.depth
        # The compute dtype, if it may differ from the parameters' dtype (set by parallel/build.py).
        self.compute_dtype: torch.dtype | None = None
        # Set by parallel/runner.py before every batch, if they are known.
        self.document_limits: DocumentLimits | None = None
        if self.has_embedding:
            self.tok_embed = nn.Embedding(config.vocab_size, config.width, padding_idx=config.padding_idx)
            if config.has_learned_positions:
                self.pos_embed = nn.Embedding(config.max_positions, config.width)
        # Keyed by the layer's index in the whole model, so that a pipeline stage has the same parameter names.
        self.layers = nn.ModuleDict(
            {str(n): Block(config, config.layers[n], n, attn_backend, set(fused)) for n in layers}
        )
        if self.has_head:
            self.norm = build_norm(config, config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes embedding and head one parameter if the config says so. `to_empty` unties them, so call it again after.

        A decoder with only one of the two keeps its own.
        """
        if self.config.tied and self.has_embedding and self.has_head:
            self.head.weight = self.tok_embed.weight

    def forward(
        self,
        x: Tensor,
        positions_BT: Tensor,
        doc_ids_BT: Tensor | None = None,
        kv_cache: KVCache | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Returns logits; with `loss_fn`, `loss_fn(hidden_states, head.weight)` instead, without all logits in memory.

        Without `doc_ids` every row is one sequence, with padding on the right if any.
        """
        inputs = self.build_layer_inputs(positions_BT, doc_ids_BT, kv_cache)
        x_BTD = self.compute_hidden_states(x, positions_BT, inputs, kv_cache)
        if loss_fn is not None:
            return loss_fn(x_BTD, self.head.weight)
        return self.compute_logits(x_BTD) if self.has_head else x_BTD

    def build_layer_inputs(
        self, positions_BT: Tensor, doc_ids_BT: Tensor | None, kv_cache: KVCache | None = None
    ) -> list[LayerInputs]:
        """Returns one `LayerInputs` per layer; layers of the same kind share tensors."""
        config = self.config
        dtype = torch.float32 if config.rope_in_fp32 else self.compute_dtype or next(self.parameters()).dtype
        blocks = list(self.layers.values())
        ropes = {block.layer_spec.rope for block in blocks if block.layer_spec.rope is not None}
        cos_sin = {rope: rotary_cos_sin(rope, config.head_dim, positions_BT, dtype) for rope in ropes}
        kinds = {(block.attention.spec.backend, block.layer_spec.window) for block in blocks}
        masks = build_masks(kinds, doc_ids_BT, positions_BT, kv_cache, self.document_limits)
        return [
            LayerInputs(
                cos_sin.get(block.layer_spec.rope), masks[block.attention.spec.backend, block.layer_spec.window]
            )
            for block in blocks
        ]

    def compute_hidden_states(
        self, x: Tensor, positions_BT: Tensor, inputs: list[LayerInputs], kv_cache: KVCache | None = None
    ) -> Tensor:
        """The input of the head, or of the next pipeline stage. `x`: ids, or hidden states if it has no embedding."""
        x_BTD = self.embed(x, positions_BT) if self.has_embedding else x
        for block, block_inputs in zip(self.layers.values(), inputs, strict=True):
            x_BTD = block(x_BTD, block_inputs, kv_cache)
        return self.norm(x_BTD) if self.has_head else x_BTD

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTD = self.tok_embed(ids_BT)
        if self.config.embed_scale != 1.0:
            x_BTD = x_BTD * torch.full((), self.config.embed_scale, dtype=x_BTD.dtype, device=x_BTD.device)
        return x_BTD + self.pos_embed(positions_BT) if self.config.has_learned_positions else x_BTD

    def compute_logits(self, x_BTD: Tensor) -> Tensor:
        logits_BTV = self.head(x_BTD)
        if self.config.logit_divisor != 1.0:
            logits_BTV = logits_BTV / self.config.logit_divisor
        if self.config.logit_softcap is not None:
            logits_BTV = torch.tanh(logits_BTV / self.config.logit_softcap) * self.config.logit_softcap
        return logits_BTV

    def unfused_parameters(self) -> dict[str, Tensor]:
        """Every parameter by its unfused name; fused parameters are split into views."""
        return {
            name: view
            for fused_name, parameter in self.named_parameters()
            for name, view in split_fused(self.config, fused_name, parameter)
        }


def init_tensor(config: DecoderConfig, name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """The initial value of an unfused parameter: N(0, std), divided by sqrt(2 x depth) for residual projections.

    Every parameter is drawn on the CPU from its own random stream. So the same seed gives the same model on any device
    and in any parallel layout, and a rank can draw what it holds without the others.
    """
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") or config.norm == "rms_plus_one" else 1.0)
    is_residual = name.endswith(("attention.wo.weight", "mlp.down.weight"))
    scale = std / math.sqrt(2 * config.depth) if is_residual else std
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.randn(shape, generator=generator) * scale


def split_fused(config: DecoderConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Splits a tensor shaped like parameter `name` into views by unfused name; one view if it is not fused."""
    for fused, parts in FUSED_LINEARS.items():
        if f".{fused}." in name:
            features = config.qkv_features if fused == "attention.wqkv" else [config.mlp_width] * 2
            names = [name.replace(fused, part) for part in parts]
            return list(zip(names, tensor.split(features), strict=True))
    return [(name, tensor)]
