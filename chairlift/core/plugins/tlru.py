"""T-LRU: evict first the blocks whose loss cannot push the next first token of their conversation over its target.

The rule is that of "Tail-Optimized Caching for LLM Inference" (arXiv 2510.15152). If a conversation of L tokens goes on
with Q new ones, and the target of its first token allows xi tokens to be computed, then only its first
B = max(0, L + Q - xi) tokens must be in the cache. The blocks after them, its tail, are evicted before all other
blocks. Both parts are evicted in the order in which they were released.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import BlockOrder
from chairlift.core.request import Request
from chairlift.errors import InvariantError

__all__ = ["TLRU"]

_MEMORY: Final = 0.05
"""Weight of the newest turn in the mean number of new tokens."""


class _TailsFirst:
    """Tails of conversations, then the other blocks."""

    def __init__(self) -> None:
        self._tails: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()
        self._is_tail: dict[int, bool] = {}
        """Block -> whether it is in the tail of all conversations that have it and have ended a turn. Blocks that are
        not here count as no tail."""

    def mark(self, block: int, is_tail: bool) -> None:
        """Note where a used block is in a conversation that has ended a turn."""
        self._is_tail[block] = is_tail and self._is_tail.get(block, True)

    def add(self, block: int) -> None:
        (self._tails if self._is_tail.get(block) else self._others)[block] = None

    def remove(self, block: int) -> None:
        del (self._tails if block in self._tails else self._others)[block]

    def pop(self) -> int:
        block, _ = (self._tails or self._others).popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        self._is_tail.pop(block, None)

    def __iter__(self) -> Iterator[int]:
        yield from self._tails
        yield from self._others

    def check_invariants(self) -> None:
        if both := self._tails.keys() & self._others.keys():
            raise InvariantError(f"blocks {both} are in a tail and not in a tail")


class TLRU(LRU):
    """Tails first. ``target_tokens`` (xi) is the number of tokens that a request's own target for the first token
    allows; without a target, those of one step. ``next_tokens`` (Q) is the mean of the computed prompt tokens of
    requests that found something in the cache."""

    name = "tlru"
    marks = True

    def __init__(self) -> None:
        super().__init__()
        self.next_tokens = 0.0
        self._orders: list[_TailsFirst] = []

    def order(self, capacity: int) -> BlockOrder:
        self._orders.append(_TailsFirst())
        return self._orders[-1]

    def target_tokens(self, request: Request) -> int:
        target = request.service.first_token_by - request.arrival_time
        return self.prices.step_tokens if target == math.inf else self.prices.tokens_within(target)

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        if request.finish_reason is None:  # it was preempted, and its turn goes on
            return
        if group == 0 and request.num_cached_tokens:
            new = request.num_prompt_tokens - request.num_cached_tokens
            self.next_tokens += (new - self.next_tokens) * (_MEMORY if self.next_tokens else 1.0)
        kept = len(request.token_ids) + self.next_tokens - self.target_tokens(request)
        order = self._orders[group]
        for first, block in entries:
            order.mark(block, first >= kept)
