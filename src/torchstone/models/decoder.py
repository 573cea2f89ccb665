"""The one native model: a decoder whose differences between families are data, not code.

Read it top to bottom. It knows no files, no layout and no loss: ids in, logits out. Rotary tables are computed from the
positions at every call, in fp32, rather than kept as a buffer: a buffer would be rounded when the model is cast to bf16
and lost when it is built without memory, and the table costs nothing next to one layer.

Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchstone.models.attention import KeyValueCache, attend, visible


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and Llama 3's stretching of the slow frequencies where `kind` says so."""

    theta: float = 10000.0
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def frequencies(self, head_size: int, device: torch.device) -> Tensor:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / head_size
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "default":
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        smooth = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        # Slow waves are stretched by the factor, fast ones kept, those between interpolated.
        blended = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        stretched = torch.where(smooth < 0, frequencies / self.factor, blended)
        return torch.where(smooth > 1, frequencies, stretched)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. families.py makes it from a Hugging Face config, sizing.py from a depth."""

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 2048
    rope: Rope = Rope()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "depth", "heads", "kv_heads", "head_size", "mlp_width", "max_positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a whole number from 1")
        if self.heads % self.kv_heads or self.head_size % 2:
            raise ValueError(
                f"{self.heads} heads of {self.head_size} with {self.kv_heads} key/value heads do not divide"
            )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = x_BTD.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x_BTD.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        bias = config.attention_bias
        self.wq = nn.Linear(config.width, config.heads * config.head_size, bias=bias)
        self.wk = nn.Linear(config.width, config.kv_heads * config.head_size, bias=bias)
        self.wv = nn.Linear(config.width, config.kv_heads * config.head_size, bias=bias)
        self.wo = nn.Linear(config.heads * config.head_size, config.width, bias=bias)

    def forward(self, x_BTD: Tensor, rotary: Rotary, mask: Tensor | None, backend: str, cache: LayerCache) -> Tensor:
        q_BHTE = rotary.turn(self._heads(self.wq(x_BTD)))
        k_BKTE = rotary.turn(self._heads(self.wk(x_BTD)))
        v_BKTE = self._heads(self.wv(x_BTD))
        if cache is not None:
            k_BKTE, v_BKTE = cache[0].extend(cache[1], k_BKTE, v_BKTE)
        out_BHTE = attend(q_BHTE, k_BKTE, v_BKTE, mask, backend)
        return self.wo(out_BHTE.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
        self.up = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, rotary: Rotary, mask: Tensor | None, backend: str, cache: LayerCache) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask, backend, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """`forward(ids, positions, doc_ids)` gives logits; labels and losses are somebody else's business."""

    def __init__(self, config: DecoderConfig, attention: str = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.attention_backend = attention
        self.tok_embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tok_embed.weight

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, doc_ids_BT: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Without `doc_ids` every row is one sequence (padding, if any, on its right)."""
        x_BTD = self.tok_embed(ids_BT)
        rotary = Rotary(self.config.rope, self.config.head_size, positions_BT, x_BTD.dtype)
        mask = visible(doc_ids_BT, cache)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rotary, mask, self.attention_backend, None if cache is None else (cache, index))
        return self.head(self.norm(x_BTD))

    @torch.no_grad()
    def initialise(self, std: float, seed: int) -> None:
        """Normal matrices of `std`; what writes to the residual stream is scaled down by sqrt(2 x depth).

        Every parameter is drawn on the CPU from a stream of its own, so that the same seed gives the same model on any
        device, and a process that holds some of the parameters draws what the others would have.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                writes = name.endswith(("attention.wo.weight", "mlp.down.weight"))
                scale = std / math.sqrt(2 * self.config.depth) if writes else std
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


LayerCache = tuple[KeyValueCache, int] | None


class Rotary:
    """Cosines and sines of one batch of positions, ready to turn queries and keys."""

    def __init__(self, rope: Rope, head_size: int, positions_BT: Tensor, dtype: torch.dtype) -> None:
        angles = positions_BT[..., None].float() * rope.frequencies(head_size, positions_BT.device)
        angles_B1TE = torch.cat((angles, angles), dim=-1)[:, None]
        self.cos, self.sin = angles_B1TE.cos().to(dtype), angles_B1TE.sin().to(dtype)

    def turn(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin
