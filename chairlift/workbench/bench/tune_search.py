"""Search for the best settings by simulation: a coarse grid, then steps around the best of it.

Best is what gets most work through while promises are kept and few requests are preempted. Where promises are made and
requests come when they like, that is the highest rate of arrivals at which it still holds: the capacity.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from chairlift.workbench.bench.tune_lab import Lab
from chairlift.workbench.bench.tune_state import Figures, Setting

__all__ = ["GOODPUT", "KEEPING", "PREEMPTED", "Judge", "Score", "Space", "search", "shortfall"]

GOODPUT: Final = 0.99
"""Share of the requests whose promises must be kept."""
PREEMPTED: Final = 0.02
"""Share of the requests that may be preempted, at most."""
KEEPING: Final = 0.9
"""Least ratio of ended to arriving requests, late in a run. Below it the backlog grows."""
_MARGIN: Final = 0.75
"""Share of PREEMPTED that is allowed in a simulation: the rest is for what the simulator does not know."""
_BETTER: Final = 1.01
_STEP_DOWN, _STEP_UP, _MOST_DOWN, _BISECTIONS = 1.7, 1.12, 64.0, 3


class Score(NamedTuple):
    """Score of a setting; larger is better."""

    keeps: bool
    """Whether promises and the limit on preemptions hold."""
    value: float
    """Output tokens per second if they do; else how far from it, below 0."""
    rate: float | None = None
    """The highest rate of arrivals at which it holds, in requests per second; None where all come at once."""
    exact: bool = True
    """False: somewhat less than the best found before it, and not looked into further."""


def shortfall(figures: Figures) -> float:
    """0 when the promises and the limit on preemptions hold and the backlog does not grow, else how far from it."""
    late = 0.0 if figures.goodput is None else max(0.0, GOODPUT - figures.goodput)
    behind = max(0.0, KEEPING - figures.keeping)
    return late + behind + max(0.0, figures.preemption_rate - _MARGIN * PREEMPTED)


class Judge:
    """Scores settings by simulation."""

    def __init__(self, lab: Lab, count: int, *, by_rate: bool) -> None:
        """``count`` requests are simulated; ``by_rate``: the capacity counts, not all requests at once."""
        self._lab, self._count, self._by_rate = lab, count, by_rate
        self._scores: dict[Setting, Score] = {}
        self.best = Score(False, -math.inf)
        self._hopeless: float | None = None
        """A rate so low that settings which break promises there are not tried at lower ones."""

    def score(self, setting: Setting, *, exact: bool = False) -> Score:
        """``exact`` finds out the capacity even where it cannot be the highest."""
        known = self._scores.get(setting)
        if known is None or (exact and not known.exact):
            known = self._capacity(setting, exact) if self._by_rate else self._at_once(setting)
            self._scores[setting] = known
            self.best = max(self.best, known)
        return known

    @property
    def scores(self) -> dict[Setting, Score]:
        """Scores of all settings that were looked at."""
        return self._scores

    def _at_once(self, setting: Setting) -> Score:
        figures = self._lab.simulate(setting, None, self._count)
        missing = shortfall(figures)
        return Score(False, -missing) if missing else Score(True, figures.output_tokens_per_second)

    def _capacity(self, setting: Setting, exact: bool) -> Score:
        """The highest rate that holds, between what all at once get through and a small part of that."""

        def at(rate: float) -> Figures:
            return self._lab.simulate(setting, rate, self._lab.traffic.enough(rate, self._count))

        floor = self.best.rate if self.best.keeps and not exact else None
        if floor is not None:
            low, figures = floor * _BETTER, at(floor * _BETTER)
            if missing := shortfall(figures):
                return Score(True, self.best.value * max(0.0, 1 - missing) / _BETTER, floor, exact=False)
        if floor is None and self._hopeless is not None and (missing := shortfall(at(self._hopeless))):
            return Score(False, -missing)
        highest = self._lab.simulate(setting, None, self._count).requests_per_second
        if floor is not None and low >= highest:  # few requests may come faster than they get through, and all be kept
            return Score(True, self.best.value * highest / low, floor, exact=False)
        if floor is None:
            low = 0.8 * highest
            while missing := shortfall(figures := at(low)):
                low /= _STEP_DOWN
                if low < highest / _MOST_DOWN:
                    self._hopeless = low
                    return Score(False, -missing)
        high, best = low, figures
        while high < highest:
            high = min(high * _STEP_UP, highest)
            figures = at(high)
            if shortfall(figures):
                break
            low, best = high, figures
        for _ in range(_BISECTIONS if low < high else 0):
            middle = math.sqrt(low * high)
            figures = at(middle)
            if shortfall(figures):
                high = middle
            else:
                low, best = middle, figures
        return Score(True, best.output_tokens_per_second, low)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Allowed values of each setting; a fixed setting has one value."""

    rows: Sequence[int]
    """Values in ascending order; finer steps between them are tried too. So is the next field."""
    tokens: Sequence[int]
    watermarks: Sequence[float]
    prefill_modes: Sequence[str]
    preemption_modes: Sequence[str]

    def grid(self, start: Setting) -> Iterator[Setting]:
        """Rows and tokens, everything else as in ``start``."""
        for rows, tokens in itertools.product(self.rows, self.tokens):
            if tokens >= rows or len(self.tokens) == 1:
                yield dataclasses.replace(start, max_num_seqs=rows, max_num_batched_tokens=tokens)

    def everything(self) -> Iterator[Setting]:
        """The full grid."""
        parts = (self.rows, self.tokens, self.watermarks, self.prefill_modes, self.preemption_modes)
        for rows, tokens, watermark, prefill, preemption in itertools.product(*parts):
            yield Setting(
                batching="continuous",
                max_num_seqs=rows,
                max_num_batched_tokens=tokens,
                admission_watermark=watermark,
                prefill_mode=prefill,
                preemption_mode=preemption,
            )

    def neighbours(self, of: Setting, factor: float) -> Iterator[Setting]:
        """One thing changed: a mode, or a number by ``factor``."""
        changes: list[dict[str, Any]] = [
            {name: value}
            for name, values in (
                ("prefill_mode", self.prefill_modes),
                ("preemption_mode", self.preemption_modes),
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
    """Look for the best setting; False when time ran out before that was done. ``judge`` knows the scores.

    The grid of rows and tokens first; then, from its best places, the best step in any direction until none is better,
    with smaller and smaller steps.
    """
    judge.score(start, exact=True)
    for setting in space.grid(start):
        if out_of_time():
            return False
        judge.score(setting)
    ranked = sorted(judge.scores, key=lambda setting: judge.scores[setting], reverse=True)
    for place in ranked[:2]:
        for factor in (math.sqrt(2), 2**0.25, 2**0.125):
            while True:
                if out_of_time():
                    return False
                steps = list(space.neighbours(place, factor))
                for setting in steps:
                    if out_of_time():
                        return False
                    judge.score(setting)
                best = max(steps, key=lambda setting: judge.scores[setting], default=place)
                if judge.scores[best] <= judge.scores[place]:
                    break
                place = best
    return True
