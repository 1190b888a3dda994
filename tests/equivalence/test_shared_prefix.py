"""Sixteen answers to one prompt read its KV together in each step; each says the same alone, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.step_batch import StepBatch
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.kernels.cpu.library import supported_isas
from tests.equivalence.cases import Job, run
from tests.equivalence.test_determinism import facts
from tests.kernels.cpu.models import VOCAB, tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels

ANSWERS = 16


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 200)])
@pytest.mark.parametrize("isa", supported_isas()[-1:])
def test_answers_to_one_prompt_are_those_of_each_alone(
    isa: str, family: str, window: int | None, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    more: dict[str, Any] = {} if window is None else {"sliding_window": window}
    model = tiny_model(tmp_path, family, max_position_embeddings=1500, **more)
    text = [rng.randrange(2, VOCAB) for _ in range(1100)]
    jobs = [
        Job(
            [*text, *(rng.randrange(2, VOCAB) for _ in range(i % 4 * 9))],
            SamplingParams(seed=i, max_tokens=8, logprobs=2),
        )
        for i in range(ANSWERS)
    ]
    settings: dict[str, Any] = {"kernels": isa, "skip_tokenizer_init": True, "kv_cache_dtype": kv_cache_dtype}
    most, forward = [0], NativeModelRunner.forward

    def watched(runner: NativeModelRunner, batch: StepBatch) -> Any:
        tables = batch.block_tables[0]
        place = int(batch.seq_lens.min() - 60) // 16
        most[0] = max(most[0], max(tables[:, place].tolist().count(block) for block in tables[:, place]))
        return forward(runner, batch)

    monkeypatch.setattr(NativeModelRunner, "forward", watched)
    llm = LLM(model, num_kv_blocks=300, threads=2, max_num_seqs=ANSWERS, **settings)
    run(llm, jobs[:1])  # its blocks are in the prefix cache when the others come
    outputs = run(llm, jobs)
    assert most[0] >= ANSWERS / 2, "rows do not share blocks, so this test shows nothing"
    alone = LLM(model, num_kv_blocks=100, threads=1, max_num_seqs=1, enable_prefix_caching=False, **settings)
    for job, output in zip(jobs, outputs, strict=True):
        assert facts(output) == facts(run(alone, [job])[0])
