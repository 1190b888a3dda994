"""Four mixes of sequence lengths, from easy to hard to pack. Lengths are relative to the capacity of a pack."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

__all__ = ["MIXES"]


def _log_normal(rng: random.Random, capacity: int, median: float, sigma: float = 1.0) -> int:
    return min(capacity, max(1, round(capacity * median * math.exp(rng.gauss(0, sigma)))))


def chat(rng: random.Random, capacity: int) -> int:
    """Log-normal lengths with a mean of 0.14 of the capacity."""
    return _log_normal(rng, capacity, 0.089)


def docs(rng: random.Random, capacity: int) -> int:
    """Log-normal lengths, cut at the capacity, with a mean of 0.37 of it."""
    return _log_normal(rng, capacity, 0.245, sigma=1.2)


def rl(rng: random.Random, capacity: int) -> int:
    """Four fifths of the lengths are short; one fifth is longer than half the capacity, so that no two of these fit in
    one pack."""
    if rng.random() < 0.8:
        return _log_normal(rng, capacity, 0.0362)
    return round(capacity * rng.uniform(0.55, 0.95))


def hard(rng: random.Random, capacity: int) -> int:
    """Uniform lengths between 0.2 and 0.6 of the capacity: two to four sequences fit in a pack, and none is small
    enough to fill the rest."""
    return round(capacity * rng.uniform(0.2, 0.6))


MIXES: dict[str, Callable[[random.Random, int], int]] = {"chat": chat, "docs": docs, "rl": rl, "hard": hard}
