"""One order of precedence: reservation, deadline, priority, fairness, arrival; in the line and for who gives way."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.base.service_class import ServiceClass
from chairlift.core.request import Request, RequestStatus, Service
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.deadlines import Estimate
from chairlift.core.scheduler.precedence import Precedence
from tests.core.scheduler.driver import Driver, request

CLASSES = {"vip": ServiceClass(min_seqs=1), "chat": ServiceClass(min_step_tokens=4)}


def policy(**settings: float) -> Precedence:
    return Precedence(CLASSES, max_running=4, **settings)  # type: ignore[arg-type]


def ids(queue: WaitingQueue, now: float = 0.0) -> str:
    return "".join(one.request_id for one in queue.line(now))


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.sampled_from([math.inf, 1.0, 2.0]), st.sampled_from([-1, 0, 1]), st.sampled_from("ab")
        ),
        min_size=2,
        max_size=8,
    )
)
def test_the_queue_is_sorted_by_reservation_deadline_priority_fairness_and_arrival(
    drawn: list[tuple[bool, float, int, str]],
) -> None:
    precedence = policy()
    precedence.counters._counters = {"a": 5.0, "b": 3.0}
    queue, wanted = WaitingQueue(precedence), []
    for number, (reserved, deadline, priority, tenant) in enumerate(drawn):
        service = Service("vip" if reserved else "default", tenant, finish_by=deadline)
        one = request(f"r{number}", 2, priority=priority, service=service)
        one.sequence = number
        one.start_by = deadline
        queue.add(one)
        fair = precedence.counters[tenant]
        wanted.append(((not reserved, deadline, priority, fair, number), one.request_id))
    assert [one.request_id for one in queue.line(0.0)] == [name for _, name in sorted(wanted)]


@pytest.mark.parametrize(
    ("mine", "theirs", "outranks"),
    [
        ({"priority": -1}, {"priority": 0}, True),
        ({"priority": 0}, {"priority": 0}, False),
        ({"priority": 0, "service": Service("vip")}, {"priority": -9}, True),
        ({"priority": -9}, {"priority": 0, "service": Service("vip")}, False),
        ({"priority": -9}, {"priority": 0, "start_by": 5.0}, False),
        ({"priority": 9, "start_by": 0.1}, {"priority": -9}, True),
        ({"priority": 9, "start_by": 100.0}, {"priority": -9}, False),  # there is time yet
    ],
)
def test_a_request_takes_a_row_only_from_a_request_of_lower_rank(
    mine: dict[str, object], theirs: dict[str, object], outranks: bool
) -> None:
    precedence = policy()
    first, second = (
        request(name, 2, service=args.get("service", Service())) for name, args in (("a", mine), ("b", theirs))
    )  # type: ignore[arg-type]
    for one, args in ((first, mine), (second, theirs)):
        one.priority = args["priority"]  # type: ignore[assignment]
        one.start_by = args.get("start_by", math.inf)  # type: ignore[assignment]
    if second.service.service_class == "vip":
        precedence.joined(second)
    assert precedence.outranks(first, second, "slots", 0.06) is outranks


@pytest.mark.parametrize(("held", "takes"), [(2, True), (3, False)])
def test_a_class_takes_blocks_from_others_up_to_what_is_reserved_for_it(held: int, takes: bool) -> None:
    precedence = Precedence({"vip": ServiceClass(min_blocks=3)}, max_running=4)
    running, other, new = request("a", 2, service=Service("vip")), request("b", 2), request("c", 2)
    new.service = Service("vip")
    running.block_ids = [[*range(1, held + 1)]]
    precedence.observe([running, other], 0.0)
    assert precedence.outranks(new, other, "blocks", 0.0) is takes


@pytest.mark.parametrize(
    ("mine", "theirs", "takes"), [("chat", "flex", True), ("flex", "chat", False), ("flex", "default", False)]
)
def test_only_a_class_with_reserved_step_tokens_takes_them_from_others(mine: str, theirs: str, takes: bool) -> None:
    first, second = (request(name, 2, service=Service(of)) for name, of in (("a", mine), ("b", theirs)))
    assert policy().outranks(first, second, "tokens", 0.0) is takes


def test_blocks_of_a_class_are_counted_anew_when_one_of_it_comes_or_goes() -> None:
    precedence = Precedence({"vip": ServiceClass(min_blocks=3)}, max_running=4)
    one, other, new = (
        request(name, 2, service=Service(of)) for name, of in zip("abc", ("vip", "", "vip"), strict=True)
    )
    one.block_ids, running = [[1, 2, 3]], [other]
    precedence.observe(running, 0.0)
    assert precedence.outranks(new, other, "blocks", 0.0)
    running.append(one)
    precedence.joined(one)
    assert not precedence.outranks(new, other, "blocks", 0.0)
    running.remove(one)
    precedence.left(one)
    assert precedence.outranks(new, other, "blocks", 0.0)


@pytest.mark.parametrize(("priority", "at_once"), [(-1, True), (0, True), (1, False)])
def test_a_running_prompt_shares_the_budget_with_equal_ranks_only(priority: int, at_once: bool) -> None:
    driver = Driver(policy=Precedence({}, max_running=2), max_num_seqs=2, max_num_batched_tokens=8)
    driver.add(request("a", 40))
    driver.step()
    driver.add(request("b", 4, priority=priority))
    assert [row.request_id for row in driver.step().joined] == ["b"] * at_once


@pytest.mark.parametrize(("weights", "taken"), [({}, 3), ({"b": 3.0}, 4), ({"a": 3.0}, 1)])
def test_a_tenant_that_asks_for_little_takes_rows_from_one_that_has_all(weights: dict[str, float], taken: int) -> None:
    """Three quarters of its share of eight rows, as far as it has had less service; the rest it waits for."""
    precedence = Precedence({}, max_running=8, tenant_weights=weights)
    driver = Driver(policy=precedence, max_num_seqs=8, num_blocks=200)
    driver.add(*[request(f"a{n}", 4, max_tokens=60, service=Service(tenant="a")) for n in "01234567"])
    for _ in range(9):
        driver.step()
    for n in "01234567":
        driver.add(request(f"b{n}", 1, max_tokens=60, service=Service(tenant="b")))
        for _ in range(3):
            driver.step()
        rows = [r.service.tenant for r in driver.scheduler.running.values()]
        assert rows.count("b") == min(int(n) + 1, taken)
    driver.run()
    assert len(driver.finished) == 16


@pytest.mark.parametrize(("served", "takes"), [(3.0, True), (5.0, True), (6.0, False)])
def test_a_tenant_that_has_had_more_takes_no_row_from_one_that_had_less(served: float, takes: bool) -> None:
    precedence = Precedence({}, max_running=4)
    running = [request(name, 2, service=Service(tenant="a")) for name in "abcd"]
    new = request("n", 2, service=Service(tenant="b"))
    for one in running:
        precedence.joined(one)
    precedence.queued(new, 0.0)
    precedence.observe(running, 0.0)
    precedence.counters._counters = {"a": 5.0, "b": served}
    assert precedence.outranks(new, running[0], "slots", 0.0) is takes


def test_a_tenant_is_owed_one_row_however_many_there_are() -> None:
    precedence = Precedence({}, max_running=4)
    driver = Driver(policy=precedence, max_num_seqs=4)
    driver.add(*[request(f"a{n}", 4, max_tokens=60, service=Service(tenant="a")) for n in "01234567"])
    for _ in range(9):
        driver.step()
    driver.add(*[request(f"{name}0", 1, max_tokens=60, service=Service(tenant=name)) for name in "bcdefg"])
    for _ in range(9):
        driver.step()
    rows = [r.service.tenant for r in driver.scheduler.running.values()]
    assert sorted(Counter(rows).values()) == [1, 1, 1, 1] and "a" in rows


@pytest.mark.parametrize("arrival", [0.5, 1.5, 8.5, 30.0])
@pytest.mark.parametrize("kind", ["tenant", "priority", "deadline"])
def test_a_request_that_is_first_by_age_blocks_no_request_behind_it(kind: str, arrival: float) -> None:
    """It can take nobody's row; those behind it can, and do."""
    precedence = Precedence({}, max_running=3, ageing_seconds=1.0)
    driver = Driver(policy=precedence, max_num_seqs=3, num_blocks=900, max_model_len=900)
    service = {"tenant": Service(tenant="b"), "priority": Service(tenant="a")}.get(
        kind, Service(tenant="a", first_token_by=arrival + 2)
    )
    driver.add(*[request(f"a{n}", 4, max_tokens=800, service=Service(tenant="a")) for n in "01234"])
    while driver.now < arrival:
        driver.step()
        driver.now += 0.1
    new = request("new", 4, priority=-1 if kind == "priority" else 0, service=service, arrival_time=driver.now)
    driver.add(new)
    for _ in range(16):
        driver.step()
        driver.now += 0.1
    assert new.num_output_tokens or new.slot >= 0


def test_age_moves_a_lane_up_and_at_last_before_deadlines() -> None:
    queue = WaitingQueue(policy(ageing_seconds=1.0))
    old, young = request("o", 2, priority=3), request("y", 2, priority=1, arrival_time=2.5)
    urgent = request("u", 2, arrival_time=7.9, service=Service(finish_by=99.0))
    urgent.start_by = 99.0
    for one in (young, old, urgent):
        queue.add(one)
    assert [ids(queue, now) for now in (1.9, 3.1, 7.4, 8.1)] == ["uyo", "uoy", "uoy", "ouy"]


def test_a_request_admitted_by_age_keeps_its_row_against_priority() -> None:
    precedence = policy(ageing_seconds=1.0)
    queue, old, urgent = WaitingQueue(precedence), request("o", 2, priority=9), request("u", 2, priority=-9)
    for one in (old, request("n", 2, priority=-2, arrival_time=7.8)):
        queue.add(one)
    for now, line, keeps in ((7.9, "no", False), (8.1, "on", True)):
        assert ids(queue, now) == line
        assert precedence.outranks(urgent, old, "slots", now) is not keeps
    queue.remove(old, served_at=8.1)
    precedence.joined(old)
    urgent.start_by = 8.2  # nor against a deadline that is near
    assert not precedence.outranks(urgent, old, "blocks", 8.2)
    assert precedence.victim([old, request("y", 2, priority=1)]).request_id == "y"  # type: ignore[union-attr]
    vip = request("v", 2, service=Service("vip"))
    assert precedence.outranks(vip, old, "slots", 8.2)  # what is reserved is reserved
    precedence.forgotten(old)
    assert precedence.outranks(urgent, old, "blocks", 8.2)


def test_age_is_counted_from_when_the_lane_was_served_last() -> None:
    queue = WaitingQueue(policy(ageing_seconds=1.0))
    first, second = request("a", 2, priority=1), request("b", 2, priority=1)
    fresh, later = request("c", 2, arrival_time=2.4), request("d", 2, arrival_time=4.4)
    for one in (first, second, fresh):
        queue.add(one)
    assert ids(queue, 2.5) == "abc"
    queue.remove(first, served_at=2.4)
    assert ids(queue, 2.5) == "cb"
    queue.remove(fresh)
    queue.add(later)
    assert ids(queue, 4.5) == "bd"


def test_lane_keeps_its_order_and_those_preempted_go_first() -> None:
    queue = WaitingQueue(policy())
    for number, name in enumerate("abcd"):
        one = request(name, 2)
        one.sequence = number
        one.status = RequestStatus.PREEMPTED if name in "cd" else RequestStatus.WAITING
        queue.add(one)
    assert ids(queue) == "cdab"


def test_the_queue_continues_when_its_first_request_is_taken() -> None:
    queue = WaitingQueue(policy())
    for number, (name, priority) in enumerate([("a", 0), ("b", 0), ("c", 1), ("d", 2)]):
        one = request(name, 2, priority=priority)
        one.sequence = number
        queue.add(one)
    seen = []
    for one in queue.line(0.0):
        seen.append(one.request_id)
        if one.request_id in "acd":
            queue.remove(one)
    assert (seen, ids(queue), len(queue)) == (["a", "b", "c", "d"], "b", 1)


def test_share_gives_reserved_step_tokens_first_and_the_rest_in_order() -> None:
    precedence = policy()
    big, chat, small = request("b", 20), request("c", 20, service=Service("chat")), request("s", 20)
    big.priority, small.priority = -5, 3
    for one in (big, chat, small):
        one.progress_mark = 20
    needs = [(big, 20), (chat, 20), (small, 20)]
    given_away = {one.request_id: count for one, count in precedence.share(needs, 12)}
    assert given_away == {"b": 8, "c": 4, "s": 0}
    assert {one.request_id: count for one, count in precedence.share(needs[:1], 12)} == {"b": 12}
    assert sum(count for _, count in precedence.share(needs, 2)) == 2


def test_a_class_has_its_reserved_step_tokens_once_however_many_of_it_run() -> None:
    classes = {name: ServiceClass(min_step_tokens=4) for name in ("chat", "vip")}
    needs = [
        (request(name, 20, service=Service(of)), wanted)
        for name, of, wanted in [("a", "chat", 4), ("b", "chat", 20), ("c", "default", 20), ("d", "vip", 20)]
    ]
    for step, (one, _) in enumerate(needs):
        one.admitted_at_step = step
    shares = Precedence(classes, max_running=4).share(needs, 12)
    assert [(one.request_id, count) for one, count in shares] == [("a", 4), ("b", 4), ("c", 0), ("d", 4)]


def test_a_class_within_its_reservation_is_preempted_last() -> None:
    precedence = Precedence({"vip": ServiceClass(min_seqs=1)}, max_running=4)
    vip, other = request("a", 2, priority=9, service=Service("vip")), request("b", 2)
    precedence.joined(vip)
    assert precedence.victim([vip, other]) is other
    precedence.joined(request("c", 2, service=Service("vip")))
    assert precedence.victim([vip, other]) is vip


def test_a_request_is_reported_late_once_and_loses_its_deadline() -> None:
    precedence = policy()
    one = request("a", 2, service=Service(first_token_by=1.0))
    precedence.queued(one, 0.0)
    assert one.start_by == 1.0
    assert list(precedence.late(0.5)) == []
    assert list(precedence.late(1.5)) == [one]
    assert (one.start_by, one.service.has_deadline) == (math.inf, False)
    assert list(precedence.late(2.5)) == []


def test_latest_start_leaves_time_for_the_service() -> None:
    precedence = Precedence({}, max_running=4, estimate=lambda request: Estimate(0.5, 0.5, 16, 0.1, 0.05))
    one = request("a", 5, max_tokens=15, service=Service(first_token_by=4.0, finish_by=5.0))
    precedence.queued(one, 0.0)
    assert one.start_by == pytest.approx(3.0)


def test_a_request_that_would_be_late_even_alone_goes_behind_the_others() -> None:
    """The first would take 2 s alone and 4 s at this load, the second half of that; both must be done in 3 s."""
    precedence = Precedence(
        {}, max_running=4, estimate=lambda r: Estimate(0.0, 0.0, len(r.token_ids) * 10 + 1, 0.1, 0.05)
    )
    driver = Driver(policy=precedence, max_num_seqs=1, drop_late=True)
    long, short = (request(name, n, max_tokens=90, service=Service(finish_by=3.0)) for name, n in [("a", 4), ("b", 2)])
    driver.add(request("0", 2, max_tokens=90, service=Service(finish_by=99.0)))
    driver.step()
    driver.add(long, short)
    for at, line in [(0.9, "ab"), (1.1, "ba"), (1.9, "ba"), (2.1, "ab")]:
        driver.now = at
        driver.step()
        assert [r.request_id for r in driver.scheduler.waiting.line(at)] == list(line), at
    assert [r.service.has_deadline for r in (long, short)] == [True, True]
    assert (driver.scheduler.num_past_deadline, driver.scheduler.dropped) == (0, [])
    driver.now = 3.1
    driver.step()
    assert driver.scheduler.dropped == [long, short]


def test_a_request_with_too_many_tokens_left_is_late_at_once() -> None:
    precedence = Precedence({}, max_running=4, estimate=lambda r: Estimate(0.0, 0.0, 10, 0.1, 0.1))
    driver = Driver(policy=precedence, max_num_seqs=4, drop_late=True)
    sure, unsure = (
        request(name, 2, max_tokens=20, min_tokens=n, service=Service(finish_by=2.05))
        for name, n in [("a", 20), ("b", 2)]
    )
    driver.add(sure, unsure)
    driver.step()
    for _ in range(5):  # one token each, and faster than is said to be possible
        driver.now += 0.1
        driver.step()
        assert not driver.scheduler.dropped
    driver.now += 0.2
    driver.step()
    assert driver.scheduler.dropped == [sure]
    driver.now = 2.06
    driver.step()
    assert driver.scheduler.dropped == [sure, unsure]


@pytest.mark.parametrize(("vips", "others", "stays"), [(0, 1, True), (0, 2, False), (2, 1, True), (1, 2, False)])
def test_rows_are_kept_only_as_far_as_a_class_has_not_taken_them(vips: int, others: int, stays: bool) -> None:
    precedence = Precedence({"vip": ServiceClass(min_seqs=2)}, max_running=4)
    for one in [request("v", 2, service=Service("vip"))] * vips + [request("o", 2)] * others:
        precedence.joined(one)
    assert precedence.may_stay(request("n", 2)) is stays


@pytest.mark.parametrize(("max_preemptions", "rows"), [(1, 3), (8, 2)])
def test_pinned_work_leaves_reserved_rows_alone(max_preemptions: int, rows: int) -> None:
    precedence = Precedence({"vip": ServiceClass(min_seqs=1)}, max_running=rows)
    driver = Driver(policy=precedence, max_num_seqs=rows, max_preemptions=max_preemptions)
    driver.add(*[request(name, 3, max_tokens=30) for name in "abcd"])
    for _ in range(3):
        driver.step()
    for name in "abc"[:rows]:
        driver.scheduler.preempt(name)
    for _ in range(3):
        driver.step()
    vip = request("v", 3, max_tokens=4, service=Service("vip"))
    driver.add(vip)
    joined: list[str] = []
    while "v" not in joined:
        joined += [row.request_id for row in driver.step().joined]
        assert len(joined) < 20
    assert vip.slot >= 0
    assert _others(driver, vip) <= rows - 1
    driver.run()


def _others(driver: Driver, vip: Request) -> int:
    return sum(one is not vip for one in driver.scheduler.running.values())
