"""Measures how accurate the forecasts of waiting times have been."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, deque
from typing import Final

from chairlift.metrics.stats import FORECAST_RATIOS, Histogram

__all__ = ["SHORTEST_WAIT", "Calibration"]

SHORTEST_WAIT: Final = 0.05
"""Seconds. Shorter forecasts are not judged: one step more or less would decide the result."""
_LEAST_SAMPLES: Final = 20
"""With fewer samples there is no answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    ratio: float
    """Actual wait divided by the predicted wait."""
    error: float


class Calibration:
    """The newest ``capacity`` pairs of predicted and actual wait.

    Requests that left before they started are not counted. ``errors`` receives every absolute error, in seconds.
    """

    def __init__(self, errors: Histogram | None = None, capacity: int = 512) -> None:
        self._errors = errors
        self._capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        """Forget everything: a new engine makes other forecasts."""
        self._samples: deque[_Sample] = deque()
        self._ratios: list[float] = []
        """Ratios in ascending order."""
        self._within: Counter[float] = Counter()
        self._error = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """Add one request; both waits in seconds. Predictions below :data:`SHORTEST_WAIT` are ignored."""
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
        """Ratio of actual to predicted wait that this share (0 to 1) of the requests stayed below; None with too few
        samples."""
        count = len(self._ratios)
        return None if count < _LEAST_SAMPLES else self._ratios[min(count - 1, int(share * count))]

    def within(self, ratio: float) -> float | None:
        """Share of the requests that waited at most ``ratio`` (one of FORECAST_RATIOS) times the predicted wait."""
        count = len(self._samples)
        return None if count < _LEAST_SAMPLES else self._within[ratio] / count

    def mean_error(self) -> float | None:
        """Mean absolute error in seconds."""
        count = len(self._samples)
        return None if count < _LEAST_SAMPLES else max(0.0, self._error) / count
