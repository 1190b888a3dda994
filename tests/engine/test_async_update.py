"""Other weights for an engine in a process of its own: between two steps, told apart, and not lost with the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, ConfigError, ModelLoadError, SamplingParams
from chairlift.base.outputs import CompletionOutput, OutputKind, RequestOutput
from chairlift.errors import EngineDeadError, RequestError
from tests.models.tiny import tiny_hf_model

PROMPT = [5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70, 11, 12, 99, 4] * 3
SETTINGS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "num_kv_blocks": 1000, "max_num_seqs": 4, "dtype": "float32"},
    **{"threads": 1, "kernels": "torch"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one network, with room for answers that no update comes too late for."""
    where = tmp_path_factory.mktemp("models")
    old, new = (tiny_hf_model(where, "qwen2", seed=seed, max_position_embeddings=8192) for seed in (0, 1))
    return old, new


def params(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def alone(model: Path, prompt: list[int], max_tokens: int = 12) -> list[int]:
    return LLM(model, **SETTINGS).generate([prompt], params(max_tokens))[0].outputs[0].token_ids


async def answer(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
    (output,) = [each async for each in llm.generate(prompt, params(), kind=OutputKind.FINAL)]
    return output


async def until(outputs: AsyncIterator[RequestOutput], version: int, count: int) -> CompletionOutput:
    """The answer so far, when it has so many tokens of a version."""
    async for output in outputs:
        newest = output.outputs[0]
        if newest.weight_versions[-1][1] == version and len(newest.token_ids) >= newest.weight_versions[-1][0] + count:
            return newest
    raise AssertionError(f"there were not {count} tokens of version {version}")


def test_running_requests_go_on_and_their_tokens_tell_by_whom(models: tuple[Path, Path]) -> None:
    old, new = models

    async def test() -> None:
        async with AsyncLLM(old, **SETTINGS) as llm:
            before = llm.info
            assert (await answer(llm, PROMPT[::-1])).outputs[0].weight_versions == [(0, 0)]
            assert (await answer(llm, PROMPT[::-1])).num_cached_tokens > 0
            running = [llm.generate([*PROMPT, n], params(4000)) for n in range(2)]
            deltas = llm.generate([1, 2, 3], params(4000), kind=OutputKind.DELTA)
            await asyncio.gather(*(until(each, 0, 5) for each in running))
            first = await anext(deltas)
            info = await llm.update_weights(new, 3, in_flight="recompute")
            assert (info.weight_version, llm.info) == (3, info)
            assert info.fingerprint not in ("", before.fingerprint)
            for n, outputs in enumerate(running):
                so_far = await until(outputs, 3, 10)
                (_, then), (start, now) = so_far.weight_versions
                assert (then, now) == (0, 3)
                prefix = [*PROMPT, n, *so_far.token_ids[:start]]
                assert so_far.token_ids[start : start + 10] == alone(new, prefix, 10)
            told, tokens = list(first.outputs[0].weight_versions), len(first.outputs[0].token_ids)
            async for delta in deltas:
                for run in delta.outputs[0].weight_versions:
                    assert tokens <= run[0] < tokens + len(delta.outputs[0].token_ids), "with the tokens it begins with"
                told += delta.outputs[0].weight_versions
                tokens += len(delta.outputs[0].token_ids)
                if len(told) == 2:
                    break
            assert [version for _, version in told] == [0, 3], "each is told once"
            for each in (*running, deltas):
                await each.aclose()  # type: ignore[attr-defined]
            again = await answer(llm, PROMPT[::-1])
            assert (again.num_cached_tokens, again.outputs[0].weight_versions) == (0, [(0, 3)])
            assert again.outputs[0].token_ids == alone(new, PROMPT[::-1])

    asyncio.run(test())


def test_weights_that_cannot_be_served_change_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny_hf_model(tmp_path, "qwen2", intermediate_size=80, max_position_embeddings=8192)
    old, new = models

    async def test() -> None:
        async with AsyncLLM(old, **SETTINGS) as llm:
            info = await llm.update_weights(old, 2)
            with pytest.raises(ModelLoadError, match=r"mlp.*has shape"):
                await llm.update_weights(other, 3)
            with pytest.raises(ModelLoadError):
                await llm.update_weights(tmp_path / "nowhere", 3)
            with pytest.raises(ModelLoadError, match="cannot read"):  # as where this process may not enter
                await llm.update_weights("n" * 300, 3)
            with pytest.raises(RequestError, match=r"UTF-8.*\\udcff"):  # and no answer is waited for, now or later
                await llm.update_weights(tmp_path / os.fsdecode(b"\xff"), 3)
            assert llm._engine is not None and llm._engine._client is not None
            assert llm._engine._client.silent_since is None
            wrong: list[tuple[Any, Any, str, str]] = [
                (new, 1, "continue", "at least 2"),
                (new, "3", "continue", "got '3'"),
                (new, 3, "stop", "got 'stop'"),
                ({"a": 1}, 3, "continue", "tensors do not cross"),
            ]
            for source, version, in_flight, words in wrong:
                with pytest.raises(ConfigError, match=words):
                    await llm.update_weights(source, version, in_flight=in_flight)
            both = await asyncio.gather(
                llm.update_weights(new, 9), llm.update_weights(old, 5), return_exceptions=True
            )  # the second finds the first before it
            assert isinstance(both[1], ConfigError) and "at least 9" in str(both[1])
            assert llm.info.weight_version == 9
            assert llm.info.fingerprint != info.fingerprint
            assert (await answer(llm, PROMPT)).outputs[0].token_ids == alone(new, PROMPT)

    asyncio.run(test())


def test_a_caller_who_leaves_changes_no_tag(models: tuple[Path, Path]) -> None:
    async def test() -> None:
        async with AsyncLLM(models[0], **SETTINGS) as llm:
            left = asyncio.create_task(llm.update_weights(models[1], 1))
            await asyncio.sleep(0)
            left.cancel()
            info = await llm.update_weights(models[1], 2)
            assert info.weight_version == llm.info.weight_version == 2
            assert (await answer(llm, PROMPT)).outputs[0].weight_versions == [(0, 2)]

    asyncio.run(test())


@pytest.mark.full
def test_an_engine_that_died_comes_back_with_its_newest_weights(models: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(models[1], tmp_path / "newest")

    async def test() -> None:
        async with AsyncLLM(models[0], **SETTINGS) as llm:
            info = await llm.update_weights(tmp_path / "newest", 7)
            assert llm._engine is not None and llm._engine.replicas.engine_pid is not None
            os.kill(llm._engine.replicas.engine_pid, signal.SIGKILL)
            with contextlib.suppress(EngineDeadError):
                while True:
                    await answer(llm, PROMPT)
            while llm._engine.state != "ready":
                await asyncio.sleep(0.01)
            assert llm.info == info
            output = (await answer(llm, PROMPT)).outputs[0]
            assert (output.weight_versions, output.token_ids) == ([(0, 7)], alone(models[1], PROMPT))

    asyncio.run(test())
