"""Groups of a call's data: neighbours that the backward pass computes together.

Many short data would each be too little work for a processor. The data of a call are therefore divided into groups of
a few hundred tokens. The division depends on the call alone, and a group is never divided or joined with another. So a
client's gradients have the same bits in any company, however many clients share a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["GROUP_TOKENS", "groups_of", "lengths_of_groups"]

GROUP_TOKENS: Final = 256
"""Maximum number of tokens of a group, except for a single longer datum. Another number is another order of
additions: results of calls that are computed again after an update would differ."""


def groups_of(lengths: Sequence[int]) -> list[range]:
    """Indices of the data of each group, for data with these numbers of tokens."""
    groups: list[range] = []
    first = tokens = 0
    for index, length in enumerate(lengths):
        if index > first and tokens + length > GROUP_TOKENS:
            groups.append(range(first, index))
            first, tokens = index, 0
        tokens += length
    return [*groups, range(first, len(lengths))] if lengths else []


def lengths_of_groups(lengths: Sequence[int]) -> tuple[int, ...]:
    """Number of tokens of each group."""
    return tuple(sum(lengths[index] for index in group) for group in groups_of(lengths))
