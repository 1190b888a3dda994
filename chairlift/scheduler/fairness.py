"""Virtual token counters: who has had how much service (VTC; Sheng et al., OSDI 2024).

Each tenant's counter grows by the tokens computed for it, weighted by kind and divided by the tenant's share. Serving
the lowest counter first keeps any two tenants that have work waiting within a bounded gap of each other, and leaves
nothing idle while anybody has work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chairlift.request import Request

__all__ = ["DECODE_WEIGHT", "PREFILL_WEIGHT", "VirtualTokenCounters"]

PREFILL_WEIGHT = 1.0
"""Per token computed in a chunk: of a prompt, or again after a preemption."""
DECODE_WEIGHT = 2.0
"""Per token generated."""
_MOST_IDLE = 10_000


class VirtualTokenCounters:
    """Service per tenant, in weighted tokens. A request is charged for its prompt when it joins, for its answer as it
    grows; what it leaves uncomputed is given back.

    Between two tenants that both have requests waiting all the time, service grows apart by no more than
    ``2 * max(PREFILL_WEIGHT * L, DECODE_WEIGHT * M)`` (the paper's theorem), divided by the smaller of their shares
    and 1, with L the longest request and M the most tokens that all running requests together have. It takes a line
    in which the lowest counter goes first and nobody is looked past.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, set[str]] = {}
        """Ids of waiting requests per tenant."""
        self._last = ""
        """Tenant that was the last to have requests waiting."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        """Its share, in relation to those of others."""
        return self._weights.get(tenant, 1.0)

    def catch_up(self, original: VirtualTokenCounters) -> None:
        """Take over weights and counters; who waits is known already."""
        self._weights, self._last = original._weights, original._last
        self._counters = dict(original._counters)

    def active(self) -> list[str]:
        """Tenants with requests that wait."""
        return list(self._waiting)

    def num_waiting(self, tenant: str) -> int:
        """How many of its requests wait."""
        return len(self._waiting.get(tenant, ()))

    def queued(self, request: Request) -> None:
        """It begins to wait. A tenant of which nobody waited is lifted to those of which somebody does: what it did
        not ask for is not saved up."""
        tenant = request.service.tenant
        if tenant not in self._waiting:
            floor = min((self[other] for other in self._waiting), default=self[self._last])
            self._counters[tenant] = max(self[tenant], floor)
            self._waiting[tenant] = set()
        self._waiting[tenant].add(request.request_id)

    def forgotten(self, request: Request) -> None:
        """It has ended; nothing happens unless it waited."""
        tenant = request.service.tenant
        waiting = self._waiting.get(tenant, set())
        waiting.discard(request.request_id)
        if tenant in self._waiting and not waiting:
            del self._waiting[tenant]
            self._last = tenant
            if len(self._counters) > _MOST_IDLE + len(self._waiting):
                self._counters = {name: self[name] for name in [*self._waiting, tenant]}

    def joined(self, request: Request) -> None:
        """Charge the chunks it is about to compute."""
        self.forgotten(request)
        request.num_charged_tokens = len(request.token_ids)
        self._charge(request.service.tenant, PREFILL_WEIGHT * (len(request.token_ids) - request.num_computed_tokens))

    def settle(self, running: Iterable[Request]) -> None:
        """Charge what has been generated since the last time."""
        charged: dict[str, int] = {}
        for request in running:
            computed = request.num_computed_tokens
            fresh = computed - request.num_charged_tokens
            if fresh > 0:
                request.num_charged_tokens = computed
                tenant = request.service.tenant
                charged[tenant] = charged.get(tenant, 0) + fresh
        for tenant, fresh in charged.items():
            self._charge(tenant, DECODE_WEIGHT * fresh)

    def left(self, request: Request) -> None:
        """Give back what was charged and not computed."""
        self.settle((request,))
        unused = request.num_charged_tokens - request.num_computed_tokens
        self._charge(request.service.tenant, -PREFILL_WEIGHT * unused)

    def _charge(self, tenant: str, amount: float) -> None:
        self._counters[tenant] = self[tenant] + amount / self.weight(tenant)
