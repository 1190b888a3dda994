"""Weights that are replaced in one replica after another: a stream has one version, and a chat does not go back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from tests.fleet.replicas import FleetInProcess, fleet_of
from tests.fleet.test_fleet_client import collect, run, tokens
from tests.models.tiny import tiny_hf_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS = {"skip_tokenizer_init": True, "num_kv_blocks": 200, "max_num_seqs": 4, "dtype": "float32", "threads": 1}
PROMPTS = [[5, 9, 70 + number, 3, 21] for number in range(12)]


class Weights:
    """Two sets of weights of one network, and the answers of each alone."""

    def __init__(self, where: Path) -> None:
        self.old, self.new = (tiny_hf_model(where, "qwen2", seed=seed, tie_word_embeddings=False) for seed in (0, 1))
        self.answers = [self.alone(each) for each in (self.old, self.new)]

    def alone(self, model: Path) -> list[list[int]]:
        llm = LLM(model, kernels="torch", **SETTINGS)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("models"))


def settings(weights: Weights) -> dict[str, Any]:
    return SETTINGS | {"model": str(weights.old), "kernels": "torch"}


async def streams(world: FleetInProcess, weights: Weights) -> list[int]:
    """Version of each answer, from its tokens, which must be those of one version alone; and what it says itself."""
    answers = await asyncio.gather(*(collect(world.engine, prompt, PARAMS) for prompt in PROMPTS))
    found = []
    for number, answer in enumerate(answers):
        version = int(tokens(answer) != weights.answers[0][number])
        assert tokens(answer) == weights.answers[version][number], "one version computed the whole answer"
        assert [run for part in answer for run in part.outputs[0].weight_versions] == [(0, version)]
        found.append(version)
    return found


def test_each_stream_has_one_version_and_all_end_with_the_new(weights: Weights) -> None:
    async def test() -> None:
        assert all(a != b for a, b in zip(*weights.answers, strict=True))
        async with fleet_of(3, settings(weights)) as world:
            assert set(await streams(world, weights)) == {0}
            before = world.engine.info
            waves = [asyncio.create_task(streams(world, weights)) for _ in range(3)]
            for _ in range(5):
                await asyncio.sleep(0)
            info = await world.engine.update_weights(weights.new, 1)
            assert before is not None and info.weight_version == 1 and info.fingerprint != before.fingerprint
            assert world.engine.info is not None and world.engine.info.num_blocks == before.num_blocks
            found = [version for wave in await asyncio.gather(*waves) for version in wave]
            assert 0 in found and world.engine.stats.num_lost == 0
            assert set(await streams(world, weights)) == {1}
            assert {core.core.weight_version for core in world.cores.values()} == {1}

    run(test)


def test_a_replica_that_dies_comes_back_with_the_newest_weights(weights: Weights) -> None:
    async def test() -> None:
        async with fleet_of(2, settings(weights)) as world:
            world.cores[0].dies_over_weights = True
            first = world.cores[0]
            await world.engine.update_weights(weights.new, 1)
            await ready(world)
            assert world.cores[0] is not first and set(await streams(world, weights)) == {1}
            second = world.cores[1]
            second.kill()
            while world.cores[1] is second:
                await asyncio.sleep(0)
            await ready(world)
            assert {core.core.weight_version for core in world.cores.values()} == {1}
            assert set(await streams(world, weights)) == {1}

    run(test)


def test_weights_that_cannot_be_read_change_nothing(weights: Weights, tmp_path: Path) -> None:
    async def test() -> None:
        async with fleet_of(2, settings(weights)) as world:
            with pytest.raises(ModelLoadError, match="has neither"):
                await world.engine.update_weights(tmp_path, 1)
            assert set(await streams(world, weights)) == {0}
            assert [each.state for each in world.fleet.replicas.shown()] == ["ready", "ready"]

    run(test)


async def ready(world: FleetInProcess) -> None:
    while any(each.state != "ready" for each in world.fleet.replicas.shown()):
        await asyncio.sleep(0)
