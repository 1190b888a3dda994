"""Replicas behind one front end: answers are those of a request alone, whatever dies or is restarted meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chairlift.base.outputs import OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.errors import ConfigError, EngineDeadError, OverloadedError, ReplicaStartError, RequestError
from chairlift.fleet import members
from tests.e2e.oracle import expected_hashlm
from tests.fleet.replicas import FleetInProcess, fleet_of


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(bounded())


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in await engine.submit(prompt, params)]


def tokens(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for each in outputs for one in each.outputs if one.index == index for token in one.token_ids]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def quiet(world: FleetInProcess) -> None:
    """Until every replica has ended what was aborted."""
    while any(each.core.has_work for each in world.cores.values() if not each.dead.is_set()):
        await asyncio.sleep(0)
    assert not world.engine.num_requests and not world.engine.num_queued and not len(world.fleet.door)
    for shown in world.fleet.replicas.shown():
        assert (shown.unstarted, shown.started, shown.unstarted_tokens) == (0, 0, 0)


def drawn(number: int, rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A request of any kind."""
    length = rng.choice((3, 20, 300))
    prompt = [rng.randrange(1, 250) for _ in range(length)]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2)),
        seed=number,
        max_tokens=rng.choice((1, 7, 40)),
        temperature=rng.choice((0.0, 1.0)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        ignore_eos=rng.random() < 0.5,
        stop=["a"] if rng.random() < 0.2 else None,
    )
    return prompt, params


async def mixed(world: FleetInProcess, count: int, seed: int, trouble: Callable[[], Awaitable[None]]) -> list[str]:
    """Send ``count`` requests while ``trouble`` happens. Returns how each ended; answers are checked here."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(60)

    async def one(number: int) -> str:
        async with gate:
            prompt, params = drawn(number, rng)
            leaves = rng.random() < 0.05
            await turns(rng.randrange(10))
            try:
                stream = await world.engine.submit(prompt, params)
                outputs = []
                async for output in stream:
                    outputs.append(output)
                    if leaves:
                        stream.abort()
                        return "left"
            except EngineDeadError as error:
                return "told" if "the replica died with the request in it" in str(error) else f"{error}"
            for index in range(params.n):
                expected = expected_hashlm(prompt, params, index)
                assert tokens(outputs, index) == expected.token_ids, (number, params)
                text = "".join(o.text for output in outputs for o in output.outputs if o.index == index)
                assert text == expected.text
            return "answered"

    task = asyncio.create_task(trouble())
    ends = await asyncio.gather(*(one(number) for number in range(count)))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await quiet(world)
    return list(ends)


@pytest.mark.parametrize(
    ("count", "seed"), [(300, 1), *(pytest.param(2000, seed, marks=pytest.mark.nightly) for seed in range(3))]
)
def test_every_request_is_answered_right_or_told(count: int, seed: int) -> None:
    """Kills, rolling restarts and stopped replicas at random points. Only an answer in several parts cannot move."""

    async def test() -> None:
        rng = random.Random(-seed)
        async with fleet_of(3, health_timeout=5.0) as world:

            async def trouble() -> None:
                while True:
                    await turns(rng.randrange(20, 60))
                    alive = [each for each in world.cores.values() if not each.dead.is_set()]
                    if len(alive) < 2:
                        continue
                    what, core = rng.choice(("kill", "kill", "roll", "stop")), rng.choice(alive)
                    if what == "kill":
                        core.kill()
                    elif what == "roll":
                        await world.fleet.replicas.roll(0.001)
                    else:  # it does nothing more, until the watch finds it silent
                        core.stuck, core.silent_since = True, -1e9

            ends = await mixed(world, count, seed, trouble)
            assert set(ends) == {"answered", "told", "left"} and ends.count("answered") > 0.7 * count
            assert sum(each.restarts for each in world.fleet.replicas.shown()) > 5

    run(test)


def test_streams_of_a_dead_replica_go_on_behind_their_tokens() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=200, ignore_eos=True, seed=5, frequency_penalty=0.7, logprobs=1)
            prompt = list(b"a long answer")
            jobs = [asyncio.create_task(collect(world.engine, prompt, params)) for _ in range(6)]
            while min((len(known[0]) for known in delivered(world)), default=0) < 20 or len(delivered(world)) < 6:
                await asyncio.sleep(0)
            first = world.cores[0]
            first.kill()
            answers = await asyncio.gather(*jobs)
            expected = expected_hashlm(prompt, params).token_ids
            assert [tokens(answer) for answer in answers] == [expected] * 6
            moved = [each for each in world.cores[1].seen if each.answer_token_ids]
            assert len(moved) == 3 and all(len(each.answer_token_ids) >= 20 for each in moved)
            stats, seen = world.cores[1].core.stats(), world.cores[1].seen
            looked_up = sum(len(each.prompt_token_ids) + len(each.answer_token_ids) for each in seen)
            assert stats.prefix_cache_hits <= stats.prefix_cache_queries == looked_up
            for answer in answers:  # one entry per token, in one piece
                rows = [row for part in answer for row in part.outputs[0].logprobs or ()]
                assert len(rows) == 200
            while world.cores[0] is first:
                await asyncio.sleep(0)
            assert world.engine.state is EngineState.READY and world.engine.stats.num_lost == 0
            assert world.fleet.replicas.shown()[0].restarts == 1 and 0.2 in world.slept

    def delivered(world: FleetInProcess) -> list[list[list[int]]]:
        return [world.engine.delivered(each.request_id) for each in world.engine.requests()]

    run(test)


def test_requests_that_cannot_move_end_with_an_error_and_the_others_go_on() -> None:
    async def test() -> None:
        async with fleet_of(2, {"max_num_seqs": 4}) as world:
            params = SamplingParams(n=2, max_tokens=100, ignore_eos=True, seed=5)
            jobs = [asyncio.create_task(collect(world.engine, [1 + i, 2], params)) for i in range(4)]
            while world.engine.stats.generation_tokens < 40:
                await asyncio.sleep(0)
            world.cores[1].kill()
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            failed = [end for end in ends if isinstance(end, EngineDeadError)]
            assert len(failed) == 2 and all(end.taken for end in failed)
            for number, end in enumerate(ends):
                if not isinstance(end, BaseException):
                    for index in range(2):
                        assert tokens(end, index) == expected_hashlm([1 + number, 2], params, index).token_ids
            assert world.engine.stats.num_lost == 2 and world.engine.stats.finished["error"] == 2
            await quiet(world)

    run(test)


def test_with_the_last_replica_the_engine_dies_and_comes_back() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1)
            jobs = [asyncio.create_task(collect(world.engine, [3], params)) for _ in range(4)]
            while world.engine.stats.generation_tokens < 10:
                await asyncio.sleep(0)
            world.cores[0].kill()
            world.cores[1].kill()
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(end, EngineDeadError) for end in ends)
            while world.engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
            short = SamplingParams(max_tokens=5, seed=1)
            assert tokens(await collect(world.engine, [3], short)) == expected_hashlm([3], short).token_ids

    run(test)


def test_requests_wait_at_the_door_and_counters_survive_a_death() -> None:
    async def test() -> None:
        async with fleet_of(2, {"max_num_seqs": 2}) as world:
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
            jobs = [asyncio.create_task(collect(world.engine, [7, i], params)) for i in range(1, 41)]
            await turns(8)
            assert len(world.fleet.door) == 40 - 2 * 3, "two rows and one more each"
            assert world.engine.num_queued >= 36
            while world.engine.stats.generation_tokens < 300:
                await asyncio.sleep(0)
            steps = world.engine.stats.engine.num_steps
            assert steps > 100 and world.engine.stats.engine.running_limit == 4
            world.cores[0].kill()
            await turns(3)
            assert world.engine.stats.engine.num_steps >= steps
            await asyncio.gather(*jobs)
            assert world.engine.expected_wait() == 0.0
            sent = [each.sent for each in world.fleet.replicas.shown()]
            assert sum(sent) >= 40 and min(sent) > 8
            await quiet(world)

    run(test)


def test_the_counters_of_replicas_never_fall_and_add_up_to_the_totals() -> None:
    """A replica dies and comes back; then all die, and a new fleet starts."""

    async def test() -> None:
        async with fleet_of(2, {"max_num_seqs": 4}) as world:
            engine, before = world.engine, dict[tuple[int, str], int]()

            def check() -> None:
                found = engine.replicas.counts()
                for field in ("prompt_tokens", "cached_tokens", "generation_tokens"):
                    assert sum(getattr(each, field) for each in found.values()) == getattr(engine.stats, field), field
                for field in ("num_running", "num_steps", "num_preemptions", "prefix_cache_queries"):
                    values = [getattr(each.engine, field) for each in found.values()]
                    assert sum(values) == getattr(engine.stats.engine, field), field
                for index, each in found.items():
                    for field, value in (("steps", each.engine.num_steps), ("tokens", each.generation_tokens)):
                        assert value >= before.get((index, field), 0), (index, field)
                        before[index, field] = value

            for victims in ((0,), (0, 1), ()):
                await engine.wait_ready()
                params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
                jobs = [asyncio.create_task(collect(engine, [7, i], params)) for i in range(1, 21)]
                begin = engine.stats.generation_tokens
                while engine.stats.generation_tokens < begin + 150:
                    await asyncio.sleep(0)
                    check()
                for victim in victims:
                    world.cores[victim].kill()
                await asyncio.gather(*jobs, return_exceptions=True)
                while engine.state is not EngineState.READY or len(world.fleet.door.replicas) < 2:
                    await asyncio.sleep(0)
                check()
            assert sorted(engine.replicas.counts()) == [0, 1] and min(before.values()) > 50

    run(test)


def test_the_steps_of_every_replica_are_told_while_somebody_looks() -> None:
    """Also those of a replica that starts again meanwhile."""

    class Viewer:
        def __init__(self) -> None:
            self.lines: dict[int, list[dict[str, Any]]] = {0: [], 1: []}

        def steps(self, lines: bytes, replica: int = 0) -> None:
            self.lines[replica] += [json.loads(line) for line in lines.split(b"\n")]

        def added(self, replica: int) -> set[str]:
            changes = [change for line in self.lines[replica] for change in line.get("do", ())]
            return {change[3] for change in changes if change[0] == "add"}

    async def test() -> None:
        async with fleet_of(2) as world:
            viewer, params = Viewer(), SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
            world.engine.events.subscribe("a viewer", viewer)
            await asyncio.gather(*(collect(world.engine, [7, i], params) for i in range(1, 20)))
            for index, core in world.cores.items():
                core.tell()
                sent = {each.request_id for each in core.seen}
                assert sent and viewer.added(index) == sent
            first = world.cores[0]
            first.kill()
            while not (world.cores[0] is not first and world.fleet.replicas.shown()[0].state == "ready"):
                await asyncio.sleep(0)
            viewer.lines[0].clear()
            await asyncio.gather(*(collect(world.engine, [8, i], params) for i in range(1, 20)))
            world.cores[0].tell()
            assert viewer.lines[0][0]["key"]["after"] == 0
            assert viewer.added(0) == {each.request_id for each in world.cores[0].seen}
            world.engine.events.unsubscribe("a viewer")
            assert all(core.core.recorder is None for core in world.cores.values())

    run(test)


def test_a_rolling_restart_breaks_no_request() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            before = dict(world.cores)
            params = SamplingParams(n=2, max_tokens=60, ignore_eos=True, seed=1)
            jobs = [asyncio.create_task(collect(world.engine, [9, i], params)) for i in range(1, 30)]
            await turns(20)
            await world.fleet.replicas.roll(60.0)
            for number, answer in enumerate(await asyncio.gather(*jobs), start=1):
                assert tokens(answer, 1) == expected_hashlm([9, number], params, 1).token_ids
            assert all(world.cores[index] is not before[index] for index in (0, 1))
            assert world.engine.stats.num_lost == 0 and 0.2 not in world.slept, "no pause between the two"

    run(test)


def test_a_rolling_restart_does_not_stop_the_last_replica() -> None:
    """The other replica dies while the first one is drained, and cannot start again."""

    async def test() -> None:
        async with fleet_of(2) as world:
            first = world.cores[0]
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
            jobs = [asyncio.create_task(collect(world.engine, [9, i], params)) for i in range(1, 9)]
            await turns(20)
            roll = asyncio.create_task(world.fleet.replicas.roll(60.0))
            await turns(5)
            world.cannot_start = "no room"
            world.cores[1].kill()
            with pytest.raises(ConfigError, match="the other replicas died during the rolling restart"):
                await roll
            for number, answer in enumerate(await asyncio.gather(*jobs), start=1):
                assert tokens(answer) == expected_hashlm([9, number], params).token_ids
            assert world.cores[0] is first and not first.dead.is_set() and world.engine.stats.num_lost == 0

    run(test)


def test_a_rolling_restart_ends_if_all_replicas_die() -> None:
    """The first replica is stopped, and while it starts again the other one dies."""

    async def test() -> None:
        async with fleet_of(2) as world:
            world.start_hangs = True
            roll = asyncio.create_task(world.fleet.replicas.roll(60.0))
            first = world.cores[0]
            await turns(20)
            assert first.dead.is_set() and not roll.done()
            world.cores[1].kill()
            with pytest.raises(EngineDeadError, match="all replicas died during the rolling restart"):
                await asyncio.wait_for(roll, 10)

    run(test)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rolling_restart_ends_at_a_replica_that_cannot_start(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica keeps its process and serves on. The one that failed comes back when it can."""
    monkeypatch.setattr(members, "_LEAST_START_SECONDS", 0.02)

    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
            jobs = [asyncio.create_task(collect(world.engine, [9, i], params)) for i in range(1, 9)]
            await turns(20)
            second = world.cores[1]
            world.start_hangs = hangs
            world.cannot_start = "" if hangs else "no room for its model"
            why = "replica 0 has not started in" if hangs else "replica 0 cannot start: no room for its model"
            with pytest.raises(ReplicaStartError, match=why):
                await world.fleet.replicas.roll(60.0)
            assert world.cores[1] is second and not second.dead.is_set()
            for number, answer in enumerate(await asyncio.gather(*jobs), start=1):
                assert tokens(answer) == expected_hashlm([9, number], params).token_ids
            assert tokens(await collect(world.engine, [9, 1], params)) == expected_hashlm([9, 1], params).token_ids
            if not hangs:
                world.cannot_start = ""
                while [each.state for each in world.fleet.replicas.shown()] != ["ready", "ready"]:
                    await asyncio.sleep(0)
                await world.fleet.replicas.roll(60.0)

    run(test)


def test_a_fleet_of_one_is_not_rolled_and_keeps_its_weights() -> None:
    async def test() -> None:
        async with fleet_of(1) as world:
            with pytest.raises(ConfigError, match="needs two replicas that are alive"):
                await world.fleet.replicas.roll(1.0)
            with pytest.raises(ConfigError, match="HashLM has no weights to replace"):
                await world.engine.update_weights("somewhere", 1)
            assert tokens(await collect(world.engine, [3], SamplingParams(max_tokens=4, seed=1)))

    run(test)


def test_a_request_that_a_core_refuses_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with fleet_of(2, {"num_kv_blocks": 10}) as world:
            with pytest.raises(RequestError):
                await collect(world.engine, [1] * 200, SamplingParams(max_tokens=100, seed=1))
            good = SamplingParams(max_tokens=4, seed=1)
            assert tokens(await collect(world.engine, [3], good)) == expected_hashlm([3], good).token_ids
            await quiet(world)

    run(test)


def test_final_outputs_are_whole_after_a_move() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=80, ignore_eos=True, seed=2)
            stream = await world.engine.submit([5, 6], params, kind=OutputKind.FINAL)
            while world.engine.stats.generation_tokens < 10:
                await asyncio.sleep(0)
            next(each for each in world.cores.values() if each.seen).kill()
            (output,) = [each async for each in stream]
            assert output.outputs[0].token_ids == expected_hashlm([5, 6], params).token_ids

    run(test)


@pytest.mark.parametrize("replicas", [1, 3])
def test_tenants_share_all_replicas(replicas: int) -> None:
    """One tenant is far ahead in the queue. From the other's arrival on, both get as much, but for what replicas hold:
    their rows and one request more each."""

    async def test() -> None:
        rows = 4
        settings = {"scheduling_policy": "priority", "max_num_seqs": rows, "enable_prefix_caching": False}
        async with fleet_of(replicas, settings) as world:
            params, ended = SamplingParams(max_tokens=20, ignore_eos=True, seed=1), list[str]()

            async def one(tenant: str, number: int) -> None:
                async for _ in await world.engine.submit([7, number + 1, 3], params, tenant=tenant):
                    pass
                ended.append(tenant)

            jobs = [asyncio.create_task(one("many", number)) for number in range(40 * replicas)]
            await turns(10)
            few = 10 * replicas
            before = len(ended)
            jobs += [asyncio.create_task(one("few", number)) for number in range(few)]
            while ended.count("few") < few:
                await asyncio.sleep(0)
            others = len(ended) - before - few
            held = replicas * (rows + 1)
            assert few - held <= others <= few + 2 * held, (few, others)
            await asyncio.gather(*jobs)
            await quiet(world)

    run(test)


def test_a_full_door_says_when_to_come_back() -> None:
    """The limit counts what waits at the door and in replicas; the time is the whole fleet's, and is kept."""

    async def test() -> None:
        async with fleet_of(2, {"max_num_seqs": 2}, most_queued=12) as world:
            params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
            await asyncio.gather(*(collect(world.engine, [5, i], params) for i in range(1, 9)))
            streams = [await world.engine.submit([7, i], params) for i in range(1, 13)]
            with pytest.raises(OverloadedError) as refused:
                await world.engine.submit([9], params)
            assert 1 <= refused.value.retry_after < 60 and world.engine.num_queued == 12
            world.cores[0].kill()
            with pytest.raises(OverloadedError):
                await world.engine.submit([9], params)
            for number, stream in enumerate(streams, start=1):
                answer = [output async for output in stream]
                assert tokens(answer) == expected_hashlm([7, number], params).token_ids
            assert tokens(await collect(world.engine, [9], params)) == expected_hashlm([9], params).token_ids

    run(test)
