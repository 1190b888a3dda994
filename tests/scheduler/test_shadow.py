"""A shadow policy is asked the same questions, changes nothing, and may fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from chairlift.config import SchedulerConfig
from chairlift.errors import ConfigError
from chairlift.request import Request, Service
from chairlift.scheduler.deadlines import Outlook
from chairlift.scheduler.policies import policy_from_config
from chairlift.scheduler.policy import FCFS, FirstComeFirstServed, Policy
from chairlift.scheduler.precedence import Precedence
from chairlift.scheduler.shadow import ShadowPolicy
from chairlift.service_class import ServiceClass
from chairlift.workbench.sim.gate import check_policy
from chairlift.workbench.sim.simulator import Simulation, run_world
from chairlift.workbench.sim.world import make_world
from tests.scheduler.driver import BLOCK, Driver, request

RESERVING = {"priority": ServiceClass(min_seqs=1, priority=-5)}


def precedence() -> Precedence:
    return Precedence(
        RESERVING, max_running=16, ageing_seconds=0.1, outlook=lambda request: Outlook(0.05, 0.05, 2, 0.05, 0.02)
    )


class LastComeFirstServed(FirstComeFirstServed):
    def order(self, request: Request) -> tuple[float, ...]:
        return (-request.sequence,)


def test_a_shadow_that_differs_is_counted() -> None:
    policy = ShadowPolicy(FCFS, LastComeFirstServed())
    driver = Driver(policy=policy, max_num_seqs=1)
    driver.add(*[request(name, 2, max_tokens=2) for name in "abc"])
    driver.run()
    assert driver.finished == ["a", "b", "c"]
    # In turn a of abc, b of bc, and c alone.
    assert (policy.num_lines, policy.num_lines_differing, policy.num_failures) == (3, 2, 0)


def test_lines_are_compared_once_in_a_step_that_lets_in_several() -> None:
    policy = ShadowPolicy(FCFS, LastComeFirstServed())
    driver = Driver(policy=policy, max_num_seqs=2)
    driver.add(*[request(name, 2, max_tokens=2) for name in "abcd"])
    outs = driver.run()
    assert [len(out.joined) for out in outs if out.joined] == [2, 2]
    assert (policy.num_lines, policy.num_lines_differing) == (2, 2)


def test_victims_are_compared_among_the_same_candidates() -> None:
    policy = ShadowPolicy(FCFS, LastComeFirstServed())
    driver = Driver(policy=policy, num_blocks=7)
    driver.add(request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10))
    driver.run()
    assert driver.scheduler.num_preemptions
    assert policy.num_victims >= driver.scheduler.num_preemptions
    assert 0 < policy.num_victims_differing <= policy.num_victims


@pytest.mark.parametrize("make", [FirstComeFirstServed, precedence])
def test_a_policy_does_not_differ_from_itself(make: Callable[[], Policy]) -> None:
    seen = 0
    for seed in range(60):
        policy = ShadowPolicy(make(), make())
        run_world(make_world(seed), policy)
        assert (policy.num_failures, policy.num_lines_differing, policy.num_victims_differing) == (0, 0, 0), seed
        seen += policy.num_lines
    assert seen > 100


@pytest.mark.parametrize("make", [FirstComeFirstServed, precedence])
@pytest.mark.parametrize("shadow", [LastComeFirstServed, precedence, FirstComeFirstServed])
def test_a_shadow_changes_nothing(make: Callable[[], Policy], shadow: Callable[[], Policy]) -> None:
    for seed in range(25):
        alone, shadowed = (
            Simulation(make_world(seed), make()),
            Simulation(make_world(seed), ShadowPolicy(make(), shadow())),
        )
        alone.run()
        shadowed.run()
        assert alone.trace == shadowed.trace, seed


@pytest.mark.parametrize(
    "method", ["order", "lane", "rank", "victim", "late", "observe", "queued", "joined", "left", "forgotten"]
)
def test_a_shadow_that_fails_is_switched_off(method: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Precedence):
        pass

    calls: list[str] = []

    def fail(self: Failing, *args: Any) -> Any:
        calls.append(method)
        if len(calls) < 3:
            return getattr(Precedence, method)(self, *args)
        raise ZeroDivisionError("the third time")

    setattr(Failing, method, fail)
    policy = ShadowPolicy(precedence(), Failing({}, max_running=8))
    driver = Driver(policy=policy, num_blocks=7, max_num_seqs=3)
    with caplog.at_level(logging.ERROR, "chairlift.scheduler.shadow"):
        for number, name in enumerate("abcdef"):
            driver.add(request(name, 2 * BLOCK, max_tokens=9, priority=5 - number, service=Service(tenant=name)))
            driver.step()
        driver.run()
    assert sorted(driver.finished) == list("abcdef")
    assert (policy.num_failures, policy.shadow, len(calls)) == (1, None, 3)
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text


def test_what_the_shadow_writes_stays_with_it() -> None:
    class Scribbling(FirstComeFirstServed):
        def queued(self, request: Request, now: float) -> None:
            request.start_by, request.service, request.priority = -1.0, Service("other"), 99

        def late(self, now: float) -> Iterable[Request]:
            return ()

    policy = ShadowPolicy(FCFS, Scribbling())
    driver = Driver(policy=policy)
    one = request("a", 3)
    driver.add(one)
    driver.run()
    assert (one.start_by, one.service, one.priority, policy.num_failures) == (math.inf, Service(), 0, 0)


def test_a_shadowed_policy_passes_the_gate() -> None:
    report = check_policy(lambda: ShadowPolicy(precedence(), LastComeFirstServed()), range(10))
    assert report.passed, str(report)


def test_the_setting_makes_one() -> None:
    policy = policy_from_config(SchedulerConfig(scheduling_policy="priority", shadow_policy="fcfs"))
    assert isinstance(policy, ShadowPolicy)
    assert isinstance(policy.primary, Precedence)
    assert (policy.shadow, policy.name) == (FCFS, "priority")
    assert policy.counters is policy.primary.counters  # for whoever looks at the primary
    assert policy_from_config(SchedulerConfig()) is FCFS
    with pytest.raises(ConfigError, match="shadow_policy 'collections:Counter' has no catch_up, forgotten"):
        policy_from_config(SchedulerConfig(shadow_policy="collections:Counter"))
