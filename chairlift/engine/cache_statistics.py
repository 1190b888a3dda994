"""Statistics of the prefix cache: pauses of conversations, leases, and times of blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from chairlift.core.kv_cache.eviction.gaps import MOST_SECONDS
from chairlift.core.kv_cache.manager import KVCacheManager

__all__ = ["CacheStatistics"]

_MOST_TOOLS: Final = 20
_OTHER: Final = "other"
_SEVERAL: Final = "several"
_TOOL: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SPREADS: Final = (
    ("reuse_gap", "block_reuse_gaps", "num_block_reuse_seconds"),
    ("idle", "block_idle_times", "num_block_idle_seconds"),
    ("lifetime", "block_lifetimes", "num_block_lifetime_seconds"),
)


class CacheStatistics:
    """Reads what the KV cache and its rule of eviction count. The steps of the engine do nothing for it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._tools: set[str] = set()
        """Tools that have a name of their own in the statistics. Names come from clients, so there are few, and they
        stay the same: each is a time series of whoever collects the statistics."""

    def read(self) -> dict[str, Any]:
        """Field of EngineStats -> value."""
        rule = self._kv.eviction
        leases = rule.leases()
        fields: dict[str, Any] = {
            "num_pauses": rule.num_pauses,
            "num_leases": rule.num_leases,
            "pauses_by_tool": self._pauses_by_tool(),
            "turns_by_cache": {found.value: count for found, count in rule.found.items()},
        }
        if leases is not None:
            fields["leased_blocks"] = {str(level): count for level, count in leases.num_by_level.items()}
            fields["lease_budget_blocks"] = leases.budget
            fields["leases_ended"] = {how.value: count for how, count in leases.num_ended.items()}
        for name, counts, seconds in _SPREADS:
            spreads = [getattr(pool.times, name) for pool in self._kv.pools]
            fields[counts] = [sum(each) for each in zip(*(spread.counts for spread in spreads), strict=True)]
            fields[seconds] = sum(spread.seconds for spread in spreads)
        return fields

    def _pauses_by_tool(self) -> dict[str, int]:
        """Tool -> number of conversations that pause for it, and have done so for at most as long as a lease may be.
        Others are probably over."""
        rule = self._kv.eviction
        counts: Counter[str] = Counter()
        for turn in rule.turns.paused_since(rule.now - MOST_SECONDS):
            counts[self._label(turn.tools)] += 1
        return dict(counts)

    def _label(self, tools: Sequence[str]) -> str:
        names = set(tools)
        if len(names) > 1:
            return _SEVERAL
        (name,) = names
        if name not in self._tools:
            if len(self._tools) >= _MOST_TOOLS or not _TOOL.fullmatch(name):
                return _OTHER
            self._tools.add(name)
        return name
