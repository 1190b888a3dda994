"""Virtual token counters: who has had how much service (VTC; Sheng et al., OSDI 2024).

Each tenant's counter grows by the tokens computed for it, weighted by kind and divided by the tenant's share. Serving
the lowest counter first keeps any two tenants that have work waiting within a bounded gap of each other, and leaves
nothing idle while anybody has work.
"""

from __future__ import annotations

from collections import Counter
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
    grows; what it leaves uncomputed is given back."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        """Live requests per tenant."""
        self._last = 0.0
        """Counter of the tenant that went idle last."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def active(self) -> list[str]:
        """Tenants with live requests."""
        return list(self._active)

    def arrived(self, tenant: str) -> None:
        """One more live request. A tenant that comes back from idleness is lifted to those who are here: time it did
        not use is not saved up."""
        if not self._active[tenant]:
            del self._active[tenant]
            floor = min((self[other] for other in self._active), default=self._last)
            self._counters[tenant] = max(self[tenant], floor)
        self._active[tenant] += 1

    def ended(self, tenant: str) -> None:
        """One live request less."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._last = self[tenant]
            if len(self._counters) > _MOST_IDLE + len(self._active):
                self._counters = {name: self[name] for name in self._active}

    def joined(self, request: Request) -> None:
        """Charge the chunks it is about to compute."""
        request.num_charged_tokens = len(request.token_ids)
        self._charge(request, PREFILL_WEIGHT * (len(request.token_ids) - request.num_computed_tokens))

    def settle(self, running: Iterable[Request]) -> None:
        """Charge what has been generated since the last time."""
        for request in running:
            fresh = request.num_computed_tokens - request.num_charged_tokens
            if fresh > 0:
                request.num_charged_tokens += fresh
                self._charge(request, DECODE_WEIGHT * fresh)

    def left(self, request: Request) -> None:
        """Give back what was charged and not computed."""
        self.settle((request,))
        self._charge(request, PREFILL_WEIGHT * (request.num_computed_tokens - request.num_charged_tokens))

    def _charge(self, request: Request, amount: float) -> None:
        tenant = request.service.tenant
        self._counters[tenant] = self[tenant] + amount / self._weights.get(tenant, 1.0)
