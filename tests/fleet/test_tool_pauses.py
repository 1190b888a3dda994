"""A conversation that pauses for a tool, with several replicas: the one that has its blocks learns of the pause."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chairlift.base.sampling_params import SamplingParams
from tests.fleet.replicas import fleet_of
from tests.fleet.test_fleet_client import collect, quiet, run, tokens
from tests.fleet.test_moves import settings_of

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)


def test_the_replica_of_the_turn_learns_of_its_pause_and_gets_the_next_turn() -> None:
    settings = {"model": "hashlm", "skip_tokenizer_init": True, "cache_eviction": "lease"}

    async def test() -> None:
        async with fleet_of(2, settings) as world:
            prompts = [[number + 5] * 100 for number in range(4)]
            answers = await asyncio.gather(*(collect(world.engine, prompt, PARAMS) for prompt in prompts))
            owner = {each.request_id: index for index, core in world.cores.items() for each in core.seen}
            names = [answer[-1].request_id for answer in answers]
            assert set(owner.values()) == {0, 1}
            for name in names[:3]:
                world.engine.paused(name, ["search"])
            world.engine.paused("unknown", ["search"])
            rules = {index: core.core.kv.eviction for index, core in world.cores.items()}
            for index, rule in rules.items():
                expected = {name for name in names[:3] if owner[name] == index}
                assert {turn.request_id for turn in rule.turns.paused} == expected
            stats = world.engine.stats.engine
            assert (stats.num_pauses, stats.pauses_by_tool) == (3, {"search": 3})
            assert stats.leased_blocks["3"] == sum(
                each.num_by_level[3] for rule in rules.values() if (each := rule.leases())
            )
            longer = [*prompts[0], *tokens(answers[0]), 9, 9]
            (*_, last) = await collect(world.engine, longer, PARAMS)
            assert owner[names[0]] == next(
                i for i, core in world.cores.items() if core.seen[-1].prompt_token_ids == longer
            )
            assert last.metrics is not None and last.metrics.resumed is not None
            assert (last.metrics.resumed.sequence_id, last.metrics.resumed.cache) == (names[0], "kept")
            assert world.engine.stats.engine.turns_by_cache == {"kept": 1}
            await quiet(world)

    run(test)


def test_a_turn_that_has_moved_pauses_at_its_new_replica(tmp_path: Path) -> None:
    settings = {**settings_of(Path("hashlm"), tmp_path), "cache_eviction": "lease"}
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=3)

    async def test() -> None:
        async with fleet_of(2, settings) as world:
            members = world.fleet.replicas
            job = asyncio.create_task(collect(world.engine, [8] * 40, params))
            while not any(len(world.engine.delivered(each.request_id)[0]) >= 20 for each in world.engine.requests()):
                await asyncio.sleep(0)
            source = next(index for index, core in world.cores.items() if core.seen)
            await members.drain(members.everyone[source], None, move=True)
            outputs = await job
            assert world.engine.stats.moves["kv"] == 1
            world.engine.paused(outputs[-1].request_id, ["search"])
            assert world.cores[source].core.kv.eviction.num_pauses == 0
            assert world.cores[1 - source].core.kv.eviction.num_pauses == 1
            members.undrain(members.everyone[source])
            await quiet(world)

    run(test)
