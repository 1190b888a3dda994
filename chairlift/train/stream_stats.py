"""Figures of how well a stream packs, in bounded memory and the same on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Cut", "Delay", "StreamMeter", "StreamStats"]

_HORIZON = 4096
"""Number of sequences over which mean lengths are compared."""
_EXACT = 64
"""Delays below this are counted exactly, longer ones to within 1/32."""
_MOST_SOURCES = 64
"""Number of sources that are counted by name; all others count as one."""
_OTHERS = "(others)"
_TOGETHER = 512
"""Number of packs whose figures are added together, because that is faster than one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delay:
    """Delay of sequences until their pack was closed."""

    p50: int
    p99: int
    max: int


@dataclasses.dataclass(slots=True)
class Cut:
    """Loss of one source to ``overflow: truncate`` and ``split``."""

    sequences: int = 0
    """Sequences of which something was left out."""
    tokens: int = 0
    """Tokens that were left out."""
    targets: int = 0
    """Number of those tokens, and of first tokens of pieces, that would have been targets."""
    left_out: int = 0
    """Sequences of which nothing was learnt, because no target remained in what fits."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamStats:
    """Figures of a stream so far, over all ranks."""

    sequences: int
    """Sequences in packs. Each piece of a split sequence counts."""
    tokens: int
    """Tokens in packs, without those that ``align`` adds."""
    packs: int
    """Packs without ``fillers``."""
    fillers: int
    steps: int
    """Optimiser steps closed."""
    waste: float
    """1 - tokens / (packs * capacity)."""
    excess: float
    """Packs / lower bound - 1: what a perfect packer of the same sequences could have saved, at most."""
    delay_packs: Delay
    """Packs closed between a sequence's arrival and its own."""
    delay_arrivals: Delay
    """Sequences that arrived between a sequence's arrival and its pack."""
    cost_cv: float
    """Standard deviation of the packs' cost divided by its mean."""
    idle: float
    """Share of the mean time that ranks wait when they synchronise after every pack."""
    idle_step: float
    """Share of the mean time that ranks wait when they synchronise after every optimiser step."""
    truncated: int
    dropped: int
    split: int
    cut: Mapping[str, Cut]
    """Loss to truncation and splitting, by source: the field ``source`` of a sequence, ``data`` where it has none."""
    length_drift: float
    """Mean length of the last few thousand packed sequences over that of those read, - 1: packing picks by length."""
    length_drift_max: float
    """Largest absolute value of ``length_drift`` so far."""


@dataclasses.dataclass
class StreamMeter:
    """Collects a stream's figures. All fields are plain numbers, lists and mappings, so they are its state."""

    capacity: int
    sequences: int = 0
    tokens: int = 0
    packs: int = 0
    own_packs: int = 0
    room: int = 0
    bound_tokens: int = 0
    bound_large: int = 0
    fillers: int = 0
    steps: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    cut: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Fields of :class:`Cut`, by source."""
    cost_sum: float = 0.0
    cost_squares: float = 0.0
    row_longest: float = 0.0
    row_mean: float = 0.0
    step_longest: float = 0.0
    step_mean: float = 0.0
    fresh: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    """Sequences and tokens read since the last pack."""
    recent_read: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Sequences and tokens read recently, with exponentially falling weight."""
    recent_packed: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    drift_max: float = 0.0
    delay_packs: dict[int, int] = dataclasses.field(default_factory=dict)
    delay_arrivals: dict[int, int] = dataclasses.field(default_factory=dict)
    longest_packs: int = 0
    longest_arrivals: int = 0

    def __post_init__(self) -> None:
        self._packs: list[tuple[Sequence[int], int, float, list[int]]] = []  # closed, but not in the figures yet
        self._delays: tuple[list[int], list[int]] = [], []

    def on_read(self, length: int) -> None:
        fresh = self.fresh
        fresh[0] += 1
        fresh[1] += length

    def on_cut(self, source: str, truncates: bool, tokens: int, targets: int, *, is_left_out: bool) -> None:
        """Count a sequence that lost so many tokens and targets. A split that left no piece out is not counted."""
        if not tokens and not truncates:
            return
        source = source if source in self.cut or len(self.cut) < _MOST_SOURCES else _OTHERS
        counts = self.cut.setdefault(source, [0, 0, 0, 0])
        for place, amount in enumerate((1, tokens, targets, int(is_left_out))):
            counts[place] += amount

    def on_pack(
        self, lengths: Sequence[int], packs: Iterable[int], arrivals: Iterable[int], cost: float, filled: int
    ) -> None:
        """``packs`` and ``arrivals`` have for each sequence how many of them there were since it came; ``filled`` of
        the tokens are what ``align`` filled up.
        """
        self.packs += 1
        self.tokens -= filled
        self._packs.append((lengths, sum(lengths), cost, self.fresh))
        self.fresh = [0, 0]
        self._delays[0].extend(packs)
        self._delays[1].extend(arrivals)
        if len(self._packs) >= _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        """Bring the figures up to date with the packs that have closed."""
        self.longest_packs = max(self.longest_packs, max(self._delays[0], default=0))
        self.longest_arrivals = max(self.longest_arrivals, max(self._delays[1], default=0))
        for counts, delays in zip((self.delay_packs, self.delay_arrivals), self._delays, strict=True):
            for delay, count in Counter(delays).items():
                shift = delay.bit_length() - 6 if delay >= _EXACT else 0
                rounded = delay >> shift << shift
                counts[rounded] = counts.get(rounded, 0) + count
            delays.clear()
        for lengths, tokens, cost, fresh in self._packs:
            self.sequences += len(lengths)
            self.tokens += tokens
            self.cost_sum += cost
            self.cost_squares += cost * cost
            if tokens > self.capacity:
                self.own_packs += 1
                self.room += tokens
            else:
                self.room += self.capacity
                self.bound_tokens += tokens
                # A pack holds at most one such sequence.
                self.bound_large += 2 * max(lengths) > self.capacity
            _fade(self.recent_read, *fresh)
            _fade(self.recent_packed, len(lengths), tokens)
            if self.sequences >= _HORIZON:
                self.drift_max = max(self.drift_max, abs(self._drift()))
        self._packs.clear()

    def on_step(self, rows: Sequence[Sequence[float]]) -> None:
        """``rows`` has the cost of each rank's pack, for each row of the step."""
        ranks = len(rows[0])
        self.steps += 1
        for row in rows:
            self.row_longest += max(row)
            self.row_mean += sum(row) / ranks
        sums = [sum(column) for column in zip(*rows, strict=True)]
        self.step_longest += max(sums)
        self.step_mean += sum(sums) / ranks

    def snapshot(self) -> StreamStats:
        self._settle()
        bound = max(-(-self.bound_tokens // self.capacity), self.bound_large) + self.own_packs
        mean = self.cost_sum / self.packs if self.packs else 0.0
        variance = max(0.0, self.cost_squares / self.packs - mean * mean) if self.packs else 0.0
        return StreamStats(
            sequences=self.sequences,
            tokens=self.tokens,
            packs=self.packs,
            fillers=self.fillers,
            steps=self.steps,
            waste=1 - self.tokens / self.room if self.room else 0.0,
            excess=self.packs / bound - 1 if bound else 0.0,
            delay_packs=_delay(self.delay_packs, self.longest_packs),
            delay_arrivals=_delay(self.delay_arrivals, self.longest_arrivals),
            cost_cv=math.sqrt(variance) / mean if mean else 0.0,
            idle=self.row_longest / self.row_mean - 1 if self.row_mean else 0.0,
            idle_step=self.step_longest / self.step_mean - 1 if self.step_mean else 0.0,
            truncated=self.truncated,
            dropped=self.dropped,
            split=self.split,
            cut={source: Cut(*counts) for source, counts in self.cut.items()},
            length_drift=self._drift(),
            length_drift_max=self.drift_max,
        )

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("delay_packs", "delay_arrivals"):
            state[name] = [list(pair) for pair in state[name].items()]  # JSON has no integer keys
        for name in ("fresh", "recent_read", "recent_packed"):
            state[name] = list(state[name])
        state["cut"] = {source: list(counts) for source, counts in state["cut"].items()}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StreamMeter:
        meter = cls(**state)
        for name in ("delay_packs", "delay_arrivals"):
            setattr(meter, name, {int(delay): int(count) for delay, count in state[name]})
        for name in ("fresh", "recent_read", "recent_packed"):
            setattr(meter, name, list(state[name]))
        meter.cut = {source: list(counts) for source, counts in meter.cut.items()}
        return meter

    def _drift(self) -> float:
        if not (self.recent_read[1] and self.recent_packed[0]):
            return 0.0
        return self.recent_packed[1] / self.recent_packed[0] * self.recent_read[0] / self.recent_read[1] - 1


def _fade(recent: list[float], sequences: int, tokens: int) -> None:
    keep = max(0.0, 1 - sequences / _HORIZON)
    recent[0] = recent[0] * keep + sequences
    recent[1] = recent[1] * keep + tokens


def _delay(histogram: Mapping[int, int], longest: int) -> Delay:
    total, seen, marks = sum(histogram.values()), 0, {0.5: 0, 0.99: 0}
    for delay in sorted(histogram):
        before, seen = seen, seen + histogram[delay]
        for mark in marks:
            if before < mark * total <= seen:
                marks[mark] = delay
    return Delay(marks[0.5], marks[0.99], max(longest, max(histogram, default=0)))
