"""Replicas are paused together: running answers lose nothing, and a replica that starts meanwhile is paused, too."""

from __future__ import annotations

import asyncio

from chairlift.base.sampling_params import SamplingParams
from tests.e2e.oracle import expected_hashlm
from tests.fleet.replicas import fleet_of
from tests.fleet.test_fleet_client import collect, run, tokens, turns

PROMPT = list(b"a long answer")


def test_paused_replicas_go_on_with_the_same_tokens() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=200, ignore_eos=True, seed=5)
            jobs = [asyncio.create_task(collect(world.engine, PROMPT, params)) for _ in range(6)]
            while sum(len(core.seen) for core in world.cores.values()) < 6:
                await asyncio.sleep(0)
            await turns(20)
            generation = world.engine.generation
            await generation.pause()
            steps = [core.core.stats().num_steps for core in world.cores.values()]
            late = asyncio.create_task(collect(world.engine, PROMPT, params))
            world.cores[0].kill()
            while world.fleet.replicas.shown()[0].restarts < 1:
                await asyncio.sleep(0)
            await turns(50)
            assert all(core.core.is_paused for core in world.cores.values())
            assert world.cores[1].core.stats().num_steps == steps[1] and not any(job.done() for job in (*jobs, late))
            await generation.reset_prefix_cache(recompute=True)
            await generation.resume()
            found = await asyncio.gather(*jobs, late)
            assert [tokens(each) for each in found] == [expected_hashlm(PROMPT, params).token_ids] * 7

    run(test)


def test_an_abort_ends_requests_of_all_replicas() -> None:
    async def test() -> None:
        async with fleet_of(2) as world:
            params = SamplingParams(max_tokens=2000, ignore_eos=True, seed=5, n=2)
            jobs = [asyncio.create_task(collect(world.engine, PROMPT, params)) for _ in range(30)]  # some wait
            await turns(100)
            await world.engine.generation.pause("abort")
            found = await asyncio.gather(*jobs)
            assert {answer.finish_reason for each in found for answer in each[-1].outputs} == {"abort"}
            assert not world.engine.num_requests and not world.engine.num_queued
            expected = expected_hashlm(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True, seed=5)).token_ids
            assert all(tokens(each)[:300] == expected[: len(tokens(each))] for each in found)
            await world.engine.generation.resume()

    run(test)
