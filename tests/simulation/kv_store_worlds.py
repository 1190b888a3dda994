"""Simulated worlds of an engine whose KV blocks outlive it: several lives on one disk, with crashes and faults.

One seed is one execution. The model is HashLM, so one wrong block changes an answer. After each life the disk loses
some of what was not synced, and the next life begins with what is left. A life may also have a second engine that
shares the directory, and adapters whose files are replaced.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

from chairlift.base.lora_request import LoRARequest
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.config import CacheConfig, CacheGroup, LoRAConfig, SchedulerConfig
from chairlift.engine.adapters import Adapters
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.engine.kv_store.files import StoreFiles, read_secret
from chairlift.engine.kv_store.store import KVStore
from chairlift.errors import ConfigError
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import STATE, HashLM, reference_tokens
from chairlift_lab.sim.adapters import AdapterFiles, content_tag, request_for
from tests.engine.kv_store.fake_disk import FakeDisk, Faults

__all__ = ["Wrong", "run_world"]

_VOCAB = 17
_LENGTH = 64


_Asked = dict[str, tuple[list[int], SamplingParams, int]]
"""Request id -> (prompt, parameters, tag of salt and adapter) of each request that has not ended."""


class Wrong(AssertionError):
    """A request got another answer than alone, or an invariant was violated."""


@dataclasses.dataclass(slots=True)
class _World:
    seed: int
    rng: random.Random
    block_size: int
    windows: tuple[int | None, ...]
    span: int
    num_blocks: int
    beginnings: list[list[int]]
    disk: FakeDisk
    clock: VirtualClock
    seen: collections.Counter[str]
    adapters: dict[str, int] = dataclasses.field(default_factory=dict)
    """Path of an adapter -> its content."""


def run_world(seed: int) -> collections.Counter[str]:
    """Run a world, and return what happened in it. Raises :class:`Wrong`."""
    rng = random.Random(seed)
    block_size = rng.choice((2, 4))
    span = block_size * rng.choice((1, 2))
    windows = rng.choice(((None,), (None,), (None, 6), (5,), (None, STATE), (STATE,)))
    beginnings = [[rng.randrange(_VOCAB) for _ in range(rng.randrange(8, 36))] for _ in range(4)]
    faults = Faults()
    if rng.random() < 0.5:
        for field in dataclasses.fields(Faults):
            if rng.random() < 0.4:
                setattr(faults, field.name, rng.choice((0.002, 0.02, 0.2)))
    disk = FakeDisk(rng, faults)
    seen = collections.Counter[str]()
    world = _World(
        seed,
        rng,
        block_size,
        windows,
        span,
        rng.randrange(56 // block_size, 120 // block_size),
        beginnings,
        disk,
        VirtualClock(1.0),
        seen,
    )
    for life in range(rng.randrange(2, 6)):
        _live(world, life)
    seen["faults"] += disk.num_faults
    return seen


def _groups(world: _World) -> list[CacheGroup]:
    return [
        CacheGroup(world.num_blocks, None, 0, world.span) if window == STATE else CacheGroup(world.num_blocks, window)
        for window in world.windows
    ]


def _store(world: _World, model: str, executor: LocalExecutor) -> KVStore | None:
    """The store of a model; None if the directory cannot be used, which costs hits only."""
    rng = world.rng
    spans = [group.state_span or world.block_size for group in executor.cache_groups]
    try:
        files = StoreFiles(
            world.disk,
            model,
            {},
            block_size=world.block_size,
            block_bytes=executor.block_bytes,
            spans=spans,
            nbytes=rng.choice((8_000, 30_000, 200_000)),
            read_only=rng.random() < 0.1,
        )
    except ConfigError:
        world.seen["no store"] += 1
        return None
    return KVStore(files, rng.choice((300.0, 2e3, 1e9)), world.clock.now, unix_time=world.clock.now, threaded=False)


@dataclasses.dataclass(slots=True)
class _Server:
    """An engine of a life."""

    engine: Engine
    store: KVStore | None
    asked: _Asked
    tags: dict[int, int]
    """Number of an adapter that is loaded -> the tag of its content."""
    first: int
    """Largest generation of a block in the files when the engine started."""


def _server(world: _World, secret: bytes) -> _Server:
    rng = world.rng
    model = HashLM(_groups(world), world.block_size, _VOCAB, _LENGTH)
    executor = LocalExecutor(model, num_slots=4, max_model_len=_LENGTH, block_size=world.block_size)
    files = AdapterFiles()
    files.contents = world.adapters
    model.adapter_tags = files.tags
    store = _store(world, "model", executor) if secret else None
    world.seen["recovered"] += 0 if store is None else store.num_blocks
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=rng.choice((8, 24)))
    engine = Engine(
        executor,
        ModelLimits(_VOCAB, _LENGTH, ()),
        scheduler,
        cache=CacheConfig(),
        cache_secret=secret,
        clock=world.clock,
        adapters=Adapters(files, LoRAConfig(enable_lora=True, max_cpu_loras=64)),
        kv_store=None if store is None else lambda: store,
    )
    if world.seed % 2:
        engine.core.preparers.kv_blocks.piece_bytes = 1  # blocks come back while later ones are read
    engine.core.costs.model.prefill_seconds = lambda *_: 10.0  # type: ignore[method-assign]  # loading always pays
    return _Server(engine, store, {}, {}, 0 if store is None else store._generation)


def _live(world: _World, life: int) -> None:
    rng = world.rng
    try:
        secret = read_secret(world.disk, read_only=False)
    except ConfigError:
        secret = b""
    servers = [_server(world, secret) for _ in range(rng.choice((1, 1, 2)))]
    world.seen["beside"] += len(servers) - 1
    for number in range(rng.randrange(3, 12)):
        server = rng.choice(servers)
        prompt = rng.choice(world.beginnings)
        prompt = prompt[: rng.randrange(1, len(prompt) + 1)] + [rng.randrange(_VOCAB) for _ in range(rng.randrange(6))]
        params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True, n=rng.choice((1, 1, 2)), seed=number)
        name = f"{life}-{number}"
        salt = rng.choice(("", "", "other"))
        adapter = _adapter(world, server)
        server.engine.add_request(prompt, params, request_id=name, stream=False, cache_salt=salt, lora_request=adapter)
        tag = 0 if adapter is None else server.tags[adapter.lora_int_id]
        server.asked[name] = prompt, params, int.from_bytes(salt.encode()[:8], "little") ^ tag
        for _ in range(rng.randrange(4)):
            _turn(world, servers)
        if rng.random() < 0.1:
            server.engine.abort(name)
            server.asked.pop(name, None)
    for _ in range(2_000):
        if not any(each.engine.has_unfinished for each in servers):
            break
        _turn(world, servers)
    else:
        raise Wrong(f"seed {world.seed}: requests {[sorted(each.asked) for each in servers]} never end")
    _check_sharing(world, servers)
    for each in servers:
        world.seen["loaded tokens"] += each.engine.core.preparers.kv_blocks.num_tokens
        if each.store is not None:
            world.seen["written"] += each.store.num_written > 0
            world.seen["rejected"] += sum(each.store.rejected.values())
            world.seen["stopped"] += bool(each.store.stopped)
    if rng.random() < 0.3:
        for each in servers:
            each.engine.shutdown()
    world.disk.crash()


def _adapter(world: _World, server: _Server) -> LoRARequest | None:
    """The adapter of the next request, whose file may be a new one."""
    rng = world.rng
    if rng.random() < 0.6:
        return None
    number = rng.choice((1, 2))
    path = f"adapter-{number}"
    if path not in world.adapters or rng.random() < 0.1:
        world.adapters[path] = rng.choice((1, 2, 3, 4))  # the same content may come back under another name
        if rng.random() < 0.5 and number in server.tags:
            server.engine.remove_lora(number)
            del server.tags[number]
    server.tags.setdefault(number, content_tag(world.adapters[path]))
    return request_for(number, path)


def _turn(world: _World, servers: list[_Server]) -> None:
    """A step of each engine, and some of the threads' work."""
    world.clock.advance(world.rng.choice((0.001, 0.05, 0.4)))
    world.disk.now = world.clock.now()
    for each in servers:
        for output in each.engine.step():
            if output.finished and output.request_id in each.asked:
                _check(world, *each.asked.pop(output.request_id), output)
        try:
            each.engine.check_invariants()
        except Exception as error:
            raise Wrong(f"seed {world.seed}: {error}") from error
        while each.store is not None and world.rng.random() < 0.6 and each.store.work():
            pass


def _check_sharing(world: _World, servers: list[_Server]) -> None:
    """Raise :class:`Wrong` unless engines beside each other find each other's blocks after a second, on a disk without
    faults."""
    stores = [each.store for each in servers if each.store is not None]
    if len(stores) < 2 or world.disk.faults != Faults():
        return
    first = servers[0].first
    for _ in range(2):
        for each in stores:
            while each.work():
                pass
            each.poll()
        world.clock.advance(1.5)
        world.disk.now = world.clock.now()
    one, other = stores
    for name, found in list(one._index.items()):
        if found.record.generation <= first:  # a crash may have torn it
            continue
        world.seen["shared"] += 1
        if other.find(*name) is None:
            raise Wrong(f"seed {world.seed}: a block of one engine is not found by the other")


def _check(world: _World, prompt: list[int], params: SamplingParams, tag: int, output: Any) -> None:
    for answer in output.outputs:
        row = SamplingRow(params, sample_seed(params.seed or 0, answer.index), len(prompt), tag=tag)
        expected = reference_tokens(prompt, row, world.windows, _VOCAB, params.max_tokens or 0)
        if list(answer.token_ids) != expected:
            raise Wrong(
                f"seed {world.seed}: {output.request_id} got {list(answer.token_ids)}, alone it gets {expected}"
            )
    world.seen["answers"] += 1
