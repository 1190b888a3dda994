"""Rules for when requests may join a batch and when they may leave it.

``continuous`` is iteration-level scheduling (Orca, OSDI 2022). ``static`` and ``dynamic`` are the baselines it is
measured against: request-level batches as FasterTransformer and Triton's dynamic batcher run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from chairlift.errors import ConfigError
from chairlift.request import Request

__all__ = ["Membership", "membership_from_name"]


class _Waiting(Protocol):
    def __len__(self) -> int: ...

    @property
    def oldest_arrival(self) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Rules by which a batch begins and ends."""

    name: str
    closed: bool
    """Requests join only when the batch is empty, all together."""
    held: bool
    """A finished row keeps computing, and nothing is delivered, until the whole batch has ended."""
    batch_wait: float = 0.0
    """Seconds a closed batch waits for more requests before it fires unfilled."""
    preferred_sizes: tuple[int, ...] = ()
    """Sizes at which a closed batch fires without waiting for more, ascending (Triton's preferred_batch_size)."""

    def places(self, waiting: _Waiting, num_running: int, free_slots: int, now: float) -> int:
        """How many waiting requests may join in this step."""
        if not self.closed:
            return free_slots
        if num_running or not len(waiting):
            return 0
        if now >= waiting.oldest_arrival + self.batch_wait:
            return free_slots
        return self._ready_size(waiting, free_slots)

    def fires_at(self, waiting: _Waiting, free_slots: int) -> float:
        """Time at which the requests in ``waiting`` may join, if nothing runs and no other request comes."""
        ready = not self.closed or self._ready_size(waiting, free_slots)
        return waiting.oldest_arrival + (0.0 if ready else self.batch_wait)

    def _ready_size(self, waiting: _Waiting, free_slots: int) -> int:
        """The largest size that need not wait for more requests: a full batch, else a preferred size, else 0."""
        if len(waiting) >= free_slots:
            return free_slots
        return max((size for size in self.preferred_sizes if size <= len(waiting)), default=0)

    def lacks(self, places: int) -> str:
        """Resource that the next waiting request lacks when it does not join although ``places`` requests may."""
        return "tokens" if places else "batch" if self.closed else "slots"

    def needs_budget(self) -> int:
        """Tokens of the step's budget that must be left for one more request to join."""
        return 0 if self.closed else 1

    def prepare(self, batch: Sequence[Request], most: int) -> None:
        """Set how many positions each row of ``batch`` computes, before it joins. ``most`` bounds any row."""
        if self.held:
            longest = max((request.max_total_tokens - request.num_prompt_tokens for request in batch), default=0)
            for request in batch:
                own = request.max_total_tokens - 1
                request.limit = max(own, min(request.num_prompt_tokens + longest - 1, most))


def membership_from_name(name: str, batch_wait_ms: float = 0.0, preferred_sizes: tuple[int, ...] = ()) -> Membership:
    """``continuous``, ``static`` or ``dynamic``; raises ConfigError for anything else."""
    wait = batch_wait_ms / 1000.0
    known = {
        "continuous": Membership("continuous", closed=False, held=False),
        "static": Membership("static", closed=True, held=True, batch_wait=wait, preferred_sizes=preferred_sizes),
        "dynamic": Membership("dynamic", closed=True, held=False, batch_wait=wait, preferred_sizes=preferred_sizes),
    }
    if name not in known:
        raise ConfigError(f"batching must be one of {', '.join(known)}; got {name!r}")
    return known[name]
