"""Seeded text: what the definition of the sampler says, alone and in any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift import RequestOutput
from chairlift.base.seeds import sample_seed
from tests.equivalence.all_pairs import all_pairs
from tests.equivalence.cases import FACTORS, Job, agree, check_text, make_llm, run, sampled_jobs
from tests.equivalence.conftest import Truth
from tests.models.tiny import FAMILIES

# Fewer values than in the greedy suite, and as many kinds of them: what decides here is who shares a step with whom.
COMBINATIONS = all_pairs(
    {
        "max_num_batched_tokens": (1, 16, 2048),
        "block_size": (1, 16),
        "arrival": FACTORS["arrival"],
        "batching": FACTORS["batching"],
        "num_lookahead_steps": (0, 1, 2),
        "cache": FACTORS["cache"],
        "enable_prefix_caching": (True, False),
    }
)
JOBS = sampled_jobs(24)

Answer = tuple[int, int]
"""Index of a job, and of one of its answers."""


def texts(outputs: Sequence[RequestOutput]) -> dict[Answer, list[int]]:
    return {(i, answer.index): answer.token_ids for i, output in enumerate(outputs) for answer in output.outputs}


def check(truth: Truth, jobs: Sequence[Job], answer: Answer, token_ids: Sequence[int]) -> None:
    job = jobs[answer[0]]
    assert job.params.seed is not None
    check_text(truth.model, job, token_ids, sample_seed(job.params.seed, answer[1]))


def same(truth: Truth, jobs: Sequence[Job], expected: dict[Answer, list[int]], got: dict[Answer, list[int]]) -> None:
    keys = sorted(expected)
    assert keys == sorted(got)
    agree(
        [expected[key] for key in keys], [got[key] for key in keys], lambda i: check(truth, jobs, keys[i], got[keys[i]])
    )


@pytest.fixture(scope="module")
def alone(truth: Callable[[str], Truth]) -> dict[Answer, list[int]]:
    """Each job answered by an engine of its own (Llama)."""
    found: dict[Answer, list[int]] = {}
    for i, job in enumerate(JOBS):
        output = run(make_llm(truth("llama").model_dir, JOBS), [job])[0]
        assert len(output.outputs) == job.params.n
        found |= {(i, answer.index): answer.token_ids for answer in output.outputs}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_the_one_that_the_definition_gives(family: str, truth: Callable[[str], Truth]) -> None:
    """transformers' logits, the slow reference sampler, and the noise of (seed, position, id)."""
    found = texts(run(make_llm(truth(family).model_dir, JOBS), JOBS))
    for answer, token_ids in found.items():
        check(truth(family), JOBS, answer, token_ids)


def test_answers_to_one_prompt_differ(alone: dict[Answer, list[int]]) -> None:
    several = [i for i, job in enumerate(JOBS) if job.params.n == 3]
    assert len(several) == 12
    different = [len({tuple(alone[i, index]) for index in range(3)}) for i in several]
    assert sum(different) > 30


def test_first_answer_does_not_depend_on_n(truth: Callable[[str], Truth], alone: dict[Answer, list[int]]) -> None:
    single = [Job(job.prompt, dataclasses.replace(job.params, n=1)) for job in JOBS]
    got = texts(run(make_llm(truth("llama").model_dir, single), single))
    same(truth("llama"), single, {answer: text for answer, text in alone.items() if answer[1] == 0}, got)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(str(value) for value in c.values()))
def test_text_alone_and_in_any_batch_is_the_same(
    combination: dict[str, Any], truth: Callable[[str], Truth], alone: dict[Answer, list[int]]
) -> None:
    settings = dict(combination)
    arrival, cache = settings.pop("arrival"), settings.pop("cache")
    llm = make_llm(truth("llama").model_dir, JOBS, tight=cache == "tight", **settings)
    same(truth("llama"), JOBS, alone, texts(run(llm, JOBS, arrival, preempting=cache == "preempting")))
