"""Turns repeated runs into a claim: median, interval and sentence. Every command that compares runs uses this module.

A claim needs at least :data:`MIN_ROUNDS` runs of at least :data:`MIN_SECONDS` each. Intervals are those between two
order statistics, which assume nothing about the distribution of the noise: the median of the noise lies outside of the
interval with a probability of at most ``1 - LEVEL``. So one slow run moves no median, and a drift of the machine
cancels in the ratio of two runs of the same round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Final

__all__ = [
    *("LEVEL", "MIN_ROUNDS", "MIN_SECONDS", "RatioEstimate", "Ratio", "RunSample"),
    *("disturbance", "share_interval", "times"),
]

LEVEL: Final = 0.95
"""Probability that an interval contains the true median, at least."""
MIN_ROUNDS: Final = 6
"""Smallest number of rounds from which an interval of :data:`LEVEL` exists: with five, all noise has one sign in 6 of
100 cases."""
MIN_SECONDS: Final = 1.0
"""Minimum duration of a run from which something is claimed."""
_Z: Final = 1.96


@dataclasses.dataclass(frozen=True, slots=True)
class RunSample:
    """Result of one run."""

    value: float
    """A rate or a time, above 0."""
    seconds: float = math.inf
    """Duration of the run."""
    busy: float = 0.0
    """Share of this machine's processors that other programs used during the run."""

    @property
    def free(self) -> float:
        """Share of the processors that other programs left, at least 0.01."""
        return max(0.01, 1 - self.busy)


@dataclasses.dataclass(frozen=True, slots=True)
class RatioEstimate:
    """Median and interval of a rate that was measured several times on one machine."""

    median: float
    low: float
    high: float
    """``low`` and ``high`` are the interval of :data:`LEVEL`, or the smallest and the largest value if ``doubt``. Both
    are widened by the share of the machine that other programs used."""
    rounds: int
    doubt: str = ""
    """Reason why nothing may be claimed. Empty if something may be claimed."""

    @classmethod
    def of(cls, samples: Sequence[RunSample]) -> RatioEstimate:
        """Estimate from the runs of one setting, at least one."""
        free = min(each.free for each in samples)
        values = sorted(each.value for each in samples)
        skipped = _skipped(len(values), 1)
        low, high = values[skipped or 0], values[-1 - (skipped or 0)]
        doubt = _doubt(len(samples), MIN_ROUNDS, samples)
        return cls(statistics.median(values), low * free, high / free, len(values), doubt)


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two sides that ran in the same rounds."""

    ratio: float
    """Median over the rounds of the ratio within a round."""
    low: float
    high: float
    """``low`` and ``high`` are the interval of :data:`LEVEL`, or the range of the rounds if ``doubt``. A round in which
    other programs used different shares of the machine counts with the whole range that this explains."""
    rounds: int
    doubt: str = ""
    """Reason why nothing may be claimed. Empty if something may be claimed."""
    per_round: tuple[float, ...] = ()

    @classmethod
    def of(cls, ours: Sequence[RunSample], theirs: Sequence[RunSample], comparisons: int = 1) -> Ratio:
        """Ratio of ``ours`` to ``theirs``, one sample per round, at least one round.

        ``comparisons``: number of settings from which our side was chosen by these same runs. The interval is so wide
        that the best of so many equal settings is called better with a probability of at most ``1 - LEVEL``.
        """
        pairs = list(zip(ours, theirs, strict=True))
        logs = [math.log(mine.value / other.value) for mine, other in pairs]
        margins = [abs(math.log(mine.free / other.free)) for mine, other in pairs]
        skipped = _skipped(len(pairs), comparisons)
        lows = sorted(log - margin for log, margin in zip(logs, margins, strict=True))
        highs = sorted(log + margin for log, margin in zip(logs, margins, strict=True))
        needed = next(count for count in range(MIN_ROUNDS, 64) if _skipped(count, comparisons) is not None)
        return cls(
            math.exp(statistics.median(logs)),
            math.exp(lows[skipped or 0]),
            math.exp(highs[-1 - (skipped or 0)]),
            len(pairs),
            _doubt(len(pairs), needed, [*ours, *theirs]),
            tuple(math.exp(log) for log in logs),
        )

    @property
    def larger(self) -> bool:
        """Whether our value is larger, which may be claimed."""
        return not self.doubt and self.low > 1

    @property
    def smaller(self) -> bool:
        """Whether our value is smaller, which may be claimed."""
        return not self.doubt and self.high < 1

    def sentence(self, ours: str, what: str, theirs: str) -> str:
        """Sentence that compares two sides, such as ``B has a higher throughput than A: 1.25 times (1.20 to 1.31).``"""
        if self.doubt:
            text = f"{ours} has {times(self)} the {what} of {theirs}, which is no claim: {self.doubt}."
        elif self.larger or self.smaller:
            text = f"{ours} has a {'higher' if self.larger else 'lower'} {what} than {theirs}: {times(self)}."
        else:
            text = f"{ours} and {theirs} have the same {what} within the noise: {times(self)}."
        return text[0].upper() + text[1:]


def times(ratio: Ratio) -> str:
    """Text such as ``1.25 times (1.20 to 1.31 in 8 rounds)``."""
    text = f"{ratio.ratio:.2f} times" if ratio.ratio < 2 else f"{ratio.ratio:.1f} times"
    return f"{text} ({ratio.low:.2f} to {ratio.high:.2f} in {ratio.rounds} rounds)" if ratio.rounds > 1 else text


def disturbance(busy: Sequence[float]) -> str:
    """Sentence about the share of the machine that other programs used, for each run."""
    if not busy:
        return ""
    middle = statistics.median(busy)
    most = max(busy)
    if most < 0.005:
        return "No other program used this machine during the runs."
    return f"Other programs used {middle:.0%} of this machine during the runs, at most {most:.0%}."


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Interval (Wilson's, of :data:`LEVEL`) of the true share, if ``count`` of ``total`` requests were counted."""
    if not total:
        return 0.0, 1.0
    share = count / total
    square = _Z**2 / total
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def _skipped(rounds: int, comparisons: int) -> int | None:
    """Number of smallest and of largest values that lie outside of the interval. None: there are too few rounds."""
    limit = (1 - LEVEL) / comparisons
    tail = 0.0
    found = None
    for outside in range(rounds):
        tail += 2 * math.comb(rounds, outside) / 2**rounds
        if tail > limit:
            return found
        found = outside
    return found


def _doubt(rounds: int, needed: int, samples: Sequence[RunSample]) -> str:
    """Reason why nothing may be claimed. Empty if something may be claimed."""
    if rounds < needed:
        return f"{needed} rounds are needed, and there {'was 1' if rounds == 1 else f'were {rounds}'}"
    shortest = min(each.seconds for each in samples)
    if shortest < MIN_SECONDS:
        return f"a run must last {MIN_SECONDS:g} s, and the shortest took {shortest:.2g} s"
    return ""
