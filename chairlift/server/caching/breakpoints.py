"""Breakpoints: places in a conversation up to which its client asks to keep the prompt, and the leases that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Breakpoints", "Leases", "written"]

Leases = tuple[tuple[int, float], ...]
"""(number of leading tokens of a prompt, seconds), by number of tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Breakpoints:
    """The breakpoints of one request."""

    seconds: tuple[float, ...] = ()
    """Seconds for which the prompt up to each mark is to be kept; 0 for a mark without a breakpoint. Marks are in the
    order of the prompt, as far as it is known: where a template writes the system text before the tools, the longer
    time goes to the first of the two."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages of the chat, with marks."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools of the chat, with marks."""
    whole: float = 0.0
    """Seconds for which the whole prompt is to be kept; 0 if it is not."""

    def leases(self, positions: Sequence[int], num_tokens: int, block_size: int) -> Leases:
        """Leases of a prompt of ``num_tokens``, whose marks are at ``positions``. The cache keeps whole blocks, so a
        lease ends with the last whole block."""
        longest: dict[int, float] = {}
        for place, seconds in [*zip(positions, self.seconds, strict=False), (num_tokens, self.whole)]:
            end = place // block_size * block_size
            if end and seconds:
                longest[end] = max(seconds, longest.get(end, 0.0))
        return tuple(sorted(longest.items()))


def written(leases: Leases, cached: int) -> dict[float, int]:
    """Seconds -> number of prompt tokens that are now kept for so long and were not in the cache before, when the first
    ``cached`` tokens were."""
    counts: dict[float, int] = {}
    start = cached
    for end, _ in leases:
        if end > start:
            longest = max(seconds for other, seconds in leases if other >= end)
            counts[longest] = counts.get(longest, 0) + end - start
            start = end
    return counts
