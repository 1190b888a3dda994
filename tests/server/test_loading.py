"""Requests that wait until their KV is read from a slow disk, as the server shows them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.engine.kv_store.disk import DiskFile, OsDisk
from chairlift.engine.process.process_client import EngineEvents
from chairlift.fleet.fleet import Fleet
from chairlift.loading.model import read_tokenizer
from chairlift.server.http.app import make_app
from tests.engine.border import Border
from tests.server.fake_engine import make_state

PROMPT = [number * 5 % 90 + 3 for number in range(200)]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
BYTES_PER_SECOND = 100.0


class SlowDisk(OsDisk):
    """A disk whose blocks do not come before the gate is open."""

    gate = threading.Event()

    def open(self, name: str, nbytes: int | None = None) -> DiskFile:
        file = super().open(name, nbytes)
        read = file.read

        def wait_and_read(at: int, count: int) -> bytes:
            assert self.gate.wait(120)
            return read(at, count)

        if "/blocks-" in name:
            file.read = wait_and_read  # type: ignore[method-assign]
        return file


class Process(Border):
    """An engine behind a connection that works well, and for which loading is always faster than computing."""

    def _change(self) -> None: ...

    async def start(self) -> Any:
        info = await super().start()
        blocks = self.core.preparers.kv_blocks
        assert blocks.store is not None
        blocks.store.bytes_per_second = BYTES_PER_SECOND
        blocks._compute_seconds = lambda num_tokens: 1e6
        return info


@contextlib.asynccontextmanager
async def engine_of(directory: Path, replicas: int) -> AsyncIterator[AsyncEngine]:
    """An engine with a store. With 0 replicas it is one process without a router."""
    settings = {"model": "hashlm", "num_kv_blocks": 64, "kv_store": str(directory), "kv_store_bytes": "16MB"}
    config = EngineConfig.from_flat({**settings, "skip_tokenizer_init": True})

    def process(index: int, events: EngineEvents) -> Process:
        return Process(config, events, random.Random(index), Counter())

    def connect(engine: AsyncEngine) -> Any:
        return Fleet(config, engine, process, replicas=replicas) if replicas else process(0, engine)

    engine = AsyncEngine.start(config, read_tokenizer=read_tokenizer, connect=connect)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        SlowDisk.gate.set()
        await engine.shutdown()


async def answer(engine: AsyncEngine) -> tuple[list[int], int]:
    """The tokens, and the number of prompt tokens whose KV was not computed."""
    found: list[int] = []
    async for output in await engine.submit(PROMPT, PARAMS):
        found += output.outputs[0].token_ids
    return found, output.num_cached_tokens or 0


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_request_is_shown_as_loading_while_the_disk_is_slow(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.loading.kv_store.OsDisk", SlowDisk)

    async def test() -> None:
        SlowDisk.gate.set()
        async with engine_of(tmp_path, replicas) as engine:
            expected, _ = await answer(engine)
        SlowDisk.gate.clear()
        async with engine_of(tmp_path, replicas) as engine:
            transport = httpx.ASGITransport(make_app(make_state(engine)))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

                async def shown(path: str) -> list[dict[str, Any]]:
                    await asyncio.sleep(0)  # a reply of this client lets nobody else run
                    return list((await client.get(path)).raise_for_status().json()["requests"])

                job = asyncio.create_task(answer(engine))
                for _ in range(2_000):
                    if [each["status"] for each in await shown("/v1/requests")] == ["loading"]:
                        break
                (request,), (queued,) = await shown("/v1/requests"), await shown("/v1/queue")
                for each in request, queued:
                    assert 1.0 < each["expected_load_seconds"] < 1e5
                    assert each["expected_start_seconds"] >= each["expected_load_seconds"] - 0.01
                SlowDisk.gate.set()
                tokens, cached = await job
                assert tokens == expected and cached >= 192
                assert not await shown("/v1/requests") and not await shown("/v1/queue")

    asyncio.run(test())
