"""Layers that may replace attention, as data. Needs no torch."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Mamba2Config", "MixerConfig", "ShortConvConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated convolution over the newest ``taps`` tokens, between two products (LFM2)."""

    taps: int
    bias: bool = False
    """Whether the products and the convolution have biases."""

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of the products before the state, and of those after it."""
        return [(3 * hidden, hidden)], [(hidden, hidden)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of other weights: before and in the state (including the convolution), and after it."""
        return hidden * self.taps + 4 * hidden * self.bias, hidden * self.bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 layer; names of sizes are those of :class:`~chairlift.kernels.mamba2.Mamba2Shape`."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    """Tokens that the convolution spans."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the products have biases."""
    norm: bool = True
    """Whether a norm follows or precedes the gate."""
    norm_groups: int = 1
    norm_first: bool = False
    time_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        """Width of the result of the scan."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of the products before the state, and of those after it."""
        return [(self.inner + self.channels + self.heads, hidden)], [(hidden, self.inner)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of other weights: before and in the state (including the gated norm), and after it."""
        conv = self.channels * (self.taps + self.conv_bias)
        before = (self.inner + self.channels + self.heads) * self.bias
        return before + conv + 3 * self.heads + self.inner * self.norm, hidden * self.bias


MixerConfig = ShortConvConfig | Mamba2Config
"""Any of them."""
