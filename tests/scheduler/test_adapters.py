"""At most so many adapters in a step, and nobody waits for ever for one that is not among them."""

from __future__ import annotations

import pytest

from tests.scheduler.driver import Driver, request


def running(driver: Driver) -> list[str]:
    return sorted(driver.scheduler.running)


def test_a_step_has_so_many_adapters() -> None:
    driver = Driver(max_loras=2)
    driver.add(*(request(f"{name}{n}", 2, adapter_id=n) for n in (1, 2, 3) for name in "ab"), request("x", 2))
    out = driver.step()
    assert running(driver) == ["a1", "a2", "b1", "b2", "x"]
    assert out.held_up_by == "adapter"
    assert {row.request_id: row.adapter_id for row in out.joined}["b2"] == 2
    driver.run()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_traffic_of_one_adapter_does_not_keep_another_out(share: float) -> None:
    """Sixteen may pass; then the running ones end, and it starts. Requests without an adapter go on all the time."""
    driver = Driver(max_loras=1, max_num_seqs=4, num_blocks=400, policy_share=share)
    driver.add(request("hot", 2, max_tokens=10, adapter_id=1))
    driver.step()
    driver.add(request("cold", 2, adapter_id=2))
    passed = 0
    for n in range(200):
        driver.add(request(f"hot{n}", 2, max_tokens=10, adapter_id=1), request(f"base{n}", 2, max_tokens=2))
        out = driver.step()
        joined = [row.request_id for row in out.joined]
        if "cold" in joined:
            break
        passed += sum(name.startswith("hot") for name in joined)
    else:
        pytest.fail("it waits for ever")
    assert passed <= driver.scheduler.waiting.max_times_passed
    assert any(name.startswith("base") for name in driver.finished)


def test_each_of_many_adapters_starts_within_the_bound() -> None:
    driver = Driver(max_loras=2, max_num_seqs=4, num_blocks=400)
    answer, most = 8, driver.scheduler.waiting.max_times_passed
    started: dict[str, int] = {}
    for n in range(12):
        driver.add(request(f"cold{n}", 2, max_tokens=answer, adapter_id=10 + n))
    for step in range(2_000):
        driver.add(request(f"hot{step}", 2, max_tokens=answer, adapter_id=1 + step % 2))
        started |= {row.request_id: step for row in driver.step().joined}
        if all(f"cold{n}" in started for n in range(12)):
            break
    assert all(started[f"cold{n}"] <= (n + 1) * (most + answer + 2) for n in range(12)), started


def test_priority_and_preemption_keep_the_bound() -> None:
    """What is preempted waits for its adapter again, and comes back."""
    driver = Driver(max_loras=1, num_blocks=9, max_num_seqs=4)
    driver.add(request("a", 8, max_tokens=16, adapter_id=1), request("b", 8, max_tokens=16, adapter_id=1))
    driver.add(request("c", 8, max_tokens=16, adapter_id=2), request("d", 8, max_tokens=16))
    outs = driver.run()
    assert any(out.preempted for out in outs) and sorted(driver.finished) == ["a", "b", "c", "d"]


def test_without_a_bound_adapters_change_nothing() -> None:
    def joined(**settings: int) -> list[list[str]]:
        driver = Driver(max_num_seqs=3, **settings)
        driver.add(*(request(name, 3, adapter_id=n) for n, name in enumerate("abcdefgh")))
        return [[row.request_id for row in out.joined] for out in driver.run()]

    assert joined() == joined(max_loras=100)
