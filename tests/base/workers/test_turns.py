"""A bounded line, and places that work keeps until it ends."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from chairlift.base.workers.turns import Turns
from chairlift.errors import QueueFullError


def test_a_caller_refused_by_a_full_queue_learns_how_long_the_queue_takes() -> None:
    async def main() -> None:
        loop, now = asyncio.get_running_loop(), 0.0
        loop.time = lambda: now  # type: ignore[method-assign]
        turns, works = Turns(2, 3, "works"), [loop.create_future() for _ in range(50)]

        def caller(number: int) -> asyncio.Task[None]:
            return asyncio.create_task(turns.take(lambda: works[number]))

        for begin, told in ((0, 1.0), (10, 3 * 3.0 / 2)):  # nobody knows; then each of three takes 3 s, two at a time
            callers = [caller(number) for number in range(begin, begin + 5)]
            await turns_of_the_loop()
            with pytest.raises(QueueFullError) as full:
                await turns.take(lambda: works[-1])
            assert full.value.retry_after == pytest.approx(told)
            for number in range(begin, begin + 5):
                now += 3.0 * (number - begin in (0, 2, 4))  # two end together
                works[number].set_result(None)
                await turns_of_the_loop()
            await asyncio.gather(*callers)

    asyncio.run(main())


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_line_is_bounded_and_what_its_caller_left_keeps_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        turns, works = Turns(2, 3, "works"), [asyncio.get_running_loop().create_future() for _ in range(9)]
        begun: list[int] = []

        def start(number: int) -> Any:
            begun.append(number)
            return works[number]

        callers = [asyncio.create_task(turns.take(lambda number=i: start(number))) for i in range(7)]  # type: ignore[misc]
        await turns_of_the_loop()
        assert (begun, turns.num_waiting) == ([0, 1], 3)
        for caller in callers[5:]:
            with pytest.raises(QueueFullError, match="3 works wait already"):
                await caller
        for left in (0, 2):  # one that works, and one that waits
            callers[left].cancel()
        await turns_of_the_loop()
        assert (begun, turns.num_waiting) == ([0, 1], 2)
        works[0].set_exception(ValueError("nobody waits for it"))
        works[1].set_result("done")
        assert await callers[1] == "done"
        await turns_of_the_loop()
        assert (begun, turns.num_waiting) == ([0, 1, 3, 4], 0)
        works[3].set_exception(ValueError("somebody waits for it"))
        with pytest.raises(ValueError, match="somebody"):
            await callers[3]
        works[4].set_result(4)
        assert await callers[4] == 4

    asyncio.run(main())
    gc.collect()
    assert not caplog.messages
