"""A step in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chairlift.base.step_batch import SampledTokens
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.engine.grammars import SamplePlace
from chairlift.engine.mask_work import Filling
from chairlift.executor.executor import PendingTokens

__all__ = ["Flight"]


@dataclasses.dataclass(slots=True)
class Flight:
    """A step that was launched and whose tokens have not been collected."""

    out: SchedulerOutput
    start: float
    """Time at which the step was scheduled."""
    places: Sequence[SamplePlace] = ()
    """Sample positions that need a mask, without those of withdrawn requests."""
    filling: Filling | None = None
    """The step's masks, if they are being filled while the model computes the step."""
    mask_seconds: float = 0.0
    """Seconds for which the step waited for masks after the model had computed it."""
    pending: PendingTokens | Exception = dataclasses.field(default_factory=lambda: RuntimeError("not launched"))
    """The step's tokens, or the error with which it failed."""
    known: SampledTokens | None = None

    def tokens(self) -> SampledTokens:
        """Wait for the sampled tokens. Raises the error of the step, if it failed."""
        if self.known is None:
            if isinstance(self.pending, Exception):
                raise self.pending
            self.known = self.pending.result()
        return self.known
