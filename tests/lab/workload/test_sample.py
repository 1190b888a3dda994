from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_lab.workload.arrivals import Gamma
from chairlift_lab.workload.lengths import Uniform
from chairlift_lab.workload.sample import sample_trace
from chairlift_lab.workload.summary import summarise
from chairlift_lab.workload.trace import TracedRequest, Traffic, draw_trace
from chairlift_lab.workload.traffic import Chats

LONG = draw_trace("chat", Gamma(4.0), 10_000, seed=1)
CHATS = Traffic(
    prompt=Uniform(10, 90), output=Uniform(5, 40), chats=Chats(Uniform(1, 5), think_seconds=3.0, most_tokens=10**6)
).draw(3000, Gamma(4.0), seed=2)


def untimed(request: TracedRequest) -> TracedRequest:
    return dataclasses.replace(request, arrival=0.0)


def test_a_random_sample_keeps_lengths_and_rate() -> None:
    sample = sample_trace(LONG, 3000, seed=3)
    assert len(sample) == 3000
    assert sample[0].arrival == 0.0
    assert all(one.arrival <= other.arrival for one, other in pairwise(sample))
    assert not Counter(map(untimed, sample)) - Counter(map(untimed, LONG)), "each request at most as often as it was"
    whole, part = summarise(LONG), summarise(sample)
    assert part.rate == pytest.approx(whole.rate, rel=0.03)
    assert part.prompts.mean == pytest.approx(whole.prompts.mean, rel=0.05)
    assert part.outputs.p90 == pytest.approx(whole.outputs.p90, rel=0.05)
    assert part.burstiness == pytest.approx(1.0, abs=0.06), "a Poisson process stays one"


def test_lengths_that_change_with_time_are_drawn_from_all_of_it() -> None:
    early_and_late = [
        TracedRequest(arrival=float(place), prompt_tokens=10 if place < 5000 else 100, output_tokens=1)
        for place in range(10_000)
    ]
    shares = [each.prompt_tokens == 10 for each in sample_trace(early_and_late, 1000, seed=4)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_sessions_stay_whole_with_their_pauses(count: int, seed: int) -> None:
    sample = sample_trace(CHATS, count, seed)
    assert sample == sample_trace(CHATS, count, seed)
    assert count <= len(sample) < count + 5
    whole = {}
    for request in CHATS:
        whole.setdefault(request.session, []).append(request)
    part: dict[str, list[TracedRequest]] = {}
    for request in sample:
        part.setdefault(request.session, []).append(request)
    for session, turns in part.items():
        assert list(map(untimed, turns)) == list(map(untimed, whole[session]))
        pauses = [other.arrival - one.arrival for one, other in pairwise(turns)]
        assert pauses == pytest.approx([other.arrival - one.arrival for one, other in pairwise(whole[session])])


def test_sessions_begin_at_the_rate_they_had() -> None:
    sample = sample_trace(CHATS, 1000, seed=5)

    def rate(trace: list[TracedRequest]) -> float:
        return sum(each.turn == 0 for each in trace) / max(each.arrival for each in trace if each.turn == 0)

    assert rate(sample) == pytest.approx(rate(CHATS), rel=0.1)


def test_a_window_keeps_neighbours_and_times() -> None:
    sample = sample_trace(LONG, 50, seed=6, window=True)
    places = [place for place in range(len(LONG) - 49) if untimed(LONG[place]) == untimed(sample[0])]
    begin = next(
        place for place in places if list(map(untimed, LONG[place : place + 50])) == list(map(untimed, sample))
    )
    assert [each.arrival for each in sample] == pytest.approx(
        [each.arrival - LONG[begin].arrival for each in LONG[begin : begin + 50]]
    )
    assert {each.prompt_tokens for each in sample_trace(LONG, 50, seed=7, window=True)} != {
        each.prompt_tokens for each in sample
    }


def test_a_window_may_begin_at_any_place_that_leaves_it_whole() -> None:
    trace = [TracedRequest(arrival=float(place), prompt_tokens=place + 1, output_tokens=1) for place in range(5)]
    windows = [sample_trace(trace, 4, seed, window=True) for seed in range(20)]
    assert {tuple(each.prompt_tokens for each in window) for window in windows} == {(1, 2, 3, 4), (2, 3, 4, 5)}


@pytest.mark.parametrize("count", [None, 2000])
def test_a_sample_has_the_given_rate(count: int | None) -> None:
    sample = sample_trace(LONG, count, rate=0.5)
    assert (len(sample) - 1) / sample[-1].arrival == pytest.approx(0.5)
    assert len(sample) == (count or len(LONG))


def test_two_requests_have_a_rate() -> None:
    trace = [TracedRequest(arrival=arrival, prompt_tokens=1, output_tokens=1) for arrival in (0.0, 8.0)]
    assert [each.arrival for each in sample_trace(trace, rate=0.5)] == [0.0, 2.0]


def test_all_of_a_trace_is_the_trace() -> None:
    begin = LONG[0].arrival
    assert list(map(untimed, sample_trace(LONG))) == list(map(untimed, LONG))
    times = [each.arrival - begin for each in LONG]
    assert [each.arrival for each in sample_trace(LONG)] == pytest.approx(times, abs=1e-9)


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="the trace has 10,000 requests, so a sample has from 1 to 10,000 requests, not 10,001"
    ):
        sample_trace(LONG, 10_001)
    with pytest.raises(ConfigError, match=r"rate must be from 0\.000001 to 1,000,000,000 requests per second"):
        sample_trace(LONG, 10, rate=float("nan"))
    with pytest.raises(ConfigError, match="all requests arrive at once, so there is no rate"):
        sample_trace(draw_trace("chat", count=9), 5, rate=1.0)
    assert {each.arrival for each in sample_trace(draw_trace("chat", count=9), 5)} == {0.0}
