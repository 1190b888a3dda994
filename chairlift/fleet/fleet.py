"""Several engine processes (replicas) that act as one :class:`~chairlift.engine.process.process_client.RemoteCore`.

The front end (:class:`~chairlift.engine.async_engine.AsyncEngine`) checks, tokenizes and admits a request once. The
request then waits at the :class:`~chairlift.fleet.door.Door` until a replica has room.

When a replica dies, its requests move to other replicas. A request without a token starts again. A request with tokens
continues after its delivered tokens, if the rest of the answer is certain to be identical; otherwise it ends with an
error. The dead replica is started again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from chairlift.base.service_class import DEFAULT_CLASS
from chairlift.config import EngineConfig
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.engine.adapters import AdapterLoad
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_store.report import StoreReport
from chairlift.engine.process.messages import Action
from chairlift.engine.process.process_client import RemoteCore
from chairlift.engine.replicas import Replicas
from chairlift.errors import ConfigError
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.fleet_adapters import FleetAdapters
from chairlift.fleet.fleet_scaling import FleetScaling, ScaleLimits
from chairlift.fleet.jobs import Jobs
from chairlift.fleet.member import ConnectReplica, FleetEvents, Member, live_cores
from chairlift.fleet.members import Members, RestartRules, Sleep
from chairlift.fleet.prompt_keys import PromptKeys
from chairlift.fleet.routing import MeasuredPace, Replica, router_from_name
from chairlift.fleet.scaler import Scaler

__all__ = ["Fleet"]

_MAX_ROWS: Final = 1 << 16


class Fleet(RemoteCore):
    """Several replicas that act as one core.

    Args:
        config: Settings of the engines.
        events: Receiver of the fleet's events.
        connect: Function that creates the core of a replica. It is called each time a replica starts.
        replicas: Number of replicas.
        routing: Name of the router that chooses the replica of a request.
        restart: Whether dead replicas are started again. When no replica is alive, the fleet has died, and :meth:`died`
            returns.
        health_timeout: A replica that has work and sends nothing for this time, in seconds, is killed, unless it is the
            only replica that is alive.
        drain_timeout: Time in seconds that the requests of a replica have to end before its weights are replaced.
        scaling: Limits of autoscaling. The fleet starts with ``replicas`` replicas. None: their number is fixed.
        now: Clock on which arrival times are measured.
        sleep: Function that waits for a number of seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        events: FleetEvents,
        connect: ConnectReplica,
        *,
        replicas: int,
        routing: str = "forecast",
        restart: bool = True,
        health_timeout: float = 30.0,
        drain_timeout: float = 30.0,
        scaling: ScaleLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        scheduler = config.scheduler
        measured = MeasuredPace()
        pace = measured.pace(scheduler.max_num_batched_tokens)
        most = replicas if scaling is None else scaling.most
        rows = scheduler.max_running
        share = scheduler.open_policy_share
        self._members = [
            Member(Replica(index, pace, max_num_seqs=rows, cache_tokens=0, policy_share=share)) for index in range(most)
        ]
        for member in self._members[:replicas]:
            member.wanted = True
        rows = min(_MAX_ROWS, scheduler.max_num_seqs * most)
        policy = policy_from_config(dataclasses.replace(scheduler, max_num_seqs=rows))
        self.door = Door([member.view for member in self._members[:replicas]], router_from_name(routing), policy)
        classes = scheduler.promises
        priorities = {name: each.priority for name, each in (classes or {}).items()}
        forecast = DoorForecast(priorities or {DEFAULT_CLASS: 0})
        self._adapters = FleetAdapters(self._members, events)
        keys = PromptKeys(config.cache, self._adapters.digests)
        self._jobs = Jobs(
            config, events, self._members, door=self.door, keys=keys, pace=measured, forecast=forecast, now=now
        )
        decisions = None if scaling is None else FleetScaling(scaling, now)
        self._replicas = Members(
            config,
            events,
            connect,
            self._members,
            jobs=self._jobs,
            door=self.door,
            adapters=self._adapters,
            keys=keys,
            scaling=decisions,
            rules=RestartRules(restart=restart, health_timeout=health_timeout, drain_timeout=drain_timeout),
            now=now,
            sleep=sleep,
        )
        self._scaler: Scaler | None = None
        if decisions is not None:
            self._scaler = Scaler(
                config, self._replicas, decisions, door=self.door, forecast=forecast, now=now, sleep=sleep
            )

    @property
    def replicas(self) -> Replicas:
        return self._replicas

    @property
    def silent_since(self) -> float | None:
        """Time since which no replica has sent a message although all replicas have work. None if any replica is
        idle."""
        silent = [core.silent_since for core in live_cores(self._members)]
        known = [since for since in silent if since is not None]
        return max(known) if known and len(known) == len(silent) else None

    async def start(self) -> EngineInfo:
        """Start the first replicas. Returns facts about the fleet as if it were one engine.

        Raises the errors of :meth:`~chairlift.engine.process.process_client.ProcessClient.start` if a replica cannot
        start.
        """
        info = await self._replicas.start()
        if self._scaler is not None:
            self._replicas.run(self._scaler.run(), "autoscaling")
        return info

    def add(self, request: PreparedRequest) -> None:
        self._jobs.add(request)

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self._jobs.leave(sequence_ids, lambda core, names: core.abort(names))

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self._jobs.leave(sequence_ids, lambda core, names: core.stop(names))

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None:
        self._jobs.paused(sequence_id, tools)

    def watch(self, wanted: bool) -> None:
        """Start or stop reporting the steps of all replicas, for the live view page."""
        self._replicas.watched = wanted
        for core in live_cores(self._members):
            core.watch(wanted)

    def load_adapter(self, load: AdapterLoad) -> None:
        self._adapters.load(load)

    def unload_adapter(self, adapter_id: int) -> None:
        self._adapters.unload(adapter_id)

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        """Replace the weights of all replicas; see :meth:`~chairlift.fleet.members.Members.update_weights`."""
        return await self._replicas.update_weights(source, version, in_flight)

    async def side_work(self, order: bytes) -> bytes:
        raise ConfigError("replicas do no other work; use one engine")

    async def kv_store(self, clear: str) -> list[StoreReport]:
        """Report what is in the store of KV blocks of each replica that is alive."""
        cores = [member.core for member in self._replicas.everyone if member.alive and member.core is not None]
        found = await asyncio.gather(*(core.kv_store(clear) for core in cores), return_exceptions=True)
        return [report for reports in found if not isinstance(reports, BaseException) for report in reports]

    async def control(self, action: Action) -> None:
        """Pause or resume all replicas, or let them forget KV; see
        :meth:`~chairlift.fleet.members.Members.control`."""
        await self._replicas.control(action)

    async def died(self) -> str:
        """Wait until no replica is alive, then stop all processes. Returns a text that says how the last replica
        ended."""
        why = await asyncio.shield(self._replicas.end)
        await self.close()
        return why

    async def close(self) -> None:
        """Stop all engine processes."""
        await self._replicas.close()
