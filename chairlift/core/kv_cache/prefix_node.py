"""A node of the tree of the prefix cache. Requests refer to nodes, so this module imports no other module of the
package."""

from __future__ import annotations

__all__ = ["PrefixNode"]


class PrefixNode:
    """Node for one full block of tokens that follows a certain prefix. ``blocks`` and ``hosts`` have one entry per
    cache group: the block with the tokens' KV, and the host block with a copy of it; None if there is none."""

    __slots__ = ("blocks", "hosts", "key", "num_children", "owner", "parent", "tokens")

    def __init__(self, key: bytes, parent: PrefixNode | None, tokens: bytes, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        """Token ids packed by :func:`~chairlift.base.prefix_keys.block_tokens`, then marks of
        kinds. Bytes are used because, unlike tuples, they cost the garbage collector no time."""
        self.owner: bytes | None = None
        """What distinguishes a root node from other root nodes; None for other nodes."""
        self.blocks: list[int | None] = [None] * num_groups
        self.hosts: list[int | None] = [None] * num_groups
        self.num_children = 0

    @property
    def holds_nothing(self) -> bool:
        return self.blocks.count(None) == len(self.blocks) and self.hosts.count(None) == len(self.hosts)
