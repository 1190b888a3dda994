"""Who may be preempted, and how often it happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from chairlift.request import Request
from chairlift.scheduler.policy import Policy

__all__ = ["PreemptionRate", "candidates", "is_pinned"]


def is_pinned(request: Request, max_preemptions: int) -> bool:
    """A request preempted this often is never preempted again, and joins only with all blocks it may ever need."""
    return request.num_preemptions >= max_preemptions


def candidates(running: Iterable[Request], needy: Request, policy: Policy, max_preemptions: int) -> Iterable[Request]:
    """Running requests that may be preempted for ``needy`` (itself among them).

    None ahead of it, none preempted before that has not produced a token since it came back, none that is pinned or
    already complete. Every request is admitted with blocks for all its known tokens, so one that may not be preempted
    can always produce its next token, and the wait for it is bounded.
    """
    place = policy.order(needy)
    for request in running:
        progressed = not request.num_preemptions or len(request.token_ids) > request.progress_mark
        if (
            request.finish_reason is None
            and progressed
            and not is_pinned(request, max_preemptions)
            and policy.order(request) >= place
        ):
            yield request


class PreemptionRate:
    """Distinct requests preempted at least once / requests finished: in total, and over a window in seconds."""

    def __init__(self, window: float = 60.0) -> None:
        self.window = window
        self.num_finished = 0
        self.num_preempted = 0
        self._recent: deque[tuple[float, bool]] = deque()
        self._recent_preempted = 0

    def finished(self, request: Request, now: float) -> None:
        preempted = request.num_preemptions > 0
        self.num_finished += 1
        self.num_preempted += preempted
        self._recent.append((now, preempted))
        self._recent_preempted += preempted
        self._forget(now)

    @property
    def total(self) -> float:
        return self.num_preempted / self.num_finished if self.num_finished else 0.0

    def recent(self, now: float) -> float:
        self._forget(now)
        return self._recent_preempted / len(self._recent) if self._recent else 0.0

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self.window:
            self._recent_preempted -= self._recent.popleft()[1]
