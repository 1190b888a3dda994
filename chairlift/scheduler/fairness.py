"""Virtual token counters: how much service each tenant has had (VTC; Sheng et al., OSDI 2024).

Each tenant's counter grows by the tokens computed for it, weighted by kind and divided by the tenant's share. The
tenant with the lowest counter goes first. So the gap between two tenants with waiting work is bounded, and no row is
idle while a tenant has work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chairlift.request import Request

__all__ = ["DECODE_WEIGHT", "PREFILL_WEIGHT", "VirtualTokenCounters"]

PREFILL_WEIGHT = 1.0
"""Charge per token of a chunk, which is a part of a prompt or of a recompute after a preemption."""
DECODE_WEIGHT = 2.0
"""Charge per generated token."""
_MOST_IDLE = 10_000


class VirtualTokenCounters:
    """Service per tenant, in weighted tokens.

    A request is charged for its prompt when it joins and for its answer as it grows. The charge for tokens that it
    leaves uncomputed is returned.

    If two tenants always have waiting requests, their service differs by at most
    ``2 * max(PREFILL_WEIGHT * L, DECODE_WEIGHT * M)`` (the paper's theorem), divided by the smaller of their shares
    and 1. L is the longest request, M the most tokens of all running requests together. The bound needs a queue in
    which the lowest counter goes first and no request is passed.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, set[str]] = {}
        """Ids of waiting requests per tenant."""
        self._last = ""
        """Tenant that last had waiting requests."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        """Weight of a tenant's share, 1 by default."""
        return self._weights.get(tenant, 1.0)

    def catch_up(self, original: VirtualTokenCounters) -> None:
        """Take weights and counters from ``original``. The waiting requests are known already."""
        self._weights, self._last = original._weights, original._last
        self._counters = dict(original._counters)

    def active(self) -> list[str]:
        """Tenants with requests that wait."""
        return list(self._waiting)

    def num_waiting(self, tenant: str) -> int:
        """Number of the tenant's waiting requests."""
        return len(self._waiting.get(tenant, ()))

    def queued(self, request: Request) -> None:
        """Count a request that begins to wait.

        If it is its tenant's only one, the counter is lifted to the lowest counter of tenants with waiting requests,
        because service that a tenant did not ask for is not saved up.
        """
        tenant = request.service.tenant
        if tenant not in self._waiting:
            floor = min((self[other] for other in self._waiting), default=self[self._last])
            self._counters[tenant] = max(self[tenant], floor)
            self._waiting[tenant] = set()
        self._waiting[tenant].add(request.request_id)

    def forgotten(self, request: Request) -> None:
        """Stop counting a request that waited. Nothing happens if it did not wait."""
        tenant = request.service.tenant
        waiting = self._waiting.get(tenant, set())
        waiting.discard(request.request_id)
        if tenant in self._waiting and not waiting:
            del self._waiting[tenant]
            self._last = tenant
            if len(self._counters) > _MOST_IDLE + len(self._waiting):
                self._counters = {name: self[name] for name in [*self._waiting, tenant]}

    def joined(self, request: Request) -> None:
        """Charge a request that joins for the chunks that it will compute."""
        self.forgotten(request)
        request.num_charged_tokens = len(request.token_ids)
        self._charge(request.service.tenant, PREFILL_WEIGHT * (len(request.token_ids) - request.num_computed_tokens))

    def settle(self, running: Iterable[Request]) -> None:
        """Charge the tokens generated since the last call."""
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
        """Return the charge for tokens that a request did not compute before it left its row."""
        self.settle((request,))
        unused = request.num_charged_tokens - request.num_computed_tokens
        self._charge(request.service.tenant, -PREFILL_WEIGHT * unused)

    def _charge(self, tenant: str, amount: float) -> None:
        self._counters[tenant] = self[tenant] + amount / self.weight(tenant)
