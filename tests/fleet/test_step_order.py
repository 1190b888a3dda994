"""Which engine makes the next step: examples, random worlds, and planted bugs that the worlds find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.fleet.models.turnstile.order import StepOrder, StepTurn
from tests.fleet.step_worlds import draw_world, new_order, run_world
from tests.tiers import one_in

SEEDS = range(30)


def joined(*weights: float, processors: int = 1, threads: int = 1) -> StepOrder:
    order = new_order(list(weights), processors)
    for slot in range(len(weights)):
        order.join(slot, slot + 1, threads, 0.0)
    return order


def alternate(order: StepOrder, costs: list[float], steps: int) -> list[int]:
    """Engines that ask again as soon as their step has ended: the order of their steps."""
    now = 0.0
    for slot, cost in enumerate(costs):
        order.ask(slot, cost, now)
    seen = []
    for _ in range(steps):
        (slot,) = (each for each, turn in enumerate(order.turns) if turn == StepTurn.STEPPING)
        seen.append(slot)
        now += costs[slot]
        order.end(slot, costs[slot], now)
        order.ask(slot, costs[slot], now)
    return seen


def test_a_lone_engine_never_waits() -> None:
    order = joined(1, 1)
    for step in range(5):
        assert order.ask(0, 0.01, float(step)) == [0]
        assert order.end(0, 0.01, step + 0.01) == [0]
    assert order.rest(0, 9.0) == []


def test_time_is_shared_by_weight_whatever_the_length_of_steps() -> None:
    seen = alternate(joined(2, 1), [0.01, 0.01], 300)
    assert seen.count(0) == pytest.approx(200, abs=2)
    seen = alternate(joined(1, 1), [0.1, 0.01], 330)
    assert seen.count(0) == pytest.approx(30, abs=1) and seen.count(1) == pytest.approx(300, abs=10)


def test_the_turn_of_a_dead_engine_is_free() -> None:
    order = joined(1, 1, 1)
    order.ask(0, 0.01, 0.0)
    assert order.ask(1, 0.01, 0.0) == [] and order.ask(2, 0.01, 0.0) == []
    assert order.gone(0, 0.1) == [1]
    assert order.gone(1, 0.1) == [2] and not order.takes_part(1)


def test_a_turn_that_is_late_keeps_nobody_waiting() -> None:
    order = joined(1, 1)
    order.ask(0, 0.01, 0.0)
    order.ask(1, 0.01, 0.0)
    assert order.next_due() == 1.0 and order.expire(0.5) == []
    assert order.expire(1.0) == [1] and order.turns[0] == StepTurn.LATE
    order.end(0, 0.01, 5.0)
    assert order.deficits[0] > -1.1  # for one second, not for five
    order.end(1, 0.01, 5.0)
    order.rest(0, 5.0)
    order.rest(1, 5.0)
    assert order.next_due() == math.inf


def test_engines_with_few_threads_make_steps_together() -> None:
    order = joined(1, 1, 1, processors=4, threads=2)
    assert [order.ask(slot, 0.01, 0.0) for slot in range(3)] == [[0], [1], []]
    assert 2 in order.end(0, 0.01, 0.01)


def test_an_idle_engine_saves_nothing() -> None:
    order = joined(1, 1, 1)
    alternate(order, [0.01, 0.01], 50)
    assert order.deficits[2] == 0.0


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(30, 1500), marks=pytest.mark.nightly)], ids=str)
def test_random_worlds_keep_the_rules(seeds: range) -> None:
    outcomes = [run_world(draw_world(seed)) for seed in seeds]
    assert any(each.late for each in outcomes) and any(each.deaths_in_turn for each in outcomes)
    assert sum(each.steps for each in outcomes) > 1000


def test_one_seed_gives_one_execution() -> None:
    assert run_world(draw_world(4)) == run_world(draw_world(4))


def _first_slot(self: StepOrder, takers: list[int]) -> int:
    return takers[0]


def _grow_while_idle(self: StepOrder, takers: list[int]) -> int:
    before = list(self.deficits)
    chosen = _next(self, takers)
    rounds = max((self.deficits[slot] - before[slot]) / self._growth(slot) for slot in takers)
    for slot in range(self.num_slots):
        if slot not in takers and self.turns[slot] == StepTurn.IDLE:
            self.deficits[slot] += rounds * self._growth(slot)
    return chosen


def _keep_deficit(self: StepOrder, slot: int, now: float) -> list[int]:
    self.turns[slot] = StepTurn.IDLE
    return self._grant(now)


def _keep_turn(self: StepOrder, slot: int, now: float) -> list[int]:
    return []


def _stay(self: StepOrder, slot: int, now: float) -> list[int]:
    self.turns[slot] = StepTurn.BETWEEN
    return self._grant(now)


def _never_late(self: StepOrder, now: float) -> list[int]:
    return []


def _free_steps(self: StepOrder, slot: int, now: float) -> None:
    return None


def _by_number(self: StepOrder, slot: int, now: float) -> None:
    self.deficits[slot] -= 0.01


def _end_silently(self: StepOrder, slot: int, cost: float, now: float) -> list[int]:
    granted = _end(self, slot, cost, now)
    return granted[:0]


def _narrow_first(self: StepOrder, takers: list[int]) -> int:
    return _next(self, [slot for slot in takers if self.threads[slot] == min(self.threads[each] for each in takers)])


def _run_all() -> None:
    for seed in SEEDS:
        run_world(draw_world(seed))


_next = StepOrder._next
_end = StepOrder.end
BUGS: dict[str, dict[str, Callable[..., Any]]] = {
    "the first engine always comes first": {"_next": _first_slot},
    "weights are ignored": {"_growth": lambda self, slot: 0.005},
    "deficits grow while idle": {"_next": _grow_while_idle, "rest": _keep_deficit},
    "a dead engine keeps its turn": {"gone": _keep_turn},
    "an idle engine keeps its turn": {"rest": _stay},
    "a turn is never late": {"expire": _never_late},
    "steps cost nothing": {"_charge": _free_steps},
    "all steps cost the same": {"_charge": _by_number},
    "the end of a step wakes nobody": {"end": _end_silently},
    "narrow engines overtake": {"_next": _narrow_first},
    "all make steps at once": {"processors": property(lambda self: 99)},  # type: ignore[dict-item]
}


@pytest.mark.full
@pytest.mark.planted("test_random_worlds_keep_the_rules")
@pytest.mark.parametrize("bug", one_in(3, BUGS))
def test_the_worlds_find_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong in BUGS[bug].items():
        monkeypatch.setattr(StepOrder, name, wrong)
    with pytest.raises(AssertionError):
        _run_all()
