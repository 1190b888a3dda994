"""A step from when it is scheduled until its tokens arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.request import Request
from chairlift.scheduler.output import Chunk, SchedulerOutput

__all__ = ["Step"]


@dataclasses.dataclass(slots=True)
class Step:
    """``out`` goes to the executor. The other fields are for the scheduler, when the step's tokens arrive."""

    out: SchedulerOutput
    carried: float
    """Part of a token that the policy side of the prompt budget was owed before this step."""
    runs_decodes: bool = False
    sampled: Sequence[Request | None] = ()
    appends: Sequence[Callable[[int], Any]] = ()
    chunks: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    verifies: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    """Chunks with drafts. They are the last ones in ``chunks``."""
    passed: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests that did not fit when they were tried."""
    blocked: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests whose adapter the steps have no room for."""
    finals: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose last token this step samples."""
    epoch: int = 0
