"""Cache kind for the states of recurrent layers.

A table entry holds one state of a request: the state after the newest computed position among the entry's ``span``
positions. So a complete entry is a snapshot at a fixed position, and other requests may share it. A token reads the
entry of the position before it and writes the entry of its own position. So the table works like that of a sliding
window of two positions.

A state cannot go back to an earlier position. It can be read only at its newest position, or at the end of a complete
entry.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from chairlift.config import ONE_STATE
from chairlift.core.kv_cache.cache_kind import CacheKind

__all__ = ["StateKind"]


@dataclasses.dataclass(frozen=True, slots=True)
class StateKind(CacheKind):
    """One recurrent state per ``span`` positions. With :data:`~chairlift.config.ONE_STATE`, a request has a single
    state.

    A request that begins at position 0 begins with a state of zeros, whatever the block contained before.
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
