"""The soak test judges as it should, and a short one is good."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.e2e.server_process import Held
from tests.e2e.soak import Sample, soak, theil_sen, verdict

HELD = Held(5, 10, 20, 3)
MIB = 1 << 20


def steady(count: int = 40) -> list[Sample]:
    return [Sample(1000 * i, 35 * MIB + (i % 3) * 4096, 28 * MIB, 0.06, 0.14 + (i % 4) * 0.001) for i in range(count)]


def test_a_steady_server_is_good() -> None:
    assert verdict(steady(), HELD, HELD) == []


def test_memory_that_grows_with_the_requests_is_found() -> None:
    leaky = [dataclasses.replace(s, engine_bytes=s.engine_bytes + 300 * s.requests) for s in steady()]
    (wrong,) = verdict(leaky, HELD, HELD)
    assert wrong.startswith("engine_bytes grow by 300 bytes per request")


def test_one_step_of_the_allocator_is_no_leak() -> None:
    stepped = [dataclasses.replace(s, server_bytes=s.server_bytes + 8 * MIB * (s.requests > 20_000)) for s in steady()]
    assert verdict(stepped, HELD, HELD) == []


def test_latency_that_drifts_is_found() -> None:
    slow = [dataclasses.replace(s, p99=s.p99 * (1 + s.requests / 100_000)) for s in steady()]
    (wrong,) = verdict(slow, HELD, HELD)
    assert wrong.startswith("the p99 drifted")


def test_what_is_still_held_is_found() -> None:
    assert verdict(steady(), HELD, dataclasses.replace(HELD, files=21)) == ["files: 20 before, 21 after"]


def test_the_slope_is_not_decided_by_one_point() -> None:
    assert theil_sen([(x, 2.0 * x if x != 5 else 1e9) for x in range(10)]) == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.nightly)])
def test_a_short_soak_is_good(seconds: float) -> None:
    """A minute says nothing about slopes: the samples' judgement of latency and memory is for the command."""
    wrong, samples = asyncio.run(soak(seconds / 60, 30.0, 1, seconds / 3))
    assert [each for each in wrong if "drifted" not in each] == []
    assert samples[-1].requests > 10 * seconds
