"""Simulated clients of the training scheduler: random calls on a virtual clock, with checks after each piece of work.

The trainer of a world computes no tensors. The gradient of a model is the list of (seq id, datum) that was added, and
its weights are the list of all steps with the gradients that they used. So a gradient in the wrong model, a lost or
repeated datum and a wrong order all change what a client ends with.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable
from typing import Any

from chairlift_train.service.schedule.prices import WorkPrices
from chairlift_train.service.schedule.scheduler import TrainingScheduler
from chairlift_train.service.schedule.work import STEP_KINDS, CallPart, TrainingCall, TrainingPack, TrainingStep

Patch = Callable[[Any, str, Any], None]
BUDGET = 256
LONGEST = 64


@dataclasses.dataclass
class Trained:
    """State of one model: what was added since the last step, and everything before."""

    gradient: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    history: list[tuple[str, int, tuple[tuple[int, int], ...]]] = dataclasses.field(default_factory=list)

    def add(self, call: TrainingCall, first: int, count: int) -> None:
        if not call.forward_only:
            self.gradient += [(call.seq_id, datum) for datum in range(first, first + count)]

    def step(self, call: TrainingCall) -> None:
        self.history.append((call.kind, call.seq_id, tuple(self.gradient)))
        self.gradient = []


def alone(calls: list[TrainingCall]) -> Trained:
    """The state of a client that has the machine for itself."""
    state = Trained()
    for call in calls:
        if call.kind in STEP_KINDS:
            state.step(call)
        else:
            state.add(call, 0, len(call.lengths))
    return state


@dataclasses.dataclass
class Client:
    model_id: str
    tenant: str
    calls: list[TrainingCall]
    arrivals: list[float]
    state: Trained = dataclasses.field(default_factory=Trained)
    finished: list[int] = dataclasses.field(default_factory=list)


def random_calls(rng: random.Random, model_id: str, count: int) -> list[TrainingCall]:
    calls = [TrainingCall(model_id, 0, "create")]
    for seq_id in range(1, count):
        if rng.random() < 0.35:
            calls.append(TrainingCall(model_id, seq_id, rng.choice(("optim_step", "optim_step", "save", "load"))))
        else:
            lengths = tuple(rng.randint(1, LONGEST) for _ in range(rng.choice((1, 2, 5, 30))))
            calls.append(TrainingCall(model_id, seq_id, "pass", lengths, rng.random() < 0.2))
    return calls


class World:
    """Clients, a scheduler and a virtual clock. ``noise`` is the largest factor by which work takes longer or shorter
    than predicted."""

    def __init__(self, clients: list[Client], rng: random.Random, *, noise: float = 1.0, **settings: Any) -> None:
        self.rng = rng
        self.noise = noise
        self.clients = {client.model_id: client for client in clients}
        self.scheduler = TrainingScheduler(token_budget=BUDGET, memory=1 << 40, prices=WorkPrices(), **settings)
        self.now = 0.0
        self.spent: dict[str, float] = {}
        """Tenant -> seconds of its work."""
        self.log: list[tuple[float, TrainingPack | TrainingStep]] = []
        self.ended_at: dict[tuple[str, int], float] = {}
        self._calls = {(call.model_id, call.seq_id): call for client in clients for call in client.calls}
        self._arrivals = [
            (when, index, call.model_id, call)
            for client in clients
            for index, (when, call) in enumerate(zip(client.arrivals, client.calls, strict=True))
        ]
        heapq.heapify(self._arrivals)
        for client in clients:
            self.scheduler.admit(client.model_id, client.tenant, 1)

    def run(self, until: float = float("inf")) -> None:
        while self.now < until:
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self.scheduler.add(heapq.heappop(self._arrivals)[3])
            work = self.scheduler.next()
            if work is None:
                assert not self.scheduler.has_work, "calls wait, and no work is given"
                if not self._arrivals:
                    break
                self.now = self._arrivals[0][0]
                continue
            self._compute(work)

    def _compute(self, work: TrainingPack | TrainingStep) -> None:
        seconds = work.seconds * self.rng.uniform(1 / self.noise, self.noise)
        self.log.append((self.now, work))
        self.now += seconds
        if isinstance(work, TrainingStep):
            client = self.clients[work.call.model_id]
            self.spent[client.tenant] = self.spent.get(client.tenant, 0.0) + seconds
            client.state.step(work.call)
        else:
            self._check_pack(work)
            for part in work.parts:
                client = self.clients[part.model_id]
                share = seconds * part.num_tokens / work.num_tokens
                self.spent[client.tenant] = self.spent.get(client.tenant, 0.0) + share
                client.state.add(self._calls[part.model_id, part.seq_id], part.first, part.count)
        for model_id, seq_id in self.scheduler.done(work, seconds):
            self.clients[model_id].finished.append(seq_id)
            self.ended_at[model_id, seq_id] = self.now

    def _check_pack(self, pack: TrainingPack) -> None:
        assert pack.num_tokens == sum(part.num_tokens for part in pack.parts)
        lone = len(pack.parts) == 1 and pack.parts[0].count == 1
        assert pack.num_tokens <= BUDGET or lone, f"a pack of {pack.num_tokens} tokens"
        for part in pack.parts:
            call = self._calls[part.model_id, part.seq_id]
            assert part.num_tokens == sum(call.lengths[part.first : part.first + part.count])
            assert part.is_last == (part.first + part.count == len(call.lengths))

    def check_end(self) -> None:
        """Each call has ended once, in order, and each client has what it would have alone."""
        for client in self.clients.values():
            assert client.finished == [call.seq_id for call in client.calls], f"{client.model_id}: calls lost"
            assert client.state == alone(client.calls), f"{client.model_id}: another result than alone"


def make_world(seed: int) -> World:
    rng = random.Random(seed)
    clients = []
    for index in range(rng.randint(1, 6)):
        calls = random_calls(rng, f"m{index}", rng.randint(1, 15))
        when = rng.uniform(0, 2)
        pace = rng.choice((0.0, 0.05, 0.5))
        arrivals = [when := when + rng.uniform(0, pace) for _ in calls]
        clients.append(Client(f"m{index}", f"t{rng.randint(0, 3)}", calls, arrivals))
    weights = {f"t{index}": rng.choice((0.5, 1.0, 3.0)) for index in range(4)}
    return World(clients, rng, noise=rng.choice((1.0, 1.5)), weights=weights)


def busy_world(rng: random.Random, weights: dict[str, float], *, noise: float = 1.0, calls: int = 20) -> World:
    """One client for each tenant, with more work than the test lets it finish."""
    clients = []
    for index, tenant in enumerate(weights):
        size = rng.choice((1, 4, 40))
        work = [
            TrainingCall(f"m{index}", seq_id, "pass", tuple(rng.randint(1, LONGEST) for _ in range(size)))
            for seq_id in range(1, 1 + calls * 40 // size)
        ]
        clients.append(Client(f"m{index}", tenant, work, [0.0] * len(work)))
    return World(clients, rng, noise=noise, weights=weights)


# --- planted bugs ----------------------------------------------------------------------------------------------------


def gradient_of_another_model(patch: Patch) -> None:
    """Every part of a pack is taken for the first model's."""
    from chairlift_train.service.schedule import scheduler

    real = scheduler._parts

    def parts(chosen: Any) -> tuple[CallPart, ...]:
        made = real(chosen)
        by_seq = {part.seq_id: part.model_id for part in made}
        return tuple(dataclasses.replace(part, model_id=by_seq[part.seq_id]) for part in made)

    patch(scheduler, "_parts", parts)


def step_does_not_wait(patch: Patch) -> None:
    """Data of calls behind a step are packed before the step: two versions of the weights in one gradient."""
    from chairlift_train.service.schedule import scheduler

    def next_pass(self: Any) -> Any:
        for queued in self.calls:
            if queued.call.kind not in STEP_KINDS and queued.given < len(queued.call.lengths):
                return queued
        return None

    patch(scheduler._Model, "next_pass", next_pass)


def rest_of_a_divided_call_lost(patch: Patch) -> None:
    """A call counts as ended after its first part."""
    real = TrainingScheduler._end
    patch(TrainingScheduler, "_end", lambda self, model_id, seq_id, count: real(self, model_id, seq_id, 1_000))


def newest_call_first(patch: Patch) -> None:
    """The calls of a model are taken from the end."""
    from chairlift_train.service.schedule import scheduler

    def next_pass(self: Any) -> Any:
        found = None
        for queued in self.calls:
            if queued.call.kind in STEP_KINDS:
                break
            if queued.given < len(queued.call.lengths):
                found = queued
        return found

    patch(scheduler._Model, "next_pass", next_pass)


def datum_given_twice(patch: Patch) -> None:
    """The first datum of each further part repeats the last one of the part before."""
    from chairlift_train.service.schedule import scheduler

    real = scheduler._parts

    def parts(chosen: Any) -> tuple[CallPart, ...]:
        return tuple(
            dataclasses.replace(part, first=part.first - 1, count=part.count + 1) if part.first else part
            for part in real(chosen)
        )

    patch(scheduler, "_parts", parts)


def budget_ignored(patch: Patch) -> None:
    """A pack takes everything that waits."""
    real = TrainingScheduler._pack
    patch(TrainingScheduler, "_pack", lambda self, budget: real(self, 1 << 30))


def first_model_starves_others(patch: Patch) -> None:
    """Virtual times are ignored: the oldest model goes first while it has work."""
    patch(TrainingScheduler, "_order", lambda self, model: (0.0, 0.0, model.arrival))


def weights_ignored(patch: Patch) -> None:
    """Every tenant has the weight 1."""

    def charge(self: Any, model: Any, seconds: float) -> None:
        model.virtual += seconds
        model.tenant.virtual += seconds

    patch(TrainingScheduler, "_charge", charge)


def idle_time_is_saved(patch: Patch) -> None:
    """A tenant that was idle may make up for it later, before all others."""
    patch(TrainingScheduler, "_wake", lambda self, model: None)


WRONG_RESULTS = [
    gradient_of_another_model,
    step_does_not_wait,
    rest_of_a_divided_call_lost,
    newest_call_first,
    datum_given_twice,
    budget_ignored,
]
UNFAIR = [first_model_starves_others, weights_ignored, idle_time_is_saved]
