"""At most so many adapters in a step, and nobody waits for ever for one that is not among them."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows
from tests.core.scheduler.driver import Driver, request


def running(driver: Driver) -> list[str]:
    return sorted(driver.scheduler.running)


def test_a_step_has_at_most_the_allowed_adapters() -> None:
    driver = Driver(kinds=[AdapterRows(2)])
    driver.add(*(request(f"{name}{n}", 2, adapter_id=n) for n in (1, 2, 3) for name in "ab"), request("x", 2))
    out = driver.step()
    assert running(driver) == ["a1", "a2", "b1", "b2", "x"]
    assert out.held_up_by == "adapter"
    assert {row.request_id: row.adapter_id for row in out.joined}["b2"] == 2
    driver.run()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_traffic_of_one_adapter_does_not_keep_another_out(share: float) -> None:
    """Sixteen may pass; then the running ones end, and it starts. Requests without an adapter go on all the time."""
    driver = Driver(kinds=[AdapterRows(1)], max_num_seqs=4, num_blocks=400, policy_share=share)
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
    driver = Driver(kinds=[AdapterRows(2)], max_num_seqs=4, num_blocks=400)
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
    """A preempted request waits for its adapter again, and then runs to its end."""
    driver = Driver(kinds=[AdapterRows(1)], num_blocks=9, max_num_seqs=4)
    driver.add(request("a", 8, max_tokens=16, adapter_id=1), request("b", 8, max_tokens=16, adapter_id=1))
    driver.add(request("c", 8, max_tokens=16, adapter_id=2), request("d", 8, max_tokens=16))
    outs = driver.run()
    assert any(out.preempted for out in outs) and sorted(driver.finished) == ["a", "b", "c", "d"]


def test_without_a_bound_adapters_change_nothing() -> None:
    def joined(**settings: Any) -> list[list[str]]:
        driver = Driver(max_num_seqs=3, **settings)
        driver.add(*(request(name, 3, adapter_id=n) for n, name in enumerate("abcdefgh")))
        return [[row.request_id for row in out.joined] for out in driver.run()]

    assert joined(kinds=[AdapterRows()]) == joined(kinds=[AdapterRows(100)])


def test_decoding_rows_of_one_adapter_lie_side_by_side() -> None:
    driver = Driver(kinds=[AdapterRows(3)])
    driver.add(*(request(f"{n}", 2, max_tokens=6, adapter_id=n % 3) for n in range(7)))
    driver.step()
    rows = driver.step().decode_rows
    adapters = [driver.scheduler.running[name].adapter_id for name, _ in rows]
    assert len(adapters) == 7 and adapters == sorted(adapters)


def compare_adapter_bytes(depth: int) -> None:
    """The bytes of a step are those of the adapters of its rows, each once, whoever decodes or prefills."""
    sizes = {n: 10**n for n in range(1, 5)}
    kinds = [AdapterRows(0, sizes)]
    driver = Driver(num_blocks=400, max_num_seqs=6, max_num_batched_tokens=8, depth=depth, kinds=kinds)
    requests = {}
    for n in range(24):
        one = request(f"r{n}", 3 + 9 * (n % 4), max_tokens=1 + n % 7, adapter_id=(n * 7) % 6)  # one has no known size
        requests[one.request_id] = one
        driver.add(one)
    seen = set()
    for out in driver.run():
        rows = [*(name for name, _ in out.decode_rows if out.num_decodes), *out.chunk_ids]
        used = {requests[name].adapter_id for name in rows}
        assert out.kind_bytes == sum(sizes.get(adapter, 0) for adapter in used)
        seen.add((out.kind_bytes, bool(out.chunks), out.num_decodes > 0))
    assert len(seen) > 8


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_says_the_bytes_of_its_adapters(depth: int) -> None:
    compare_adapter_bytes(depth)


@pytest.mark.planted("test_a_step_says_the_bytes_of_its_adapters")
@pytest.mark.parametrize("mutation", ["decodes only", "chunks only", "per row"])
def test_each_wrong_sum_of_bytes_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AdapterRows.num_bytes

    def wrong(self: AdapterRows, chunks: list[Request], decodes: list[Request]) -> int:
        if mutation == "decodes only":
            return right(self, (), decodes)
        if mutation == "chunks only":
            return right(self, chunks, [])
        return sum(self.sizes.get(one.adapter_id, 0) for one in [*chunks, *decodes])

    monkeypatch.setattr(AdapterRows, "num_bytes", wrong)
    with pytest.raises(AssertionError):
        compare_adapter_bytes(0)
