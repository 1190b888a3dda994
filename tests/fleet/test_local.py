"""Replicas as processes of this machine: their processors, their memory, and the death of one of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig, ServerConfig
from chairlift.errors import ConfigError
from chairlift.fleet.local import local_replicas, processors_by_replica
from chairlift.server.http.lifecycle import start_engine
from tests.e2e.oracle import expected_hashlm
from tests.fleet.storm import storm


def test_cores_and_sockets_stay_together() -> None:
    two_sockets = [(number // 2 % 2, number // 4, number) for number in range(16)]
    assert processors_by_replica(two_sockets, 2) == [
        [number for number in range(16) if number // 2 % 2 == socket] for socket in range(2)
    ]
    hyperthreads = [(0, number % 4, number) for number in range(8)]
    assert processors_by_replica(hyperthreads, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    uneven = processors_by_replica([(0, number, number) for number in range(7)], 3)
    assert sorted(map(len, uneven)) == [2, 2, 3] and sorted(number for each in uneven for number in each) == list(
        range(7)
    )
    assert processors_by_replica([(0, 0, 0)], 2) == [[], []], "too few to divide"


def test_a_model_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'; start a server for each GPU"):
        local_replicas(EngineConfig.from_flat({"device": "cuda"}), 2)


def test_a_replica_that_is_killed_takes_no_stream_with_it() -> None:
    """Two real processes: one is killed in the middle of all streams, and a third takes its place."""

    async def test() -> None:
        config = EngineConfig.from_flat({"model": "hashlm:2ms", "max_num_seqs": 4, "num_kv_blocks": 500})
        engine = start_engine(config, ServerConfig(replicas=2), lambda label, share: None)
        try:
            await engine.wait_ready()
            assert engine.info is not None and engine.info.max_num_seqs == 8 and engine.intake.max_requests == 64
            before = engine.replicas.shown()
            pids = [each.pid for each in before if each.pid is not None]
            if len(os.sched_getaffinity(0)) > 1:
                assert not os.sched_getaffinity(pids[0]) & os.sched_getaffinity(pids[1])
            params = SamplingParams(max_tokens=150, ignore_eos=True, seed=3)
            streams = [await engine.submit([7, i], params, kind=OutputKind.FINAL) for i in range(1, 13)]
            await until(lambda: engine.stats.generation_tokens > 100)
            os.kill(pids[1], signal.SIGKILL)
            for number, stream in enumerate(streams, start=1):
                (output,) = [each async for each in stream]
                assert output.outputs[0].token_ids == expected_hashlm([7, number], params).token_ids
            await until(lambda: engine.replicas.shown()[1].state == "ready")
            assert engine.replicas.shown()[1].pid not in pids and engine.replicas.shown()[1].restarts == 1
            assert engine.stats.num_lost == 0
        finally:
            await engine.shutdown()

    bounded(test)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_replicas": 1}, "min_replicas 1 needs max_replicas"),
        ({"replicas": 2, "autoscale_delay": 5.0}, "autoscale_delay 5.0 needs max_replicas"),
        ({"autoscale_wait": 1.0}, "autoscale_wait 1.0 needs max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 must not exceed max_replicas 2"),
        ({"replicas": 3, "max_replicas": 2}, "replicas 3 must not exceed max_replicas 2"),
        ({"replicas": 2, "min_replicas": 3, "max_replicas": 4}, "must not be below min_replicas 3"),
        ({"max_replicas": 2, "restart": False}, "restart is off; leave one of the two out"),
        ({"max_replicas": 65}, "max_replicas must be a whole number from 1 to 64"),
    ],
)
def test_impossible_numbers_of_replicas_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


@pytest.mark.nightly
def test_processes_are_started_and_ended_as_traffic_demands() -> None:
    """Real processes: a burst adds a replica, and a calm time removes it. Every answer is right."""

    async def test() -> None:
        config = EngineConfig.from_flat({"model": "hashlm:5ms", "max_num_seqs": 2, "num_kv_blocks": 500})
        server = ServerConfig(min_replicas=1, max_replicas=2, autoscale_wait=0.2, autoscale_delay=3.0)
        engine = start_engine(config, server, lambda label, share: None)
        params = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)

        async def one(number: int) -> None:
            prompt = [7, number % 200 + 1]
            (output,) = [each async for each in await engine.submit(prompt, params, kind=OutputKind.FINAL)]
            assert output.outputs[0].token_ids == expected_hashlm(prompt, params).token_ids

        try:
            await engine.wait_ready()
            assert [each.state for each in engine.replicas.shown()] == ["ready", "off"]
            jobs = [asyncio.create_task(one(number)) for number in range(60)]
            await until(lambda: [each.state for each in engine.replicas.shown()] == ["ready", "ready"])
            pid = engine.replicas.shown()[1].pid
            await asyncio.gather(*jobs)
            assert engine.replicas.shown()[1].sent > 5 and pid is not None and Path(f"/proc/{pid}").exists()
            await until(lambda: sorted(each.state for each in engine.replicas.shown()) == ["off", "ready"])
            await until(lambda: sum(each.pid is not None for each in engine.replicas.shown()) == 1)
            await asyncio.gather(*map(one, range(4)))
            state = engine.replicas.autoscaling()
            assert state is not None and (state.num_added, state.num_removed) == (1, 1) and state.start_seconds > 0
            assert engine.stats.num_lost == 0
        finally:
            await engine.shutdown()

    bounded(test, 120.0)


@pytest.mark.nightly
def test_every_request_is_answered_right_or_told() -> None:
    """2,000 requests while the two processes are killed, stopped and restarted at random times."""

    async def test() -> None:
        config = EngineConfig.from_flat({"model": "hashlm:2ms", "max_num_seqs": 4, "num_kv_blocks": 500})
        server = ServerConfig(replicas=2, health_timeout=3.0, max_num_queued_reqs=4000)
        engine = start_engine(config, server, lambda label, share: None)
        try:
            await engine.wait_ready()
            ends, harms = await storm(engine, 2000, 1, ("kill", "kill", "stop", "restart"))
            assert set(ends) <= {"answered", "told", "left"} and ends["answered"] > 0.9 * ends.total(), ends
            assert harms.total() >= 3, harms
        finally:
            await engine.shutdown()

    bounded(test, 500.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def bounded(test: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), seconds)

    asyncio.run(limited())
