"""Requests move to another replica with their KV: the same bits, no token lost, doubled or other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.input_processor import PreparedRequest
from tests.fleet.replicas import FleetInProcess, fleet_of
from tests.fleet.test_fleet_client import collect, quiet, run, tokens
from tests.models.tiny import tiny_hf_model


def settings_of(model: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_num_seqs": 32,
        "threads": 1,
        "kv_store": str(tmp_path / "store"),
        "kv_store_bytes": "64MB",
        "kv_store_write_rate": "4KB",  # moves may pass it
        **more,
    }


def prompts() -> list[list[int]]:
    return [[(7 * number + place) % 90 + 3 for place in range(20 + 9 * number)] for number in range(16)]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=90, ignore_eos=True, seed=number, temperature=float(number % 2), logprobs=2)


def parts(outputs: list[RequestOutput]) -> tuple[list[int], list[Any]]:
    return tokens(outputs), [row for each in outputs for row in each.outputs[0].logprobs or ()]


async def streams(world: FleetInProcess) -> list[asyncio.Task[list[RequestOutput]]]:
    return [
        asyncio.create_task(collect(world.engine, prompt, params_of(number))) for number, prompt in enumerate(prompts())
    ]


async def begun(world: FleetInProcess, count: int) -> None:
    """Until every stream has ``count`` tokens."""
    while True:
        known = [world.engine.delivered(each.request_id) for each in world.engine.requests()]
        if len(known) == 16 and all(len(each[0]) >= count for each in known):
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("family", "fields", "settings"),
    [("qwen2", {}, {}), ("qwen2", {}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"})],
)
def test_a_drained_replica_hands_its_streams_over(
    family: str, fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_hf_model(tmp_path, family, **fields)

    async def test() -> None:
        async with fleet_of(1, settings_of(model, tmp_path / "alone", **settings)) as world:
            expected = [parts(each) for each in await asyncio.gather(*await streams(world))]
        async with fleet_of(2, settings_of(model, tmp_path, **settings)) as world:
            jobs = await streams(world)
            await begun(world, 20)
            source, other = world.cores[0], world.cores[1]
            leaving = [each.request_id for each in source.seen]
            await world.fleet.replicas.roll(600.0)
            for job, answer in zip(jobs, expected, strict=True):
                assert parts(await job) == answer
            assert world.engine.stats.moves["kv"] >= len(leaving) > 4
            assert world.engine.stats.moves["replay"] == world.engine.stats.moves["failed"] == 0
            assert world.engine.stats.num_lost == 0
            came = {each.request_id: each for each in other.seen if each.answer_token_ids}
            assert {f"{name}~1" for name in leaving} <= set(came)
            for name, each in came.items():
                known = len(each.prompt_token_ids) + len(each.answer_token_ids)
                assert known - other.cached[name] <= 16 + 2, "at most a block and the steps in flight are computed"
            await quiet(world)

    run(test)


def test_a_move_that_hangs_after_its_drain_has_ended_is_given_up(tmp_path: Path) -> None:
    """Then no replica steps, and no drain looks at the moves: only the watch over silent replicas does."""
    settings = settings_of(Path("hashlm"), tmp_path)
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=3, temperature=1.0)
    prompt = prompts()[4]
    passed = 0.0

    async def test() -> None:
        nonlocal passed
        async with fleet_of(1, settings_of(Path("hashlm"), tmp_path / "alone")) as world:
            expected = tokens(await collect(world.engine, prompt, params))
        async with fleet_of(2, settings, now=lambda: time.monotonic() + passed) as world:
            members = world.fleet.replicas
            source, other = members.everyone
            await members.drain(other, None)  # so that the request begins on the other one
            job = asyncio.create_task(collect(world.engine, prompt, params))
            while not any(len(world.engine.delivered(each.request_id)[0]) >= 20 for each in world.engine.requests()):
                await asyncio.sleep(0)
            members.undrain(other)
            destination = world.cores[other.view.index]
            add = destination.add

            def add_and_hang(request: PreparedRequest) -> None:
                add(request)
                destination.stuck = True

            destination.add = add_and_hang  # type: ignore[method-assign]
            drain = asyncio.create_task(members.drain(source, None, move=True))
            while not destination.stuck:
                await asyncio.sleep(0)
            drain.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not job.done() and world.engine.stats.moves["failed"] == 0
            passed = 6.0
            assert tokens(await asyncio.wait_for(job, 60.0)) == expected
            assert world.engine.stats.moves["failed"] == 1 and not world.engine.stats.moves["kv"]
            destination.stuck = False

    run(test)
