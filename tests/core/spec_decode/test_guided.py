"""Drafts of answers that follow a grammar or a thinking budget: the answers are those without, to the last bit.

Each case draws requests, settings and who drafts: what the grammar forces, n-grams, expected texts, or a script of
right and wrong drafts. Expected answers come from an engine without drafts, one request at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.base.thinking import ThinkingBudget
from chairlift.core.scheduler.drafts import Drafts, Speculator
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.core.spec_decode.ngram import NgramProposer
from chairlift.engine import mask_work
from chairlift.engine.grammars import Grammars, SamplePlace
from chairlift.engine.mask_work import MaskJob
from chairlift.text.grammar.compiler import _LLMatcher
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift_lab.sim.drafts import ScriptedDrafts
from tests.core.spec_decode.test_equivalence import everything
from tests.equivalence.cases import Job, run
from tests.equivalence.test_determinism import first_difference
from tests.native import needs_kernels
from tests.sweep import sweep
from tests.text.grammar.models import bundled

pytestmark = needs_kernels

SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "kinds_of_lifts": {"type": "array", "items": {"enum": ["chair", "gondola", "funicular"]}, "maxItems": 3},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["full_name", "kinds_of_lifts", "age_in_years"],
    "additionalProperties": False,
}
TAG = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<thought>", "content": {"type": "any_text"}, "end": "</thought>"},
        {"type": "regex", "pattern": "[0-9]{2}-[0-9]{2}"},
    ],
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": SCHEMA},
    {"regex": "(The lift has [0-9]{2} chairs\\. ){3}"},
    {"choice": ["the upper station", "the lower station", "the middle"]},
    {"structural_tag": {"format": TAG}},
]
END, AFTER = 300, (301, 17, 302)
PROMPTS = ["Describe a lift.", "Who are you?", "Chairlift is", "chair chair chair gondola chair chair chair gondola"]
KINDS = ("forced", "ngrams", "predicted", "scripted")


def draw_jobs(rng: random.Random, tokenizer: Tokenizer) -> list[Job]:
    jobs: list[Job] = []
    for _ in range(rng.randint(1, 5)):
        more: dict[str, Any] = {"structured_outputs": rng.choice(GRAMMARS)} if rng.random() < 0.8 else {}
        if rng.random() < 0.3:
            more["thinking"] = ThinkingBudget(max_tokens=rng.choice([0, 3, 9]), end=END, after=AFTER)
        if rng.random() < 0.3:
            more["logprobs"] = 2
        if rng.random() < 0.2:
            more["stop"] = ["ge", "lift"]
        if rng.random() < 0.2:
            drawn = [rng.randrange(90, 400) for _ in range(9)]
            more["stop_token_ids"] = [each for each in drawn if each not in (END, *AFTER)]
        if rng.random() < 0.2:
            more["repetition_penalty"] = 1.3
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)),
            seed=rng.getrandbits(40),
            max_tokens=rng.choice((5, 30, 60)),
            n=rng.choice((1, 1, 2)),
            **more,
        )
        jobs.append(Job(tokenizer.encode(rng.choice(PROMPTS)), params))
    return jobs


@functools.cache
def alone(dtype: str) -> LLM:
    llm = LLM(dtype=dtype, num_kv_blocks=100, enable_prefix_caching=False, num_lookahead_steps=1, threads=1, seed=0)
    assert llm.engine.scheduler.drafts is None
    return llm


def expecting(job: Job, output: RequestOutput, rng: random.Random) -> Job:
    text = list(rng.choice(output.outputs).token_ids)
    if text and rng.random() < 0.6:
        text[rng.randrange(len(text))] = rng.randrange(400)
    return Job(job.prompt, dataclasses.replace(job.params, prediction=text or None))


def speculator_of(kind: str, seed: int, grammars: Grammars, expected: Sequence[RequestOutput], eos: int) -> Speculator:
    if kind == "scripted":
        known = {
            f"{index}#{answer.index}" if len(output.outputs) > 1 else f"{index}": list(answer.token_ids)
            for index, output in enumerate(expected)
            for answer in output.outputs
        }
        return ScriptedDrafts(seed, lambda request: known[request.request_id], 400, eos)
    proposer = NgramProposer(1 + seed % 2) if kind == "ngrams" else None
    speculator = AdaptiveSpeculator(lambda step: 1.0, 1 + seed % 8, proposer, grammars)
    speculator.reach = speculator.most
    return speculator


def check(seed: int, kind: str) -> collections.Counter[str]:
    rng = random.Random(seed)
    dtype = rng.choice(("bfloat16", "float32"))
    before = alone(dtype)
    jobs = draw_jobs(rng, bundled())
    expected = [run(before, [job])[0] for job in jobs]
    if kind == "predicted":
        jobs = [expecting(job, output, rng) for job, output in zip(jobs, expected, strict=True)]
    llm = LLM(
        dtype=dtype,
        num_kv_blocks=rng.choice((12, 100)),
        max_num_batched_tokens=rng.choice((8, 64, 2048)),
        enable_prefix_caching=rng.random() < 0.5,
        preemption_mode=rng.choice(("recompute", "swap")),
        threads=1,
        seed=0,
    )
    scheduler, grammars = llm.engine.scheduler, llm.engine.core.preparers.grammars
    assert scheduler.drafts is not None and scheduler.drafts.guide is grammars
    eos = bundled().eos_token_ids[0]
    scheduler.drafts = Drafts(scheduler.batch, speculator_of(kind, seed, grammars, expected, eos), grammars)
    outputs = run(llm, jobs, rng.choice(("together", "staggered")), preempting=rng.random() < 0.3, seed=seed)
    for i, (one, other) in enumerate(zip(expected, outputs, strict=True)):
        for (name, truth), (_, found) in zip(everything(one), everything(other), strict=True):
            assert found == truth, f"{name} of request {i}: {first_difference(truth, found)} ({jobs[i].params})"
    assert not len(grammars)
    drafts = scheduler.drafts
    return collections.Counter(accepted=drafts.num_accepted, rejected=drafts.num_drafts - drafts.num_accepted)


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_of_answers_that_follow_something(
    kind: str, count: int, request: pytest.FixtureRequest
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(seed, kind)))
    if request.config.getoption("--seeds") is None:
        assert seen["accepted"] > 3 * count and (seen["rejected"] or kind == "forced"), seen


def test_forced_tokens_are_drafted_without_any_setting() -> None:
    llm = LLM(num_kv_blocks=100, threads=1)
    params = SamplingParams(**{"structured_outputs": {"json": SCHEMA}, "temperature": 0.0, "max_tokens": 80})
    steps = llm.engine.scheduler.step
    answer = llm.generate("Describe a lift.", params)[0].outputs[0]
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and drafts.num_accepted > 5
    assert llm.engine.scheduler.step - steps < len(answer.token_ids)


def test_a_budget_that_ends_in_a_run_of_drafts_is_kept() -> None:
    budget = ThinkingBudget(max_tokens=3, end=END, after=AFTER)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True, thinking=budget)
    prompt = bundled().encode("Describe a lift.")
    expected = run(alone("float32"), [Job(prompt, params)])[0].outputs[0].token_ids
    llm = LLM(dtype="float32", num_kv_blocks=100, threads=1)
    drafted = Job(prompt, dataclasses.replace(params, prediction=list(expected)))
    answer = run(llm, [drafted])[0].outputs[0]
    assert answer.token_ids == expected and tuple(expected[3:7]) == (END, *AFTER)
    assert answer.accepted_prediction_tokens > 3


# -- the test can fail -------------------------------------------------------------------------------------------------

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[plant.__name__] = plant
    return plant


@mutant
def no_draft_is_filtered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grammars, "num_allowed", lambda self, request, drafts: len(drafts))


@mutant
def the_end_may_be_drafted(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Grammars, request: Any, drafts: Sequence[int]) -> int:
        row = self._rows[request.request_id]
        self._follow(row, ())
        return row.matcher.num_allowed(drafts)

    patch.setattr(Grammars, "num_allowed", wrong)


@mutant
def one_mask_for_all_places(patch: pytest.MonkeyPatch) -> None:
    def wrong(job: MaskJob) -> None:
        mask = job.place.matcher.mask()
        job.masks += [None if mask is None else mask.copy()] * (len(job.place.drafts) + 1)

    patch.setattr(mask_work, "fill", wrong)


@mutant
def the_matcher_stays_behind_the_drafts(patch: pytest.MonkeyPatch) -> None:
    landed = Grammars.landed

    def wrong(self: Grammars, rows: Sequence[SamplePlace], step: int, tokens: Any) -> None:
        for place in rows:
            for draft in place.drafts:
                place.row.matcher.consume(draft)
        patched = _LLMatcher.rewind
        _LLMatcher.rewind = lambda self, num_consumed: True  # type: ignore[method-assign]
        try:
            landed(self, rows, step, tokens)
        finally:
            _LLMatcher.rewind = patched  # type: ignore[method-assign]

    patch.setattr(Grammars, "landed", wrong)


@mutant
def a_mask_is_overwritten_by_the_next(patch: pytest.MonkeyPatch) -> None:
    def wrong(job: MaskJob) -> None:
        matcher, drafts = job.place.matcher, job.place.drafts
        for index in range(len(drafts) + 1):
            job.masks.append(matcher.mask())
            if index < len(drafts):
                matcher.consume(drafts[index])
        matcher.rewind(job.at)

    patch.setattr(mask_work, "fill", wrong)


@mutant
def all_drafts_are_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplePlace, "accepted", lambda self, tokens: [*self.drafts, tokens[self.first + len(self.drafts)]])


@mutant
def only_the_newest_token_is_followed(patch: pytest.MonkeyPatch) -> None:
    accepted = SamplePlace.accepted
    patch.setattr(SamplePlace, "accepted", lambda self, tokens: accepted(self, tokens)[-1:])


@pytest.mark.planted("test_drafts_change_no_bit_of_answers_that_follow_something")
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)

    def search() -> None:
        for seed in range(12):
            check(seed, "scripted")

    with pytest.raises(AssertionError):
        search()
