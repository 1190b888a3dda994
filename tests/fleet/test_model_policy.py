"""Which models are loaded, unloaded and waited for: examples, random worlds, and planted bugs that the worlds find."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.fleet.models import policy
from chairlift.fleet.models.policy import ActionKind, ModelPolicy, ModelState, PolicyLimits, Refusal, Ticket
from tests.fleet.model_worlds import draw_world, run_world
from tests.tiers import one_in

SEEDS = range(-1, 24)


def small(count: int = 3, memory: int = 200, **limits: Any) -> ModelPolicy:
    """Models a, b, c, ... of 100 bytes each."""
    made = ModelPolicy(PolicyLimits(memory_bytes=memory, **limits))
    for name in "abcdefgh"[:count]:
        made.add(name, 100)
    return made


def load(made: ModelPolicy, name: str, now: float, seconds: float = 0.1) -> Ticket:
    """Send a request, which must lead to a load, and end the load and the request."""
    ticket = made.enter(name, now)
    assert isinstance(ticket, Ticket)
    assert [(each.kind, each.model) for each in made.next(now)[0]][-1:] == [(ActionKind.LOAD, name)]
    assert made.loaded(name, now + seconds) == [ticket] and ticket.admitted
    made.leave(ticket, now + seconds)
    return ticket


def kinds(made: ModelPolicy, now: float) -> list[tuple[str, str]]:
    return [(each.kind.value, each.model) for each in made.next(now)[0]]


def test_the_least_recently_used_model_is_unloaded_for_another() -> None:
    made = small()
    load(made, "a", 0.0)
    load(made, "b", 1.0)
    again = made.enter("a", 5.0)
    assert isinstance(again, Ticket) and again.admitted
    made.leave(again, 5.1)
    made.enter("c", 6.0)
    assert kinds(made, 6.0) == [("unload", "b")]
    made.unloaded("b", 6.5)
    assert kinds(made, 6.5) == [("load", "c")]


def test_a_model_with_running_requests_is_drained_and_not_unloaded() -> None:
    made = small(2, memory=100, patience=10.0)
    running = made.enter("a", 0.0)
    made.next(0.0)
    made.loaded("a", 0.1)
    waiting = made.enter("b", 5.0)
    assert isinstance(running, Ticket) and isinstance(waiting, Ticket)
    assert kinds(made, 5.0) == [] and made.wake_at(5.0) == 15.0
    assert kinds(made, 15.0) == []
    late = made.enter("a", 15.5)
    assert isinstance(late, Ticket) and not late.admitted and made.position(late) == 2
    made.leave(running, 16.0)
    assert kinds(made, 16.0) == [("unload", "a")]
    made.unloaded("a", 16.1)
    assert kinds(made, 16.1) == [("load", "b")]
    assert made.view("a").position == 1  # b is being loaded, so a is the first that waits


def test_a_drained_model_serves_again_if_nobody_needs_its_memory_any_more() -> None:
    made = small(2, memory=100, patience=0.0)
    made.enter("a", 0.0)
    made.next(0.0)
    made.loaded("a", 0.1)
    waiting = made.enter("b", 5.0)
    late = made.enter("a", 5.0)
    assert isinstance(waiting, Ticket) and isinstance(late, Ticket) and late.admitted
    made.next(5.0)
    later = made.enter("a", 6.0)
    assert isinstance(later, Ticket) and not later.admitted
    made.leave(waiting, 7.0)
    assert made.next(7.0) == ([], [later]) and later.admitted


def test_the_place_of_a_model_is_kept_for_a_multiple_of_its_load_time() -> None:
    made = small(2, memory=100, residency=2.0)
    load(made, "a", 0.0, seconds=4.0)
    made.enter("b", 5.0)
    assert kinds(made, 5.0) == [] and made.wake_at(5.0) == 12.0
    assert kinds(made, 12.0) == [("unload", "a")]


def test_requests_beyond_the_bound_are_refused_with_a_time() -> None:
    made = small(2, max_waiting=2)
    made.enter("a", 0.0)
    made.next(0.0)
    second = made.enter("b", 0.1)
    assert isinstance(second, Ticket) and made.position(second) == 2
    refusal = made.enter("a", 0.2)
    assert isinstance(refusal, Refusal) and not refusal.failed and 1 <= refusal.retry_after <= 60
    assert "2 requests wait" in refusal.message


def test_a_load_that_dies_is_tried_again_and_then_refused() -> None:
    made = small(1, max_tries=2, cooldown=30.0)
    ticket = made.enter("a", 0.0)
    made.next(0.0)
    assert made.failed("a", "killed", 1.0, again=True) == []
    assert kinds(made, 1.0) == [] and made.wake_at(1.0) == pytest.approx(1.2)
    assert kinds(made, 1.2) == [("load", "a")]
    assert made.failed("a", "killed", 2.0, again=True) == [ticket]
    assert isinstance(ticket, Ticket) and ticket.failure == "killed"
    refusal = made.enter("a", 10.0)
    assert isinstance(refusal, Refusal) and refusal.failed and refusal.retry_after == 22.0
    assert made.view("a").state is ModelState.FAILED and made.view("a").reason == "killed"
    assert isinstance(made.enter("a", 33.0), Ticket)


def test_a_model_that_can_never_fit_is_refused_at_once() -> None:
    made = small(1)
    made.add("large", 201)
    made.add("p", 150, pinned=True)
    refusal = made.enter("large", 1000.0)
    assert isinstance(refusal, Refusal) and refusal.failed and "it needs 201 bytes" in refusal.message
    assert "beside the 150 of the pinned" in (made.view("a").reason or "") and made.view("a").state is ModelState.FAILED


def test_pinned_models_are_loaded_without_a_request_and_again_after_their_death() -> None:
    made = small(1)
    made.add("p", 100, pinned=True)
    assert kinds(made, 0.0) == [("load", "p")]
    made.loaded("p", 1.0)
    made.keep("p", 0.0)
    assert kinds(made, 50.0) == []
    assert made.died("p", "killed", 60.0) == []
    assert made.wake_at(60.0) == pytest.approx(60.2) and kinds(made, 60.2) == [("load", "p")]


def test_an_idle_model_is_unloaded_after_its_time() -> None:
    made = small(1)
    load(made, "a", 0.0)
    assert made.wake_at(1.0) == math.inf
    made.keep("a", 5.0)
    assert made.wake_at(1.0) == pytest.approx(5.1) and kinds(made, 5.1) == [("unload", "a")]
    made.unloaded("a", 6.0)
    assert made.view("a").expires_at == math.inf
    load(made, "a", 7.0)
    made.keep("a", 0.0)
    assert kinds(made, 7.2) == [("unload", "a")]


def test_a_load_that_hangs_is_cancelled() -> None:
    made = small(1, load_timeout=60.0)
    ticket = made.enter("a", 0.0)
    made.next(0.0)
    assert made.wake_at(1.0) == 60.0 and kinds(made, 60.0) == [("cancel", "a")] and kinds(made, 61.0) == []
    assert made.failed("a", "it took too long", 61.0, again=True) == [ticket]


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(24, 3000), marks=pytest.mark.nightly)], ids=str)
def test_random_worlds_keep_the_rules(seeds: range) -> None:
    outcomes = [run_world(draw_world(seed)) for seed in seeds]
    for kind in ("served", "lost", "failed", "full", "gave up"):
        assert sum(each.counts[kind] for each in outcomes), f"no world has a request that was {kind}"
    assert any(each.loads.total() > 10 for each in outcomes)


def test_one_seed_gives_one_execution() -> None:
    for seed in range(5):
        assert run_world(draw_world(seed)) == run_world(draw_world(seed))


def _no_budget(self: ModelPolicy) -> int:
    return self.limits.memory_bytes


def _forget_what_ends(self: ModelPolicy) -> int:
    used = sum(m.num_bytes for m in self._models.values() if m.state in (ModelState.LOADED, ModelState.LOADING))
    return self.limits.memory_bytes - used


def _busy_is_idle(self: Any) -> bool:
    return self.state is ModelState.LOADED


def _never_drain(self: ModelPolicy, head: Any, now: float) -> list[Any]:
    return [each for each in _victims(self, head, now) if each.is_idle or (each.draining and not each.running)]


def _thrash(self: ModelPolicy, model: Any) -> float:
    return 0.0


def _newest_first(self: ModelPolicy) -> list[Any]:
    return _line(self)[::-1]


def _unpin(self: ModelPolicy, head: Any, now: float) -> list[Any]:
    pinned = [each for each in self._models.values() if each.pinned and each.is_idle]
    return pinned or _victims(self, head, now)


def _two_at_once(self: ModelPolicy) -> bool:
    return False


def _no_timer(self: ModelPolicy, now: float) -> float:
    return math.inf


def _wait_without_bound(self: ModelPolicy, name: str, now: float) -> Any:
    self.limits = dataclasses.replace(self.limits, max_waiting=10**9)
    return _enter(self, name, now)


def _admit_while_draining(self: ModelPolicy, victims: Sequence[Any], now: float) -> list[Ticket]:
    return []


def _drop_waiting(self: ModelPolicy, name: str, now: float) -> list[Ticket]:
    return _loaded(self, name, now)[:-1]


def _forget_to_leave(self: ModelPolicy, ticket: Ticket, now: float) -> None:
    if ticket.admitted:
        _leave(self, ticket, now)


def _admit_to_what_ends(self: ModelPolicy, name: str, now: float) -> Any:
    model = self._models[name]
    known, model.state = model.state, ModelState.LOADED if model.state is ModelState.UNLOADING else model.state
    try:
        return _enter(self, name, now)
    finally:
        model.state = known


def _try_for_ever(self: ModelPolicy, model: Any, reason: str, now: float, *, again: bool) -> list[Ticket]:
    model.tries = 1
    return _stop(self, model, reason, now, again=True)


def _run_all() -> None:
    for seed in SEEDS:
        run_world(draw_world(seed))


_victims = ModelPolicy._victims
_line = ModelPolicy._line
_enter = ModelPolicy.enter
_loaded = ModelPolicy.loaded
_leave = ModelPolicy.leave
_stop = ModelPolicy._stop_or_try_again
BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the budget is ignored": (ModelPolicy, "_free_bytes", property(_no_budget)),  # type: ignore[dict-item]
    "an ending engine has no memory": (ModelPolicy, "_free_bytes", property(_forget_what_ends)),  # type: ignore[dict-item]
    "busy models are unloaded": (policy._Model, "is_idle", property(_busy_is_idle)),  # type: ignore[dict-item]
    "a busy model keeps its memory": (ModelPolicy, "_victims", _never_drain),
    "models are unloaded at once": (ModelPolicy, "_least_stay", _thrash),
    "the newest request comes first": (ModelPolicy, "_line", _newest_first),
    "pinned models are unloaded": (ModelPolicy, "_victims", _unpin),
    "two models are loaded at once": (ModelPolicy, "_is_loading", property(_two_at_once)),  # type: ignore[dict-item]
    "nothing happens without an event": (ModelPolicy, "wake_at", _no_timer),
    "any number of requests waits": (ModelPolicy, "enter", _wait_without_bound),
    "a victim is not drained": (ModelPolicy, "_drain", _admit_while_draining),
    "a waiting request is forgotten": (ModelPolicy, "loaded", _drop_waiting),
    "a caller that left is counted": (ModelPolicy, "leave", _forget_to_leave),
    "an ending engine gets requests": (ModelPolicy, "enter", _admit_to_what_ends),
    "a broken model is loaded again and again": (ModelPolicy, "_stop_or_try_again", _try_for_ever),
}


@pytest.mark.full
@pytest.mark.planted("test_random_worlds_keep_the_rules")
@pytest.mark.parametrize("bug", one_in(3, BUGS))
def test_the_worlds_find_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        _run_all()
