"""Bugs in the serving of adapters, injected one at a time. The simulator's worlds with adapters must detect every one
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows
from chairlift.core.scheduler.output import NewRow, SchedulerOutput
from chairlift.engine.adapter_names import AdapterNames
from chairlift.engine.adapters import AdapterLoad, Adapters
from chairlift.executor.input_batch import InputBatch
from tests.simulation.mutants import Patch

ADAPTER_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    ADAPTER_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def adapter_lost_on_the_way_to_the_rows(patch: Patch) -> None:
    join = InputBatch._join

    def wrong(self: InputBatch, row: NewRow) -> None:
        join(self, row)
        self.adapters[row.slot] = 0

    patch(InputBatch, "_join", wrong)


@mutant
def adapter_of_the_row_before_kept(patch: Patch) -> None:
    join = InputBatch._join

    def wrong(self: InputBatch, row: NewRow) -> None:
        before = int(self.adapters[row.slot])
        join(self, row)
        self.adapters[row.slot] = row.adapter_id or before

    patch(InputBatch, "_join", wrong)
    patch(InputBatch, "_clear", _leaving(InputBatch._clear))


def _leaving(clear: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: InputBatch, slot: int) -> None:
        before = int(self.adapters[slot])
        clear(self, slot)
        self.adapters[slot] = before

    return wrong


@mutant
def adapters_of_a_step_in_the_order_of_slots(patch: Patch) -> None:
    flatten = InputBatch._flatten

    def wrong(self: InputBatch, out: SchedulerOutput) -> StepBatch:
        step = flatten(self, out)
        if step.adapters is not None:
            step.adapters = step.adapters[::-1].copy()
        return step

    patch(InputBatch, "_flatten", wrong)


@mutant
def only_chunks_have_adapters(patch: Patch) -> None:
    """Bug: decode rows lose their adapter when no request joins or leaves."""
    flatten = InputBatch._flatten

    def wrong(self: InputBatch, out: SchedulerOutput) -> StepBatch:
        step = flatten(self, out)
        if not out.chunks:
            step.adapters = None
        return step

    patch(InputBatch, "_flatten", wrong)


@mutant
def prefix_cache_does_not_know_adapters(patch: Patch) -> None:
    patch(AdapterRows, "key", lambda self, request: b"")


@mutant
def adapters_known_by_name(patch: Patch) -> None:
    """Bug: an adapter that is loaded again under the same name gets the same number as before, and shares the KV of the
    old adapter."""

    def wrong(self: AdapterNames, name: str, path: str, root: str | None = None) -> AdapterLoad:
        return AdapterLoad(int(name[1:]), name, path, root)

    patch(AdapterNames, "next_load", wrong)
    load_now = Adapters.load_now

    def again(self: Adapters, load: AdapterLoad) -> None:
        known = self._known.pop(load.adapter_id, None)
        if known is not None and known.resident:
            self._evict(known)
        load_now(self, load)
        if known is not None:
            self._known[load.adapter_id].users, self._known[load.adapter_id].active = known.users, known.active
            self._of = {
                name: self._known[load.adapter_id] if each is known else each for name, each in self._of.items()
            }

    patch(Adapters, "load_now", again)


@mutant
def bound_of_a_step_not_asked(patch: Patch) -> None:
    patch(AdapterRows, "has_room", lambda self, request: True)


@mutant
def bound_of_a_step_one_too_high(patch: Patch) -> None:
    room = AdapterRows.has_room

    def wrong(self: AdapterRows, request: Request) -> bool:
        self.most += 1
        try:
            return room(self, request)
        finally:
            self.most -= 1

    patch(AdapterRows, "has_room", wrong)


@mutant
def nobody_waits_too_long_for_an_adapter(patch: Patch) -> None:
    patch(AdapterRows, "_must_wait", lambda self: False)


@mutant
def adapters_counted_once_per_vacated_row(patch: Patch) -> None:
    left = AdapterRows.left

    def wrong(self: AdapterRows, request: Request) -> None:
        self.running[request.adapter_id] += 1
        left(self, request)

    patch(AdapterRows, "left", wrong)


@mutant
def unloading_does_not_drain(patch: Patch) -> None:
    def wrong(self: Adapters, adapter_id: int) -> None:
        known = self._known.pop(adapter_id, None)
        if known is not None and known.resident:
            self._evict(known)

    patch(Adapters, "unload", wrong)


@mutant
def adapters_evicted_while_in_use(patch: Patch) -> None:
    room = Adapters._make_room

    def wrong(self: Adapters, *, reading: bool = True) -> bool:
        while not room(self, reading=reading):
            self._evict(next(iter(self._resident.values())))
        return True

    patch(Adapters, "_make_room", wrong)


@mutant
def requests_do_not_wait_for_their_adapter(patch: Patch) -> None:
    add = Adapters.add

    def wrong(self: Adapters, requests: Sequence[Request], adapter_id: int) -> None:
        add(self, requests, adapter_id)
        for request in requests:
            request.is_ready = True

    patch(Adapters, "add", wrong)


@mutant
def changed_files_not_noticed(patch: Patch) -> None:
    arrived = Adapters._arrived

    def wrong(self: Adapters, known: Any, adapter: Any) -> None:
        known.digest = ""
        arrived(self, known, adapter)

    patch(Adapters, "_arrived", wrong)


@mutant
def requests_that_left_still_count(patch: Patch) -> None:
    patch(Adapters, "forget", lambda self, request: None)


@mutant
def who_waits_for_an_adapter_stays_in_line_when_it_leaves(patch: Patch) -> None:
    forget = Adapters.forget

    def wrong(self: Adapters, request: Request) -> None:
        queue = list(self._queue)
        forget(self, request)
        self._queue = queue

    patch(Adapters, "forget", wrong)


@mutant
def line_for_memory_is_never_served(patch: Patch) -> None:
    patch(Adapters, "_advance", lambda self: [])
