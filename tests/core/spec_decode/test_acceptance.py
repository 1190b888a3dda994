"""Estimates of acceptance: against known chances by position, for new requests, for unlike requests, over time."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from chairlift.core.spec_decode import acceptance
from chairlift.core.spec_decode.acceptance import Acceptance, Source, SourceAcceptance

HEADS = (0.7, 0.5, 0.35, 0.2)
"""Chances by position that fall, as those of Medusa heads."""
NGRAM = (0.35, 0.8, 0.9, 0.95)
"""Chances by position that rise, as those of n-grams."""


def teach(
    estimate: SourceAcceptance, chances: Sequence[float], rows: int, name: str = "r{}", seed: int = 0
) -> SourceAcceptance:
    """Learn from ``rows`` rows with a draft at each position. ``name`` is the request of row ``{}``; it ends at once if
    each row has its own."""
    rng = random.Random(seed)
    for number in range(rows):
        right = 0
        while right < len(chances) and rng.random() < chances[right]:
            right += 1
        request = name.format(number)
        estimate.learn(request, len(chances), right)
        if "{}" in name:
            estimate.requests.pop(request)
    return estimate


def chances_of(estimate: SourceAcceptance, name: str, number: int) -> list[float]:
    """Estimated chances by position."""
    found = [1.0, *estimate.survivals(name, number)[:number]]
    return [after / before for before, after in pairwise(found)]


def close(found: Sequence[float], expected: Sequence[float], within: float) -> bool:
    return len(found) == len(expected) and all(abs(a - b) < within for a, b in zip(found, expected, strict=True))


def check_new_requests_get_the_chances_of_the_others(module: types.ModuleType) -> None:
    for chances in (HEADS, NGRAM, (0.6,) * 4):
        estimate = teach(module.SourceAcceptance(0.5), chances, 3000)
        assert close(chances_of(estimate, "new", 4), chances, 0.12), (chances, chances_of(estimate, "new", 4))
        assert close(chances_of(estimate, "new", 1), chances[:1], 0.08)


def check_a_request_of_many_rows_gets_its_own_chances(module: types.ModuleType) -> None:
    for chances in (HEADS, NGRAM):
        estimate = teach(module.SourceAcceptance(0.5), chances, 600, "a")
        assert close(chances_of(estimate, "a", 2), chances[:2], 0.2), chances_of(estimate, "a", 2)


def check_an_unlike_request_gets_its_own_soon(module: types.ModuleType) -> None:
    estimate = teach(module.SourceAcceptance(0.5), NGRAM, 1000)
    for number in range(20):  # requests differ, so the own record counts
        teach(estimate, ((0.9,) * 4, (0.02,) * 4)[number % 2], 20, f"before {number}", number)
    new = chances_of(estimate, "new", 4)
    for _ in range(6):
        estimate.learn("bad", 4, 0)
        estimate.learn("good", 4, 4)
    bad, good = chances_of(estimate, "bad", 4), chances_of(estimate, "good", 4)
    assert bad[0] < 0.15 and good[0] > 0.8 and 0.2 < new[0] < 0.6
    assert all(a < b <= c for a, b, c in zip(bad, new, good, strict=True))


def check_drafts_behind_the_first_wrong_one_teach_nothing(module: types.ModuleType) -> None:
    short, long = module.SourceAcceptance(0.5), module.SourceAcceptance(0.5)
    for name in "abcab":
        short.learn(name, 2, 1)
        long.learn(name, 8, 1)
    for name in ("a", "new"):
        assert short.survivals(name, 8)[:8] == long.survivals(name, 8)[:8]
    assert short.weight("a") == long.weight("a")


def check_old_drafts_are_forgotten(module: types.ModuleType) -> None:
    estimate = teach(module.SourceAcceptance(0.5), (0.9,) * 4, 2000)
    teach(estimate, HEADS, 1500, seed=1)
    assert close(chances_of(estimate, "new", 3), HEADS[:3], 0.15), chances_of(estimate, "new", 3)
    teach(estimate, (0.9,) * 4, 60, "a", seed=2)
    assert chances_of(estimate, "a", 1)[0] > 0.75
    teach(estimate, (0.1,) * 4, 60, "a", seed=3)
    assert chances_of(estimate, "a", 1)[0] < 0.35


CHECKS: list[Callable[[types.ModuleType], None]] = [
    check_new_requests_get_the_chances_of_the_others,
    check_a_request_of_many_rows_gets_its_own_chances,
    check_an_unlike_request_gets_its_own_soon,
    check_drafts_behind_the_first_wrong_one_teach_nothing,
    check_old_drafts_are_forgotten,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_estimates_of_acceptance_follow_the_observed_drafts(check: Callable[[types.ModuleType], None]) -> None:
    check(acceptance)


PLANTED = {
    "the position is ignored": [
        ("odds = factor * chances[at]\n", "odds = factor * chances[0]\n"),
        ("chance = odds / (1 - chances[at] + odds)", "chance = odds / (1 - chances[0] + odds)"),
    ],
    "the position is off by one": [
        ("checked[at] += share", "checked[max(0, at - 1)] += share"),
        ("right[at] += share", "right[max(0, at - 1)] += share"),
    ],
    "the request's own record is ignored": [("return (self.above + extra) / (self.below + extra)", "return 1.0")],
    "drafts after the first wrong one are learnt": [("min(num_drafts, num_accepted + 1)", "num_drafts")],
    "the last right draft is taken for a wrong one": [("if at < num_accepted:", "if at < num_accepted - 1:")],
    "a source forgets nothing": [("_SHARED_KEPT: Final = 0.995", "_SHARED_KEPT: Final = 1.0")],
    "a request forgets nothing": [("_KEPT: Final = 0.95\n", "_KEPT: Final = 1.0\n")],
    "wrong drafts do not count for the request": [("                below += chance\n", "")],
    "probabilities are not multiplied": [("survival *= chance", "survival = chance")],
}
"""Bug -> (text, replacement) for each change of the module."""


@pytest.mark.planted("test_estimates_of_acceptance_follow_the_observed_drafts")
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str) -> None:
    source = Path(acceptance.__file__).read_text(encoding="utf-8")
    for text, replacement in PLANTED[bug]:
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    module = types.ModuleType("planted")
    exec(compile(source, "planted", "exec"), module.__dict__)
    failed = 0
    for check in CHECKS:
        try:
            check(module)
        except AssertionError:
            failed += 1
    assert failed


def test_without_drafts_the_chances_are_between_the_first_estimate_and_one() -> None:
    assert SourceAcceptance(0.5).survivals("a", 3) == pytest.approx([0.5, 0.5 * 0.65, 0.5 * 0.65 * 0.755])
    for source in Source:
        assert Acceptance()[source].survivals("a", 1)[0] == pytest.approx(source.value)


def test_no_chance_exceeds_the_limit() -> None:
    estimate = SourceAcceptance(0.5)
    for _ in range(1000):
        estimate.learn("a", 4, 4)
    assert estimate.survivals("a", 4) == pytest.approx([0.98, 0.98**2, 0.98**3, 0.98**4])


def test_probabilities_never_rise_along_a_row_and_stay_within_bounds() -> None:
    rng = random.Random(5)
    for _ in range(50):
        estimate = SourceAcceptance(rng.random() * 0.9 + 0.05)
        for _ in range(rng.randint(0, 400)):
            drafts = rng.randint(0, 9)
            estimate.learn(rng.choice("abcd"), drafts, rng.choice((0, drafts, rng.randint(0, drafts))))
        best = estimate.best("abcde", 12)[:12]
        for name in "abcde":
            found = estimate.survivals(name, 12)[:12]
            assert all(0 < after <= before <= 0.98 for before, after in pairwise(found))
            assert all(one <= other for one, other in zip(found, best, strict=True))


def test_a_request_that_left_is_like_a_new_one() -> None:
    estimates = Acceptance()
    for name in ("a", "b"):
        estimates[Source.PROPOSED].learn(name, 3, 0)
    estimates[Source.FORCED].learn("a", 3, 0)
    assert len(estimates) == 2
    estimates.forget("a")
    assert len(estimates) == 1 and not estimates[Source.FORCED].requests
    assert estimates[Source.PROPOSED].survivals("a", 2)[:2] == estimates[Source.PROPOSED].survivals("new", 2)[:2]
