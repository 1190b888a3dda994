"""Replicas of a fleet in this process: real engine cores with HashLM that run a step on each turn of the event loop,
and fail on command."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.adapters import AdapterLoad
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence
from chairlift.engine.grammars import Grammars
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_moves import MoveOrder
from chairlift.engine.preparers import Preparers
from chairlift.engine.process.messages import Action, Add, Move, Refused, Step, decode, encode
from chairlift.engine.process.process_client import EngineEvents, ProcessCore
from chairlift.engine.replicas import SingleProcess
from chairlift.errors import EngineDeadError, RequestError
from chairlift.fleet.fleet import Fleet
from chairlift.loading.kv_store import open_store
from chairlift.loading.model import load_executor, read_tokenizer
from chairlift.text.grammar.compiler import GrammarCompiler


class InProcess(ProcessCore):
    """One replica that runs in this process. It computes one step per turn of the event loop, unless it is
    ``stuck``."""

    pid = None
    replicas = SingleProcess()
    silent_since: float | None = None

    def __init__(self, config: EngineConfig, events: EngineEvents) -> None:
        self._config, self._events = config, events
        self.stuck = self.dies_over_weights = self.start_hangs = False
        self.dead = asyncio.Event()
        self.reason = "killed"
        self._pump: asyncio.Task[None] | None = None
        self.seen: list[PreparedRequest] = []
        self.cached: dict[str, int] = {}
        """Id of each request that has joined -> number of its tokens that were not computed."""
        self._left: list[FinishedSequence] = []

    async def start(self) -> EngineInfo:
        if self.start_hangs:
            await self.dead.wait()
        loaded = load_executor(self._config, lambda label, share: None)
        store = open_store(self._config, loaded.executor, loaded.info)
        info = loaded.info
        grammars = Grammars(
            GrammarCompiler(lambda: read_tokenizer(self._config, info.model_dir), info.vocab_size, info.eos_token_ids),
            vocab_size=info.vocab_size,
        )
        self.core = EngineCore(
            loaded.executor,
            self._config.scheduler,
            max_model_len=loaded.info.max_model_len,
            cache=self._config.cache,
            cache_secret=os.urandom(16) if store is None else store.secret,
            preparers=Preparers(grammars, kv_store=store),
        )
        self.core.preparers.kv_blocks.wait_for_store()
        self._pump = asyncio.create_task(self._run())
        self.info = dataclasses.replace(loaded.info, capacity_tokens=self.core.kv.capacity_tokens)
        return self.info

    async def _run(self) -> None:
        while not self.dead.is_set():
            await asyncio.sleep(0)
            if self.stuck:
                continue
            left, self._left = self._left, []
            self._report(CoreOutputs(finished=left))
            if (news := self.core.preparers.kv_blocks.take_news()) is not None:
                self._report(CoreOutputs(stored=[news]))
            if self.core.has_work:
                self._report(self.core.step())
                self._report(CoreOutputs(moves=self.core.preparers.kv_moves.take_reports()))

    def _report(self, outputs: CoreOutputs | None) -> None:
        """Send the results of a step, unless there are none."""
        if outputs is not None and outputs != CoreOutputs():
            self.cached.update({name: cached for name, cached, _ in outputs.joined})
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
        self._left += self.core.abort(sequence_ids)

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self._left += self.core.stop(sequence_ids)

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None:
        self.core.paused(sequence_id, tools)
        self._events.on_step(Step(CoreOutputs(), self.core.stats()))

    def move(self, order: MoveOrder) -> None:
        message = decode(encode(Move.of(order))[4:])
        assert isinstance(message, Move)
        if order.stage == "pause":
            while (outputs := self.core.land()) is not None:
                self._report(outputs)
        self.core.preparers.kv_moves.follow(message.order())

    def kill(self) -> None:
        self.dead.set()

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

    async def control(self, action: Action) -> None:
        while (outputs := self.core.land()) is not None:
            self._report(outputs)
        if action in ("pause", "resume"):
            self.core.is_paused = action == "pause"
        else:
            self.core.reset_prefix_cache(recompute=action == "recompute")

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
        self.start_hangs = False
        """Whether further replicas never end their start."""
        self.starts = 0

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            await asyncio.sleep(0)

        def connect(index: int, events: EngineEvents) -> InProcess:
            self.starts += 1
            if self.cannot_start:
                raise EngineDeadError(self.cannot_start)
            self.cores[index] = InProcess(config, events)
            self.cores[index].start_hangs = self.start_hangs
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
