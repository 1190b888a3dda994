from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.workload.arrivals import AllAtOnce, Arrivals, Constant, Gamma, OnOff, Ramp, parse_arrivals

PROCESSES = [AllAtOnce(), Constant(2.0), Gamma(3.0), Gamma(3.0, 0.3), OnOff(5.0, 4.0, 6.0), Ramp(1.0, 9.0, 60.0)]


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_times_ascend_and_depend_on_the_seed_alone(process: Arrivals) -> None:
    times = process.times(500, seed=3)
    assert len(times) == 500
    assert all(one <= other for one, other in pairwise([0.0, *times]))
    assert times == process.times(500, seed=3)
    if not isinstance(process, (AllAtOnce, Constant)):
        assert times != process.times(500, seed=4)
        assert times[:100] == process.times(100, seed=3), "more requests do not move those before them"


def test_all_at_once_and_constant() -> None:
    assert AllAtOnce().times(3) == [0.0, 0.0, 0.0]
    assert Constant(4.0).times(3) == [0.0, 0.25, 0.5]


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


def test_parsing() -> None:
    assert parse_arrivals("all") == AllAtOnce()
    assert parse_arrivals("poisson:4") == Gamma(4.0, 1.0)
    assert parse_arrivals("gamma:4:0.5") == Gamma(4.0, 0.5)
    assert parse_arrivals("constant:2.5") == Constant(2.5)
    assert parse_arrivals("onoff:8:10:20") == OnOff(8.0, 10.0, 20.0)
    assert parse_arrivals("ramp:1:8:60") == Ramp(1.0, 8.0, 60.0)


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:x", "poisson:1:2", "gamma:1", "uniform:3", "poisson:0", "ramp:1:-2:3"]
)
def test_what_cannot_be_parsed_is_told_with_the_forms(text: str) -> None:
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
    ):
        with pytest.raises(ConfigError, match="above 0"):
            make(value)
