"""File 2 of 8. The KV cache is cut into blocks, like the memory of a computer into pages (PagedAttention).

The keys and values (KV) of a token are computed once and read by all later tokens. Nobody knows how long an answer
becomes, so one contiguous piece of memory per request would waste most of it. Instead, the memory is cut into blocks of
``block_size`` positions. A request gets a block when it needs one, from anywhere. Its *block table* (``block_ids``)
lists its blocks in order.

Blocks also make sharing simple. A full block depends only on the tokens up to its end. So a request whose prompt begins
like an earlier one can use the same blocks: it computes nothing for them. This is the *prefix cache*. A block keeps its
content when its last request leaves, until the memory is needed for something else.

Here are only numbers of blocks. The memory itself is in ``model.py``.

The engine's version is the folder ``chairlift/core/kv_cache/``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from request import Request

__all__ = ["BlockPool", "KVCacheManager"]


class BlockPool:
    """Which blocks are free, how many requests use each block, and which content a block has."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        """Number of block tables that name the block. A block is free at 0."""
        self.keys: list[bytes | None] = [None] * num_blocks
        """The key of the block's content, if the prefix cache knows it."""
        self.cached: dict[bytes, int] = {}
        """Key -> block: the prefix cache."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # The next block to allocate is at the front: first blocks without content, then the least recently used one.

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, also those that still have useful content."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free block. If the prefix cache knows its content, that content is lost (it is *evicted*)."""
        block, _ = self._free.popitem(last=False)
        key = self.keys[block]
        if key is not None:
            del self.cached[key]
            self.keys[block] = None
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Use a block that has the right content already."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Stop using a block. A block without useful content is allocated again first, one with content last."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=self.keys[block] is not None)

    def publish(self, block: int, key: bytes) -> None:
        """Tell the prefix cache what a full block contains. The first of two equal blocks stays in the cache."""
        if key not in self.cached and self.keys[block] is None:
            self.cached[key] = block
            self.keys[block] = key


class KVCacheManager:
    """Gives blocks to requests and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_when_empty(self, num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) <= self.pool.num_blocks

    def admit(self, request: Request) -> bool:
        """Give a joining request blocks for all its known tokens, or none of them. Returns whether it got them.

        Leading blocks come from the prefix cache if possible. ``num_computed_tokens`` becomes their number of tokens.
        """
        found = self._find_shared(request)
        # A found block may be free at the moment. It must not be counted as a block to allocate.
        num_free = self.pool.num_free - sum(self.pool.ref_counts[block] == 0 for block in found)
        num_new = self.blocks_for(request.num_tokens) - len(found)
        if num_new > num_free:
            return False
        for block in found:  # before any allocation, which could evict them
            self.pool.share(block)
        request.block_ids = found + [self.pool.allocate() for _ in range(num_new)]
        request.num_computed_tokens = request.num_cached_tokens = len(found) * self.block_size
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for its first ``num_tokens`` positions. Returns False if there is no free block."""
        while len(request.block_ids) < self.blocks_for(num_tokens):
            if not self.pool.num_free:
                return False
            request.block_ids.append(self.pool.allocate())
        return True

    def publish(self, request: Request) -> None:
        """Add the request's full and computed blocks to the prefix cache. Called when their step has ended."""
        if self.enable_prefix_caching:
            num_full = request.num_computed_tokens // self.block_size
            for block, key in zip(request.block_ids, self._keys(request, num_full), strict=False):
                self.pool.publish(block, key)

    def free(self, request: Request) -> None:
        """Take all blocks of a request that leaves the batch. The last blocks are evicted first, since a block is
        useless without the blocks before it."""
        for block in reversed(request.block_ids):
            self.pool.release(block)
        request.block_ids = []
        request.num_computed_tokens = 0

    def _find_shared(self, request: Request) -> list[int]:
        """The cached blocks of the request's first tokens. At least one token remains to be computed, because its
        logits are needed for the next token."""
        found: list[int] = []
        if self.enable_prefix_caching:
            for key in self._keys(request, (request.num_tokens - 1) // self.block_size):
                if key not in self.pool.cached:
                    break
                found.append(self.pool.cached[key])
        return found

    def _keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of the request's first full blocks. Each key is a hash of the tokens in the block and of the key before
        it, so equal keys mean equal tokens from the very beginning."""
        keys: list[bytes] = []
        for i in range(num_blocks):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            before = keys[-1] if keys else b""
            keys.append(hashlib.sha256(before + repr(tokens).encode()).digest())
        return keys
