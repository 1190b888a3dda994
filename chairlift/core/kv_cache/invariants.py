"""Checks of the block tables between two steps, for tests and simulation. They are too slow for production."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from chairlift.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.core.request import Request
from chairlift.errors import InvariantError

if TYPE_CHECKING:
    from chairlift.core.kv_cache.manager import KVCacheManager

__all__ = ["check_manager"]


def check_manager(kv: KVCacheManager, requests: Iterable[Request]) -> None:
    """Compare every counter with the tables of the unfinished requests. Raises InvariantError for the first
    difference."""
    references: list[dict[int, int]] = [{} for _ in kv.pools]
    num_entries = 0
    reserved = [0] * len(kv.pools)
    unheld = [0] * len(kv.pools)
    for request in requests:
        if request.request_id in kv.swapped and request.block_ids:
            raise InvariantError(f"{request!r} holds blocks, and is swapped out")
        for group, table in enumerate(request.block_ids):
            num_entries += len(table) * kv.layout.kinds[group].stores_positions
            reserved[group] += request.reserved[group][0]
            unheld[group] += request.reserved[group][1]
            _check_table(kv, group, request)
            for block in table:
                if block != NULL_BLOCK:
                    references[group][block] = references[group].get(block, 0) + 1
    for _, group, blocks in kv.tables.deferred:
        for block in blocks:
            references[group][block] = references[group].get(block, 0) + 1
    for spares in kv.tables.spares.values():
        for group, _, block in spares:
            references[group][block] = references[group].get(block, 0) + 1
    for pool, named in zip(kv.pools, references, strict=True):
        pool.check_invariants(named)
    kv.swap_pool.check_invariants(kv.swapped.values())
    if num_entries != kv.tables.held_blocks:
        raise InvariantError(f"block tables hold {num_entries} entries, but {kv.tables.held_blocks} are counted")
    if (reserved, unheld) != (kv.tables.reservations.reserved, kv.tables.reservations.unheld):
        raise InvariantError(f"{reserved} blocks are reserved, {unheld} of them not held; the cache counts otherwise")
    if kv.prefix_cache is not None:
        kv.prefix_cache.check_invariants()


def _check_table(kv: KVCacheManager, group: int, request: Request) -> None:
    table = request.block_ids[group]
    span = kv.layout.kinds[group].span
    if len(table) * span < request.num_computed_tokens:
        raise InvariantError(f"{request!r} computed beyond its {len(table)} blocks in group {group}")
    first = kv.layout.first_in_reach(group, request.num_computed_tokens)
    if any(block == NULL_BLOCK for block in table[first:]):
        raise InvariantError(f"{request!r} has the null block within reach in group {group}")
    if any(table[: min(request.num_out_of_reach[group], len(table))]):
        raise InvariantError(f"{request!r} still holds blocks that group {group} counts as left behind")
    _check_writable(kv.pools[group], group, request, table[request.num_computed_tokens // span :])


def _check_writable(pool: BlockPool, group: int, request: Request, tail: list[int]) -> None:
    """Check that each block that a request will write is in no other table and is unknown to the prefix cache."""
    for block in tail:
        if pool.ref_counts[block] != 1 or pool.nodes[block] is not None:
            raise InvariantError(f"{request!r} is about to write block {block} of group {group}, which others can read")
