"""The index of a store in memory: which blocks can be found. It can tell what has changed since it was asked."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.engine.kv_store.record import Record

__all__ = ["BlockIndex", "Stored"]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A block that the files hold."""

    writer: int
    record: Record


class BlockIndex(dict[tuple[int, bytes], Stored]):
    """(cache group, key) of each block that can be found -> where it is."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: set[tuple[int, bytes]] | None = None
        """Names that were added or removed since the last call of :meth:`changes`; None before the first call."""

    def changes(self, group: int) -> tuple[list[bytes], list[bytes]]:
        """(keys that were added, keys that were removed) in a cache group since the last call. The first call returns
        all keys as added. Call it for one group only."""
        changed = self.keys() if self._changed is None else self._changed
        if not changed and self._changed is not None:
            return [], []
        added = [key for each, key in changed if each == group and (each, key) in self]
        removed = [key for each, key in changed if each == group and (each, key) not in self]
        self._changed = set()
        return added, removed

    def _note(self, name: tuple[int, bytes]) -> None:
        if self._changed is not None:
            self._changed.add(name)

    def __setitem__(self, name: tuple[int, bytes], stored: Stored) -> None:
        self._note(name)
        super().__setitem__(name, stored)

    def __delitem__(self, name: tuple[int, bytes]) -> None:
        self._note(name)
        super().__delitem__(name)

    def pop(self, name: tuple[int, bytes], *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def clear(self) -> None:
        if self._changed is not None:
            self._changed.update(self)
        super().clear()
