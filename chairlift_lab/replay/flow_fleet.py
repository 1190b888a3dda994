"""Simulates a fleet with many replicas by an approximate model (the flow model), and measures the error of this model.
The router (the door) and the clients are those of :mod:`chairlift_lab.replay.fleet`. A replica is no engine core but
three lists: requests that wait for a row, prompts that are being computed, and requests that decode. A step that
computes prompts is one event. Between such steps all decode steps up to the next end of a request are one event,
because their total time is known from the cost model. So the work grows with the requests, not with the tokens.

The model has no blocks, no preemption, and no priorities inside a replica. It knows a replica's prefix cache by blocks
of :data:`~chairlift.fleet.routing.PREFIX_BLOCK` tokens. Tokens between the first and the last of an answer are
evenly spaced.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.engine.input_processor import InputProcessor, PreparedRequest
from chairlift.errors import ConfigError
from chairlift.fleet.door import Door
from chairlift.fleet.routing import PREFIX_BLOCK, PrefixIndex, Replica, prefix_keys, router_from_name
from chairlift_lab.replay.clients import Clients, enter
from chairlift_lab.replay.fleet import MAX_EXACT, FleetPlan, FleetReport, pace_of, replay_fleet
from chairlift_lab.replay.fleet_size import part_of
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import simulated_core
from chairlift_lab.replay.served import Collector
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["FlowError", "flow_error", "replay_flow"]

_MAX_ROWS: Final = 1 << 16
_LEAST_REQUESTS: Final = 100
"""Minimum number of requests in the part of the traffic on which the error is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlowError:
    """Error of the flow model: reports of the exact model and of the flow model about the same traffic on the same
    small fleet."""

    parts: int
    """Number of parts into which the traffic was divided. The reports are about one part."""
    exact: FleetReport
    flow: FleetReport

    def ratios(self) -> dict[str, float]:
        """Name of a measured value -> result of the flow model divided by the exact result. Values that are 0 are left
        out."""
        pairs = {"tokens/s": [each.served.output_tokens_per_second for each in (self.flow, self.exact)]}
        for name in ("ttft", "tpot"):
            for percentile in ("p50", "p99"):
                both = [getattr(getattr(each.served, name), percentile) for each in (self.flow, self.exact)]
                pairs[f"{name.upper()} {percentile}"] = both
        return {name: flow / exact for name, (flow, exact) in pairs.items() if exact}

    def to_dict(self) -> dict[str, Any]:
        """The number of parts and the ratios, as data for JSON."""
        return {"parts": self.parts, "replicas": self.exact.replicas, "routing": self.exact.routing} | self.ratios()


@dataclasses.dataclass(slots=True)
class _Job:
    """A request that was sent to a replica."""

    name: str
    prompt: int
    """Number of prompt tokens."""
    output: int
    """Number of tokens of the whole answer."""
    keys: Sequence[int]
    remaining: int = 0
    """Number of prompt tokens of this request that are not computed yet."""
    ends: int = 0
    """Number of the replica's decode step that generates the last token of this request."""


def _own_part(job: _Job) -> int:
    """Number of prompt tokens after the last whole block. Other requests cannot share the memory of these tokens."""
    return job.prompt - PREFIX_BLOCK * len(job.keys)


class _FlowReplica:
    """A replica in the flow model. Its state is the state at the time of the last call."""

    def __init__(self, view: Replica, cost: CostModel, *, budget: int, rows: int, capacity: int, cached: int) -> None:
        self.view = view
        self._cost = cost
        self._budget = budget
        self._rows = rows
        self._capacity = capacity
        self._prefixes = PrefixIndex(max(1, cached // PREFIX_BLOCK))
        self.waiting: deque[_Job] = deque()
        self._prefilling: deque[_Job] = deque()
        self._decoding: list[tuple[int, int, _Job]] = []
        """Heap of (decode step that ends the request, order of joining, request)."""
        self._order = itertools.count()
        self._step = 0
        """Number of decode steps that this replica has run."""
        self._context = 0
        """Number of positions that the decoding requests attend to."""
        self._keys: Counter[int] = Counter()
        """Prefix key of a block -> number of running requests whose prompts contain the block. These requests share the
        memory of the block."""
        self._own = 0
        """Number of token positions in the KV cache that are used by a single request."""
        self._chunks: list[tuple[_Job, int]] = []
        """One entry per prompt in the running step: (request, number of prompt tokens that the step computes)."""
        self._begun = 0.0
        self._count = 0
        self._seconds = 0.0
        """Start, number and total time of the steps that now run as one event. The number is 0 while the replica is
        idle."""
        self.version = 0
        """Counter that increases when the end time of the running steps changes. Events with an older number are
        ignored."""
        self.num_sent = self.num_steps = self.rows = 0
        self.busy = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._count

    def begin(self, now: float) -> tuple[float | None, list[tuple[str, int]]]:
        """Begin the next steps. Returns (end time of these steps, or None without work; list with (id, number of cached
        tokens) of each request that gets a row)."""
        joined = self._admit()
        rows = len(self._decoding)
        room = self._budget - rows
        self._chunks = []
        pairs = 0.0
        for job in self._prefilling:
            if room <= 0:
                break
            take = min(room, job.remaining)
            start = job.prompt - job.remaining
            pairs += take * (start + (take + 1) / 2)
            self._chunks.append((job, take))
            room -= take
        self.version += 1
        self._begun = now
        self._count = 0
        if self._chunks:
            tokens = sum(take for _, take in self._chunks)
            self._count = 1
            self._seconds = self._cost.step_seconds(StepFeatures(rows, self._context, tokens, pairs))
        elif rows:
            self._run(self._decoding[0][0] - self._step)
        return (now + self._seconds if self._count else None), joined

    def _run(self, count: int) -> None:
        """Plan ``count`` decode steps. The cost is linear in the context, so its mean gives the exact total time."""
        rows = len(self._decoding)
        mean = self._context + rows * (count - 1) / 2
        self._count = count
        self._seconds = count * self._cost.step_seconds(StepFeatures(rows, math.ceil(mean)))

    def _admit(self) -> list[tuple[str, int]]:
        joined = []
        while self.waiting and len(self._decoding) + len(self._prefilling) < self._rows:
            job = self.waiting[0]
            fresh = sum(key not in self._keys for key in job.keys)
            used = self._own + PREFIX_BLOCK * (len(self._keys) + fresh) + _own_part(job)
            if used > self._capacity and (self._decoding or self._prefilling):
                break
            cached = min(job.prompt - 1, PREFIX_BLOCK * self._prefixes.matched(job.keys))
            job.remaining = job.prompt - cached
            self._own += _own_part(job)
            self._keys.update(job.keys)
            self._prefilling.append(self.waiting.popleft())
            joined.append((job.name, cached))
        return joined

    def interrupt(self, now: float) -> float | None:
        """End the running steps after the step that runs at ``now``, because a request has arrived. Returns the new end
        time, or None if the end time does not change."""
        if self._count < 2:
            return None
        done = math.ceil((now - self._begun) / (self._seconds / self._count))
        if done >= self._count:
            return None
        self._run(max(1, done))
        self.version += 1
        return max(now, self._begun + self._seconds)

    def land(self, now: float) -> tuple[list[str], list[_Job]]:
        """End the running steps. Returns (ids of the requests with a first token, requests that have ended)."""
        rows = len(self._decoding)
        self._step += self._count
        self._context += rows * self._count
        self._own += rows * self._count
        self.num_steps += self._count
        self.rows += (rows + len(self._chunks)) * self._count
        self.busy += now - self._begun
        self._count = 0
        begun = []
        ended = []
        while self._decoding and self._decoding[0][0] <= self._step:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.prompt + job.output
            self._free(job, job.output)
            ended.append(job)
        for job, take in self._chunks:
            job.remaining -= take
            if job.remaining:
                continue
            self._prefilling.remove(job)
            self._prefixes.add(job.keys)
            begun.append(job.name)
            self._own += 1
            if job.output == 1:
                self._free(job, 1)
                ended.append(job)
                continue
            job.ends = self._step + job.output - 1
            self._context += job.prompt + 1
            heapq.heappush(self._decoding, (job.ends, next(self._order), job))
        return begun, ended

    def progress(self) -> list[tuple[str, int]]:
        """(id, number of computed prompt tokens) of each request whose prompt is partly computed."""
        return [(job.name, job.prompt - job.remaining) for job in self._prefilling]

    def _free(self, job: _Job, output: int) -> None:
        """Free the memory of a request that has generated ``output`` tokens."""
        self._own -= _own_part(job) + output
        for key in job.keys:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def abort(self, name: str) -> None:
        """Remove a request. The duration of the steps that run now does not change."""
        for job in [each for each in self.waiting if each.name == name]:
            self.waiting.remove(job)
        for job in [each for each in self._prefilling if each.name == name]:
            self._prefilling.remove(job)
            self._free(job, 0)
        self._chunks = [(job, take) for job, take in self._chunks if job.name != name]
        for entry in [each for each in self._decoding if each[2].name == name]:
            self._decoding.remove(entry)
            heapq.heapify(self._decoding)
            output = entry[2].output - (entry[0] - self._step)
            self._context -= entry[2].prompt + output
            self._free(entry[2], output)


class _FlowFleet:
    """Simulates a fleet with the flow model: replicas, router (the door), clients, and a queue of events."""

    def __init__(
        self,
        plan: FleetPlan,
        config: EngineConfig,
        deployment: Deployment,
        trace: Sequence[TracedRequest],
        users: int | None,
    ) -> None:
        core, limits = simulated_core(deployment, config)
        self._inputs = InputProcessor(limits, None, core.kv, seed=0)
        scheduler = config.scheduler
        capacity = core.kv.capacity_tokens
        pace = pace_of(deployment.cost, scheduler.max_num_batched_tokens)
        self._cached = capacity if config.cache.enable_prefix_caching else 0
        most = scheduler.max_running
        share = scheduler.open_policy_share
        views = [
            Replica(index, pace, max_num_seqs=most, cache_tokens=self._cached, policy_share=share)
            for index in range(plan.replicas)
        ]
        sizes = {"budget": scheduler.max_num_batched_tokens, "rows": scheduler.max_running}
        self.replicas = [
            _FlowReplica(view, deployment.cost, capacity=capacity, cached=self._cached, **sizes) for view in views
        ]
        for view in views:
            view.accepting = True
        rows = min(_MAX_ROWS, scheduler.max_num_seqs * plan.replicas)
        policy = policy_from_config(dataclasses.replace(scheduler, max_num_seqs=rows))
        self.door = Door(views, router_from_name(plan.routing), policy)
        self.collector = Collector(None, False)
        self.clients = Clients(trace, 0.0, users, deployment.request_seconds)
        self._trace = trace
        self._jobs: dict[str, _Job] = {}
        self.refused = 0
        self.now = 0.0
        self._events: list[tuple[float, int, _FlowReplica, int]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Handle events until no event is left."""
        while True:
            times = [self._events[0][0]] if self._events else []
            times += [when for when in (self.clients.next_event(),) if when is not None]
            if not times:
                return
            self.now = max(self.now, min(times))
            changed: dict[int, _FlowReplica] = {}
            while self._events and self._events[0][0] <= self.now:
                _, _, replica, version = heapq.heappop(self._events)
                if version == replica.version:
                    self._land(replica)
                    changed[replica.view.index] = replica
            while (sent := self.clients.send(self.now)) is not None:
                if not enter(self._take, self._inputs, self._trace[sent[0]], *sent, self.collector):
                    self.refused += 1
                    self.clients.ended(sent[0], self.now)
            self._leave()
            for request, view in self.door.send(self.now):
                replica = self.replicas[view.index]
                replica.waiting.append(self._jobs[request.request_id])
                replica.num_sent += 1
                changed[view.index] = replica
            for replica in changed.values():
                self._go_on(replica)

    def _take(self, prepared: PreparedRequest) -> None:
        prompt = prepared.prompt_token_ids
        keys = prefix_keys(prompt, prepared.cache_salt) if self._cached else []
        self._jobs[prepared.request_id] = _Job(prepared.request_id, len(prompt), prepared.max_tokens, keys)
        self.door.add(prepared.make_sequences()[0], keys, self.now)

    def _go_on(self, replica: _FlowReplica) -> None:
        """Begin the next steps of an idle replica, or end the running steps of a busy replica early."""
        if not replica.is_idle:
            end = replica.interrupt(self.now)
        else:
            end, joined = replica.begin(self.now)
            for name, cached in joined:
                timing = self.collector.timings[name]
                timing.started = self.now
                timing.cached_tokens = cached
        if end is not None:
            heapq.heappush(self._events, (end, next(self._order), replica, replica.version))

    def _land(self, replica: _FlowReplica) -> None:
        begun, ended = replica.land(self.now)
        for name in begun:
            self.collector.timings[name].times.append(self.now)
            self.door.begun(name)
        for name, num_computed in replica.progress():
            self.door.progressed(name, num_computed)
        for job in ended:
            timing = self.collector.timings[job.name]
            timing.times = np.linspace(timing.first, self.now, job.output).tolist()
            timing.ended = True
            timing.left = self.now
            self._over(job.name, job.output)

    def _leave(self) -> None:
        for index in self.clients.leaving(self.now):
            timing = self.collector.timings.get(str(index))
            if timing is None or timing.left >= 0:
                continue
            timing.cancelled = True
            timing.left = self.now
            view = self.door.replica_of(str(index))
            if view is not None:
                self.replicas[view.index].abort(str(index))
            self._over(str(index), timing.tokens)

    def _over(self, name: str, tokens: int) -> None:
        del self._jobs[name]
        self.door.ended(name, tokens)
        self.clients.ended(int(name), self.now)


def replay_flow(
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    deployment: Deployment,
    plan: FleetPlan,
    *,
    max_concurrency: int | None = None,
) -> FleetReport:
    """Simulate a trace on a fleet with the flow model. Equal arguments give identical reports.

    Raises ConfigError for what the model does not have: failures, updates, a changing number of replicas, a delay of
    messages to the router, and static batches.
    """
    for name, is_given in (
        ("failures", bool(plan.failures)),
        ("a rollout", plan.rollout_at is not None),
        ("autoscaling", plan.least is not None),
        ("a delay of the door", plan.door_delay > 0),
        ("static batches", config.scheduler.batching != "continuous"),
    ):
        if is_given:
            raise ConfigError(
                f"{plan.replicas} replicas are simulated as flows of requests, without {name}; simulate at most"
                f" {MAX_EXACT} replicas, or leave that out"
            )
    fleet = _FlowFleet(plan, config, deployment, trace, max_concurrency)
    fleet.run()
    total = fleet.collector
    total.steps = sum(each.num_steps for each in fleet.replicas)
    total.rows = sum(each.rows for each in fleet.replicas)
    served = total.served(fleet.refused, 0)
    seconds = served.seconds * plan.replicas
    busy = sum(each.busy for each in fleet.replicas)
    return FleetReport(
        replicas=plan.replicas,
        routing=plan.routing,
        served=dataclasses.replace(served, utilisation=min(1.0, busy / seconds) if seconds else 0.0),
        requests_by_replica=tuple(each.num_sent for each in fleet.replicas),
        broken=0,
        moved=0,
        hit_rate=served.cached_tokens / served.prompt_tokens if served.prompt_tokens else 0.0,
        least=None,
        mean_replicas=float(plan.replicas),
        peak_replicas=plan.replicas,
        as_flow=True,
    )


def flow_error(
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    deployment: Deployment,
    plan: FleetPlan,
    *,
    max_concurrency: int | None = None,
) -> FlowError:
    """Measure the error of the flow model: simulate a part of the traffic, on the same fraction of the replicas, with
    the exact model and with the flow model. The part is as large as the exact simulation allows. Raises ConfigError if
    the part has too few requests.
    """
    parts = 1
    while plan.replicas // parts > MAX_EXACT:
        parts *= 2
    part = part_of(trace, parts)
    if len(part) < _LEAST_REQUESTS:
        raise ConfigError(
            f"the error for {plan.replicas} replicas is measured on 1/{parts} of the traffic, and {len(part)} requests"
            f" are too few; simulate at least {parts * _LEAST_REQUESTS} requests (--num-prompts)"
        )
    users = None if max_concurrency is None else max(1, max_concurrency // parts)
    small = dataclasses.replace(plan, replicas=plan.replicas // parts)
    exact, flow = (
        model(part, config, deployment, small, max_concurrency=users) for model in (replay_fleet, replay_flow)
    )
    return FlowError(parts, exact, flow)
