"""The one native model: a decoder whose differences between families are data, not code.

Read it top to bottom. It knows no files, no layout of processes and no loss: ids in, logits out. `DecoderConfig` holds
everything in which families differ; families.py fills it in from a Hugging Face config, sizing.py from a depth. A
decoder may hold a run of the layers only; one that lacks the first takes and one that lacks the last gives features.

A forward pass has two parts. `plan` works out, once for all layers, what depends on the batch alone: rotary tables and
who sees whom. `run` is the network itself, and what execution.py compiles.

Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.models.attention import Backend, KeyValueCache, Lens, Sight, attend, sights
from torchstone.models.rope import Rope, Rotary, turn

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new"]
Fusion = Literal["qkv", "gate_up"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    # The same curve in separate steps, each rounded: in bf16 that is another function, and the one GPT-2 has.
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
}
PLAIN_ROPE = Rope()
# Matrices that may lie in one, top to bottom, and the names they have when they do not.
FUSED = {
    "attention.wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
}


@dataclass(frozen=True)
class LayerKind:
    """In what layers of one model differ: how far they see, and how their positions turn (None: not at all)."""

    window: int | None = None
    rope: Rope | None = PLAIN_ROPE


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides what a decoder computes."""

    vocab_size: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    layers: tuple[LayerKind, ...]
    max_positions: int = 2048
    tied: bool = False
    # rms multiplies by its weight after rounding to the model's numbers, rms_wide before, rms_plus_one by 1 + weight.
    norm: Literal["rms", "rms_wide", "rms_plus_one", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_before: bool = True
    norm_after: bool = False
    # Queries and keys normed by head, or over all heads at once.
    qk_norm: Literal["none", "head", "all"] = "none"
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    # Positions are looked up in a table and added to the embedding; rows cannot be longer than it.
    learned_positions: bool = False
    # Whether queries and keys turn in fp32 whatever the model's numbers are.
    rope_wide: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    # By default head_size ** -0.5.
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    # The token whose embedding gets no gradient, as Transformers has it for pad_token_id.
    padding_row: int | None = field(default=None, compare=False)

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """The shortest window of a layer."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "head_size", "mlp_width", "max_positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a whole number from 1")
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
        turns = {layer.rope.turning(self.head_size) for layer in self.layers if layer.rope is not None}
        if self.heads % self.kv_heads or any(size % 2 for size in turns):
            raise ValueError(
                f"{self.heads} heads of {self.head_size} with {self.kv_heads} key/value heads do not divide"
            )

    def why_not_packed(self, longest: int) -> str | None:
        """Why rows of several documents, each of up to `longest` tokens, would not be what they are alone."""
        for layer in self.layers:
            if layer.rope is not None and layer.rope.depends_on_length(longest):
                return (
                    f"its rotary positions ({layer.rope.kind}) depend on the length of the row beyond "
                    f"{layer.rope.original_positions} tokens, so a document would not be what it is alone"
                )
        return None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, kind: str) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        # Where set, what computes it from x and the weight instead (liger.py).
        self.kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        self.weight = nn.Parameter(torch.zeros(width) if kind == "rms_plus_one" else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms":
            return self.weight * normed.to(x.dtype)
        weight = self.weight.float() + 1.0 if self.kind == "rms_plus_one" else self.weight
        return (weight * normed).to(x.dtype)


def norm(config: DecoderConfig, width: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, config.norm)


# Features and the head's weight -> a loss.
Finish = Callable[[Tensor, Tensor], Tensor]
# Cosines and sines, each [B, 1, T, E].
Tables = tuple[Tensor, Tensor]


class Plan(NamedTuple):
    """What a batch means to one layer: the tables that turn its positions, and who sees whom."""

    tables: Tables | None
    sight: Sight


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: LayerKind, index: int, backend: Backend, fused: bool) -> None:
        super().__init__()
        self.index, self.head_size = index, config.head_size
        scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
        self.lens = Lens(backend, scale, layer.window, config.attention_softcap)
        self.rows = attention_rows(config)
        # Where set, which of the key/value heads the queries here read (parallel/tensor.py).
        self.pick: Callable[[Tensor], Tensor] | None = None
        # Where set, what turns queries and keys by the tables instead (liger.py).
        self.turn_kernel: Callable[[Tensor, Tensor, Tables], tuple[Tensor, Tensor]] | None = None
        if fused:
            self.wqkv = nn.Linear(config.width, sum(self.rows), bias=config.qkv_bias)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(config.width, rows, bias=config.qkv_bias) for rows in self.rows)
        self.wo = nn.Linear(config.heads * config.head_size, config.width, bias=config.out_bias)
        self.norms_all = config.qk_norm == "all"
        if config.qk_norm != "none":
            self.q_norm, self.k_norm = (
                norm(config, rows if self.norms_all else config.head_size) for rows in self.rows[:2]
            )

    def forward(self, x_BTD: Tensor, plan: Plan, cache: KeyValueCache | None = None) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = self._projected(x_BTD)
        if self.pick is not None:
            k_BKTE, v_BKTE = self.pick(k_BKTE), self.pick(v_BKTE)
        if plan.tables is not None and self.turn_kernel is not None:
            q_BHTE, k_BKTE = self.turn_kernel(q_BHTE, k_BKTE, plan.tables)
        elif plan.tables is not None:
            q_BHTE, k_BKTE = turn(q_BHTE, plan.tables), turn(k_BKTE, plan.tables)
        if cache is not None:
            k_BKTE, v_BKTE = cache.extend(self.index, k_BKTE, v_BKTE)
        out_BHTE = attend(q_BHTE, k_BKTE, v_BKTE, plan.sight, self.lens)
        return self.wo(out_BHTE.transpose(1, 2).flatten(2))

    def _projected(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if hasattr(self, "wqkv"):
            q, k, v = self.wqkv(x_BTD).split(self.rows, dim=-1)
        else:
            q, k, v = self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)
        if not hasattr(self, "q_norm"):
            return self._heads(q), self._heads(k), self._heads(v)
        if self.norms_all:
            return self._heads(self.q_norm(q)), self._heads(self.k_norm(k)), self._heads(v)
        return self.q_norm(self._heads(q)), self.k_norm(self._heads(k)), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig, fused: bool) -> None:
        super().__init__()
        self.act, self.gated = ACTIVATIONS[config.activation], config.gated
        # Where set, what computes act(gate) * up instead (liger.py).
        self.kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        if config.gated and fused:
            self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=config.mlp_bias)
        else:
            if config.gated:
                self.gate = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
            self.up = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.act(self.up(x_BTD)))
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1) if hasattr(self, "gate_up") else self._two(x_BTD)
        return self.down(self.act(gate) * up if self.kernel is None else self.kernel(gate, up))

    def _two(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x_BTD), self.up(x_BTD)


class Block(nn.Module):
    """x + attention(x), then x + mlp(x), each with a norm before it, after it, or both."""

    def __init__(self, config: DecoderConfig, layer: LayerKind, index: int, backend: Backend, fused: set[str]) -> None:
        super().__init__()
        self.layer, self.scale = layer, config.residual_scale
        # How execution.py has this block run in training, where it has a say: to keep less and compute it again.
        self.recompute: Callable[..., Tensor] | None = None
        self.attention = Attention(config, layer, index, backend, "qkv" in fused)
        self.mlp = MLP(config, "gate_up" in fused)
        if config.norm_before:
            self.attention_norm, self.mlp_norm = norm(config, config.width), norm(config, config.width)
        if config.norm_after:
            self.attention_norm_after, self.mlp_norm_after = norm(config, config.width), norm(config, config.width)

    def forward(self, x_BTD: Tensor, plan: Plan, cache: KeyValueCache | None = None) -> Tensor:
        if self.recompute is not None and torch.is_grad_enabled() and cache is None:
            return self.recompute(self.compute, x_BTD, plan)
        return self.compute(x_BTD, plan, cache)

    def compute(self, x_BTD: Tensor, plan: Plan, cache: KeyValueCache | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x_BTD) if hasattr(self, "attention_norm") else x_BTD, plan, cache)
        x_BTD = x_BTD + self._written(attended, "attention_norm_after")
        changed = self.mlp(self.mlp_norm(x_BTD) if hasattr(self, "mlp_norm") else x_BTD)
        return x_BTD + self._written(changed, "mlp_norm_after")

    def _written(self, change_BTD: Tensor, norm_after: str) -> Tensor:
        if hasattr(self, norm_after):
            change_BTD = getattr(self, norm_after)(change_BTD)
        return change_BTD if self.scale == 1.0 else change_BTD * self.scale


class Decoder(nn.Module):
    """`forward(ids, positions, doc_ids)` gives logits; labels and losses are somebody else's business."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: Backend = "sdpa",
        fused: tuple[Fusion, ...] = (),
        layers: range | None = None,
    ) -> None:
        """`layers` are those that this decoder holds; the first brings the embedding along, the last norm and head."""
        super().__init__()
        held = range(config.depth) if layers is None else layers
        self.config, self.is_first, self.is_last = config, held.start == 0, held.stop == config.depth
        # Where set, the numbers that are computed in, when the parameters are kept in others (parallel/shard.py).
        self.computes_in: torch.dtype | None = None
        if self.is_first:
            self.tok_embed = nn.Embedding(config.vocab_size, config.width, padding_idx=config.padding_row)
            if config.learned_positions:
                self.pos_embed = nn.Embedding(config.max_positions, config.width)
        # Keyed by the number of the layer in the whole model, so that a part of the layers keeps its names.
        self.layers = nn.ModuleDict({str(n): Block(config, config.layers[n], n, attention, set(fused)) for n in held})
        if self.is_last:
            self.norm = norm(config, config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """One matrix for embedding and head where the config says so. Moving a model that was made without memory
        gives each name its own, so it is done again then. Where they are apart, each keeps one."""
        if self.config.tied and self.is_first and self.is_last:
            self.head.weight = self.tok_embed.weight

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        doc_ids_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
        finish: Finish | None = None,
    ) -> Tensor:
        """Logits; or, with `finish`, what it makes of the last features and the head, so that a loss need not have all
        logits at once. Without `doc_ids` every row is one sequence (padding, if any, on its right)."""
        plans = self.plan(positions_BT, doc_ids_BT, cache)
        if finish is None:
            return self.run(ids_BT, positions_BT, plans, cache)
        return finish(self.features(ids_BT, positions_BT, plans, cache), self.head.weight)

    def plan(self, positions_BT: Tensor, doc_ids_BT: Tensor | None, cache: KeyValueCache | None = None) -> list[Plan]:
        """One a layer; layers of a kind share theirs."""
        config = self.config
        dtype = torch.float32 if config.rope_wide else self.computes_in or next(self.parameters()).dtype
        blocks = list(self.layers.values())
        ropes = {block.layer.rope for block in blocks if block.layer.rope is not None}
        tables = {rope: Rotary(rope, config.head_size, positions_BT, dtype).tables for rope in ropes}
        lenses = {(block.attention.lens.backend, block.layer.window) for block in blocks}
        seen = sights(lenses, doc_ids_BT, positions_BT, cache)
        return [
            Plan(tables.get(block.layer.rope), seen[block.attention.lens.backend, block.layer.window])
            for block in blocks
        ]

    def run(
        self, ids_BT: Tensor, positions_BT: Tensor, plans: list[Plan], cache: KeyValueCache | None = None
    ) -> Tensor:
        features_BTD = self.features(ids_BT, positions_BT, plans, cache)
        return self.logits(features_BTD) if self.is_last else features_BTD

    def features(
        self, ids_BT: Tensor, positions_BT: Tensor, plans: list[Plan], cache: KeyValueCache | None = None
    ) -> Tensor:
        """What the head reads, or the next layer where this is not the end."""
        x_BTD = self.embed(ids_BT, positions_BT) if self.is_first else ids_BT
        for block, plan in zip(self.layers.values(), plans, strict=True):
            x_BTD = block(x_BTD, plan, cache)
        return self.norm(x_BTD) if self.is_last else x_BTD

    def embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTD = self.tok_embed(ids_BT)
        if self.config.embed_scale != 1.0:
            x_BTD = x_BTD * torch.tensor(self.config.embed_scale, dtype=x_BTD.dtype, device=x_BTD.device)
        return x_BTD + self.pos_embed(positions_BT) if self.config.learned_positions else x_BTD

    def logits(self, features_BTD: Tensor) -> Tensor:
        logits_BTV = self.head(features_BTD)
        if self.config.logit_divisor != 1.0:
            logits_BTV = logits_BTV / self.config.logit_divisor
        if self.config.logit_softcap is not None:
            logits_BTV = torch.tanh(logits_BTV / self.config.logit_softcap) * self.config.logit_softcap
        return logits_BTV

    def pieces(self) -> dict[str, Tensor]:
        """Every parameter by the name it has when nothing is fused; what is fused as views of its rows."""
        return {
            name: piece
            for whole, parameter in self.named_parameters()
            for name, piece in pieces_of(self.config, whole, parameter)
        }

    @torch.no_grad()
    def initialise(self, std: float, seed: int) -> None:
        """Every parameter as `drawn` has it."""
        for name, piece in self.pieces().items():
            piece.copy_(drawn(self.config, name, piece.shape, std, seed))


def drawn(config: DecoderConfig, name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """A piece of a new model: normal matrices of `std`; what writes to the residual stream is scaled down by
    sqrt(2 x depth).

    Every piece is drawn on the CPU from a stream of its own, so that the same seed gives the same model on any device
    and in any layout, and a process that holds some of the parameters draws what the others would have.
    """
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") or config.norm == "rms_plus_one" else 1.0)
    writes = name.endswith(("attention.wo.weight", "mlp.down.weight"))
    scale = std / math.sqrt(2 * config.depth) if writes else std
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.randn(shape, generator=generator) * scale


def attention_rows(config: DecoderConfig) -> list[int]:
    """Rows of the query, key and value projections."""
    return [heads * config.head_size for heads in (config.heads, config.kv_heads, config.kv_heads)]


def pieces_of(config: DecoderConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor that is shaped like parameter `name`, cut where the parameter holds several matrices; views."""
    for whole, parts in FUSED.items():
        if f".{whole}." in name:
            rows = attention_rows(config) if whole == "attention.wqkv" else [config.mlp_width] * 2
            names = [name.replace(whole, part) for part in parts]
            return list(zip(names, tensor.split(rows), strict=True))
    return [(name, tensor)]
