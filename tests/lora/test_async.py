"""Adapters across the processes: loaded while others are answered, replaced under traffic, and drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, LoRARequest, ModelLoadError, RequestError, SamplingParams
from chairlift.base.outputs import OutputKind, RequestOutput
from chairlift.engine.async_engine import EngineState
from tests.e2e.server_process import ServerProcess
from tests.lora.adapters import random_adapter
from tests.models.tiny import tiny_hf_model

PROMPT = [5, 9, 77, 3, 21, 64, 8, 100]
SETTINGS: dict[str, Any] = {"num_kv_blocks": 200, "skip_tokenizer_init": True, "enable_lora": True}
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def alone(model_dir: Path, adapter: LoRARequest | None) -> list[int]:
    (output,) = LLM(model_dir, **SETTINGS).generate([PROMPT], PARAMS, lora_request=adapter)
    return output.outputs[0].token_ids


async def ask(llm: AsyncLLM, adapter: LoRARequest | None) -> list[int]:
    how: dict[str, Any] = {"kind": OutputKind.FINAL, "lora_request": adapter}
    outputs: list[RequestOutput] = [output async for output in llm.generate(PROMPT, PARAMS, **how)]
    return outputs[-1].outputs[0].token_ids


def test_an_adapter_is_replaced_under_traffic_and_versions_never_mix(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    target = random_adapter(model_dir, tmp_path / "a", seed=1)
    adapter = LoRARequest("a", 1, target)
    base, old = alone(model_dir, None), alone(model_dir, adapter)

    async def test() -> None:
        async with AsyncLLM(model_dir, **SETTINGS) as llm:
            engine = llm._started()
            assert await asyncio.gather(*[ask(llm, each) for each in (adapter, None, adapter)]) == [old, base, old]
            begun = [asyncio.ensure_future(ask(llm, adapter)) for _ in range(3)]
            await asyncio.sleep(0)
            random_adapter(model_dir, target, seed=2)
            new = alone(model_dir, adapter)
            await engine.adapters.load("a", target, in_place=True, int_id=1)
            assert await ask(llm, adapter) == new
            assert set(map(tuple, await asyncio.gather(*begun))) <= {tuple(old), tuple(new)}
            assert new not in (old, base) and await ask(llm, None) == base
            with pytest.raises(RequestError, match="loaded already"):
                await engine.adapters.load("a", target)
            last = asyncio.ensure_future(ask(llm, adapter))
            while not engine.num_requests:  # until it is in the engine
                await asyncio.sleep(0)
            assert llm.remove_lora(1) and not llm.remove_lora(1)
            assert await last == new
            with pytest.raises(ModelLoadError, match="not a directory"):
                await ask(llm, LoRARequest("b", 2, tmp_path / "nothing"))
            with pytest.raises(RequestError, match="lora_request"):
                await ask(llm, "a")  # type: ignore[arg-type]

    asyncio.run(test())


@pytest.mark.full
def test_cold_adapters_wait_for_memory_and_nobody_for_ever(tmp_path: Path) -> None:
    """More adapters than a step or the memory may have."""
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    asked = [LoRARequest(f"a{n}", n + 1, random_adapter(model_dir, tmp_path / f"a{n}", seed=n)) for n in range(6)]
    settings = {**SETTINGS, "max_loras": 2, "max_cpu_loras": 3}
    llm = LLM(model_dir, **settings)
    outputs = llm.generate([PROMPT] * 18, PARAMS, lora_request=asked * 3)
    adapters = llm.engine.core.preparers.adapters
    assert len(adapters.resident) == 3 and adapters.num_evictions and adapters.num_reads > 6
    expected = [alone(model_dir, each) for each in asked]
    assert [output.outputs[0].token_ids for output in outputs] == expected * 3
    adapters.check_invariants()

    async def test() -> None:
        async with AsyncLLM(model_dir, **settings) as llm:
            assert await asyncio.gather(*[ask(llm, each) for each in asked * 3]) == expected * 3

    asyncio.run(test())


def test_an_engine_that_dies_comes_back_with_its_adapters(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    adapter = LoRARequest("a", 1, random_adapter(model_dir, tmp_path / "a"))
    expected = alone(model_dir, adapter)

    async def test() -> None:
        async with AsyncLLM(model_dir, **SETTINGS) as llm:
            assert await ask(llm, adapter) == expected
            engine = llm._started()
            assert engine.replicas.engine_pid is not None
            os.kill(engine.replicas.engine_pid, signal.SIGKILL)
            while engine.state is EngineState.READY:
                await asyncio.sleep(0.01)
            while engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
            assert await ask(llm, adapter) == expected

    asyncio.run(test())


def test_impossible_adapter_settings_are_refused(tmp_path: Path) -> None:
    from chairlift import ConfigError

    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=1)
    adapter = LoRARequest("a", 1, random_adapter(model_dir, tmp_path / "a"))
    plain = LLM(model_dir, num_kv_blocks=20, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="enable_lora"):
        plain.generate([PROMPT], PARAMS, lora_request=adapter)
    llm = LLM(model_dir, max_lora_rank=3, **SETTINGS)
    with pytest.raises(ModelLoadError, match="max_lora_rank is 3"):
        llm.generate([PROMPT], PARAMS, lora_request=adapter)
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        LLM(model_dir, max_loras=4, max_cpu_loras=3, **SETTINGS)
    with pytest.raises(ConfigError, match="HashLM"):
        LLM("hashlm", enable_lora=True)
    llm = LLM(model_dir, **SETTINGS)
    llm.generate([PROMPT], PARAMS, lora_request=adapter)
    for other in (LoRARequest("b", 1, adapter.lora_path), LoRARequest("a", 2, adapter.lora_path)):
        with pytest.raises(RequestError, match="lora_int_id"):
            llm.generate([PROMPT], PARAMS, lora_request=other)
    for name, number, path in (("a b", 1, "x"), ("a", 0, "x"), ("a", 1, "")):
        with pytest.raises(RequestError):
            LoRARequest(name, number, path)


@pytest.mark.nightly
def test_a_server_answers_with_the_named_adapter(tmp_path: Path) -> None:
    model_dir = Path(__file__).parents[2] / "chairlift" / "assets"
    first = random_adapter(model_dir, tmp_path / "adapters" / "first", std=0.4)
    random_adapter(model_dir, tmp_path / "adapters" / "second", seed=1, std=0.4)
    keys = tmp_path / "keys"
    keys.write_text("admin sk-admin\n")
    flags = ("--enable-lora", "--lora-modules", f"first={first}", "--lora-dir", str(tmp_path / "adapters"))

    def post(server: ServerProcess, path: str, body: Any) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Bearer sk-admin")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    with ServerProcess("bundled", *flags, "--api-key-file", str(keys)) as server:
        body = {"prompt": "A KV cache", "max_tokens": 8, "temperature": 0}
        texts = {}
        assert post(server, "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "second"})["loaded"]
        for model in ("first", "second", None):
            reply = post(server, "/v1/completions", {**body, **({"model": model} if model else {})})
            texts[reply["model"]] = reply["choices"][0]["text"]
        assert len(set(texts.values())) == 3
        assert not post(server, "/v1/unload_lora_adapter", {"lora_name": "second"})["loaded"]
