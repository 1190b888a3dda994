"""Simulated worlds of a fleet whose replicas are drained: requests move with their KV while replicas die, callers
leave, replicas are full and the disk fails.

One seed is one execution: time is virtual, and messages between the fleet and its replicas are late by chance. In each
world something happens when a move reaches a chosen stage. The model is HashLM, so one token that is lost, doubled or
computed from a wrong block changes an answer.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import random
import selectors
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.config import CacheConfig, CacheGroup, EngineConfig
from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.core import EngineCore
from chairlift.engine.core_outputs import CoreOutputs
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import InputProcessor, ModelLimits, PreparedRequest
from chairlift.engine.kv_moves import MoveOrder
from chairlift.engine.kv_store.disk import DiskFile
from chairlift.engine.kv_store.files import StoreFiles, read_secret
from chairlift.engine.kv_store.store import KVStore
from chairlift.engine.preparers import Preparers
from chairlift.engine.process.messages import Refused, Step
from chairlift.engine.process.process_client import EngineEvents, ProcessCore
from chairlift.engine.replicas import SingleProcess
from chairlift.errors import ChairliftError, ConfigError, RequestError
from chairlift.executor.local import LocalExecutor
from chairlift.fleet.fleet import Fleet
from chairlift.loading.model import load_executor
from chairlift.models.hashlm import HashLM, reference_tokens
from tests.engine.kv_store.fake_disk import FakeDisk, Faults

__all__ = ["STAGES", "TROUBLES", "Wrong", "run_world"]

_VOCAB = 17
_LENGTH = 96
_BLOCK = 4
_MOST_SECONDS = 2_000.0
"""Virtual time after which a world has not ended because it cannot."""
_MOST_OF_A_STAGE = {"fetch": 32.0, "pause": 12.0, "switch": 7.0}
"""Stage -> seconds that a move may be in it. A stream stands still while it is paused or switched."""
STAGES = ("write", "fetch", "pause", "switch")
TROUBLES = ("nothing", "source dies", "destination dies", "both die", "caller leaves", "no drain", "stuck")
_MODEL = EngineConfig.from_flat(
    {"model": "hashlm", "kv_store": "files", "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": _LENGTH}
)


class Wrong(AssertionError):
    """A request got another answer than alone, or no answer, or something was left behind."""


class _Selector(selectors.SelectSelector):
    """Lets virtual time pass instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class _Clock:
    """The loop's time, for an engine."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wait_until(self, when: float) -> None:
        raise AssertionError("a replica waits with the loop")


class _OwnLocks:
    """A disk as one process sees it: the locks of the process end with it."""

    def __init__(self, disk: FakeDisk) -> None:
        self._disk = disk
        self._locks: set[str] = set()

    def open(self, name: str, nbytes: int | None = None) -> DiskFile:
        return self._disk.open(name, nbytes)

    def lock(self, name: str) -> bool:
        found = self._disk.lock(name)
        self._locks |= {name} if found else set()
        return found

    def unlock(self, name: str) -> None:
        self._disk.unlock(name)
        self._locks.discard(name)

    def sizes(self) -> dict[str, int]:
        return self._disk.sizes()

    def written(self, name: str) -> float:
        return self._disk.written(name)

    def remove(self, name: str) -> None:
        self._disk.remove(name)

    def close(self) -> None:
        self._disk.locks -= self._locks
        self._locks.clear()


class _Replica(ProcessCore):
    """An engine that gets its orders and gives its results late."""

    pid = None
    replicas = SingleProcess()
    silent_since: float | None = None

    def __init__(self, world: _World, events: EngineEvents) -> None:
        self._world, self._events = world, events
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._outbox: collections.deque[Callable[[], None]] = collections.deque()
        self._delivered_until = 0.0
        self._disk = _OwnLocks(world.disk)
        self.is_stuck = False
        self.dead = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        try:
            return await self._start()
        except Exception as error:  # the fleet would try again for ever
            self._world.failures.append(error)
            raise

    async def _start(self) -> EngineInfo:
        rng = self._world.rng
        await asyncio.sleep(rng.choice((0.01, 0.5)))
        groups = [CacheGroup(self._world.num_blocks, window) for window in self._world.windows]
        executor = LocalExecutor(
            HashLM(groups, _BLOCK, _VOCAB, _LENGTH), num_slots=6, max_model_len=_LENGTH, block_size=_BLOCK
        )
        store = self._open_store(executor)
        self.core = EngineCore(
            executor,
            _MODEL.scheduler,
            max_model_len=_LENGTH,
            cache=CacheConfig(),
            cache_secret=b"a secret of the directory",
            clock=_Clock(),
            preparers=Preparers(kv_store=None if store is None else lambda: store),
        )
        self.core.costs.model.prefill_seconds = lambda *_: 10.0  # type: ignore[method-assign]  # loading always pays
        self.store = store
        self._pump = asyncio.create_task(self._run())
        return self._world.info

    def _open_store(self, executor: LocalExecutor) -> KVStore | None:
        try:
            files = StoreFiles(
                self._disk,
                "model",
                {},
                block_size=_BLOCK,
                block_bytes=executor.block_bytes,
                spans=[_BLOCK] * len(self._world.windows),
                nbytes=self._world.nbytes,
            )
        except ConfigError:
            return None
        now = asyncio.get_running_loop().time
        return KVStore(files, 200.0, now, unix_time=now, threaded=False)

    async def _run(self) -> None:
        rng = self._world.rng
        while not self.dead.is_set():
            await asyncio.sleep(rng.choice((0.002, 0.01, 0.03)))
            if self.is_stuck or self.dead.is_set():
                continue
            while self._inbox and rng.random() < 0.8:
                self._inbox.popleft()()
            self._world.disk.now = asyncio.get_running_loop().time()
            if self.core.has_work:
                self._report(self.core.step())
            self._report(CoreOutputs(moves=self.core.preparers.kv_moves.take_reports()))
            while self.store is not None and rng.random() < self._world.disk_speed and self.store.work():
                pass

    def _report(self, outputs: CoreOutputs | None) -> None:
        if outputs is not None and outputs != CoreOutputs():
            step = Step(outputs, self.core.stats())
            self._send(lambda: self._events.on_step(step))

    def _send(self, result: Callable[[], None]) -> None:
        """Deliver a result later, after all earlier ones."""
        loop = asyncio.get_running_loop()
        self._outbox.append(result)
        self._delivered_until = max(self._delivered_until, loop.time() + self._world.rng.choice((0.0, 0.001, 0.02)))
        loop.call_at(self._delivered_until, self._deliver)

    def _deliver(self) -> None:
        if self._outbox:
            self._outbox.popleft()()

    def add(self, request: PreparedRequest) -> None:
        self._inbox.append(lambda: self._add(request))

    def _add(self, request: PreparedRequest) -> None:
        try:
            self.core.add(request)
        except RequestError as error:
            refused = Refused(request.request_id, False, str(error))
            self._send(lambda: self._events.on_refused(refused))

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self._inbox.append(lambda: self._report(CoreOutputs(finished=self.core.abort(sequence_ids))))

    def stop(self, sequence_ids: Sequence[str]) -> None:
        self._inbox.append(lambda: self._report(CoreOutputs(finished=self.core.stop(sequence_ids))))

    def move(self, order: MoveOrder) -> None:
        self._inbox.append(lambda: self._move(order))

    def _move(self, order: MoveOrder) -> None:
        while order.stage == "pause" and (outputs := self.core.land()) is not None:
            self._report(outputs)
        self.core.preparers.kv_moves.follow(order)

    def kill(self) -> None:
        if self.dead.is_set():
            return
        self._disk.close()
        if self._world.rng.random() < 0.5:
            self._outbox.clear()
        self.dead.set()

    async def died(self) -> str:
        await self.dead.wait()
        while self._outbox:
            self._deliver()
        return "killed"

    async def close(self) -> None:
        self.kill()
        if self._pump is not None:
            await self._pump

    def watch(self, wanted: bool) -> None: ...

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None: ...

    def load_adapter(self, load: AdapterLoad) -> None: ...

    def unload_adapter(self, adapter_id: int) -> None: ...

    async def control(self, action: str) -> None:
        raise AssertionError("no world pauses")

    async def update_weights(self, source: str, version: int, in_flight: str) -> EngineInfo:
        raise AssertionError("no world replaces weights")


class _World:
    """The front end of a fleet: it collects what comes, and compares each answer with that of the request alone."""

    num_requests = 0

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.seen = collections.Counter[str]()
        faults = Faults()
        if rng.random() < 0.4:
            for field in dataclasses.fields(Faults):
                if rng.random() < 0.4:
                    setattr(faults, field.name, rng.choice((0.01, 0.1, 0.5)))
        self.disk = FakeDisk(rng, Faults())
        read_secret(self.disk, read_only=False)
        self.faults = faults
        self.disk_speed = rng.choice((0.3, 0.8, 0.99, 0.99))
        self.windows: tuple[int | None, ...] = rng.choice(((None,), (None,), (None, 6), (5,)))
        self.num_blocks = rng.choice((40, 80, 200))
        self.nbytes = rng.choice((20_000, 400_000))
        loaded = load_executor(_MODEL, lambda label, share: None).info
        self.info = dataclasses.replace(
            loaded,
            block_size=_BLOCK,
            max_model_len=_LENGTH,
            vocab_size=_VOCAB,
            num_blocks=self.num_blocks,
            pool_tokens=self.num_blocks * _BLOCK,
            capacity_tokens=self.num_blocks * _BLOCK,
        )
        self.inputs = InputProcessor(ModelLimits(_VOCAB, _LENGTH, ()), None, self.info)
        self.asked: dict[str, PreparedRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cores: dict[int, _Replica] = {}
        self.trouble = rng.choice(TROUBLES)
        self.stage = rng.choice(STAGES)
        self.is_over = False
        self.failures: list[Exception] = []
        """Errors of replicas that could not start."""

    # -- events ----------------------------------------------------------------------------------------------------

    def on_step(self, step: Step, replica: int | None = None) -> None:
        outputs = step.outputs
        for name, token in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            if name in self.tokens:
                self.tokens[name].append(token)
        for each in outputs.finished:
            if each.sequence_id in self.tokens:
                if each.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise Wrong(f"seed {self.seed}: {each.sequence_id} ends with {each.finish_reason}: {each.error}")
                self._check(each.sequence_id)

    def _check(self, name: str) -> None:
        key, _, index = name.partition("#")
        prepared = self.asked[key]
        row = SamplingRow(prepared.params, sample_seed(prepared.seed, int(index or 0)), len(prepared.prompt_token_ids))
        prompt = prepared.prompt_token_ids
        expected = reference_tokens(prompt, row, self.windows, _VOCAB, prepared.max_tokens)
        found = self.tokens.pop(name)
        if found != expected:
            raise Wrong(f"seed {self.seed}: {name} got {found}, alone it gets {expected}")
        self.seen["answers"] += 1
        if not any(each in self.tokens for each in prepared.sequence_ids):
            del self.asked[key]

    def delivered(self, request_id: str) -> list[list[int]]:
        prepared = self.asked.get(request_id)
        return [] if prepared is None else [list(self.tokens.get(each, [])) for each in prepared.sequence_ids]

    def on_moved(self, kind: str) -> None:
        self.seen[kind] += 1

    def on_lost(self, request_ids: Sequence[str], why: str) -> None:
        for name in request_ids:
            if self.asked[name].params.n == 1:
                raise Wrong(f"seed {self.seed}: {name} is lost: {why}")
            self.forget(name)

    def on_refused(self, refused: Refused) -> None:
        raise Wrong(f"seed {self.seed}: {refused.request_id} is refused: {refused.message}")

    def on_progress(self, label: str, share: float) -> None: ...

    def on_watched(self, lines: bytes, replica: int = 0) -> None: ...

    def on_updated(self, info: EngineInfo) -> None: ...

    def on_adapter(self, state: AdapterState) -> None: ...

    def on_weights(self, sequence_ids: Sequence[str], version: int) -> None: ...

    def on_resized(self, info: EngineInfo) -> None: ...

    def latency_targets(self) -> tuple[int, int]:
        return 0, 0

    # -- what happens ----------------------------------------------------------------------------------------------

    def forget(self, key: str) -> list[str]:
        """Drop a request. Returns its answers that have not ended."""
        prepared = self.asked.pop(key)
        return [name for name in prepared.sequence_ids if self.tokens.pop(name, None) is not None]

    def submit(self, number: int) -> None:
        rng = self.rng
        prompt = [rng.randrange(_VOCAB) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(
            max_tokens=rng.randrange(30 if self.trouble == "stuck" else 2, 50),
            ignore_eos=True,
            n=rng.choice((1, 1, 1, 1, 1, 2)),
            seed=number,
            temperature=rng.choice((0.0, 1.0)),
            frequency_penalty=rng.choice((0.0, 0.5)),
        )
        now = asyncio.get_running_loop().time()
        prepared = self.inputs.prepare(f"r{number}", prompt, params, now)
        self.asked[prepared.request_id] = prepared
        self.tokens |= {name: [] for name in prepared.sequence_ids}
        self.fleet.add(prepared)

    async def run(self) -> None:
        def connect(index: int, events: EngineEvents) -> ProcessCore:
            self.cores[index] = _Replica(self, events)
            return self.cores[index]

        loop = asyncio.get_running_loop()
        count = self.rng.choice((2, 2, 3))
        self.fleet = Fleet(_MODEL, self, connect, replicas=count, now=loop.time, health_timeout=3.0)
        await self.fleet.start()
        self.disk.faults = self.faults
        try:
            await self._live()
        finally:
            await self.fleet.close()
        for core in self.cores.values():
            if core._pump is not None and core._pump.exception() is not None:
                raise core._pump.exception() or Wrong("")

    async def _live(self) -> None:
        rng = self.rng
        for number in range(rng.randrange(2, 9)):
            self.submit(number)
            await asyncio.sleep(rng.choice((0.0, 0.05)))
        await asyncio.sleep(rng.choice((0.0, 0.2, 0.5)))
        members = self.fleet._replicas
        drained = rng.choice(members.everyone)
        drains = [asyncio.create_task(self._drain(drained))]
        if self.trouble != "nothing":
            drains.append(asyncio.create_task(self._make_trouble()))
        if rng.random() < 0.5:
            self.submit(100)
        until = asyncio.get_running_loop().time() + 300
        while self.asked:
            await asyncio.sleep(0.05)
            self._watch()
            if asyncio.get_running_loop().time() > until:
                raise Wrong(f"seed {self.seed}: {sorted(self.asked)} never end")
        self.is_over = True
        await asyncio.gather(*drains)
        await asyncio.sleep(1.0)
        self._watch()
        for member in members.everyone:
            core = self.cores[member.view.index]
            left = member.guests, member.former, member.view.unstarted, member.view.started
            if any(left) or (member.alive and core.core.scheduler.requests):
                raise Wrong(f"seed {self.seed}: replica {member.view.index} keeps {left}")

    def _watch(self) -> None:
        """Raise what a replica's task or its start has raised, and demand that no move takes too long."""
        for failure in self.failures:
            raise Wrong(f"seed {self.seed}: a replica cannot start: {failure!r}") from failure
        now = asyncio.get_running_loop().time()
        for key, move in self.fleet._jobs.moves._moves.items():
            if now - move.since > _MOST_OF_A_STAGE.get(move.stage, math.inf):
                raise Wrong(f"seed {self.seed}: the move of {key} is in stage {move.stage} without an end")
        for core in self.cores.values():
            if core._pump is not None and core._pump.done() and (error := core._pump.exception()) is not None:
                raise Wrong(f"seed {self.seed}: {error!r}") from error
            if core._pump is not None and not core.dead.is_set():
                core.core.scheduler.check_invariants()

    async def _drain(self, member: Any) -> None:
        members = self.fleet._replicas
        patience = self.rng.choice((20.0, 20.0, 60.0) if self.trouble == "stuck" else (0.5, 3.0, 20.0))
        if self.rng.random() < 0.5:
            try:
                await members.roll(patience)
            except ChairliftError:
                self.seen["roll failed"] += 1
            return
        self.drained = member
        await members.drain(member, self.rng.choice((None, patience)), move=True)
        if member.alive:
            members.undrain(member)

    async def _make_trouble(self) -> None:
        moves = self.fleet._jobs.moves
        while not self.is_over:
            await asyncio.sleep(self.rng.choice((0.001, 0.01)))
            move = next((each for each in moves._moves.values() if each.stage == self.stage), None)
            if move is None:
                continue
            self.seen[f"{self.trouble} at {self.stage}"] += 1
            members = self.fleet._replicas
            victims = [move.source] if self.trouble in ("source dies", "both die") else []
            victims += [move.destination] if self.trouble in ("destination dies", "both die") else []
            for victim in victims:
                if victim is not None and victim.alive and victim.core is not None and members.num_alive > 1:
                    victim.core.kill()
                    await asyncio.sleep(self.rng.choice((0.0, 0.01)))
            if self.trouble == "caller leaves":
                self.fleet.abort(self.forget(move.job.key))
            elif self.trouble == "no drain":
                moves.end(move.source)
            elif self.trouble == "stuck":
                others = [each for each in members.everyone if each.alive and each is not move.source]
                stuck = self.cores[(move.destination or others[0]).view.index] if move.destination or others else None
                if stuck is not None:
                    stuck.is_stuck = True
                    await asyncio.sleep(self.rng.choice((0.5, 7.0, 40.0)))
                    stuck.is_stuck = False
            return


def run_world(seed: int) -> collections.Counter[str]:
    """Run a world, and return what happened in it. Raises :class:`Wrong`."""
    loop = _Loop()
    failures: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception") or Wrong(str(context))))

    async def whole() -> collections.Counter[str]:
        world = _World(seed)
        await world.run()
        world.seen["faults"] += world.disk.num_faults
        return world.seen

    try:
        seen = loop.run_until_complete(asyncio.wait_for(whole(), _MOST_SECONDS))
    except TimeoutError:
        raise Wrong(f"seed {seed}: the world waits for what never comes") from None
    finally:
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
    if failures:
        raise failures[0]
    return seen
