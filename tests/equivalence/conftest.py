"""Tiny models of all families and transformers' outputs, computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.equivalence.cases import Job, greedy_jobs, transformers_greedy
from tests.models.tiny import hf_model, tiny_hf_model


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """One family of models: a tiny model, the greedy jobs, and transformers' outputs for the jobs."""

    model_dir: Path
    model: PreTrainedModel
    jobs: list[Job]
    answers: list[list[int]]


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    """Function that returns the :class:`Truth` of a family by its name."""

    @cache
    def of(family: str) -> Truth:
        model_dir = tiny_hf_model(tmp_path_factory.mktemp("models"), family)
        model = hf_model(model_dir)
        jobs = greedy_jobs()
        return Truth(model_dir, model, jobs, [transformers_greedy(model, job) for job in jobs])

    return of
