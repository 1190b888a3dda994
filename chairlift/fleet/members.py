"""The replicas of a fleet: starts their processes, restarts those that die, and takes one after another out of service
for new weights or a restart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.adapters import AdapterState
from chairlift.engine.info import EngineInfo
from chairlift.engine.process.messages import Action, Refused, Step
from chairlift.engine.process.process_client import EngineEvents
from chairlift.engine.replicas import Replicas
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError, ReplicaStartError
from chairlift.fleet.door import Door
from chairlift.fleet.fleet_adapters import FleetAdapters
from chairlift.fleet.fleet_scaling import FleetScaling
from chairlift.fleet.jobs import Jobs
from chairlift.fleet.member import ConnectReplica, FleetEvents, Member
from chairlift.fleet.prompt_keys import PromptKeys
from chairlift.metrics.stats import AutoscalingStats, EngineStats, ReplicaStats, merge_stats

__all__ = ["Members", "RestartRules", "Sleep"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0
_SETTLED_SECONDS: Final = 60.0
"""Time in seconds after which a running replica counts as stable: if it dies later, it restarts after a short pause."""

_LONGEST_START: Final = 10.0
"""Multiple of the fleet's first start after which a rolling restart does not wait for a start any more."""
_LEAST_START_SECONDS: Final = 60.0
"""Seconds for which a rolling restart waits for a start in any case."""

_MOVE_SECONDS: Final = 0.05
"""Seconds between two looks at the moves of a replica that is drained. Most stages follow each other without one."""

Sleep = Callable[[float], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """When the processes of a fleet are restarted or killed. See :class:`~chairlift.fleet.fleet.Fleet`."""

    restart: bool
    health_timeout: float
    drain_timeout: float


class _ProcessEvents(EngineEvents):
    """Receives the events of the process of ``member``."""

    def __init__(self, members: Members, member: Member) -> None:
        self._members = members
        self._member = member

    @property
    def num_requests(self) -> int:
        return self._member.num_requests

    def on_progress(self, label: str, share: float) -> None:
        if not self._member.view.index:  # all replicas load the same model at the same time, so one report is enough
            self._members.events.on_progress(label, share)

    def on_step(self, step: Step) -> None:
        self._members.jobs.stepped(self._member, step)

    def on_refused(self, refused: Refused) -> None:
        self._members.jobs.refused(refused)

    def on_watched(self, lines: bytes) -> None:
        self._members.events.on_watched(lines, self._member.view.index)

    def on_updated(self, info: EngineInfo) -> None:
        """Note that the replica has new weights. Its prefix cache is now empty."""
        member = self._member
        member.info = info
        member.view.version = info.weight_version
        member.view.prefixes.clear()
        self._members.jobs.weights_changed(member, info.weight_version)

    def on_adapter(self, state: AdapterState) -> None:
        self._members.adapters.reported(self._member, state)


class Members(Replicas):
    """The replicas of a fleet, from the start of their processes to their end.

    ``everyone`` are the replicas that there may be; those that are ``wanted`` are started. ``connect`` makes the core
    of a replica. ``keys`` is told of each replica that has started. ``scaling`` records how long starts take; None: the
    number of replicas is fixed.
    """

    def __init__(
        self,
        config: EngineConfig,
        events: FleetEvents,
        connect: ConnectReplica,
        everyone: Sequence[Member],
        *,
        jobs: Jobs,
        door: Door,
        adapters: FleetAdapters,
        keys: PromptKeys,
        scaling: FleetScaling | None,
        rules: RestartRules,
        now: Callable[[], float],
        sleep: Sleep,
    ) -> None:
        self.events = events
        self.everyone = everyone
        self.jobs = jobs
        self.adapters = adapters
        self.keys = keys
        self.info: EngineInfo | None = None
        """Facts about the fleet as if it were one engine. None before :meth:`start`."""
        self.generation = 0
        """Number of times that the weights were replaced."""
        self.watched = False
        """Whether processes that start report their steps."""
        self.is_paused = False
        """Whether the replicas compute no steps."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Text that says how the last replica ended. It is set when no replica is alive."""
        self.rolling = asyncio.Lock()
        """Held while replicas are taken out of service one after another."""
        self._config = config
        self._connect = connect
        self._door = door
        self._scaling = scaling
        self._rules = rules
        self._now = now
        self._sleep = sleep
        self._start_seconds = 0.0
        """Seconds in which the first replicas started."""
        self._tasks: list[asyncio.Task[None]] = []

    # -- their state -----------------------------------------------------------------------------------------------

    @property
    def num_alive(self) -> int:
        return sum(each.alive for each in self.everyone)

    @property
    def single_pid(self) -> int | None:
        return None

    def shown(self) -> list[ReplicaStats]:
        return [member.shown() for member in self.everyone]

    def stats(self) -> dict[int, EngineStats]:
        return {
            member.view.index: merge_stats([member.stats, member.dead_stats])
            for member in self.everyone
            if member.state != "off" or member.dead_stats.num_steps
        }

    def autoscaling(self) -> AutoscalingStats | None:
        return None if self._scaling is None else self._scaling.shown()

    def _summed(self, info: EngineInfo) -> EngineInfo:
        """Facts about the replicas that are alive as if they were one engine. ``info`` has those that are not sums."""
        infos = [member.info for member in self.everyone if member.alive and member.info is not None]
        return dataclasses.replace(
            info,
            pool_tokens=sum(each.pool_tokens for each in infos),
            num_blocks=sum(each.num_blocks for each in infos),
            max_num_seqs=sum(each.max_num_seqs for each in infos),
            threads=sum(each.threads for each in infos),
        )

    def resized(self) -> None:
        """Report that the number of replicas has changed."""
        if self.info is not None:
            self.info = self._summed(self.info)
            self.events.on_resized(self.info)

    # -- start and end of a process --------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the first replicas. Returns facts about the fleet as if it were one engine.

        Raises the errors of :meth:`~chairlift.engine.process.process_client.ProcessClient.start` if a replica cannot
        start.
        """
        first = [each for each in self.everyone if each.wanted]
        began = self._now()
        outcomes = await asyncio.gather(*(self.load(each) for each in first), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        info = first[0].info
        if info is None:
            raise EngineDeadError("the first replica died while it was starting")
        if info.pooling is not None:
            raise ConfigError("replicas serve models that generate; start a server for each replica of this one")
        for member in first:
            self.open(member)
        if not self.jobs.movable and len(first) > 1:
            _log.warning("answers cannot continue on another replica: their bits depend on the batch or the process")
        self.run(self._watch_silence(), "watch over replicas")
        self._start_seconds = self._now() - began
        if self._scaling is not None:
            self._scaling.started(self._start_seconds)
        self.info = self._summed(info)
        return self.info

    def run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` as a task that :meth:`close` cancels."""
        self._tasks = [each for each in self._tasks if not each.done()]
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Stop all engine processes."""
        tasks = self._tasks
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cores = [member.core for member in self.everyone if member.core is not None]
        await asyncio.gather(*(core.close() for core in cores), return_exceptions=True)

    async def load(self, member: Member) -> None:
        """Start the process of a replica, and load the newest weights if they were replaced."""
        member.core = self._connect(member.view.index, _ProcessEvents(self, member))
        try:
            member.info = await member.core.start()
            member.generation = 0
            while self.info is not None and member.generation < self.generation:
                weights = (self.info.weights, self.info.weight_version)
                generation = self.generation
                member.info = await member.core.update_weights(*weights, "continue")
                member.generation = generation
            paused = False
            while paused is not self.is_paused:  # it may change while the replica answers
                paused = self.is_paused
                await member.core.control("pause" if paused else "resume")
        except BaseException:
            core = member.core
            member.core = None
            await core.close()
            raise

    def open(self, member: Member) -> None:
        """Let a replica that was off accept requests after it has loaded its model, and keep it alive."""
        self._accept(member)
        self.run(self._keep(member), f"keeper of replica {member.view.index}")

    def _accept(self, member: Member) -> None:
        """Let a replica accept requests after it has loaded its model."""
        info = member.info
        core = member.core
        if info is None or core is None:
            return
        member.alive = True
        member.draining = False
        member.num_failed_starts = 0
        member.failing.clear()
        member.busy_since = None
        known = [each.info for each in self.everyone if each.alive and each.info is not None]
        builds = {(each.weight_version, each.fingerprint) for each in known}
        self.jobs.movable = info.deterministic and len(builds) == len({version for version, _ in builds})
        self._door.add_replica(member.view)
        cached = info.pool_tokens if self._config.cache.enable_prefix_caching else 0
        member.view.opened(cached)
        self.keys.opened(info)
        member.view.version = info.weight_version
        scheduler = self._config.scheduler  # used until the process reports its first step
        member.stats = EngineStats(
            free_blocks=info.num_blocks,
            running_limit=scheduler.max_running,
            token_budget=scheduler.max_num_batched_tokens,
        )
        self.adapters.load_again(core)
        if self.watched:
            core.watch(True)
        member.opened.set()
        self.jobs.send()

    async def _keep(self, member: Member) -> None:
        """Wait for the death of a replica, move its requests, and start it again."""
        pause = _FIRST_PAUSE
        while member.core is not None:
            began = self._now()
            why = await member.core.died()
            drained = member.draining
            self._lose(member, why)
            if self.end.done() or not (self._rules.restart or drained):
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
                    await self.load(member)
                except Exception as error:
                    why = str(error) or type(error).__name__
                    member.failed_to_start(why)
                    drained = False
                    continue
                member.num_restarts += 1
                self._accept(member)

    def _lose(self, member: Member, why: str) -> None:
        """Move the requests of a dead replica to others. Requests that cannot move end with an error."""
        member.died()
        requests = self.jobs.take_from(member)
        self.adapters.lost(member)
        if self.num_alive:
            self.jobs.move(requests, member, why)
        else:
            self.end.set_result(why)  # the front end fails all requests

    def _switch_off(self, member: Member) -> None:
        """Forget a replica whose process has ended, and which is not started again."""
        member.draining = False
        member.removal = None
        self._door.remove_replica(member.view)
        self.jobs.end_stranded()
        self.resized()

    async def _watch_silence(self) -> None:
        """Kill replicas that do not finish their steps, so that their requests move, and give up moves that hang."""
        timeout = self._rules.health_timeout
        while True:
            await self._sleep(min(1.0, timeout / 4))
            self.jobs.moves.advance()  # a drain may have ended before the last of its moves
            alive = [member for member in self.everyone if member.alive and member.core is not None]
            for member in alive if len(alive) > 1 else []:
                since = None if member.core is None else member.core.silent_since
                if member.core is not None and since is not None and self._now() - since > timeout:
                    _log.error("replica %d has not finished a step; it is killed", member.view.index)
                    member.core.kill()

    # -- one after another -----------------------------------------------------------------------------------------

    async def drain(self, member: Member, patience: float | None, *, move: bool = False) -> None:
        """Send no more requests to a replica, and wait until its requests have ended, for at most ``patience``
        seconds. None: without a limit. ``move``: its requests may move to other replicas meanwhile."""
        member.draining = True
        member.view.accepting = False
        member.opened.clear()
        if member.num_requests:
            member.quiet.clear()
            moving = self.run(self._move_all(member, patience), "moves of requests") if move else None
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(member.quiet.wait(), patience)
            finally:
                if moving is not None:
                    moving.cancel()
                    self.jobs.moves.end(member)

    async def _move_all(self, member: Member, patience: float | None) -> None:
        """Move the requests of a replica, until this task is cancelled."""
        self.jobs.moves.begin(member, patience)
        while True:
            await self._sleep(_MOVE_SECONDS)
            self.jobs.moves.advance()

    def undrain(self, member: Member) -> None:
        """Let a drained replica accept requests again."""
        member.draining = False
        if member.alive:
            member.view.accepting = True
            member.opened.set()
            self.jobs.send()

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        """Replace the weights of all replicas, one replica after another, while the other replicas serve.

        Each replica first finishes its requests, within ``drain_timeout``. Requests that still run then continue with
        the new weights, as in a single engine. Raises ConfigError or ModelLoadError if the first replica cannot load
        the weights; no weights have then changed. If a later replica cannot load them, it is killed and started again
        with the new weights.
        """
        async with self.rolling:
            if self.info is None:
                raise EngineDeadError("the fleet has not started")
            target = self.generation + 1
            updated = self.info
            while (
                behind := next((m for m in self.everyone if m.wanted and m.alive and m.generation < target), None)
            ) is not None:
                if self.num_alive > 1 and not self.is_paused:  # paused requests would not end
                    await self.drain(behind, self._rules.drain_timeout)
                core = behind.core
                if core is None or not behind.alive:
                    continue
                try:
                    info = await core.update_weights(source, version, in_flight)
                except EngineDeadError:
                    await behind.lost(core)
                    continue
                except (ConfigError, ModelLoadError) as error:
                    if self.generation < target:
                        self.undrain(behind)
                        raise
                    _log.error("replica %d cannot take the new weights: %s", behind.view.index, error)
                    core.kill()
                    await behind.lost(core)
                    continue
                if self.generation < target:
                    updated = self.info.updated(source, version, info.approximations)
                self.info = updated
                self.generation = target
                behind.generation = target
                self.undrain(behind)
            if self.generation < target:
                raise EngineDeadError("the last replica died while its weights were being replaced")
            self.events.on_updated(updated)
            return updated

    async def control(self, action: Action) -> None:
        """Let all replicas follow ``action``. Replicas that start later are paused like the others. Raises ConfigError
        if a replica refuses, and EngineDeadError if none has followed."""
        if action in ("pause", "resume"):
            self.is_paused = action == "pause"
        cores = [member.core for member in self.everyone if member.alive and member.core is not None]
        outcomes = await asyncio.gather(*(core.control(action) for core in cores), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineDeadError):
                raise outcome
        if all(isinstance(outcome, EngineDeadError) for outcome in outcomes):
            raise EngineDeadError("no replica is alive")

    async def roll(self, patience: float) -> None:
        """Restart all replicas, one after another. Raises ConfigError unless at least two replicas are alive,
        EngineDeadError if all replicas die during the restart, and ReplicaStartError if one cannot start again. The
        others then serve on, with the processes that they had.

        Each replica first finishes its requests, for at most ``patience`` seconds. Its remaining requests then move to
        other replicas.
        """
        async with self.rolling:
            for member in self.everyone:
                if self.num_alive < 2:
                    raise ConfigError("a rolling restart needs two replicas that are alive; restart the server instead")
                if not member.wanted or not member.alive or member.core is None:
                    continue
                _log.info("replica %d is drained and restarted", member.view.index)
                await self.drain(member, patience, move=True)
                if member.alive and self.num_alive < 2:
                    self.undrain(member)
                    raise ConfigError("the other replicas died during the rolling restart; send it again later")
                if member.core is not None:
                    member.core.kill()
                await self._reopened(member)

    async def _reopened(self, member: Member) -> None:
        """Wait until a replica is alive and accepts requests. Raises EngineDeadError if all replicas die instead, and
        ReplicaStartError if this one cannot start."""
        seconds = max(_LEAST_START_SECONDS, _LONGEST_START * self._start_seconds)
        opened = asyncio.create_task(member.opened.wait())
        failing = asyncio.create_task(member.failing.wait())
        ends: list[asyncio.Future[Any]] = [opened, failing, self.end]
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
            failing.cancel()
        if member.opened.is_set():
            return
        if self.end.done():
            raise EngineDeadError(f"all replicas died during the rolling restart: {self.end.result()}")
        why = f"cannot start: {member.failure}" if member.failing.is_set() else f"has not started in {seconds:.0f} s"
        raise ReplicaStartError(
            f"the rolling restart has ended because replica {member.view.index} {why}; it is tried again, and the"
            f" {self.num_alive} other replicas serve on. Mend what it needs, and restart again when all are ready"
        )
