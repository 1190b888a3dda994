"""Forecast of request starts: the scheduler's own code runs ahead on a copy of its state, with a simulated clock.

The copy has every request's place, tokens and blocks, the same policy and the same limits. Step times come from the
cost model. Steps in flight run again in the copy, because they have just begun. Answer lengths are estimated from
answers that ended. :class:`~chairlift.engine.calibration.Calibration` measures how good forecasts are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

from chairlift.kv_cache.manager import KVCacheManager
from chairlift.request import Request, Service
from chairlift.scheduler.answer_lengths import AnswerLengths
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.output import SchedulerOutput
from chairlift.scheduler.policy import Policy, Resource
from chairlift.scheduler.scheduler import Scheduler

__all__ = ["Forecast", "StepSeconds", "foresee"]

StepSeconds = Callable[[StepFeatures], float]
"""Function: features of a step -> seconds from the end of the step before to its end."""

_TOKEN: Final = 1
_ANY_SIZE: Final = 1 << 40
"""Size of a newcomer. It is unknown, so smallest-first order must not help it."""
_NEWCOMER: Final = "\0newcomer of "  # no caller's id begins like that: ids come from the front's own generator


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast times of requests' first steps, in seconds on the engine's clock."""

    made_at: float
    starts: dict[str, float]
    """Forecast start of each waiting request, in the order in which they will start."""
    newcomers: dict[str, float]
    """Forecast start of a newcomer, by class of service, of the tenant that has most requests here."""
    seconds_per_start: float
    """Mean time between two starts. Each request that came since the forecast adds this much."""
    strangers: dict[str, float] = dataclasses.field(default_factory=dict)
    """Forecast start of a newcomer, by class of service, of a tenant that has no requests here."""
    tenant: str | None = None
    """Tenant that has most requests."""

    def wait_of(self, service_class: str, now: float, num_since: int = 0, *, stranger: bool = False) -> float:
        """Seconds that a newcomer would wait. ``num_since`` requests came since the forecast was made."""
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
    most_steps: int = 512,
) -> Iterator[Forecast | None]:
    """Run ahead one step per item. The last item is the forecast, all others are None.

    ``classes`` maps classes of service to the priority of a newcomer. Like the engine, the copy schedules ``depth``
    steps beyond the newest known tokens. Starts beyond ``most_steps`` are extrapolated from the rate until then. The
    scheduler may go on meanwhile: it is never changed, and only the copy is read after the first item.
    """
    line = [request.request_id for request in scheduler.waiting.line(now)]
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
    missing, clock = {*line, *names}, now
    yield None
    for _ in range(most_steps):
        out = twin.schedule(clock)
        for name in missing & starts.keys():  # their start is known, so they must not delay others
            missing.remove(name)
            twin.abort(name, clock)
        if out.num_tokens:
            free_at = max(free_at, clock) + _seconds(seconds, out)
            flights.append((out, free_at))
            for row in out.joined:
                if row.request_id in missing:
                    missing.remove(row.request_id)
                    starts[row.request_id] = clock
            if len(flights) <= depth:
                continue
        if flights:
            out, clock = flights.popleft()
            twin.update(out, [_TOKEN] * (out.num_decodes + sum(chunk.samples for chunk in out.chunks)), clock)
        else:
            event = twin.next_event(clock)
            if not missing or event is None or event <= clock:
                break
            clock = event
        if not missing:
            break
        yield None
    pace = max(clock - now, 1e-9) / max(1, len(starts.keys() - names.keys()))
    for place, name in enumerate([name for name in [*line, *names] if name in missing], start=1):
        starts[name] = clock + place * pace
    yield _forecast(now, starts, names, pace if line else 0.0, busiest)


def _forecast(
    now: float, starts: dict[str, float], names: dict[str, tuple[str, bool]], pace: float, busiest: str
) -> Forecast:
    """Make a forecast from all start times. ``names`` are the newcomers' as :func:`_add_newcomers` returns them."""
    came = {label: starts.pop(name) for name, label in names.items()}
    strangers = {label: start for (label, is_stranger), start in came.items() if is_stranger}
    newcomers = {label: start for (label, is_stranger), start in came.items() if not is_stranger} or strangers
    waiting = dict(sorted(starts.items(), key=lambda item: item[1]))
    return Forecast(now, waiting, newcomers, pace, strangers, busiest)


def _seconds(seconds: StepSeconds, out: SchedulerOutput) -> float:
    return seconds(StepFeatures.of(out.num_decodes, out.context_tokens, out.chunks, out.adapter_bytes))


class _NewcomersDisplaceNobody:
    """Wraps a policy so that hypothetical newcomers displace no request.

    The time at which a newcomer would displace a request is its start, and goes into ``starts``.
    """

    def __init__(self, policy: Policy, starts: dict[str, float]) -> None:
        self._policy, self._starts = policy, starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def outranks(self, request: Request, running: Request, resource: Resource, now: float) -> bool:
        would = self._policy.outranks(request, running, resource, now)
        if would and resource != "tokens" and request.request_id.startswith(_NEWCOMER):
            self._starts.setdefault(request.request_id, now)
            return False
        return would


def _copy(scheduler: Scheduler, lengths: AnswerLengths, now: float, starts: dict[str, float]) -> Scheduler:
    """Copy the scheduler with its running requests, as they were before the steps in flight."""
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
    """Add copies of the waiting requests."""
    for request in scheduler.waiting.line(now):
        twin.add(_like(request, lengths))
    twin.waiting.catch_up(scheduler.waiting)
    twin.policy.catch_up(scheduler.policy)


def _add_newcomers(twin: Scheduler, classes: dict[str, int], busiest: str, now: float) -> dict[str, tuple[str, bool]]:
    """Add a request of each class for the busiest tenant and for an unknown tenant.

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


def _like(request: Request, lengths: AnswerLengths) -> Request:
    """Copy a request with the same size and standing, and an answer of the expected length."""
    # An ended request that is held in its batch is held in the copy, too. It gets no more tokens.
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
    copy.token_ids = [_TOKEN] * len(request.token_ids)
    copy.num_prompt_tokens = request.num_prompt_tokens
    copy.max_total_tokens += request.num_prompt_tokens
    copy.limit = request.limit  # blocks are reserved for the longest answer, not for the expected one
    copy.num_preemptions, copy.sequence = request.num_preemptions, request.sequence
    copy.times_passed, copy.adapter_passes = request.times_passed, request.adapter_passes
    copy.size = request.size
    copy.finish_reason = request.finish_reason
    return copy
