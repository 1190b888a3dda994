"""Limits on the processor time of masks, for each request and for each tenant.

Each mask may take a usual time, which common grammars do not reach on average. The time above it is *excess*. A request
whose excess reaches its limit ends with an error. If the requests of a tenant together reach the tenant's limit, the
request with the most excess ends. So a request with a common grammar does not end because of a neighbour's grammar.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED
from chairlift.config import SchedulerConfig

__all__ = ["MaskBudget", "MaskLedger", "MaskLimits"]

_WINDOW_SECONDS: Final = 60.0
"""Length of the time over which the excess of a tenant's requests is added up."""
_LEAST_SECONDS: Final = 0.1
"""A tenant's limit does not end a request with less excess than this. One slow mask alone is not a reason."""
_PEAK_MEMORY: Final = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class MaskLimits:
    """Limits on the processor time of masks."""

    usual_ms: float
    """Milliseconds that each mask may take on average. Only the time above it counts."""
    request_seconds: float
    """Maximum seconds above that, for all answers of a request together."""
    tenant_share: float
    """Maximum seconds above that, for all requests of a tenant together, as a fraction of the last minute."""

    @classmethod
    def of(cls, config: SchedulerConfig) -> MaskLimits:
        return cls(config.usual_mask_ms, config.max_mask_seconds, config.max_tenant_mask_share)

    @property
    def tenant_seconds(self) -> float:
        """Maximum excess of a tenant's requests within the window."""
        return self.tenant_share * _WINDOW_SECONDS


@dataclasses.dataclass(slots=True, eq=False)
class MaskBudget:
    """Processor time that the masks of a request take, over all its answers."""

    ledger: MaskLedger
    tenant: str = ""
    seconds: float = 0.0
    """Processor seconds that all masks took so far."""
    num_masks: int = 0
    excess: float = 0.0
    """Seconds above the usual time. It falls while masks take less than the usual time, and does not fall below 0."""
    price: float = 0.0
    """Expected processor seconds of the next mask: a moving mean."""
    peak: float = 0.0
    """Processor seconds that the next mask may take: the longest mask of late, forgotten slowly."""
    num_answers: int = 0
    """Number of answers that have not ended."""
    error: str = ""
    """Error message if the request has reached a limit; otherwise empty."""

    def spend(self, seconds: float, num_masks: int) -> None:
        """Add the time of ``num_masks`` masks. This may set the :attr:`error` of this request or of another request of
        the same tenant."""
        each = seconds / max(1, num_masks)
        self.price += (each - self.price) / 2
        self.peak = max(each, self.peak * _PEAK_MEMORY)
        self.ledger.charge(self, seconds, num_masks)


class _Account:
    """Excess of the requests of one tenant within the window."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, MaskBudget, float]] = deque()
        """(time, request, seconds), oldest first."""
        self.seconds = 0.0
        self.of: dict[MaskBudget, float] = {}
        """Request -> its part of ``seconds``."""

    def add(self, now: float, budget: MaskBudget, seconds: float) -> None:
        self.entries.append((now, budget, seconds))
        self._change(budget, seconds)
        while self.entries[0][0] < now - _WINDOW_SECONDS:
            _, oldest, passed = self.entries.popleft()
            self._change(oldest, -passed)

    def _change(self, budget: MaskBudget, seconds: float) -> None:
        self.seconds += seconds
        self.of[budget] = self.of.get(budget, 0.0) + seconds
        if abs(self.of[budget]) < 1e-9:
            del self.of[budget]


class MaskLedger:
    """Adds up the processor time of masks and enforces the limits. Several threads may use it.

    ``limits``: default, those of :class:`SchedulerConfig`. ``now`` returns the time in seconds.
    """

    def __init__(self, limits: MaskLimits | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or MaskLimits.of(SchedulerConfig())
        self._now = now
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        """Tenant -> its account, for tenants with excess within the window."""

    def charge(self, budget: MaskBudget, seconds: float, num_masks: int) -> None:
        """See :meth:`MaskBudget.spend`."""
        limits = self.limits
        with self._lock:
            budget.seconds += seconds
            budget.num_masks += num_masks
            excess = max(0.0, budget.excess + seconds - num_masks * limits.usual_ms / 1000)
            added = excess - budget.excess
            budget.excess = excess
            if not added:
                return
            account = self._account(budget.tenant)
            account.add(self._now(), budget, added)
            if excess > limits.request_seconds and not budget.error:
                budget.error = self._request_error(budget)
            if account.seconds > limits.tenant_seconds:
                self._end_most_expensive(account)

    def _account(self, tenant: str) -> _Account:
        if tenant not in self._accounts:
            before = self._now() - _WINDOW_SECONDS
            old = [name for name, each in self._accounts.items() if each.entries[-1][0] < before]
            for name in old:
                del self._accounts[name]
            self._accounts[tenant] = _Account()
        return self._accounts[tenant]

    def _end_most_expensive(self, account: _Account) -> None:
        running = [each for each in account.of if each.num_answers and not each.error]
        worst = max(running, key=lambda each: account.of[each], default=None)
        if worst is not None and account.of[worst] >= _LEAST_SECONDS:
            worst.error = self._tenant_error(account, worst)

    def _request_error(self, budget: MaskBudget) -> str:
        limits = self.limits
        return (
            f"{CANNOT_BE_FOLLOWED}the {budget.num_masks} masks of all answers of the request took"
            f" {budget.seconds:.3g} s of processor time, and {limits.usual_ms:g} ms per mask and"
            f" {limits.request_seconds:g} s in addition are allowed (usual_mask_ms, max_mask_seconds); make the"
            " grammar simpler, or ask for fewer answers or tokens"
        )

    def _tenant_error(self, account: _Account, worst: MaskBudget) -> str:
        limits = self.limits
        return (
            f"{CANNOT_BE_FOLLOWED}in the last {_WINDOW_SECONDS:g} s, the masks of all requests of this client took"
            f" {account.seconds:.3g} s of processor time more than {limits.usual_ms:g} ms per mask, and"
            f" {limits.tenant_seconds:.3g} s are allowed (max_tenant_mask_share {limits.tenant_share:g}); the masks"
            f" of this request took {worst.seconds:.3g} s, the most of all; make the grammar simpler, or send fewer"
            " such requests at the same time"
        )
