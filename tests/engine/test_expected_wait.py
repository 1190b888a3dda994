"""Forecasts of a real engine: they come, they go, they are good, and who would wait in vain is told at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import QueueFullError
from tests.engine.test_async_engine import LONG, running

ROWS: dict[str, Any] = {"max_num_seqs": 2}


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test(), 180))  # type: ignore[operator]


def answer(tokens: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **more)  # type: ignore[arg-type]


async def until_foreseen(engine: AsyncEngine, made_after: float) -> None:
    while engine.intake.forecast is None or engine.intake.forecast.made_at < made_after:
        await asyncio.sleep(0.005)


async def end(streams: list[OutputStream]) -> None:
    for stream in streams:
        async for _ in stream:
            pass


def test_forecasts_come_under_load_and_the_wait_is_gone_with_it() -> None:
    async def test() -> None:
        async with running("hashlm:20ms", ROWS | {"scheduling_policy": "priority"}) as engine:
            assert (engine.expected_wait(), engine.line(), engine.named("r0")) == (0.0, [], [])
            streams = [await engine.submit([1, 2], answer(20), kind=OutputKind.FINAL, name=f"r{i}") for i in range(40)]
            assert engine.expected_wait() is None  # nobody has looked at the line yet
            await until_foreseen(engine, 0.0)
            wait = engine.expected_wait()
            assert wait is not None and 0.2 < wait < 60
            line = engine.line()
            assert [place.position for _, place in line] == list(range(1, len(line) + 1))
            assert [stream.name for stream, _ in line] == [f"r{i}" for i in range(40 - len(line), 40)]
            starts = [place.expected_start for _, place in line]
            assert starts == sorted(starts) and (starts[-1] or 0.0) <= wait + 0.01  # type: ignore[type-var]
            assert engine.named("r39") == [streams[39]]
            heard, engine.intake.heard_at = engine.intake.heard_at, time.monotonic() - 10
            assert engine.expected_wait() is None and engine.retry_after() >= 1
            assert [place.expected_start for _, place in engine.line()] == [None] * len(line)
            engine.intake.heard_at = heard
            for stream in streams[8:]:
                stream.abort()
            await end(streams[:8])
            assert (engine.expected_wait(), engine.line(), engine.named("r39")) == (0.0, [], [])

    run(test)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_forecasts_are_good_and_hopeless_requests_are_refused_at_once(policy: str) -> None:
    async def test() -> None:
        async with running("hashlm:20ms", ROWS | {"scheduling_policy": policy}) as engine:
            # A steady queue of 16: whenever one ends another comes.
            async def client(times: int) -> None:
                for _ in range(times):
                    await end([await engine.submit([1, 2, 3], answer(), kind=OutputKind.FINAL)])

            await asyncio.gather(*(client(4) for _ in range(18)))
            calibration = engine.intake.calibration
            assert len(calibration) >= 20
            median = calibration.quantile(0.5)
            assert median is not None and 0.2 < median < 5
            assert sum(engine.stats.forecast_error.counts) == len(calibration)

            began = time.monotonic()
            # More than enough work: the line must still be there where this process was held up.
            streams = [await engine.submit([1, 2], answer(30), kind=OutputKind.FINAL) for _ in range(40)]
            await until_foreseen(engine, began)
            wait = engine.expected_wait()
            assert wait is not None and wait > 0.5
            counted = len(engine.intake)
            with pytest.raises(
                QueueFullError, match=r"start in about .* s, but its queue_timeout allows 0\.05 s"
            ) as full:
                await engine.submit([1, 2], answer(), queue_timeout=0.05)
            assert full.value.kind == "forecast"
            assert full.value.retry_after == pytest.approx(wait - 0.05, abs=1.0)
            with pytest.raises(QueueFullError, match="its timeout allows"):
                await engine.submit([1, 2], answer(), timeout=0.05)
            with pytest.raises(QueueFullError, match="after it came, but its timeout allows 600 s"):
                await engine.submit([1, 2], answer(), timeout=600, arrival=time.monotonic() - 599.99)
            assert engine.stats.rejected == {"forecast": 3}
            assert len(engine.intake) <= counted and engine.num_requests <= 40
            # These are in another place of the line than a newcomer that only belongs to the class.
            for params in (answer(priority=-5), answer(deadline_ms=60_000)) if policy == "priority" else ():
                streams.append(await engine.submit([1, 2], params, kind=OutputKind.FINAL, queue_timeout=0.05))
            streams.append(await engine.submit([1, 2], answer(), kind=OutputKind.FINAL, queue_timeout=600))
            for stream in streams:
                stream.abort()
            while engine.stats.engine.num_running or engine.stats.engine.num_waiting:
                await asyncio.sleep(0.005)
            assert engine.expected_wait() == 0.0  # though the forecast is of before they left

    run(test)


def test_a_dead_engine_has_no_forecast() -> None:
    async def test() -> None:
        async with running("hashlm:20ms", ROWS) as engine:
            streams = [await engine.submit([1, 2], LONG) for _ in range(5)]
            await until_foreseen(engine, 0.0)
            engine.intake.calibration.add(1.0, 1.0)
            os.kill(engine.replicas.engine_pid or 0, signal.SIGKILL)
            while engine.state is EngineState.READY:
                await asyncio.sleep(0.005)
            assert (engine.intake.forecast, engine.expected_wait(), len(engine.intake.calibration)) == (None, None, 0)
            for stream in streams:
                stream.abort()

    run(test)
