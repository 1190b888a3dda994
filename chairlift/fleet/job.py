"""A request of a fleet that has not ended."""

from __future__ import annotations

import dataclasses

from chairlift.engine.input_processor import PreparedRequest
from chairlift.fleet.member import Member

__all__ = ["FleetJob"]


@dataclasses.dataclass(slots=True)
class FleetJob:
    """A request that has not ended."""

    prepared: PreparedRequest
    key: str
    """Id of the request's first answer, which is also the id of the request in the queue (the door)."""
    left: set[str]
    """Ids of the request's answers that have not ended."""
    wire: str
    """Id of the request's first answer in the process that computes it. It has the job's generation after a move, so
    that results of an earlier process are never taken for those of the present one."""
    member: Member | None = None
    """Replica that owns the request: only its results count. None while the request waits in the queue (the door)."""
    version: int = 0
    """Version of the weights that compute the request."""
    generation: int = 0
    """Number of times that a move of the request to another replica was begun."""
    num_failed_moves: int = 0
