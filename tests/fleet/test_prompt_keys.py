"""The router's keys are those of the replicas' caches, so that it knows what they can load after a restart."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.image_spans import ImageSpan, marks
from chairlift.base.sampling_params import SamplingParams
from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.prefix_cache import PrefixCache
from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows, adapter_key
from chairlift.core.rows.images import ImageRows
from chairlift.core.scheduler.policy import FCFS
from chairlift.engine.kv_store.index import BlockIndex, Stored
from chairlift.engine.kv_store.record import Record
from chairlift.fleet.door import Door
from chairlift.fleet.routing import PREFIX_BLOCK, Pace, Replica, prefix_keys, router_from_name
from tests.fleet.replicas import fleet_of
from tests.fleet.test_fleet_client import collect, run, tokens
from tests.models.tiny import tiny_hf_model

PROMPT = [(7 * place) % 90 + 3 for place in range(5 * PREFIX_BLOCK + 9)]
SECRET = b"a secret"


@pytest.mark.parametrize("block_size", [1, 16, 128, 256])
@pytest.mark.parametrize("settings", [{}, {"cache_salt": "other"}, {"adapter_id": 3}, {"images": True}])
def test_the_keys_are_those_of_the_cache(block_size: int, settings: dict[str, Any]) -> None:
    spans = (ImageSpan(140, 70, b"k" * 32), ImageSpan(300, 3, b"l" * 32)) if settings.pop("images", False) else ()
    request = Request("a", PROMPT, max_tokens=1, images=spans, **settings)
    kinds = AdapterRows(digests={3: "digest"}), ImageRows()
    request.kinds = tuple(kind for kind in kinds if kind.has(request))
    cache = PrefixCache(block_size, [BlockPool(4)], SECRET)
    unit = max(block_size, PREFIX_BLOCK)
    whole = list(cache.keys(request, len(PROMPT) // unit * unit // block_size))
    expected = [int.from_bytes(key[:8], "little") for key in whole[unit // block_size - 1 :: unit // block_size]]
    found = prefix_keys(
        PROMPT,
        request.cache_salt,
        adapter_key(3, "digest") if request.adapter_id else b"",
        secret=SECRET,
        block_size=block_size,
        marks=(lambda start, end: marks(spans, start, end)) if spans else None,
    )
    assert found == [key for key in expected for _ in range(unit // PREFIX_BLOCK)]
    assert len(found) == (5 if unit == PREFIX_BLOCK else 4)


def stored(number: int) -> Stored:
    return Stored(0, Record(0, number, 1, 0, b"", bytes([number]) * 32, b"", b""))


def test_the_index_tells_what_has_changed() -> None:
    index = BlockIndex()
    one, two, three = (bytes([number]) * 32 for number in (1, 2, 3))
    index[0, one] = index[1, two] = stored(1)
    assert index.changes(0) == ([one], []), "all that is there, of one group"
    assert index.changes(0) == ([], [])
    index[0, two] = stored(2)
    index[0, three] = stored(3)
    del index[0, three]
    index.pop((0, one))
    added, removed = index.changes(0)
    assert added == [two] and set(removed) == {one, three}
    index.clear()
    assert index.changes(0) == ([], [two])


def door_of(count: int, routing: str) -> Door:
    pace = Pace(lambda tokens: tokens / 10_000, lambda rows: 0.01, 512)
    replicas = [Replica(i, pace, max_num_seqs=64, cache_tokens=64 * PREFIX_BLOCK) for i in range(count)]
    for replica in replicas:
        replica.opened(64 * PREFIX_BLOCK)
    return Door(replicas, router_from_name(routing), FCFS)


@pytest.mark.parametrize("routing", ["prefix", "forecast"])
def test_a_prompt_goes_where_its_beginning_can_be_loaded(routing: str) -> None:
    keys = prefix_keys(PROMPT, secret=SECRET)
    packed = struct.pack("<5Q", *keys)
    for token_seconds, home in ((1e-6, 2), (1e-3, 0)):  # computing takes 1e-4 seconds per token
        door = door_of(3, routing)
        door.replicas[2].store_changed(packed, b"", token_seconds)
        door.add(Request("a", PROMPT, max_tokens=1), keys, 0.0)
        ((request, replica),) = door.send(0.0)
        assert replica.index == home, "it is loaded only if that is faster"
        assert request.size == replica.unstarted["a"] == (len(PROMPT) if home == 0 else 9)


@pytest.mark.parametrize("routing", ["prefix", "forecast"])
def test_memory_is_preferred_to_a_disk(routing: str) -> None:
    keys = prefix_keys(PROMPT, secret=SECRET)
    door = door_of(2, routing)
    packed = struct.pack("<5Q", *keys)
    for replica in door.replicas:
        replica.store_changed(packed, b"", 1e-5)
    door.replicas[1].prefixes.add(keys)
    door.add(Request("a", PROMPT, max_tokens=1), keys, 0.0)
    assert door.send(0.0)[0][1].index == 1
    uncached, seconds = door.replicas[0].expect(keys, len(PROMPT))
    assert uncached == 9 and seconds == pytest.approx(5 * PREFIX_BLOCK * 1e-5)
    door.replicas[0].store_changed(b"", struct.pack("<2Q", *keys[3:]), 1e-5)
    assert door.replicas[0].expect(keys, len(PROMPT))[0] == 9 + 2 * PREFIX_BLOCK, "what was removed is computed"


def test_the_router_knows_what_a_restarted_replica_can_load(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2", max_position_embeddings=1024)
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "threads": 1,
        "kv_store": str(tmp_path / "store"),
        "kv_store_bytes": "64MB",
    }
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)

    async def test() -> None:
        async with fleet_of(1, settings) as world:
            answer = tokens(await collect(world.engine, PROMPT, params))
            world.cores[0].core.shutdown()
        async with fleet_of(1, settings) as world:
            view = world.fleet.door.replicas[0]
            while not view.stored:
                await asyncio.sleep(0)
            assert tokens(await collect(world.engine, PROMPT, params)) == answer
            (request,) = world.cores[0].seen
            keys = world.fleet._jobs._keys.of(request)
            assert len(keys) == 5 and view.stored.issuperset(keys)

    run(test)
