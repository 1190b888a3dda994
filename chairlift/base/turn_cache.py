"""Names for what a pause left of a conversation's cache. The scheduler, metrics and answers use the same ones."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

__all__ = ["BLOCK_TIME_BOUNDS", "ResumedTurn", "TurnCache"]

BLOCK_TIME_BOUNDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Inclusive upper bounds of the buckets for times of cached blocks, in seconds. One further bucket has the greater
times."""


class TurnCache(enum.StrEnum):
    """What the next turn of a conversation found in the prefix cache of the turn before it, which called tools."""

    KEPT = "kept"
    """All of it."""
    NO_LEASE = "no_lease"
    """A part was evicted, and had no lease: the rule of eviction gives none, or it did not pay."""
    EXPIRED = "expired"
    """A part was evicted after its lease had ended."""
    OVER_BUDGET = "over_budget"
    """A part was evicted. It lost its lease because too many blocks had leases."""
    DISPLACED = "displaced"
    """A part was evicted during its lease, because requests needed more blocks than had no lease."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResumedTurn:
    """The turn that a request continues, for the first request after a pause."""

    sequence_id: str
    """Id of the sequence of the earlier turn."""
    tools: tuple[str, ...]
    """Names of the tools that the earlier turn called."""
    gap: float
    """Seconds from the end of the earlier turn to the arrival of this one."""
    cache: TurnCache
