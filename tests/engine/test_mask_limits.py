"""Limits on the time of masks end the request that took most, with an error that names them, and no other request."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.base.thinking import ThinkingBudget
from chairlift.engine.mask_limits import MaskBudget, MaskLedger, MaskLimits
from chairlift.engine.thinking import ThinkingMatcher
from tests.engine.test_grammars import make

LIMITS = MaskLimits(usual_ms=2.0, request_seconds=5.0, tenant_share=0.25)


class _Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _budgets(count: int, tenant: str = "") -> list[MaskBudget]:
    ledger = MaskLedger(LIMITS, _Time())
    return [MaskBudget(ledger, tenant, num_answers=1) for _ in range(count)]


def test_masks_of_the_usual_length_have_no_limit() -> None:
    (budget,) = _budgets(1)
    for _ in range(100_000):
        budget.spend(0.001, 1)
    assert not budget.error and not budget.excess and budget.seconds == pytest.approx(100)


def test_a_few_slow_masks_among_many_do_not_count() -> None:
    (budget,) = _budgets(1)
    for number in range(50_000):
        budget.spend(0.025 if number % 100 == 0 else 0.0004, 1)
    assert not budget.error


def test_the_limit_of_a_request_holds_for_all_its_answers_and_is_named() -> None:
    (budget,) = _budgets(1)
    budget.num_answers = 16
    for _ in range(112):
        budget.spend(0.047, 1)
    assert budget.error.startswith("structured_outputs cannot be followed: the 112 masks of all answers")
    assert "took 5.26 s" in budget.error
    assert "2 ms per mask and 5 s in addition are allowed (usual_mask_ms, max_mask_seconds)" in budget.error


def test_the_limit_of_a_tenant_ends_its_most_expensive_request_only() -> None:
    first, second, worst, cheap, usual = budgets = _budgets(5, "one")
    stranger = MaskBudget(first.ledger, "other", num_answers=1)
    for budget, seconds in ((first, 4.5), (worst, 4.9), (second, 4.8), (stranger, 4.9), (cheap, 0.5)):
        budget.spend(seconds, 1)
        for _ in range(100):
            usual.spend(0.001, 1)
    assert not any(each.error for each in (*budgets, stranger))
    cheap.spend(0.5, 1)
    assert "(max_tenant_mask_share 0.25)" in worst.error and "15 s are allowed" in worst.error
    assert "the masks of this request took 4.9 s, the most of all" in worst.error
    assert not any(each.error for each in (first, second, cheap, usual, stranger))


def test_a_tenants_time_is_forgotten_after_a_minute() -> None:
    ledger = MaskLedger(LIMITS, _Time())
    for _ in range(4):
        budget = MaskBudget(ledger, "one", num_answers=1)
        budget.spend(4.5, 1)
        ledger._now.now += 61  # type: ignore[attr-defined]
        assert not budget.error


def test_a_request_that_has_ended_is_not_ended_again_and_a_small_one_goes_on() -> None:
    first, second, third, small = _budgets(4)
    first.num_answers = 0
    for each in (first, second, third):
        each.spend(4.9, 1)
    small.spend(0.09, 1)
    small.spend(0.5, 1)
    assert not first.error and (second.error or third.error) and not small.error


def test_a_thinking_budget_takes_no_token_after_an_error() -> None:
    matcher = ThinkingMatcher(ThinkingBudget(max_tokens=5, end=2), 10)
    matcher.error = "a limit"
    assert not matcher.consume(3) and not matcher.num_consumed


def _limited(**settings: Any) -> LLM:
    return make(usual_mask_ms=0.0, **settings)


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_an_answer_over_the_limit_ends_and_its_neighbours_go_on(batching: str) -> None:
    llm = _limited(max_mask_seconds=0.001, batching=batching)
    asked = SamplingParams(structured_outputs={"regex": "([a-z]{1,50} ){1,500}"}, max_tokens=200, n=3, temperature=1.0)
    free = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
    alone = llm.generate("Hi", free)[0].outputs[0].token_ids
    limited, neighbour = llm.generate(["Hi", "Hi"], [asked, free])
    assert "0.001 s in addition are allowed" in (limited.error or "")
    assert neighbour.error is None and neighbour.outputs[0].token_ids == alone
    assert not llm.engine.core.kv.counts().used and not len(llm.engine.core.preparers.grammars)


def test_the_share_of_a_tenant_is_a_setting() -> None:
    llm = _limited(max_tenant_mask_share=0.001)
    slow = SamplingParams(structured_outputs={"regex": "[a-z ]{300}"}, max_tokens=10)
    llm.engine.add_request("Hi", slow, request_id="slow")
    llm.engine.step()
    (row,) = llm.engine.core.preparers.grammars._rows.values()
    row.budget.spend(0.2, 1)
    done = [output for _ in range(20) for output in llm.engine.step() if output.finished]
    assert "of all requests of this client" in (done[0].error or "")


FORMS: dict[str, dict[str, Any]] = {
    "200 required properties": {
        "json": {
            "type": "object",
            "properties": {f"property{i}": {"type": "string"} for i in range(200)},
            "required": [f"property{i}" for i in range(200)],
        }
    },
    "enum of 3,000 texts": {"json": {"type": "array", "items": {"enum": [f"value {i * i}" for i in range(3000)]}}},
    "100 forms of objects": {
        "json": {
            "anyOf": [
                {"type": "object", "properties": {"kind": {"const": f"k{i}"}, f"v{i}": {"type": "number"}}}
                for i in range(100)
            ]
        }
    },
    "formats": {
        "json": {
            "type": "object",
            "properties": {name: {"type": "string", "format": name} for name in ("email", "date-time", "uuid", "uri")},
            "required": ["email", "date-time", "uuid", "uri"],
        }
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.mark.parametrize("name", sorted(FORMS))
def test_large_schemas_stay_far_below_the_limits(name: str, llm: LLM) -> None:
    """The limit of a request is 5 s above 2 ms per mask. These forms need at most a thousandth of it."""
    compiler = llm.engine.core.preparers.grammars._compiler
    assert compiler is not None
    matcher = compiler.compile(StructuredOutputsParams(**FORMS[name]).value).matcher()
    rng, (budget,) = random.Random(0), _budgets(1)
    for _ in range(100):
        begin = time.thread_time()
        mask = matcher.mask()
        budget.spend(time.thread_time() - begin, 1)
        ids = [] if mask is None else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not ids or matcher.stopped or not matcher.consume(rng.choice(ids)):
            break
    assert not matcher.error and budget.excess < 0.5 and not budget.error
