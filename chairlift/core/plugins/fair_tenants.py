"""Fairness between tenants by one counter (VTC) or by two (Equinox). The tenant with the lowest counter goes first.

Sources: virtual token counters, Sheng et al., OSDI 2024. Equinox, arXiv 2508.16646 (abstract; the full text was not
available), which claims 1.3 times the throughput of VTC, 60 % less TTFT and 13 % more fairness (ShareGPT, LMSYS).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from chairlift.core.request import Request
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy
from chairlift.core.scheduler.view import View

__all__ = ["Equinox", "LowestCounter"]

_MAX_TENANTS: Final = 10_000
"""Number of tenants without waiting requests that are remembered."""


class LowestCounter(FirstComeFirstServed):
    """Tenants by their virtual token counters, requests of a tenant by arrival."""

    name = "vtc"

    def __init__(self, view: View | None = None) -> None:
        self.view = view or View()
        self.counters = VirtualTokenCounters()
        self._settled = -1

    def catch_up(self, original: Policy) -> None:
        known: Any = original
        self.counters.catch_up(known.counters)

    def lane(self, request: Request) -> Hashable:
        return request.service.tenant

    def rank(self, head: Request, waited: float, now: float) -> tuple[float, ...]:
        if self._settled != self.view.step:
            self._settled = self.view.step
            self.counters.settle(self.view.running)
        return (self.score(head.service.tenant), head.sequence)

    def score(self, tenant: str) -> float:
        """Service that the tenant has got."""
        return self.counters[tenant]

    def queued(self, request: Request, now: float) -> None:
        self.counters.queued(request)

    def joined(self, request: Request) -> None:
        self.counters.joined(request)

    def left(self, request: Request) -> None:
        self.counters.left(request)

    def forgotten(self, request: Request) -> None:
        self.counters.forgotten(request)


class Equinox(LowestCounter):
    """Mean of two counters, each divided by its largest value: the tokens that a tenant got, and the predicted seconds
    of the machine that its requests take."""

    name = "equinox"
    mix = 0.5
    """Weight of the tokens; the rest is the weight of the seconds."""

    def __init__(self, view: View | None = None) -> None:
        super().__init__(view)
        self.seconds: dict[str, float] = {}

    def catch_up(self, original: Policy) -> None:
        super().catch_up(original)
        known: Any = original
        self.seconds = dict(known.seconds)

    def score(self, tenant: str) -> float:
        tokens = max(map(super().score, self.seconds), default=0.0) or 1.0
        seconds = max(self.seconds.values(), default=0.0) or 1.0
        own = self.seconds.get(tenant, 0.0)
        return self.mix * super().score(tenant) / tokens + (1 - self.mix) * own / seconds

    def queued(self, request: Request, now: float) -> None:
        if not self.counters.num_waiting(request.service.tenant):  # a pause earns no service, as in VTC
            floor = min((self.seconds.get(other, 0.0) for other in self.counters.active()), default=0.0)
            tenant = request.service.tenant
            self.seconds[tenant] = max(self.seconds.get(tenant, 0.0), floor)
        super().queued(request, now)

    def joined(self, request: Request) -> None:
        super().joined(request)
        if not request.was_preempted:
            self.seconds[request.service.tenant] += self.view.service_seconds(request)
        if len(self.seconds) > _MAX_TENANTS + len(self.counters.active()):
            kept = {request.service.tenant, *self.counters.active()}
            self.seconds = {tenant: self.seconds.get(tenant, 0.0) for tenant in sorted(kept)}
