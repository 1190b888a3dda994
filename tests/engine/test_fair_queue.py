"""Tenants take turns by the time that their work took."""

from __future__ import annotations

from chairlift.engine.fair_queue import FairQueue


def _order(turns: FairQueue[str], seconds: float = 1.0) -> list[str]:
    found: list[str] = []
    while (taken := turns.take()) is not None:
        turns.took(taken[0], seconds)
        found.append(taken[1])
    return found


def test_a_tenant_with_much_work_lets_others_go_between() -> None:
    turns: FairQueue[str] = FairQueue()
    for tenant, work in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")):
        turns.add(tenant, work)
    assert _order(turns) == ["a1", "b1", "a2", "a3"]
    assert turns.take() is None


def test_turns_follow_the_time_of_work_and_not_its_number() -> None:
    turns: FairQueue[str] = FairQueue()
    for tenant in "aaabbb":
        turns.add(tenant, tenant)
    order: list[str] = []
    while (taken := turns.take()) is not None:
        turns.took(taken[0], {"a": 5.0, "b": 1.0}[taken[0]])
        order.append(taken[1])
    assert order == ["a", "b", "b", "b", "a", "a"]


def test_a_tenant_that_comes_later_begins_with_the_least_time_of_the_others() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.add("a", "a1")
    turns.add("a", "a2")
    turns.take()
    turns.took("a", 100.0)
    turns.add("b", "b1")
    turns.add("b", "b2")
    assert _order(turns) == ["a2", "b1", "b2"]
    turns.add("a", "a3")
    turns.clear()
    assert turns.take() is None
