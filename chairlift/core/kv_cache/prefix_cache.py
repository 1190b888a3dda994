"""The prefix cache: a tree of full blocks. A block is found by a chain of SHA-256 hashes and compared token by token.

The hash chain is the idea of vLLM's automatic prefix caching, the tree that of RadixAttention (SGLang). A hit is
compared along its whole path in the tree, so a hash collision can never return wrong content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chairlift.base.prefix_keys import TOKEN_BYTES, block_content, block_tokens, chain, root_content, sha256
from chairlift.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.core.kv_cache.cache_kind import CacheKind
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.kv_cache.swap import SwapPool
from chairlift.core.request import Request
from chairlift.errors import InvariantError

__all__ = ["NEVER", "PrefixCache"]

NEVER = 1 << 60
"""Value of ``num_published`` for a request whose blocks are never published again."""


class PrefixCache:
    """Finds full blocks by their content. Two requests share a block only if they have the same salt, the same tokens
    up to the block's end, and the same keys of their kinds up to there (:meth:`RowKind.key`, :meth:`RowKind.marks`).

    ``kinds`` are the cache kinds of the pools (default: full). ``secret`` makes the keys differ between processes.
    ``hash_function`` is for tests with colliding hashes. ``host_pool`` holds copies of evicted blocks. A copy exists
    until it is evicted there or its node is removed.
    """

    def __init__(
        self,
        block_size: int,
        pools: Sequence[BlockPool],
        secret: bytes = b"",
        hash_function: Callable[[bytes], bytes] = sha256,
        host_pool: SwapPool | None = None,
        kinds: Sequence[CacheKind] | None = None,
    ) -> None:
        self.block_size = block_size
        kinds = [CacheKind(block_size)] * len(pools) if kinds is None else kinds
        # One entry per cache kind. None: its table entries are single blocks, so that entry and block have the same
        # index.
        self._kinds = [None if kind.span == block_size else kind for kind in kinds]
        self._host_pool = host_pool
        if host_pool is not None:
            host_pool.lost = self.lost_copy
        self._pools = pools
        self._secret = secret
        self._hash = hash_function
        self._nodes: dict[bytes, PrefixNode] = {}
        self.journal: list[tuple[Any, ...]] | None = None
        """Changes of the blocks in the first group's pool: ("stored", key, parent's key or None, content, request),
        ("removed", key) or ("cleared",). None: changes are not recorded. The reader replaces the list."""
        self.published: list[tuple[int, PrefixNode]] | None = None
        """(group, node) of each block that got its content from a computed request whose content may outlive this
        process. None: nobody reads the list. The reader replaces it."""
        self.forgotten: list[bytes] = []
        """Keys of nodes that were removed because their content may be wrong, if :attr:`published` is read. The reader
        replaces the list."""

    def __len__(self) -> int:
        return len(self._nodes)

    def walk(self, request: Request, max_blocks: int) -> list[PrefixNode]:
        """The longest path of known nodes for the request's first tokens, at most ``max_blocks`` nodes long.

        A node on the path may have lost its block in some group. The caller must check which nodes are usable.
        """
        path: list[PrefixNode] = []
        node = self._nodes.get(self._root_key(request))
        if node is None or node.owner != self._owner(request):
            return path
        while len(path) < max_blocks:
            tokens = self._content(request, len(path))
            child = self._nodes.get(self._child_key(node, tokens))
            if child is None or child.parent is not node or child.tokens != tokens:
                break
            path.append(child)
            node = child
        return path

    def num_common(self, request: Request, other: Request, max_blocks: int) -> int:
        """Number of leading blocks, at most ``max_blocks``, that both requests would share. ``other`` must have so many
        tokens."""
        if self._owner(request) != self._owner(other):
            return 0
        low = 0
        high = max_blocks  # the first ``low`` blocks have equal tokens; more than ``high`` blocks have not
        while low < high:
            middle = high if low == 0 and high == max_blocks else (low + high + 1) // 2
            begin, end = low * self.block_size, middle * self.block_size
            if request.token_ids[begin:end] == other.token_ids[begin:end]:
                low = middle
            else:
                high = middle - 1
        if request.kinds or other.kinds:
            blocks = range(low)
            low = next((i for i in blocks if self._content(request, i) != self._content(other, i)), low)
        return low

    def hashes(self, request: Request, num_blocks: int) -> Iterator[int]:
        """One hash for each of the request's first ``num_blocks`` full blocks, of all content up to the block's end.
        Requests that would share these blocks have the same hashes. They are cheaper than the keys of nodes, and may
        collide."""
        key = hash(self._owner(request))
        for index in range(num_blocks):
            key = hash((key, self._content(request, index)))
            yield key

    def keys(self, request: Request, num_blocks: int) -> Iterator[bytes]:
        """The keys of the nodes of the request's first ``num_blocks`` full blocks, whether the nodes exist or not."""
        contents = (self._content(request, index) for index in range(num_blocks))
        return chain(self._owner(request), contents, self._hash)

    def outlives(self, request: Request) -> bool:
        """Whether the keys of the request's blocks mean the same in another process."""
        return all(kind.outlives(request) for kind in request.kinds)

    def restore(
        self, request: Request, blocks: Mapping[tuple[int, int], bytes], put: Callable[[int, PrefixNode, bytes], bool]
    ) -> int:
        """Add blocks that were computed before. ``blocks`` maps (block index, group) to content. ``put`` takes (group,
        node, content), and gives the node a block; it returns False if there is none. Returns the number of blocks that
        were added."""
        contents = [self._content(request, index) for index in range(1 + max((at for at, _ in blocks), default=-1))]
        return self._restore(self._root(request), contents, blocks, put)[0]

    def restore_path(
        self,
        path: Sequence[PrefixNode],
        blocks: Mapping[tuple[int, int], bytes],
        put: Callable[[int, PrefixNode, bytes], bool],
    ) -> tuple[int, PrefixNode | None]:
        """The same for the blocks of a path of nodes that begins at the first block; the nodes may have been removed.
        Returns (number of blocks that were added, node of the last block that is known now)."""
        root = path[0].parent
        if root is None or root.owner is None:
            return 0, None
        return self._restore(self._root_of(root.key, root.owner), [node.tokens for node in path], blocks, put)

    def _restore(
        self,
        node: PrefixNode | None,
        contents: Sequence[bytes],
        blocks: Mapping[tuple[int, int], bytes],
        put: Callable[[int, PrefixNode, bytes], bool],
    ) -> tuple[int, PrefixNode | None]:
        added = 0
        if node is None:
            return added, None
        last = node
        for index, tokens in enumerate(contents):
            child = self._child(node, tokens)
            if child is None:
                break
            node = child
            node.num_children += 1  # so that no eviction for its block removes the node
            for group in range(len(self._pools)):
                content = blocks.get((index, group))
                if content is not None and node.blocks[group] is None and put(group, node, content):
                    added += 1
            node.num_children -= 1
            if not node.holds_nothing:
                last = node
        self._prune(node)
        return added, last

    def known(self, path: Sequence[PrefixNode]) -> list[PrefixNode]:
        """The nodes that stand for a path of nodes now. The path begins at the first block; the result ends where the
        first node is missing."""
        found: list[PrefixNode] = []
        above = path[0].parent if path else None
        node = None if above is None else self._nodes.get(above.key)
        for old in path:
            child = self._nodes.get(old.key)
            if child is None or child.parent is not node or child.tokens != old.tokens:
                break
            found.append(child)
            node = child
        return found

    def publish(self, request: Request, num_confirmed: int) -> None:
        """Let other requests share the full blocks among the request's first ``num_confirmed`` computed positions."""
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
            child = self._child(node, self._content(request, index))
            if child is None:
                end = NEVER  # the key collides with other content, so later blocks of this request cannot be found
                break
            self._attach(child, request, index)
            node = child
        request.num_published = end
        request.last_node = node
        self._prune(node)

    def fill_holes(self, request: Request) -> None:
        """Share the request's copies of published blocks that others had published first, and that were evicted since.
        Without them its later blocks could not be found."""
        node = request.last_node
        if request.num_published == NEVER or node is None or self._nodes.get(node.key) is not node:
            return
        index = request.num_published
        while node.parent is not None:
            index -= 1
            self._attach(node, request, index)
            node = node.parent

    def _child(self, node: PrefixNode, tokens: bytes) -> PrefixNode | None:
        """The node of a block with this content, which follows ``node``; made if there is none. None: its key is that
        of other content."""
        key = self._child_key(node, tokens)
        child = self._nodes.get(key)
        if child is None:
            child = PrefixNode(key, node, tokens, len(self._pools))
            self._nodes[key] = child
            node.num_children += 1
            return child
        return child if child.parent is node and child.tokens == tokens else None

    def evicted(self, group: int, node: PrefixNode) -> None:
        """Note that the node's block in ``group`` was evicted from its pool."""
        if self.journal is not None and group == 0 and node.blocks[0] is not None:
            self.journal.append(("removed", node.key))
        node.blocks[group] = None
        self._prune(node)

    def lost_copy(self, group: int, node: PrefixNode) -> None:
        """Note that the node's host block in ``group`` is lost."""
        node.hosts[group] = None
        self._prune(node)

    def drop_copy(self, group: int, node: PrefixNode) -> None:
        """Release the node's host block in ``group``, if it has one."""
        host = node.hosts[group]
        if host is not None and self._host_pool is not None:
            self._host_pool.drop(group, host)
            self.lost_copy(group, node)

    def forget(self, request: Request) -> None:
        """Remove all nodes of the request's tokens, because their content may be wrong. Nodes that sliding windows have
        passed are removed too."""
        # The request's blocks that were copied back from host memory have no link to their nodes until they are
        # published. So follow the request's tokens to the nodes, to drop the copies in host memory.
        for known in self.walk(request, request.num_computed_tokens // self.block_size):
            for group in range(len(self._pools)):
                self.drop_copy(group, known)
            self._note_forgotten(known)
        last = request.last_node
        while last is not None:
            parent = last.parent
            self._note_forgotten(last)
            for group, block in enumerate(last.blocks):
                if block is not None:
                    self._pools[group].detach(block)
                    self.evicted(group, last)
            last = parent
        for group, (pool, table) in enumerate(zip(self._pools, request.block_ids, strict=True)):
            for block in table:
                node = pool.nodes[block]
                if node is not None:
                    pool.detach(block)
                    self._note_forgotten(node)
                    self.evicted(group, node)
        request.num_published = NEVER

    def _note_forgotten(self, node: PrefixNode) -> None:
        if self.published is not None:
            self.forgotten.append(node.key)

    def clear(self) -> None:
        """Remove all nodes. Requests that still have a ``last_node`` must not publish any more."""
        for group, pool in enumerate(self._pools):
            for block, node in enumerate(pool.nodes):
                if node is not None:
                    pool.detach(block)
                    node.blocks[group] = None  # readers of ``published`` must not take what is written there later
        for group in range(len(self._pools)):
            for node in list(self._nodes.values()):
                self.drop_copy(group, node)
        self._nodes.clear()
        if self.journal is not None:
            self.journal.append(("cleared",))

    def check_invariants(self) -> None:
        """Raise InvariantError unless nodes and blocks refer to each other one to one and the tree is complete."""
        children: dict[int, int] = {}
        for key, node in self._nodes.items():
            if node.key != key:
                raise InvariantError("a prefix-cache node is filed under another node's key")
            if node.parent is not None:
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
                if self._nodes.get(node.parent.key) is not node.parent:
                    raise InvariantError("a prefix-cache node has lost its parent")
                size = len(node.tokens) - self.block_size * TOKEN_BYTES
                if size < 0:
                    count = len(node.tokens) // TOKEN_BYTES
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
            for block, owner in enumerate(pool.nodes):
                if owner is not None and owner.blocks[group] != block:
                    raise InvariantError(f"block {block} names a prefix-cache node that does not name it")

    def _content(self, request: Request, index: int) -> bytes:
        """Content of a full block as bytes: its tokens, then the marks of the request's kinds."""
        start, end = index * self.block_size, (index + 1) * self.block_size
        tokens = block_tokens(request.token_ids[start:end])
        if not request.kinds:
            return tokens
        return block_content(
            tokens, [(kind.name, marks) for kind in request.kinds if (marks := kind.marks(request, start, end))]
        )

    def _attach(self, node: PrefixNode, request: Request, index: int) -> None:
        for group, (pool, kind) in enumerate(zip(self._pools, self._kinds, strict=True)):
            entry = index if kind is None else kind.completed_by(index, self.block_size)
            block = NULL_BLOCK if entry is None else request.block_ids[group][entry]
            if node.blocks[group] not in (None, block):
                request.has_copies = True
            if node.blocks[group] is None and block != NULL_BLOCK and pool.nodes[block] is None:
                node.blocks[group] = block
                pool.attach(block, node)
                if self.published is not None and self.outlives(request):
                    self.published.append((group, node))
                if self.journal is not None and group == 0:
                    above = None if node.parent is None or node.parent.owner is not None else node.parent.key
                    self.journal.append(("stored", node.key, above, node.tokens, request))

    def _prune(self, node: PrefixNode | None) -> None:
        """Remove the node if it has neither blocks nor children; then its parent if the same holds, and so on up to the
        root."""
        while node is not None and not node.num_children and node.holds_nothing:
            if self._nodes.get(node.key) is not node:
                return
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def _root(self, request: Request) -> PrefixNode | None:
        """Root node for the request's salt and kinds; None if the key of this root is also the key of another node (a
        hash collision)."""
        return self._root_of(self._root_key(request), self._owner(request))

    def _root_of(self, key: bytes, owner: bytes) -> PrefixNode | None:
        root = self._nodes.get(key)
        if root is None:
            root = self._nodes[key] = PrefixNode(key, None, b"", len(self._pools))
            root.owner = owner
        return root if root.owner == owner else None

    def _root_key(self, request: Request) -> bytes:
        return self._hash(self._owner(request))

    def _owner(self, request: Request) -> bytes:
        """What distinguishes the request's root node from others: the salt and the keys of the request's kinds."""
        kinds = [(kind.name, key) for kind in request.kinds if (key := kind.key(request))]
        return root_content(request.cache_salt, kinds, self._secret)

    def _child_key(self, parent: PrefixNode, tokens: bytes) -> bytes:
        return self._hash(parent.key + tokens)
