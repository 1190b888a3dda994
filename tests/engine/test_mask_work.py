"""Threads that make masks: a slow mask holds up no other, tenants take turns, and limits are named."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from chairlift.engine.mask_limits import MaskBudget, MaskLedger
from chairlift.engine.mask_work import MaskJob, MaskWork


def _budget(tenant: str = "") -> MaskBudget:
    return MaskBudget(MaskLedger(), tenant, num_answers=1)


class _Matcher:
    """A matcher whose mask may wait until the test lets it go on. It notes the order of all masks."""

    def __init__(self, name: str, order: list[str], gate: threading.Event | None = None) -> None:
        self.num_consumed, self.error, self.stopped = 3, "", False
        self.begun = threading.Event()
        self._name, self._order, self._gate = name, order, gate

    def mask(self) -> Any:
        self.begun.set()
        if self._gate is not None:
            assert self._gate.wait(60)
        self._order.append(self._name)
        return np.array([self.num_consumed], dtype=np.uint32)

    def consume(self, token_id: int) -> bool:
        self.num_consumed += 1
        return True

    def rewind(self, num_consumed: int) -> bool:
        self.num_consumed = num_consumed
        return True

    def num_allowed(self, token_ids: Any) -> int:
        return 0

    def forced(self, limit: int) -> Any:
        return ()


@dataclasses.dataclass(frozen=True)
class _Place:
    first: int
    matcher: _Matcher
    budget: MaskBudget = dataclasses.field(default_factory=lambda: _budget())
    drafts: tuple[int, ...] = ()
    row: Any = None


def _finish(work: MaskWork, count: int) -> list[MaskJob]:
    """Wait until ``count`` jobs are done, or forever."""
    found: list[MaskJob] = []
    while len(found) < count:
        found += work.take_done()
    return found


def test_a_slow_mask_is_late_and_the_others_of_its_step_are_not() -> None:
    work, gate, order = MaskWork(), threading.Event(), list[str]()
    places = [_Place(0, _Matcher("slow", order, gate)), *(_Place(i, _Matcher(str(i), order)) for i in (1, 2, 3))]
    filling = work.begin(places)
    assert places[0].matcher.begun.wait(60)
    masks, late = filling.result(1.0)
    assert sorted(masks) == [1, 2, 3] and [job.place for job in late] == places[:1] and not work.take_done()
    gate.set()
    assert _finish(work, 1) == late and late[0].masks[0].tolist() == [3]  # type: ignore[union-attr]
    work.shutdown()


def test_masks_that_no_thread_has_begun_are_made_later() -> None:
    work, gate, order = MaskWork(), threading.Event(), list[str]()
    filling = work.begin([_Place(i, _Matcher(str(i), order, gate)) for i in range(5)])
    masks, late = filling.result(0.0)
    assert not masks and len(late) == 5
    gate.set()
    assert set(_finish(work, 5)) == set(late) and sorted(order) == list("01234")
    work.shutdown()


def test_without_a_bound_a_step_waits_for_all_masks_also_after_drafts() -> None:
    work = MaskWork()
    place = _Place(4, _Matcher("a", []), drafts=(7, 8))
    masks, late = work.begin([place]).result(None)
    assert {at: mask.tolist() for at, mask in masks.items()} == {4: [3], 5: [4], 6: [5]} and not late
    assert place.matcher.num_consumed == 3
    work.shutdown()


def test_tenants_take_turns() -> None:
    work, gate, order = MaskWork(), threading.Event(), list[str]()
    first = _Place(0, _Matcher("many", order, gate), _budget("many"))
    work.later(MaskJob(first, 3))
    assert first.matcher.begun.wait(60)
    for _ in range(6):
        work.later(MaskJob(_Place(0, _Matcher("many", order), _budget("many")), 3))
    work.later(MaskJob(_Place(0, _Matcher("one", order), _budget("one")), 3))
    gate.set()
    _finish(work, 8)
    assert order.index("one") == 1
    work.shutdown()


def test_a_dropped_job_is_not_begun_and_not_told() -> None:
    work, gate, order = MaskWork(), threading.Event(), list[str]()
    running = MaskJob(_Place(0, _Matcher("running", order, gate)), 3)
    dropped, last = (MaskJob(_Place(0, _Matcher(name, order)), 3) for name in ("dropped", "last"))
    for job in (running, dropped, last):
        work.later(job)
    assert running.place.matcher.begun.wait(60)  # type: ignore[attr-defined]
    running.is_dropped = dropped.is_dropped = True
    gate.set()
    assert _finish(work, 1) == [last] and order == ["running", "last"]
    work.shutdown()


def test_a_matcher_that_breaks_fails_its_own_answer_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(_Matcher):
        def mask(self) -> Any:
            raise ZeroDivisionError

    work, broken = MaskWork(), Broken("broken", [])
    masks, late = work.begin([_Place(0, broken), _Place(1, _Matcher("good", []))]).result(None)
    assert sorted(masks) == [1] and not late and "could not be computed (ZeroDivisionError)" in broken.error
    assert "could not be computed" in caplog.text
    work.shutdown()
