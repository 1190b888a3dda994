"""Pauses of conversations: how long tools take, and for how long blocks are worth keeping."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

__all__ = ["MOST_SECONDS", "Gaps", "best_hold"]

MOST_SECONDS: Final = 300.0
"""Longest lease, in seconds: the shorter time to live of Anthropic's caches."""
_NUM_SAMPLES: Final = 64
_NUM_TOOLS: Final = 1024
_SLACK: Final = 1.1
"""A lease is longer than the observed pause that it is to cover by this factor."""


class Gaps:
    """Observed seconds between the end of a turn that calls tools and the arrival of the next turn, by tenant and
    tools. It keeps the newest pauses of the tools that were called last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def observe(self, tenant: str, tools: Sequence[str], seconds: float) -> None:
        """Note a pause. Calls of several tools in one turn are counted under all of their names together."""
        name = tenant, _joined(tools)
        if name not in self._seen:
            self._seen[name] = deque(maxlen=_NUM_SAMPLES)
        self._seen[name].append(seconds)
        self._seen.move_to_end(name)
        if len(self._seen) > _NUM_TOOLS:
            self._seen.popitem(last=False)

    def of(self, tenant: str, tools: Sequence[str]) -> list[float]:
        """The newest pauses, ascending. If the tools were never called together: those of the slowest one. Empty if
        none of the tools is known."""
        together = self._seen.get((tenant, _joined(tools)))
        if together is not None:
            return sorted(together)
        known = [seen for tool in set(tools) if (seen := self._seen.get((tenant, tool))) is not None]
        return sorted(max(known, key=lambda seen: sum(seen) / len(seen), default=()))

    def by_tool(self) -> dict[str, tuple[int, float]]:
        """Tools -> (number of pauses that are kept, their mean in seconds), for all tenants together."""
        found: dict[str, list[float]] = {}
        for (_, tools), seen in self._seen.items():
            found.setdefault(tools, []).extend(seen)
        return {tools: (len(seen), sum(seen) / len(seen)) for tools, seen in found.items()}


def _joined(tools: Sequence[str]) -> str:
    return " + ".join(sorted(set(tools)))


def best_hold(gaps: Sequence[float], saving: float, cost: float) -> float:
    """Seconds for which the blocks of a turn should be kept.

    ``gaps`` are observed pauses, ascending. ``saving`` is the number of seconds that the next turn saves if the blocks
    are still there, ``cost`` the number of seconds that others lose per second for which the blocks are kept. The
    result t maximises P(gap <= t) x saving - cost x E[min(gap, t)], because the blocks are kept until the next turn
    comes, and at most for t. It is 0 if keeping the blocks does not pay. Without pauses the result is the time at which
    the cost reaches the saving (the deterministic solution of the ski-rental problem). The result is at most
    :data:`MOST_SECONDS`.
    """
    if not gaps:
        return min(MOST_SECONDS, saving / cost if cost else math.inf)
    best = 0.0
    most = 0.0
    shorter = 0.0
    for number, gap in enumerate(gaps, 1):
        hold = gap * _SLACK
        if hold > MOST_SECONDS:
            break
        shorter += gap
        kept = (shorter + (len(gaps) - number) * hold) / len(gaps)
        value = bisect.bisect_right(gaps, gap) / len(gaps) * saving - cost * kept
        if value > most:
            best, most = hold, value
    return best
