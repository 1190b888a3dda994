"""TensorRT-LLM's two capacity policies.

Source: the capacity schedulers of TensorRT-LLM. Claims: GUARANTEED_NO_EVICT never preempts a request that has started;
MAX_UTILIZATION fills the memory and may pause requests. Both leave a prompt whose next block another request computes
for later, as this scheduler does for every policy.
"""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.core.request import Request
from chairlift.core.scheduler.policy import FirstComeFirstServed
from chairlift.core.scheduler.view import View

__all__ = ["GuaranteedNoEvict", "MaxUtilization"]


class GuaranteedNoEvict(FirstComeFirstServed):
    """Order of arrival, while the longest possible answers of all running requests fit. The first request that does not
    fit ends the pass."""

    name = "guaranteed_no_evict"

    def __init__(self) -> None:
        self._refused_in = (-1, 0.0)

    def admits(self, request: Request, view: View) -> bool:
        this_pass = (view.step, view.now)
        most = sum(view.tokens_in_blocks(each.limit) for each in (*view.running, request))
        if self._refused_in != this_pass and most <= view.capacity_tokens:
            return True
        self._refused_in = this_pass
        return False


class MaxUtilization(FirstComeFirstServed):
    """Order of arrival, while the known tokens fit. The request that started last is paused."""

    name = "max_utilization"

    def yields(self, running: Request, needy: Request) -> bool:
        return self._started(running) >= self._started(needy)

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        return max(candidates, key=self._started, default=None)

    @staticmethod
    def _started(request: Request) -> tuple[int, int]:
        return (request.admitted_at_step, request.sequence)
