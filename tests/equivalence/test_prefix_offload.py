"""Conversations whose KV went to host memory between two turns go on as if it had never left."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from tests.equivalence.cases import VOCAB, Job, agree, check_text, make_llm, run, transformers_greedy
from tests.equivalence.conftest import Truth
from tests.equivalence.test_determinism import facts
from tests.native import needs_kernels

TURNS = 3
SWAP_BYTES = 16 << 20


def turns() -> list[list[Job]]:
    """Per turn what four conversations say: what they said before, and more."""
    rng, said, jobs = random.Random(3), [[], [], [], []], []
    for _ in range(TURNS):
        said = [before + [rng.randrange(2, VOCAB) for _ in range(rng.randint(18, 30))] for before in said]
        jobs.append([Job(list(prompt), SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)) for prompt in said])
    return jobs


def serve(llm: LLM, one_by_one: bool = False) -> list[Any]:
    """All turns, one after the other; of each the four together, or each alone."""
    answers = []
    for jobs in turns():
        answers += [run(llm, [job])[0] for job in jobs] if one_by_one else run(llm, jobs)
    return answers


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("num_lookahead_steps", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=needs_kernels)])
def test_answers_are_equal_after_prefixes_return_from_host_memory(
    kernels: str, family: str, num_lookahead_steps: int, place: str, tmp_path: Path, truth: Callable[[str], Truth]
) -> None:
    model, every = truth(family), [job for jobs in turns() for job in jobs]
    settings: dict[str, Any] = {"kernels": kernels, "num_lookahead_steps": num_lookahead_steps, "tight": True}
    directory = str(tmp_path) if place == "file" else None
    llm = make_llm(
        model.model_dir, every, prefix_offload=True, swap_space_bytes=SWAP_BYTES, swap_directory=directory, **settings
    )
    outputs = serve(llm)
    texts = [output.outputs[0].token_ids for output in outputs]
    answers = [transformers_greedy(model.model, job) for job in every]
    agree(answers, texts, lambda i: check_text(model.model, every[i], texts[i]))
    stats = llm.engine.core.stats()
    assert stats.num_offloaded_blocks > stats.num_brought_back_blocks > 4
    lost = make_llm(model.model_dir, every, **settings)
    cached = [sum(output.num_cached_tokens for output in found) for found in (outputs, serve(lost))]
    assert cached[0] > 1.5 * cached[1], "what is not kept has to be computed again"
    if kernels == "auto":
        plain = make_llm(model.model_dir, every, kernels=kernels, enable_prefix_caching=False)
        for one, other in zip(serve(plain, one_by_one=True), outputs, strict=True):
            assert facts(one) == facts(other)


@needs_kernels
@pytest.mark.parametrize("place", ["memory", "file"])
def test_codes_returned_from_host_memory_equal_those_saved(
    place: str, tmp_path: Path, truth: Callable[[str], Truth]
) -> None:
    model, every = truth("qwen2"), [job for jobs in turns() for job in jobs]
    settings: dict[str, Any] = {"swap_directory": str(tmp_path)} if place == "file" else {}
    settings |= {"tight": True, "prefix_offload": True, "swap_space_bytes": SWAP_BYTES}
    llm = make_llm(model.model_dir, every, kv_cache_dtype="int8", **settings)
    outputs = serve(llm)
    assert llm.engine.core.stats().num_brought_back_blocks > 4
    plain = make_llm(model.model_dir, every, kv_cache_dtype="int8", enable_prefix_caching=False)
    for one, other in zip(serve(plain, one_by_one=True), outputs, strict=True):
        assert facts(one) == facts(other)


def test_new_weights_leave_nothing_behind(truth: Callable[[str], Truth]) -> None:
    model, jobs = truth("llama"), turns()[0]
    llm = make_llm(model.model_dir, jobs, tight=True, prefix_offload=True, swap_space_bytes=SWAP_BYTES)
    run(llm, jobs)
    assert llm.engine.kv.swap_pool.num_kept
    llm.update_weights(str(model.model_dir), 1)
    assert not llm.engine.kv.swap_pool.num_kept
    assert [output.num_cached_tokens for output in run(llm, jobs)] == [0] * len(jobs)
