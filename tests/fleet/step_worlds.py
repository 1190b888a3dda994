"""Engines that share processors, on a virtual clock, and the rules that the order of their steps must keep."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Final

from chairlift.fleet.models.turnstile.order import StepOrder, StepTurn

__all__ = ["Outcome", "StepWorld", "draw_world", "new_order", "run_world"]

_QUANTUM: Final = 0.005


def new_order(weights: list[float], processors: int = 1) -> StepOrder:
    """An order in memory of its own."""
    order = StepOrder(memoryview(bytearray(8 * StepOrder.num_values(len(weights)))).cast("d"), len(weights))
    order.set_up(weights, processors)
    return order


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine of a world. Times are seconds."""

    weight: float
    threads: int
    bursts: tuple[tuple[float, int], ...]
    """(seconds without work, number of steps that follow)."""
    step: float
    """Mean time of a step."""
    error: float
    """Predicted seconds of a step, divided by its mean seconds."""
    dies_at: float = math.inf
    stopped_at: float = math.inf
    """Time of a signal that stops the process for a minute."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepWorld:
    """Engines and their processors."""

    seed: int
    processors: int
    engines: tuple[SimulatedEngine, ...]
    saturated: bool
    """Whether all engines always have work, so that their shares are known."""
    end: float


@dataclasses.dataclass(slots=True)
class Outcome:
    """What happened in a world."""

    seconds: list[float]
    """Seconds of steps of each engine."""
    steps: int = 0
    longest_wait: float = 0.0
    late: int = 0
    deaths_in_turn: int = 0


def draw_world(seed: int) -> StepWorld:
    """Two to five engines with steps of 4 ms to 0.3 s. A third of the worlds are saturated."""
    rng = random.Random(seed)
    saturated = seed % 3 == 0
    processors = 1 if saturated else rng.choice((1, 1, 4))
    end = 12.0 if saturated else 6.0
    engines = []
    for _ in range(rng.choice((2, 3, 5))):
        idle = rng.choice((0.0, 0.05, 2.0))
        bursts = tuple((rng.expovariate(1 / idle) if idle else 0.0, rng.choice((1, 5, 100))) for _ in range(20))
        engines.append(
            SimulatedEngine(
                rng.choice((0.5, 1.0, 1.0, 3.0)),
                1 if processors == 1 else rng.choice((1, 2, 4)),
                ((0.0, 10**9),) if saturated else bursts,
                rng.choice((0.004, 0.02, 0.1, 0.3)),
                rng.choice((1.0, 1.0, 0.3, 3.0)),
                dies_at=rng.uniform(0, end) if not saturated and rng.random() < 0.3 else math.inf,
                stopped_at=rng.uniform(0, end / 2) if not saturated and rng.random() < 0.3 else math.inf,
            )
        )
    return StepWorld(seed, processors, tuple(engines), saturated, end)


class _Running:
    """One run of a world. Every event is followed by the checks."""

    def __init__(self, world: StepWorld) -> None:
        self.world = world
        self.order = new_order([engine.weight for engine in world.engines], world.processors)
        self.outcome = Outcome([0.0] * len(world.engines))
        self.now = 0.0
        self._rng = random.Random(world.seed + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._bursts = [iter(engine.bursts) for engine in world.engines]
        self._left = [0] * len(world.engines)
        """Engine -> steps of its burst that are still to come."""
        self._dead: set[int] = set()
        self._asked: dict[int, float] = {}
        """Engine that waits -> latest time at which its step must begin."""
        self._asked_at: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        self._stopped = sum(max(1.0, 4 * e.step * e.error) for e in world.engines if e.stopped_at < math.inf)
        """Longest time for which stopped processes keep others waiting."""

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), event))

    def run(self) -> Outcome:
        for slot, engine in enumerate(self.world.engines):
            self._take(self.order.join(slot, slot + 1, engine.threads, 0.0))
            self._next_burst(slot)
            if engine.dies_at < math.inf:
                self.at(engine.dies_at, lambda slot=slot: self._die(slot))  # type: ignore[misc]
        while self._events and self.now < self.world.end:
            due = self.order.next_due() if self._asked else math.inf
            if due < self._events[0][0]:
                self.now = max(self.now, due)
                self.outcome.late += 1
                self._take(self.order.expire(self.now))
                assert self.order.next_due() > self.now, "a late turn is not ended"
            else:
                self.now, _, event = heapq.heappop(self._events)
                event()
            self._check()
        if self.world.saturated:
            self._check_shares()
        return self.outcome

    # -- engines -------------------------------------------------------------------------------------------------------

    def _live(self, slot: int, event: Callable[[int], None]) -> Callable[[], None]:
        return lambda: None if slot in self._dead else event(slot)

    def _next_burst(self, slot: int) -> None:
        idle, self._left[slot] = next(self._bursts[slot], (math.inf, 0))
        if idle < math.inf:
            self.at(self.now + idle, self._live(slot, self._ask))

    def _predicted(self, slot: int) -> float:
        engine = self.world.engines[slot]
        return engine.step * engine.error

    def _ask(self, slot: int) -> None:
        cost = self._predicted(slot)
        bound = self._bound(slot)
        granted = self.order.ask(slot, cost, self.now)
        self._asked[slot] = self.now + bound
        self._asked_at[slot] = self.now
        self._take(granted)
        if slot in self._asked:  # it sleeps, and sees which processes have ended
            for dead in self._dead:
                if self.order.takes_part(dead):
                    self._take(self.order.gone(dead, self.now))

    def _bound(self, slot: int) -> float:
        """Longest time that an engine that asks now may wait: the others have their growth in as many rounds as its own
        deficit needs, what they have saved, a step that is longer than predicted, and the gaps between their steps."""
        own = self.world.engines[slot]
        missing = self._predicted(slot) - min(0.0, self.order.deficits[slot])
        rounds = math.ceil(missing / (_QUANTUM * own.weight)) + 2
        total = 0.0
        for other, engine in enumerate(self.world.engines):
            if other != slot:
                longest = engine.step * max(1.5, engine.error)
                total += rounds * _QUANTUM * engine.weight + 3 * longest
        return 1.3 * total + self._stopped + 0.01

    def _take(self, granted: list[int]) -> None:
        for slot in granted:
            if slot in self._asked:
                wait = self.now - self._asked_at[slot]
                self.outcome.longest_wait = max(self.outcome.longest_wait, wait)
                del self._asked[slot]
                self._begin(slot)

    def _begin(self, slot: int) -> None:
        engine = self.world.engines[slot]
        self._begun[slot] = self.now
        seconds = engine.step * self._rng.uniform(0.5, 1.5)
        if self.now <= engine.stopped_at < self.now + seconds:
            seconds += 60.0
        self.at(self.now + seconds, self._live(slot, self._end))

    def _end(self, slot: int) -> None:
        self.outcome.steps += 1
        self.outcome.seconds[slot] += self.now - self._begun.pop(slot)
        self._left[slot] -= 1
        self._take(self.order.end(slot, self._predicted(slot), self.now))
        gap = 0.1 * self.world.engines[slot].step * self._rng.random()
        self.at(self.now + gap, self._live(slot, self._ask if self._left[slot] > 0 else self._rest))

    def _rest(self, slot: int) -> None:
        self._take(self.order.rest(slot, self.now))
        self._next_burst(slot)

    def _die(self, slot: int) -> None:
        self._dead.add(slot)
        self._asked.pop(slot, None)
        self.outcome.deaths_in_turn += self._begun.pop(slot, None) is not None
        if self._asked:  # the others sleep, and see it at once
            self._take(self.order.gone(slot, self.now))

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        turns = list(self.order.turns)
        stepping = [slot for slot in self._begun if turns[slot] != StepTurn.LATE]
        threads = sum(self.world.engines[slot].threads for slot in stepping)
        assert len(stepping) <= 1 or threads <= self.world.processors, f"{threads} threads compute at once"
        assert not self._asked or any(turn in (StepTurn.KEPT, StepTurn.STEPPING) for turn in turns), "nobody has a turn"
        assert not self._asked or not any(turns[slot] for slot in self._dead), "an engine waits for a dead one"
        for slot, until in self._asked.items():
            assert self.now <= until, f"engine {slot} waits {self.now - self._asked_at[slot]:.3f} s for its turn"

    def _check_shares(self) -> None:
        """Seconds of engines that always have work differ from their weights by a few steps at most."""
        shares = [
            seconds / engine.weight for seconds, engine in zip(self.outcome.seconds, self.world.engines, strict=True)
        ]
        slack = max(engine.step * max(1.5, engine.error) / engine.weight for engine in self.world.engines)
        assert max(shares) - min(shares) <= 3 * slack + 4 * _QUANTUM, f"shares by weight are {shares}"


def run_world(world: StepWorld) -> Outcome:
    """Run a world to its end. Raises AssertionError for a broken rule."""
    return _Running(world).run()
