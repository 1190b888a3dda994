"""A queue of work in which tenants take turns, so that a tenant with much work does not hold up the others."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Work that was not begun, per tenant. Several threads may use the object."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        """Tenant -> its work, oldest first. The entry stays until the time of its newest work is known."""
        self._spent: dict[str, float] = {}
        """Tenant with work -> seconds of its work, counted from the smallest value when it came."""
        self._lock = threading.Lock()

    def add(self, tenant: str, work: T) -> None:
        with self._lock:
            if tenant not in self._waiting:
                self._waiting[tenant] = deque()
                self._spent[tenant] = min(self._spent.values(), default=0.0)
            self._waiting[tenant].append(work)

    def take(self) -> tuple[str, T] | None:
        """(tenant, its oldest work) of the tenant whose work took the least time; None if there is no work."""
        with self._lock:
            tenant = min(
                (name for name, work in self._waiting.items() if work), key=self._spent.__getitem__, default=None
            )
            return None if tenant is None else (tenant, self._waiting[tenant].popleft())

    def took(self, tenant: str, seconds: float) -> None:
        """Note how long the work took that :meth:`take` returned."""
        with self._lock:
            if tenant in self._waiting:
                self._spent[tenant] += seconds
                if not self._waiting[tenant]:
                    del self._waiting[tenant], self._spent[tenant]

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._spent.clear()
