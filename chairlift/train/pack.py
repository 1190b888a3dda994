"""Which sequences share a flat batch: best-fit decreasing packing.

Standard library only. A pack has no padding; ``cu_seqlens`` keeps its sequences apart, just as it keeps the rows of a
serving step apart.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from chairlift.errors import ConfigError

__all__ = ["Pack", "pack_sequences"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that lie one after another in one flat batch."""

    indices: tuple[int, ...]
    """Which sequences, as positions in the list that was packed, in the order in which they lie in the pack."""
    cu_seqlens: tuple[int, ...]
    """[N + 1] offsets: sequence ``i`` of the pack is ``[cu_seqlens[i], cu_seqlens[i + 1])``."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the pack; never more than the capacity it was made for."""
        return self.cu_seqlens[-1]


def pack_sequences(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Put every sequence into a pack of at most ``capacity`` tokens, wasting little room.

    Best-fit decreasing: the longest sequences first, each into the pack with the least room that still takes it. It
    needs at most 11/9 of the optimal number of packs plus one (Johnson, 1973). The result depends on the arguments
    only; O(n log n + n * packs) in time. Raises :class:`~chairlift.errors.ConfigError` for a capacity below 1 and for
    a length outside 1 to ``capacity``.
    """
    if capacity < 1:
        raise ConfigError(f"capacity must be at least 1 token, got {capacity}")
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ConfigError(
                f"sequence {index} has {length} tokens, but a pack takes 1 to {capacity}; "
                "drop or cut the sequence, or raise the capacity"
            )
    members: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), ascending, so that a bisection finds the tightest fit
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        else:
            room, pack = capacity, len(members)
            members.append([])
        members[pack].append(index)
        bisect.insort(rooms, (room - lengths[index], pack))
    return [_make_pack(indices, lengths) for indices in members]


def _make_pack(indices: Sequence[int], lengths: Sequence[int]) -> Pack:
    offsets = [0]
    for index in indices:
        offsets.append(offsets[-1] + lengths[index])
    return Pack(tuple(indices), tuple(offsets))
