"""Engines with K and V in 8 bits in Triton: the CPU's tokens, and the same bits after swaps, copies and offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import SamplingParams
from tests.equivalence.cases import Job, make_llm, run
from tests.equivalence.test_triton import SIZES, SMALL, exact_answers, greedy, invariant_jobs, triton_llm
from tests.kernels.triton import conftest
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_hf_model(tmp_path, "qwen3", **{**SMALL, "head_dim": 32})


@needs_kernels
def test_tokens_are_those_of_the_cpu(model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, with two answers of one prompt: the block that they share is copied with its scales."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    forked = Job([7, 9, 11, 12, 13, 14], SamplingParams(seed=1, n=2, temperature=2.0, max_tokens=4))
    jobs = [*greedy(2, 9, 3), forked]
    sizes = {**SIZES, "block_size": 16}
    texts = [
        [[answer.token_ids for answer in output.outputs] for output in run(llm, jobs)]
        for llm in (
            make_llm(model_dir, jobs, **sizes, **INT8),
            triton_llm(model_dir, jobs, device, block_size=16, **INT8),
        )
    ]
    assert texts[0] == texts[1]


@pytest.mark.nightly
@needs_kernels
def test_prompts_that_come_back_from_host_memory_say_the_same(
    model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    prompts = [list(range(first, first + 12)) for first in (2, 40, 2)]
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=2)) for prompt in prompts]
    how: dict[str, Any] = {"tight": True, "prefix_offload": True, "swap_space_bytes": 1 << 20}
    llm = triton_llm(model_dir, jobs, device, **INT8, **how)
    answers = [run(llm, [job])[0].outputs[0].token_ids for job in jobs]
    assert answers[2] == answers[0] and llm.engine.core.stats().num_brought_back_blocks
    cpu = make_llm(model_dir, jobs, **{**SIZES, "block_size": 16}, **INT8)
    assert answers == [run(cpu, [job])[0].outputs[0].token_ids for job in jobs]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how",
    [
        {"tight": True, "prefix_offload": True, "swap_space_bytes": 1 << 20},
        {"tight": True, "preemption_mode": "swap", "swap_space_bytes": 1 << 20, "block_size": 1},
    ],
    ids=["offloaded", "swapped"],
)
def test_bits_survive_what_moves_blocks(
    how: dict[str, Any], model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 32)
    prompts = [list(range(first, first + 20)) for first in (2, 40, 2)]
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)) for prompt in prompts]
    invariant = {**INT8, "batch_invariant": True}
    alone = triton_llm(model_dir, jobs, device, **invariant, enable_prefix_caching=False, max_num_batched_tokens=64)
    expected = [exact_answers(run(alone, [job]))[0] for job in jobs]
    llm = triton_llm(model_dir, jobs, device, **invariant, **how)
    if "prefix_offload" in how:
        assert [exact_answers(run(llm, [job]))[0] for job in jobs] == expected
        assert llm.engine.core.stats().num_brought_back_blocks
    else:
        assert exact_answers(run(llm, jobs)) == expected
        assert llm.engine.core.stats().num_swapped_out_blocks > 0


@pytest.mark.nightly
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(model_dir: Path, device: torch.device) -> None:
    jobs = invariant_jobs(6, 30, 5)
    settings = {**INT8, "batch_invariant": True}
    alone = triton_llm(model_dir, jobs, device, **settings, max_num_batched_tokens=64)
    expected = [exact_answers(run(alone, [job]))[0] for job in jobs]
    assert exact_answers(run(triton_llm(model_dir, jobs, device, **settings), jobs, "staggered")) == expected
