"""Leases that clients ask for, such as those of ``cache_control`` in Anthropic's API."""

from __future__ import annotations

from typing import Final

from chairlift.core.kv_cache.eviction.leases import Lease
from chairlift.core.kv_cache.eviction.rule import Prices
from chairlift.core.request import Request

__all__ = ["ASKED_LEVEL", "AskedLeases"]

ASKED_LEVEL: Final = 3
"""Level of leases that clients ask for, above the retention levels of classes. Leases of pauses have the same level. So
of two leases of a block the longer one holds, and the end of a pause takes nothing from its client."""


class AskedLeases:
    """The leases that a request asks for, counted from ``now``. A lease covers whole blocks only."""

    def __init__(self, request: Request, prices: Prices, now: float) -> None:
        unit = max(prices.block_size, prices.share_unit)
        self._ends = [(num_tokens // unit * unit, seconds) for num_tokens, seconds in request.service.leases]
        self._payer = request.service.payer
        self._prices = prices
        self._now = now

    def of(self, group: int, index: int) -> Lease | None:
        """The longest lease of block ``index`` in a cache group; None if no lease covers it."""
        end = (index + 1) * self._prices.block_size
        asked = [seconds for last, seconds in self._ends if end <= last and self._prices.is_needed(group, index, last)]
        if not asked:
            return None
        seconds = max(asked)
        return Lease(ASKED_LEVEL, self._now + seconds, self._payer, seconds=seconds)
