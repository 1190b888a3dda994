"""Random worlds of several models behind one server, on a virtual clock, and the rules that each of them must keep."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from chairlift.fleet.models.policy import Action, ActionKind, ModelPolicy, ModelState, PolicyLimits, Refusal, Ticket

__all__ = ["Outcome", "World", "draw_world", "run_world"]

_END: Final = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One model of a world. Times are seconds."""

    name: str
    num_bytes: int
    load_seconds: float
    pinned: bool = False
    keep_seconds: float = math.inf
    dies_loading: float = 0.0
    """Probability that a load dies."""
    broken: bool = False
    """Whether no load succeeds, because the files are unusable."""
    hangs: bool = False
    """Whether loads never end by themselves."""


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Models, and the requests for them: (arrival, model, seconds in the model, seconds until the caller leaves)."""

    seed: int
    limits: PolicyLimits
    models: tuple[SimulatedModel, ...]
    requests: tuple[tuple[float, str, float, float], ...]
    deaths: tuple[tuple[float, str], ...] = ()
    """Times at which the engine of a model dies, if it is loaded."""

    @property
    def longest(self) -> float:
        """Longest time of a request in its model."""
        return max((each[2] for each in self.requests), default=0.0)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What happened in a world."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """served, lost (its engine died), failed, full, gave up -> number of requests."""
    loads: Counter[str] = dataclasses.field(default_factory=Counter)
    longest_wait: float = 0.0
    drained: int = 0
    log: list[tuple[float, str, str]] = dataclasses.field(default_factory=list)


def draw_world(seed: int) -> World:
    """Zipf traffic for up to 20 models, some of them pinned, broken, slow, too large, or dying. The seed -1 has a fixed
    world: one model is busy for a long time, and another waits for its memory."""
    if seed == -1:
        pair = (SimulatedModel("m0", 100, 1.0), SimulatedModel("m1", 100, 1.0))
        busy_one = [(each * 1.0, "m0", 1.5, math.inf) for each in range(300)]
        limits = PolicyLimits(memory_bytes=100, max_waiting=1000)
        return World(seed, limits, pair, tuple(sorted([*busy_one, (5.0, "m1", 1.0, math.inf)])))
    rng = random.Random(seed)
    count = rng.choice((2, 5, 20))
    memory = rng.choice((100, 300))
    alike = rng.random() < 0.4
    models = []
    left = memory
    for index in range(count):
        size = 100 if alike else rng.choice((20, 50, 100, 150))
        pinned = rng.random() < 0.15 and left - size >= 100
        left -= size if pinned else 0
        keep = rng.choice((math.inf, math.inf, 5.0))
        models.append(
            SimulatedModel(
                f"m{index}",
                memory + 1 if rng.random() < 0.05 and not pinned else size,
                rng.choice((0.1, 1.0, 1.0, 20.0)),
                pinned=pinned,
                keep_seconds=keep,
                dies_loading=rng.choice((0.0, 0.0, 0.3, 0.9)),
                broken=rng.random() < 0.1,
                hangs=rng.random() < 0.05,
            )
        )
    weights = [1 / (index + 1) for index in range(count)]
    busy = rng.choice((0.2, 2.0, 8.0))
    now = 0.0
    requests = []
    for _ in range(rng.choice((30, 80))):
        now += rng.expovariate(busy)
        patience = rng.choice((math.inf, math.inf, 3.0))
        requests.append((now, rng.choices(models, weights)[0].name, rng.choice((0.05, 1.0, 8.0)), patience))
    if rng.random() < 0.5:  # one model is never without a request
        requests += [(each * 1.0, models[0].name, 1.5, math.inf) for each in range(min(60, int(now) + 20))]
    limits = PolicyLimits(
        memory_bytes=memory,
        max_waiting=rng.choice((4, 1000)),
        load_timeout=60.0,
        patience=rng.choice((0.0, 10.0)),
    )
    deaths = tuple((rng.uniform(0, now), rng.choice(models).name) for _ in range(rng.choice((0, 0, 6))))
    return World(seed, limits, tuple(models), tuple(sorted(requests)), deaths)


class _Running:
    """One run of a world. Every event is followed by the checks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = ModelPolicy(world.limits)
        self.outcome = Outcome()
        self.now = 0.0
        self.models = {model.name: model for model in world.models}
        self.engines: dict[str, str] = {}
        """Model -> loading, up or ending: the processes that exist."""
        self.up_since: dict[str, float] = {}
        self.running: Counter[str] = Counter()
        self.inside: dict[str, list[Ticket]] = {model.name: [] for model in world.models}
        """Model -> requests that use it."""
        self.lives: Counter[str] = Counter()
        """Model -> number of its engines so far, so that events of a dead engine are recognised."""
        self.open: dict[int, tuple[Ticket, float, float]] = {}
        """Number of a waiting request -> (ticket, seconds in the model, time at which its caller leaves)."""
        self._rng = random.Random(world.seed + 1)
        slowest = max(world.limits.load_timeout * model.hangs + model.load_seconds for model in world.models)
        turn = 3 * slowest + 30 + world.limits.patience + world.longest + 5
        self._longest_wait = turn * (1 + len(self.models))
        self._num_checks = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def run(self) -> Outcome:
        for model in self.world.models:
            self.policy.add(model.name, model.num_bytes, pinned=model.pinned, keep_seconds=model.keep_seconds)
        for arrival, name, seconds, patience in self.world.requests:
            self.at(arrival, functools.partial(self._arrive, name, seconds, patience))
        for when, name in self.world.deaths:
            self.at(when, functools.partial(self._die, name))
        self._decide()
        idle = 0
        while self._events or self.policy.num_waiting:
            wake = self.policy.wake_at(self.now)
            when = self._events[0][0] if self._events else math.inf
            assert min(when, wake) < _END, f"nothing happens any more, and {self.policy.num_waiting} requests wait"
            idle = idle + 1 if wake < when else 0
            assert idle < 200, "the policy wakes up again and again without an effect"
            self.now = min(when, wake)
            if when <= wake:
                heapq.heappop(self._events)[2]()
            self._decide()
            self._check()
        assert not self.running.total() and not self.open
        return self.outcome

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, name: str, seconds: float, patience: float) -> None:
        waiting = self.policy.num_waiting
        ticket = self.policy.enter(name, self.now)
        if isinstance(ticket, Refusal):
            assert ticket.message and 1 <= ticket.retry_after <= 60
            full = waiting >= self.world.limits.max_waiting
            assert ticket.failed or full, "refused although there is room"
            self.outcome.counts["failed" if ticket.failed else "full"] += 1
            return
        assert waiting <= self.world.limits.max_waiting
        self.open[ticket.number] = (ticket, seconds, self.now + patience)
        if ticket.admitted:
            self._begin(ticket)
        elif patience < math.inf:
            self.at(self.now + patience, lambda: self._give_up(ticket))

    def _give_up(self, ticket: Ticket) -> None:
        if ticket.number in self.open:
            del self.open[ticket.number]
            self.policy.leave(ticket, self.now)
            self.outcome.counts["gave up"] += 1

    def _begin(self, ticket: Ticket) -> None:
        _, seconds, _ = self.open.pop(ticket.number)
        name = ticket.model
        assert self.engines.get(name) == "up", f"a request was admitted to {name}, which is {self.engines.get(name)}"
        self.running[name] += 1
        self.inside[name].append(ticket)
        wait = self.now - ticket.arrived
        self.outcome.longest_wait = max(self.outcome.longest_wait, wait)
        life = self.lives[name]
        self.at(self.now + seconds, lambda: self._finish(ticket, life))

    def _finish(self, ticket: Ticket, life: int) -> None:
        if ticket.left:
            return  # its engine has died
        self.running[ticket.model] -= 1
        self.inside[ticket.model].remove(ticket)
        assert life == self.lives[ticket.model], "another engine answers than the one that began"
        self.policy.leave(ticket, self.now)
        self.outcome.counts["served"] += 1

    # -- engines -------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        actions, admitted = self.policy.next(self.now)
        for ticket in admitted:
            self._begin(ticket)
        for action in actions:
            self.outcome.log.append((self.now, action.kind.value, action.model))
            self._follow(action)
        more, admitted = self.policy.next(self.now)
        assert not more and not admitted, "a second look finds more to do"

    def _follow(self, action: Action) -> None:
        model = self.models[action.model]
        name = model.name
        if action.kind is ActionKind.LOAD:
            assert name not in self.engines, f"{name} is loaded twice"
            assert "loading" not in self.engines.values(), "two models are loaded at once"
            self._check_turn(name)
            self.engines[name] = "loading"
            self.lives[name] += 1
            self.outcome.loads[name] += 1
            if not model.hangs:
                share = self._rng.random() if self._rng.random() < model.dies_loading else 1.0
                life = self.lives[name]
                self.at(self.now + share * model.load_seconds, lambda: self._end_load(model, life, share == 1.0))
        elif action.kind is ActionKind.CANCEL:
            assert self.engines[name] == "loading"
            self.at(self.now + 0.1, lambda: self._end_load(model, self.lives[name], False))
        else:
            self._begin_unload(model)

    def _check_turn(self, name: str) -> None:
        """The loaded model is the first in the line, but for models that wait after a failure."""
        open_ = [ticket for ticket, _, _ in self.open.values() if not ticket.admitted and not ticket.failure]
        own = min((ticket.number for ticket in open_ if ticket.model == name), default=-1)
        for ticket in open_:
            view = self.policy.view(ticket.model)
            recovers = view.num_failures and view.state is ModelState.UNLOADED
            waits = view.state is ModelState.UNLOADED and not recovers and ticket.number < own
            assert not waits or self.models[name].pinned, f"{name} is loaded before {ticket.model}"

    def _end_load(self, model: SimulatedModel, life: int, whole: bool) -> None:
        name = model.name
        if life != self.lives[name] or self.engines.get(name) != "loading":
            return
        if whole and not model.broken:
            self.engines[name] = "up"
            self.up_since[name] = self.now
            for ticket in self.policy.loaded(name, self.now):
                self._begin(ticket)
            return
        del self.engines[name]
        for ticket in self.policy.failed(name, "it died", self.now, again=not model.broken):
            del self.open[ticket.number]
            self.outcome.counts["failed"] += 1

    def _begin_unload(self, model: SimulatedModel) -> None:
        name = model.name
        assert self.engines.get(name) == "up" and not model.pinned, f"{name} must stay"
        assert not self.running[name], f"{name} is unloaded with {self.running[name]} running requests"
        view = self.policy.view(name)
        stay = min(30.0, max(1.0, 2 * view.load_seconds))
        if model.keep_seconds == math.inf:
            assert self.now - self.up_since[name] >= stay - 1e-9, f"{name} stayed for too short a time"
        self.engines[name] = "ending"
        self.at(self.now + self._rng.choice((0.0, 0.5)), lambda: self._end_unload(name))

    def _end_unload(self, name: str) -> None:
        del self.engines[name]
        self.policy.unloaded(name, self.now)

    def _die(self, name: str) -> None:
        if self.engines.get(name) != "up":
            return
        del self.engines[name]
        self.lives[name] += 1
        lost = self.running.pop(name, 0)
        self.outcome.counts["lost"] += lost
        for ticket in self.policy.died(name, "it died", self.now):
            del self.open[ticket.number]
            self.outcome.counts["failed"] += 1
        for ticket in self.inside[name]:
            self.policy.leave(ticket, self.now)
        self.inside[name] = []

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        used = sum(self.models[name].num_bytes for name in self.engines)
        assert used <= self.world.limits.memory_bytes, f"{used} of {self.world.limits.memory_bytes} bytes"
        assert used == self.policy.used_bytes
        bound = self._longest_wait
        for ticket, _, leaves in self.open.values():
            assert self.now - ticket.arrived <= bound, f"a request for {ticket.model} waits for ever"
            assert self.now <= leaves
            assert self.policy.position(ticket) >= 1
        self._num_checks += 1
        for name in self.models if self._num_checks % 4 == 0 else ():
            view = self.policy.view(name)
            assert view.num_running == self.running[name] and view.num_waiting == self._num_open(name)
            up = self.engines.get(name)
            if self.policy.problem(name):
                assert up is None and view.state is ModelState.FAILED and view.reason
                continue
            expected = {None: ("unloaded", "failed"), "loading": ("loading",), "up": ("loaded",)}
            assert view.state.value in expected.get(up, ("unloading",)), f"{name} is {up} and {view.state}"

    def _num_open(self, name: str) -> int:
        return sum(ticket.model == name for ticket, _, _ in self.open.values())


def run_world(world: World) -> Outcome:
    """Run a world to its end. Raises AssertionError for a broken rule."""
    return _Running(world).run()
