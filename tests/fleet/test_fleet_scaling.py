"""A server's fleet that grows and shrinks, on a virtual clock: limits, drains, weights, sessions, and failures."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.fleet.fleet_scaling import ScaleLimits
from chairlift.metrics.stats import AutoscalingStats
from tests.e2e.oracle import expected_hashlm
from tests.fleet.replicas import FleetInProcess, fleet_of
from tests.fleet.test_fleet_client import collect, run, tokens, turns
from tests.fleet.test_fleet_weights import PARAMS, PROMPTS, Weights, settings

LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("models"))


class Clock:
    """A clock that moves only when the test moves it. Sleepers wake in the order of their times."""

    def __init__(self) -> None:
        self.time = time.monotonic()  # requests get their arrival times from the real clock
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), woken))
        await woken.wait()

    async def move(self, seconds: float, steps: int = 20) -> None:
        """Move the clock by ``seconds``. Replicas compute about ``steps`` steps in each second."""
        end = self.time + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self.time, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await turns(steps)
        self.time = end
        await turns(steps)


class World:
    """A fleet with autoscaling, and its clock. Checks the limits after each second."""

    def __init__(self, inner: FleetInProcess, clock: Clock, limits: ScaleLimits) -> None:
        self.inner, self.clock, self.limits = inner, clock, limits
        self.engine, self.fleet = inner.engine, inner.fleet

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.fleet.replicas.shown()]

    @property
    def scaling(self) -> AutoscalingStats:
        found = self.engine.replicas.autoscaling()
        assert found is not None
        return found

    async def seconds(self, count: int, steps: int = 20) -> None:
        for _ in range(count):
            await self.clock.move(1.0, steps)
            on = [each for each in self.states if each not in ("off", "draining")]
            assert self.limits.least <= len(on) <= self.limits.most
            assert sum(not each.dead.is_set() for each in self.inner.cores.values()) <= self.limits.most

    async def until(self, states: list[str], most: int = 200) -> None:
        for _ in range(most):
            if self.states == states:
                return
            await self.seconds(1)
        raise AssertionError(f"{self.states} after {most} seconds, not {states}: {self.scaling}")


@asynccontextmanager
async def scaled(
    least: int, most: int, settings: dict[str, Any] | None = None, calm: float = 20.0, **more: Any
) -> AsyncIterator[World]:
    clock, limits = Clock(), ScaleLimits(least=least, most=most, calm=calm)
    few_rows = {"max_num_seqs": 2} | (settings or {})
    async with fleet_of(least, few_rows, scaling=limits, now=clock.now, sleep=clock.sleep, **more) as world:
        yield World(world, clock, limits)


def ask(world: World, count: int, params: SamplingParams = LONG) -> list[asyncio.Task[None]]:
    """Send requests, whose answers are checked."""

    async def one(number: int) -> None:
        prompt = [number + 1, 7, 9]
        assert tokens(await collect(world.engine, prompt, params)) == expected_hashlm(prompt, params).token_ids

    return [asyncio.create_task(one(number)) for number in range(count)]


@pytest.fixture(autouse=True)
def _logs_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Let ``caplog`` see the log, also after a test whose command line has set up logging."""
    monkeypatch.setattr(logging.getLogger("chairlift"), "propagate", True)
    caplog.set_level(logging.INFO, "chairlift")


def test_the_fleet_follows_the_traffic(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scaled(1, 3) as world:
            assert world.states == ["ready", "off", "off"] and world.scaling.last_change == ""
            one = world.engine.info
            jobs = ask(world, 24)
            await world.until(["ready"] * 3)
            assert "forecast wait" in world.scaling.last_change and world.scaling.num_added == 2
            assert one is not None and world.engine.info is not None
            assert world.engine.info.num_blocks == 3 * one.num_blocks and world.engine.info.max_num_seqs == 6
            while not all(job.done() for job in jobs):
                await world.seconds(1)
            await asyncio.gather(*jobs)
            assert min(each.sent for each in world.fleet.replicas.shown()) > 2
            before = world.clock.time
            await world.until(["ready", "off", "off"])
            assert world.clock.time - before >= 30, "a calm time for each removal"
            assert world.scaling.num_removed == 2 and "load 0.00" in world.scaling.last_change
            assert world.engine.info.num_blocks == one.num_blocks and world.engine.stats.num_lost == 0
            assert world.engine.stats.engine.free_blocks <= one.num_blocks
            await asyncio.gather(*ask(world, 4))

    run(test)
    changes = [each.message for each in caplog.records if each.message.startswith("autoscaling from")]
    assert [each[: len("autoscaling from 1 to 2")] for each in changes] == [
        f"autoscaling from {a} to {b}" for a, b in ((1, 2), (2, 3), (3, 2), (2, 1))
    ]


async def one_drains(world: World) -> list[asyncio.Task[None]]:
    """Grow to two replicas with a request each, whose steps do not end, until the second one is being drained. Returns
    the two requests."""
    jobs = ask(world, 16)
    await world.until(["ready", "ready"])
    await asyncio.gather(*jobs)
    await world.seconds(1)
    world.inner.cores[0].stuck = world.inner.cores[1].stuck = True
    held = ask(world, 2)
    await turns(30)
    assert [each.unstarted for each in world.fleet.replicas.shown()] == [1, 1]
    await world.until(["ready", "draining"])
    return held


def test_a_replica_is_removed_only_after_its_last_request() -> None:
    async def test() -> None:
        async with scaled(1, 2, {"max_num_seqs": 4}, calm=5.0) as world:
            held = await one_drains(world)
            await world.seconds(30)
            assert world.states == ["ready", "draining"] and not world.inner.cores[1].dead.is_set()
            world.inner.cores[0].stuck = world.inner.cores[1].stuck = False
            await asyncio.gather(*held)
            await world.until(["ready", "off"])
            assert world.inner.cores[1].dead.is_set() and world.engine.stats.num_lost == 0

    run(test)


def test_a_rolling_restart_leaves_a_removed_replica_alone() -> None:
    async def test() -> None:
        async with scaled(1, 3, {"max_num_seqs": 4}, calm=5.0) as world:
            jobs = ask(world, 60)
            await world.until(["ready"] * 3)
            await asyncio.gather(*jobs)
            await world.until(["ready", "ready", "off"])
            rolled = asyncio.create_task(world.fleet.replicas.roll(1.0))
            while not rolled.done():
                await world.seconds(1)
            assert world.states == ["ready", "ready", "off"] and world.engine.stats.num_lost == 0
            assert [each.restarts for each in world.fleet.replicas.shown()] == [1, 1, 0]

    run(test)


def test_a_draining_replica_that_is_needed_again_comes_back() -> None:
    async def test() -> None:
        async with scaled(1, 2, {"max_num_seqs": 4}, calm=5.0) as world:
            held = await one_drains(world)
            starts, more = world.inner.starts, ask(world, 20)
            await world.until(["ready", "ready"])
            assert world.inner.starts == starts, "no process was started"
            world.inner.cores[0].stuck = world.inner.cores[1].stuck = False
            await asyncio.gather(*held, *more)
            await world.until(["ready", "off"])

    run(test)


def test_a_new_replica_has_the_newest_weights(weights: Weights) -> None:
    async def test() -> None:
        async with scaled(1, 2, settings(weights), calm=5.0) as world:
            await world.engine.update_weights(weights.new, 1)
            jobs = [asyncio.create_task(collect(world.engine, prompt, PARAMS)) for prompt in PROMPTS * 3]
            await world.until(["ready", "ready"])
            for number, answer in enumerate(await asyncio.gather(*jobs)):
                assert tokens(answer) == weights.answers[1][number % len(PROMPTS)]
            assert world.inner.cores[1].info.weight_version == 1
            await world.until(["ready", "off"])
            # A replica that is off keeps no request on its old version.
            await world.engine.update_weights(weights.old, 2)
            assert world.fleet.door.versions_changed() == [] and {
                each.version for each in world.fleet.door.replicas
            } == {2}

    run(test)


def test_sessions_of_a_removed_replica_move_once() -> None:
    async def test() -> None:
        async with scaled(1, 2, {"max_num_seqs": 4}, calm=5.0) as world:
            jobs = ask(world, 24)
            await world.until(["ready", "ready"])
            await asyncio.gather(*jobs)
            chats = [[10 + chat] * 300 for chat in range(4)]
            params = SamplingParams(max_tokens=2, ignore_eos=True)

            async def turn() -> list[int]:
                sent = [each.sent for each in world.fleet.replicas.shown()]
                for chat in chats:
                    await collect(world.engine, chat, params)
                    chat += [7] * 20
                return [each.sent - before for each, before in zip(world.fleet.replicas.shown(), sent, strict=True)]

            first = await turn()
            assert sum(first) == 4 and await turn() == first, "each chat stays where its beginning is cached"
            hits = world.engine.stats.engine.prefix_cache_hits
            await world.until(["ready", "off"])
            assert await turn() == [4, 0] and world.fleet.door.replicas[0].prefixes.matched([1]) == 0
            assert world.engine.stats.engine.prefix_cache_hits > hits or first[0] == 0
            hits = world.engine.stats.engine.prefix_cache_hits
            await turn()
            assert world.engine.stats.engine.prefix_cache_hits - hits >= 4 * 256, "all four are cached there now"

    run(test)


def test_a_replica_that_cannot_start_is_not_tried_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scaled(1, 2) as world:
            world.inner.cannot_start = "not enough memory"
            world.inner.cores[0].stuck = True
            jobs = ask(world, 6)
            await world.seconds(60)
            assert world.states == ["ready", "off"] and 2 <= world.inner.starts - 1 <= 5, "after 10, 20, 40 s"
            world.inner.cannot_start = ""
            await world.until(["ready", "ready"])
            world.inner.cores[0].stuck = False
            await asyncio.gather(*jobs)

    run(test)
    assert "replica 1, which autoscaling added, cannot start: not enough memory; next try in 10 s" in caplog.text


def test_a_draining_replica_may_die() -> None:
    async def test() -> None:
        async with scaled(1, 2, {"max_num_seqs": 4}, calm=5.0) as world:
            held = await one_drains(world)
            world.inner.cores[1].kill()
            await world.until(["ready", "off"])
            world.inner.cores[0].stuck = False
            await asyncio.gather(*held)
            assert world.engine.stats.num_lost == 0 and world.fleet.replicas.shown()[1].restarts == 0
            await world.seconds(3)
            assert world.states == ["ready", "off"]

    run(test)


def test_missed_latency_targets_add_a_replica() -> None:
    async def test() -> None:
        async with scaled(1, 2) as world:
            stats = world.engine.stats
            stats.with_deadline["default"], stats.within_deadline["default"] = 20, 20
            await world.seconds(3)
            assert world.states == ["ready", "off"]
            stats.with_deadline["default"], stats.within_deadline["default"] = 40, 35
            await world.until(["ready", "ready"], most=3)
            assert world.scaling.last_change.startswith("from 1 to 2 replicas: 35 of 40 requests met their latency")
            await world.seconds(9)
            assert world.scaling.num_added == 1

    run(test)
