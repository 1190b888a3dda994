"""Settings of recurrent layers, which can replace attention. The module does not import torch."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["CellConfig", "DeltaNetConfig", "Mamba2Config", "MixerConfig", "ShortConvConfig", "StoredPart"]

StoredPart = tuple[int, tuple[int, ...]]
"""(number of rows, row order) of one tensor in a checkpoint. The row order lists, for each of this package's rows, the
index of the row in the tensor. It is empty if the order is the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated convolution over the newest ``taps`` tokens, with a linear layer before and after it (LFM2)."""

    taps: int
    bias: bool = False
    """Whether the linear layers and the convolution have biases."""

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of each linear layer: a list of the layers before the recurrent state, and a list of the layers
        after it."""
        return [(3 * hidden, hidden)], [(hidden, hidden)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of weights outside of linear layers: (before and in the recurrent state, including the convolution;
        after the state)."""
        return hidden * self.taps + 4 * hidden * self.bias, hidden * self.bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 layer. Sizes have the names of :class:`~chairlift.kernels.mamba2.Mamba2Shape`."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    """Number of tokens that the convolution covers."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the linear layers have biases."""
    norm: bool = True
    """Whether the layer has a norm directly before or after its gate."""
    norm_groups: int = 1
    norm_first: bool = False
    time_limit: tuple[float, float] = (0.0, math.inf)
    factors: tuple[float, ...] = (1.0,) * 5
    """Factors for the results of the first linear layer, in this order: gate, x, B, C and time steps (Falcon-H1)."""
    out_bias: bool | None = None
    """Whether the second linear layer has a bias; None means :attr:`bias`."""

    @property
    def inner(self) -> int:
        """Width of the scan's result: number of heads times head size."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution, which covers x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of each linear layer: a list of the layers before the recurrent state, and a list of the layers
        after it."""
        return [(self.inner + self.channels + self.heads, hidden)], [(hidden, self.inner)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of weights outside of linear layers: (before and in the recurrent state, including the gated norm;
        after the state)."""
        conv = self.channels * (self.taps + self.conv_bias)
        before = (self.inner + self.channels + self.heads) * self.bias
        behind = self.bias if self.out_bias is None else self.out_bias
        return before + conv + 3 * self.heads + self.inner * self.norm, hidden * behind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """A gated delta net (Qwen3-Next). Each of ``value_heads`` heads has a state matrix [key_dim, value_dim]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens that the convolution of q, k and v covers."""
    by_key_head: bool
    """How a checkpoint stores the rows of q, k, v, the gate and the rates. True: ordered by key head, in shared tensors
    (Qwen3-Next). False: one after the other, or in separate tensors (Qwen3.5)."""

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the columns of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of each linear layer: a list of the layers before the recurrent state, and a list of the layers
        after it."""
        values = self.value_heads * self.value_dim
        return [(self.channels + values, hidden), (2 * self.value_heads, hidden)], [(hidden, values)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of weights outside of linear layers: (before and in the recurrent state, including the norm that
        follows it; after the state)."""
        return self.channels * self.taps + 2 * self.value_heads + self.value_dim, 0

    def stored(self, layer: str) -> list[StoredPart]:
        """Checkpoint tensors that fill ``layer`` (the last part of a module's name), in order. Empty if all of its
        tensors have equal numbers of rows."""
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
        """Row order for tensors that a checkpoint stores by key head: for our order, by kind and then by head, the
        index of each row in the checkpoint. ``sizes`` are the numbers of rows of each kind per key head."""
        starts = [sum(sizes[:kind]) for kind in range(len(sizes))]
        return tuple(
            head * sum(sizes) + start + row
            for start, size in zip(starts, sizes, strict=True)
            for head in range(self.key_heads)
            for row in range(size)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellConfig:
    """Settings of an LSTM or GRU layer, whose state has the model's hidden size."""

    kind: str = "lstm"
    """Type of the recurrent cell: ``lstm`` or ``gru``."""
    bias: bool = True
    """Whether the layer's two linear layers have biases."""

    @property
    def gates(self) -> int:
        """Number of gates of the cell. The result of each linear layer has this many vectors of the hidden size."""
        return {"lstm": 4, "gru": 3}[self.kind]

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of each linear layer: a list of the layers before the recurrent state, and a list of the layers
        after it."""
        return [(self.gates * hidden, hidden)], []

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Numbers of weights outside of linear layers: (before and in the recurrent state, including the hidden state's
        weight and the biases; after the state)."""
        return self.gates * hidden * (hidden + 2 * self.bias), 0


MixerConfig = ShortConvConfig | Mamba2Config | DeltaNetConfig | CellConfig
"""Settings of a recurrent mixer of any type."""
