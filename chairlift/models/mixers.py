"""What a layer may have in place of attention, as data. Needs no torch."""

from __future__ import annotations

import dataclasses

__all__ = ["MixerConfig", "ShortConvConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated convolution over the newest ``taps`` tokens, between two products (LFM2)."""

    taps: int
    bias: bool = False
    """Whether the products and the convolution have biases."""

    def products(self, hidden: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(out, in) of the products before the state, and of those behind it."""
        return [(3 * hidden, hidden)], [(hidden, hidden)]

    def num_plain(self, hidden: int) -> tuple[int, int]:
        """Other weights: of products and the convolution before the state and in it, and behind it."""
        return hidden * self.taps + 4 * hidden * self.bias, hidden * self.bias


MixerConfig = ShortConvConfig
"""Any of them."""
