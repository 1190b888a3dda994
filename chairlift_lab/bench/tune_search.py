"""Searches for the best settings by simulation: first on a coarse grid, then in steps around its best points.

The best setting has the highest throughput among the settings that meet the latency targets ("promises") and preempt
few requests. If the traffic has latency targets and an open loop, settings are compared by capacity instead: the
highest rate of arrivals at which the targets are met.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from chairlift_lab.bench.tune_lab import Lab
from chairlift_lab.bench.tune_state import Setting, StoredFigures
from chairlift_lab.replay.served import KEEPING

__all__ = ["GOODPUT", "PREEMPTED", "Judge", "SettingScore", "Space", "search", "shortfall"]

GOODPUT: Final = 0.99
"""Minimum fraction of the requests that must meet their latency targets."""
PREEMPTED: Final = 0.02
"""Maximum fraction of the requests that may be preempted."""
_MARGIN: Final = 0.75
"""Fraction of PREEMPTED that is allowed in a simulation. The rest is a margin for the simulator's errors."""
_BETTER: Final = 1.01
_STEP_DOWN = 1.7
_STEP_UP = 1.12
_MOST_DOWN = 64.0
_BISECTIONS = 3


class SettingScore(NamedTuple):
    """Score of a setting. Larger scores are better."""

    keeps: bool
    """Whether the setting meets the latency targets and the limit on preemptions."""
    value: float
    """Output tokens per second if ``keeps``. Otherwise a negative number: how far the setting misses the targets."""
    rate: float | None = None
    """Highest rate of arrivals at which the setting meets its targets, in requests per second. None if all requests
    arrive at once."""
    exact: bool = True
    """False if the score is only an estimate: the setting is worse than the best setting, so it was not examined
    further."""


def shortfall(figures: StoredFigures) -> float:
    """Number that says how far a run misses its targets for latency, preemptions and growth of the backlog. 0 if it
    meets all targets."""
    late = 0.0 if figures.goodput is None else max(0.0, GOODPUT - figures.goodput)
    behind = max(0.0, KEEPING - figures.keeping)
    return late + behind + max(0.0, figures.preemption_rate - _MARGIN * PREEMPTED)


class Judge:
    """Computes the scores of engine settings by simulation, and remembers them."""

    def __init__(self, lab: Lab, count: int, *, by_rate: bool) -> None:
        """Simulate ``count`` requests per setting. ``by_rate``: compare by capacity, not with all requests at once."""
        self._lab = lab
        self._count = count
        self._by_rate = by_rate
        self._scores: dict[Setting, SettingScore] = {}
        self.best = SettingScore(False, -math.inf)
        self._hopeless: float | None = None
        """Lowest rate that was tried. A setting that misses its targets at this rate is not tried at lower rates."""

    def score(self, setting: Setting, *, exact: bool = False) -> SettingScore:
        """Score of a setting. ``exact``: determine its capacity even if it is lower than the best capacity."""
        known = self._scores.get(setting)
        if known is None or (exact and not known.exact):
            known = self._capacity(setting, exact) if self._by_rate else self._at_once(setting)
            self._scores[setting] = known
            self.best = max(self.best, known)
        return known

    @property
    def scores(self) -> dict[Setting, SettingScore]:
        """Setting -> score, for all settings that were simulated."""
        return self._scores

    def _at_once(self, setting: Setting) -> SettingScore:
        figures = self._lab.simulate(setting, None, self._count)
        missing = shortfall(figures)
        return SettingScore(False, -missing) if missing else SettingScore(True, figures.output_tokens_per_second)

    def _capacity(self, setting: Setting, exact: bool) -> SettingScore:
        """Find the highest rate that meets the targets, by steps and bisection.

        The search stays between the throughput with all requests at once and a small fraction of that throughput.
        """

        def at(rate: float) -> StoredFigures:
            return self._lab.simulate(setting, rate, self._lab.traffic.enough(rate, self._count))

        floor = self.best.rate if self.best.keeps and not exact else None
        if floor is not None:
            low = floor * _BETTER
            figures = at(floor * _BETTER)
            if missing := shortfall(figures):
                return SettingScore(True, self.best.value * max(0.0, 1 - missing) / _BETTER, floor, exact=False)
        if floor is None and self._hopeless is not None and (missing := shortfall(at(self._hopeless))):
            return SettingScore(False, -missing)
        highest = self._lab.simulate(setting, None, self._count).requests_per_second
        if floor is not None and low >= highest:  # a short run can meet its targets above the sustained throughput
            return SettingScore(True, self.best.value * highest / low, floor, exact=False)
        if floor is None:
            low = 0.8 * highest
            while missing := shortfall(figures := at(low)):
                low /= _STEP_DOWN
                if low < highest / _MOST_DOWN:
                    self._hopeless = low
                    return SettingScore(False, -missing)
        high = low
        best = figures
        while high < highest:
            high = min(high * _STEP_UP, highest)
            figures = at(high)
            if shortfall(figures):
                break
            low = high
            best = figures
        for _ in range(_BISECTIONS if low < high else 0):
            middle = math.sqrt(low * high)
            figures = at(middle)
            if shortfall(figures):
                high = middle
            else:
                low = middle
                best = figures
        return SettingScore(True, best.output_tokens_per_second, low)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values to try for each setting. A setting that must not change has one value."""

    rows: Sequence[int]
    """Values of max_num_seqs in ascending order. The search also tries values between them."""
    tokens: Sequence[int]
    """Values of max_num_batched_tokens in ascending order. The search also tries values between them."""
    watermarks: Sequence[float]
    prefill_modes: Sequence[str]
    preemption_modes: Sequence[str]
    evictions: Sequence[str] = ("auto",)

    def grid(self, start: Setting) -> Iterator[Setting]:
        """Settings with all combinations of rows and tokens, and everything else as in ``start``."""
        for rows, tokens in itertools.product(self.rows, self.tokens):
            if tokens >= rows or len(self.tokens) == 1:
                yield dataclasses.replace(start, max_num_seqs=rows, max_num_batched_tokens=tokens)

    def everything(self) -> Iterator[Setting]:
        """Settings with all combinations of all values."""
        parts = (self.rows, self.tokens, self.watermarks, self.prefill_modes, self.preemption_modes, self.evictions)
        for rows, tokens, watermark, prefill, preemption, eviction in itertools.product(*parts):
            yield Setting(
                batching="continuous",
                max_num_seqs=rows,
                max_num_batched_tokens=tokens,
                admission_watermark=watermark,
                prefill_mode=prefill,
                preemption_mode=preemption,
                cache_eviction=eviction,
            )

    def neighbours(self, of: Setting, factor: float) -> Iterator[Setting]:
        """Settings that differ from ``of`` in one field: another mode, or a number multiplied or divided by
        ``factor``."""
        changes: list[dict[str, Any]] = [
            {name: value}
            for name, values in (
                ("prefill_mode", self.prefill_modes),
                ("preemption_mode", self.preemption_modes),
                ("cache_eviction", self.evictions),
                ("admission_watermark", self.watermarks),
            )
            for value in values
        ]
        for name, values in (("max_num_seqs", self.rows), ("max_num_batched_tokens", self.tokens)):
            for other in (getattr(of, name) * factor, getattr(of, name) / factor):
                if len(values) > 1:
                    changes.append({name: max(values[0], min(values[-1], round(other)))})
        for change in changes:
            setting = dataclasses.replace(of, **change)
            if setting != of:
                yield setting


def search(space: Space, judge: Judge, start: Setting, out_of_time: Callable[[], bool]) -> bool:
    """Search for the best setting; ``judge`` collects the scores. Returns False if the time ran out before the end.

    All points of the grid of rows and tokens are tried. From each of the two best points, the search moves to the best
    neighbour until no neighbour is better, and repeats this with smaller steps.
    """
    judge.score(start, exact=True)
    for setting in space.grid(start):
        if out_of_time():
            return False
        judge.score(setting)
    ranked = sorted(judge.scores, key=lambda setting: judge.scores[setting], reverse=True)
    for current in ranked[:2]:
        for factor in (math.sqrt(2), 2**0.25, 2**0.125):
            while True:
                if out_of_time():
                    return False
                steps = list(space.neighbours(current, factor))
                for setting in steps:
                    if out_of_time():
                        return False
                    judge.score(setting)
                best = max(steps, key=lambda setting: judge.scores[setting], default=current)
                if judge.scores[best] <= judge.scores[current]:
                    break
                current = best
    return True
