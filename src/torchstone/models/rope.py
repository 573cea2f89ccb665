"""Rotary positions, in every stretching that Transformers knows, as data.

Tables are computed from the positions at every call, in fp32, rather than kept as a buffer: a buffer would be rounded
when the model is cast to bf16 and lost when it is built without memory, and the tables cost nothing next to one layer.

Two kinds (`dynamic`, `longrope`) turn by other angles once a row is longer than the model was first made for. The
length that counts is the row's own, never the batch's: otherwise a loss would depend on which rows lie together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True)
class Rope:
    """The base of the waves, and what `kind` changes in them."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    # Share of each head that turns; the rest is left as it is.
    share: float = 1.0
    # How much longer than the model was first made for (`original_positions`) a row may be.
    factor: float = 1.0
    original_positions: int = 8192
    # llama3: waves that turn more often than `fast` over the original length are kept, than `slow` stretched;
    # yarn: the same, counted in turns.
    slow: float = 1.0
    fast: float = 4.0
    # yarn: whether the ends of its ramp are whole dimensions.
    whole: bool = True
    # longrope: the stretch of each wave, for rows up to the original length and for longer ones.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # Cosines and sines are multiplied by this (yarn, longrope).
    magnitude: float = 1.0

    def turning(self, head_size: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_size * self.share)

    def depends_on_length(self, longest: int) -> bool:
        """Whether rows of up to `longest` tokens turn by angles that depend on the row's length."""
        return self.kind in ("dynamic", "longrope") and longest > self.original_positions

    def frequencies(self, head_size: int, positions_BT: Tensor) -> Tensor:
        """Angle per position, [E/2], or [B, 1, E/2] where it depends on the length of the row."""
        size, device = self.turning(head_size), positions_BT.device
        exponents = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
        waves = self.theta**exponents
        if self.kind == "linear":
            return 1.0 / waves / self.factor
        if self.kind == "llama3":
            return self._llama3(1.0 / waves)
        if self.kind == "yarn":
            return self._yarn(waves, size)
        if self.kind == "dynamic":
            return self._dynamic(exponents, size, positions_BT)
        if self.kind == "longrope":
            long = torch.tensor(self.long_factors, device=device)
            short = torch.tensor(self.short_factors, device=device)
            is_long = _lengths(positions_BT) > self.original_positions
            return 1.0 / (torch.where(is_long, long, short) * waves)
        return 1.0 / waves

    def _llama3(self, frequencies: Tensor) -> Tensor:
        turns = self.original_positions / (2 * math.pi / frequencies)
        smooth = (turns - self.slow) / (self.fast - self.slow)
        # Slow waves are stretched by the factor, fast ones kept, those between interpolated.
        blended = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        stretched = torch.where(smooth < 0, frequencies / self.factor, blended)
        return torch.where(smooth > 1, frequencies, stretched)

    def _yarn(self, waves: Tensor, size: int) -> Tensor:
        def dimension(turns: float) -> float:
            return size * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.fast), dimension(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1).to(waves.device)
        kept = 1 - ramp
        return 1.0 / (self.factor * waves) * (1 - kept) + 1.0 / waves * kept

    def _dynamic(self, exponents: Tensor, size: int, positions_BT: Tensor) -> Tensor:
        lengths = _lengths(positions_BT).clamp(min=self.original_positions)
        growth = (self.factor * lengths / self.original_positions) - (self.factor - 1)
        stretched = 1.0 / ((self.theta * growth ** (size / (size - 2))) ** exponents)
        return torch.where(lengths > self.original_positions, stretched, 1.0 / self.theta**exponents)


class Rotary:
    """Cosines and sines of one batch of positions, ready to turn queries and keys."""

    def __init__(self, rope: Rope, head_size: int, positions_BT: Tensor, dtype: torch.dtype) -> None:
        angles = positions_BT[..., None].float() * rope.frequencies(head_size, positions_BT)
        angles_B1TE = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles_B1TE.cos(), angles_B1TE.sin()
        self.tables = ((cos * rope.magnitude).to(dtype), (sin * rope.magnitude).to(dtype))


def turn(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [B, H, T, E], turned; dimensions beyond the tables' are left as they are."""
    cos, sin = tables
    size = cos.shape[-1]
    turning, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    left, right = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _lengths(positions_BT: Tensor) -> Tensor:
    """[B, 1, 1]"""
    return (positions_BT.amax(dim=1) + 1)[:, None, None]
