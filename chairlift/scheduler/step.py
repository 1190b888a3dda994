"""A step while it is put together, and until its tokens come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.request import Request
from chairlift.scheduler.output import Chunk, SchedulerOutput

__all__ = ["Step"]


@dataclasses.dataclass(slots=True)
class Step:
    """``out`` is what the executor is told; the rest is what the scheduler must know when the step's tokens come."""

    out: SchedulerOutput
    carried: float
    """Part of a token that the policy side of the prompt budget was owed before this step."""
    runs_decodes: bool = False
    sampled: Sequence[Request | None] = ()
    appends: Sequence[Callable[[int], Any]] = ()
    chunks: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    verifies: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    """The last of ``chunks``, those with drafts."""
    passed: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests that did not fit when they were tried."""
    blocked: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests whose adapter the steps have no room for."""
    finals: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose last token this step samples."""
    epoch: int = 0
