"""Claims from scripted samples: noise, drift, an outlier, a machine that other programs disturb."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chairlift_lab.bench.other_load import OtherLoad
from chairlift_lab.bench.verdict import (
    LEVEL,
    MIN_ROUNDS,
    Ratio,
    RatioEstimate,
    RunSample,
    disturbance,
    share_interval,
    times,
)
from tests.tiers import one_in

Noise = Callable[[np.random.Generator, int], "tuple[np.ndarray, np.ndarray]"]


def samples(values: list[float], seconds: float = 5.0, busy: float = 0.0) -> list[RunSample]:
    return [RunSample(value, seconds, busy) for value in values]


def even(rng: np.random.Generator, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.exp(rng.normal(0, 0.1, rounds)) for _ in range(2))  # type: ignore[return-value]


def wild(rng: np.random.Generator, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise without a variance, as of a machine that sometimes stops for a while."""
    return tuple(np.exp(0.05 * rng.standard_cauchy(rounds).clip(-60, 60)) for _ in range(2))  # type: ignore[return-value]


def drifting(rng: np.random.Generator, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The machine becomes three times slower over the rounds; within a round, both sides are alike."""
    drift = np.geomspace(1, 1 / 3, rounds)
    ours, theirs = even(rng, rounds)
    return ours * drift, theirs * drift


def skewed(rng: np.random.Generator, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(1 / (1 + rng.exponential(0.3, rounds)) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("noise", [even, wild, drifting, skewed])
@pytest.mark.parametrize("rounds", one_in(3, [6, 8, 11, 20]))
def test_equal_sides_are_called_different_at_most_as_often_as_the_level_says(noise: Noise, rounds: int) -> None:
    rng, wrong, worlds = np.random.default_rng(rounds), 0, 600
    for _ in range(worlds):
        ours, theirs = noise(rng, rounds)
        ratio = Ratio.of(samples(ours.tolist()), samples(theirs.tolist()))
        wrong += ratio.larger or ratio.smaller
    limit = 1 - LEVEL
    assert wrong / worlds <= limit + 3 * math.sqrt(limit * LEVEL / worlds)


@pytest.mark.parametrize("rivals", [2, 5])
def test_the_best_of_several_equal_settings_is_no_winner(rivals: int) -> None:
    """Our side is chosen by the same rounds that it is judged by."""
    rng, wrong, worlds = np.random.default_rng(rivals), 0, 600
    for _ in range(worlds):
        runs = np.exp(rng.normal(0, 0.1, (rivals + 1, 8)))
        best = max(range(1, rivals + 1), key=lambda each: float(np.median(runs[each])))
        wrong += Ratio.of(samples(runs[best].tolist()), samples(runs[0].tolist()), rivals).larger
    limit = 1 - LEVEL
    assert wrong / worlds <= limit + 3 * math.sqrt(limit * LEVEL / worlds)


def test_a_true_gain_is_claimed_through_noise_and_an_outlier() -> None:
    rng, right = np.random.default_rng(5), 0
    for _ in range(200):
        ours, theirs = drifting(rng, 9)
        gained = [1.5 * value for value in ours.tolist()]
        gained[4] /= 20
        ratio = Ratio.of(samples(gained), samples(theirs.tolist()))
        right += ratio.larger
        assert not ratio.smaller
        assert ratio.ratio == pytest.approx(1.5, rel=0.35)
    assert right > 160


def test_one_outlier_makes_no_winner() -> None:
    same = [100.0, 101.0, 99.0, 100.0, 102.0, 98.0, 100.0, 100.0]
    ratio = Ratio.of(samples([*same[:-1], 10_000.0]), samples(same))
    assert ratio.ratio == pytest.approx(1.0)
    assert not ratio.larger


def test_a_disturbance_of_one_side_makes_no_winner() -> None:
    """Other programs took a third of the machine, always while their side ran."""
    ours, theirs = samples([150.0] * 8), samples([100.0] * 8, busy=0.34)
    ratio = Ratio.of(ours, theirs)
    assert ratio.ratio == pytest.approx(1.5)
    assert ratio.low < 1 and not ratio.larger
    assert Ratio.of(ours, samples([100.0] * 8)).larger


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_few_rounds_claim_nothing(rounds: int) -> None:
    ratio = Ratio.of(samples([200.0] * rounds), samples([100.0] * rounds))
    assert not ratio.larger and not ratio.smaller
    there = "there was 1" if rounds == 1 else f"there were {rounds}"
    assert ratio.sentence("B", "throughput", "A") == (
        f"B has {times(ratio)} the throughput of A, which is no claim: {MIN_ROUNDS} rounds are needed, and {there}."
    )


def test_short_runs_claim_nothing() -> None:
    ratio = Ratio.of(samples([200.0] * 8), samples([100.0] * 8, seconds=0.3))
    assert not ratio.larger
    assert "a run must last 1 s, and the shortest took 0.3 s" in ratio.doubt


def test_a_ratio_becomes_a_sentence_with_its_interval() -> None:
    faster = Ratio.of(samples([2.0, 2.2, 2.1, 2.3, 2.0, 2.1]), samples([1.0] * 6))
    assert faster.sentence("B", "throughput", "A") == (
        "B has a higher throughput than A: 2.1 times (2.00 to 2.30 in 6 rounds)."
    )
    slower = Ratio.of(samples([1.0] * 6), samples([2.0, 2.2, 2.1, 2.3, 2.0, 2.1]))
    assert slower.smaller and "a lower throughput" in slower.sentence("B", "throughput", "A")
    same = Ratio.of(samples([1.0, 2.0] * 3), samples([1.5] * 6))
    assert same.sentence("b", "throughput", "A").startswith("B and A have the same throughput within the noise: ")


def test_a_ratio_and_its_inverse_are_inverse() -> None:
    """An arithmetic mean of ratios is above 1 for both sides: (1/2 + 2) / 2 = 1.25."""
    ours, theirs = samples([1.0, 2.0] * 4), samples([2.0, 1.0] * 4)
    one, other = Ratio.of(ours, theirs), Ratio.of(theirs, ours)
    assert one.ratio == pytest.approx(1.0) and one.ratio * other.ratio == pytest.approx(1.0)
    assert one.low * other.high == pytest.approx(1.0)


def test_the_interval_of_a_rate_is_that_of_its_median_and_of_the_disturbance() -> None:
    rate = RatioEstimate.of(samples([float(value) for value in range(1, 10)]))
    assert (rate.median, rate.low, rate.high, rate.doubt) == (5.0, 2.0, 8.0, "")
    disturbed = RatioEstimate.of([*samples([10.0] * 7), RunSample(8.0, 5.0, busy=0.2)])
    assert (disturbed.low, disturbed.high) == pytest.approx((6.4, 12.5))


def test_the_interval_of_a_median_covers_it() -> None:
    rng, covered = np.random.default_rng(2), 0
    for _ in range(400):
        found = RatioEstimate.of(samples(np.exp(rng.standard_cauchy(10) * 0.1).tolist()))
        covered += found.low <= 1.0 <= found.high
    assert covered >= LEVEL * 400


def test_the_interval_of_a_share_covers_it() -> None:
    low, high = share_interval(99, 100)
    assert (low, high) == pytest.approx((0.9455, 0.9982), abs=1e-3)
    assert share_interval(0, 0) == (0.0, 1.0)
    assert share_interval(5, 5)[1] == 1.0


def test_the_load_of_other_programs_is_measured(tmp_path: Path) -> None:
    stat, own = tmp_path / "stat", iter([0.0, 0.5, 0.5])
    stat.write_text("cpu  0 0 0 0 0 0 0 0\n" + "".join(f"cpu{number} 0 0 0 0 0 0 0 0\n" for number in range(512)))
    load = OtherLoad(stat, lambda: next(own), hertz=100)
    count = len(load._names)
    ticks = 100 // count  # all processors together: 100 ticks, of which a quarter is idle
    lines = "".join(f"cpu{number} {3 * ticks} 0 0 {ticks} 0 0 0 0\n" for number in range(512))
    stat.write_text("cpu  1 1 1 1 1 1 1 1\n" + lines)
    total = 4 * ticks * count
    assert load.share() == pytest.approx(0.75 - 50 / total)
    assert load.share() == 0.0, "no time has passed"
    assert OtherLoad(tmp_path / "missing").share() == 0.0


def test_the_disturbance_is_said() -> None:
    assert disturbance([]) == ""
    assert disturbance([0.0, 0.001]) == "No other program used this machine during the runs."
    assert disturbance([0.1, 0.3, 0.2]) == "Other programs used 20% of this machine during the runs, at most 30%."
