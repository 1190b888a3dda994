"""Toy examples of the published orders. Each expected order is computed by hand."""

from __future__ import annotations

import math

import pytest

from chairlift.core.plugins.boost import GammaBoost, UniBoost
from chairlift.core.plugins.fair_tenants import Equinox, LowestCounter
from chairlift.core.plugins.fastserve import FastServe
from chairlift.core.plugins.kairos import Kairos
from chairlift.core.plugins.learned_rank import LearnedRank
from chairlift.core.plugins.lprs import LprsApc
from chairlift.core.plugins.residual_shortest import ResidualShortestFirst
from chairlift.core.plugins.sglang import DepthFirstByWeight, HighestResponseRatio, LongestPrefixMatch
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.policy import FCFS
from chairlift.core.scheduler.view import View
from tests.core.plugins.toys import SHARES, KnownView, starts
from tests.core.scheduler.driver import Driver, request

both_shares = pytest.mark.parametrize("share", SHARES)


@both_shares
def test_kairos_serves_the_set_that_saves_most_targets(share: float) -> None:
    """(work, due): A (6, 6), B (2, 3), C (2, 4). By arrival only A is in time. B and C are, if A comes last."""
    due = {"A": 6.0, "B": 3.0, "C": 4.0}
    requests = [request(name, 4, service=Service(first_token_by=due[name])) for name in "ABC"]
    view = KnownView(prefill={"A": 6.0, "B": 2.0, "C": 2.0})
    assert starts(Kairos(view), requests, share) == ["B", "C", "A"]


def boosted(arrival: float, share: float) -> list[str]:
    requests = [request("long", 4, arrival_time=0.0), request("short", 4, arrival_time=arrival)]
    return starts(GammaBoost(KnownView(service={"long": 2.0, "short": 0.1})), requests, share)


@both_shares
def test_gamma_boost_serves_a_short_request_as_if_it_had_come_earlier(share: float) -> None:
    """Boosts with gamma 1: 0.145 for 2 s, 2.352 for 0.1 s."""
    assert boosted(2.0, share) == ["short", "long"]  # 2 - 2.352 < 0 - 0.145
    assert boosted(3.0, share) == ["long", "short"]  # 3 - 2.352 > 0 - 0.145


def test_boosts_are_those_of_the_formulas() -> None:
    one = request("r", 4)
    assert GammaBoost(KnownView(service={"r": 2.0})).boost(one) == pytest.approx(0.1454, abs=1e-4)
    assert GammaBoost(KnownView(service={"r": 0.1})).boost(one) == pytest.approx(2.3522, abs=1e-4)
    # M = (e + e**3) / 2 = 11.402
    assert UniBoost(KnownView(recent=[1, 3])).boost(one) == pytest.approx(math.log(11.402 / 10.402), abs=1e-4)
    assert UniBoost(KnownView(recent=[2])).boost(one) == pytest.approx(0.1454, abs=1e-4)  # one length: the same formula


@both_shares
@pytest.mark.parametrize(("arrival", "order"), [(5.0, ["B", "A"]), (6.0, ["A", "B"])])
def test_lprs_weighs_waiting_against_the_remaining_prompt(arrival: float, order: list[str], share: float) -> None:
    """Keys: A 400; B 200 + 37.5 * 5 = 387.5, or 200 + 37.5 * 6 = 425."""
    requests = [request("A", 400), request("B", 200, arrival_time=arrival)]
    assert starts(LprsApc(), requests, share) == order


@both_shares
def test_residual_sjf_counts_uncached_blocks(share: float) -> None:
    """Blocks of 16 to compute: A 100 - 98 = 2, C 2, B 6. Ties by arrival. By raw length the order is C, B, A."""
    requests = [request("A", 1600), request("C", 40), request("B", 100)]
    view = KnownView(cached={"A": 98 * 16}, block_size=16)
    assert starts(ResidualShortestFirst(view), requests, share) == ["A", "C", "B"]


@both_shares
def test_residual_sjf_puts_old_requests_first(share: float) -> None:
    drive = Driver(policy=ResidualShortestFirst(), policy_share=share, max_num_seqs=1)
    drive.add(request("X", 4, 30), request("long", 40))
    drive.step()
    drive.now = 9.0
    drive.add(request("short", 4, arrival_time=9.0), request("old", 44, arrival_time=9.0))
    drive.now = 10.0
    outs = drive.run()
    assert [row.request_id for out in outs for row in out.joined] == ["long", "short", "old"]


@both_shares
def test_learned_rank_promotes_the_starved(share: float) -> None:
    """One row, scores A .1, B .9, C .5. After two idle steps, C and A are urgent for one step each, C before A."""

    class Impatient(LearnedRank):
        starve_steps = 2
        urgent_steps = 1

    lengths = {"A": 9, "B": 1, "C": 5}
    drive = Driver(policy=Impatient(), policy_share=share, max_num_seqs=1)
    drive.add(*(request(name, 4, 12, service=Service(predicted_tokens=lengths[name])) for name in "ABC"))
    ran = []
    for _ in range(5):
        drive.step()
        ran += drive.scheduler.running
    assert ran == ["B", "B", "C", "A", "B"]
    drive.run()


@both_shares
def test_lpm_serves_the_longest_cached_prefix_first(share: float) -> None:
    """X and Y share 100 tokens that are not cached, so Y waits until X has computed them."""
    common = list(range(100))
    requests = [
        request("X", [*common, 1001]),
        request("Y", [*common, 1002]),
        request("p64", 700),
        request("p512", 701),
    ]
    view = KnownView(cached={"p64": 64, "p512": 512})
    assert starts(LongestPrefixMatch(view), requests, share) == ["p512", "p64", "X", "Y"]


@both_shares
def test_lpm_keeps_the_order_of_arrival_in_a_long_queue(share: float) -> None:
    requests = [request(f"r{number}", 4, 1) for number in range(130)]
    view = KnownView(cached={"r129": 4})
    assert starts(LongestPrefixMatch(view), requests, share)[:3] == ["r0", "r1", "r129"]  # the third is chosen from 128


@both_shares
def test_depth_first_serves_the_heavier_branch_first(share: float) -> None:
    """Node 1 has weight 4 and node 9 has 1; below node 1, node 3 has 2 and node 2 has 1. E ends at node 1."""
    paths = {"A": [1, 2], "B": [1, 3], "C": [1, 3], "D": [9], "E": [1]}
    requests = [request(name, 8, 1) for name in "DAEBC"]
    policy = DepthFirstByWeight(KnownView(paths=paths))
    assert starts(policy, requests, share, max_num_seqs=5) == ["B", "C", "A", "E", "D"]  # all in the first step


def test_response_ratio_is_the_admitted_tokens_per_own_token() -> None:
    """A: 1,000 tokens were admitted since it arrived, and it has 500 itself. B: 300 and 100."""
    policy = HighestResponseRatio()
    one, other = request("A", 500), request("B", 100)
    policy.before = {"A": 0, "B": 700}
    policy.admitted = 1000
    assert policy.key(one) == (-2.0,) and policy.key(other) == (-3.0,)


def tenant(name: str, owner: str, prompt: int = 30, max_tokens: int = 11) -> Request:
    return request(name, prompt, max_tokens, service=Service(tenant=owner))


@both_shares
def test_vtc_lifts_a_new_tenant_and_charges_what_it_gets(share: float) -> None:
    """A's counter is 100, so new B begins at 100. B's 30 prompt tokens and 10 generated ones make 150: A is next."""
    policy = LowestCounter()
    drive = Driver(policy=policy, policy_share=share, max_num_seqs=1)
    policy.counters._counters["a"] = 100.0
    drive.add(tenant("a1", "a", 4))
    drive.add(tenant("b1", "b"), tenant("b2", "b"))
    assert policy.score("b") == policy.score("a") == 100.0
    drive.scheduler.abort("a1")
    drive.step()
    drive.add(tenant("a2", "a"))
    policy.counters._counters["a"] = 100.0
    outs = drive.run()
    assert [row.request_id for out in outs for row in out.joined] == ["a2", "b2"]
    assert policy.score("b") == 200.0  # two such requests: 2 * (30 + 2 * 10)


def test_equinox_mixes_two_counters() -> None:
    """Tokens and seconds: A (100, 10), B (80, 40). The tokens alone choose B, the mean of both chooses A."""
    policy = Equinox()
    policy.counters._counters = {"a": 100.0, "b": 80.0}
    policy.seconds = {"a": 10.0, "b": 40.0}
    assert (policy.score("a"), policy.score("b")) == (0.625, 0.9)
    policy.mix = 1.0
    assert policy.score("b") < policy.score("a")


def test_equinox_charges_the_seconds_of_the_machine() -> None:
    view = KnownView(service={"a1": 9.0, "b1": 1.0, "a2": 9.0, "b2": 1.0})
    requests = [tenant("a1", "a"), tenant("a2", "a"), tenant("b1", "b"), tenant("b2", "b")]
    assert starts(Equinox(view), requests, 1.0) == ["a1", "b1", "b2", "a2"]


@both_shares
def test_fastserve_demotes_what_has_used_its_quantum(share: float) -> None:
    """Steps of 4 ms, quanta of 10 ms * 2**level. A has run for 12 ms when B arrives, and is in level 1."""
    policy = FastServe(KnownView())
    drive = Driver(policy=policy, policy_share=share, max_num_seqs=1)
    ran = []
    for step in range(6):
        drive.now = 0.004 * step
        if step == 0:
            drive.add(request("A", 4, 40))
        if step == 2:
            drive.add(request("B", 4, 40, arrival_time=drive.now))
        drive.step()
        ran += drive.scheduler.running
    assert ran == ["A", "A", "A", "B", "B", "B"]
    drive.now = 3.1
    drive.step()
    assert policy.levels["A"] == 0  # it has waited for 3 s


def test_fastserve_skips_the_levels_that_a_prompt_does_not_fit_into() -> None:
    policy = FastServe(KnownView(prefill={"C": 0.035}))
    policy.queued(request("C", 4), 0.0)
    assert policy.levels["C"] == 2  # 10 and 20 ms are too short, 40 ms is not


@pytest.mark.parametrize("policy", [GammaBoost, UniBoost, LprsApc, ResidualShortestFirst, LearnedRank, FastServe])
def test_a_policy_without_a_scheduler_has_an_order(policy: type[GammaBoost]) -> None:
    """The queue before several replicas has no batch."""
    made = policy()
    one = request("r", 4)
    made.queued(one, 0.0)
    assert made.order(one) == made.order(one)
    assert made.fork().name == made.name != FCFS.name
    made.forgotten(one)
    assert not made.keys and not made.waiting


def test_a_fork_has_the_keys_and_marks_of_its_original() -> None:
    policy = HighestResponseRatio(View())
    policy.queued(request("A", 500), 0.0)
    policy.admitted = 1000
    fork = policy.fork()
    fork.queued(request("A", 20), 0.0)  # the copy of a request may have fewer tokens
    assert fork.keys == policy.keys and fork.before == {"A": 0} and fork.admitted == 1000
    fork.forgotten(request("A", 20))
    assert "A" in policy.keys
