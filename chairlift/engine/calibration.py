"""How good forecasts of waiting times have been."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, deque
from typing import Final

from chairlift.metrics.stats import FORECAST_RATIOS, Histogram

__all__ = ["SHORTEST_WAIT", "Calibration"]

SHORTEST_WAIT: Final = 0.05
"""Seconds. What is forecast to start sooner is not judged: a step more or less would decide."""
_LEAST_SAMPLES: Final = 20
"""With fewer nothing is said."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    ratio: float
    """Actual over predicted."""
    error: float


class Calibration:
    """Waits as they were predicted when a request came, against what they became; the newest ``capacity`` of them.

    Requests that left before they started are not in it. ``errors`` gets every absolute error, in seconds.
    """

    def __init__(self, errors: Histogram | None = None, capacity: int = 512) -> None:
        self._errors = errors
        self._capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        """Another engine, other forecasts."""
        self._samples: deque[_Sample] = deque()
        self._ratios: list[float] = []
        """Ascending."""
        self._within: Counter[float] = Counter()
        self._error = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """Both in seconds. Predictions below :data:`SHORTEST_WAIT` are ignored."""
        if predicted < SHORTEST_WAIT:
            return
        sample = _Sample(actual / predicted, abs(actual - predicted))
        if len(self._samples) == self._capacity:
            oldest = self._samples.popleft()
            del self._ratios[bisect.bisect_left(self._ratios, oldest.ratio)]
            self._count(oldest, -1)
        self._samples.append(sample)
        bisect.insort(self._ratios, sample.ratio)
        self._count(sample, 1)
        if self._errors is not None:
            self._errors.observe(sample.error)

    def _count(self, sample: _Sample, times: int) -> None:
        self._error += times * sample.error
        for ratio in FORECAST_RATIOS:
            self._within[ratio] += times * (sample.ratio <= ratio)

    def quantile(self, share: float) -> float | None:
        """The actual over the predicted wait that this share of the requests, 0 to 1, stayed below; None until there
        are enough to tell."""
        count = len(self._ratios)
        return None if count < _LEAST_SAMPLES else self._ratios[min(count - 1, int(share * count))]

    def within(self, ratio: float) -> float | None:
        """The share of requests that waited no longer than ``ratio``, of FORECAST_RATIOS, times what was predicted."""
        count = len(self._samples)
        return None if count < _LEAST_SAMPLES else self._within[ratio] / count

    def mean_error(self) -> float | None:
        """Mean absolute error in seconds."""
        count = len(self._samples)
        return None if count < _LEAST_SAMPLES else max(0.0, self._error) / count
