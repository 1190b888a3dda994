"""Rotary position embedding: the frequencies, and the cosines and sines of a step's positions."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from chairlift.kernels import ops
from chairlift.models.hf_config import RopeConfig

__all__ = ["RotaryEmbedding", "inverse_frequencies"]


class RotaryEmbedding(nn.Module):
    """``positions[T]`` -> cos and sin, each [T, 1, Dh/2], scaled by the attention factor (YaRN, LongRoPE; otherwise 1).

    If only ``rope.dim`` dimensions are rotated, the frequencies of all other dimensions are 0: these keep their values.

    The values are computed in each step, not looked up in a table. Computing takes microseconds, while a table for 128
    Ki positions would take 64 MiB. The frequencies are always float32, whatever the model's dtype.
    """

    def __init__(self, head_dim: int, rope: RopeConfig, max_position_embeddings: int) -> None:
        super().__init__()
        rotated = rope.dim or head_dim
        found, self.attention_factor = inverse_frequencies(rotated, rope, max_position_embeddings)
        frequencies = torch.nn.functional.pad(found, (0, (head_dim - rotated) // 2))
        self._frequencies: dict[torch.device, Tensor] = {frequencies.device: frequencies}
        with torch.device("cpu"):
            still = (0,) * ((head_dim - rotated) // 2)
            self._axes = torch.tensor(rope.axes + still) if rope.axes else None

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians by which each pair of dimensions is rotated per position, float32 [Dh/2]."""
        frequencies = self._frequencies.get(device)
        if frequencies is None:
            frequencies = next(iter(self._frequencies.values())).to(device)
            self._frequencies[device] = frequencies
        return frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> ops.Rotary:
        how: dict[str, Tensor] = {} if self._axes is None else {"axes": self._axes}
        return ops.rotary_table(positions, self.frequencies(positions.device), self.attention_factor, dtype, **how)


def inverse_frequencies(head_dim: int, rope: RopeConfig, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Return (radians per position of each pair of dimensions, float32 [head_dim / 2]; attention factor).

    ``dynamic`` (NTK-aware scaling) is static here: the base for the longest context, ``factor`` times
    ``max_position_embeddings``, is used at every length. transformers changes the base as a sequence grows, after keys
    in the cache were rotated with the old one.
    """
    with torch.device("cpu"):
        if rope.rope_type == "dynamic":
            stretch = rope.factor * rope.factor - (rope.factor - 1)
            rope = dataclasses.replace(rope, theta=rope.theta * stretch ** (head_dim / (head_dim - 2)))
        periods = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        plain = 1.0 / periods
        if rope.divisors:
            factor = rope.attention_factor if rope.rope_type == "longrope" else None
            return plain / torch.tensor(rope.divisors, dtype=torch.float32), factor or 1.0
        if rope.rope_type == "linear":
            return plain / rope.factor, 1.0
        if rope.rope_type == "llama3":
            return _llama3(plain, rope), 1.0
        if rope.rope_type == "yarn":
            return _yarn(periods, head_dim, rope), _yarn_attention_factor(rope)
        return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Frequencies of Llama 3.1: low frequencies are divided by ``factor``, high frequencies are unchanged, with a
    smooth transition between them."""
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    smooth = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    out = torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, plain, out)


def _yarn(periods: Tensor, head_dim: int, rope: RopeConfig) -> Tensor:
    """Frequencies of YaRN (Peng et al., 2023): high frequencies are unchanged, low frequencies are interpolated."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
