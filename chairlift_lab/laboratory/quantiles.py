"""A distribution as a few quantiles, and pairs of numbers that are drawn with a given rank correlation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import ConfigError

__all__ = ["SHARES", "Quantiles", "rank_correlation", "related_shares"]

SHARES: Final = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Shares at which :meth:`Quantiles.of` keeps a value."""

_Values = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of numbers of at least 0: pairs of (share, value), both ascending, the shares from 0 to 1.

    Between two pairs, ``log(1 + value)`` is linear in the share, because lengths and times spread over decades.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        values = [value for _, value in self.points]
        fine = len(self.points) >= 2 and (shares[0], shares[-1]) == (0, 1) and min(values) >= 0
        if not fine or sorted(set(shares)) != shares or sorted(values) != values or not math.isfinite(values[-1]):
            raise ConfigError(
                "quantiles are [share, value] pairs with shares that rise from 0 to 1 and values of at least 0 that do"
                f" not fall; got {self.points!r:.120}"
            )

    @classmethod
    def of(cls, values: Sequence[float] | _Values) -> Quantiles:
        """Quantiles of at least one value, at :data:`SHARES`."""
        found = np.quantile(np.asarray(values, dtype=float), SHARES)
        return cls(tuple((share, round(float(value), 3)) for share, value in zip(SHARES, found, strict=True)))

    def at(self, shares: _Values | Sequence[float]) -> _Values:
        """Values at these shares, ``[n]``."""
        known, values = zip(*self.points, strict=True)
        drawn: _Values = np.expm1(np.interp(shares, known, np.log1p(values)))
        return drawn

    def scaled(self, factor: float) -> Quantiles:
        """The distribution of the values times ``factor``."""
        return Quantiles(tuple((share, value * factor) for share, value in self.points))

    @property
    def mean(self) -> float:
        """Mean of the distribution, by 10,000 evenly spaced shares."""
        return float(np.mean(self.at((np.arange(10_000) + 0.5) / 10_000)))


def related_shares(rng: np.random.Generator, count: int, correlation: float) -> tuple[_Values, _Values]:
    """Two lists of ``count`` shares from 0 to 1, each uniform, with this rank correlation (Spearman's, -1 to 1).

    The dependence is that of two normal variables (a Gaussian copula).
    """
    linear = 2 * math.sin(math.pi * correlation / 6)
    first = rng.standard_normal(count)
    second = linear * first + math.sqrt(max(0.0, 1 - linear * linear)) * rng.standard_normal(count)
    below = np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))), otypes=[float])
    return below(first), below(second)


def rank_correlation(one: Sequence[float] | _Values, other: Sequence[float] | _Values) -> float:
    """Rank correlation (Spearman's) of two lists of equal length. Equal values share their mean rank. 0.0 for fewer
    than three values, or if all values of a list are equal."""
    if len(one) < 3:
        return 0.0
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (one, other)]
    if any(np.ptp(each) == 0 for each in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: _Values) -> _Values:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean: _Values = (last - (count - 1) / 2)[place]
    return mean
