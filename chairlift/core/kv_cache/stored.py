"""Blocks of the prefix cache that are kept outside of it: which ones a request lacks, and how they come back.

A block that comes back is put into the prefix cache as an unused block, before the request is admitted. So admission,
eviction and sharing need to know nothing of where a block came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from chairlift.core.rows.kind import whole_before

__all__ = ["Missing", "find_missing", "find_missing_of", "restore_blocks", "restore_path"]


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
    return Missing(present, found * kv.block_size, _lacking(kv, found, path, keys))


def _lacking(
    kv: KVCacheManager, num_blocks: int, path: Sequence[PrefixNode], keys: Sequence[bytes]
) -> list[tuple[int, int, bytes]]:
    """(block index, group, key) of what the nodes of ``path`` lack for ``num_blocks`` leading blocks."""
    return sorted(
        (index, group, keys[index])
        for group in range(len(kv.pools))
        for index in kv.layout.in_reach(group, num_blocks)
        if not (index < len(path) and kv.has(group, path[index]))
    )


def find_missing_of(
    kv: KVCacheManager, path: Sequence[PrefixNode], is_stored: Callable[[int, bytes], bool]
) -> Missing | None:
    """The same for a request that goes on after the last node of ``path``, whose nodes may have been removed."""
    cache = kv.prefix_cache
    if cache is None:
        return None
    known = cache.known(path)

    def has(group: int, index: int) -> bool:
        return index < len(known) and kv.has(group, known[index])

    keys = [node.key for node in path]
    found = kv.layout.agreed(len(path), lambda group, index: has(group, index) or is_stored(group, keys[index]))
    present = kv.layout.agreed(len(path), has)
    if found <= present:
        return None
    return Missing(present * kv.block_size, found * kv.block_size, _lacking(kv, found, known, keys))


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
    if cache is None or not _make_room(kv, cache.walk(request, (len(request.token_ids) - 1) // kv.block_size), blocks):
        return 0
    added = cache.restore(request, blocks, _putter(kv, write))
    kv.tables.num_changes += bool(added)
    return added


def restore_path(
    kv: KVCacheManager,
    path: Sequence[PrefixNode],
    blocks: Mapping[tuple[int, int], bytes],
    write: Callable[[int, int, bytes], None],
) -> PrefixNode | None:
    """The same for blocks of a path of nodes, which may have been removed. Returns the node of the last block that is
    known now."""
    cache = kv.prefix_cache
    if cache is None or not _make_room(kv, cache.known(path), blocks):
        return None
    added, last = cache.restore_path(path, blocks, _putter(kv, write))
    kv.tables.num_changes += bool(added)
    return last


def _make_room(kv: KVCacheManager, present: Sequence[PrefixNode], blocks: Mapping[tuple[int, int], bytes]) -> bool:
    """Whether there are free blocks for ``blocks``. Those of the nodes ``present`` are taken last, and the first of
    them at the very last, because the others are useless without it."""
    for node in reversed(present):
        for pool, block in zip(kv.pools, node.blocks, strict=True):
            if block is not None and pool.ref_counts[block] == 0:
                pool.share(block)  # the least recently used blocks are evicted first; this one is used now
                pool.release(block)
    needed = [sum(group == each for _, each in blocks) for group in range(len(kv.pools))]
    return all(count <= pool.num_free for count, pool in zip(needed, kv.pools, strict=True))


def _putter(kv: KVCacheManager, write: Callable[[int, int, bytes], None]) -> Callable[[int, PrefixNode, bytes], bool]:
    """Function that gives a node of a group a block with this content."""

    def put(group: int, node: PrefixNode, content: bytes) -> bool:
        (block,) = kv.tables.take(group, 1)
        write(group, block, content)
        node.blocks[group] = block
        kv.pools[group].attach(block, node)
        kv.pools[group].release(block)
        return True

    return put
