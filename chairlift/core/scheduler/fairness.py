"""Virtual token counters: measure how much service each tenant has got (VTC; Sheng et al., OSDI 2024).

Each tenant's counter grows by the tokens computed for the tenant, weighted by kind and divided by the tenant's weight.
The tenant with the lowest counter is served first. So the difference between two tenants with waiting requests is
bounded, and no row is idle while a tenant has work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chairlift.core.request import Request

__all__ = ["DECODE_WEIGHT", "PREFILL_WEIGHT", "VirtualTokenCounters"]

PREFILL_WEIGHT = 1.0
"""Service that a tenant is charged per token of a chunk. A chunk is a part of a prompt, or of a recompute after a
preemption."""
DECODE_WEIGHT = 2.0
"""Service that a tenant is charged per generated token."""
_MAX_IDLE = 10_000


class VirtualTokenCounters:
    """Service per tenant, in weighted tokens.

    A request is charged for its prompt when it joins, and for its answer while it is generated. If it leaves before its
    prompt is computed, the charge for the uncomputed tokens is returned.

    If two tenants always have waiting requests, their service differs by at most ``2 * max(PREFILL_WEIGHT * L,
    DECODE_WEIGHT * M)`` (the paper's theorem), divided by the smallest of their weights and 1. L is the number of
    tokens of the longest request, M the maximum number of tokens of all running requests together. The bound is valid
    if the tenant with the lowest counter always goes first and no request passes another.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, set[str]] = {}
        """Tenant -> ids of its waiting requests."""
        self._last = ""
        """Name of the tenant that most recently had waiting requests."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        """Weight of a tenant, by which its charges are divided; 1 by default."""
        return self._weights.get(tenant, 1.0)

    def catch_up(self, original: VirtualTokenCounters) -> None:
        """Copy weights and counters from ``original``. This object must already contain the same waiting requests."""
        self._weights = original._weights
        self._last = original._last
        self._counters = dict(original._counters)

    def active(self) -> list[str]:
        """Tenants with waiting requests."""
        return list(self._waiting)

    def num_waiting(self, tenant: str) -> int:
        """Number of the tenant's waiting requests."""
        return len(self._waiting.get(tenant, ()))

    def queued(self, request: Request) -> None:
        """Count a request that begins to wait.

        If its tenant had no waiting request, the tenant's counter is raised to the lowest counter of the tenants with
        waiting requests. So a tenant cannot save up service from a time in which it sent no requests.
        """
        tenant = request.service.tenant
        if tenant not in self._waiting:
            floor = min((self[other] for other in self._waiting), default=self[self._last])
            self._counters[tenant] = max(self[tenant], floor)
            self._waiting[tenant] = set()
        self._waiting[tenant].add(request.request_id)

    def forgotten(self, request: Request) -> None:
        """Remove a request from the counts of waiting requests. Does nothing if it did not wait."""
        tenant = request.service.tenant
        waiting = self._waiting.get(tenant, set())
        waiting.discard(request.request_id)
        if tenant in self._waiting and not waiting:
            del self._waiting[tenant]
            self._last = tenant
            if len(self._counters) > _MAX_IDLE + len(self._waiting):
                self._counters = {name: self[name] for name in [*self._waiting, tenant]}

    def joined(self, request: Request) -> None:
        """Charge a request that joins the batch for the prompt tokens that it will compute."""
        self.forgotten(request)
        request.num_charged_tokens = len(request.token_ids)
        self._charge(request.service.tenant, PREFILL_WEIGHT * (len(request.token_ids) - request.num_computed_tokens))

    def settle(self, running: Iterable[Request]) -> None:
        """Charge the running requests for the tokens generated since the last call."""
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
