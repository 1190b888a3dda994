"""The least recently used block is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from chairlift.core.kv_cache.eviction.rule import BlockOrder, Prices
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request

__all__ = ["LRU", "LRUOrder"]


class LRUOrder:
    """Blocks in the order in which they were released."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.remove = self._blocks.__delitem__

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def check_invariants(self) -> None:
        pass


class LRU:
    """Base class of rules. Request and class of service make no difference here."""

    name = "lru"
    marks = False

    def __init__(self) -> None:
        self.prices = Prices()
        self.now = 0.0

    def order(self, capacity: int) -> BlockOrder:
        return LRUOrder()

    def releasing(self, request: Request) -> None:
        pass

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass

    def paused(self, request_id: str, tools: Sequence[str]) -> None:
        pass

    def arrived(self, request: Request, keys: Iterable[bytes]) -> None:
        pass

    def joining(self, request: Request, path: Sequence[PrefixNode]) -> None:
        pass
