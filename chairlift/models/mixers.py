"""Layers that may replace attention, as data. Needs no torch."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["DeltaNetConfig", "LSTMConfig", "Mamba2Config", "MixerConfig", "ShortConvConfig", "StoredPart"]

StoredPart = tuple[int, tuple[int, ...]]
"""Rows of one tensor of a checkpoint, and for each row of a layer here its row in that tensor (empty: the same)."""


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
    factors: tuple[float, ...] = (1.0,) * 5
    """Factors of the first product's results: gate, x, B, C and time steps (Falcon-H1)."""
    out_bias: bool | None = None
    """Whether the second product has a bias, if it differs from :attr:`bias`."""

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
        behind = self.bias if self.out_bias is None else self.out_bias
        return before + conv + 3 * self.heads + self.inner * self.norm, hidden * behind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """A gated delta net (Qwen3-Next): a memory [key_dim, value_dim] in each of ``value_heads`` heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution of q, k and v spans."""
    by_key_head: bool
    """Whether a checkpoint stores the rows of q, k, v and the gate head by head of keys, and so those of the rates
    (Qwen3-Next), or a tensor for each (Qwen3.5)."""

    @property
    def channels(self) -> int:
        """Columns of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of the products before the state, and of those after it."""
        values = self.value_heads * self.value_dim
        return [(self.channels + values, hidden), (2 * self.value_heads, hidden)], [(hidden, values)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of other weights: before and in the state (including the norm behind it), and after it."""
        return self.channels * self.taps + 2 * self.value_heads + self.value_dim, 0

    def stored(self, layer: str) -> list[StoredPart]:
        """Tensors that fill ``layer``, the last name of a module, in order; empty: they have equally many rows."""
        values = self.value_heads * self.value_dim
        if layer == "in_proj":
            if not self.by_key_head:
                return [(self.channels, ()), (values, ())]
            each = values // self.key_heads
            return [(self.channels + values, self._by_head((self.key_dim, self.key_dim, each, each)))]
        if layer == "rates_proj" and self.by_key_head:
            each = self.value_heads // self.key_heads
            return [(2 * self.value_heads, self._by_head((each, each)))]
        return []

    def _by_head(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of each kind for all heads of keys, where a checkpoint has those of all kinds (of ``sizes``) by head."""
        starts = [sum(sizes[:kind]) for kind in range(len(sizes))]
        return tuple(
            head * sum(sizes) + start + row
            for start, size in zip(starts, sizes, strict=True)
            for head in range(self.key_heads)
            for row in range(size)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LSTMConfig:
    """An LSTM of the model's width."""

    bias: bool = True
    """Whether both products have a bias."""

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of the products before the state, and of those after it."""
        return [(4 * hidden, hidden)], []

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of other weights: before and in the state (the product of hidden states, and biases), and after
        it."""
        return 4 * hidden * (hidden + 2 * self.bias), 0


MixerConfig = ShortConvConfig | Mamba2Config | DeltaNetConfig | LSTMConfig
"""Any of them."""
