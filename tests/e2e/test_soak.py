"""The soak test judges as it should, and a short one is good."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from tests.e2e.server_process import Held
from tests.e2e.soak import Sample, growths, soak, theil_sen, verdict

pytestmark = pytest.mark.full

HELD = Held(5, 10, 20, 3)
MIB = 1 << 20
TWO_HOURS = 118  # minutes that are samples; the others are for the rest between them
SEEDS = range(20)


def steady(count: int = TWO_HOURS, requests: int = 1860) -> list[Sample]:
    """Two hours at the usual rate, in a process that has settled before."""
    return [
        Sample(requests * i, 35 * MIB + (i % 3) * 4096, 28 * MIB, 0.06, 0.14 + (i % 4) * 0.001) for i in range(count)
    ]


def grown(samples: list[Sample], growth: Callable[[int], float], seed: int = 0) -> list[Sample]:
    """The same, whose server has ``growth(requests)`` bytes more, and an allocator that keeps some MiB or none."""
    rng = random.Random(seed)
    return [
        dataclasses.replace(s, server_bytes=s.server_bytes + int(growth(s.requests) + rng.gauss(0, MIB)))
        for s in samples
    ]


def test_a_steady_server_is_good() -> None:
    assert verdict(steady(), HELD, HELD) == []
    assert all(growth.told for growth in growths(steady()))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_of_a_hundred_bytes_per_request_is_found_in_two_hours(seed: int) -> None:
    (wrong,) = verdict(grown(steady(), lambda requests: 100.0 * requests, seed), HELD, HELD)
    assert wrong.startswith("server_bytes grow by ")


@pytest.mark.parametrize("seed", SEEDS)
def test_growth_that_settles_is_no_leak(seed: int) -> None:
    """Much at the beginning, and 20 bytes per request that remain."""
    settling = grown(steady(), lambda requests: 16 * MIB * (1 - math.exp(-requests / 20_000)) + 20 * requests, seed)
    assert verdict(settling, HELD, HELD) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_no_leak(seed: int) -> None:
    assert verdict(grown(steady(), lambda _: 0.0, seed), HELD, HELD) == []


@pytest.mark.parametrize("at", range(5, TWO_HOURS, 7))
def test_one_step_of_the_allocator_is_no_leak(at: int) -> None:
    assert verdict(grown(steady(), lambda requests: 8 * MIB * (requests > 1860 * at)), HELD, HELD) == []


def test_memory_of_the_engine_is_judged_too() -> None:
    leaky = [dataclasses.replace(s, engine_bytes=s.engine_bytes + 300 * s.requests) for s in steady()]
    (wrong,) = verdict(leaky, HELD, HELD)
    assert wrong.startswith("engine_bytes grow by 300 bytes per request")


def test_ten_minutes_cannot_tell_a_small_leak_and_find_a_large_one() -> None:
    short = steady(30, 620)
    for growth in (0.0, 100.0, 553.0):
        samples = grown(short, lambda requests, growth=growth: growth * requests)
        assert verdict(samples, HELD, HELD) == []
        assert not any(growth.told for growth in growths(samples))
    (wrong,) = verdict(grown(short, lambda requests: 2000.0 * requests), HELD, HELD)
    assert wrong.startswith("server_bytes")


def test_latency_that_drifts_is_found() -> None:
    slow = [dataclasses.replace(s, p99=s.p99 * (1 + s.requests / 100_000)) for s in steady()]
    (wrong,) = verdict(slow, HELD, HELD)
    assert wrong.startswith("the p99 drifted")


def test_resources_that_are_still_held_are_found() -> None:
    assert verdict(steady(), HELD, dataclasses.replace(HELD, files=21)) == ["files: 20 before, 21 after"]


def test_the_slope_is_not_decided_by_one_point() -> None:
    assert theil_sen([(x, 2.0 * x if x != 5 else 1e9) for x in range(10)]) == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.nightly)])
def test_a_short_soak_is_good(seconds: float) -> None:
    """Minutes say nothing about the drift of latency, and little about memory: the command's two hours do."""
    wrong, samples = asyncio.run(soak(seconds / 60, 30.0, 1, min(20.0, seconds / 3)))
    assert [each for each in wrong if "drifted" not in each] == []
    assert samples[-1].requests > 10 * seconds
