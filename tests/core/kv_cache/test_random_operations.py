"""Random operations on the manager, swaps, kept prefixes and look-ahead among them, against a model that knows what
each block holds.

A step takes effect when it lands, in the executor's order; one that fails has none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.eviction.leases import LeaseOrder
from chairlift.core.kv_cache.eviction.rules import eviction_from_name
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.reservations import Reservations
from chairlift.core.kv_cache.swap import SwapPool
from chairlift.core.plugins.tlru import TLRU
from chairlift.core.request import Request, RequestStatus
from chairlift.errors import InvariantError
from tests.core.kv_cache.make import BLOCK, manager, request
from tests.tiers import one_in

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (5,), (None, 3), (None, 9, 1)]
MOST_TOKENS = 6
"""Most tokens of one request in one step."""
WEIGHTS = {
    "admit": 4,
    "fork": 1,
    "swap_out": 3,
    "swap_in": 5,
    "drop": 1,
    "shrink": 2,
    "leave": 1,
    "compute": 14,
    "land": 10,
    "fail": 1,
}
MOST_SEEDS = 2_000
Patch = Callable[[Any, str, Any], None]
_Moves = list[tuple[int, int, int]]
_Content = tuple[Any, ...]
"""Content of a block: salt, and all tokens up to its last position."""


@dataclasses.dataclass
class Step:
    """Work of the executor in one step."""

    swap_out: _Moves = dataclasses.field(default_factory=list)
    copies: _Moves = dataclasses.field(default_factory=list)
    swap_in: _Moves = dataclasses.field(default_factory=list)
    joined: list[Request] = dataclasses.field(default_factory=list)
    known: list[tuple[Request, list[list[int]], int]] = dataclasses.field(default_factory=list)
    """Running requests, their tables, and how many positions are computed before this step."""
    writes: list[tuple[int, int, _Content]] = dataclasses.field(default_factory=list)
    computes: Request | None = None
    confirms: Request | None = None
    """``computes``, unless it gave up meanwhile what it computed."""


class Operations:
    """The manager as a scheduler drives it, with at most two steps in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        windows = self.rng.choice(WINDOWS)
        weak = {"hash_function": lambda data: hashlib.sha256(data).digest()[:1]} if self.rng.random() < 0.3 else {}
        self.kv: KVCacheManager = manager(
            self.rng.randint(6, 24),
            *windows,
            max_step_tokens=MOST_TOKENS,
            num_host_blocks=self.rng.choice([0, 3, 8, 16]),
            enable_prefix_caching=self.rng.random() < 0.7,
            prefix_offload=self.rng.random() < 0.7,
            eviction=eviction_from_name(random.Random(seed).choice(["lease", "lease", "tlru", "lru"])),
            **weak,
        )
        self.kv.eviction.prices.step_tokens = 4
        self.watermark = self.rng.choice([0.0, 0.0, 0.2])
        self.depth = self.rng.choice([1, 2])
        self.guaranteed = self.rng.choice(["nobody", "some", "all"])
        """Requests that can always go on. With ``some``, those share no blocks."""
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.step = self.done = self.names = 0
        self.content: list[dict[int, _Content]] = [{} for _ in windows]
        self.host: list[dict[int, _Content]] = [{} for _ in windows]
        self.next = Step()
        self.flights: list[Step] = []
        self.seen: set[str] = set()
        """Operations that did something."""

    def run(self, count: int) -> None:
        for _ in range(count):
            able = {
                "admit": True,
                "fork": self.running,
                "swap_out": self.running,
                "swap_in": self.swapped,
                "drop": self.swapped,
                "shrink": self.running,
                "leave": self.running,
                "compute": self.running and len(self.flights) < self.depth,
                "land": self.flights,
                "fail": self.flights,
            }
            names = [name for name, possible in able.items() if possible]
            (name,) = self.rng.choices(names, [WEIGHTS[name] for name in names])
            if getattr(self, name)():
                self.seen.add(name)
            self.check()
        for one in self.running:
            self.kv.tables.free(one, self.step)
        for one in self.swapped:
            self.kv.drop_swapped(one)
        self.kv.step_done(self.step + 1)
        self.kv.check_invariants([])
        assert self.kv.counts().used == 0 == self.kv.swap_pool.num_used

    def check(self) -> None:
        self.kv.check_invariants(self.running)
        assert set(self.kv.swapped) == {one.request_id for one in self.swapped}
        for one in self.running:
            for group, table in enumerate(one.block_ids):
                held = sum(block != 0 for block in table)
                assert held <= self.kv.layout.blocks_for(group, len(table) * BLOCK), (
                    f"{one} holds {held} of group {group}"
                )

    # -- operations, each of which returns whether it did something ------------------------------------------------

    def admit(self) -> bool:
        prompt = [self.rng.randrange(3)] * self.rng.randint(1, 20) + [9] * self.rng.randint(0, 3)
        one = request(self._name(), prompt, 20, cache_salt=self.rng.choice(["", "a"]))
        one.retention = self.rng.choice([0, 0, 1, 2])
        return self._admit(one)

    def fork(self) -> bool:
        source = self.rng.choice(self.running)
        if source.is_guaranteed and self.guaranteed == "some":
            return False
        prompt = source.token_ids[: source.num_prompt_tokens]
        return self._admit(request(self._name(), prompt, 20, cache_salt=source.cache_salt, source=source))

    def _admit(self, one: Request) -> bool:
        before = self.kv.counts()
        one.is_guaranteed = self.guaranteed == "all" or (self.guaranteed == "some" and self.rng.random() < 0.4)
        share = self.rng.random() < 0.8 and not (one.is_guaranteed and self.guaranteed == "some")
        admission = self.kv.admit(one, one.reserve, self.watermark, share=share)
        if admission is None:
            assert self.kv.counts() == before
            assert self.watermark or not self._has_room(one)
            return False
        assert admission.num_computed_tokens < len(one.token_ids)
        assert self.kv.prefix_offload or not admission.swap_in
        self.next.copies += admission.copies
        self.next.swap_in += admission.swap_in
        if admission.swap_in:
            self.seen.add("bring_back")
        self._join(one, admission.num_computed_tokens)
        return True

    def _join(self, one: Request, known: int) -> None:
        one.move_to(RequestStatus.RUNNING)
        one.num_computed_tokens, one.progress_mark = known, len(one.token_ids)
        self.running.append(one)
        self.next.joined.append(one)

    def _has_room(self, one: Request) -> bool:
        """Whether the request fits even if it shares nothing, and nobody has a right to any of it."""
        need, right = -(-one.reserve // BLOCK), -(-one.limit // BLOCK)
        rights = sum(each.is_guaranteed for each in [*self.running, one]) * right
        return all(pool.num_free >= need and (not rights or pool.num_free >= rights) for pool in self.kv.pools)

    def swap_out(self) -> bool:
        one = self.rng.choice(self.running)
        most = min(one.num_computed_tokens, len(one.token_ids) - 1)
        if most == 0 or one in self.next.joined:
            return False
        before, tables = self.kv.counts(), [list(table) for table in one.block_ids]
        num_tokens = self.rng.choice([most, self.rng.randint(1, most)])
        saved = self.kv.swap_out(one, num_tokens, self.step)
        if saved is None:
            assert self.kv.counts() == before and one.block_ids == tables
            return False
        assert len({(group, host) for group, _, host in self.next.swap_out + saved}) == len(self.next.swap_out + saved)
        self.next.swap_out += saved
        self._leave(one, RequestStatus.SWAPPED)
        self.swapped.append(one)
        return True

    def swap_in(self) -> bool:
        one = self.rng.choice(self.swapped)
        before, saved = self.kv.counts(), self.kv.swapped[one.request_id]
        share = self.rng.random() < 0.5
        share = share and not (one.is_guaranteed and self.guaranteed == "some")
        admission = self.kv.swap_in(one, one.reserve, self.watermark, self.step + 1, share=share)
        if admission is None:
            assert self.kv.counts() == before and self.kv.swapped[one.request_id] is saved
            assert self.watermark or self.flights or not self._has_room(one)
            return False
        assert admission.num_computed_tokens == saved.num_tokens and not admission.copies
        self.swapped.remove(one)
        self.next.swap_in += admission.swap_in
        self._join(one, admission.num_computed_tokens)
        return True

    def drop(self) -> bool:
        one = self.rng.choice(self.swapped)
        self.swapped.remove(one)
        self.kv.drop_swapped(one)
        self._admit(one)
        return True

    def shrink(self) -> bool:
        one = self.rng.choice(self.running)
        if one in self.next.joined or one.is_guaranteed:
            return False
        end = self.rng.randint(0, min(one.num_computed_tokens, len(one.token_ids) - 1) // BLOCK)
        tables, kept = [list(table) for table in one.block_ids], [table[:end] for table in one.block_ids]
        if not self.kv.tables.shrink(one, end * BLOCK, self.step):
            assert one.block_ids == tables
            return False
        assert one.block_ids == kept
        one.num_computed_tokens, one.progress_mark = end * BLOCK, len(one.token_ids)
        for flight in self.flights:
            flight.confirms = None if flight.confirms is one else flight.confirms
        return True

    def compute(self) -> bool:
        """Launch a step that computes some tokens of one request, writing their blocks."""
        one = self.rng.choice(self.running)
        end = min(one.num_computed_tokens + self.rng.randint(1, MOST_TOKENS), len(one.token_ids))
        if end == one.num_computed_tokens:
            return False
        if self.kv.tables.extend(one, end, self.step) is None:
            assert not one.is_guaranteed or self.flights, f"{one} cannot go on"
            return False
        self.step += 1
        flight, self.next = self.next, Step()
        self.flights.append(flight)
        flight.swap_out += self.kv.scheduled(self.step)
        assert len({(group, host) for group, _, host in flight.swap_out}) == len(flight.swap_out)
        for each in self.running:
            flight.known.append((each, [list(table) for table in each.block_ids], each.num_computed_tokens))
        for group, table in enumerate(one.block_ids):
            for index in range(one.num_computed_tokens // BLOCK, -(-end // BLOCK)):
                upto = min(end, (index + 1) * BLOCK)
                flight.writes.append((group, table[index], (one.cache_salt, *one.token_ids[:upto])))
        one.num_computed_tokens = end
        flight.computes = flight.confirms = one
        return True

    def land(self) -> bool:
        flight = self.flights.pop(0)
        self._execute(flight)
        self.done += 1
        self.kv.step_done(self.done)
        one = flight.confirms
        if one is not None and one in self.running and not any(one in later.joined for later in self._later()):
            confirmed = next(
                (known for later in self._later() for each, _, known in later.known if each is one),
                one.num_computed_tokens,
            )
            self.kv.publish(one, confirmed)
            if confirmed == len(one.token_ids) < one.max_total_tokens - 1:
                one.token_ids.append(len(one.token_ids) % 3)
        return True

    def _later(self) -> list[Step]:
        return [*self.flights, self.next]

    def _execute(self, step: Step) -> None:
        for group, block, host in step.swap_out:
            self.host[group][host] = self.content[group].get(block, ())
        for group, source, target in step.copies:
            self.content[group][target] = self.content[group].get(source, ())
        for group, host, block in step.swap_in:
            self.content[group][block] = self.host[group][host]
        for one, tables, known in step.known:
            for group, table in enumerate(tables):
                for index in range(self.kv.layout.first_in_reach(group, known), -(-known // BLOCK)):
                    end = min(known, (index + 1) * BLOCK)
                    found = self.content[group].get(table[index], ())
                    assert found[: end + 1] == (one.cache_salt, *one.token_ids[:end]), f"{one}: {group}, {index}"
        for group, block, tokens in step.writes:
            self.content[group][block] = tokens

    def fail(self) -> bool:
        """The oldest step does not run. Who was in it ends, and what was saved since is not to be trusted."""
        flight = self.flights.pop(0)
        self.done += 1
        self.kv.step_done(self.done)
        hurt = [*flight.joined, flight.computes]
        for later in self.flights:  # what they compute for those, nobody reads
            later.known = [entry for entry in later.known if entry[0] not in hurt]
        for one in [one for one in self.running if one in hurt]:
            self.kv.forget(one)
            self._end(one)
        self.kv.copies_lost(self.done)
        lost = self.kv.swapped_since(self.done)
        for one in [one for one in self.swapped if one.request_id in lost]:
            self.swapped.remove(one)
            self.kv.drop_swapped(one)
        return True

    def leave(self) -> bool:
        one = self.rng.choice(self.running)
        if self.rng.random() < 0.5:
            self.kv.forget(one)
        self._end(one)
        return True

    def _end(self, one: Request) -> None:
        one.finish_reason = FinishReason.STOP
        self.kv.tables.free(one, self.step)
        self._leave(one, RequestStatus.FINISHED)

    def _leave(self, one: Request, status: RequestStatus) -> None:
        self.running.remove(one)
        one.num_computed_tokens = 0
        one.move_to(status)

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"


def run_seeds(count: int) -> set[str]:
    """Operations that did something."""
    seen: set[str] = set()
    for seed in range(count):
        operations = Operations(seed)
        operations.run(120)
        seen |= operations.seen
    return seen


def test_random_operations_keep_counts_and_contents_right() -> None:
    assert run_seeds(300) == {*WEIGHTS, "bring_back"}


# -- it finds bugs -----------------------------------------------------------------------------------------------------


def host_blocks_reused_before_they_are_read(patch: Patch) -> None:
    original = SwapPool.release
    patch(SwapPool, "release", lambda self, group, blocks, step: original(self, group, blocks, -1))


def device_blocks_of_a_dropped_request_kept(patch: Patch) -> None:
    patch(KVCacheManager, "drop_swapped", lambda self, request: self.swapped.pop(request.request_id, None))


def window_not_looked_at(patch: Patch) -> None:
    patch(BlockTables, "resumable", lambda self, request, position: True)


def back_before_it_is_saved(patch: Patch) -> None:
    original = KVCacheManager.swap_in

    def swap_in(self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> Any:
        saved = self.swapped[request.request_id]
        self.swapped[request.request_id] = dataclasses.replace(saved, step=-1)
        admission = original(self, request, *args, **kwargs)
        if admission is None:
            self.swapped[request.request_id] = saved
        return admission

    patch(KVCacheManager, "swap_in", swap_in)


def last_host_block_not_brought_back(patch: Patch) -> None:
    original = KVCacheManager.swap_in

    def swap_in(self: KVCacheManager, *args: Any, **kwargs: Any) -> Any:
        admission = original(self, *args, **kwargs)
        return admission and dataclasses.replace(admission, swap_in=admission.swap_in[:-1])

    patch(KVCacheManager, "swap_in", swap_in)


def blocks_of_a_window_left_behind_twice(patch: Patch) -> None:
    original = BlockTables.shrink

    def shrink(self: BlockTables, request: Request, *args: Any) -> bool:
        passed = list(request.num_out_of_reach)
        shrunk = original(self, request, *args)
        request.num_out_of_reach = passed
        return shrunk

    patch(BlockTables, "shrink", shrink)


def refusal_remembered_after_room_was_made(patch: Patch) -> None:
    original = BlockTables._release

    def release(self: BlockTables, *args: Any) -> None:
        before = self.num_changes
        original(self, *args)
        self.num_changes = before

    patch(BlockTables, "_release", release)


def leased_block_lost(patch: Patch) -> None:
    def withdraw(self: LeaseOrder, block: int) -> bool:
        return self._ordinary.pop(block, False) is None

    patch(LeaseOrder, "_withdraw", withdraw)


def everything_leased(patch: Patch) -> None:
    patch(LeaseOrder, "_shorten", lambda self: None)


def tail_kept_twice(patch: Patch) -> None:
    original = TLRU.order

    def order(self: TLRU, capacity: int) -> Any:
        made = original(self, capacity)
        made.remove = lambda block: made._others.pop(block, None)
        return made

    patch(TLRU, "order", order)


def kept_block_given_out_while_it_is_read(patch: Patch) -> None:
    patch(SwapPool, "touch", lambda self, group, host, step: None)


def kept_blocks_of_a_failed_step_trusted(patch: Patch) -> None:
    patch(KVCacheManager, "copies_lost", lambda self, step: None)


def kept_blocks_never_free(patch: Patch) -> None:
    patch(SwapPool, "num_free", lambda self, group: len(self._free[group]))


def kept_block_free_while_it_is_written(patch: Patch) -> None:
    original = SwapPool.keep
    patch(SwapPool, "keep", lambda self, group, node, step: original(self, group, node, -1))


def promised_blocks_taken_by_those_who_run(patch: Patch) -> None:
    patch(Reservations, "withheld", lambda self, group, request: 0)


def promised_blocks_taken_by_those_who_join(patch: Patch) -> None:
    def fits(self: Reservations, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        windowed = request.is_guaranteed and self._layout.groups[group].window is not None
        most = self._layout.blocks_for(group, request.limit) if windowed else 0
        room = self._pools[group].capacity - self.reserved[group] - most
        return min(free - want, room) >= watermark * self._pools[group].capacity

    patch(Reservations, "fits", fits)


def shared_blocks_promised_once(patch: Patch) -> None:
    def fits(self: Reservations, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        return free - want - self.unheld[group] >= watermark * self._pools[group].capacity

    patch(Reservations, "fits", fits)


@pytest.mark.full
@pytest.mark.planted("test_random_operations_keep_counts_and_contents_right")
@pytest.mark.parametrize(
    "plant",
    one_in(
        4,
        [
            promised_blocks_taken_by_those_who_run,
            promised_blocks_taken_by_those_who_join,
            shared_blocks_promised_once,
            kept_block_given_out_while_it_is_read,
            kept_blocks_of_a_failed_step_trusted,
            kept_blocks_never_free,
            kept_block_free_while_it_is_written,
            host_blocks_reused_before_they_are_read,
            device_blocks_of_a_dropped_request_kept,
            window_not_looked_at,
            back_before_it_is_saved,
            last_host_block_not_brought_back,
            blocks_of_a_window_left_behind_twice,
            refusal_remembered_after_room_was_made,
            leased_block_lost,
            everything_leased,
            tail_kept_twice,
        ],
    ),
)
def test_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(lambda owner, name, value: monkeypatch.setattr(owner, name, value))
    with pytest.raises((AssertionError, InvariantError, LookupError)):
        run_seeds(MOST_SEEDS)
