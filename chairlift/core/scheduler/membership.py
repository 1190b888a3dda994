"""Rules that say when requests may join a batch and when they may leave it.

``continuous`` is iteration-level scheduling (Orca, OSDI 2022), and the only rule of the core. ``static`` and
``dynamic``, request-level batches for comparison, are plugins (:mod:`chairlift.core.plugins.closed_batches`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Protocol, cast

from chairlift.base.plugin_names import PLUGIN_NAMES, plugin_path
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
    """Seconds for which requests wait for more requests, in a rule that waits."""
    preferred_sizes: tuple[int, ...] = ()
    """Numbers of waiting requests at which such a rule waits no longer, ascending (Triton's preferred_batch_size)."""

    def opens(self, waiting: _Waiting, num_running: int, free_slots: int, now: float) -> bool:
        """Whether waiting requests may join a batch that is not closed, if there is room for them."""
        return True

    def places(self, waiting: _Waiting, num_running: int, free_slots: int, now: float) -> int:
        """Number of waiting requests that may join in this step."""
        return free_slots if self.opens(waiting, num_running, free_slots, now) else 0

    def fires_at(self, waiting: _Waiting, free_slots: int) -> float:
        """Time at which the requests in ``waiting`` may join, if no request runs and no other request arrives."""
        return waiting.oldest_arrival

    def _ready_size(self, waiting: _Waiting, free_slots: int) -> int:
        """Number of waiting requests that are worth to start with: a full batch, otherwise the largest preferred size
        that is reached, otherwise 0. For rules that wait for more requests."""
        if len(waiting) >= free_slots:
            return free_slots
        return max((size for size in self.preferred_sizes if size <= len(waiting)), default=0)

    def lacks(self, places: int) -> str:
        """Name of the resource that prevents the next waiting request from joining. ``places`` is the number of
        requests that may still join in this step."""
        return "tokens" if places else "slots"

    def needs_budget(self) -> int:
        """Number of tokens that the step's budget must have left before one more request may join."""
        return 1

    def prepare(self, batch: Sequence[Request], limit: int) -> None:
        """Set for each request of a closed ``batch`` how many positions its row computes (at most ``limit``), before
        the request joins."""


def membership_from_name(name: str, batch_wait_ms: float = 0.0, preferred_sizes: tuple[int, ...] = ()) -> Membership:
    """Rules for ``continuous``, for a named plugin (``static``, ``dynamic``), or those of the class ``module:Class``.
    The class is derived from :class:`Membership`, is not closed, and is created with ``batch_wait`` (seconds) and
    ``preferred_sizes``. Raises ConfigError for any other name."""
    if name == _CONTINUOUS.name:
        return _CONTINUOUS
    path = plugin_path("batching", name)
    if not is_plugin(path):
        named = ", ".join(PLUGIN_NAMES["batching"])
        raise ConfigError(f"batching must be {_CONTINUOUS.name}, {named} or module:Class; got {name!r}")
    wait = batch_wait_ms / 1000.0
    members = [member for member in dir(Membership) if not member.startswith("_")]
    base = "chairlift.core.scheduler.membership.Membership"
    made = cast(Membership, load_plugin("batching", path, lambda owner: owner(wait, preferred_sizes), members, base))
    if path == name and (made.closed or made.held):
        raise ConfigError(f"batching {name!r} is closed or held, which only static and dynamic are; set both to False")
    return made


_CONTINUOUS: Final = Membership("continuous", closed=False, held=False)
