"""Nothing that stops requests from making progress counts as healthy, in whichever process it happens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.engine.process.messages import Loading
from chairlift.errors import EngineDeadError, QueueTimeoutError
from tests.e2e.oracle import expected_hashlm
from tests.engine.test_async_engine import LONG, collect, run, running
from tests.models.tiny import tiny_hf_model


def broken(*_: Any) -> Any:
    raise RuntimeError("a mistake of ours")


def ill_formed(*_: Any) -> Any:
    raise ValueError("a frame that cannot be read")


def in_the_front(mistake: Callable[..., Any]) -> Callable[[AsyncEngine], None]:
    def break_it(engine: AsyncEngine) -> None:
        assert engine._outputs is not None
        engine._outputs.take = mistake  # type: ignore[method-assign]

    return break_it


def lost_connection(engine: AsyncEngine) -> None:
    assert engine._client is not None and engine._client._transport is not None
    engine._client._transport.abort()


def killed(engine: AsyncEngine) -> None:
    os.kill(engine.replicas.engine_pid or 0, signal.SIGKILL)


FAILURES = {
    "kill": killed,
    "connection": lost_connection,
    "exception": in_the_front(broken),
    "frame": in_the_front(ill_formed),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FAILURES)
def test_each_way_to_fail_is_seen_at_once_and_overcome(name: str) -> None:
    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it is told by the loop, too
        async with running("hashlm:2ms") as engine:
            streams = [await engine.submit("a", LONG) for _ in range(3)]
            await anext(streams[0])
            assert not engine.check_health()
            start = time.monotonic()
            FAILURES[name](engine)
            for stream in streams:
                with pytest.raises(EngineDeadError):
                    async for _ in stream:
                        pass
            assert engine.check_health() and engine.state is EngineState.DOWN
            assert time.monotonic() - start < 20  # and not when the time for a step has passed, which is 30 s
            await until(lambda: engine.state is EngineState.READY)
            short = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
            answer = (await collect(engine, "abc", short, OutputKind.FINAL))[0].outputs[0]
            assert answer.token_ids == expected_hashlm(list(b"abc"), short).token_ids
            assert not engine.check_health() and engine.stats.num_restarts == 1

    run(test)


@pytest.mark.parametrize("was_busy", [False, True])
def test_a_stuck_engine_is_not_forgotten_when_those_who_waited_give_up(was_busy: bool) -> None:
    async def test() -> None:
        async with running("hashlm:2ms", health_timeout=0.3) as engine:
            stream = await engine.submit("a", LONG if was_busy else SamplingParams(max_tokens=1))
            await anext(stream)
            await until(lambda: was_busy or not engine.num_requests)
            os.kill(engine.replicas.engine_pid or 0, signal.SIGSTOP)
            assert engine._client is not None
            since = engine._client.silent_since or time.monotonic()
            stream.abort()
            while not engine.check_health():  # each who comes meanwhile gives up long before the time has passed
                assert time.monotonic() - since < 60
                with pytest.raises(QueueTimeoutError):
                    await anext(await engine.submit("b", LONG, queue_timeout=0.02))
            assert engine.num_requests == 0 and time.monotonic() - since >= 0.25
            assert "requests that waited were aborted" in engine.check_health()
            os.kill(engine.replicas.engine_pid or 0, signal.SIGCONT)
            await until(lambda: not engine.check_health())
            short = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
            answer = (await collect(engine, "abc", short, OutputKind.FINAL))[0].outputs[0]
            assert answer.token_ids == expected_hashlm(list(b"abc"), short).token_ids

    run(test)


def test_an_engine_without_work_is_healthy_however_long_nobody_asks() -> None:
    async def test() -> None:
        async with running("hashlm", health_timeout=0.05) as engine:
            stream = await engine.submit("a", LONG)
            await anext(stream)
            stream.abort()
            client = engine._client
            assert client is not None and client.silent_since is not None  # it has to say that it has let go
            await until(lambda: client.silent_since is None)
            idle = time.monotonic()
            await until(lambda: time.monotonic() > idle + 0.2)
            assert not engine.check_health()

    run(test)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.full
def test_an_update_of_weights_that_goes_on_is_healthy_and_one_that_stops_is_not(tmp_path: Path) -> None:
    settings = {"skip_tokenizer_init": True, "num_kv_blocks": 40, "threads": 1, "kernels": "torch"}

    async def test() -> None:
        model = str(tiny_hf_model(tmp_path, "qwen2"))
        async with running(model, settings, health_timeout=0.3) as engine:
            heard: list[str] = []
            engine.on_progress = lambda label, share: heard.append(label)  # type: ignore[method-assign]
            loaded, client, pid = time.monotonic(), engine._client, engine.replicas.engine_pid or 0
            assert client is not None
            await until(lambda: time.monotonic() > loaded + 0.2)  # what came so shortly before would be left out
            os.kill(pid, signal.SIGSTOP)
            update = asyncio.create_task(engine.update_weights(model, 1))
            await until(lambda: bool(engine.check_health()))
            client.take(Loading("replacing weights", 0.5))
            assert not engine.check_health()
            await until(lambda: bool(engine.check_health()))
            os.kill(pid, signal.SIGCONT)
            assert (await update).weight_version == 1
            assert client.silent_since is None
            assert heard[:2] == ["replacing weights", "checking weights"], "the second is the engine's own"

    run(test)
