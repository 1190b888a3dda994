"""How many drafts a step computes: against brute force, none where none pays, a probe now and then, nothing left."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from chairlift.request import Request
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.spec_decode.adaptive import AdaptiveSpeculator, best_number
from chairlift.spec_decode.ngram import NgramProposer

REPEATS = [1, 2, 3, 4, 1, 2, 3]


def row(name: str, tokens: Sequence[int] = REPEATS, prediction: Sequence[int] = ()) -> Request:
    return Request(name, list(tokens), max_tokens=50, prediction=tuple(prediction))


def flat(step: StepFeatures) -> float:
    """A step that waits for memory: more rows cost nothing."""
    return 1.0


def dear(step: StepFeatures) -> float:
    """A step that computes: time in proportion to its rows."""
    return float(step.num_decodes)


def make(seconds: Callable[[StepFeatures], float], most: int = 4) -> AdaptiveSpeculator:
    return AdaptiveSpeculator(seconds, most, NgramProposer(2))


def choose(speculator: AdaptiveSpeculator, *rows: Request, most: int = 9, budget: int = 99) -> dict[str, list[int]]:
    step = StepFeatures(num_decodes=len(rows))
    chosen = speculator.choose([(each, most) for each in rows], step, budget)
    return {request.request_id: list(drafts) for request, drafts in chosen}


def test_the_best_number_is_that_of_the_highest_rate() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(500):
        num_rows, ridge = rng.randint(1, 20), rng.randint(1, 40)
        chances = sorted((rng.random() for _ in range(rng.randint(0, 30))), reverse=True)

        def seconds(number: int, rows: int = num_rows, ridge: int = ridge) -> float:
            return max(1.0, (rows + number) / ridge) + 0.01 * number

        rates = [(num_rows + sum(chances[:n])) / seconds(n) for n in range(len(chances) + 1)]
        number = best_number(num_rows, chances, seconds)
        if max(rates) > 1.02 * rates[0] * (1 + 1e-9):
            assert rates[number] == pytest.approx(max(rates))
        else:
            assert number == 0
        seen.add(number)
    assert len(seen) > 10


def test_no_draft_is_worth_a_gain_within_the_noise() -> None:
    assert best_number(1, [0.01], lambda number: 1.0) == 0
    assert best_number(1, [0.03], lambda number: 1.0) == 1
    assert best_number(4, [], lambda number: 1.0) == 0


def test_free_drafts_are_all_computed() -> None:
    assert choose(make(flat), row("a")) == {"a": [4, 1, 2, 3]}


def test_none_where_none_pays() -> None:
    assert choose(make(dear), row("a"), row("b")) == {}


def test_limits_are_kept() -> None:
    assert choose(make(flat), row("a"), most=2) == {"a": [4, 1]}
    assert choose(make(flat, most=1), row("a")) == {"a": [4]}
    chosen = choose(make(flat), row("a"), row("b"), row("c"), budget=5)
    assert sum(map(len, chosen.values())) == 5


def test_the_likelier_rows_come_first() -> None:
    speculator, good, bad = make(flat), row("good"), row("bad")
    for _ in range(12):
        speculator.verified(good, [4, 1], 2)
        speculator.verified(bad, [4, 1], 0)
    assert choose(speculator, bad, good, budget=4) == {"good": [4, 1, 2, 3]}


def test_a_row_whose_drafts_are_wrong_gets_none_any_more() -> None:
    speculator, bad = make(lambda step: 1 + 0.1 * step.num_decodes), row("bad")
    assert choose(speculator, bad)
    for _ in range(30):
        speculator.verified(bad, [4, 1], 0)
    assert choose(speculator, bad) == {}


def test_an_estimate_that_fell_is_probed_and_rises_again() -> None:
    speculator, request = make(lambda step: 1 + 0.1 * step.num_decodes), row("a")
    for _ in range(30):
        speculator.verified(request, [4, 1], 0)
    probes = [step for step in range(1, 100) if choose(speculator, request)]
    assert probes == [24, 48, 72, 96]
    for _ in range(10):
        speculator.verified(request, [4], 1)
    assert choose(speculator, request)


def test_a_probe_is_one_draft() -> None:
    speculator = make(dear)
    sizes = [[len(drafts) for drafts in choose(speculator, row("a"), row("b")).values()] for _ in range(24)]
    assert sizes[:23] == [[]] * 23 and sizes[23] == [1]


def test_nothing_is_looked_up_in_steps_where_nothing_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(NgramProposer, "propose", lambda *given: looked.append(1) or ())
    speculator = make(dear)
    for _ in range(23):
        choose(speculator, *(row(str(number)) for number in range(40)))
    assert not looked


def test_a_request_that_left_leaves_nothing() -> None:
    proposer = NgramProposer(2)
    speculator, request, other = AdaptiveSpeculator(flat, 4, proposer), row("a"), row("b", prediction=[9, 9])
    choose(speculator, request, other)
    speculator.verified(request, [4, 1], 1)
    for each in (request, other, row("never seen")):
        speculator.forget(each)
    assert not len(speculator.acceptance) and not speculator._texts and not len(proposer)


def test_the_text_that_a_request_expects_is_drafted() -> None:
    new, expecting = [50, 51], row("a", [50, 51], prediction=[7, 8, 9])
    assert choose(AdaptiveSpeculator(flat, 3), expecting, row("b", new)) == {"a": [7, 8, 9]}
    assert choose(make(flat), expecting, row("b")) == {"a": [7, 8, 9], "b": [4, 1, 2, 3]}


def test_only_drafts_from_the_text_count_as_predicted() -> None:
    speculator, request = make(flat), row("a", prediction=[7, 8, 9])
    assert choose(speculator, request) == {"a": [7, 8, 9]}
    speculator.verified(request, [7, 8, 9], 2)
    assert (request.num_accepted_predicted, request.num_rejected_predicted) == (2, 1)
    request.token_ids += [7, 8, 50, 51, 52, 7, 8, 50]  # the text is lost, and there is a run that stood there before
    assert choose(speculator, request) == {"a": [51, 52, 7, 8]}
    speculator.verified(request, [51, 52, 7, 8], 4)
    assert (request.num_accepted_predicted, request.num_rejected_predicted) == (2, 1)


def test_a_text_that_is_expected_is_tried_at_once_whatever_drafts_cost() -> None:
    speculator, request = AdaptiveSpeculator(dear, 8), row("a", [50, 51], prediction=[7, 8, 9, 10, 11])
    assert choose(speculator, request) == {"a": [7, 8, 9, 10]}
    speculator.verified(request, [7, 8, 9, 10], 0)
    assert choose(speculator, request) == {}


def test_what_comes_later_is_expected_to_be_as_right_as_what_came() -> None:
    speculator = make(lambda step: 1 + 0.3 * step.num_decodes)
    assert choose(speculator, row("new"))
    for number in range(200):
        speculator.verified(row(str(number)), [4, 1], 0)
        speculator.forget(row(str(number)))
    assert not len(speculator.acceptance)
    assert choose(speculator, row("newer")) == {}
