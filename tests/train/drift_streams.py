"""Streams of numbers with and without changes of their mean, and the evaluation of detectors on them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

__all__ = ["STREAMS", "Outcome", "Stream", "Updates", "evaluate"]


@dataclasses.dataclass(frozen=True)
class Stream:
    values: list[float]
    change: int | None
    """Index at which the mean begins to change; None if it does not change."""


class Updates(Protocol):
    def __call__(self, value: float) -> bool:
        """Process the next value. Returns whether a change is detected."""


def abrupt(seed: int, length: int = 2000, change: int = 1000) -> Stream:
    """A loss of 2.0 that becomes 2.3 at once, with standard deviation 0.25."""
    rng = np.random.default_rng(seed)
    values = rng.normal(2.0, 0.25, length)
    values[change:] += 0.3
    return Stream(values.tolist(), change)


def gradual(seed: int, length: int = 2000, change: int = 1000, over: int = 500) -> Stream:
    """A loss that rises linearly from 2.0 to 2.5 over ``over`` values, with standard deviation 0.25."""
    rng = np.random.default_rng(seed)
    rise = np.clip((np.arange(length) - change) / over, 0.0, 1.0) * 0.5
    return Stream((rng.normal(2.0, 0.25, length) + rise).tolist(), change)


def variance(seed: int, length: int = 2000) -> Stream:
    """A constant mean of 2.0 whose standard deviation goes from 0.15 to 0.45 and back. Every alarm is false."""
    rng = np.random.default_rng(seed)
    deviation = np.where((np.arange(length) // (length // 3)) % 2 == 1, 0.45, 0.15)
    return Stream((2.0 + rng.normal(0.0, 1.0, length) * deviation).tolist(), None)


def bernoulli(seed: int, length: int = 2000, change: int = 1000) -> Stream:
    """Errors with probability 0.2, then 0.5, as in the paper on ADWIN."""
    rng = np.random.default_rng(seed)
    odds = np.where(np.arange(length) < change, 0.2, 0.5)
    return Stream((rng.random(length) < odds).astype(float).tolist(), change)


STREAMS: dict[str, Callable[[int], Stream]] = {
    "abrupt": abrupt,
    "gradual": gradual,
    "variance": variance,
    "bernoulli": bernoulli,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    delay: float
    """Median number of values between the change and the first alarm after it. For a missed change, all values after
    the change are counted."""
    missed: float
    """Fraction of the changes that were not detected."""
    false_alarms: float
    """False alarms per 1,000 values that have no change before them."""


def evaluate(make: Callable[[], Updates], stream: Callable[[int], Stream], seeds: range) -> Outcome:
    """Run a new detector over the stream of each seed."""
    delays: list[int] = []
    missed = false = quiet = 0
    for seed in seeds:
        made = stream(seed)
        change = len(made.values) if made.change is None else made.change
        alarms = list(_alarms(make(), made.values))
        false += sum(alarm < change for alarm in alarms)
        quiet += change
        if made.change is not None:
            seen = [alarm - change for alarm in alarms if alarm >= change]
            missed += not seen
            delays.append(seen[0] if seen else len(made.values) - change)
    return Outcome(statistics.median(delays) if delays else 0.0, missed / len(seeds), 1000 * false / quiet)


def _alarms(update: Updates, values: list[float]) -> Iterator[int]:
    return (at for at, value in enumerate(values) if update(value))
