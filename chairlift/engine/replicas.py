"""The engine processes (replicas) behind a core: their state, and their restart one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chairlift.errors import ConfigError
from chairlift.metrics.stats import AutoscalingStats, EngineStats, ReplicaCounts, ReplicaStats, RequestStats

__all__ = ["Replicas", "ReplicatedCore", "ServedReplicas", "SingleProcess"]


class Replicas(Protocol):
    """State of the replicas of a core, and operations on all of them."""

    @property
    def single_pid(self) -> int | None:
        """Id of the process of a core that is a single process. None for replicas, and while there is no process."""

    def shown(self) -> list[ReplicaStats]:
        """State of each replica. Empty if the core is a single process."""

    def stats(self) -> dict[int, EngineStats]:
        """Index of each replica that ran -> its statistics, with the counters of its earlier processes. Empty if the
        core is a single process."""

    def autoscaling(self) -> AutoscalingStats | None:
        """State of autoscaling; None if the number of processes is fixed."""

    async def roll(self, patience: float) -> None:
        """Restart all replicas, one after another. Each first finishes its requests, for at most ``patience`` seconds.
        Raises ConfigError unless at least two replicas are alive."""


class SingleProcess(Replicas):
    """The replicas of a core that is one process: none. ``single_pid`` is the id of the process."""

    def __init__(self, single_pid: int | None = None) -> None:
        self._single_pid = single_pid

    @property
    def single_pid(self) -> int | None:
        return self._single_pid

    def shown(self) -> list[ReplicaStats]:
        return []

    def stats(self) -> dict[int, EngineStats]:
        return {}

    def autoscaling(self) -> AutoscalingStats | None:
        return None

    async def roll(self, patience: float) -> None:
        raise ConfigError("a rolling restart needs two replicas that are alive; restart the server instead")


class ReplicatedCore(Protocol):
    """A core whose replicas can be asked for."""

    @property
    def replicas(self) -> Replicas: ...


class ServedReplicas:
    """The replicas of a server's engine, for its operators. ``core`` returns the newest core; None before the first
    one. ``check_ready`` raises EngineDeadError while the engine does not run. ``stats`` has the counters of fleets that
    have ended."""

    def __init__(
        self, core: Callable[[], ReplicatedCore | None], check_ready: Callable[[], object], stats: RequestStats
    ) -> None:
        self._core = core
        self._check_ready = check_ready
        self._stats = stats

    @property
    def _replicas(self) -> Replicas:
        core = self._core()
        return SingleProcess() if core is None else core.replicas

    @property
    def engine_pid(self) -> int | None:
        """Id of the engine's process; None if it has none, or several."""
        return self._replicas.single_pid

    def shown(self) -> list[ReplicaStats]:
        """State of each replica; empty if the engine is a single process."""
        return self._replicas.shown()

    def counts(self) -> dict[int, ReplicaCounts]:
        """Index -> state and counters of each replica; empty if the engine is a single process."""
        return self._stats.of_replicas(self._replicas.stats())

    def autoscaling(self) -> AutoscalingStats | None:
        """State of autoscaling; None if the number of replicas is fixed."""
        return self._replicas.autoscaling()

    async def restart(self, patience: float) -> None:
        """Restart all replicas, one after another, while the other replicas serve. Each replica first finishes its
        requests, for at most ``patience`` seconds. Raises ConfigError unless two replicas are alive, EngineDeadError if
        the engine does not run."""
        self._check_ready()
        await self._replicas.roll(patience)
