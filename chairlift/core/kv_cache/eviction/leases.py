"""Soft leases: an order in which leased blocks are evicted last, and no lease keeps a block from being allocated."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from chairlift.base.turn_cache import TurnCache
from chairlift.core.kv_cache.eviction.rule import EvictionRule
from chairlift.errors import InvariantError

__all__ = ["BUDGET", "Lease", "LeaseOrder"]

BUDGET: Final = 0.5
"""Largest part of a pool that unused blocks with a lease may take."""
_MOST_TURNS: Final = 4096

_SPARE_ENDS: Final = 64
"""Number of ends and of names of queues that are noted in addition to two for each queue."""


class Lease(NamedTuple):
    """A lease. A block that two turns lease has the higher level, or both together; see :meth:`LeaseOrder.lease`."""

    level: int
    """Leases of a lower level are evicted first."""
    until: float = math.inf
    """Time at which the lease ends, in seconds on the engine's clock."""
    tenant: str = ""
    """Tenant whose part of the budget the block takes."""
    turn: int = 0
    """Number of the turn that got the lease; 0 if no turn did, or several."""
    expected: float = math.inf
    """Time at which the block is probably used again. Of the leases of a level, the one with the latest is evicted
    first."""
    seconds: float = 0.0
    """If this is not 0, each use of the block renews the lease: it ends so many seconds after the use."""

    @property
    def queue(self) -> _Queue:
        return self.level, -self.expected, self.until


_Queue = tuple[int, float, float]
"""(level, negative time of the next use, end) of the leases whose blocks are in one queue."""


@dataclasses.dataclass(slots=True)
class _Held:
    """The unused blocks of a tenant that have a lease."""

    count: int = 0
    queues: dict[_Queue, OrderedDict[int, None]] = dataclasses.field(default_factory=dict)
    names: list[_Queue] = dataclasses.field(default_factory=list)
    """Heap of the names of the queues. Names of queues that are gone are skipped."""

    def add(self, block: int, name: _Queue) -> None:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = OrderedDict()
            heapq.heappush(self.names, name)
            if len(self.names) > 2 * len(self.queues) + _SPARE_ENDS:
                self.names = sorted(self.queues)
        queue[block] = None
        self.count += 1

    def remove(self, block: int, name: _Queue) -> None:
        queue = self.queues[name]
        del queue[block]
        if not queue:
            del self.queues[name]
        self.count -= 1

    def first(self) -> _Queue:
        """The name of the queue whose blocks go first. There must be one."""
        while self.names[0] not in self.queues:
            heapq.heappop(self.names)
        return self.names[0]


class LeaseOrder:
    """Blocks whose lease has ended are evicted first, then ordinary blocks, then leased ones: the lowest level first,
    then those that are expected to be used last. (Belady's rule, with what is known of the future. The least recently
    used of several conversations that take turns would be the one that comes back first.) Within each part the order is
    that in which the blocks were released. A request releases its last block first, so a block is evicted before the
    blocks that it follows.

    Times are compared when a block is needed. At most :data:`BUDGET` of the pool is leased and unused. When it is more,
    the tenant with most leased blocks for its weight loses the lease of the block that would be evicted first of its
    own. So a tenant within its weight's share of the budget loses nothing to others.
    """

    def __init__(self, capacity: int, rule: EvictionRule) -> None:
        self._rule = rule
        self._limit = int(capacity * BUDGET)
        self._expired: OrderedDict[int, None] = OrderedDict()
        self._ordinary: OrderedDict[int, None] = OrderedDict()
        self._leases: dict[int, Lease] = {}
        """Block, used or unused -> its lease."""
        self._queues: dict[_Queue, OrderedDict[int, None]] = {}
        self._ends: list[tuple[float, _Queue]] = []
        """Heap of (end, name) of the queues whose leases end. Queues that are gone are skipped."""
        self._held: dict[str, _Held] = {}
        self._num_leased = 0
        self.num_by_level: Counter[int] = Counter()
        """Level -> number of unused blocks with a lease."""
        self.num_ended: Counter[TurnCache] = Counter()
        """How a lease ended before the next turn -> number of blocks whose lease ended in this way."""
        self._first_end: OrderedDict[int, TurnCache] = OrderedDict()
        """Number of a turn -> how the lease of one of its blocks ended first, for the newest turns."""
        self._since = [0.0] * (capacity + 1)
        """Block -> time at which it was released last."""
        self.evicted_at = -math.inf
        """Time of the newest eviction of an ordinary block."""
        self.lifetime = math.inf
        """Seconds for which the ordinary block that was evicted last had not been used."""

    def __iter__(self) -> Iterator[int]:
        yield from self._expired
        yield from self._ordinary
        for queue in self._queues.values():
            yield from queue

    @property
    def num_leased(self) -> int:
        """Number of unused blocks with a lease. Those whose lease has ended are counted until a block is needed."""
        return self._num_leased

    @property
    def limit(self) -> int:
        """Largest number of unused blocks with a lease."""
        return self._limit

    @property
    def room(self) -> int:
        """Number of unused blocks without a lease that may get one within the budget."""
        return min(self._limit - self._num_leased, self.num_ordinary)

    @property
    def num_ordinary(self) -> int:
        """Number of unused blocks without a lease."""
        return len(self._ordinary) + len(self._expired)

    def is_old(self, block: int) -> bool:
        """Whether a block is unused, has no lease, and has been unused for at least half as long as the ordinary block
        that was evicted last."""
        return block in self._ordinary and self._rule.now - self._since[block] >= self.lifetime / 2

    def held_by(self) -> dict[str, int]:
        """Tenant -> number of its unused blocks with a lease."""
        return {tenant: held.count for tenant, held in self._held.items()}

    def how_ended(self, turn: int) -> TurnCache | None:
        """How the lease of one of the turn's blocks ended, if it ended before the next turn. The turn is forgotten."""
        return self._first_end.pop(turn, None)

    def lease(self, block: int, lease: Lease) -> None:
        """Give a block a lease. If it has one of a higher level, that one holds. If it has one of the same level, the
        block has the later of the two ends and the earlier of the two next uses. Of several unused blocks, the one that
        gets its lease first is evicted first, and is the first to lose it."""
        before = self._leases.get(block)
        if before is not None and before.until > self._rule.now:
            lease = _both(before, lease)
        is_unused = self._withdraw(block)
        self._leases[block] = lease
        if is_unused:
            self._add_leased(block, lease)

    def end(self, block: int, turn: int) -> None:
        """End the lease of a block, if it is that of this turn alone. If no request uses the block, it is evicted
        before ordinary ones."""
        lease = self._leases.get(block)
        if lease is not None and lease.turn == turn:
            if self._withdraw(block):
                self._expired[block] = None
            del self._leases[block]

    def add(self, block: int) -> None:
        self._since[block] = self._rule.now
        lease = self._leases.get(block)
        if lease is not None and lease.seconds:
            until = max(lease.until, self._rule.now + lease.seconds)
            self._leases[block] = lease._replace(until=until)
        lease = self._leases.get(block)
        if lease is None:
            self._ordinary[block] = None
        else:
            self._add_leased(block, lease)

    def _add_leased(self, block: int, lease: Lease) -> None:
        """Put a block at the end of the queue of its lease."""
        if lease.until <= self._rule.now:
            self._give_up(block, TurnCache.EXPIRED)
            self._ordinary[block] = None
            return
        self._expire()
        name = lease.queue
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = OrderedDict()
            if lease.until < math.inf:
                self._note_end(name)
        queue[block] = None
        if lease.tenant not in self._held:
            self._held[lease.tenant] = _Held()
        self._held[lease.tenant].add(block, name)
        self._num_leased += 1
        self.num_by_level[lease.level] += 1
        if self._num_leased > self._limit:
            self._shorten()

    def _note_end(self, name: _Queue) -> None:
        heapq.heappush(self._ends, (name[2], name))
        if len(self._ends) > 2 * len(self._queues) + _SPARE_ENDS:  # renewed leases leave ends of queues that are gone
            self._ends = sorted((each[2], each) for each in self._queues if each[2] < math.inf)

    def remove(self, block: int) -> None:
        if block in self._ordinary:
            del self._ordinary[block]
            return
        self._withdraw(block)
        lease = self._leases.get(block)
        if lease is not None and lease.until <= self._rule.now:  # so that this use does not renew it
            self._give_up(block, TurnCache.EXPIRED)

    def forget(self, block: int) -> None:
        self._leases.pop(block, None)

    def pop(self) -> int:
        if self._ends:
            self._expire()
        if self._expired:
            return self._expired.popitem(last=False)[0]
        if self._ordinary:
            block, _ = self._ordinary.popitem(last=False)
            self.evicted_at = self._rule.now
            self.lifetime = self.evicted_at - self._since[block]
            return block
        name = min(held.first() for held in self._held.values())
        block = next(iter(self._queues[name]))
        self._give_up(block, TurnCache.DISPLACED)
        return block

    def _withdraw(self, block: int) -> bool:
        """Remove a block from the queue that has it. Returns whether there was one: the block is unused."""
        for part in (self._ordinary, self._expired):
            if block in part:
                del part[block]
                return True
        lease = self._leases.get(block)
        if lease is None:
            return False
        name = lease.queue
        queue = self._queues.get(name)
        if queue is None or block not in queue:
            return False
        del queue[block]
        if not queue:
            del self._queues[name]
        held = self._held[lease.tenant]
        held.remove(block, name)
        if not held.count:
            del self._held[lease.tenant]
        self._num_leased -= 1
        self.num_by_level[lease.level] -= 1
        return True

    def _give_up(self, block: int, why: TurnCache) -> None:
        """End the lease of a block before the next turn, and take the block out of its queue."""
        self._withdraw(block)
        turn = self._leases.pop(block).turn
        self.num_ended[why] += 1
        if turn and turn not in self._first_end:
            self._first_end[turn] = why
            if len(self._first_end) > _MOST_TURNS:
                self._first_end.popitem(last=False)

    def _expire(self) -> None:
        """Let the leases end whose time has come."""
        now = self._rule.now
        while self._ends and self._ends[0][0] <= now:
            _, name = heapq.heappop(self._ends)
            for block in list(self._queues.get(name, ())):
                self._give_up(block, TurnCache.EXPIRED)
                self._expired[block] = None

    def _shorten(self) -> None:
        """End a lease of the tenant with most leased blocks for its weight. Its block becomes ordinary."""
        weights = self._rule.prices.tenant_weights
        tenant = max(self._held, key=lambda name: self._held[name].count / weights.get(name, 1.0))
        held = self._held[tenant]
        block = next(iter(held.queues[held.first()]))
        self._give_up(block, TurnCache.OVER_BUDGET)
        self._ordinary[block] = None

    def check_invariants(self) -> None:
        leased = [block for queue in self._queues.values() for block in queue]
        held = {
            block: (tenant, name)
            for tenant, each in self._held.items()
            for name, queue in each.queues.items()
            for block in queue
        }
        if len(leased) != self._num_leased or len(leased) > self._limit:
            count = f"{self._num_leased} are counted, and {self._limit} may be"
            raise InvariantError(f"{len(leased)} unused blocks are leased, {count}")
        if Counter(self._leases[block].level for block in leased) != +self.num_by_level:
            raise InvariantError(f"the levels of the leases are not {self.num_by_level}")
        if sorted(leased) != sorted(held) or sum(self.held_by().values()) != len(held):
            raise InvariantError("the leased blocks are not those that the tenants hold")
        if any(not set(each.queues) <= set(each.names) for each in self._held.values()):
            raise InvariantError("a tenant has leased blocks that would never be evicted")
        for name, queue in self._queues.items():
            if not queue or (name[2] < math.inf and (name[2], name) not in self._ends):
                raise InvariantError(f"the queue {name} of leased blocks is empty, or is never looked at")
            for block in queue:
                lease = self._leases.get(block)
                if lease is None or lease.queue != name or held[block] != (lease.tenant, name):
                    raise InvariantError(f"block {block} is filed under a lease that it does not have")
        if plain := [block for block in (*self._ordinary, *self._expired) if block in self._leases]:
            raise InvariantError(f"blocks {plain} have a lease and are evicted as if they had none")


def _both(one: Lease, other: Lease) -> Lease:
    """The lease of a block that has two."""
    last = max(one, other)
    seconds = max(one.seconds, other.seconds)
    if one.level != other.level:
        return last._replace(seconds=seconds)
    turn = one.turn if one.turn == other.turn else 0
    return Lease(one.level, last.until, last.tenant, turn, min(one.expected, other.expected), seconds)
