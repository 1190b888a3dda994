"""Slots of a pool: adapters are read from where they are, whatever a device does first."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chairlift.errors import InvariantError
from chairlift.kernels.low_rank_pool import PackedSlot
from chairlift.lora import pool_slots
from chairlift.lora.pool_slots import PoolSlots, Queues
from tests.sweep import sweep

Operation = Callable[[], bool]
"""Does the next piece of work of a stream; False if it must wait."""


class Event:
    happened = False


class Stream:
    """Work that is queued, in order."""

    def __init__(self) -> None:
        self.work: list[Operation] = []

    def record_event(self) -> Event:
        event = Event()

        def record() -> bool:
            event.happened = True
            return True

        self.work.append(record)
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.happened)


class Device:
    """A device that runs two streams in any order that the events allow, and copies in two halves."""

    def __init__(self, draw: random.Random, num_slots: int) -> None:
        self._draw = draw
        self.steps, self.copies = Stream(), Stream()
        self.content: list[Any] = [None] * num_slots
        self.num_reads = 0

    def copy(self, slot: int, adapter: PackedSlot) -> None:
        def half(content: object) -> Operation:
            def write() -> bool:
                self.content[slot] = content
                return True

            return write

        self.copies.work += [half("half an adapter"), half(adapter)]

    def step(self, slots: dict[int, PackedSlot]) -> None:
        """Queue a step that reads its adapters when it begins, and again when it ends."""

        def read() -> bool:
            for slot, adapter in slots.items():
                assert self.content[slot] is adapter, f"slot {slot} does not hold the step's adapter"
                self.num_reads += 1
            return True

        self.steps.work += [read, read]

    def run(self, pieces: int) -> None:
        """Do some of the work that may be done, mostly of one stream."""
        streams = [self.steps, self.copies]
        favourite = self._draw.randrange(2)
        for _ in range(pieces):
            first = streams[favourite if self._draw.random() < 0.9 else 1 - favourite]
            for stream in (first, *(each for each in streams if each is not first)):
                if stream.work and stream.work[0]():
                    del stream.work[0]
                    break

    def finish(self) -> None:
        self.run(10_000)
        assert not self.steps.work and not self.copies.work, "the streams wait for each other"


def serve(make: Callable[[int, Queues, Callable[[int], PackedSlot]], PoolSlots], seed: int) -> int:
    """Steps with random adapters, of which some are dropped and put again. Returns the number of reads."""
    draw = random.Random(seed)
    num_slots = draw.randint(1, 4)
    device = Device(draw, num_slots)
    held: dict[int, PackedSlot] = {}
    slots = make(num_slots, device, lambda adapter_id: held[adapter_id])

    def put(adapter_id: int) -> None:
        held[adapter_id] = PackedSlot(torch.tensor([adapter_id]), torch.zeros(0))
        slots.load(adapter_id)

    for adapter_id in range(1, 8):
        put(adapter_id)
    for _ in range(40):
        if draw.random() < 0.2:
            adapter_id = draw.choice(list(held))
            slots.drop(adapter_id)
            put(adapter_id)
        wanted = draw.sample(list(held), draw.randint(0, num_slots))
        placed = slots.place(wanted)
        assert sorted(placed) == sorted(wanted) and len(set(placed.values())) == len(wanted)
        slots.check_invariants()
        device.step({slot: held[adapter_id] for adapter_id, slot in placed.items()})
        if draw.random() < 0.9:  # otherwise the step failed when it was half queued
            slots.queued()
        device.run(draw.choice([0, 1, 5, 30]))
    device.finish()
    return device.num_reads


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
def test_steps_read_their_adapters_in_any_order_of_the_device(request: pytest.FixtureRequest, count: int) -> None:
    sweep(request, count, lambda seed: serve(PoolSlots, seed))
    assert serve(PoolSlots, 0) > 40


FAULTS: dict[str, tuple[str, str]] = {
    "copies do not wait for steps": ("self._queues.copies.wait_event(self._read.pop(slot))", "self._read.pop(slot)"),
    "steps do not wait for copies": ("self._queues.steps.wait_event(self._written", "str(self._written"),
    "an adapter of the step is overwritten": ("self._held[adapter_id] = self._held.pop(adapter_id)", "pass"),
    "the newest adapter gives way": ("next(iter(self._held))", "next(reversed(self._held))"),
    "steps are not noted": ("self._open.update(slots.values())", "pass"),
    "a step that failed is forgotten": ("if slot in self._open:", "if slot in set():"),
    "a freed slot forgets its readers": ("self._free.sort(reverse=True)", "self._read.pop(slot, None)"),
    "an event comes before the copy": (
        "self._queues.copy(slot, adapter)\n        self._written[slot] = self._queues.copies.record_event()",
        "self._written[slot] = self._queues.copies.record_event()\n        self._queues.copy(slot, adapter)",
    ),
}


@pytest.mark.planted("test_steps_read_their_adapters_in_any_order_of_the_device")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    old, new = FAULTS[fault]
    source = inspect.getsource(pool_slots)
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": "mutated_slots"}
    exec(compile(source.replace(old, new), "mutated_slots", "exec"), names)
    noticed = 0
    for seed in range(60):
        try:
            serve(names["PoolSlots"], seed)
        except (AssertionError, InvariantError, KeyError):
            noticed += 1
    assert noticed


def test_the_adapter_that_was_not_used_for_the_longest_time_gives_way() -> None:
    copied: list[int] = []

    def source(adapter_id: int) -> PackedSlot:
        copied.append(adapter_id)
        return PackedSlot(torch.zeros(0), torch.zeros(0))

    slots = PoolSlots(2, Device(random.Random(1), 2), source)
    assert slots.place([7, 8]) == {7: 0, 8: 1}
    assert slots.place([7]) == {7: 0} and slots.place([9]) == {9: 1}
    assert slots.place([7, 9]) == {7: 0, 9: 1} and copied == [7, 8, 9]
    with pytest.raises(InvariantError, match=r"a step has 3 adapters, and the pool has 2 slots \(max_loras\)"):
        slots.place([7, 8, 9])


def test_an_adapter_that_cannot_be_copied_leaves_its_slot_free() -> None:
    def missing(adapter_id: int) -> PackedSlot:
        raise KeyError(adapter_id)

    slots = PoolSlots(1, Device(random.Random(1), 1), missing)
    for _ in range(2):
        with pytest.raises(KeyError):
            slots.place([3])
        slots.check_invariants()
