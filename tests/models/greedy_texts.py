"""Greedy answers of transformers to the requests of the equivalence suite, and the comparison of ours with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.equivalence.cases import Job, agree, check_text, greedy_jobs, make_llm, run
from tests.models.tiny import hf_logits, hf_model

__all__ = ["Truth", "check_texts", "truth_of"]


@dataclasses.dataclass(frozen=True)
class Truth:
    """The model, requests, and transformers' answers."""

    model_dir: Path
    model: Any
    jobs: list[Job]
    answers: list[list[int]]


def greedy(model: Any, job: Job) -> list[int]:
    tokens = list(job.prompt)
    for _ in range(job.params.max_tokens or 0):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
        if tokens[-1] == 1 and not job.params.ignore_eos:
            break
    return tokens[len(job.prompt) :]


def truth_of(model_dir: Path, count: int) -> Truth:
    """transformers' answers of a model to ``count`` greedy requests."""
    model, jobs = hf_model(model_dir), greedy_jobs(count)
    return Truth(model_dir, model, jobs, [greedy(model, job) for job in jobs])


def check_texts(truth: Truth, combination: dict[str, Any]) -> None:
    """Compare our answers under settings with the truth. ``arrival`` and ``cache`` say how the requests meet; the other
    values are settings of ``LLM``."""
    settings = dict(combination)
    arrival, cache = settings.pop("arrival"), settings.pop("cache")
    llm = make_llm(truth.model_dir, truth.jobs, tight=cache == "tight", **settings)
    outputs = run(llm, truth.jobs, arrival, preempting=cache == "preempting")
    texts = [output.outputs[0].token_ids for output in outputs]
    agree(truth.answers, texts, lambda i: check_text(truth.model, truth.jobs[i], texts[i]))
