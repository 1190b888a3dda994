"""Forecasts when requests start: the scheduler's own code runs on a copy of its state, with a simulated clock.

The copy has the position, tokens and blocks of every request, the same policy and the same limits. Step times come from
the cost model. Steps in flight run again in the copy, because they have just begun. Answer lengths are estimated from
ended answers. :class:`~chairlift.engine.calibration.Calibration` measures the accuracy of the forecasts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.policy import Policy, Resource
from chairlift.core.scheduler.scheduler import Scheduler

__all__ = ["Forecast", "StepSeconds", "foresee"]

StepSeconds = Callable[[StepFeatures], float]
"""Function: features of a step -> seconds between the end of the previous step and the end of this step."""

_TOKEN: Final = 1
_ANY_SIZE: Final = 1 << 40
"""Size assumed for a newcomer, whose real size is unknown. With this size, smallest-first order gives it no
advantage."""
_NEWCOMER: Final = "\0newcomer of "  # no real request id begins like this, because the front end generates the ids


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast times of the requests' first steps, in seconds on the engine's clock. A newcomer is a request that would
    arrive now."""

    made_at: float
    starts: dict[str, float]
    """Id of a waiting request -> forecast start, in the order of the starts."""
    newcomers: dict[str, float]
    """Class of service -> forecast start of a newcomer whose tenant is ``tenant``."""
    seconds_per_start: float
    """Mean seconds between the starts of two requests. :meth:`wait_of` adds this time to a newcomer's wait for each
    request that arrived after the forecast and goes before the newcomer."""
    strangers: dict[str, float] = dataclasses.field(default_factory=dict)
    """Class of service -> forecast start of a newcomer whose tenant has no requests in the engine."""
    tenant: str | None = None
    """Tenant that has the most requests in the engine."""
    loading: dict[str, float] = dataclasses.field(default_factory=dict)
    """Id of each request that waits until its KV is read from files -> time at which it should be there. The request is
    also in ``starts``, with a start no earlier than that."""

    def with_loads(self, loads: dict[str, float]) -> Forecast:
        """The forecast with requests that wait for their KV, by the times at which it should be there."""
        if not loads:
            return self
        starts = self.starts | {name: max(self.made_at, when) for name, when in loads.items()}
        return dataclasses.replace(self, starts=dict(sorted(starts.items(), key=lambda each: each[1])), loading=loads)

    def wait_of(self, service_class: str, now: float, num_since: int = 0, *, stranger: bool = False) -> float:
        """Seconds that a newcomer of this class would wait. ``num_since`` is the number of requests that arrived after
        the forecast was made. ``stranger``: the newcomer's tenant has no requests in the engine."""
        newcomers = self.strangers if stranger and self.strangers else self.newcomers
        start = newcomers.get(service_class)
        if start is None:
            start = max(newcomers.values(), default=now)
        return max(0.0, start + num_since * self.seconds_per_start - now)


def foresee(
    scheduler: Scheduler,
    seconds: StepSeconds,
    lengths: AnswerLengths,
    now: float,
    classes: dict[str, int],
    *,
    depth: int = 0,
    max_steps: int = 512,
) -> Iterator[Forecast | None]:
    """Simulate the scheduler. Yields None after each simulated step, and the forecast at the end.

    ``classes`` maps class of service -> priority of a newcomer. Like the engine, the copy schedules ``depth`` steps
    ahead. Starts later than ``max_steps`` steps are extrapolated from the rate of starts before. The scheduler may
    continue to run between two items: it is never changed, and after the first item only the copy is read.
    """
    waiting = [request.request_id for request in scheduler.waiting.line(now)]
    starts: dict[str, float] = {}
    twin = _copy(scheduler, lengths, now, starts)
    flights: deque[tuple[SchedulerOutput, float]] = deque()
    free_at = now
    for _ in range(scheduler.num_in_flight):
        if (out := twin.schedule(now)).num_tokens:
            free_at += _seconds(seconds, out)
            flights.append((out, free_at))
    _queue(twin, scheduler, lengths, now)
    tenants = Counter(request.service.tenant for request in scheduler.requests.values())
    busiest = max(tenants, key=lambda tenant: (tenants[tenant], tenant), default=_NEWCOMER)
    names = _add_newcomers(twin, classes, busiest, now)
    missing = {*waiting, *names}
    clock = now
    pauses = _Pauses(twin, scheduler, now)
    yield None
    for _ in range(max_steps):
        pauses.end(clock)
        out = twin.schedule(clock)
        for name in missing & starts.keys():  # its start is known, so it must not delay other requests
            missing.remove(name)
            twin.abort(name, clock)
        if out.num_tokens:
            took = _seconds(seconds, out)
            free_at = max(free_at, clock) + took
            flights.append((out, free_at))
            pauses.after(out, took, free_at)
            for row in out.joined:
                if row.request_id in missing:
                    missing.remove(row.request_id)
                    starts[row.request_id] = clock
            if len(flights) <= depth:
                continue
        if flights:
            out, clock = flights.popleft()
            tokens = [_TOKEN] * (out.num_decodes + sum(chunk.samples for chunk in out.chunks))
            twin.update(out, tokens, clock)
        else:
            event = pauses.next_event(clock)
            if not missing or event is None or event <= clock:
                break
            clock = event
        if not missing:
            break
        yield None
    pace = max(clock - now, 1e-9) / max(1, len(starts.keys() - names.keys()))
    for rank, name in enumerate([name for name in [*waiting, *names] if name in missing], start=1):
        starts[name] = clock + rank * pace
    yield _forecast(now, starts, names, pace if waiting else 0.0, busiest)


def _forecast(
    now: float, starts: dict[str, float], names: dict[str, tuple[str, bool]], pace: float, busiest: str
) -> Forecast:
    """Make a forecast from all start times. ``names`` is the result of :func:`_add_newcomers`."""
    came = {label: starts.pop(name) for name, label in names.items()}
    strangers = {label: start for (label, is_stranger), start in came.items() if is_stranger}
    newcomers = {label: start for (label, is_stranger), start in came.items() if not is_stranger} or strangers
    in_order = dict(sorted(starts.items(), key=lambda item: item[1]))
    return Forecast(now, in_order, newcomers, pace, strangers, busiest)


def _seconds(seconds: StepSeconds, out: SchedulerOutput) -> float:
    return seconds(StepFeatures.of(out.num_decodes, out.context_tokens, out.chunks, out.kind_bytes, out.shared_tokens))


class _Pauses:
    """The requests of a simulated scheduler that pause after each token, until the mask of their next token is made.
    One mask is made at a time."""

    def __init__(self, twin: Scheduler, original: Scheduler, now: float) -> None:
        self._twin = twin
        self._free_at = now
        self._paused: deque[tuple[float, Request]] = deque()
        """(time at which its mask is made, request), in the order of the times."""
        self._may_begin = not twin.membership.held and any(each.mask_seconds for each in original.requests.values())
        if self._may_begin:
            self._begin(original.batch.unready_rows, 0.0, now)

    def after(self, out: SchedulerOutput, seconds: float, end: float) -> None:
        """Let those requests of a step pause whose masks take longer than the step. The step takes ``seconds`` and
        ends at ``end``."""
        if self._may_begin:
            names = [name for name, _ in out.decode_rows]
            names += [name for name, chunk in zip(out.chunk_ids, out.chunks, strict=True) if chunk.samples]
            self._begin(names, seconds, end)

    def _begin(self, names: Iterable[str], seconds: float, end: float) -> None:
        for name in names:
            request = self._twin.running.get(name)
            if request is not None and request.mask_seconds > seconds:
                self._twin.unready(request)
                if not request.is_ready:
                    self._free_at = max(self._free_at, end) + request.mask_seconds
                    self._paused.append((self._free_at, request))

    def end(self, now: float) -> None:
        """Let the requests whose masks are made by now go on."""
        while self._paused and self._paused[0][0] <= now:
            self._twin.ready(self._paused.popleft()[1], now)

    def next_event(self, now: float) -> float | None:
        """Time at which the simulated scheduler next has work; None if there is no such time."""
        events = [self._twin.next_event(now), self._paused[0][0] if self._paused else None]
        return min((event for event in events if event is not None), default=None)


class _NewcomersDisplaceNobody:
    """Wraps a policy so that the simulated newcomers displace no request.

    When a newcomer would displace a request, the simulated time is stored in ``starts`` as the newcomer's start.
    """

    def __init__(self, policy: Policy, starts: dict[str, float]) -> None:
        self._policy = policy
        self._starts = starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        would = self._policy.outranks(request, running, resource, now)
        if would and resource != "tokens" and request.request_id.startswith(_NEWCOMER):
            self._starts.setdefault(request.request_id, now)
            return False
        return would


def _copy(scheduler: Scheduler, lengths: AnswerLengths, now: float, starts: dict[str, float]) -> Scheduler:
    """Copy the scheduler with its running requests, in the state before the steps in flight."""
    kv = scheduler.kv
    groups = [dataclasses.replace(group, num_host_blocks=0) for group in kv.layout.groups]
    steps = kv.layout.max_step_tokens
    memory = KVCacheManager(groups, kv.block_size, max_step_tokens=steps, enable_prefix_caching=False)
    twin = scheduler.twin(memory, cast(Policy, _NewcomersDisplaceNobody(scheduler.policy.fork(), starts)))
    begins = scheduler.chunks_in_flight()
    blocks: list[dict[int, int]] = [{} for _ in groups]
    for request in sorted(scheduler.running.values(), key=lambda request: request.admitted_at_step):
        begin = begins.get(request.request_id)
        reserved = request.request_id in scheduler.batch.reserve
        twin.adopt(_like(request, lengths), request, begin, blocks, now, scheduler.num_in_flight, reserved)
    return twin


def _queue(twin: Scheduler, scheduler: Scheduler, lengths: AnswerLengths, now: float) -> None:
    """Add copies of the waiting requests to ``twin``."""
    for request in scheduler.waiting.line(now):
        # Its size is the number of tokens that no other request has computed for it.
        known = 0 if request.was_preempted else len(request.token_ids) - request.size
        twin.add(_like(request, lengths, known))
    for request, known in scheduler.batch.in_flight.shares():
        twin.add(_like(request, lengths, known))
    twin.waiting.catch_up(scheduler.waiting)
    twin.policy.catch_up(scheduler.policy)


def _add_newcomers(twin: Scheduler, classes: dict[str, int], busiest: str, now: float) -> dict[str, tuple[str, bool]]:
    """Add one simulated newcomer per class for the busiest tenant, and one per class for an unknown tenant.

    Returns request id -> (class, whether its tenant is the unknown one).
    """
    names: dict[str, tuple[str, bool]] = {}
    for number, (name, priority) in enumerate(classes.items()):
        for tenant in dict.fromkeys((busiest, _NEWCOMER)):
            newcomer = Request(f"{_NEWCOMER}{number}{tenant}", [_TOKEN], max_tokens=1, arrival_time=now)
            newcomer.priority, newcomer.service = priority, Service(name, tenant=tenant)
            newcomer.size = _ANY_SIZE
            names[newcomer.request_id] = name, tenant == _NEWCOMER
            twin.add(newcomer)
    return names


def _like(request: Request, lengths: AnswerLengths, num_shared: int = 0) -> Request:
    """Copy a request for the simulation: same number of tokens, same place in the order, and an answer of expected
    length.

    The copy is shorter by the ``num_shared`` leading positions that it shares with other requests: they are neither
    computed nor do they need blocks, and steps read them once for all rows.
    """
    # An ended request that is held in its static batch is also held in the copy, and gets no more tokens.
    num_tokens = request.num_output_tokens + 1 if request.finish_reason else lengths.expected(request)
    copy = Request(
        request.request_id,
        [],
        max_tokens=num_tokens,
        min_tokens=request.min_tokens,
        arrival_time=request.arrival_time,
        priority=request.priority,
        service=request.service,
        adapter_id=request.adapter_id,
    )
    copy.token_ids = [_TOKEN] * (len(request.token_ids) - num_shared)
    copy.num_prompt_tokens = request.num_prompt_tokens - num_shared
    copy.max_total_tokens += copy.num_prompt_tokens
    copy.limit = request.limit - num_shared  # blocks are reserved for the longest answer, not for the expected one
    copy.num_preemptions = request.num_preemptions
    copy.sequence = request.sequence
    copy.times_passed = request.times_passed
    copy.size = request.size
    copy.mask_seconds = request.mask_seconds
    copy.finish_reason = request.finish_reason
    return copy
