from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift_lab.workload.arrivals import (
    AllAtOnce,
    Arrivals,
    ClosedLoop,
    Constant,
    Diurnal,
    Gamma,
    OnOff,
    Ramp,
    parse_arrivals,
)

PROCESSES = [
    AllAtOnce(),
    ClosedLoop(3),
    Constant(2.0),
    Gamma(3.0),
    Gamma(3.0, 0.3),
    OnOff(5.0, 4.0, 6.0),
    Ramp(1.0, 9.0, 60.0),
    Diurnal(3.0, 5.0, 40.0),
    Diurnal(3.0, 1e9, 40.0),
]


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_times_ascend_and_depend_on_the_seed_alone(process: Arrivals) -> None:
    times = process.times(500, seed=3)
    assert len(times) == 500
    assert all(one <= other for one, other in pairwise([0.0, *times]))
    assert times == process.times(500, seed=3)
    if not isinstance(process, (AllAtOnce, ClosedLoop, Constant)):
        assert times != process.times(500, seed=4)
        assert times[:100] == process.times(100, seed=3), "more requests do not move those before them"


def test_all_at_once_and_constant_arrivals_are_exact() -> None:
    assert AllAtOnce().times(3) == [0.0, 0.0, 0.0]
    assert Constant(4.0).times(3) == [0.0, 0.25, 0.5]
    assert ClosedLoop(1).times(3) == ClosedLoop(2).times(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_its_rate_and_its_burstiness(burstiness: float) -> None:
    gaps = np.diff(Gamma(5.0, burstiness).times(40_000))
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.03)


def test_on_off_is_silent_when_off_and_has_its_rate_when_on() -> None:
    times = OnOff(5.0, 4.0, 6.0).times(20_000)
    assert all(time % 10.0 < 4.0 + 1e-6 for time in times)
    assert len(times) / times[-1] == pytest.approx(5.0 * 0.4, rel=0.03)


@pytest.mark.parametrize(("start", "end"), [(1.0, 9.0), (9.0, 1.0), (4.0, 4.0)])
def test_ramp_goes_from_rate_to_rate_and_stays(start: float, end: float) -> None:
    times = np.array(Ramp(start, end, 2000.0).times(30_000))
    for begin in (0.0, 900.0, 1900.0, 2500.0):
        middle = start + (end - start) * min(1.0, (begin + 50) / 2000)
        assert np.sum((times >= begin) & (times < begin + 100)) / 100 == pytest.approx(middle, rel=0.2)


def test_diurnal_swings_from_trough_to_peak_and_keeps_its_mean() -> None:
    rate, ratio, period = 50.0, 4.0, 100.0
    times = np.array(Diurnal(rate, ratio, period).times(60_000))
    whole = times[times < 1000.0]
    assert len(whole) / 1000.0 == pytest.approx(rate, rel=0.03)
    in_period = whole % period
    trough, peak = np.sum((in_period < 5) | (in_period >= 95)), np.sum((in_period >= 45) & (in_period < 55))
    assert peak / trough == pytest.approx(ratio, rel=0.1)
    swing = (ratio - 1) / (ratio + 1)
    for begin in range(0, 100, 10):
        expected = rate * (1 - swing * math.cos(2 * math.pi * (begin + 5) / period))
        assert np.sum((in_period >= begin) & (in_period < begin + 10)) / 100 == pytest.approx(expected, rel=0.1)
    flat = Diurnal(rate, 1.0, period).times(1000, seed=1)
    assert flat == pytest.approx(Gamma(rate).times(1000, seed=1)), "no swing: a Poisson process"


def test_arrivals_are_parsed_from_text() -> None:
    assert parse_arrivals("all") == AllAtOnce()
    assert parse_arrivals("poisson:4") == Gamma(4.0, 1.0)
    assert parse_arrivals("gamma:4:0.5") == Gamma(4.0, 0.5)
    assert parse_arrivals("constant:2.5") == Constant(2.5)
    assert parse_arrivals("onoff:8:10:20") == OnOff(8.0, 10.0, 20.0)
    assert parse_arrivals("ramp:1:8:60") == Ramp(1.0, 8.0, 60.0)
    assert parse_arrivals("diurnal:2:3:600") == Diurnal(2.0, 3.0, 600.0)
    assert parse_arrivals("closed:8") == ClosedLoop(8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "poisson",
        "poisson:x",
        "poisson:1:2",
        "gamma:1",
        "uniform:3",
        "poisson:0",
        "ramp:1:-2:3",
        "closed:2.5",
        "closed",
        "diurnal:0:2:60",
    ],
)
def test_unknown_arrivals_are_refused_with_the_known_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"poisson:RATE|above 0"):
        parse_arrivals(text)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rates_must_be_positive(value: float) -> None:
    for make in (
        Constant,
        Gamma,
        lambda rate: Gamma(1.0, rate),
        lambda rate: OnOff(1, rate, 1),
        lambda r: Ramp(1, 1, r),
        lambda r: Diurnal(r, 2, 60),
        lambda r: Diurnal(1, 2, r),
    ):
        with pytest.raises(ConfigError, match="above 0"):
            make(value)


def test_a_closed_loop_needs_users_and_a_peak_is_no_trough() -> None:
    with pytest.raises(ConfigError, match="users of arrivals must be 1 to 1,000,000, got 0"):
        parse_arrivals("closed:0")
    with pytest.raises(ConfigError, match=r"peak_to_trough of arrivals must be 1 or more, got 0\.5"):
        parse_arrivals("diurnal:1:0.5:60")
