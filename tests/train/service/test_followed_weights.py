"""Samples that are drawn while newer weights of their training run are published: they keep theirs, or follow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.loading.model import read_tokenizer
from chairlift_train.service.log.records import SamplerRecord
from chairlift_train.service.progress import TrainingProgress
from chairlift_train.service.samplers import Samplers
from chairlift_train.service.wire.bodies import DrawSamples, PromptChunk, SampleParameters, SamplePrompt
from chairlift_train.service.wire.proto import SampleResponseMessage
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.server.harness import run, until
from tests.train.service.compute import calls

pytestmark = needs_kernels
pytest.importorskip("transformers")

PROMPT = [5, 9, 77, 3]
TOKENS = 40
REQUEST = DrawSamples(
    "s:sample:1",
    0,
    SamplePrompt([PromptChunk(tokens=PROMPT)]),
    SampleParameters(max_tokens=TOKENS, seed=11, stop=[]),
    num_samples=2,
)
Sample = tuple[list[int], list[float]]


def saved(tmp_path: Path) -> list[SamplerRecord]:
    """Two versions of the weights of one training run."""
    trainer = calls.trainer(tmp_path)
    calls.make(trainer, "a")
    records = []
    for number in (1, 2):
        directory = tmp_path / "snapshots" / "run" / str(number)
        trainer.save("a", directory, optimizer=False)
        records.append(SamplerRecord(f"s:sample:{number}", "s", "", "", str(directory), "s:train:0"))
        calls.fill(trainer, "a", seed=7)
    return records


def read(payload: bytes) -> list[Sample]:
    message = SampleResponseMessage()
    message.ParseFromString(payload)
    return [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist())
        for each in message.sequences
    ]


async def alone(engine: AsyncEngine, adapter: str, prompt: list[int], **params: Any) -> list[Sample]:
    asked = SamplingParams(ignore_eos=True, logprobs=0, **params)
    stream = await engine.submit(prompt, asked, kind=OutputKind.FINAL, adapter=adapter)
    (output,) = [each async for each in stream]
    return [
        (each.token_ids, [next(iter(row.values())).logprob for row in each.logprobs or ()]) for each in output.outputs
    ]


async def drawn(engine: AsyncEngine, records: list[SamplerRecord], follow: bool) -> tuple[list[Sample], Any]:
    """(samples, their versions) of a request in whose midst the second version is published."""
    samplers = Samplers(engine, TrainingProgress(time.monotonic), follow=follow)
    await samplers.publish(records[0])
    name = samplers.begin(records[0], REQUEST, "", "")
    await until(lambda: any(each.state.num_tokens >= 4 for each in engine.requests()))
    await engine.generation.pause("keep")
    await samplers.publish(records[1])
    await engine.generation.resume()
    answer = await samplers.answer(name, 60)
    assert answer is not None and answer.form == "proto", answer
    versions = await samplers.versions(name)
    samplers.forget("s")
    return read(answer.payload), versions


@pytest.mark.parametrize("follow", [False, True], ids=["keep", "follow"])
def test_each_token_is_from_the_version_that_the_answer_names(tmp_path: Path, follow: bool) -> None:
    records = saved(tmp_path)
    folder = tiny_hf_model(tmp_path, "llama")
    flat = {"model": str(folder), "dtype": "float32", "num_kv_blocks": 64, "enable_lora": True}
    config = EngineConfig.from_flat({**flat, "skip_tokenizer_init": True})

    async def test() -> None:
        engine = AsyncEngine.start(config, read_tokenizer=read_tokenizer)
        try:
            await engine.wait_ready()
            found, versions = await drawn(engine, records, follow)
            for name, record in zip(("old", "new"), records, strict=True):
                await engine.adapters.load(name, record.directory)
            whole = await alone(engine, "old", PROMPT, max_tokens=TOKENS, seed=11, n=2)
            if not follow:
                assert (found, versions) == (whole, [[(0, 1)], [(0, 1)]])
                return
            for index, (sample, runs) in enumerate(zip(found, versions, strict=True)):
                (zero, first), (start, second) = runs
                assert (zero, first, second) == (0, 1, 2) and 0 < start < TOKENS
                assert [each[:start] for each in sample] == [each[:start] for each in whole[index]]
                rest = {"max_tokens": TOKENS - start, "seed": 11 + index}
                assert [tuple(each[start:] for each in sample)] == await alone(
                    engine, "new", PROMPT + sample[0][:start], **rest
                )
        finally:
            await engine.shutdown()

    run(test())
