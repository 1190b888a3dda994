"""Bugs of recurrent states, injected one at a time. The simulator's worlds with such states must detect every one of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift.base.step_batch import StepBatch
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.cache_kind import CacheKind
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.state_kind import StateKind
from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.executor.input_batch import InputBatch
from chairlift.models.hashlm import HashLM

__all__ = ["STATE_MUTANTS"]

Patch = Callable[[Any, str, Any], None]
STATE_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    STATE_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def state_not_cleared_when_a_request_begins(patch: Patch) -> None:
    """Bug: a new request does not start from zeros, but from the old contents of its state's block."""
    original = HashLM._advance

    def advance(self: HashLM, batch: StepBatch, group: int, row: int, layer: int, words: Any) -> Any:
        start = int(batch.cu_seqlens[row])
        if batch.positions[start]:
            return original(self, batch, group, row, layer, words)
        block, states = batch.slot_mapping[group][start], self._words[group]
        batch.positions[start] = 1
        kept, batch.block_tables[group][row, 0] = batch.block_tables[group][row, 0], block
        try:
            return original(self, batch, group, row, layer, words)
        finally:
            assert states is self._words[group]
            batch.positions[start], batch.block_tables[group][row, 0] = 0, kept

    patch(HashLM, "_advance", advance)


@mutant
def two_requests_use_one_state(patch: Patch) -> None:
    """Bug: the block of a state is allocated and at once allocated again for another request."""
    original = BlockTables.occupy

    def occupy(self: BlockTables, request: Request, *args: Any) -> None:
        original(self, request, *args)
        for kind, table in zip(self.layout.kinds, request.block_ids, strict=True):
            if isinstance(kind, StateKind) and table:
                table[-1] = max(table[-1] - 1, 1)

    patch(BlockTables, "occupy", occupy)


@mutant
def state_not_saved_by_a_swap(patch: Patch) -> None:
    original = HashLM.move_blocks

    def move_blocks(self: HashLM, batch: StepBatch) -> None:
        batch.swap_out = [move for move in batch.swap_out if move[0] not in self._recurrent]
        return original(self, batch)

    patch(HashLM, "move_blocks", move_blocks)


@mutant
def state_not_restored_by_a_swap(patch: Patch) -> None:
    original = HashLM.move_blocks

    def move_blocks(self: HashLM, batch: StepBatch) -> None:
        batch.swap_in = [move for move in batch.swap_in if move[0] not in self._recurrent]
        return original(self, batch)

    patch(HashLM, "move_blocks", move_blocks)


@mutant
def state_ahead_of_the_saved_position(patch: Patch) -> None:
    """Bug: a state is saved for fewer tokens than it covers, because steps in flight have already advanced it."""
    patch(StateKind, "continues_at", lambda self, position, num_computed: True)


@mutant
def fork_takes_the_state_where_it_stands(patch: Patch) -> None:
    """Bug: a further output for the same prompt starts from the first output's current state, which has already
    advanced."""
    original = KVCacheManager._find_shared

    def find_shared(self: KVCacheManager, request: Request) -> Any:
        unit, self.layout.share_unit = self.layout.share_unit, 1
        try:
            return original(self, request)
        finally:
            self.layout.share_unit = unit

    patch(KVCacheManager, "_find_shared", find_shared)
    patch(StateKind, "continues_at", lambda self, position, num_computed: True)


@mutant
def snapshot_of_a_later_position(patch: Patch) -> None:
    """Bug: a shared prefix gets the state snapshot of the next table entry."""
    original = CacheKind.last_block
    patch(StateKind, "last_block", lambda self, entry, size: max(original(self, entry, size) - self.span // size, 0))


@mutant
def incomplete_entry_is_published(patch: Patch) -> None:
    """Bug: the block of a state is published to the prefix cache before its last position has been computed."""
    original = CacheKind.completed_by

    def completed_by(self: StateKind, block: int, block_size: int) -> int | None:
        return original(self, block, block_size) if self.span == block_size else (block * block_size) // self.span

    patch(StateKind, "completed_by", completed_by)


@mutant
def state_of_the_newest_block_is_read(patch: Patch) -> None:
    """Bug: a row that enters a new table entry reads the state of that entry instead of the previous one."""
    patch(StateKind, "first_in_reach", lambda self, position: position // self.span)


@mutant
def new_entry_is_not_written_in_steady_decode(patch: Patch) -> None:
    """Bug: rows that only decode continue to write the table entry with which they began."""
    original = InputBatch._advance

    def advance(self: InputBatch, step: StepBatch, out: SchedulerOutput) -> StepBatch:
        before = step.slot_mapping.copy()
        step = original(self, step, out)
        states = self._advances[:, 0] == 0
        step.slot_mapping[states] = before[states]
        return step

    patch(InputBatch, "_advance", advance)


@mutant
def hit_ends_inside_an_entry(patch: Patch) -> None:
    """Bug: the length of a prefix hit is determined by K and V only, so it may end inside an entry of recurrent
    states."""

    def continues(self: CacheLayout, num_blocks: int, has: Callable[[int, int], bool]) -> bool:
        groups = [group for group, kind in enumerate(self.kinds) if not isinstance(kind, StateKind)]
        return all(has(group, index) for group in groups for index in self.in_reach(group, num_blocks))

    patch(CacheLayout, "_continues", continues)


@mutant
def snapshot_released_before_it_is_read(patch: Patch) -> None:
    original = CacheLayout.first_in_reach

    def first(self: CacheLayout, group: int, position: int) -> int:
        ahead = isinstance(self.kinds[group], StateKind)
        return original(self, group, position + 1 if ahead else position)

    patch(CacheLayout, "first_in_reach", first)
