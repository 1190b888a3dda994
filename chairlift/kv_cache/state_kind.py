"""The states of recurrent layers as a kind of cache.

A table entry holds one state of a request: that behind the newest computed position among its ``span`` positions. A
complete entry is therefore a snapshot at a fixed position, which other requests may share. A token reads the entry of
the position before it and writes its own, so a table is that of a sliding window of two positions.

A state is never rolled back. It can be read at the position where it stands, and at the end of a complete entry.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from chairlift.config import ONE_STATE
from chairlift.kv_cache.cache_kind import CacheKind

__all__ = ["StateKind"]


@dataclasses.dataclass(frozen=True, slots=True)
class StateKind(CacheKind):
    """One recurrent state per ``span`` positions; :data:`~chairlift.config.ONE_STATE` keeps a single one per request.

    A request that begins at position 0 begins with a state of zeros, whatever its entry held before.
    """

    reach: int | None = 2
    stores_positions: ClassVar[bool] = False

    @property
    def grows(self) -> bool:
        return self.span < ONE_STATE

    @property
    def share_unit(self) -> int:
        return self.span

    def continues_at(self, position: int, num_computed: int) -> bool:
        return position == num_computed or position % self.span == 0
