"""The interface of a rule of eviction, and what the engine tells it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from chairlift.base.turn_cache import TurnCache
from chairlift.core.kv_cache.eviction.gaps import Gaps
from chairlift.core.kv_cache.eviction.turns import EndedTurn, EndedTurns
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request

__all__ = ["BlockOrder", "EvictionRule", "LeaseCounts", "Prices"]


class BlockOrder(Protocol):
    """The unused blocks of one pool whose content the prefix cache knows, in the order of their eviction."""

    def add(self, block: int) -> None:
        """Take in a block that no request uses any more."""
        ...

    def remove(self, block: int) -> None:
        """Remove a block, because a request uses it again or its content is not known any more."""
        ...

    def pop(self) -> int:
        """Remove and return the block that is evicted next. There must be one."""
        ...

    def forget(self, block: int) -> None:
        """Drop what was noted about a block that is not in this order. Its content has changed."""
        ...

    def __iter__(self) -> Iterator[int]: ...

    def check_invariants(self) -> None:
        """Raise InvariantError if the order contradicts itself."""
        ...


@dataclasses.dataclass(slots=True)
class Prices:
    """What the engine tells a rule. Without a cost model only :attr:`step_tokens` is known."""

    block_size: int = 16
    share_unit: int = 1
    """Requests share leading positions in multiples of this number of tokens."""
    step_tokens: int = 2048
    """Maximum number of tokens in a step."""
    compute_seconds: Callable[[int, int], float] | None = None
    """(number of tokens, number of computed tokens before them) -> seconds to compute them; None: not known."""
    load_seconds: Callable[[int], float] | None = None
    """Number of tokens -> seconds to load their KV from files, at the measured speed; infinite while nothing can be
    loaded. None: nothing is kept in files."""
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Tenant -> weight. Others have weight 1."""
    is_needed: Callable[[int, int, int], bool] = lambda group, index, num_tokens: True
    """(cache group, index of a block, number of tokens) -> whether a request that goes on after so many tokens reads
    the block."""

    def tokens_within(self, seconds: float) -> int:
        """Maximum number of prompt tokens, at most 2**20, that are computed within ``seconds``; those of one step if
        the costs are not known."""
        if self.compute_seconds is None:
            return self.step_tokens
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high + 1) // 2
            if self.compute_seconds(middle, 0) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseCounts:
    """Leased blocks of all pools."""

    num_by_level: Mapping[int, int]
    """Level -> number of unused blocks with a lease of this level. Those whose lease has ended are counted
    until a block is needed."""
    budget: int
    """Maximum number of unused blocks with a lease."""
    num_ended: Mapping[TurnCache, int]
    """How a lease ended before the next turn -> number of blocks."""


class EvictionRule(Protocol):
    """A rule for all pools of a KV cache. It is created without arguments."""

    name: str
    prices: Prices
    now: float
    """Seconds on the engine's clock at which the newest step was scheduled. The scheduler sets it."""
    marks: bool
    """Whether :meth:`releasing` and :meth:`leaving` do anything. If not, they are not called."""
    gaps: Gaps
    turns: EndedTurns
    num_pauses: int
    """Counter: turns that ended with calls of tools. The next one: those of them that got a lease."""
    num_leases: int
    found: Counter[TurnCache]
    """What a next turn found of the cache of the turn before it -> number of such turns."""

    def order(self, capacity: int) -> BlockOrder:
        """The order of one pool with ``capacity`` blocks. It is called once for each cache group, in their order."""
        ...

    def releasing(self, request: Request) -> None:
        """Note that a request is about to release all of its blocks, for any reason. ``request.last_node`` is the node
        of its last full block. For each cache group, a call of :meth:`leaving` follows."""
        ...

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        """Note that the request is about to release blocks whose content is known: (position of the first token,
        block)."""
        ...

    def ended(self, request: Request) -> None:
        """Note that a request has ended well and is about to release its blocks. ``request.last_node`` is the node of
        its last full block."""
        ...

    def paused(self, request_id: str, tools: Sequence[str]) -> EndedTurn | None:
        """Note that the answer of a request that has ended calls these tools. The caller's next turn comes when they
        have run. Returns the turn; None if it is not known, or has no tools."""
        ...

    def arrived(self, request: Request, keys: Iterable[bytes]) -> None:
        """Note that a request waits. ``keys`` are the keys in the prefix cache of the full blocks of its tokens; they
        are made while they are read."""
        ...

    def joining(self, request: Request, path: Sequence[PrefixNode]) -> None:
        """Note that a request is about to use the blocks of these nodes, of which there may be none. If it is the next
        turn of a conversation that called tools, its ``resumed`` gets what the pause left."""
        ...

    def leases(self) -> LeaseCounts | None:
        """The leased blocks; None if the rule has no leases."""
        ...
