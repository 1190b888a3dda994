"""Simulates a trace on a fleet of several replicas, on a virtual clock.

Each replica is a real engine core with its own clock. The router (the door), which holds waiting requests and chooses
replicas, is the real code as well (:mod:`chairlift.fleet.door`). Events are handled in the order of their times:
a request arrives, a step ends, or a replica fails, starts or is drained. So every token has the time that follows from
the cost model's step times. Replicas can start late, die, and be updated one after another, and messages to the door
can be delayed.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs
from chairlift.engine.input_processor import InputProcessor, PreparedRequest
from chairlift.errors import ConfigError
from chairlift.fleet.autoscale import SCALE_SECONDS, Autoscaler, demand_of, replica_to_remove
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.routing import Pace, Replica, prefix_keys, router_from_name
from chairlift_lab.replay.clients import Clients, enter
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import simulated_core
from chairlift_lab.replay.served import Collector, ServedTrace
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["MAX_EXACT", "FleetPlan", "FleetReport", "pace_of", "replay_fleet"]

MAX_EXACT: Final = 16
"""Maximum number of replicas that are simulated token by token. Larger fleets are simulated with the approximate model
of :mod:`chairlift_lab.replay.flow_fleet`."""
_MAX_REPLICAS: Final = 1024
_LOWEST: Final = 1 << 30
"""Priority of a hypothetical new request that is served after all others. The autoscaler uses the forecast wait of this
request."""
_TOKEN: Final = 1
"""Id of every token in simulated answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Settings of a simulated fleet, and the failures and updates that happen to it.

    Times are in seconds from the start of the trace. Raises ConfigError for values out of range.
    """

    replicas: int
    routing: str = "forecast"
    door_delay: float = 0.0
    """Delay in seconds until the router (the door) learns that a request has its first token or has ended."""
    start_seconds: float = 0.0
    """Time in seconds that a replica needs to start again after a failure or an update."""
    failures: tuple[tuple[int, float], ...] = ()
    """One entry per failure: (index of the replica, time at which it dies). The replica loses its cache and its running
    requests."""
    resume: bool = False
    """Whether a request continues on another replica, after its delivered tokens, when its replica dies. If False, the
    request ends with an error, unless no token was delivered."""
    rollout_at: float | None = None
    """Time at which an update of all replicas begins. One replica after another is drained and started again. None: no
    update."""
    least: int | None = None
    """Minimum number of replicas for autoscaling: the simulation starts with this number, and ``replicas`` is the
    maximum. None: no autoscaling; all replicas serve all the time."""
    calm_seconds: float = 30.0
    """Time in seconds for which the load must be low before the autoscaler removes a replica."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= _MAX_REPLICAS:
            raise ConfigError(f"replicas must be from 1 to {_MAX_REPLICAS}, got {self.replicas}")
        for name in ("door_delay", "start_seconds", "calm_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more seconds, got {getattr(self, name)}")
        for index, when in self.failures:
            if not 0 <= index < self.replicas or not 0 <= when < math.inf:
                raise ConfigError(f"a failure is REPLICA@SECONDS with a replica below {self.replicas}: {index}@{when}")
        router_from_name(self.routing)
        if self.least is not None:
            Autoscaler(self.least, self.replicas)
            if self.rollout_at is not None:
                raise ConfigError("a rollout and autoscaling both stop replicas; simulate one of them")


@dataclasses.dataclass(frozen=True, slots=True)
class FleetReport:
    """Results of a trace on a fleet."""

    replicas: int
    routing: str
    served: ServedTrace
    """Results of all replicas together. ``utilisation`` is the mean over the replicas."""
    requests_by_replica: tuple[int, ...]
    """Number of requests sent to each replica. A request that is sent again after a failure is counted again."""
    broken: int
    """Number of requests that ended with an error because their replica died."""
    moved: int
    """Number of requests that were sent to another replica because their replica died."""
    hit_rate: float
    """Fraction of the prompt tokens that were found in prefix caches."""
    least: int | None
    """Minimum number of replicas of the autoscaler. None if autoscaling was off."""
    mean_replicas: float
    """Mean number of replicas that served or were starting. The cost of the fleet is proportional to this number."""
    peak_replicas: int
    as_flow: bool = False
    """Whether the replicas were simulated with the approximate model of :mod:`chairlift_lab.replay.flow_fleet`, not
    token by token."""

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON."""
        return dataclasses.asdict(self)


class _Simulated:
    """A simulated replica: an engine core with its own clock, and the router's record of this replica (``view``)."""

    def __init__(self, view: Replica, make: Callable[[VirtualClock], EngineCore], timings: dict[str, Any]) -> None:
        self.view = view
        self._make = make
        self.life = 0
        """Number of restarts. Events that were scheduled before the last restart are ignored."""
        self.clock = VirtualClock()
        self.idle = True
        self.core = make(self.clock)
        self.collector = Collector(None, self.core.scheduler.membership.held)
        self.collector.timings = timings
        self.num_sent = self.num_preemptions = 0
        self.draining = self.leaving = False
        self.on_since: float | None = None
        """Time since which the replica serves or is starting. None while it is off."""
        self.on_seconds = 0.0

    def switch_off(self, now: float) -> None:
        self.on_seconds += now - (now if self.on_since is None else self.on_since)
        self.on_since = None
        self.leaving = False

    def restart(self) -> None:
        """Replace the core by a new core with an empty cache."""
        self.life += 1
        self.num_preemptions += self.core.scheduler.num_preemptions
        self.core.shutdown()
        self.clock = VirtualClock()
        self.idle = True
        self.core = self._make(self.clock)
        self.collector.begin_again()


class _Fleet:
    """Simulates a fleet token by token: the replicas, the router (the door), and a queue of events."""

    def __init__(
        self,
        plan: FleetPlan,
        config: EngineConfig,
        deployment: Deployment,
        trace: Sequence[TracedRequest],
        users: int | None,
    ) -> None:
        self.plan = plan
        self.now = 0.0
        self.timings: dict[str, Any] = {}
        first, limits = simulated_core(deployment, config)
        self._inputs = InputProcessor(limits, None, first.kv, seed=0)
        pace = pace_of(deployment.cost, config.scheduler.max_num_batched_tokens)
        rows = config.scheduler.max_running
        tokens = first.kv.capacity_tokens
        cached = tokens if config.cache.enable_prefix_caching else 0

        def make(clock: VirtualClock) -> EngineCore:
            return simulated_core(deployment, config, clock)[0]

        share = config.scheduler.open_policy_share
        views = [
            Replica(i, pace, max_num_seqs=rows, cache_tokens=cached, policy_share=share) for i in range(plan.replicas)
        ]
        self.replicas = [_Simulated(view, make, self.timings) for view in views]
        whole = dataclasses.replace(config.scheduler, max_num_seqs=config.scheduler.max_num_seqs * plan.replicas)
        self._rows = rows
        self.peak = plan.replicas
        self.scaler = Autoscaler(plan.least or plan.replicas, plan.replicas, calm=plan.calm_seconds)
        self.forecast = DoorForecast({"": _LOWEST})
        self.door = Door(views[: plan.least], router_from_name(plan.routing), policy_from_config(whole))
        self._keep_prefixes = bool(cached)
        self._prepared: dict[str, PreparedRequest] = {}
        """Request id -> unfinished request. The prompt of a request that continues on another replica includes the
        tokens that were delivered."""
        self._whole: dict[str, PreparedRequest] = {}
        """Request id -> unfinished request, with the prompt with which it arrived."""
        self.collector = Collector(None, self.replicas[0].core.scheduler.membership.held)
        self.collector.timings = self.timings
        self.clients = Clients(trace, 0.0, users, deployment.request_seconds)
        self._trace = trace
        self.refused = self.broken = self.moved = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self) -> None:
        """Handle events until no event is left."""
        for replica in self.replicas[: self.plan.least]:
            replica.view.accepting = True
            replica.on_since = self.now
        self.peak = len(self.replicas[: self.plan.least])
        if self.plan.least is not None:
            self.at(SCALE_SECONDS, self._scale)
        for index, when in self.plan.failures:
            self.at(when, lambda index=index: self._die(self.replicas[index]))  # type: ignore[misc]
        if self.plan.rollout_at is not None:
            self.at(self.plan.rollout_at, lambda: self._drain(0))
        while True:
            times = [self._events[0][0]] if self._events else []
            times += [when for when in (self.clients.next_event(),) if when is not None]
            if not times:
                break
            self.now = max(self.now, min(times))
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._arrive()
            self._leave()
            self._send()

        for replica in self.replicas:
            if replica.on_since is not None:
                replica.switch_off(self.now)

    # -- clients ---------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while (sent := self.clients.send(self.now)) is not None:
            if not enter(self._take, self._inputs, self._trace[sent[0]], *sent, self.collector):
                self.refused += 1
                self.clients.ended(sent[0], self.now)

    def _take(self, prepared: PreparedRequest) -> None:
        self._whole[prepared.request_id] = prepared
        self._queue(prepared)

    def _queue(self, prepared: PreparedRequest) -> None:
        """Add a request to the router's queue."""
        self._prepared[prepared.request_id] = prepared
        keys = prefix_keys(prepared.prompt_token_ids, prepared.cache_salt) if self._keep_prefixes else []
        self.door.add(prepared.make_sequences()[0], keys, self.now)

    def _leave(self) -> None:
        for index in self.clients.leaving(self.now):
            timing = self.timings.get(str(index))
            if timing is None or timing.left >= 0:
                continue
            timing.cancelled = True
            self.collector.over(timing, self.now)
            view = self.door.replica_of(str(index))
            if view is not None:
                self.replicas[view.index].core.abort([str(index)])
            self._over(str(index))

    def _send(self) -> None:
        for request, view in self.door.send(self.now):
            replica = self.replicas[view.index]
            replica.clock.wait_until(self.now)
            replica.core.add(self._prepared[request.request_id])
            replica.num_sent += 1
            self._wake(replica)

    def _over(self, name: str) -> None:
        """Record that a request has ended. Its client learns of the end at once, and the router after
        ``door_delay``."""
        del self._prepared[name], self._whole[name]
        self.clients.ended(int(name), self.now)
        tokens = self.timings[name].tokens
        if self.plan.least is not None:
            self.scaler.ended(self.now, self.timings[name].kept)
        self._heard(lambda: self.door.ended(name, tokens))

    def _heard(self, news: Callable[[], None]) -> None:
        if self.plan.door_delay:
            self.at(self.now + self.plan.door_delay, news)
        else:
            news()

    # -- replicas --------------------------------------------------------------------------------------------------

    def _wake(self, replica: _Simulated) -> None:
        """Schedule the next step of a replica that is idle and has requests."""
        if replica.idle and replica.core.has_work:
            replica.idle = False
            life = replica.life
            self.at(max(self.now, replica.clock.now()), lambda: self._step(replica, life))

    def _step(self, replica: _Simulated, life: int) -> None:
        if life != replica.life:
            return
        replica.idle = True
        replica.clock.wait_until(self.now)
        if not replica.core.has_work:
            return
        outputs = replica.core.step()
        if outputs is not None:
            replica.collector.step(replica.core)
            replica.idle = False
            self.at(replica.clock.now(), lambda: self._landed(replica, life, outputs))
        elif not replica.core.num_in_flight and (event := replica.core.next_event()) is not None:
            replica.idle = False
            self.at(event, lambda: self._step(replica, life))

    def _landed(self, replica: _Simulated, life: int, outputs: CoreOutputs) -> None:
        if life != replica.life:
            return
        begun = [name for name in outputs.sequence_ids if not self.timings[name].times]
        replica.collector.take(outputs, self.now)
        for name in begun:
            self.forecast.started(self.now)
            self._heard(lambda name=name: self.door.begun(name))  # type: ignore[misc]
        for each in outputs.progress:
            self._heard(lambda each=each: self.door.progressed(each.sequence_id, each.num_computed))  # type: ignore[misc]
        for ended in outputs.finished:
            if ended.sequence_id in self._prepared:
                if tool := self.timings[ended.sequence_id].request.tool:
                    replica.core.paused(ended.sequence_id, [tool])
                self._over(ended.sequence_id)
        replica.idle = True
        self._wake(replica)
        if not replica.core.has_work:
            if replica.draining:
                self._update(replica)
            elif replica.leaving:
                self._stop(replica)

    def _die(self, replica: _Simulated) -> None:
        """Let a replica die. Its requests move or end, and it starts again."""
        if replica.on_since is None:
            return
        unstarted, started = self.door.lose(replica.view)
        replica.restart()
        for request in (*unstarted, *started):
            name = request.request_id
            if name not in self._prepared:  # the request has ended, but the door does not know it yet
                continue
            timing = self.timings[name]
            if not timing.tokens or self.plan.resume:
                self.moved += 1
                self._queue(_rest_of(self._whole[name], timing.tokens))
                continue
            timing.error = f"replica {replica.view.index} died"
            self.broken += 1
            self.collector.over(timing, self.now)
            self._over(name)
        if replica.leaving:
            self.door.remove_replica(replica.view)
            replica.switch_off(self.now)
            return
        self._begin(replica)

    def _begin(self, replica: _Simulated) -> None:
        """Start a replica. It accepts requests after ``start_seconds``."""
        life = replica.life
        self.at(self.now + self.plan.start_seconds, lambda: self._accept(replica, life))

    def _accept(self, replica: _Simulated, life: int) -> None:
        if replica.on_since is not None and not replica.leaving and life == replica.life:
            replica.view.accepting = True

    def _scale(self) -> None:
        """Change the number of replicas according to the forecast waiting time."""
        on = [each for each in self.replicas if each.on_since is not None and not each.leaving]
        serving = [each.view for each in on if each.view.accepting]
        self.forecast.make(self.door, self.now)
        demand = demand_of(
            self.door,
            self.forecast,
            self.now,
            serving=serving,
            starting=len(on) - len(serving),
            rows=self._rows,
            start_seconds=self.plan.start_seconds,
        )
        wanted = self.scaler.decide(self.now, demand).wanted
        if wanted > len(on):
            self._grow()
        elif wanted < len(on):
            self._shrink(self.replicas[replica_to_remove(serving).index])
        self.peak = max(self.peak, sum(each.on_since is not None for each in self.replicas))
        if self._prepared or self.clients.next_event() is not None:
            self.at(self.now + SCALE_SECONDS, self._scale)

    def _grow(self) -> None:
        """Let a replica that is being drained accept requests again. If there is none, start a replica."""
        back = next((each for each in self.replicas if each.leaving), None)
        if back is not None:
            back.leaving = False
            back.view.accepting = True
            return
        off = next((each for each in self.replicas if each.on_since is None), None)
        if off is not None:
            off.on_since = self.now
            self.door.add_replica(off.view)
            self._begin(off)

    def _shrink(self, replica: _Simulated) -> None:
        """Drain a replica, and switch it off when its last request has ended."""
        replica.view.accepting = False
        replica.leaving = True
        if replica.idle and not replica.core.has_work:
            self._stop(replica)

    def _stop(self, replica: _Simulated) -> None:
        """Switch off a replica that has finished its requests."""
        replica.restart()
        replica.view.lost()
        self.door.remove_replica(replica.view)
        replica.switch_off(self.now)

    def _drain(self, index: int) -> None:
        """Send no more requests to a replica, and update it when its last request has ended."""
        replica = self.replicas[index]
        replica.view.accepting = False
        replica.draining = True
        if replica.idle and not replica.core.has_work:
            self._update(replica)

    def _update(self, replica: _Simulated) -> None:
        replica.draining = False
        replica.restart()
        replica.view.lost()
        self.at(self.now + self.plan.start_seconds, lambda: self._updated(replica))

    def _updated(self, replica: _Simulated) -> None:
        replica.view.accepting = True
        if replica.view.index + 1 < len(self.replicas):
            self._drain(replica.view.index + 1)


def _rest_of(prepared: PreparedRequest, delivered: int) -> PreparedRequest:
    """Request that continues ``prepared``, whose first ``delivered`` tokens become part of the prompt."""
    if not delivered:
        return prepared
    remaining = prepared.max_tokens - delivered
    return dataclasses.replace(
        prepared,
        prompt_token_ids=[*prepared.prompt_token_ids, *[_TOKEN] * delivered],
        max_tokens=remaining,
        params=dataclasses.replace(prepared.params, max_tokens=remaining),
    )


def pace_of(cost: CostModel, step_tokens: int) -> Pace:
    """Speed of a replica whose steps have the costs ``cost`` and at most ``step_tokens`` tokens."""
    return Pace(cost.prefill_seconds, lambda rows: cost.step_seconds(StepFeatures(rows)) if rows else 0.0, step_tokens)


def replay_fleet(
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    deployment: Deployment,
    plan: FleetPlan,
    *,
    max_concurrency: int | None = None,
) -> FleetReport:
    """Simulate a trace on a fleet. Equal arguments give identical reports.

    ``max_concurrency`` is that of :func:`~chairlift_lab.replay.replay.serve_trace`. Raises ConfigError for settings
    that need more memory or context length than the deployment has, and for more than MAX_EXACT replicas.
    """
    if plan.replicas > MAX_EXACT:
        raise ConfigError(f"at most {MAX_EXACT} replicas are simulated token by token, got {plan.replicas}")
    fleet = _Fleet(plan, config, deployment, trace, max_concurrency)
    fleet.run()
    collectors = [replica.collector for replica in fleet.replicas]
    total = fleet.collector
    total.steps, total.rows = (sum(getattr(each, name) for each in collectors) for name in ("steps", "rows"))
    preemptions = sum(each.num_preemptions + each.core.scheduler.num_preemptions for each in fleet.replicas)
    served = total.served(fleet.refused, preemptions)
    mean = sum(each.on_seconds for each in fleet.replicas) / fleet.now if plan.least else float(plan.replicas)
    seconds = served.seconds * mean
    served = dataclasses.replace(
        served, utilisation=min(1.0, sum(each.busy for each in collectors) / seconds) if seconds else 0.0
    )
    return FleetReport(
        replicas=plan.replicas,
        routing=plan.routing,
        served=served,
        requests_by_replica=tuple(each.num_sent for each in fleet.replicas),
        broken=fleet.broken,
        moved=fleet.moved,
        hit_rate=served.cached_tokens / served.prompt_tokens if served.prompt_tokens else 0.0,
        least=plan.least,
        mean_replicas=mean,
        peak_replicas=fleet.peak,
    )
