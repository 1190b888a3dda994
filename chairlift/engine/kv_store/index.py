"""The index of a store in memory: which blocks can be found. It can tell what has changed since it was asked."""

from __future__ import annotations

from typing import Any, NamedTuple

from chairlift.engine.kv_store.record import Record

__all__ = ["BlockIndex", "Stored"]


class Stored(NamedTuple):
    """A block that the files hold. Two are the same copy only if they are one object."""

    writer: int
    record: Record

    @property
    def name(self) -> tuple[int, bytes]:
        """(cache group, key) of the block."""
        return self.record.group, self.record.key


class BlockIndex(dict[tuple[int, bytes], Stored]):
    """(cache group, key) of each block that can be found -> where it is.

    Several processes may have written one block. :meth:`add` and :meth:`remove` handle such copies: the copy of the
    writer :attr:`own` is found, otherwise the newest one. The methods of a dict add and remove all copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = -1
        """Number of this process as a writer; -1: it writes nothing."""
        self._spare: dict[tuple[int, bytes], list[Stored]] = {}
        """Further copies of blocks that can be found."""
        self._changed: set[tuple[int, bytes]] | None = None
        """Names that were added or removed since the last call of :meth:`changes`; None before the first call."""

    def add(self, stored: Stored) -> None:
        """Add a copy of a block."""
        name = stored.name
        known = self.get(name)
        if known is None:
            self._note(name)
            super().__setitem__(name, stored)
            return
        spare = [*self._spare.get(name, ()), stored]
        if self._rank(stored) > self._rank(known):
            spare[-1] = known
            self[name] = stored
        self._spare[name] = spare

    def remove(self, stored: Stored) -> None:
        """Remove a copy of a block, if it is there. Another copy is found from now on."""
        name = stored.name
        spare = self._spare.pop(name, [])
        if self.get(name) is stored:
            if not spare:
                del self[name]
                return
            stored = self[name] = max(spare, key=self._rank)
        spare = [each for each in spare if each is not stored]
        if spare:
            self._spare[name] = spare

    def _rank(self, stored: Stored) -> tuple[bool, int]:
        return stored.writer == self.own, stored.record.generation

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
        self._spare.pop(name, None)
        super().__setitem__(name, stored)

    def __delitem__(self, name: tuple[int, bytes]) -> None:
        self._note(name)
        self._spare.pop(name, None)
        super().__delitem__(name)

    def pop(self, name: tuple[int, bytes], *default: Any) -> Any:
        self._note(name)
        self._spare.pop(name, None)
        return super().pop(name, *default)

    def clear(self) -> None:
        if self._changed is not None:
            self._changed.update(self)
        self._spare.clear()
        super().clear()
