"""Bugs of leases, injected one at a time. The worlds of agents must detect every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.eviction import lease as lease_module
from chairlift.core.kv_cache.eviction import leases as leases_module
from chairlift.core.kv_cache.eviction.asked import AskedLeases
from chairlift.core.kv_cache.eviction.gaps import Gaps
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.leases import Lease, LeaseOrder
from chairlift.core.kv_cache.eviction.turns import EndedTurn, path_of
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from tests.simulation.mutants import Patch

__all__ = ["SESSION_MUTANTS"]

SESSION_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    SESSION_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def leased_blocks_cannot_be_allocated(patch: Patch) -> None:
    """Bug: a lease keeps a request waiting."""
    num_free = BlockPool.num_free.fget  # type: ignore[attr-defined]

    def free(self: BlockPool) -> int:
        leased: int = getattr(self._cached, "num_leased", 0)
        found: int = num_free(self)
        return found - leased

    patch(BlockPool, "num_free", property(free))


@mutant
def no_budget(patch: Patch) -> None:
    patch(LeaseOrder, "_shorten", lambda self: None)


@mutant
def smallest_tenant_loses_its_leases(patch: Patch) -> None:
    def shorten(self: LeaseOrder) -> None:
        tenant = min(self._held, key=lambda name: self._held[name].count)
        held = self._held[tenant]
        block = next(iter(held.queues[held.first()]))
        self._withdraw(block)
        del self._leases[block]
        self._ordinary[block] = None

    patch(LeaseOrder, "_shorten", shorten)


@mutant
def leases_never_end(patch: Patch) -> None:
    patch(LeaseOrder, "_expire", lambda self: None)


@mutant
def leased_before_ordinary(patch: Patch) -> None:
    original = LeaseOrder.pop

    def pop(self: LeaseOrder) -> int:
        if not self._queues:
            return original(self)
        block = next(iter(self._queues[min(self._queues)]))
        self._withdraw(block)
        del self._leases[block]
        return block

    patch(LeaseOrder, "pop", pop)


@mutant
def block_that_is_needed_first_goes_first(patch: Patch) -> None:
    original = LeaseOrder.pop

    def pop(self: LeaseOrder) -> int:
        self._expire()
        if self._expired or self._ordinary:
            return original(self)
        block = next(iter(self._queues[max(self._queues)]))
        self._withdraw(block)
        del self._leases[block]
        return block

    patch(LeaseOrder, "pop", pop)


@mutant
def lease_survives_new_content(patch: Patch) -> None:
    original = LeaseOrder.pop

    def pop(self: LeaseOrder) -> int:
        leases = dict(self._leases)
        block = original(self)
        if block in leases:
            self._leases[block] = leases[block]
        return block

    patch(LeaseOrder, "pop", pop)


@mutant
def first_block_of_a_turn_goes_first(patch: Patch) -> None:
    def upwards(node: PrefixNode | None) -> Iterator[tuple[int, PrefixNode]]:
        return reversed(list(path_of(node)))

    original = BlockTables._give_back

    def give_back(self: BlockTables, group: int, request: Request, entries: list[int], in_flight: int) -> None:
        original(self, group, request, entries[::-1], in_flight)

    patch(lease_module, "path_of", upwards)
    patch(BlockTables, "_give_back", give_back)


@mutant
def dead_branch_keeps_its_lease(patch: Patch) -> None:
    patch(LeaseRule, "_release_branch", lambda self, turn, kept: None)


@mutant
def branch_of_another_conversation_released(patch: Patch) -> None:
    """Bug: the end of a branch also ends the leases that other turns gave its blocks."""
    original = LeaseOrder.end

    def end(self: LeaseOrder, block: int, turn: int) -> None:
        found = self._leases.get(block)
        original(self, block, turn if found is None else found.turn)

    def release(self: LeaseRule, turn: EndedTurn, kept: set[int]) -> None:
        for _, node in path_of(turn.node):
            for group, block in enumerate(node.blocks):
                if block is not None:
                    self.orders[group].end(block, turn.number)

    patch(LeaseOrder, "end", end)
    patch(LeaseRule, "_release_branch", release)


@mutant
def pins(patch: Patch) -> None:
    patch(LeaseRule, "hold", lambda self, turn: math.inf)


@mutant
def lease_of_nobody(patch: Patch) -> None:
    """Bug: the blocks of a pause are not counted for their tenant."""
    original = LeaseOrder.lease
    patch(LeaseOrder, "lease", lambda self, block, lease: original(self, block, Lease(*lease[:2], "", lease.turn)))


@mutant
def shared_blocks_wait_for_the_last_turn(patch: Patch) -> None:
    """Bug: a block that two turns need is evicted as if only the later one needed it."""
    patch(leases_module, "_both", max)


@mutant
def pause_counted_from_its_lease(patch: Patch) -> None:
    original = Gaps.observe

    def observe(self: Gaps, tenant: str, tools: Sequence[str], seconds: float) -> None:
        original(self, tenant, tools, max(0.0, seconds - 1.0))

    patch(Gaps, "observe", observe)


@mutant
def pauses_of_all_tenants_together(patch: Patch) -> None:
    original = Gaps.observe
    patch(Gaps, "observe", lambda self, tenant, *args: original(self, "", *args))


@mutant
def asked_lease_beyond_its_breakpoint(patch: Patch) -> None:
    original = AskedLeases.of
    patch(AskedLeases, "of", lambda self, group, index: original(self, group, max(0, index - 1)))


@mutant
def all_asked_leases_as_long_as_the_longest(patch: Patch) -> None:
    original = AskedLeases.of
    patch(AskedLeases, "of", lambda self, group, index: original(self, group, index) and original(self, group, 0))


@mutant
def asked_lease_of_nobody(patch: Patch) -> None:
    """Bug: nobody pays for the leases that clients ask for."""
    original = AskedLeases.of

    def of(self: AskedLeases, group: int, index: int) -> Lease | None:
        lease = original(self, group, index)
        return None if lease is None else lease._replace(tenant="nobody")

    patch(AskedLeases, "of", of)


@mutant
def use_adds_to_the_rest_of_a_lease(patch: Patch) -> None:
    original = LeaseOrder.add

    def add(self: LeaseOrder, block: int) -> None:
        before = self._leases.get(block)
        original(self, block)
        if before is not None and before.seconds and block in self._leases:
            self.lease(block, before._replace(until=before.until + before.seconds))

    patch(LeaseOrder, "add", add)
