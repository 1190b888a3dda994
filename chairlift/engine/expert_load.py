"""Load of experts: how many tokens each expert computed lately, and how uneven that is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertLoad"]

_LEAST_SECONDS = 1.0
"""Least seconds between two readings of the counts."""
_SECONDS = 10.0
"""Time constant of the moving average, in seconds."""


class ExpertLoad:
    """Moving average of the tokens per layer and expert.

    ``counts`` [layers, experts] are the tokens so far. The kernels add to them; they are read once per second at most.
    """

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        self._counts = counts
        self._seen = counts.copy()
        self._recent = np.zeros(counts.shape)
        self._read_at = -math.inf
        self.number = 0
        """Number of readings so far that found new tokens."""
        self.imbalance: list[float] = []
        """For each layer of experts, tokens of its busiest expert divided by the mean of its experts, lately: 1.0 when
        all have as many, the number of experts when one has all. Empty before the first token."""

    def read(self, now: float) -> None:
        """Read the counts, unless that was done less than a second ago or nothing was computed since."""
        if now < self._read_at + _LEAST_SECONDS:
            return
        counts = self._counts.copy()
        new = counts - self._seen
        if not new.any():
            return
        self._recent = self._recent * math.exp(-max(0.0, now - self._read_at) / _SECONDS) + new
        self._seen, self._read_at = counts, now
        self.number += 1
        means = np.maximum(self._recent.mean(1), 1e-9)
        self.imbalance = [round(float(each), 3) for each in self._recent.max(1) / means]

    def loads(self) -> list[list[float]]:
        """For each layer of experts, the tokens of each expert lately divided by their mean in the layer."""
        means = np.maximum(self._recent.mean(1, keepdims=True), 1e-9)
        return [[float(each) for each in row] for row in (self._recent / means).round(2)]
