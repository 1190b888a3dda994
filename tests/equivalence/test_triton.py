"""The Triton kernels answer like transformers and like PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.base.seeds import sample_seed
from chairlift.executor.local import LocalExecutor
from tests.equivalence.cases import VOCAB, Job, agree, check_text, make_llm, run, transformers_greedy
from tests.kernels.triton import conftest
from tests.models.tiny import FAMILIES, hf_model, tiny_hf_model

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

# Two layers, so that one adds to what another left. The interpreter takes a millisecond for a GPU's microsecond.
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 48}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},  # two cache groups
    "qwen3": {"head_dim": 24},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
}
SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 12, "block_size": 4}
SAMPLED: list[dict[str, Any]] = [
    {"n": 2, "temperature": 2.0},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 2.0, "repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 2.0, "logit_bias": {5: 4.0}, "min_tokens": 4},
    {"temperature": 0.0, "logprobs": 0},
]
"""Two are drawn on the device, the others by the sampler that knows everything."""
MEETINGS: list[dict[str, Any]] = [
    {"tight": True, "num_lookahead_steps": 1, "block_size": 1},
    {"arrival": "staggered", "preempting": True, "block_size": 8},
    {"arrival": "reversed", "max_num_batched_tokens": 40, "max_num_seqs": 16},
]


def greedy(count: int, most_prompt: int, most_output: int) -> list[Job]:
    """Every other prompt begins like the first."""
    rng = random.Random(count)
    root = [rng.randrange(2, VOCAB) for _ in range(most_prompt - 1)]
    jobs = []
    for i in range(count):
        fresh = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, most_prompt))]
        prompt = root + fresh[:1] if i % 2 else fresh
        jobs.append(Job(prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(2, most_output))))
    return jobs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    def of(family: str) -> tuple[Path, PreTrainedModel]:
        settings = {**SMALL, **FAMILY_SETTINGS.get(family, {})}
        model_dir = tiny_hf_model(tmp_path_factory.mktemp("models"), family, **settings)
        return model_dir, hf_model(model_dir)

    return of


def triton_llm(model_dir: Path, jobs: list[Job], device: torch.device, **settings: Any) -> LLM:
    llm = make_llm(model_dir, jobs, kernels="triton", device=str(device), **{**SIZES, **settings})
    assert isinstance(llm.engine.core.executor, LocalExecutor)
    assert type(llm.engine.core.executor._runner).__name__ == "TritonModelRunner"
    return llm


def check_greedy(
    model: tuple[Path, PreTrainedModel],
    jobs: list[Job],
    device: torch.device,
    arrival: str = "together",
    **how: Any,
) -> dict[str, int]:
    preempting = how.pop("preempting", False)
    llm = triton_llm(model[0], jobs, device, **how)
    outputs = run(llm, jobs, arrival, preempting=preempting)
    answers = [output.outputs[0].token_ids for output in outputs]
    expected = [transformers_greedy(model[1], job) for job in jobs]
    agree(expected, answers, lambda i: check_text(model[1], jobs[i], answers[i]))
    cached = sum(output.num_cached_tokens for output in outputs)
    return {"preemptions": llm.engine.scheduler.num_preemptions, "cached": cached}


@pytest.mark.parametrize("family", [*FAMILIES, "cohere2", "gemma3_text", "olmo3"])
def test_greedy_text_is_that_of_transformers(
    family: str,
    models: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three requests, of which two share a beginning, in chunks of at most 12 tokens."""
    if family != "qwen2":  # the streaming product is what takes most of the interpreter's time
        monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    check_greedy(models(family), greedy(3, 9, 3), device)


def test_preempted_requests_say_the_same(models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    counts = check_greedy(models("llama"), greedy(4, 7, 5), device, tight=True, num_lookahead_steps=1, block_size=1)
    assert counts["preemptions"] and counts["cached"]


def test_prompts_that_come_back_from_host_memory_say_the_same(
    models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    model_dir, model = models("qwen2")
    jobs = [Job(list(range(first, first + 20)), SamplingParams(temperature=0.0, max_tokens=2)) for first in (2, 40, 2)]
    llm = triton_llm(model_dir, jobs, device, tight=True, prefix_offload=True, swap_space_bytes=1 << 20)
    answers = [run(llm, [job])[0].outputs[0].token_ids for job in jobs]
    expected = [transformers_greedy(model, job) for job in jobs]
    agree(expected, answers, lambda i: check_text(model, jobs[i], answers[i]))
    assert llm.engine.core.stats().num_brought_back_blocks > 1


@pytest.mark.full
def test_sampled_text_is_that_of_pytorch(models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)
    model_dir, model = models("qwen3")
    jobs = [Job([7 + i, 9, 11], SamplingParams(seed=i, max_tokens=4, **more)) for i, more in enumerate(SAMPLED)]
    expected, got = (
        [
            (answer.token_ids, answer.logprobs and [sorted(entry) for entry in answer.logprobs])
            for output in run(llm, jobs)
            for answer in output.outputs
        ]
        for llm in (make_llm(model_dir, jobs, kernels="torch", **SIZES), triton_llm(model_dir, jobs, device))
    )
    assert got == expected
    for i in (0, 1):
        check_text(model, jobs[i], got[2 * i][0], sample_seed(i, 0))


def exact_answers(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    return [
        (output.prompt_logprobs, [(answer.token_ids, answer.logprobs) for answer in output.outputs])
        for output in outputs
    ]


def invariant_jobs(count: int, most_prompt: int, most_output: int) -> list[Job]:
    """Greedy and sampled, drawn on the device and by the sampler that knows everything, all with log-probabilities."""
    jobs = greedy(count, most_prompt, most_output)
    more: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 9}]
    return [
        Job(
            job.prompt,
            SamplingParams(seed=i, max_tokens=job.params.max_tokens, logprobs=0, prompt_logprobs=i % 2, **more[i % 3]),
        )
        for i, job in enumerate(jobs)
    ]


def check_invariance(
    model_dir: Path, jobs: list[Job], device: torch.device, arrival: str = "together", **how: Any
) -> bool:
    """Whether all answers have the bits that they have alone, with room for everything."""
    preempting, both = how.pop("preempting", False), {"batch_invariant": how.pop("batch_invariant", True)}
    both["quantization"] = how.pop("quantization", None)
    alone = triton_llm(model_dir, jobs, device, **both, max_num_batched_tokens=64)
    expected = [exact_answers(run(alone, [job]))[0] for job in jobs]
    together = triton_llm(model_dir, jobs, device, **both, **how)
    return exact_answers(run(together, jobs, arrival, preempting=preempting)) == expected


@pytest.mark.nightly
def test_batch_invariant_answers_have_the_same_bits_in_any_batch(
    models: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 32)  # larger prompts take the interpreter long
    model_dir, _ = models("llama")
    jobs = invariant_jobs(2, 40, 2)  # more rows than are streamed as a rule, and more keys than a tile holds
    assert check_invariance(model_dir, jobs, device)
    if not conftest.ON_GPU:  # where sums this short may round alike in every kernel
        assert not check_invariance(model_dir, jobs, device, batch_invariant=False), "the bits would be equal anyway"


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", MEETINGS[:2], ids=lambda how: str(how.get("arrival", "tight")))
def test_batch_invariant_answers_are_equal_however_requests_meet(
    family: str, how: dict[str, Any], models: Any, device: torch.device
) -> None:
    assert check_invariance(models(family)[0], invariant_jobs(8, 30, 6), device, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", MEETINGS, ids=lambda how: str(how.get("arrival", "tight")))
def test_answers_are_right_however_requests_meet(
    family: str, how: dict[str, Any], models: Any, device: torch.device
) -> None:
    check_greedy(models(family), greedy(16, 30, 8), device, **how)
