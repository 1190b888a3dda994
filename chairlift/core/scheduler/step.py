"""A step, from the time it is scheduled until its tokens arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.core.request import Request
from chairlift.core.scheduler.output import Chunk, SchedulerOutput

__all__ = ["ScheduledStep"]


@dataclasses.dataclass(slots=True)
class ScheduledStep:
    """A scheduled step. ``out`` goes to the executor; the scheduler uses the other fields when the step's tokens
    arrive."""

    out: SchedulerOutput
    carried: float
    """Rounding remainder :attr:`PromptShare.carried` as it was before this step."""
    runs_decodes: bool = False
    sampled: Sequence[Request | None] = ()
    appends: Sequence[Callable[[int], Any]] = ()
    chunks: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    verifies: list[tuple[Request, Chunk]] = dataclasses.field(default_factory=list)
    """(request, chunk) of each row with drafts. These pairs are the last entries of ``chunks``."""
    withdrawn: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose tokens of this step are dropped, because they were not ready when the step had been computed."""
    computed: Sequence[Request | None] = ()
    """:attr:`sampled` with the requests in ``withdrawn``, at their first sample positions; empty if there are none."""
    passed: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests that were tried in this step and did not fit."""
    finals: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose last token this step samples."""
    epoch: int = 0
