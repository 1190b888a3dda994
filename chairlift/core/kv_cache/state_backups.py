"""Copies of recurrent states, so that a row can go back to the state before a step.

A step that computes guessed tokens overwrites the row's newest state. Before it does, it copies this state to a spare
block. If a token was wrong, the spare block replaces the overwritten one in the row's table, and the tokens of the step
that were right are computed again.
"""

from __future__ import annotations

from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.tables import NewBlocks
from chairlift.core.request import Request

__all__ = ["StateBackups"]


class StateBackups:
    """Spare blocks of the rows whose guessed tokens are being computed. A spare block is used for one step only."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._spans = {group: kind.span for group, kind in enumerate(tables.layout.kinds) if not kind.stores_positions}
        """Cache group of recurrent states -> positions per state."""

    def __bool__(self) -> bool:
        """Whether the model has recurrent states."""
        return bool(self._spans)

    def num_positions(self, start: int) -> int:
        """Maximum number of positions from ``start`` on that a row may compute and take back. All of them write
        one state, which position ``start`` reads: a complete state is a snapshot that others may share."""
        return min([-start % span for span in self._spans.values()])

    def has_room(self, request: Request) -> bool:
        """Whether each group has a spare block for the request."""
        tables = self._tables
        return all(tables.pools[g].num_free > tables.reservations.withheld(g, request) for g in self._spans)

    def save(self, request: Request, start: int) -> list[tuple[int, int, int]]:
        """Take spare blocks for a row whose step computes positions from ``start`` on. Returns (group, block, spare
        block) for the copies that the step must make before it writes anything."""
        copies = []
        for group, span in self._spans.items():
            (spare,) = self._tables.take(group, 1)
            self._tables.spares.setdefault(request.request_id, []).append((group, start // span, spare))
            copies.append((group, request.block_ids[group][start // span], spare))
        return copies

    def drop(self, request: Request) -> None:
        """Release the request's spare blocks, because its tokens were right, or because it has ended."""
        for group, _, spare in self._tables.spares.pop(request.request_id, ()):
            self._tables.release(group, spare)

    def restore(self, request: Request) -> list[NewBlocks]:
        """Put the spare blocks into the request's tables and release the overwritten ones. Returns the changed
        entries, which the executor must know before it computes the request again."""
        changed = []
        for group, entry, spare in self._tables.spares.pop(request.request_id, ()):
            self._tables.replace(group, request, entry, spare)
            changed.append(NewBlocks(group, entry, [spare]))
        return changed
