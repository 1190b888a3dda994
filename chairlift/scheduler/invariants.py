"""What must hold between any two steps. Cheap enough for tests and simulation, not for production."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from chairlift.errors import InvariantError
from chairlift.request import Request, RequestStatus

if TYPE_CHECKING:
    from chairlift.scheduler.scheduler import Scheduler

__all__ = ["check_scheduler"]


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise InvariantError unless every request is in exactly one place and all counts agree."""
    running = scheduler.running.values()
    slots = [request.slot for request in running]
    if sorted(slots + scheduler.free_slots) != list(range(scheduler.max_running)):
        raise InvariantError(f"rows {slots} in use and {scheduler.free_slots} free are not all rows, once each")
    if scheduler.reserve.keys() - scheduler.running.keys():
        raise InvariantError(f"{scheduler.reserve} have reserved rows, but do not run")
    siblings = [sibling for request in scheduler.requests.values() for sibling in request.siblings]
    places = Counter(id(request) for request in [*scheduler.waiting, *running, *siblings])
    if set(places) != {id(request) for request in scheduler.requests.values()} or max(places.values(), default=1) > 1:
        raise InvariantError("a request is lost, or waits and runs at the same time")
    for request in scheduler.requests.values():
        _check_request(scheduler, request)
    computed = sum(request.num_computed_tokens for request in running)
    if computed != scheduler.num_computed_tokens:
        raise InvariantError(f"{computed} tokens are computed, but {scheduler.num_computed_tokens} are counted")
    if Counter(map(id, scheduler.decodes.watched())) != Counter(id(request) for request in running if request.decoding):
        raise InvariantError("the timing wheel does not watch each decoding request exactly once")
    scheduler.kv.check_invariants(running)


def _check_request(scheduler: Scheduler, request: Request) -> None:
    running = request.status is RequestStatus.RUNNING
    if running != (request.request_id in scheduler.running) or running != (request.slot >= 0) or request.is_finished:
        raise InvariantError(f"{request!r} has a status that contradicts its place")
    if not running and (request.block_ids or request.num_computed_tokens):
        raise InvariantError(f"{request!r} holds blocks without running")
    if request.num_computed_tokens > request.limit or len(request.token_ids) > request.max_total_tokens:
        raise InvariantError(f"{request!r} went beyond its limit of {request.limit} positions")
    if request.num_preemptions > scheduler.max_preemptions:
        raise InvariantError(f"{request!r} was preempted {request.num_preemptions} times")
