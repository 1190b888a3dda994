"""Blocks of the prefix cache that are kept outside of it: which ones a request lacks, and how they come back.

A block that comes back is put into the prefix cache as an unused block, before the request is admitted. So admission,
eviction and sharing need to know nothing of where a block came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from chairlift.core.rows.kind import whole_before

__all__ = ["Missing", "find_missing", "restore_blocks"]


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """Blocks that would let a request begin later."""

    present: int
    """Number of the request's leading positions that the cache has already."""
    num_tokens: int
    """Number of leading positions that it has with the blocks."""
    blocks: list[tuple[int, int, bytes]]
    """(block index, group, key) of each block, in ascending order."""


def find_missing(kv: KVCacheManager, request: Request, is_stored: Callable[[int, bytes], bool]) -> Missing | None:
    """The blocks that the request lacks and that ``is_stored`` (group, key) has; None if they would not let it begin
    later."""
    cache = kv.prefix_cache
    if cache is None or not request.may_share or not cache.outlives(request):
        return None
    limit = (len(request.token_ids) - 1) // kv.block_size
    path = cache.walk(request, limit)
    keys: list[bytes] = []
    chain = cache.keys(request, limit)

    def has(group: int, index: int) -> bool:
        if index < len(path) and kv.has(group, path[index]):
            return True
        while len(keys) <= index:
            keys.append(next(chain))
        return is_stored(group, keys[index])

    found = kv.layout.agreed(limit, has)
    while (whole := whole_before(request, found * kv.block_size)) < found * kv.block_size:
        found = kv.layout.agreed(whole // kv.block_size, has)
    present = kv.num_shared(request)
    if found * kv.block_size <= present:
        return None
    lacking = [
        (index, group, keys[index])
        for group in range(len(kv.pools))
        for index in kv.layout.in_reach(group, found)
        if not (index < len(path) and kv.has(group, path[index]))
    ]
    return Missing(present, found * kv.block_size, sorted(lacking))


def restore_blocks(
    kv: KVCacheManager,
    request: Request,
    blocks: Mapping[tuple[int, int], bytes],
    write: Callable[[int, int, bytes], None],
) -> int:
    """Put blocks that outlived their computation into the prefix cache. Call it between two steps.

    ``blocks`` maps (block index, group) to content. ``write`` takes (group, block, content). Only free blocks are used,
    and those of the request's own beginning are not taken for it. Returns the number of blocks.
    """
    cache = kv.prefix_cache
    if cache is None:
        return 0
    for node in cache.walk(request, (len(request.token_ids) - 1) // kv.block_size):
        for pool, block in zip(kv.pools, node.blocks, strict=True):
            if block is not None and pool.ref_counts[block] == 0:
                pool.share(block)  # the least recently used blocks are evicted first; this one is used now
                pool.release(block)
    needed = [sum(group == each for _, each in blocks) for group in range(len(kv.pools))]
    if any(count > pool.num_free for count, pool in zip(needed, kv.pools, strict=True)):
        return 0

    def put(group: int, node: PrefixNode, content: bytes) -> bool:
        (block,) = kv.tables.take(group, 1)
        write(group, block, content)
        node.blocks[group] = block
        kv.pools[group].attach(block, node)
        kv.pools[group].release(block)
        return True

    added = cache.restore(request, blocks, put)
    if added:
        kv.tables.num_changes += 1
    return added
