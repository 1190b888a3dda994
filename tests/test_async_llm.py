"""AsyncLLM: the same answers as LLM, from a process of its own, for any number of tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, ConfigError, EngineDeadError, ModelLoadError, RequestError, SamplingParams
from chairlift.base.outputs import OutputKind, RequestOutput
from tests.models.tiny import tiny_hf_model

PROMPTS = ["A KV cache", "A batch", "Preemption is", "The scheduler"]
PARAMS = [SamplingParams(max_tokens=12, temperature=0.0), SamplingParams(max_tokens=9, seed=3, n=2, logprobs=2)]


def test_answers_are_those_of_llm() -> None:
    llm = LLM(max_num_seqs=8)
    expected = [llm.generate(prompt, params)[0] for prompt in PROMPTS for params in PARAMS]

    async def ask(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[RequestOutput]:
        return [output async for output in llm.generate(prompt, params)]

    async def test() -> None:
        async with AsyncLLM(max_num_seqs=8) as llm:
            assert llm.info.max_num_seqs == 8
            jobs = [ask(llm, prompt, params) for prompt in PROMPTS for params in PARAMS]
            for outputs, whole in zip(await asyncio.gather(*jobs), expected, strict=True):
                assert (outputs[-1].prompt, outputs[-1].outputs) == (whole.prompt, whole.outputs)
                texts = [output.outputs[0].text for output in outputs]
                assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
            (final,) = [o async for o in llm.generate(PROMPTS[0], PARAMS[0], kind=OutputKind.FINAL)]
            assert (final.prompt, final.outputs) == (PROMPTS[0], expected[0].outputs)
            ids = final.prompt_token_ids
            assert [o.prompt async for o in llm.generate(ids, PARAMS[0], kind=OutputKind.FINAL)] == [None]
            named = {"prompt_token_ids": ids, "prompt": "its text"}
            assert [o.prompt async for o in llm.generate(named, PARAMS[0], kind=OutputKind.FINAL)] == ["its text"]

    asyncio.run(test())


def test_a_text_that_is_expected_is_drafted_in_the_engine_process() -> None:
    """Also of an answer that a stop string ends, which the engine hears of later."""
    llm, prompt = LLM(), PROMPTS[0]
    plain = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    whole = llm.generate(prompt, plain)[0].outputs[0]
    stop = whole.text[-8:]
    stopped = dataclasses.replace(plain, stop=stop, prediction=whole.text)
    expected = llm.generate(prompt, dataclasses.replace(plain, stop=stop))[0].outputs[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            assert llm.info.takes_predictions
            (final,) = [output async for output in llm.generate(prompt, stopped, kind=OutputKind.FINAL)]
            answer = final.outputs[0]
            assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
            assert answer.accepted_prediction_tokens > 0
            with pytest.raises(RequestError, match="prediction has token id"):
                [output async for output in llm.generate(prompt, SamplingParams(prediction=[10**8]))]

    asyncio.run(test())


@pytest.mark.full
def test_tokens_behind_a_sliding_window_take_no_room(tmp_path: Path) -> None:
    """A request may be longer than the whole KV cache, as it may be with LLM."""
    settings: dict[str, Any] = {"num_kv_blocks": 6, "max_num_batched_tokens": 16, "skip_tokenizer_init": True}
    model, prompt = tiny_hf_model(tmp_path, "mistral", sliding_window=24), list(range(2, 122))
    params = SamplingParams(max_tokens=None, temperature=0.0, min_tokens=100, stop_token_ids=[5])
    alone = LLM(model, **settings)
    expected = alone.generate([prompt], params)[0].outputs
    with pytest.raises(RequestError, match=r"\(the model takes [0-9]+\); lower max_tokens"):
        alone.generate([prompt], SamplingParams(max_tokens=10**6))

    async def test() -> None:
        async with AsyncLLM(model, **settings) as llm:
            (final,) = [output async for output in llm.generate(prompt, params, kind=OutputKind.FINAL)]
            assert final.outputs == expected
            assert llm.info.pool_tokens < len(prompt) <= llm.info.capacity_tokens

    asyncio.run(test())


def test_leaving_the_loop_ends_the_request() -> None:
    async def test() -> None:
        async with AsyncLLM("hashlm:1ms") as llm:
            outputs = llm.generate([1, 2, 3], SamplingParams(max_tokens=3000, ignore_eos=True, seed=1))
            async for output in outputs:
                assert output.outputs[0].token_ids
                break
            await outputs.aclose()  # type: ignore[attr-defined]
            assert llm._engine is not None and llm._engine.num_requests == 0

    asyncio.run(test())


def test_another_event_loop_is_told_so() -> None:
    """It would wait for ever: what wakes it ended with the first."""
    llm = AsyncLLM("hashlm")

    async def ask(**how: Any) -> None:
        async for _ in llm.generate([1, 2], SamplingParams(max_tokens=2), **how):
            pass

    async def first() -> None:
        await llm.start()
        await ask()
        with pytest.raises(ValueError, match="'whole' is not a valid OutputKind"):
            await ask(kind="whole")

    with asyncio.Runner() as runner:
        runner.run(first())
        with pytest.raises(EngineDeadError, match="belongs to the event loop that started it"):
            asyncio.run(ask())
        runner.run(llm.shutdown())


@pytest.mark.full
def test_a_wrong_call_raises_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(max_num_sequences=3)
    with pytest.raises(EngineDeadError, match="async with"):
        _ = AsyncLLM("hashlm").info

    async def test() -> None:
        with pytest.raises(ModelLoadError):
            async with AsyncLLM(tmp_path):
                pass
        async with AsyncLLM("hashlm") as llm:
            with pytest.raises(RequestError, match="empty"):
                async for _ in llm.generate([]):
                    pass
            ids = await llm.encode_chat([{"role": "user", "content": "Hi"}])
            assert ids[0] == 256 and bytes(i for i in ids if i < 256).decode() == "user\nHi\nassistant\n"

    asyncio.run(test())


def test_priority_and_tenant_reach_the_engine() -> None:
    async def test() -> None:
        async with AsyncLLM("hashlm", scheduling_policy="priority", tenant_weights={"alice": 2}) as llm:
            params = SamplingParams(max_tokens=3, priority=9)
            outputs = [o async for o in llm.generate([1, 2, 3], params, priority=-2, tenant="alice")]
            assert outputs[-1].finished
            for wrong, words in (({"priority": 0.5}, "priority must be"), ({"tenant": 5}, "tenant must be")):
                with pytest.raises(RequestError, match=words):
                    async for _ in llm.generate([1, 2, 3], params, **wrong):  # type: ignore[arg-type]
                        pass
            with pytest.raises(RequestError, match="tenant must be"):  # it could not cross to the engine
                async for _ in llm.generate([1, 2, 3], params, tenant="\udc80"):
                    pass
        async with AsyncLLM("hashlm") as llm:
            with pytest.raises(RequestError, match="priority is -2"):
                async for _ in llm.generate([1, 2, 3], priority=-2):
                    pass

    asyncio.run(test())


def test_shutdown_ends_the_process_and_its_requests() -> None:
    async def test() -> None:
        llm = AsyncLLM("hashlm:1ms")
        await llm.start()
        assert llm._engine is not None
        pid = llm._engine.replicas.engine_pid
        outputs = llm.generate([1, 2, 3], SamplingParams(max_tokens=3000, ignore_eos=True, seed=1))
        await anext(outputs)
        await llm.shutdown()
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(test())


@pytest.mark.parametrize("priority", [None, 3])
def test_wrong_sampling_params_are_refused(priority: int | None) -> None:
    async def test() -> None:
        async with AsyncLLM("hashlm", num_kv_blocks=64) as llm:
            for given in ({}, {"n": 1}, 0):
                with pytest.raises(RequestError, match=f"must be a SamplingParams, got {type(given).__name__}"):
                    await anext(llm.generate("a", given, priority=priority))  # type: ignore[arg-type]

    asyncio.run(test())


@pytest.mark.full
def test_where_nobody_says_how_to_sample_the_model_does(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "llama")
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.4, "top_k": 20}))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64, "dtype": "float32", "seed": 1}
    prompts = [[number, 3, 21] for number in range(4)]

    async def answers(params: SamplingParams | None) -> list[list[int]]:
        async with AsyncLLM(str(model), **settings) as llm:
            assert llm.info.sampling_defaults == {"temperature": 0.4, "top_k": 20}
            return [
                output.outputs[0].token_ids
                for prompt in prompts
                async for output in llm.generate(prompt, params, kind=OutputKind.FINAL)
            ]

    asked = SamplingParams(temperature=0.4, top_k=20)
    assert asyncio.run(answers(None)) == asyncio.run(answers(asked)) != asyncio.run(answers(SamplingParams()))
