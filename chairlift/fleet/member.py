"""One replica of a fleet: its present engine process, and what the fleet knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from chairlift.engine.info import EngineInfo
from chairlift.engine.process.messages import Step
from chairlift.engine.process.process_client import EngineEvents, ProcessCore
from chairlift.fleet.routing import Replica
from chairlift.metrics.stats import EngineStats, ReplicaStats, merge_stats

__all__ = ["ConnectReplica", "FleetEvents", "Member", "live_cores"]

_MOST_FAILED_STARTS: Final = 3
"""Number of failed starts in succession after which a replica counts as one that cannot start."""


class FleetEvents(EngineEvents, Protocol):
    """Receiver of the events of a fleet."""

    def on_step(self, step: Step, replica: int | None = None) -> None: ...

    def delivered(self, request_id: str) -> list[list[int]]: ...

    def on_watched(self, lines: bytes, replica: int = 0) -> None: ...

    def on_lost(self, request_ids: Sequence[str], why: str) -> None: ...

    def on_weights(self, sequence_ids: Sequence[str], version: int) -> None: ...

    def on_resized(self, info: EngineInfo) -> None: ...

    def on_moved(self, kind: str) -> None: ...

    def latency_targets(self) -> tuple[int, int]: ...


ConnectReplica = Callable[[int, EngineEvents], ProcessCore]
"""Function from the index of a replica and a receiver of events to the replica's core. The function does not start the
core."""


class Member:
    """A replica: its present engine process, and the router's record of the replica (``view``)."""

    def __init__(self, view: Replica) -> None:
        self.view = view
        self.core: ProcessCore | None = None
        self.info: EngineInfo | None = None
        self.alive = self.draining = False
        """``alive``: the process has loaded its model and has not died. ``draining``: it gets no more requests."""
        self.wanted = False
        """Whether the replica belongs to the fleet: it serves, starts, or is restarted. False: it is off, or is being
        drained for its removal."""
        self.removal: asyncio.Task[None] | None = None
        """Task that waits for the replica's last request and then removes the replica."""
        self.stats = EngineStats()
        """Statistics of the replica's process. The next field: the counters of its processes that have died."""
        self.dead_stats = EngineStats()
        self.loading: dict[str, float] = {}
        """Id of each request of the replica that waits until its KV is read from files -> time at which it should be
        there, on the fleet's clock."""
        self.guests: dict[str, str] = {}
        """Id in the replica's process of each request that has moved to it, or is about to -> key of the request."""
        self.former: set[str] = set()
        """Ids in the replica's process of the requests that were taken away from it, until it has ended them."""
        self.num_sent = self.num_restarts = 0
        self.generation = 0
        """Number of the newest weight update that the replica's process has loaded. 0: the process has its first
        weights."""
        self.busy_since: float | None = None
        """Time of the replica's newest step, or of its first request after an idle time. None while the replica is
        idle."""
        self.quiet = asyncio.Event()
        self.opened = asyncio.Event()
        """``quiet`` is set when the replica has no request. ``opened`` is set while the replica is alive and accepts
        requests."""

        self.num_failed_starts = 0
        """Number of failed starts since the replica last accepted requests. The next field: why the last one failed."""
        self.failure = ""
        self.failing = asyncio.Event()
        """Set while the replica cannot start, as several failed starts show. It is tried again all the same."""

    @property
    def num_requests(self) -> int:
        return self.view.num_requests

    @property
    def state(self) -> str:
        if not self.alive:
            if self.core is not None:
                return "loading"
            if self.wanted:
                return "down"
            return "off"
        return "draining" if self.draining else "ready"

    def shown(self) -> ReplicaStats:
        stats = self.stats
        view = self.view
        blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
        return ReplicaStats(
            index=view.index,
            pid=None if self.core is None else self.core.pid,
            state=self.state,
            unstarted=len(view.unstarted),
            started=len(view.started),
            unstarted_tokens=view.unstarted_tokens,
            kv_cache_usage=stats.used_blocks / blocks if blocks else 0.0,
            sent=self.num_sent,
            restarts=self.num_restarts,
        )

    def died(self) -> None:
        """Note that the replica's process has died. Its counters are kept."""
        self.alive = False
        self.core = None
        self.info = None
        self.opened.clear()
        self.dead_stats = merge_stats([self.dead_stats, self.stats.only_counters()])
        self.stats = EngineStats()

    def failed_to_start(self, why: str) -> None:
        """Note that a process of the replica could not load its model."""
        self.num_failed_starts += 1
        self.failure = why
        if self.num_failed_starts >= _MOST_FAILED_STARTS:
            self.failing.set()

    async def lost(self, core: ProcessCore) -> None:
        """Wait until the fleet has handled the death of ``core``, a process of this replica."""
        while self.alive and self.core is core:
            await asyncio.sleep(0.01)


def live_cores(members: Sequence[Member]) -> list[ProcessCore]:
    """The cores of the replicas that are alive."""
    return [member.core for member in members if member.alive and member.core is not None]
