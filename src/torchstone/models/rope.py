"""Rotary position embeddings (RoPE), with the kinds of scaling in `RopeType`, computed as in Transformers.

cos and sin are computed from the positions at every call, in fp32, which costs little compared with one layer. The
frequencies are no buffer of a module: that would be rounded when the model is cast to bf16, and lost when the model is
built on the meta device.

Two kinds (`dynamic`, `longrope`) change their frequencies once a row is longer than the original context. The length
that counts is the row's own, not the longest of the batch: a loss must not depend on which rows share a batch.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
# cos and sin, each [B, 1, T, E].
CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rope:
    """The parameters of one RoPE; names follow Transformers' `rope_parameters`."""

    rope_theta: float = 10000.0
    rope_type: RopeType = "default"
    # Share of each head's dimensions that rotate.
    partial_rotary_factor: float = 1.0
    # Scaling over the original context length.
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    # llama3: frequencies below the low one are scaled, those above the high one are kept.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: the ends of the ramp, which `truncate` rounds to whole dimensions.
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    # longrope: one factor per frequency, for rows up to the original length and for longer ones.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # yarn, longrope: cos and sin are multiplied by this.
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name not in ("rope_type", "truncate")}
        for name, value in numbers.items():
            for number in value if isinstance(value, tuple) else [value]:
                # NaN fails every comparison; an integer may be larger than any float.
                if type(number) not in (int, float) or not 0 < number <= sys.float_info.max:
                    raise ValueError(f"{name} of RoPE is {number!r}, not a positive number")

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head rotate."""
        return int(head_dim * self.partial_rotary_factor)

    def depends_on_length(self, max_length: int) -> bool:
        """Whether the frequencies of rows of up to `max_length` tokens depend on the row's length."""
        return self.rope_type in ("dynamic", "longrope") and max_length > self.original_max_position_embeddings

    def inv_freq(self, head_dim: int, positions_BT: Tensor) -> Tensor:
        """Angle per position: [E/2], or [B, 1, E/2] where it depends on the length of the row."""
        dim, device = self.rotary_dim(head_dim), positions_BT.device
        if self.rope_type == "dynamic":
            return self._dynamic(_exponents(dim, device), dim, positions_BT)
        if self.rope_type == "longrope":
            long, short = _to_device(self.long_factor, device), _to_device(self.short_factor, device)
            is_long = _row_lengths(positions_BT) > self.original_max_position_embeddings
            return 1.0 / (torch.where(is_long, long, short) * self.rope_theta ** _exponents(dim, device))
        return _fixed_inv_freq(self, dim, device)

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
        rotations = self.original_max_position_embeddings / (2 * math.pi / inv_freq)
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        scaled = torch.where(smooth < 0, inv_freq / self.factor, blended)
        return torch.where(smooth > 1, inv_freq, scaled)

    def _yarn(self, pos_freqs: Tensor, dim: int) -> Tensor:
        def find_correction_dim(num_rotations: float) -> float:
            return (
                dim
                * math.log(self.original_max_position_embeddings / (num_rotations * 2 * math.pi))
                / (2 * math.log(self.rope_theta))
            )

        low, high = find_correction_dim(self.beta_fast), find_correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        steps = torch.arange(dim // 2, dtype=torch.float32, device=pos_freqs.device)
        ramp = ((steps - low) / width).clamp(0, 1)
        unscaled = 1 - ramp
        return 1.0 / (self.factor * pos_freqs) * (1 - unscaled) + 1.0 / pos_freqs * unscaled

    def _dynamic(self, exponents: Tensor, dim: int, positions_BT: Tensor) -> Tensor:
        lengths = _row_lengths(positions_BT).clamp(min=self.original_max_position_embeddings)
        growth = (self.factor * lengths / self.original_max_position_embeddings) - (self.factor - 1)
        scaled = 1.0 / ((self.rope_theta * growth ** (dim / (dim - 2))) ** exponents)
        return torch.where(lengths > self.original_max_position_embeddings, scaled, 1.0 / self.rope_theta**exponents)


@cache
def _fixed_inv_freq(rope: Rope, dim: int, device: torch.device) -> Tensor:
    """[E/2], for the kinds that do not depend on the length of the row."""
    pos_freqs = rope.rope_theta ** _exponents(dim, device)
    if rope.rope_type == "linear":
        return 1.0 / pos_freqs / rope.factor
    if rope.rope_type == "llama3":
        return rope._llama3(1.0 / pos_freqs)
    if rope.rope_type == "yarn":
        return rope._yarn(pos_freqs, dim)
    return 1.0 / pos_freqs


def _exponents(dim: int, device: torch.device) -> Tensor:
    # Nothing is copied from the host: the host would wait for the device.
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim


@cache
def _to_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def rotary_cos_sin(rope: Rope, head_dim: int, positions_BT: Tensor, dtype: torch.dtype) -> CosSin:
    """cos and sin for a batch of positions, computed in fp32 and returned in `dtype`."""
    angles = positions_BT[..., None].float() * rope.inv_freq(head_dim, positions_BT)

    def widen(half: Tensor) -> Tensor:
        """The two halves of a head rotate by the same angles."""
        half = (half if rope.attention_factor == 1.0 else half * rope.attention_factor).to(dtype)
        return torch.cat((half, half), dim=-1)[:, None]

    return widen(angles.cos()), widen(angles.sin())


def apply_rotary(x_BHTE: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotates queries or keys. Dimensions beyond the rotary ones pass through."""
    cos, sin = cos_sin
    dim = cos.shape[-1]
    x_rot, x_pass = (x_BHTE, None) if dim == x_BHTE.shape[-1] else (x_BHTE[..., :dim], x_BHTE[..., dim:])
    left, right = x_rot.chunk(2, dim=-1)
    rotated = (x_rot * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BHTE.dtype)
    return rotated if x_pass is None else torch.cat((rotated, x_pass), dim=-1)


def _row_lengths(positions_BT: Tensor) -> Tensor:
    """[B, 1, 1]"""
    return (positions_BT.amax(dim=1) + 1)[:, None, None]
