"""Statistics of comparisons: paired ratios over seeds, many tests at once, warm-up, and fairness.

- Each seed gives every policy the same requests (common random numbers), so a ratio is taken within a seed.
- The interval is that of Student's t over the logarithms of the ratios: seeds are independent, requests are not.
- Holm's method (1979) corrects for the many rows of a column.
- MSER (White, 1997) finds the end of the warm-up.
- Jain's index (1984) says how equal the service of tenants was. It rewards equal misery, so the largest slowdown is
  printed beside it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

__all__ = ["LEVEL_OF_SEEDS", "PairedRatio", "holm", "jain", "mser", "student_quantile", "student_share"]

LEVEL_OF_SEEDS = 0.95
"""Probability that an interval over seeds contains the true ratio."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairedRatio:
    """Ratio of two policies that served the same requests, seed by seed."""

    ratio: float
    """Geometric mean of the ratios of the seeds."""
    low: float
    high: float
    """Interval, by default of :data:`LEVEL_OF_SEEDS`. From 0 to infinity with one seed."""
    p_value: float
    """Probability of so large a difference, in either direction, if both are equal."""
    seeds: int

    @classmethod
    def of(
        cls, ours: Sequence[float | None], theirs: Sequence[float | None], level: float = LEVEL_OF_SEEDS
    ) -> PairedRatio | None:
        """Ratio of ``ours`` to ``theirs``, one value per seed. None if a value is missing or not above 0. ``level``:
        probability that the interval contains the true ratio."""
        pairs = list(zip(ours, theirs, strict=True))
        if not pairs or any(mine is None or other is None or mine <= 0 or other <= 0 for mine, other in pairs):
            return None
        logs = [math.log(mine / other) for mine, other in pairs if mine is not None and other is not None]
        mean = statistics.fmean(logs)
        if len(logs) == 1:
            return cls(math.exp(mean), 0.0, math.inf, 1.0, 1)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        if error == 0:
            return cls(math.exp(mean), math.exp(mean), math.exp(mean), 1.0 if mean == 0 else 0.0, len(logs))
        freedom = len(logs) - 1
        margin = student_quantile(0.5 + level / 2, freedom) * error
        p_value = 2 * (1 - student_share(abs(mean) / error, freedom))
        return cls(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin), p_value, len(logs))


def student_share(value: float, freedom: int) -> float:
    """Probability that Student's t with ``freedom`` degrees of freedom is at most ``value``.

    The closed forms for whole degrees of freedom are those of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for step in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (step - 1) / step
    if odd:
        between = 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    else:
        between = math.sin(angle) * total
    return 0.5 + between / 2


def student_quantile(share: float, freedom: int) -> float:
    """Value below which Student's t lies with a probability of ``share``, from 0.5 to 1, by bisection."""
    low, high = 0.0, 1.0
    while student_share(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return high


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p values of one column, corrected by Holm's method. A missing one stays missing and counts for nothing."""
    known = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (value, index) in enumerate(known):
        largest = max(largest, min(1.0, value * (len(known) - place)))
        corrected[index] = largest
    return corrected


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index of equality: 1 if all shares are equal, 1/n if one has all. None for fewer than two shares."""
    squares = sum(share * share for share in shares)
    if len(shares) < 2 or not squares:
        return None
    return sum(shares) ** 2 / (len(shares) * squares)


def mser(values: Sequence[float], batch: int = 5) -> int:
    """Number of leading values that belong to the warm-up (MSER-5): the cut that makes the mean of the rest most
    certain. At most half of the values are cut."""
    means = [statistics.fmean(values[at : at + batch]) for at in range(0, len(values) - batch + 1, batch)]
    best, cut = math.inf, 0
    for start in range(len(means) // 2 + 1):
        rest = means[start:]
        if len(rest) < 2:
            break
        error = statistics.pvariance(rest) / len(rest)
        if error < best:
            best, cut = error, start
    return cut * batch
