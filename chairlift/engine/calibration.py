"""Measures how accurate the forecasts of waiting times were."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, deque
from typing import Final

from chairlift.metrics.stats import FORECAST_RATIOS, Histogram

__all__ = ["SHORTEST_WAIT", "Calibration"]

SHORTEST_WAIT: Final = 0.05
"""Forecasts below this many seconds are not judged: their error is about the duration of one step."""
_MIN_SAMPLES: Final = 20
"""Minimum number of samples. With fewer samples the methods return None."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    ratio: float
    """Actual wait divided by predicted wait."""
    error: float


class Calibration:
    """Statistics of the newest ``capacity`` requests with a predicted and an actual wait.

    A request that left before it started is not counted. ``errors`` is a histogram that receives every absolute error,
    in seconds.
    """

    def __init__(self, errors: Histogram | None = None, capacity: int = 512) -> None:
        self._errors = errors
        self._capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        """Remove all samples, because a new engine makes different forecasts."""
        self._samples: deque[_Sample] = deque()
        self._ratios: list[float] = []
        """Actual / predicted wait of each sample, in ascending order."""
        self._within: Counter[float] = Counter()
        self._error = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """Add one request. Both waits are in seconds. A predicted wait below :data:`SHORTEST_WAIT` is ignored."""
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
        """Quantile of the ratio actual wait / predicted wait: a fraction ``share`` (0 to 1) of the requests had a lower
        ratio. None if there are too few samples."""
        count = len(self._ratios)
        return None if count < _MIN_SAMPLES else self._ratios[min(count - 1, int(share * count))]

    def within(self, ratio: float) -> float | None:
        """Fraction of the requests whose actual wait was at most ``ratio`` (one of FORECAST_RATIOS) times the predicted
        wait. None with too few samples."""
        count = len(self._samples)
        return None if count < _MIN_SAMPLES else self._within[ratio] / count

    def mean_error(self) -> float | None:
        """Mean absolute error in seconds. None with too few samples."""
        count = len(self._samples)
        return None if count < _MIN_SAMPLES else max(0.0, self._error) / count
