"""The search for settings, on machines that are formulas: what is best is known, and a thousand trials take no time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest

from chairlift_lab.bench.tune_lab import Lab, LabTraffic
from chairlift_lab.bench.tune_search import Judge, SettingScore, Space, search, shortfall
from chairlift_lab.bench.tune_state import Setting, StoredFigures

FINE = StoredFigures(
    requests=100,
    seconds=5.0,
    requests_per_second=20.0,
    output_tokens_per_second=1000.0,
    ttft_p50=0.1,
    ttft_p99=0.2,
    tpot_p50=0.03,
    tpot_p99=0.05,
    e2el_p50=1.0,
    e2el_p99=2.0,
    preemption_rate=0.0,
    goodput=None,
    mean_rows=8.0,
)
START = Setting(
    batching="continuous",
    max_num_seqs=16,
    max_num_batched_tokens=256,
    admission_watermark=0.01,
    prefill_mode="mixed",
    preemption_mode="auto",
)
SPACE = Space(
    rows=(4, 8, 16, 32, 64),
    tokens=(256, 1024),
    watermarks=(0.01, 0.15),
    prefill_modes=("mixed", "separate", "decode_first"),
    preemption_modes=("auto", "swap"),
)


def test_rules_of_eviction_are_searched_if_there_are_several() -> None:
    space = dataclasses.replace(SPACE, evictions=("auto", "lease"))
    found = {setting.cache_eviction for setting in space.neighbours(START, 2.0)}
    assert found == {"auto", "lease"}
    assert {setting.cache_eviction for setting in SPACE.neighbours(START, 2.0)} == {"auto"}
    assert {setting.cache_eviction for setting in space.everything()} == {"auto", "lease"}
    leased = dataclasses.replace(START, cache_eviction="lease")
    assert (leased.flat()["cache_eviction"], leased.describe()) == ("lease", "16 slots, 256 tokens, eviction lease")


class Formula(Lab):
    """A simulator that is a formula of setting and rate, and remembers what it was asked."""

    def __init__(self, formula: Callable[[Setting, float | None], StoredFigures]) -> None:
        self._formula = formula
        self.traffic = LabTraffic([])
        self.asked: list[tuple[Setting, float | None]] = []

    def simulate(self, setting: Setting, rate: float | None, count: int) -> StoredFigures:
        self.asked.append((setting, rate))
        assert count == 100
        return self._formula(setting, rate)


def by_speed(speed: Callable[[Setting], float]) -> Judge:
    """A judge of all requests at once, where a setting gets so many tokens per second through and breaks nothing."""
    lab = Formula(lambda setting, rate: dataclasses.replace(FINE, output_tokens_per_second=speed(setting)))
    return Judge(lab, 100, by_rate=False)


def by_capacity(capacity: Callable[[Setting], float]) -> tuple[Judge, Formula]:
    """A judge by rates, where a setting keeps its promises up to its capacity: half of them above it, a tenth above
    twice that. Everybody gets 20 requests of 50 tokens through in a second."""

    def formula(setting: Setting, rate: float | None) -> StoredFigures:
        if rate is None:
            return dataclasses.replace(FINE, goodput=0.0)
        most = capacity(setting)
        goodput = 1.0 if rate <= most else 0.5 if rate <= 2 * most else 0.1
        return dataclasses.replace(FINE, goodput=goodput, output_tokens_per_second=50 * min(rate, 20.0))

    lab = Formula(formula)
    return Judge(lab, 100, by_rate=True), lab


def for_ever() -> Callable[[], bool]:
    """Never out of time; but a search that does not end is noticed."""
    looks = itertools.count()

    def out_of_time() -> bool:
        assert next(looks) < 5000, "the search does not end"
        return False

    return out_of_time


def rows(count: int) -> Setting:
    return dataclasses.replace(START, max_num_seqs=count)


def found(judge: Judge) -> Setting:
    return max(judge.scores, key=lambda setting: judge.scores[setting])


def octaves(one: float, other: float) -> float:
    return abs(math.log2(one / other))


# --- what is good ----------------------------------------------------------------------------------------------------


def test_preemptions_have_a_margin_for_the_error_of_the_simulator() -> None:
    assert shortfall(dataclasses.replace(FINE, preemption_rate=0.0149)) == 0
    assert shortfall(dataclasses.replace(FINE, preemption_rate=0.0175)) == pytest.approx(0.0025)


def test_breaking_two_targets_is_worse_than_breaking_one() -> None:
    late, preempting = dataclasses.replace(FINE, goodput=0.9), dataclasses.replace(FINE, preemption_rate=0.1)
    both = dataclasses.replace(late, preemption_rate=0.1)
    assert 0 < max(shortfall(late), shortfall(preempting)) < shortfall(both)


def test_settings_that_keep_targets_win_over_faster_ones() -> None:
    def formula(setting: Setting, rate: float | None) -> StoredFigures:
        slots = setting.max_num_seqs
        return dataclasses.replace(
            FINE, output_tokens_per_second=100.0 * slots, preemption_rate=max(0.0, (slots - 16) / 100)
        )

    judge = Judge(Formula(formula), 100, by_rate=False)
    scores = [judge.score(rows(count)) for count in (64, 32, 8, 16)]
    assert scores == sorted(scores)
    assert [score.keeps for score in scores] == [False, False, True, True]
    assert judge.best == scores[-1]


def test_the_best_stays_the_best_when_a_worse_one_comes_after_it() -> None:
    judge = by_speed(lambda setting: 100.0 * setting.max_num_seqs)
    best = judge.score(rows(32))
    judge.score(rows(4))
    assert judge.best == best == SettingScore(True, 3200.0)


# --- how fast requests may come --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.45, 3.0, 13.0, 15.9, 16.1, 19.0])
def test_the_capacity_is_found_from_below(capacity: float) -> None:
    judge, _ = by_capacity(lambda setting: capacity)
    score = judge.score(START)
    assert score.keeps
    assert score.exact
    assert score.rate is not None
    assert capacity / 1.015 <= score.rate <= capacity
    assert score.value == pytest.approx(50 * score.rate)


def test_no_more_is_promised_than_all_at_once_get_through() -> None:
    judge, _ = by_capacity(lambda setting: math.inf)
    best = judge.score(START)
    assert best.rate == FINE.requests_per_second
    for count in (4, 8, 32):
        assert judge.score(rows(count)) < best, "one after the other would else be a little better than the one before"
        assert judge.score(rows(count), exact=True).rate == FINE.requests_per_second
    assert judge.best.rate == FINE.requests_per_second


def test_a_worse_setting_is_not_scored_exactly_unless_asked() -> None:
    judge, lab = by_capacity(lambda setting: setting.max_num_seqs / 4)
    best = judge.score(rows(32))
    before = len(lab.asked)
    rough = [judge.score(rows(count)) for count in (31, 16, 3)]
    assert len(lab.asked) == before + 3
    assert not any(score.exact for score in rough)
    assert best > rough[0] >= rough[1] > rough[2], "who breaks more is worse"
    assert judge.best == best
    exact = judge.score(rows(16), exact=True)
    assert exact.exact
    assert exact.rate == pytest.approx(4.0, rel=0.015)
    assert judge.scores[rows(16)] == exact
    before = len(lab.asked)
    assert judge.score(rows(16), exact=True) == judge.score(rows(16)) == exact
    assert len(lab.asked) == before, "known"


def test_a_better_setting_is_scored_exactly() -> None:
    judge, _ = by_capacity(lambda setting: setting.max_num_seqs / 4)
    judge.score(rows(16))
    better = judge.score(rows(32))
    assert better.exact
    assert better.rate == pytest.approx(8.0, rel=0.015)
    assert judge.best == better


def test_a_setting_of_low_capacity_is_found_after_hopeless_ones() -> None:
    judge, lab = by_capacity(lambda setting: {32: 1.0, 16: 0.0, 8: 0.0}[setting.max_num_seqs])
    hopeless = judge.score(rows(16))
    assert not hopeless.keeps
    assert hopeless.rate is None
    before = len(lab.asked)
    assert not judge.score(rows(8)).keeps
    assert len(lab.asked) == before + 1, "one look at a rate that is low enough tells"
    assert judge.score(rows(32)).rate == pytest.approx(1.0, rel=0.015)


# --- where it looks --------------------------------------------------------------------------------------------------


def test_the_grid_has_no_fewer_tokens_than_slots_and_everything_has_all() -> None:
    space = dataclasses.replace(SPACE, tokens=(16, 256))
    pairs = [(setting.max_num_seqs, setting.max_num_batched_tokens) for setting in space.grid(START)]
    assert pairs == [(4, 16), (4, 256), (8, 16), (8, 256), (16, 16), (16, 256), (32, 256), (64, 256)]
    given = dataclasses.replace(SPACE, tokens=(16,))
    assert len(list(given.grid(START))) == 5, "what was given stays"
    every = list(SPACE.everything())
    assert len(every) == len(set(every)) == 5 * 2 * 2 * 3 * 2
    assert START in every


def test_one_thing_at_a_time_is_changed_and_stays_in_bounds() -> None:
    for slots, tokens in itertools.product((4, 5, 64), (256, 1000, 1024)):
        setting = dataclasses.replace(START, max_num_seqs=slots, max_num_batched_tokens=tokens)
        for other in SPACE.neighbours(setting, math.sqrt(2)):
            changed = [
                field.name
                for field in dataclasses.fields(Setting)
                if getattr(setting, field.name) != getattr(other, field.name)
            ]
            assert len(changed) == 1
            assert 4 <= other.max_num_seqs <= 64
            assert 256 <= other.max_num_batched_tokens <= 1024


def test_fixed_settings_stay_even_outside_of_the_grid() -> None:
    fixed = dataclasses.replace(SPACE, rows=(100,), tokens=(77,), prefill_modes=("separate",))
    start = dataclasses.replace(START, max_num_seqs=100, max_num_batched_tokens=77, prefill_mode="separate")
    judge = by_speed(lambda setting: 1000.0 + setting.max_num_seqs)
    assert search(fixed, judge, start, for_ever())
    assert {(each.max_num_seqs, each.max_num_batched_tokens, each.prefill_mode) for each in judge.scores} == {
        (100, 77, "separate")
    }
    assert {each.preemption_mode for each in judge.scores} == {"auto", "swap"}


@pytest.mark.parametrize("peak", [5, 7, 11, 13, 19, 22, 27, 38, 54])
def test_a_peak_between_the_places_of_the_grid_is_found(peak: int) -> None:
    """From both sides, in fine steps."""
    judge = by_speed(lambda setting: 1000 - 100 * octaves(setting.max_num_seqs, peak))
    assert search(SPACE, judge, START, for_ever())
    assert octaves(found(judge).max_num_seqs, peak) <= 0.13


def test_a_peak_of_both_numbers_and_modes_is_climbed_in_many_steps() -> None:
    def speed(setting: Setting) -> float:
        wrong = octaves(setting.max_num_seqs, 23) + octaves(setting.max_num_batched_tokens, 600)
        wrong += (setting.prefill_mode != "separate") + (setting.admission_watermark != 0.15)
        return 1000 - 50 * (wrong + (setting.preemption_mode != "swap"))

    judge = by_speed(speed)
    assert search(SPACE, judge, START, for_ever())
    best = found(judge)
    assert (best.prefill_mode, best.admission_watermark, best.preemption_mode) == ("separate", 0.15, "swap")
    assert octaves(best.max_num_seqs, 23) <= 0.13
    assert octaves(best.max_num_batched_tokens, 600) <= 0.13


def test_the_second_best_place_may_lead_higher() -> None:
    """Every step from the best place of the grid is one down; all is flat but for it and a hill beside the second."""

    def speed(setting: Setting) -> float:
        if setting.max_num_batched_tokens != 256:
            return 100.0
        hills = (900 - 1000 * octaves(setting.max_num_seqs, 8), 1000 - 300 * octaves(setting.max_num_seqs, 42))
        return max(100.0, *hills)

    judge = by_speed(speed)
    assert speed(rows(8)) > speed(rows(32)) > speed(rows(64))
    assert search(SPACE, judge, START, for_ever())
    assert judge.best.value > 950


def test_a_hill_that_only_the_best_place_leads_to_is_climbed() -> None:
    def speed(setting: Setting) -> float:
        return max(100.0, 1000 - 300 * octaves(setting.max_num_seqs, 54))

    judge = by_speed(speed)
    assert search(SPACE, judge, START, for_ever())
    assert judge.best.value > 960


def test_where_nothing_matters_the_search_ends() -> None:
    assert search(SPACE, by_speed(lambda setting: 1000.0), START, for_ever())


def test_the_search_keeps_promises_by_rate() -> None:
    def capacity(setting: Setting) -> float:
        return 10 - 3 * octaves(setting.max_num_seqs, 27) - 2 * (setting.prefill_mode != "separate")

    judge, _ = by_capacity(capacity)
    assert search(SPACE, judge, START, for_ever())
    assert found(judge).prefill_mode == "separate"
    assert judge.best.rate is not None
    assert judge.best.rate >= 0.95 * 10
    assert judge.best.rate <= capacity(found(judge))


def test_the_start_is_scored_exactly_even_outside_of_the_grid() -> None:
    judge, _ = by_capacity(lambda setting: setting.max_num_seqs / 4)
    assert search(SPACE, judge, rows(11), for_ever())
    assert judge.scores[rows(11)].exact
    assert judge.scores[rows(11)].rate == pytest.approx(11 / 4, rel=0.015)


def test_out_of_time_is_said_wherever_it_happens() -> None:
    def speed(setting: Setting) -> float:
        return 1000 - 100 * octaves(setting.max_num_seqs, 27) - 50 * (setting.prefill_mode != "separate")

    looks = 0

    def out_of_time() -> bool:
        nonlocal looks
        looks += 1
        return looks > most

    most = 10**9
    assert search(SPACE, by_speed(speed), START, out_of_time)
    in_all = looks
    assert in_all > 50
    for most in range(in_all):
        looks, judge = 0, by_speed(speed)
        assert not search(SPACE, judge, START, out_of_time)
        assert looks == most + 1, "it stops when it is told"
        assert START in judge.scores
        assert len(judge.scores) <= most + 1
