"""Load of experts: how many tokens each expert computed recently, and how uneven the load is."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["ExpertLoad"]

_MIN_SECONDS = 1.0
"""Minimum number of seconds between two readings of the counts."""
_SECONDS = 10.0
"""Time constant of the moving average of tokens per expert, in seconds."""


class ExpertLoad:
    """Moving average of the tokens per layer and expert.

    ``counts`` [layers, experts] are the numbers of tokens so far. The kernels increase them; this class reads them at
    most once per second.
    """

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        self._counts = counts
        self._seen = counts.copy()
        self._recent = np.zeros(counts.shape)
        self._read_at = -math.inf
        self.number = 0
        """Number of readings of the counts so far that found new tokens."""
        self.imbalance: list[float] = []
        """Per layer of experts: recent tokens of the busiest expert divided by the mean of all experts. 1.0 means that
        all have the same load; the number of experts means that one has the whole load. Empty before the first
        token."""

    def read(self, now: float) -> None:
        """Read the counts, unless less than a second has passed or no token was computed since the last reading."""
        if now < self._read_at + _MIN_SECONDS:
            return
        counts = self._counts.copy()
        new = counts - self._seen
        if not new.any():
            return
        self._recent = self._recent * math.exp(-max(0.0, now - self._read_at) / _SECONDS) + new
        self._seen = counts
        self._read_at = now
        self.number += 1
        means = np.maximum(self._recent.mean(1), 1e-9)
        self.imbalance = [round(float(each), 3) for each in self._recent.max(1) / means]

    def loads(self) -> list[list[float]]:
        """Per layer of experts: recent tokens of each expert divided by the mean of the layer."""
        means = np.maximum(self._recent.mean(1, keepdims=True), 1e-9)
        return [[float(each) for each in row] for row in (self._recent / means).round(2)]
