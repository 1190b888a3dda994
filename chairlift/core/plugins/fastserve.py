"""FastServe: a multi-level feedback queue with skip-join. It needs no prediction of lengths.

Source: Wu et al., arXiv 2305.05920, read in a copy of its scheduler: the quantum of level l is 10 ms times 2**l, and a
request that has waited for 3 s is promoted. Claim: latency up to 5.1 times lower than that of run-to-completion.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from chairlift.core.plugins.keyed_policy import KeyedPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler.policy import Resource
from chairlift.core.scheduler.view import View

__all__ = ["FastServe"]


class FastServe(KeyedPolicy):
    """A request begins in the first level whose quantum holds its prompt. It falls by one level each time it has used
    a quantum. Lower levels go first, and take rows from higher ones."""

    name = "fastserve"
    preemptive = True
    quantum_seconds = 0.01
    promotion_seconds = 3.0
    num_levels = 12

    def __init__(self, view: View | None = None) -> None:
        super().__init__(view)
        self.levels: dict[str, int] = {}
        self.used: dict[str, float] = {}
        """Id -> seconds that the request has run in its level, or has waited."""
        self._at = 0.0

    def lane(self, request: Request) -> Hashable:
        return self.levels[request.request_id]

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        return (self.levels[head.request_id], head.sequence)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        return self.levels[request.request_id] < self.levels[running.request_id]

    def moved(self) -> Iterable[Request]:
        passed = max(0.0, self.view.now - self._at)
        self._at = self.view.now
        for name in self.levels:
            self.used[name] += passed
        fallen = [each for each in self.view.running if self._has_used_quantum(each.request_id)]
        for request in fallen:
            self._enter(request.request_id, self.levels[request.request_id] + 1)
        late = [name for name in self.waiting if self.levels[name] and self.used[name] >= self.promotion_seconds]
        for name in late:
            self._enter(name, 0)
        return [*fallen, *(self.waiting[name] for name in late)]

    def _has_used_quantum(self, name: str) -> bool:
        level = self.levels[name]
        return level < self.num_levels - 1 and self.used[name] >= self._quantum(level)

    def _quantum(self, level: int) -> float:
        return self.quantum_seconds * 2.0**level

    def _enter(self, name: str, level: int) -> None:
        self.levels[name] = level
        self.used[name] = 0.0

    def queued(self, request: Request, now: float) -> None:
        if request.request_id not in self.levels:
            seconds = self.view.prefill_seconds(request)
            fitting = (level for level in range(self.num_levels) if self._quantum(level) >= seconds)
            self.levels[request.request_id] = next(fitting, self.num_levels - 1)
        self.used[request.request_id] = 0.0
        super().queued(request, now)

    def joined(self, request: Request) -> None:
        self.used[request.request_id] = 0.0
        super().joined(request)

    def forgotten(self, request: Request) -> None:
        self.levels.pop(request.request_id, None)
        self.used.pop(request.request_id, None)
        super().forgotten(request)
