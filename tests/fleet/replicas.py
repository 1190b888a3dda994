"""Replicas of a fleet in this process: real engine cores with HashLM that run a step on each turn of the event loop,
and fail on command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.adapters import AdapterLoad
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.core import EngineCore
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.process.messages import Add, Refused, Step, decode, encode
from chairlift.engine.process.process_client import EngineEvents, RemoteCore
from chairlift.errors import EngineDeadError, RequestError
from chairlift.fleet.fleet import Fleet
from chairlift.loading.model import load_executor, read_tokenizer
from chairlift.metrics.stats import ReplicaStats


class InProcess(RemoteCore):
    """One replica that runs in this process. It computes one step per turn of the event loop, unless it is
    ``stuck``."""

    pid = None
    silent_since: float | None = None

    def __init__(self, config: EngineConfig, events: EngineEvents) -> None:
        self._config, self._events = config, events
        self.stuck = self.dies_over_weights = False
        self.dead = asyncio.Event()
        self.reason = "killed"
        self._pump: asyncio.Task[None] | None = None
        self.seen: list[PreparedRequest] = []

    async def start(self) -> EngineInfo:
        loaded = load_executor(self._config, lambda label, share: None)
        self.core = EngineCore(
            loaded.executor,
            self._config.scheduler,
            max_model_len=loaded.max_model_len,
            cache=self._config.cache,
            cache_secret=os.urandom(16),
        )
        self._pump = asyncio.create_task(self._run())
        self.info = loaded.info(self._config, self.core.kv.capacity_tokens)
        return self.info

    async def _run(self) -> None:
        while not self.dead.is_set():
            await asyncio.sleep(0)
            if not self.stuck and self.core.has_work and (outputs := self.core.step()) is not None:
                self._events.on_step(Step(outputs, self.core.stats()))
                self.tell()

    def tell(self) -> None:
        """Send the lines that the step recorder has written, as an engine process does."""
        if self.core.recorder is not None and (lines := self.core.recorder.take()):
            self._events.on_watched(lines)

    def add(self, request: PreparedRequest) -> None:
        message = decode(encode(Add.of(request))[4:])
        assert isinstance(message, Add)
        self.seen.append(message.request())
        try:
            self.core.add(self.seen[-1])
        except RequestError as error:
            self._events.on_refused(Refused(request.request_id, False, str(error)))

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self.core.abort(sequence_ids)

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self.core.stop(sequence_ids)

    def shown(self) -> list[ReplicaStats]:
        return []

    def kill(self) -> None:
        self.dead.set()

    async def roll(self, patience: float) -> None:
        raise NotImplementedError

    async def died(self) -> str:
        await self.dead.wait()
        return self.reason

    async def close(self) -> None:
        self.dead.set()
        if self._pump is not None:
            await self._pump

    def watch(self, wanted: bool) -> None:
        self.core.watch(wanted)

    def load_adapter(self, load: AdapterLoad) -> None: ...

    def unload_adapter(self, adapter_id: int) -> None: ...

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        while (outputs := self.core.land()) is not None:
            self._events.on_step(Step(outputs, self.core.stats()))
        if self.dies_over_weights:
            self.kill()
            raise EngineDeadError("killed")
        self.core.update_weights(source, version, in_flight)
        self.info = self.info.updated(source, version, self.info.approximations)
        self._events.on_updated(self.info)
        return self.info


class FleetInProcess:
    """A front end over replicas in this process. ``cores[i]`` is the current core of replica i."""

    def __init__(self, replicas: int, settings: dict[str, Any], most_queued: int = 10_000, **more: Any) -> None:
        config = EngineConfig.from_flat({"model": "hashlm", "max_num_seqs": 8, "num_kv_blocks": 2000} | settings)
        self.cores: dict[int, InProcess] = {}
        self.slept: list[float] = []
        self.cannot_start = ""
        """Message with which further replicas fail to start."""
        self.starts = 0

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            await asyncio.sleep(0)

        def connect(index: int, events: EngineEvents) -> InProcess:
            self.starts += 1
            if self.cannot_start:
                raise EngineDeadError(self.cannot_start)
            self.cores[index] = InProcess(config, events)
            return self.cores[index]

        def make(engine: AsyncEngine) -> Fleet:
            self.fleet = Fleet(config, engine, connect, replicas=replicas, **({"sleep": sleep} | more))
            return self.fleet

        self.engine = AsyncEngine.start(
            config, read_tokenizer=read_tokenizer, connect=make, max_queued_requests=most_queued
        )


@asynccontextmanager
async def fleet_of(replicas: int, settings: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[FleetInProcess]:
    world = FleetInProcess(replicas, settings or {}, **more)
    try:
        await world.engine.wait_ready()
        yield world
    finally:
        await world.engine.shutdown()
