"""Rules that say when requests may join a batch and when they may leave it.

``continuous`` is iteration-level scheduling (Orca, OSDI 2022). ``static`` and ``dynamic`` are baselines for comparison:
request-level batches as in FasterTransformer and in Triton's dynamic batcher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, cast

from chairlift.base.plugins import is_plugin, load_plugin
from chairlift.core.request import Request
from chairlift.errors import ConfigError

__all__ = ["Membership", "membership_from_name"]


class _Waiting(Protocol):
    def __len__(self) -> int: ...

    @property
    def oldest_arrival(self) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Rules that say how a batch begins and ends."""

    name: str
    closed: bool
    """Whether requests join only when the batch is empty, all at the same time."""
    held: bool
    """Whether a finished row computes on, and no output is delivered, until all rows of the batch have finished."""
    batch_wait: float = 0.0
    """Seconds that a closed batch waits for more requests before it starts although it is not full."""
    preferred_sizes: tuple[int, ...] = ()
    """Sizes at which a closed batch starts without waiting for more requests, ascending (Triton's
    preferred_batch_size)."""

    def opens(self, waiting: _Waiting, num_running: int, free_slots: int, now: float) -> bool:
        """Whether waiting requests may join a batch that is not closed, if there is room for them."""
        return True

    def places(self, waiting: _Waiting, num_running: int, free_slots: int, now: float) -> int:
        """Number of waiting requests that may join in this step."""
        if not self.closed:
            return free_slots if self.opens(waiting, num_running, free_slots, now) else 0
        if num_running or not len(waiting):
            return 0
        if now >= waiting.oldest_arrival + self.batch_wait:
            return free_slots
        return self._ready_size(waiting, free_slots)

    def fires_at(self, waiting: _Waiting, free_slots: int) -> float:
        """Time at which the requests in ``waiting`` may join, if no request runs and no other request arrives."""
        ready = not self.closed or self._ready_size(waiting, free_slots)
        return waiting.oldest_arrival + (0.0 if ready else self.batch_wait)

    def _ready_size(self, waiting: _Waiting, free_slots: int) -> int:
        """Number of waiting requests with which a closed batch may start now: a full batch, otherwise the largest
        preferred size that is reached, otherwise 0."""
        if len(waiting) >= free_slots:
            return free_slots
        return max((size for size in self.preferred_sizes if size <= len(waiting)), default=0)

    def lacks(self, places: int) -> str:
        """Name of the resource that prevents the next waiting request from joining. ``places`` is the number of
        requests that may still join in this step."""
        if places:
            return "tokens"
        if self.closed:
            return "batch"
        return "slots"

    def needs_budget(self) -> int:
        """Number of tokens that the step's budget must have left before one more request may join."""
        return 0 if self.closed else 1

    def prepare(self, batch: Sequence[Request], limit: int) -> None:
        """Set for each request of ``batch`` how many positions its row computes (at most ``limit``), before the request
        joins."""
        if self.held:
            longest = max((request.max_total_tokens - request.num_prompt_tokens for request in batch), default=0)
            for request in batch:
                own = request.max_total_tokens - 1
                request.limit = max(own, min(request.num_prompt_tokens + longest - 1, limit))


def membership_from_name(name: str, batch_wait_ms: float = 0.0, preferred_sizes: tuple[int, ...] = ()) -> Membership:
    """Rules for ``continuous``, ``static`` or ``dynamic``, or those of the class ``module:Class``. The class is derived
    from :class:`Membership`, is not closed, and is created with ``batch_wait`` (seconds) and ``preferred_sizes``.
    Raises ConfigError for any other name."""
    wait = batch_wait_ms / 1000.0
    if is_plugin(name):
        members = [member for member in dir(Membership) if not member.startswith("_")]
        base = "chairlift.core.scheduler.membership.Membership"
        made = cast(
            Membership, load_plugin("batching", name, lambda owner: owner(wait, preferred_sizes), members, base)
        )
        if made.closed or made.held:
            raise ConfigError(
                f"batching {name!r} is closed or held, which only static and dynamic are; set both to False"
            )
        return made
    known = {
        "continuous": Membership("continuous", closed=False, held=False),
        "static": Membership("static", closed=True, held=True, batch_wait=wait, preferred_sizes=preferred_sizes),
        "dynamic": Membership("dynamic", closed=True, held=False, batch_wait=wait, preferred_sizes=preferred_sizes),
    }
    if name not in known:
        raise ConfigError(f"batching must be {', '.join(known)} or module:Class; got {name!r}")
    return known[name]
