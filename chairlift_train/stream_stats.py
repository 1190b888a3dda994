"""Statistics of how well a stream packs. They need bounded memory, and are equal on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Cut", "Delay", "StreamMeter", "StreamStats"]

_HORIZON = 4096
"""Approximate number of recent sequences over which mean lengths are compared."""
_EXACT = 64
"""Delays (numbers of packs or sequences) below this number are counted exactly. Longer delays are rounded down by at
most 1/32."""
_MAX_SOURCES = 64
"""Maximum number of sources that are counted by name. All other sources are counted together."""
_OTHERS = "(others)"
_BATCH = 512
"""Number of packs that are counted together, which is faster than counting each pack when it closes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delay:
    """Statistics of the delays from reading a sequence to closing its pack."""

    p50: int
    p99: int
    max: int


@dataclasses.dataclass(slots=True)
class Cut:
    """Counts of what ``overflow: truncate`` or ``split`` removed from one source."""

    sequences: int = 0
    """Number of sequences that lost tokens."""
    tokens: int = 0
    """Number of tokens that were left out."""
    targets: int = 0
    """Number of targets that were lost: targets among the left-out tokens, and at the first token of a later piece."""
    left_out: int = 0
    """Number of sequences that were left out completely, because no target remained in the part that fits."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamStats:
    """Statistics of a stream since its start, over all ranks."""

    sequences: int
    """Number of sequences in packs. Each piece of a split sequence is counted."""
    tokens: int
    """Number of tokens in packs, without the padding that ``align`` adds."""
    packs: int
    """Number of packs, without ``fillers``."""
    fillers: int
    steps: int
    """Number of optimiser steps that were planned."""
    waste: float
    """Fraction of the packs' room that is empty: 1 - tokens / (packs * capacity)."""
    excess: float
    """Number of packs divided by its lower bound, minus 1: an upper limit of the fraction of packs that a perfect
    packer would save."""
    delay_packs: Delay
    """Number of packs that were closed between reading a sequence and closing its pack."""
    delay_arrivals: Delay
    """Number of sequences that were read between reading a sequence and closing its pack."""
    cost_cv: float
    """Variation of the costs of packs: standard deviation divided by mean."""
    idle: float
    """Mean time that a rank waits for the slowest rank, as a fraction of its computing time, if the ranks synchronise
    after every pack."""
    idle_step: float
    """Waiting time of the ranks divided by the mean computing time, if ranks synchronise after every optimiser step."""
    truncated: int
    dropped: int
    split: int
    cut: Mapping[str, Cut]
    """Source -> counts of what truncation and splitting removed. The source is the field ``source`` of a sequence, or
    ``data`` if it has no such field."""
    length_drift: float
    """Mean length of recently packed sequences divided by the mean length of recently read sequences, minus 1. It shows
    whether packing prefers some lengths. The means cover the last few thousand sequences."""
    length_drift_max: float
    """Largest absolute value of ``length_drift`` so far."""


@dataclasses.dataclass
class StreamMeter:
    """Collects the statistics of a stream. Its fields are plain numbers, lists and mappings, and are its saved
    state."""

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
    """Source -> values of the fields of :class:`Cut`."""
    cost_sum: float = 0.0
    cost_squares: float = 0.0
    row_longest: float = 0.0
    row_mean: float = 0.0
    step_longest: float = 0.0
    step_mean: float = 0.0
    fresh: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    """[number of sequences, number of tokens] read since the last pack was closed."""
    recent_read: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """[number of sequences, number of tokens] read recently; the weights of older sequences fall exponentially."""
    recent_packed: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    drift_max: float = 0.0
    delay_packs: dict[int, int] = dataclasses.field(default_factory=dict)
    delay_arrivals: dict[int, int] = dataclasses.field(default_factory=dict)
    longest_packs: int = 0
    longest_arrivals: int = 0

    def __post_init__(self) -> None:
        self._packs: list[tuple[Sequence[int], int, float, list[int]]] = []  # closed packs that are not counted yet
        self._delays: tuple[list[int], list[int]] = [], []

    def on_read(self, length: int) -> None:
        fresh = self.fresh
        fresh[0] += 1
        fresh[1] += length

    def on_cut(self, source: str, truncates: bool, tokens: int, targets: int, *, is_left_out: bool) -> None:
        """Count a sequence that lost ``tokens`` tokens and ``targets`` targets. A split without lost tokens is not
        counted."""
        if not tokens and not truncates:
            return
        source = source if source in self.cut or len(self.cut) < _MAX_SOURCES else _OTHERS
        counts = self.cut.setdefault(source, [0, 0, 0, 0])
        for index, amount in enumerate((1, tokens, targets, int(is_left_out))):
            counts[index] += amount

    def on_pack(
        self, lengths: Sequence[int], packs: Iterable[int], arrivals: Iterable[int], cost: float, filled: int
    ) -> None:
        """Count a closed pack with sequences of these lengths.

        For each sequence of the pack, ``packs`` has the number of packs that were closed since the sequence was read,
        and ``arrivals`` the number of sequences that were read after it. ``filled`` is the number of padding tokens
        that ``align`` added.
        """
        self.packs += 1
        self.tokens -= filled
        self._packs.append((lengths, sum(lengths), cost, self.fresh))
        self.fresh = [0, 0]
        self._delays[0].extend(packs)
        self._delays[1].extend(arrivals)
        if len(self._packs) >= _BATCH:
            self._settle()

    def _settle(self) -> None:
        """Add the closed packs that are not yet included in the statistics."""
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
                # A pack has room for only one sequence that is longer than half of its capacity.
                self.bound_large += 2 * max(lengths) > self.capacity
            _fade(self.recent_read, *fresh)
            _fade(self.recent_packed, len(lengths), tokens)
            if self.sequences >= _HORIZON:
                self.drift_max = max(self.drift_max, abs(self._drift()))
        self._packs.clear()

    def on_step(self, rows: Sequence[Sequence[float]]) -> None:
        """Count an optimiser step. ``rows`` has, for each row of the step, the cost of each rank's pack."""
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
            state[name] = [list(pair) for pair in state[name].items()]  # JSON allows only text as keys
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
    total = sum(histogram.values())
    seen = 0
    marks = {0.5: 0, 0.99: 0}
    for delay in sorted(histogram):
        before = seen
        seen = seen + histogram[delay]
        for mark in marks:
            if before < mark * total <= seen:
                marks[mark] = delay
    return Delay(marks[0.5], marks[0.99], max(longest, max(histogram, default=0)))
