from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_lab.workload.arrivals import Gamma, parse_arrivals
from chairlift_lab.workload.lengths import Fixed, Uniform, Workload
from chairlift_lab.workload.trace import WORKLOADS, TracedRequest, Traffic, draw_trace, prompt_token_ids
from chairlift_lab.workload.traffic import Cancels, Chats, RequestClass, SharedPrefixes, ToolPauses

PLAIN = Traffic(prompt=Uniform(10, 90), output=Uniform(5, 40))
CHATS = dataclasses.replace(PLAIN, chats=Chats(Uniform(1, 6), think_seconds=2.0, most_tokens=200))


def sessions(trace: list[TracedRequest]) -> dict[str, list[TracedRequest]]:
    found = defaultdict(list)
    for request in trace:
        found[request.session].append(request)
    return found


def test_named_workloads_have_their_documented_lengths() -> None:
    chat = draw_trace("chat", Gamma(2.0), 50, seed=3)
    lengths = [(len(prompt), output) for prompt, output in Workload(count=50, seed=3).requests()]
    assert [(each.prompt_tokens, each.output_tokens) for each in chat] == lengths
    assert [each.arrival for each in chat] == Gamma(2.0).times(50, 3)
    assert {each.prefix_ids for each in draw_trace("assistant", count=5)} == {(0, 1)}
    assert min(each.prompt_tokens for each in draw_trace("assistant", count=50)) > 1024
    uniform = draw_trace("uniform", count=20)
    assert len({(each.prompt_tokens, each.output_tokens) for each in uniform}) == 1
    assert uniform[0].output_tokens < 30
    for name, traffic in WORKLOADS.items():
        assert draw_trace(name, count=20) == draw_trace(name, count=20)
        assert traffic.description
    with pytest.raises(ConfigError, match="chat, assistant"):
        draw_trace("chats")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("chat assistant summarize write", "e8f1376114c11b61be46ca63d5ad9fa1d7ee7c09a1f46afc874a9768bf524724"),
        ("uniform conversation agents", "f80514df8f25b875a0e6970347835992c98226abe6488b9ac1c61ac515bdc775"),
    ],
)
def test_recorded_results_still_mean_the_same_traffic(names: str, expected: str) -> None:
    """Published figures name a workload, arrivals and a seed."""
    digest = hashlib.sha256()
    for name in names.split():
        for arrivals in ("all", "poisson:3", "gamma:4:0.3", "ramp:1:5:30", "onoff:3:4:5"):
            for seed in (0, 5):
                for each in draw_trace(name, parse_arrivals(arrivals), 300, seed):
                    fields = (round(each.arrival, 9), each.prompt_tokens, each.output_tokens, each.prefix_ids)
                    digest.update(repr(fields).encode())
    assert digest.hexdigest() == expected


TRAFFIC = st.builds(
    Traffic,
    prompt=st.builds(Uniform, st.integers(1, 50), st.integers(50, 900)),
    output=st.builds(Uniform, st.integers(1, 20), st.integers(20, 90)),
    prefixes=st.none() | st.builds(SharedPrefixes, st.just(1024), st.floats(0, 1), st.integers(1, 9)),
    chats=st.none() | st.builds(Chats, st.builds(Uniform, st.just(1), st.integers(1, 5)), st.floats(0, 9)),
    cancels=st.none() | st.builds(Cancels, st.floats(0, 1), st.just(Uniform(1, 5000))),
    classes=st.lists(st.builds(RequestClass, weight=st.floats(0.1, 9), tenant=st.sampled_from("abc")), max_size=3).map(
        tuple
    ),
)


@settings(max_examples=40, deadline=None)
@given(TRAFFIC, st.integers(1, 60), st.integers(0, 2**40), st.sampled_from(["all", "poisson:3", "diurnal:3:4:60"]))
def test_one_seed_gives_one_trace(traffic: Traffic, count: int, seed: int, arrivals: str) -> None:
    trace = traffic.draw(count, parse_arrivals(arrivals), seed)
    assert trace == traffic.draw(count, parse_arrivals(arrivals), seed)
    assert len(trace) == count
    assert all(one.arrival <= other.arrival for one, other in pairwise(trace))
    bare = Traffic(prompt=traffic.prompt, output=traffic.output).draw(count, parse_arrivals(arrivals), seed)
    assert Counter(each.output_tokens for each in trace) == Counter(each.output_tokens for each in bare)


def test_later_turns_repeat_the_conversation() -> None:
    trace = CHATS.draw(300, Gamma(3.0), seed=1)
    chats = sessions(trace)
    assert "" not in chats
    assert max(map(len, chats.values())) > 2
    seen: set[int] = set()
    for turns in chats.values():
        assert [each.turn for each in turns] == list(range(len(turns)))
        for one, other in pairwise(turns):
            new = other.prompt_tokens - one.prompt_tokens - one.output_tokens
            assert 10 <= new <= 90
            assert other.prefix_ids[: len(one.prefix_ids)] == one.prefix_ids
            assert other.arrival >= one.arrival
        assert turns[-1].prompt_tokens + turns[-1].output_tokens <= 200
        assert not seen & set(turns[-1].prefix_ids), "chats share nothing unless they say so"
        seen |= set(turns[-1].prefix_ids)
    one, other = next(turns for turns in chats.values() if len(turns) > 1)[:2]
    before = prompt_token_ids(one, 0, 1000)
    assert prompt_token_ids(other, 1, 1000)[: len(before)] == before


def test_chats_have_the_turns_the_pauses_and_the_rate_they_were_drawn_with() -> None:
    chats = Chats(Uniform(1, 6), think_seconds=2.0, most_tokens=100_000)
    trace = dataclasses.replace(PLAIN, chats=chats).draw(20_000, Gamma(5.0), seed=2)
    found = list(sessions(trace).values())
    assert np.mean([len(turns) for turns in found]) == pytest.approx(3.5, rel=0.03)
    pauses = [other.arrival - one.arrival for turns in found for one, other in pairwise(turns)]
    assert np.mean(pauses) == pytest.approx(2.0, rel=0.03)
    assert np.std(pauses) == pytest.approx(2.0, rel=0.05)
    middle = [each for each in trace if 500 <= each.arrival < 3500]
    assert len(middle) / 3000 == pytest.approx(5.0, rel=0.03), "requests, not chats, come at the rate"


def test_prefixes_are_shared_by_their_share_and_by_zipf() -> None:
    prefixes = SharedPrefixes(1024, share=0.6, distinct=3, alpha=1.0)
    trace = dataclasses.replace(PLAIN, prefixes=prefixes).draw(20_000, seed=4)
    plain = PLAIN.draw(20_000, seed=4)
    counts = Counter(each.prefix_ids for each in trace)
    assert set(counts) == {(), (0, 1), (2, 3), (4, 5)}
    assert counts[()] / 20_000 == pytest.approx(0.4, abs=0.02)
    shares = [counts[(2 * k, 2 * k + 1)] / 12_000 for k in range(3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    for one, other in zip(trace, plain, strict=True):
        assert one.prompt_tokens == other.prompt_tokens + 512 * len(one.prefix_ids)
        assert one.output_tokens == other.output_tokens


def test_chats_may_begin_with_shared_prefixes() -> None:
    prefixes = SharedPrefixes(64, distinct=2)
    trace = dataclasses.replace(CHATS, prefixes=prefixes).draw(200, seed=5)
    assert {each.prefix_ids[:4] for each in trace} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    for turns in sessions(trace).values():
        assert len({each.prefix_ids[:4] for each in turns}) == 1
        assert min(turns[0].prefix_ids[4:], default=8) >= 8
        assert turns[0].prompt_tokens > 64


def test_cancels_and_classes_have_their_shares() -> None:
    classes = (
        RequestClass(weight=3, tenant="app", ttft_ms=500.0, tpot_ms=80.0),
        RequestClass(weight=1, tenant="batch", priority=5, service_tier="flex", deadline_ms=9000.0),
    )
    traffic = dataclasses.replace(CHATS, classes=classes, cancels=Cancels(0.2, Uniform(100, 300)))
    trace = traffic.draw(8000, Gamma(3.0), seed=6)
    cancelled = [each.cancel_ms for each in trace if each.cancel_ms is not None]
    assert len(cancelled) / 8000 == pytest.approx(0.2, abs=0.02)
    assert 100 <= min(cancelled) <= max(cancelled) <= 300
    kinds = Counter(
        (each.tenant, each.priority, each.service_tier, each.ttft_ms, each.tpot_ms, each.deadline_ms) for each in trace
    )
    assert set(kinds) == {("app", 0, "", 500.0, 80.0, None), ("batch", 5, "flex", None, None, 9000.0)}
    assert kinds[("app", 0, "", 500.0, 80.0, None)] / 8000 == pytest.approx(0.75, abs=0.04)
    assert all(len({each.tenant for each in turns}) == 1 for turns in sessions(trace).values())
    without = CHATS.draw(8000, Gamma(3.0), seed=6)
    cleared: dict[str, Any] = {name: getattr(without[0], name) for name in ("tenant", "priority", "service_tier")}
    cleared |= dict.fromkeys(("ttft_ms", "tpot_ms", "deadline_ms", "cancel_ms"))
    assert [dataclasses.replace(each, **cleared) for each in trace] == without, "the rest stays as it was"


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: SharedPrefixes(0), "tokens from 1 to .*, distinct of at least 1"),
        (lambda: SharedPrefixes(2**24 + 512), "tokens from 1 to 2..24, .* got 16777728"),
        (lambda: SharedPrefixes(512, share=1.5), "share of shared prefixes must be from 0 to 1, got 1.5"),
        (lambda: SharedPrefixes(512, alpha=-1), "alpha from 0 to 50"),
        (lambda: dataclasses.replace(PLAIN, prefixes=SharedPrefixes(100)), "blocks of 512 tokens here.*cannot be 100"),
        (lambda: dataclasses.replace(CHATS, prefixes=SharedPrefixes(100)), "blocks of 16 tokens here"),
        (lambda: Chats(Fixed(2), think_seconds=-1), "think_seconds of chats must be from 0"),
        (lambda: Chats(Fixed(2), think_seconds=1e300), "to 1,000,000,000, got 1e"),
        (lambda: Chats(Fixed(2), most_tokens=0), "most_tokens of chats must be at least 1"),
        (lambda: Cancels(float("nan"), Fixed(2)), "share of cancels must be from 0 to 1"),
        (lambda: RequestClass(weight=0), "weight of a class must be above 0"),
    ],
)
def test_impossible_traffic_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def agents(*tools: ToolPauses, **chats: Any) -> Traffic:
    return Traffic(prompt=Fixed(100), output=Fixed(20), chats=Chats(Uniform(2, 9), tools=tools, **chats))


def test_agents_call_tools_between_their_turns_and_wait_for_them() -> None:
    tools = ToolPauses("search", 2.0, 0.5, 3.0), ToolPauses("run_tests", 15.0, 0.7)
    trace = agents(*tools, first=Fixed(900)).draw(4000, parse_arrivals("poisson:9"), seed=3)
    gaps: dict[str, list[float]] = {"search": [], "run_tests": []}
    for turns in sessions(trace).values():
        assert (turns[0].prompt_tokens, turns[0].gap_ms) == (900, None)
        assert turns[-1].tool == ""
        for before, after in pairwise(turns):
            assert after.gap_ms is not None
            assert after.prompt_tokens == before.prompt_tokens + 20 + 100
            assert after.arrival == pytest.approx(before.arrival + after.gap_ms / 1000, abs=1e-6)
            gaps[before.tool].append(after.gap_ms / 1000)
    assert len(gaps["search"]) / len(gaps["run_tests"]) == pytest.approx(3, rel=0.15)
    for tool in tools:
        logs = np.log(gaps[tool.name])
        assert math.exp(np.median(logs)) == pytest.approx(tool.median_seconds, rel=0.1)
        assert float(np.std(logs)) == pytest.approx(tool.sigma, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolPauses("", 1.0, 0.5), "a tool needs a name"),
        (lambda: ToolPauses("x", 0.0, 0.5), "tool x needs a median above 0"),
        (lambda: Chats(Fixed(2), 1.0, tools=(ToolPauses("x", 1.0, 0.5),)), "tools or think_seconds"),
    ],
)
def test_tools_without_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
