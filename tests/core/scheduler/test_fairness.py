"""Virtual token counters: what is charged, what is given back, and what idleness is worth."""

from __future__ import annotations

import pytest

from chairlift.core.request import Request, Service
from chairlift.core.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT, VirtualTokenCounters
from chairlift.core.scheduler.precedence import Precedence
from tests.core.scheduler.driver import Driver, request


def of(tenant: str, name: str = "a", prompt: int = 6, **settings: int) -> Request:
    return request(name, prompt, service=Service(tenant=tenant), **settings)


@pytest.mark.parametrize("share", [0.5, 1.0, 4.0])
def test_prompt_is_charged_at_once_and_the_answer_as_it_grows(share: float) -> None:
    counters = VirtualTokenCounters({"t": share})
    one = of("t")
    one.num_computed_tokens = 2  # cached
    counters.queued(one)
    counters.joined(one)
    assert counters["t"] == 4 * PREFILL_WEIGHT / share
    one.num_computed_tokens = 9
    counters.settle([one])
    counters.settle([one])
    assert counters["t"] == (4 * PREFILL_WEIGHT + 3 * DECODE_WEIGHT) / share


def test_tokens_that_were_not_computed_are_credited_back() -> None:
    counters = VirtualTokenCounters()
    one = of("t")
    counters.joined(one)
    one.num_computed_tokens = 4
    counters.left(one)
    assert counters["t"] == 4 * PREFILL_WEIGHT


def test_a_returning_tenant_is_raised_to_the_waiting_tenants_and_never_lowered() -> None:
    counters = VirtualTokenCounters()
    counters._counters = {"low": 10.0, "high": 30.0, "back": 1.0, "ahead": 99.0}
    for tenant in ("low", "high", "back", "ahead"):
        counters._waiting.setdefault(tenant, set()) if tenant in ("low", "high") else counters.queued(
            of(tenant, tenant)
        )
    assert (counters["back"], counters["ahead"]) == (10.0, 99.0)


def test_a_tenant_with_running_work_is_raised_too() -> None:
    counters = VirtualTokenCounters()
    modest, first, second = of("modest", "m"), of("busy", "a", 500), of("busy", "b", 500)
    for one in (modest, first, second):
        counters.queued(one)
    for one in (modest, first):
        counters.joined(one)
    assert counters["modest"] == 6
    counters.queued(of("modest", "n"))  # its first one still runs
    assert counters["modest"] == counters["busy"] == 500


def test_the_first_tenant_after_a_pause_starts_at_the_last_tenants_count() -> None:
    counters = VirtualTokenCounters()
    last = of("last")
    counters.queued(last)
    counters.joined(last)
    assert counters.active() == []
    counters.queued(of("new", "n"))
    assert counters["new"] == counters["last"] == 6
    assert counters.active() == ["new"]


def test_a_request_that_ends_in_the_queue_is_no_longer_counted_as_waiting() -> None:
    counters = VirtualTokenCounters()
    one = of("t")
    counters.queued(one)
    counters.forgotten(one)
    counters.forgotten(one)
    assert counters.active() == []


def test_counters_of_those_who_left_long_ago_are_dropped() -> None:
    counters = VirtualTokenCounters()
    stays = of("stays", "s")
    counters.queued(stays)
    for number in range(10_100):
        one = of(f"t{number}", f"r{number}")
        counters.queued(one)
        counters.joined(one)
    assert len(counters._counters) <= 10_002
    assert "stays" in counters.active()


def test_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    driver = Driver(policy=Precedence({}, max_running=1), max_num_seqs=1)
    driver.add(*[of("greedy", f"g{number}", 3, max_tokens=3) for number in range(6)])
    driver.step()
    driver.add(of("modest", "m", 3, max_tokens=3))
    driver.run()
    assert driver.finished.index("m") <= 2
