"""Checks of the scheduler's state between two steps. They are fast enough for tests and simulation, not for
production."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from chairlift.core.request import Request, RequestStatus
from chairlift.errors import InvariantError

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch

__all__ = ["check_batch"]


def check_batch(batch: Batch) -> None:
    """Raise InvariantError unless every request is in exactly one state and all counters are right."""
    running = batch.running.values()
    slots = [request.slot for request in running]
    if sorted(slots + batch.free_slots) != list(range(batch.max_running)):
        raise InvariantError(f"rows {slots} in use and {batch.free_slots} free are not all rows, once each")
    if batch.reserve.keys() - batch.running.keys():
        raise InvariantError(f"{batch.reserve} have reserved rows, but do not run")
    siblings = [sibling for request in batch.requests.values() for sibling in request.siblings]
    others = [*siblings, *batch.unready.values(), *batch.in_flight]
    counts = Counter(id(request) for request in [*batch.waiting, *running, *others])
    if set(counts) != {id(request) for request in batch.requests.values()} or max(counts.values(), default=1) > 1:
        raise InvariantError("a request is lost, or waits and runs at the same time")
    if any(request.is_ready for request in batch.unready.values()) or not all(r.is_ready for r in batch.waiting):
        raise InvariantError("a request is ready and does not wait, or waits and is not ready")
    waiting_rows = {id(request) for request in running if not request.is_ready}
    if waiting_rows != {id(request) for request in batch.unready_rows.values()}:
        raise InvariantError(f"{[*batch.unready_rows]} are not the running requests that are not ready")
    if any(request.decoding or request not in batch.catching_up for request in batch.unready_rows.values()):
        raise InvariantError("a request that is not ready advances with the decode clock, or is lost")
    for request in batch.requests.values():
        _check_request(batch, request)
    for kind in batch.kinds:
        kind.check_invariants()
    computed = sum(request.num_computed_tokens for request in running)
    if computed != batch.num_computed_tokens:
        raise InvariantError(f"{computed} tokens are computed, but {batch.num_computed_tokens} are counted")
    if Counter(map(id, batch.decodes.watched())) != Counter(id(request) for request in running if request.decoding):
        raise InvariantError("the timing wheel does not watch each decoding request exactly once")
    batch.in_flight.check_invariants(batch.running, batch.step)
    batch.kv.check_invariants(running)


def _check_request(batch: Batch, request: Request) -> None:
    running = request.status is RequestStatus.RUNNING
    if running != (request.request_id in batch.running) or running != (request.slot >= 0) or request.is_finished:
        raise InvariantError(f"{request!r} has a status that contradicts its place")
    if not running and (request.block_ids or request.num_computed_tokens):
        raise InvariantError(f"{request!r} holds blocks without running")
    if request.num_computed_tokens > request.limit or len(request.token_ids) > request.max_total_tokens:
        raise InvariantError(f"{request!r} went beyond its limit of {request.limit} positions")
    if request.num_preemptions > batch.max_preemptions:
        raise InvariantError(f"{request!r} was preempted {request.num_preemptions} times")
