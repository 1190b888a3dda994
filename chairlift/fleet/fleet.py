"""Several engine processes (replicas) that act as one :class:`~chairlift.engine.process.process_client.RemoteCore`.

The front end (:class:`~chairlift.engine.async_engine.AsyncEngine`) checks, tokenizes and admits a request once. The
request then waits at the :class:`~chairlift.fleet.door.Door` until a replica has room.

When a replica dies, its requests move to other replicas. A request without a token starts again. A request with tokens
continues after its delivered tokens, if the rest of the answer is certain to be identical; otherwise it ends with an
error. The dead replica is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from chairlift.base.outputs import FinishReason
from chairlift.base.service_class import DEFAULT_CLASS
from chairlift.config import EngineConfig
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.process.messages import Refused, Step
from chairlift.engine.process.process_client import EngineEvents, RemoteCore
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from chairlift.fleet.autoscale import SCALE_SECONDS, replica_to_remove
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.fleet_scaling import FleetScaling, ScaleLimits
from chairlift.fleet.routing import MeasuredPace, Replica, prefix_keys, router_from_name
from chairlift.metrics.stats import AutoscalingStats, EngineStats, ReplicaStats, merge_stats

__all__ = ["ConnectReplica", "Fleet", "FleetEvents"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0
_SETTLED_SECONDS: Final = 60.0
"""Time in seconds after which a running replica counts as stable: if it dies later, it restarts after a short pause."""
_MAX_ROWS: Final = 1 << 16


class FleetEvents(EngineEvents, Protocol):
    """Receiver of the events of a fleet."""

    def on_step(self, step: Step, replica: int | None = None) -> None: ...

    def delivered(self, request_id: str) -> list[list[int]]: ...

    def on_watched(self, lines: bytes, replica: int = 0) -> None: ...

    def on_lost(self, request_ids: Sequence[str], why: str) -> None: ...

    def on_weights(self, sequence_ids: Sequence[str], version: int) -> None: ...

    def on_resized(self, info: EngineInfo) -> None: ...

    def latency_targets(self) -> tuple[int, int]: ...


ConnectReplica = Callable[[int, EngineEvents], RemoteCore]
"""Function from the index of a replica and a receiver of events to the replica's core. The function does not start the
core."""
Sleep = Callable[[float], Awaitable[None]]


@dataclasses.dataclass(slots=True)
class _Job:
    """A request that has not ended."""

    prepared: PreparedRequest
    key: str
    """Id of the request's first answer, which is also the id of the request in the queue (the door)."""
    left: set[str]
    """Ids of the request's answers that have not ended."""
    member: _Member | None = None
    """Replica to which the request was sent. None while the request waits in the queue (the door)."""
    version: int = 0
    """Version of the weights that compute the request."""


class _Member:
    """A replica: its present engine process, and the router's record of the replica (``view``). Receives the events of
    the process."""

    def __init__(self, fleet: Fleet, view: Replica) -> None:
        self.view = view
        self._fleet = fleet
        self.core: RemoteCore | None = None
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

    @property
    def num_requests(self) -> int:
        return self.view.num_requests

    async def lost(self, core: RemoteCore) -> None:
        """Wait until the fleet has handled the death of ``core``, a process of this replica."""
        while self.alive and self.core is core:
            await asyncio.sleep(0.01)

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

    # -- events of the process

    def on_progress(self, label: str, share: float) -> None:
        if not self.view.index:  # all replicas load the same model at the same time, so one report is enough
            self._fleet.events.on_progress(label, share)

    def on_step(self, step: Step) -> None:
        self._fleet.stepped(self, step)

    def on_refused(self, refused: Refused) -> None:
        self._fleet.refused(refused)

    def on_watched(self, lines: bytes) -> None:
        self._fleet.events.on_watched(lines, self.view.index)

    def on_updated(self, info: EngineInfo) -> None:
        self._fleet.weights_changed(self, info)

    def on_adapter(self, state: AdapterState) -> None:
        self._fleet.adapter_loaded(self, state)


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
        self.config = config
        self.events = events
        self._connect = connect
        self._restart = restart
        self._health_timeout = health_timeout
        self._drain_timeout = drain_timeout
        self._now = now
        self._sleep = sleep
        self._pace = MeasuredPace()
        scheduler = config.scheduler
        pace = self._pace.pace(scheduler.max_num_batched_tokens)
        self._scaling = None if scaling is None else FleetScaling(scaling, now)
        most = replicas if scaling is None else scaling.most
        rows = scheduler.max_running
        share = scheduler.open_policy_share
        self._members = [
            _Member(self, Replica(index, pace, max_num_seqs=rows, cache_tokens=0, policy_share=share))
            for index in range(most)
        ]
        for member in self._members[:replicas]:
            member.wanted = True
        rows = min(_MAX_ROWS, scheduler.max_num_seqs * most)
        policy = policy_from_config(dataclasses.replace(scheduler, max_num_seqs=rows))
        self.door = Door([member.view for member in self._members[:replicas]], router_from_name(routing), policy)
        classes = scheduler.promises
        priorities = {name: each.priority for name, each in (classes or {}).items()}
        self._forecast = DoorForecast(priorities or {DEFAULT_CLASS: 0})
        self._jobs: dict[str, _Job] = {}
        """Id of a request -> the request, until it has ended."""
        self._answers: dict[str, _Job] = {}
        """Id of an answer that has not ended -> the request that it belongs to."""
        self._any_died = False
        self._loads: dict[int, AdapterLoad] = {}
        self._loading: dict[int, tuple[set[int], str]] = {}
        """Id of an adapter that is being loaded -> (replicas that have not reported a result, first error)."""
        self._info: EngineInfo | None = None
        """Facts about the fleet as if it were one engine. None before :meth:`start`."""
        self._generation = 0
        """Number of times that the weights were replaced."""
        self._watched = self._alike = False
        self._tasks: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._rolling = asyncio.Lock()

    # -- a core ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the first replica that has a process. None if there is none."""
        pids = (member.core.pid for member in self._members if member.core is not None)
        return next((pid for pid in pids if pid is not None), None)

    @property
    def silent_since(self) -> float | None:
        """Time since which no replica has sent a message although all replicas have work. None if any replica is
        idle."""
        silent = [member.core.silent_since for member in self._members if member.alive and member.core is not None]
        known = [since for since in silent if since is not None]
        return max(known) if known and len(known) == len(silent) else None

    def shown(self) -> list[ReplicaStats]:
        """State of each replica, for the metrics and for /v1/replicas."""
        return [member.shown() for member in self._members]

    def replica_stats(self) -> dict[int, EngineStats]:
        return {
            member.view.index: merge_stats([member.stats, member.dead_stats])
            for member in self._members
            if member.state != "off" or member.dead_stats.num_steps
        }

    def autoscaling(self) -> AutoscalingStats | None:
        return None if self._scaling is None else self._scaling.shown()

    async def start(self) -> EngineInfo:
        """Start the first replicas. Returns facts about the fleet as if it were one engine.

        Raises the errors of :meth:`~chairlift.engine.process.process_client.ProcessClient.start` if a replica cannot
        start.
        """
        first = [each for each in self._members if each.wanted]
        began = self._now()
        outcomes = await asyncio.gather(*(self._load(each) for each in first), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        info = first[0].info
        if info is None:
            raise EngineDeadError("the first replica died while it was starting")
        if info.pooling is not None:
            raise ConfigError("replicas serve models that generate; start a server for each replica of this one")
        for member in first:
            self._open(member)
            self._keep_alive(member)
        if not self._alike and len(first) > 1:
            _log.warning("answers cannot continue on another replica: their bits depend on the batch or the process")
        self._tasks.append(asyncio.create_task(self._watch_silence(), name="watch over replicas"))
        if self._scaling is not None:
            self._scaling.started(self._now() - began)
            self._tasks.append(asyncio.create_task(self._scale(self._scaling), name="autoscaling"))
        self._info = self._summed(info)
        return self._info

    def _summed(self, info: EngineInfo) -> EngineInfo:
        """Facts about the replicas that are alive as if they were one engine. ``info`` has those that are not sums."""
        infos = [member.info for member in self._members if member.alive and member.info is not None]
        return dataclasses.replace(
            info,
            pool_tokens=sum(each.pool_tokens for each in infos),
            num_blocks=sum(each.num_blocks for each in infos),
            max_num_seqs=sum(each.max_num_seqs for each in infos),
            threads=sum(each.threads for each in infos),
        )

    def add(self, request: PreparedRequest) -> None:
        job = _Job(request, request.sequence_ids[0], set(request.sequence_ids))
        for name in request.sequence_ids:
            self._answers[name] = job
        self._jobs[job.key] = job
        self._queue(job)
        error = self._send().get(job.key)
        if error is not None:
            raise error

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self._leave(sequence_ids, lambda core, names: core.abort(names))

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self._leave(sequence_ids, lambda core, names: core.stop(names))

    def watch(self, wanted: bool) -> None:
        """Start or stop reporting the steps of all replicas, for the live view page."""
        self._watched = wanted
        for core in self._cores():
            core.watch(wanted)

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter in every replica. ``on_adapter`` is called once, when all replicas have reported a result."""
        self._loads[load.adapter_id] = load
        self._loading[load.adapter_id] = {member.view.index for member in self._members if member.alive}, ""
        for core in self._cores():
            core.load_adapter(load)

    def unload_adapter(self, adapter_id: int) -> None:
        self._loads.pop(adapter_id, None)
        for core in self._cores():
            core.unload_adapter(adapter_id)

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        """Replace the weights of all replicas, one replica after another, while the other replicas serve.

        Each replica first finishes its requests, within ``drain_timeout``. Requests that still run then continue with
        the new weights, as in a single engine. Raises ConfigError or ModelLoadError if the first replica cannot load
        the weights; no weights have then changed. If a later replica cannot load them, it is killed and started again
        with the new weights.
        """
        async with self._rolling:
            if self._info is None:
                raise EngineDeadError("the fleet has not started")
            target = self._generation + 1
            updated = self._info
            while (
                behind := next((m for m in self._members if m.wanted and m.alive and m.generation < target), None)
            ) is not None:
                if sum(each.alive for each in self._members) > 1:
                    await self._drain(behind, self._drain_timeout)
                core = behind.core
                if core is None or not behind.alive:
                    continue
                try:
                    info = await core.update_weights(source, version, in_flight)
                except EngineDeadError:
                    await behind.lost(core)
                    continue
                except (ConfigError, ModelLoadError) as error:
                    if self._generation < target:
                        self._undrain(behind)
                        raise
                    _log.error("replica %d cannot take the new weights: %s", behind.view.index, error)
                    core.kill()
                    await behind.lost(core)
                    continue
                if self._generation < target:
                    updated = self._info.updated(source, version, info.approximations)
                self._info = updated
                self._generation = target
                behind.generation = target
                self._undrain(behind)
            if self._generation < target:
                raise EngineDeadError("the last replica died while its weights were being replaced")
            self.events.on_updated(updated)
            return updated

    def kill(self) -> None:
        for core in self._cores():
            core.kill()

    async def died(self) -> str:
        """Wait until no replica is alive, then stop all processes. Returns a text that says how the last replica
        ended."""
        why = await asyncio.shield(self._end)
        await self.close()
        return why

    async def close(self) -> None:
        """Stop all engine processes."""
        tasks = self._tasks
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cores = [member.core for member in self._members if member.core is not None]
        await asyncio.gather(*(core.close() for core in cores), return_exceptions=True)

    async def roll(self, patience: float) -> None:
        """Restart all replicas, one after another. Raises ConfigError unless at least two replicas are alive, and
        EngineDeadError if all replicas die during the restart.

        Each replica first finishes its requests, for at most ``patience`` seconds. Its remaining requests then move to
        other replicas.
        """
        async with self._rolling:
            for member in self._members:
                if sum(each.alive for each in self._members) < 2:
                    raise ConfigError("a rolling restart needs two replicas that are alive; restart the server instead")
                if not member.wanted or not member.alive or member.core is None:
                    continue
                _log.info("replica %d is drained and restarted", member.view.index)
                await self._drain(member, patience)
                if member.alive and sum(each.alive for each in self._members) < 2:
                    self._undrain(member)
                    raise ConfigError("the other replicas died during the rolling restart; send it again later")
                if member.core is not None:
                    member.core.kill()
                await self._reopened(member)

    async def _reopened(self, member: _Member) -> None:
        """Wait until a replica is alive and accepts requests. Raises EngineDeadError if all replicas die instead."""
        opened = asyncio.create_task(member.opened.wait())
        either: list[asyncio.Future[Any]] = [opened, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            opened.cancel()
            raise EngineDeadError(f"all replicas died during the rolling restart: {self._end.result()}")

    async def _drain(self, member: _Member, patience: float | None) -> None:
        """Send no more requests to a replica, and wait until its requests have ended, for at most ``patience``
        seconds. None: without a limit."""
        member.draining = True
        member.view.accepting = False
        member.opened.clear()
        if member.num_requests:
            member.quiet.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.quiet.wait(), patience)

    def _undrain(self, member: _Member) -> None:
        """Let a drained replica accept requests again."""
        member.draining = False
        if member.alive:
            member.view.accepting = True
            member.opened.set()
            self._report_failed(self._send())

    def weights_changed(self, member: _Member, info: EngineInfo) -> None:
        """Handle the report that a replica has new weights. Its prefix cache is now empty."""
        member.info = info
        member.view.version = info.weight_version
        member.view.prefixes.clear()
        for job in self._jobs.values():
            if job.member is member:
                self._computed_by(job, info.weight_version)
        self._end_stranded()

    def _end_stranded(self) -> None:
        """End requests that no replica can continue, because no replica has the weights that computed their tokens."""
        stranded = [self._jobs[name] for name in self.door.versions_changed()]
        for job in stranded:
            self._forget(job)
        self.events.on_lost([job.prepared.request_id for job in stranded], "its weights were replaced everywhere")

    def _computed_by(self, job: _Job, version: int) -> None:
        """Record the version of the weights that compute the next tokens of a request."""
        job.version = version
        self.events.on_weights(list(job.left), version)

    # -- requests --------------------------------------------------------------------------------------------------

    def _queue(self, job: _Job) -> None:
        """Add a request to the queue of the router (the door)."""
        prepared = job.prepared
        known = [*prepared.prompt_token_ids, *prepared.answer_token_ids]
        whose = prepared.cache_salt, prepared.adapter_id
        keys = prefix_keys(known, *whose) if self.config.cache.enable_prefix_caching else []
        job.member = None
        version = job.version if prepared.answer_token_ids else None
        self.door.add(prepared.make_sequences()[0], keys, self._now(), version)

    def _send(self) -> dict[str, RequestError]:
        """Send as many waiting requests as the replicas have room for. Returns request id -> error, for requests that
        could not be sent."""
        failed: dict[str, RequestError] = {}
        for request, view in self.door.send(self._now()):
            member = self._members[view.index]
            job = self._jobs[request.request_id]
            if member.core is None:
                continue
            if member.busy_since is None:
                member.busy_since = self._now()
            try:
                member.core.add(job.prepared)
            except RequestError as error:  # the request cannot be encoded as a message
                failed[job.key] = error
                self._forget(job)
                continue
            job.member = member
            member.num_sent += 1
            missing = [name for name in job.prepared.sequence_ids if name not in job.left]
            if missing:
                member.core.abort(missing)
        return failed

    def _leave(self, sequence_ids: Sequence[str], tell: Callable[[RemoteCore, list[str]], object]) -> None:
        names_by_replica: dict[int, list[str]] = {}
        for name in sequence_ids:
            job = self._answers.get(name)
            if job is not None and job.member is not None:
                names_by_replica.setdefault(job.member.view.index, []).append(name)
            self._ended(name)
        for index, names in names_by_replica.items():
            core = self._members[index].core
            if core is not None:
                tell(core, names)
        self._send()

    def _ended(self, name: str) -> None:
        """Record that an answer has ended. Ignores unknown answers."""
        job = self._answers.pop(name, None)
        if job is None:
            return
        job.left.discard(name)
        if name == job.key and job.member is not None:
            self.door.begun(name)  # the prompt is computed
        if not job.left:
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        """Remove a request that has ended."""
        del self._jobs[job.key]
        for name in job.left:
            del self._answers[name]
        answers = self.events.delivered(job.prepared.request_id)
        self.door.ended(job.key, sum(map(len, answers)))
        if job.member is not None and not job.member.num_requests:
            job.member.quiet.set()

    def stepped(self, member: _Member, step: Step) -> None:
        """Handle the results of a step of a replica."""
        if not member.alive:
            return
        outputs = step.outputs
        now = self._now()
        view = member.view
        if view.unstarted:
            fresh = view.unstarted.keys() & set(outputs.sequence_ids)
            for name in [each for each in view.unstarted if each in fresh]:
                self.door.begun(name)
                self._computed_by(self._jobs[name], view.version)
                self._forecast.started(now)
        for progress in outputs.progress:
            self.door.progressed(progress.sequence_id, progress.num_computed)
        if member.busy_since is not None:
            self._pace.stepped(step.stats.step_tokens, now - member.busy_since)
        member.stats = step.stats
        for ended in outputs.finished:
            self._ended(ended.sequence_id)
        member.busy_since = now if member.num_requests else None
        self._tell(outputs, step.stats.step_tokens, view.index)
        self._send()

    def _tell(self, outputs: CoreOutputs, num_tokens: int = 0, replica: int | None = None) -> None:
        """Pass the results of a step of a replica to the receiver of events, with the statistics of the whole fleet."""
        known = [each.stats for each in self._members if each.wanted or each.alive]
        if self._any_died:
            known += [each.dead_stats for each in self._members]
        stats = known[0]  # not copied, which would take long: the receiver may change it, and it is not sent again
        if len(known) > 1 or stats.step_tokens != num_tokens:
            stats = merge_stats(known)
            stats.step_tokens = num_tokens
        self.events.on_step(Step(outputs, stats, self._forecast.make(self.door, self._now())), replica)

    def refused(self, refused: Refused) -> None:
        job = self._answers.get(refused.request_id) or self._answers.get(f"{refused.request_id}#0")
        if job is not None:
            self._forget(job)
        self.events.on_refused(refused)
        self._send()

    # -- replicas --------------------------------------------------------------------------------------------------

    def _cores(self) -> list[RemoteCore]:
        return [member.core for member in self._members if member.alive and member.core is not None]

    async def _load(self, member: _Member) -> None:
        """Start the process of a replica, and load the newest weights if they were replaced."""
        member.core = self._connect(member.view.index, member)
        try:
            member.info = await member.core.start()
            member.generation = 0
            while self._info is not None and member.generation < self._generation:
                weights = (self._info.weights, self._info.weight_version)
                generation = self._generation
                member.info = await member.core.update_weights(*weights, "continue")
                member.generation = generation
        except BaseException:
            core = member.core
            member.core = None
            await core.close()
            raise

    def _open(self, member: _Member) -> None:
        """Let a replica accept requests after it has loaded its model."""
        info = member.info
        core = member.core
        if info is None or core is None:
            return
        member.alive = True
        member.draining = False
        member.busy_since = None
        known = [each.info for each in self._members if each.alive and each.info is not None]
        builds = {(each.weight_version, each.fingerprint) for each in known}
        self._alike = info.deterministic and len(builds) == len({version for version, _ in builds})
        self.door.add_replica(member.view)
        cached = info.pool_tokens if self.config.cache.enable_prefix_caching else 0
        member.view.opened(cached)
        member.view.version = info.weight_version
        scheduler = self.config.scheduler  # used until the process reports its first step
        member.stats = EngineStats(
            free_blocks=info.num_blocks,
            running_limit=scheduler.max_running,
            token_budget=scheduler.max_num_batched_tokens,
        )
        for load in self._loads.values():
            core.load_adapter(load)
        if self._watched:
            core.watch(True)
        member.opened.set()
        self._report_failed(self._send())

    def _keep_alive(self, member: _Member) -> None:
        self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(asyncio.create_task(self._keep(member), name=f"keeper of replica {member.view.index}"))

    def _report_failed(self, failed: dict[str, RequestError]) -> None:
        for name, error in failed.items():
            self.events.on_refused(Refused(name.partition("#")[0], False, str(error)))

    async def _keep(self, member: _Member) -> None:
        """Wait for the death of a replica, move its requests, and start it again."""
        pause = _FIRST_PAUSE
        while member.core is not None:
            began = self._now()
            why = await member.core.died()
            drained = member.draining
            self._lose(member, why)
            if self._end.done() or not (self._restart or drained):
                return
            if not member.wanted:
                self._switch_off(member)
                return
            if self._now() - began > _SETTLED_SECONDS or drained:
                pause = _FIRST_PAUSE
            while not member.alive:
                if not drained:
                    _log.error("replica %d: %s; starting it again in %.1f s", member.view.index, why, pause)
                    await self._sleep(pause)
                    pause = min(_LONGEST_PAUSE, 2 * pause)
                try:
                    await self._load(member)
                except Exception as error:
                    why = str(error) or type(error).__name__
                    drained = False
                    continue
                member.num_restarts += 1
                self._open(member)

    def _lose(self, member: _Member, why: str) -> None:
        """Move the requests of a dead replica to others. Requests that cannot move end with an error."""
        member.alive = False
        member.core = None
        member.info = None
        member.opened.clear()
        self._any_died = True
        member.dead_stats = merge_stats([member.dead_stats, member.stats.only_counters()])
        member.stats = EngineStats()
        unstarted, started = self.door.lose(member.view)
        member.quiet.set()
        for adapter_id in list(self._loading):
            self.adapter_loaded(member, AdapterState(adapter_id))
        if not any(each.alive for each in self._members):
            self._end.set_result(why)  # the front end fails all requests
            return
        lost = list[_Job]()
        ended = list[FinishedSequence]()
        for request in (*unstarted, *started):
            job = self._jobs[request.request_id]
            if (end := self._move(job)) is not None:
                ended.append(end)
            elif job.member is not None:
                lost.append(job)
        moved = len(unstarted) + len(started) - len(lost)
        if member.removal is not None and not moved and not lost:
            _log.info("replica %d is removed", member.view.index)
        else:
            level = logging.INFO if member.draining and member.wanted else logging.ERROR
            _log.log(
                level, "replica %d is gone: %s; %d requests move, %d end", member.view.index, why, moved, len(lost)
            )
        for job in lost:
            self._forget(job)
        self.events.on_lost([job.prepared.request_id for job in lost], why)
        for each in ended:
            self._ended(each.sequence_id)
        self._tell(CoreOutputs(finished=ended))
        self._report_failed(self._send())

    def _move(self, job: _Job) -> FinishedSequence | None:
        """Put a request of a dead replica back into the router's queue, if another replica can continue the request;
        otherwise do nothing. If all tokens of the request were already delivered, the request has ended: returns its
        result.
        """
        prepared = job.prepared
        answers = self.events.delivered(prepared.request_id)
        if any(answers) or job.left != set(prepared.sequence_ids):
            params = prepared.params
            followed = params.structured_outputs is not None or params.thinking is not None
            same = any(each.alive and each.view.version == job.version for each in self._members)
            if not self._alike or params.n > 1 or followed or not same:
                return None
            (known,) = answers
            if known[-1] in prepared.stop_token_ids:
                return FinishedSequence(job.key, FinishReason.STOP, stop_reason=known[-1])
            if len(known) >= prepared.max_tokens:
                return FinishedSequence(job.key, FinishReason.LENGTH)
            job.prepared = dataclasses.replace(prepared, answer_token_ids=known)
        self._queue(job)
        return None

    def adapter_loaded(self, member: _Member, state: AdapterState) -> None:
        """Handle the result of loading an adapter in a replica: success, an error, or the death of the replica."""
        waiting = self._loading.get(state.adapter_id)
        if waiting is None:
            if member.alive:
                self.events.on_adapter(state)  # a restarted replica has loaded the adapter again
            return
        waiting[0].discard(member.view.index)
        error = waiting[1] or (state.error or "")
        self._loading[state.adapter_id] = waiting[0], error
        if waiting[0]:
            return
        del self._loading[state.adapter_id]
        if error:
            self.unload_adapter(state.adapter_id)
        self.events.on_adapter(dataclasses.replace(state, error=error))

    # -- autoscaling -----------------------------------------------------------------------------------------------

    async def _scale(self, scaling: FleetScaling) -> None:
        """Add and remove replicas as the autoscaler decides."""
        while True:
            await self._sleep(SCALE_SECONDS)
            wanted = [each for each in self._members if each.wanted]
            serving = [each.view for each in wanted if each.view.accepting]
            count = scaling.decide(
                self.door,
                self._forecast,
                serving=serving,
                starting=len(wanted) - len(serving),
                rows=self.config.scheduler.max_running,
                targets=self.events.latency_targets(),
                steady=not self._rolling.locked(),
            )
            for _ in range(count - len(wanted)):
                self._grow(scaling)
            if count < len(wanted) and serving:
                self._shrink(self._members[replica_to_remove(serving).index])

    def _grow(self, scaling: FleetScaling) -> None:
        """Let a replica that is being drained accept requests again. If there is none, start a replica."""
        for member in self._members:
            if not member.wanted and member.alive and member.generation == self._generation:
                if member.removal is not None:
                    member.removal.cancel()
                member.wanted = True
                member.removal = None
                self._undrain(member)
                return
        off = next((each for each in self._members if each.state == "off"), None)
        if off is not None:
            off.wanted = True
            self._tasks.append(asyncio.create_task(self._start_another(off, scaling), name="start of a replica"))

    async def _start_another(self, member: _Member, scaling: FleetScaling) -> None:
        """Start a replica that was off. If it cannot start, it is off again."""
        began = self._now()
        try:
            await self._load(member)
        except Exception as error:
            member.wanted = False
            scaling.failed(member.view.index, str(error) or type(error).__name__)
            return
        scaling.started(self._now() - began)
        self._open(member)
        self._keep_alive(member)
        self._resized()

    def _shrink(self, member: _Member) -> None:
        """Send no more requests to a replica, and remove it after its last request."""
        member.wanted = False
        member.draining = True
        member.view.accepting = False
        member.removal = asyncio.create_task(self._remove(member), name=f"removal of replica {member.view.index}")
        self._tasks.append(member.removal)
        self._report_failed(self._send())  # requests that waited for this replica may go to others

    async def _remove(self, member: _Member) -> None:
        await self._drain(member, None)
        if not any(each.wanted and each.alive for each in self._members):  # the others have died meanwhile
            member.wanted = True
            member.removal = None
            self._undrain(member)
        elif member.core is not None:
            member.core.kill()

    def _switch_off(self, member: _Member) -> None:
        """Forget a replica whose process has ended, and which is not started again."""
        member.draining = False
        member.removal = None
        self.door.remove_replica(member.view)
        self._end_stranded()
        self._resized()

    def _resized(self) -> None:
        """Report that the number of replicas has changed."""
        if self._info is not None:
            self._info = self._summed(self._info)
            self.events.on_resized(self._info)

    async def _watch_silence(self) -> None:
        """Kill replicas that do not finish their steps, so that their requests can move."""
        while True:
            await self._sleep(min(1.0, self._health_timeout / 4))
            alive = [member for member in self._members if member.alive and member.core is not None]
            for member in alive if len(alive) > 1 else []:
                since = None if member.core is None else member.core.silent_since
                if member.core is not None and since is not None and self._now() - since > self._health_timeout:
                    _log.error("replica %d has not finished a step; it is killed", member.view.index)
                    member.core.kill()
