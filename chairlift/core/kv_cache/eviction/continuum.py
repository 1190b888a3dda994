"""Continuum's rule (arXiv 2511.02230) as its released code has it, for comparisons.

Load it with ``--cache-eviction chairlift.core.kv_cache.eviction.continuum:Continuum``. The blocks of a turn are kept
for two seconds if the tool's mean pause is at most two seconds, or not known; otherwise they are not kept.
"""

from __future__ import annotations

from typing import Final

from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.turns import EndedTurn

__all__ = ["Continuum"]

_SECONDS: Final = 2.0


class Continuum(LeaseRule):
    """Leases of two seconds after calls of fast or unknown tools. Like all leases they keep no request waiting."""

    name = "continuum"

    def hold(self, turn: EndedTurn) -> float:
        gaps = self.gaps.of(turn.tenant, turn.tools)
        return _SECONDS if not gaps or sum(gaps) / len(gaps) <= _SECONDS else 0.0
