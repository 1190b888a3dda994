"""Adds up the time of masks in a simulation, and says which requests must end by a limit on this time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from chairlift.engine.mask_limits import MaskLimits
from chairlift.engine.mask_work import MaskPlace

__all__ = ["MaskWatch"]

_MOST_AFTER = 12
"""An answer may get this many tokens after its request has reached a limit: tokens of steps in flight, and tokens whose
masks were made before."""
_LEAST_SECONDS = 0.1


class MaskWatch:
    """Knows the time of all masks, by a second way of counting. ``is_alive`` says whether a request has not ended."""

    def __init__(self, limits: MaskLimits, is_alive: Callable[[str], bool]) -> None:
        self._limits = limits
        self._is_alive = is_alive
        self._seconds: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Tenant -> request -> seconds."""
        self.over: set[str] = set()
        """Requests that have reached a limit."""
        self._tokens: dict[str, int] = {}
        """Answer of such a request -> number of tokens when the answer was first seen after that."""

    def charged(self, place: MaskPlace, seconds: float) -> None:
        name, _, _ = place.row.request.request_id.partition("#")
        if name in self.over:
            return
        spent = self._seconds[place.budget.tenant]
        spent[name] = spent.get(name, 0.0) + seconds
        if spent[name] > self._limits.request_seconds:
            self.over.add(name)
        if sum(spent.values()) > self._limits.tenant_seconds:
            running = [each for each in spent if each not in self.over and self._is_alive(each)]
            worst = max(running, key=spent.__getitem__, default=None)
            if worst is not None and spent[worst] >= _LEAST_SECONDS:
                self.over.add(worst)

    def goes_on(self, answer: str, num_tokens: int) -> bool:
        """Whether an answer got more tokens after its request had reached a limit than it may."""
        if answer.partition("#")[0] not in self.over:
            return False
        return num_tokens > self._tokens.setdefault(answer, num_tokens) + _MOST_AFTER
