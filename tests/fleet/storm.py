"""Mixed requests to replicas in real processes, while the processes are killed, stopped and restarted at random
times."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chairlift.engine.async_engine import AsyncEngine
from chairlift.errors import EngineDeadError
from tests.e2e.oracle import expected_hashlm
from tests.fleet.test_fleet_client import collect, drawn, tokens

__all__ = ["parent_of", "storm"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def storm(
    engine: AsyncEngine, count: int, seed: int, harms: tuple[str, ...]
) -> tuple[Counter[str], Counter[str]]:
    """Send ``count`` requests to an engine with two or more replicas of HashLM. Returns (how the requests ended, harms
    that were done).

    Every answer is checked here. ``harms`` are some of ``kill`` (the engine's process), ``actor`` (its parent
    process), ``stop`` (SIGSTOP, until the fleet kills the silent process) and ``restart`` (of all, one by one).
    """
    rng, gate, done = random.Random(seed), asyncio.Semaphore(48), Counter[str]()

    async def one(number: int) -> str:
        async with gate:
            prompt, params = drawn(number, rng)
            leaves = rng.random() < 0.05
            try:
                if leaves:
                    stream = await engine.submit(prompt, params)
                    async for _ in stream:
                        stream.abort()
                        return "left"
                outputs = await collect(engine, prompt, params)
            except EngineDeadError as error:
                return "told" if "the replica died with the request in it" in str(error) else str(error)
            for index in range(params.n):
                expected = expected_hashlm(prompt, params, index)
                assert tokens(outputs, index) == expected.token_ids, (number, params)
                text = "".join(o.text for output in outputs for o in output.outputs if o.index == index)
                assert text == expected.text
            return "answered"

    async def harm() -> None:
        while True:
            await _until(lambda: all(each.state == "ready" for each in engine.replicas.shown()))
            base = engine.stats.generation_tokens + rng.randrange(50, 1500)
            await _until(lambda base=base: engine.stats.generation_tokens > base)
            what, victim = rng.choice(harms), rng.choice(engine.replicas.shown()).pid
            if victim is None or any(each.state != "ready" for each in engine.replicas.shown()):
                continue
            if what == "restart":
                await engine.replicas.restart(1.0)
            elif what == "stop":
                os.kill(victim, signal.SIGSTOP)
            else:
                os.kill(parent_of(victim) if what == "actor" else victim, signal.SIGKILL)
            done[what] += 1
            await _until(lambda victim=victim: all(each.pid != victim for each in engine.replicas.shown()))

    trouble = asyncio.create_task(harm())
    ends = await asyncio.gather(*(one(number) for number in range(count)))
    trouble.cancel()
    await asyncio.gather(trouble, return_exceptions=True)
    return Counter(ends), done


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
