"""Nothing that stops requests from making progress counts as healthy, in whichever process it happens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.errors import EngineDeadError
from chairlift.outputs import OutputKind
from chairlift.sampling_params import SamplingParams
from tests.e2e.oracle import expected_hashlm
from tests.engine.test_async_engine import LONG, collect, run, running


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
    os.kill(engine.engine_pid or 0, signal.SIGKILL)


FAILURES = {
    "kill": killed,
    "connection": lost_connection,
    "exception": in_the_front(broken),
    "frame": in_the_front(ill_formed),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FAILURES)
def test_each_way_to_fail_is_seen_within_two_seconds_and_overcome(name: str) -> None:
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
            assert time.monotonic() - start < 2
            await until(lambda: engine.state is EngineState.READY)
            short = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
            answer = (await collect(engine, "abc", short, OutputKind.FINAL))[0].outputs[0]
            assert answer.token_ids == expected_hashlm(list(b"abc"), short).token_ids
            assert not engine.check_health() and engine.stats.num_restarts == 1

    run(test)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
