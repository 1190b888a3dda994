"""How many drafts a step computes: against brute force, none where none pays, a probe now and then, nothing left."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from chairlift.config import SchedulerConfig
from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.acceptance import Source, SourceAcceptance
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator, best_number, speculator_from_config
from chairlift.core.spec_decode.ngram import NgramProposer
from tests.tiers import one_in

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
    speculator = AdaptiveSpeculator(seconds, most, NgramProposer(2))
    speculator.reach = most
    return speculator


def choose(speculator: AdaptiveSpeculator, *rows: Request, most: int = 9, budget: int = 99) -> dict[str, list[int]]:
    step = StepFeatures(num_decodes=len(rows))
    chosen = speculator.choose([(each, most) for each in rows], step, budget)
    return {request.request_id: list(drafts) for request, drafts in chosen}


def test_the_best_number_is_that_of_the_highest_rate_without_a_delay() -> None:
    rng = random.Random(0)
    seen, delayed = set(), 0
    for _ in range(500):
        num_rows, ridge = rng.randint(1, 20), rng.randint(1, 40)
        drafts = sorted(((rng.random(), str(rng.randrange(num_rows))) for _ in range(rng.randint(0, 30))), reverse=True)

        def seconds(number: int, rows: int = num_rows, ridge: int = ridge) -> float:
            return max(1.0, (rows + number) / ridge) + 0.01 * (rows + number)

        rates = {0: num_rows / seconds(0)}
        for number in range(1, len(drafts) + 1):
            gained = sum(chance for chance, _ in drafts[:number])
            first = {name: max(chance for chance, other in drafts if other == name) for _, name in drafts}
            others = sum(chance >= 0.8 * drafts[number - 1][0] for chance in first.values())
            speed_up = 1 + gained / others
            last = seconds(number) / speed_up + (1 - 1 / speed_up) * (seconds(-others) if others < num_rows else 0)
            least = 1 + min(0.02, 0.005 + 0.2 * (seconds(number) / seconds(0) - 1))
            if (num_rows + gained) / seconds(number) <= rates[0] * least:
                continue
            if last <= seconds(0):
                rates[number] = (num_rows + gained) / seconds(number)
            else:
                delayed += (num_rows + gained) / seconds(number) > max(rates.values())
        number = best_number(num_rows, drafts, seconds)
        assert rates[number] == pytest.approx(max(rates.values()))
        seen.add(number)
    assert len(seen) > 8 and delayed > 20


def test_no_draft_is_worth_a_gain_within_the_noise() -> None:
    assert best_number(1, [(0.004, "a")], lambda number: 1.0) == 0
    assert best_number(1, [(0.01, "a")], lambda number: 1.0) == 1
    assert best_number(1, [(0.11, "a")], lambda number: 1 + 0.1 * number) == 0
    assert best_number(1, [(0.13, "a")], lambda number: 1 + 0.1 * number) == 1
    assert best_number(4, [], lambda number: 1.0) == 0


def test_drafts_of_some_rows_do_not_delay_the_others() -> None:
    def seconds(number: int) -> float:
        return 1 + 0.06 * (16 + number)

    assert best_number(16, [(0.9, str(row)) for row in range(16)], seconds) == 16
    assert best_number(16, [(0.9, str(row)) for row in range(8)], seconds) == 0


def test_rows_that_take_turns_do_not_delay_each_other() -> None:
    def seconds(number: int) -> float:
        return 1.0 if number <= 4 else 1.0 + 0.1 * number

    assert best_number(16, [(0.9, str(row)) for row in range(16)], seconds) == 4


def test_free_drafts_are_all_computed() -> None:
    assert choose(make(flat), row("a")) == {"a": [4, 1, 2, 3]}


def test_small_steps_are_measured_before_large_ones() -> None:
    speculator, lengths = AdaptiveSpeculator(flat, 6, NgramProposer(2)), []
    for step in range(40):
        drafts = choose(speculator, request := row(str(step)))[request.request_id]
        speculator.verified(request, drafts, len(drafts))
        lengths.append(len(drafts))
    assert lengths == [1] * 8 + [2] * 8 + [4] * 8 + [6] * 16


def test_rows_get_no_drafts_where_none_pays() -> None:
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
    for _ in range(20):
        speculator.verified(request, [4], 1)
    assert choose(speculator, request)


def test_a_probe_is_one_draft() -> None:
    speculator = make(dear)
    sizes = [[len(drafts) for drafts in choose(speculator, row("a"), row("b")).values()] for _ in range(8)]
    assert sizes == [[], [], [], [1]] * 2


def test_probes_become_rarer_while_they_fail_and_go_round() -> None:
    speculator, rows = make(dear), [row("a"), row("b")]
    probes = []
    for step in range(1, 80):
        for name, drafts in choose(speculator, *rows).items():
            probes.append((step, name))
            speculator.verified(rows["ab".index(name)], drafts, 0)
    assert [step for step, _ in probes] == [4, 12, 28, 52, 76]
    assert [name for _, name in probes[:4]] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


@pytest.mark.parametrize(("price", "steps"), [(0.1, 220), (1.0, 400), (1000.0, 1200)])
def test_probes_of_a_drafter_take_a_small_part_of_the_time(price: float, steps: int) -> None:
    speculator, probes = AdaptiveSpeculator(dear, 4, Priced(price)), []
    for step in range(1, 3 * steps + 1):
        for drafts in choose(speculator, row("a")).values():
            probes.append(step)
            speculator.verified(row("a"), drafts, len(drafts))  # right, and still not worth their time
    assert probes == [steps, 2 * steps, 3 * steps]


def test_the_answer_that_drafts_do_not_pay_is_kept_for_a_few_steps() -> None:
    def steps_kept(num_rows: int, rows: int = 8) -> int:
        """Steps with ``num_rows`` decode rows without a new choice, after a choice with ``rows`` rows."""
        speculator = AdaptiveSpeculator(dear, 4, NgramProposer(2))
        speculator._probe_steps = 100
        assert not speculator.rests(rows)
        assert not choose(speculator, *(row(str(number)) for number in range(rows)))
        for name in range(rows):
            speculator.forget(row(str(name)))
        return next(count for count in range(100) if not speculator.rests(num_rows))

    assert steps_kept(8) == steps_kept(5) == steps_kept(20) == 16
    assert steps_kept(4) == 0  # half of the rows are gone
    assert steps_kept(1, rows=1) == 0  # its only request is gone


def test_a_kept_answer_ends_with_a_result_and_delays_no_probe() -> None:
    speculator = make(dear)
    choose(speculator, row("a"))
    assert speculator.rests(1)
    speculator.verified(row("a"), [1], 1)
    assert not speculator.rests(1)
    probes, number = [], 0
    for step in range(1, 17):
        if speculator.rests(1):
            continue
        number += 1
        probes += [step for drafts in choose(speculator, row("a")).values() if drafts]
    assert probes == [4, 8, 12, 16] and number == 8


def rested(speculator: AdaptiveSpeculator, num_rows: int = 1) -> int:
    """Number of steps with ``num_rows`` decode rows, each with a request of its own, until the next choice."""
    for count in range(10_000):
        if not speculator.rests(num_rows):
            return count
        speculator.forget(row(f"ended {count}"))
        speculator.rests(0)  # a step in which only the next prompt is computed
    raise AssertionError("it rests for ever")


@pytest.mark.parametrize(("alone", "steps"), [(0.05, 16), (0.0005, 60), (0.0001, 128)])
def test_where_drafts_take_time_the_answer_that_they_do_not_pay_is_kept_longer_in_short_steps(
    alone: float, steps: int
) -> None:
    speculator = AdaptiveSpeculator(lambda step: alone * step.num_decodes, 4, Priced(1000.0))
    assert not choose(speculator, row("a")) and rested(speculator) == steps
    assert not choose(speculator, row("a")) and rested(speculator) == steps


def test_a_probe_is_not_late_because_of_the_answer_that_was_kept() -> None:
    speculator, steps = AdaptiveSpeculator(lambda step: 1e-4 * step.num_decodes, 4, Priced(1e-4)), 1
    while not choose(speculator, row("a")):
        steps += 1 + rested(speculator)
    assert steps == 400  # two steps' time in 0.5 % of the time


@pytest.mark.parametrize("ends", ["a checked draft", "half the rows", "twice the rows", "a request with drafts"])
def test_an_answer_of_a_drafter_ends_with_a_change(ends: str) -> None:
    speculator = AdaptiveSpeculator(lambda step: 1e-4 * step.num_decodes, 4, Priced(1000.0))
    rows = [row(str(number)) for number in range(4)]
    speculator.verified(rows[0], [7], 0)
    choose(speculator, *rows)
    for ended in (row("unknown"), rows[1]):
        speculator.forget(ended)
    assert all(speculator.rests(number) for number in (3, 4, 5, 7))
    if ends == "a checked draft":
        speculator.verified(rows[1], [7], 0)
    elif ends == "a request with drafts":
        speculator.forget(rows[0])
    assert not speculator.rests({"half the rows": 2, "twice the rows": 8}.get(ends, 4))


def test_a_drafter_whose_drafts_do_not_pay_takes_little_of_the_time() -> None:
    """A step takes 0.5 ms, a look a tenth of it, and a draft 1 ms. One request after another has 40 tokens."""
    speculator = AdaptiveSpeculator(lambda step: 5e-4 * (0.9 + 0.1 * step.num_decodes), 4, Priced(1e-3))
    steps, taken = 20_000, 0.0
    for step in range(steps):
        request = row(str(step // 40))
        if not speculator.rests(1):
            taken += 5e-5
            for drafts in choose(speculator, request).values():
                taken += 1e-3 + 5e-5
                speculator.verified(request, drafts, step % 2)
        if step % 40 == 39:
            speculator.forget(request)
    assert 0.004 < taken / steps / 5e-4 < 0.0085, taken / steps / 5e-4


def test_nothing_is_looked_up_in_steps_where_nothing_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(NgramProposer, "propose", lambda *given: looked.append(1) or ())
    speculator = make(dear)
    for _ in range(3):
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


def test_the_number_of_heads_does_not_limit_the_text_that_a_request_expects() -> None:
    class Heads(NgramProposer):
        most = 2

        def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
            assert all(limit <= 2 for _, limit in rows)
            return super().propose(rows)

        def seconds(self, num_rows: int) -> float:
            return 0.01

    config = SchedulerConfig(speculative_config='{"method": "medusa", "model": "x", "num_speculative_tokens": 6}')
    speculator = speculator_from_config(config, Costs([1]), 0, drafter=Heads(2))
    assert speculator is not None
    speculator._seconds, speculator.reach = flat, 6
    assert choose(speculator, row("b")) == {"b": [4, 1]}
    expecting = row("a", [50, 51], prediction=[7, 8, 9, 10, 11, 12])
    assert choose(speculator, expecting) == {"a": [7, 8, 9, 10, 11, 12]}


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


def test_untried_positions_are_expected_to_be_as_right_as_those_before() -> None:
    speculator = make(lambda step: 1 + 0.3 * step.num_decodes)
    assert choose(speculator, row("new"))
    for number in range(200):
        speculator.verified(row(str(number)), [4, 1], 0)
        speculator.forget(row(str(number)))
    assert not len(speculator.acceptance)
    assert choose(speculator, row("newer")) == {}


# -- against fixed numbers, on the step times of processors ------------------------------------------------------------

CURVES = {
    "Zen 5": {1: 1.0, 4: 1.01, 8: 1.06, 16: 1.15, 32: 1.77, 64: 3.43, 128: 6.8, 1024: 54.4},
    "Zen 4": {1: 1.0, 4: 1.02, 8: 1.05, 16: 1.12, 32: 2.04, 64: 3.93, 128: 7.9, 1024: 63.2},
    "Zen 3": {1: 1.0, 4: 0.97, 8: 1.56, 16: 2.74, 32: 5.53, 64: 10.9, 128: 21.8, 1024: 174.4},
}
"""Rows of a step -> its time relative to one row: two threads, the shape of Qwen2.5-0.5B in bfloat16."""
LENGTH = 64
"""Tokens of each answer."""


class Any7:
    """Drafts the same token as often as may be. Whether it is right is drawn by :func:`tokens_per_second`."""

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        return [[7] * most for _, most in rows]

    def seconds(self, num_rows: int) -> float:
        return 0.0

    def forget(self, request: Request) -> None: ...


class Priced(Any7):
    """One draft for each row takes ``price`` seconds."""

    def __init__(self, price: float) -> None:
        self._price = price

    def seconds(self, num_rows: int) -> float:
        return self._price


class Fixed(AdaptiveSpeculator):
    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        return [(request, [7] * min(most, self.most)) for request, most in rows if self.most]


def tokens_per_second(
    speculator: AdaptiveSpeculator,
    chances: Sequence[Sequence[float]],
    seed: int,
    seconds: Callable[[StepFeatures], float],
    saw: Callable[[StepFeatures, int], None] = lambda step, num_drafts: None,
) -> float:
    """Tokens per second of answers that begin together. ``chances`` has, for each answer, the probability by position
    that a draft is right after only right drafts; the last entry holds for later positions. ``seconds`` gives the time
    that a step takes. ``saw`` is called after each step, with its number of drafts."""
    rng, taken = random.Random(seed), 0.0
    rows = [row(f"{seed}-{number}") for number in range(len(chances))]
    left = dict.fromkeys((request.request_id for request in rows), LENGTH)
    while live := [request for request in rows if left[request.request_id]]:
        step = StepFeatures(num_decodes=len(live))
        limits = [(request, most) for request in live if (most := left[request.request_id] - 1)]
        chosen = {request.request_id: drafts for request, drafts in speculator.choose(limits, step, 10**6)}
        num_drafts = sum(map(len, chosen.values()))
        step = StepFeatures(len(live) + num_drafts)
        taken += seconds(step)
        saw(step, num_drafts)
        for request in live:
            drafts, right, own = chosen.get(request.request_id, ()), 0, chances[rows.index(request)]
            while right < len(drafts) and rng.random() < own[min(right, len(own) - 1)]:
                right += 1
            if drafts:
                speculator.verified(request, drafts, right)
            left[request.request_id] -= right + 1
    for request in rows:
        speculator.forget(request)
    return LENGTH * len(rows) / taken


def curve(name: str) -> Callable[[StepFeatures], float]:
    """Function from the features of a step to its time on a processor of :data:`CURVES`."""
    sizes, times = list(CURVES[name]), list(CURVES[name].values())
    return lambda step: float(np.interp(step.num_decodes, sizes, times))


def compared(
    make: Callable[[], AdaptiveSpeculator],
    own: Sequence[float],
    num_rows: int,
    seconds: Callable[[StepFeatures], float],
    saw: Callable[[StepFeatures, int], None] = lambda step, num_drafts: None,
) -> tuple[float, float]:
    """Tokens per second of a speculator that has seen some requests before: (divided by the best fixed number of
    drafts, divided by no drafts). ``own`` has each answer's chances by position."""
    chances, speculator = [own] * num_rows, make()
    for seed in range(3):
        tokens_per_second(speculator, chances, 100 + seed, seconds, saw)
    seeds = range({1: 6, 4: 6, 16: 4, 64: 1}[num_rows])
    found = statistics.fmean(tokens_per_second(speculator, chances, seed, seconds, saw) for seed in seeds)
    rates = [
        statistics.fmean(tokens_per_second(Fixed(seconds, most, Any7()), chances, seed, seconds) for seed in seeds)
        for most in (0, 1, 2, 3, 4, 6, 8)
    ]
    return found / max(rates), found / rates[0]


CHANCES = {
    "useless": [0.05],
    "good": [0.7],
    "very good": [0.9],
    "falling, as of heads": [0.7, 0.5, 0.35, 0.2],
    "falling fast": [0.6, 0.2, 0.1],
    "rising, as of n-grams": [0.35, 0.8, 0.9, 0.95],
    "rising from a low chance": [0.2, 0.9, 0.95],
}
"""Chances of drafts by position."""


@pytest.mark.parametrize("name", one_in(3, CURVES))
@pytest.mark.parametrize("own", CHANCES.values(), ids=CHANCES)
def test_the_number_that_is_chosen_is_nearly_the_best_fixed_one(name: str, own: Sequence[float]) -> None:
    seconds = curve(name)
    for num_rows in (1, 4, 16, 64):
        of_best, of_none = compared(lambda: AdaptiveSpeculator(seconds, 8, Any7()), own, num_rows, seconds)
        assert of_best > 0.95, (num_rows, of_best)
        assert of_none > 0.98, (num_rows, of_none)


def test_one_chance_for_all_positions_misses_the_best_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one chance for all positions, drafts look as good as their mean, and the first one looks too good."""
    counts = [0.5, 1.0]

    def learn(self: SourceAcceptance, name: str, num_drafts: int, num_accepted: int) -> None:
        counts[:] = counts[0] + num_accepted, counts[1] + min(num_drafts, num_accepted + 1)

    def survivals(self: SourceAcceptance, name: str, number: int) -> list[float]:
        return [(counts[0] / counts[1]) ** at for at in range(1, number + 1)]

    monkeypatch.setattr(SourceAcceptance, "learn", learn)
    monkeypatch.setattr(SourceAcceptance, "survivals", survivals)
    seconds, own = curve("Zen 5"), CHANCES["rising from a low chance"]
    assert (
        min(compared(lambda: AdaptiveSpeculator(seconds, 8, Any7()), own, rows, seconds)[0] for rows in (1, 4)) < 0.95
    )


def test_drafts_that_pay_only_in_numbers_are_found() -> None:
    def seconds(step: StepFeatures) -> float:  # a step with drafts takes half as long again, however many there are
        return 1.0 if step.num_decodes == 1 else 1.5

    for price in (0.0, 1e-6):
        speculator = AdaptiveSpeculator(seconds, 4, Priced(price))
        for number in range(200):
            speculator.verified(row(str(number)), [7] * 4, 4 * (number % 10 < 3))
        assert speculator.acceptance[Source.PROPOSED].survivals("new", 1)[0] < 0.4
        assert choose(speculator, row("new")) == {"new": [7] * 4}


def test_a_proposer_makes_as_many_drafts_as_its_later_positions_deserve() -> None:
    def depth(chances: Sequence[float]) -> int:
        speculator, rng = AdaptiveSpeculator(flat, 8, Priced(0.15)), random.Random(1)
        for number in range(400):
            right = 0
            while right < 8 and rng.random() < chances[min(right, len(chances) - 1)]:
                right += 1
            speculator.verified(row(str(number)), [7] * 8, right)
        return max(map(len, choose(speculator, row("new")).values()), default=0)

    assert depth(CHANCES["falling fast"]) == 1
    assert depth(CHANCES["falling, as of heads"]) == 2
    assert depth(CHANCES["rising, as of n-grams"]) > 4


def compared_while_learning(seed: int, own: Sequence[float], num_rows: int, name: str) -> tuple[float, float]:
    """As :func:`compared`, with step times that are learnt from the steps that run. They are noisy, and some are
    outliers."""
    costs, rng, seconds = Costs([1]), random.Random(seed), curve(name)

    def saw(step: StepFeatures, num_drafts: int) -> None:
        noise = rng.lognormvariate(0, 0.05) * (3 if rng.random() < 0.02 else 1)
        if num_drafts or rng.random() < 1 / 8:  # the fraction of plain decode steps that Costs.wants
            costs.observe(step, 0.02 * seconds(step) * noise, 0)

    return compared(lambda: AdaptiveSpeculator(costs.decode_seconds, 8, Any7()), own, num_rows, seconds, saw)


@pytest.mark.full
@pytest.mark.parametrize("name", one_in(3, CURVES))
@pytest.mark.parametrize("own", [[0.05], [0.7], [0.9]], ids=str)
def test_the_number_is_nearly_the_best_where_step_times_are_learnt(name: str, own: Sequence[float]) -> None:
    """The mean of four runs counts. If the first times of a size are outliers, the engine may choose badly for a whole
    run: about one run in 15. A single request tries large steps first, so the times of smaller ones stay guesses."""
    for num_rows in (1, 4, 16, 64):
        runs = [compared_while_learning(num_rows + 1000 * seed, own, num_rows, name) for seed in range(4)]
        of_best, of_none = (statistics.fmean(found) for found in zip(*runs, strict=True))
        assert of_best > 0.93, (num_rows, of_best)
        assert of_none > 0.96, (num_rows, of_none)


@pytest.mark.parametrize("name", one_in(3, CURVES))
def test_wrong_first_times_of_steps_without_drafts_do_not_last(name: str) -> None:
    """The first three such steps take ten times as long as usual, so drafts seem to pay."""
    costs, rng, seconds, plain, own = Costs([1]), random.Random(0), curve(name), 0, [[0.05]] * 16
    speculator = AdaptiveSpeculator(costs.decode_seconds, 8, Any7())

    def saw(step: StepFeatures, num_drafts: int) -> None:
        nonlocal plain
        noise = rng.lognormvariate(0, 0.05)
        if num_drafts or speculator.measures or rng.random() < 1 / 8:
            plain += not num_drafts
            outlier = 10 if not num_drafts and plain <= 3 else 1
            costs.observe(step, 0.02 * seconds(step) * noise * outlier, 0)

    found = [tokens_per_second(speculator, own, seed, seconds, saw) for seed in range(32)][-4:]
    without = tokens_per_second(Fixed(seconds, 0, Any7()), own, 0, seconds)
    assert statistics.fmean(found) > 0.99 * without, statistics.fmean(found) / without


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    speculator, plain = make(flat), dict[int, list[int]]({1: [], 2: []})
    drafts = Drafts.__new__(Drafts)
    drafts.speculator = speculator
    for step in range(1, 1001):
        for rows in (1, 2):
            chosen = choose(speculator, *(row(str(number)) for number in range(rows)))
            assert drafts.measures() == (not chosen) and not drafts.measures()
            if not chosen:
                plain[rows].append(step)
            for name, tokens in chosen.items():
                speculator.verified(row(name), tokens, len(tokens))
    assert plain == {1: [201, 402, 603, 804], 2: [201, 402, 603, 804]}


@pytest.mark.parametrize("name", one_in(3, CURVES))
def test_drafts_for_half_of_the_answers_delay_the_last_one_little(name: str) -> None:
    seconds = curve(name)
    for num_rows in (4, 16, 64):
        chances = [[0.9] if number % 2 else [0.1] for number in range(num_rows)]
        speculator = AdaptiveSpeculator(seconds, 8, Any7())
        found = statistics.fmean(tokens_per_second(speculator, chances, seed, seconds) for seed in range(4))
        without = tokens_per_second(Fixed(seconds, 0, Any7()), chances, 0, seconds)
        assert found > 0.96 * without, (num_rows, found / without)
