"""Which block holds which prefix: a tree of full blocks, found by a SHA-256 chain and trusted only after comparison.

The idea of hashing blocks in a chain is vLLM's automatic prefix caching; the tree, so that a hit is verified token by
token along its whole path and a hash collision can never hand out foreign content, is RadixAttention's (SGLang).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from chairlift.errors import InvariantError
from chairlift.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.kv_cache.prefix_node import PrefixNode
from chairlift.kv_cache.swap import SwapPool
from chairlift.request import Request

__all__ = ["NEVER", "PrefixCache", "block_tokens"]

NEVER = 1 << 60
"""As a number of published blocks: this request offers no more of them."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_TOKEN_BYTES = 8


def block_tokens(token_ids: list[int]) -> bytes:
    """Token ids as bytes, eight each, in the machine's order: what a node compares and hashes."""
    return array("q", token_ids).tobytes()


class PrefixCache:
    """Full blocks by content. Two requests share a block only if salt, adapter and every token up to its end agree.

    ``secret`` makes keys differ between processes; ``hash_function`` is a seam for tests with colliding hashes. Copies
    in ``host_pool`` last until they are evicted there, or what they copy is forgotten.
    """

    def __init__(
        self,
        block_size: int,
        pools: Sequence[BlockPool],
        secret: bytes = b"",
        hash_function: Callable[[bytes], bytes] = _sha256,
        host_pool: SwapPool | None = None,
    ) -> None:
        self.block_size = block_size
        self._host_pool = host_pool
        if host_pool is not None:
            host_pool.lost = self.lost_copy
        self._pools = pools
        self._secret = secret
        self._hash = hash_function
        self._nodes: dict[bytes, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def walk(self, request: Request, max_blocks: int) -> list[PrefixNode]:
        """The longest path of known nodes that spells the request's first tokens, at most ``max_blocks`` long.

        Nodes on the path may have lost their block in some group; the caller decides what is usable.
        """
        path: list[PrefixNode] = []
        node = self._nodes.get(self._root_key(request))
        if node is None or node.owner != (request.adapter_id, request.cache_salt):
            return path
        size = self.block_size
        while len(path) < max_blocks:
            start = len(path) * size
            tokens = block_tokens(request.token_ids[start : start + size])
            child = self._nodes.get(self._child_key(node, tokens))
            if child is None or child.parent is not node or child.tokens != tokens:
                break
            path.append(child)
            node = child
        return path

    def publish(self, request: Request, num_confirmed: int) -> None:
        """Offer the request's full blocks among its first ``num_confirmed`` computed positions to other requests."""
        end = num_confirmed // self.block_size
        if end <= request.num_published:
            return
        node = request.last_node
        if node is None or self._nodes.get(node.key) is not node:  # first time, or the node was evicted meanwhile
            node = self._root(request)
            request.num_published = 0 if node is not None else NEVER
        if node is None:
            return
        for index in range(request.num_published, end):
            tokens = block_tokens(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
            key = self._child_key(node, tokens)
            child = self._nodes.get(key)
            if child is None:
                child = PrefixNode(key, node, tokens, len(self._pools))
                self._nodes[key] = child
                node.num_children += 1
            elif child.parent is not node or child.tokens != tokens:
                end = NEVER  # a colliding key belongs to other content: nothing of this request behind it can be found
                break
            self._attach(child, request, index)
            node = child
        request.num_published = end
        request.last_node = node
        self._prune(node)

    def evicted(self, group: int, node: PrefixNode) -> None:
        """The pool took this node's block in ``group`` back."""
        node.blocks[group] = None
        self._prune(node)

    def lost_copy(self, group: int, node: PrefixNode) -> None:
        """The same for its host block."""
        node.hosts[group] = None
        self._prune(node)

    def drop_copy(self, group: int, node: PrefixNode) -> None:
        """Give the node's host block back, if it has one."""
        host = node.hosts[group]
        if host is not None and self._host_pool is not None:
            self._host_pool.drop(group, host)
            self.lost_copy(group, node)

    def forget(self, request: Request) -> None:
        """Drop the request's whole path, also where a window has passed: its content is not to be trusted."""
        # What was brought back and not published yet is known by its tokens only.
        for known in self.walk(request, request.num_computed_tokens // self.block_size):
            for group in range(len(self._pools)):
                self.drop_copy(group, known)
        last = request.last_node
        while last is not None:
            parent = last.parent
            for group, held in enumerate(last.blocks):
                if held is not None:
                    self._pools[group].detach(held)
                    self.evicted(group, last)
            last = parent
        for group, (pool, table) in enumerate(zip(self._pools, request.block_ids, strict=True)):
            for block in table:
                node = pool.nodes[block]
                if node is not None:
                    pool.detach(block)
                    self.evicted(group, node)
        request.num_published = NEVER

    def clear(self) -> None:
        """Forget every block. Requests that still have a ``last_node`` must not publish any more."""
        for pool in self._pools:
            for block, node in enumerate(pool.nodes):
                if node is not None:
                    pool.detach(block)
        for group in range(len(self._pools)):
            for node in list(self._nodes.values()):
                self.drop_copy(group, node)
        self._nodes.clear()

    def check_invariants(self) -> None:
        """Raises InvariantError unless nodes and blocks name each other one to one and the tree is whole."""
        children: dict[int, int] = {}
        for key, node in self._nodes.items():
            if node.key != key:
                raise InvariantError("a prefix-cache node is filed under another node's key")
            if node.parent is not None:
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
                if self._nodes.get(node.parent.key) is not node.parent:
                    raise InvariantError("a prefix-cache node has lost its parent")
                count = len(node.tokens) // _TOKEN_BYTES
                if count != self.block_size:
                    raise InvariantError(f"a cached block has {count} tokens instead of {self.block_size}")
            for pool, block in zip(self._pools, node.blocks, strict=True):
                if block is not None and pool.nodes[block] is not node:
                    raise InvariantError(f"block {block} is cached under a node it does not know")
        for node in self._nodes.values():
            if node.num_children != children.get(id(node), 0):
                raise InvariantError("a prefix-cache node miscounts its children")
            if not node.num_children and node.holds_nothing:
                raise InvariantError("a prefix-cache node holds nothing and was not removed")
        for group, pool in enumerate(self._pools):
            for block, held in enumerate(pool.nodes):
                if held is not None and held.blocks[group] != block:
                    raise InvariantError(f"block {block} names a prefix-cache node that does not name it")

    def _attach(self, node: PrefixNode, request: Request, index: int) -> None:
        for group, pool in enumerate(self._pools):
            block = request.block_ids[group][index]
            if node.blocks[group] is None and block != NULL_BLOCK and pool.nodes[block] is None:
                node.blocks[group] = block
                pool.attach(block, node)

    def _prune(self, node: PrefixNode | None) -> None:
        """Remove nodes that hold no block and lead to none, from here up to the root."""
        while node is not None and not node.num_children and node.holds_nothing:
            if self._nodes.get(node.key) is not node:
                return
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def _root(self, request: Request) -> PrefixNode | None:
        """The root of the request's adapter and salt; None where its key collides with another node's."""
        key = self._root_key(request)
        owner = (request.adapter_id, request.cache_salt)
        root = self._nodes.get(key)
        if root is None:
            root = self._nodes[key] = PrefixNode(key, None, b"", len(self._pools))
            root.owner = owner
        return root if root.owner == owner else None

    def _root_key(self, request: Request) -> bytes:
        return self._hash(f"{request.adapter_id}:{request.cache_salt}".encode() + b"\0" + self._secret)

    def _child_key(self, parent: PrefixNode, tokens: bytes) -> bytes:
        return self._hash(parent.key + tokens)
