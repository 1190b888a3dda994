"""Greedy text equals transformers' ``generate`` in fp32, however requests meet in the engine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from chairlift import FinishReason
from tests.equivalence.all_pairs import all_pairs, every_combination
from tests.equivalence.cases import EOS, FACTORS, agree, check_text, make_llm, run
from tests.equivalence.conftest import Truth
from tests.models.tiny import FAMILIES
from tests.tiers import one_in

COMBINATIONS = all_pairs(FACTORS)
NIGHTLY_FACTORS = ("family", "max_num_batched_tokens", "block_size")
"""One nightly test for each of their combinations; it goes through the cross product of the rest."""
NIGHTLY_JOBS = 16
"""Requests of a nightly test, out of the 64."""
NIGHTLY_SHARE = 12
"""Combinations tried in each nightly test, of 324: there are 25,920 in all, and a night is not that long."""


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(str(value) for value in combination.values())


def check(truth: Truth, *, arrival: str = "together", cache: str = "ample", **settings: Any) -> dict[str, int]:
    """Answer the family's jobs under these settings, compare, and return counts that say what was exercised."""
    llm = make_llm(truth.model_dir, truth.jobs, tight=cache == "tight", **settings)
    outputs = run(llm, truth.jobs, arrival, preempting=cache == "preempting")
    texts = [output.outputs[0].token_ids for output in outputs]
    agree(truth.answers, texts, lambda i: check_text(truth.model, truth.jobs[i], texts[i]))
    for job, output in zip(truth.jobs, outputs, strict=True):
        answer = output.outputs[0]
        stopped = answer.token_ids[-1] == EOS and not job.params.ignore_eos
        assert answer.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    return {
        "preemptions": llm.engine.scheduler.num_preemptions,
        "cached": sum(output.num_cached_tokens for output in outputs),
        "late": llm.engine.scheduler.num_late,
    }


@pytest.mark.parametrize("combination", one_in(2, COMBINATIONS), ids=name_of)
def test_answers_are_equal_under_every_pair_of_settings(
    combination: dict[str, Any], truth: Callable[[str], Truth]
) -> None:
    settings = dict(combination)
    counts = check(truth(settings.pop("family")), **settings)
    assert combination["enable_prefix_caching"] or counts["cached"] == 0
    assert combination["num_lookahead_steps"] or counts["late"] == 0
    if combination["batching"] != "continuous" and combination["cache"] != "preempting":
        assert counts["preemptions"] == 0  # a closed batch reserves its blocks


@pytest.mark.parametrize("num_lookahead_steps", FACTORS["num_lookahead_steps"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # Mistral's window leaves too many blocks free
def test_requests_preempted_for_want_of_blocks_say_the_same(
    family: str, num_lookahead_steps: int, truth: Callable[[str], Truth]
) -> None:
    counts = check(
        truth(family), cache="tight", block_size=1, max_num_batched_tokens=64, num_lookahead_steps=num_lookahead_steps
    )
    assert counts["preemptions"] >= 5


@pytest.mark.parametrize("num_lookahead_steps", FACTORS["num_lookahead_steps"])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_preempted_at_any_time_say_the_same(
    family: str, num_lookahead_steps: int, truth: Callable[[str], Truth]
) -> None:
    counts = check(
        truth(family), cache="preempting", max_num_batched_tokens=16, num_lookahead_steps=num_lookahead_steps
    )
    assert counts["preemptions"] >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_prefixes_say_the_same(family: str, truth: Callable[[str], Truth]) -> None:
    counts = check(truth(family), arrival="staggered", block_size=8, max_num_batched_tokens=64)
    assert counts["cached"] >= 100


def test_look_ahead_drops_tokens_behind_the_end(truth: Callable[[str], Truth]) -> None:
    assert check(truth("llama"), num_lookahead_steps=2)["late"] > 0


def test_the_reference_answers_have_many_different_tokens(truth: Callable[[str], Truth]) -> None:
    """Were all answers alike, or did none end early, equality would prove little."""
    for family in FAMILIES:
        answers = truth(family).answers
        assert len({tuple(answer) for answer in answers}) > 48
        assert sum(len(set(answer)) for answer in answers) > 200
        ended = [a for a, job in zip(answers, truth(family).jobs, strict=True) if len(a) < (job.params.max_tokens or 0)]
        assert ended


@pytest.mark.nightly
@pytest.mark.parametrize("part", every_combination({name: FACTORS[name] for name in NIGHTLY_FACTORS}), ids=name_of)
def test_answers_are_equal_under_many_combinations_of_settings(
    part: dict[str, Any], truth: Callable[[str], Truth]
) -> None:
    settings = dict(part)
    whole = truth(settings.pop("family"))
    some = dataclasses.replace(whole, jobs=whole.jobs[:NIGHTLY_JOBS], answers=whole.answers[:NIGHTLY_JOBS])
    rest = {name: values for name, values in FACTORS.items() if name not in NIGHTLY_FACTORS}
    for combination in random.Random(name_of(part)).sample(list(every_combination(rest)), NIGHTLY_SHARE):
        check(some, **settings, **combination)
