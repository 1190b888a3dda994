from __future__ import annotations

import dataclasses

import pytest

from chairlift_lab.workload.arrivals import Gamma
from chairlift_lab.workload.summary import summarise
from chairlift_lab.workload.trace import TracedRequest, draw_trace


def request(arrival: float = 0.0, prompt: int = 100, *ids: int, block: int = 64, **fields: object) -> TracedRequest:
    return dataclasses.replace(
        TracedRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=10, prefix_ids=ids, prefix_block=block),
        **fields,
    )


def test_the_summary_counts_requests_sessions_and_lengths() -> None:
    facts = summarise(
        [
            request(1.0, 10, tenant="a", session="x"),
            request(1.0, 20, session="x", turn=1, cancel_ms=5.0),
            request(4.0, 30, tenant="a"),
            request(5.0, 40, priority=2),
        ]
    )
    assert (facts.requests, facts.sessions, facts.cancels, facts.seconds, facts.rate) == (4, 1, 1, 4.0, 0.75)
    assert facts.burstiness == pytest.approx((14 / 9) ** 0.5 / (4 / 3))
    assert (facts.prompts.total, facts.prompts.mean, facts.prompts.p50, facts.prompts.most) == (100, 25.0, 25.0, 40)
    assert (facts.prompts.p90, facts.prompts.p99) == pytest.approx((37.0, 39.7))
    assert facts.outputs.total == 40
    assert facts.repeated is None
    assert [(each.tenant, each.priority, count) for each, count in facts.classes] == [
        ("a", 0, 2),
        ("", 0, 1),
        ("", 2, 1),
    ]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_tells_arrivals_apart(burstiness: float) -> None:
    facts = summarise(draw_trace("chat", Gamma(3.0, burstiness), 20_000))
    assert facts.burstiness == pytest.approx(burstiness**-0.5, rel=0.05)
    assert facts.rate == pytest.approx(3.0, rel=0.05)


def test_one_gap_says_nothing_of_bursts() -> None:
    facts = summarise([request(1.0), request(3.0)])
    assert (facts.rate, facts.burstiness) == (0.5, None)


def test_all_at_once_has_no_rate() -> None:
    facts = summarise(draw_trace("chat", count=5))
    assert (facts.rate, facts.burstiness, facts.seconds) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("trace", "repeated"),
    [
        ([request(0, 128, 1, 2), request(0, 128, 1, 2)], 128 / 256),
        ([request(0, 128, 1, 2), request(0, 128, 1, 3)], 64 / 256),
        ([request(0, 128, 1, 2), request(0, 128, 3, 2)], 0),  # a block counts only behind the same beginning
        ([request(0, 128, 1, 2), request(0, 128, 2)], 0),
        ([request(0, 100, 1, 2), request(0, 200, 1, 2, 3)], 100 / 300),  # as far as the last block was filled
        ([request(0, 200, 1, 2, 3), request(0, 100, 1, 2)], 100 / 300),
        ([request(0, 100, 1, 2), request(0, 128, 1, 2), request(0, 128, 1, 2)], (100 + 128) / 356),
        ([request(0, 64, 1), request(0, 64, 1, block=128)], 0),  # ids of another block size are other ids
        ([request(0, 64), request(0, 64, 1)], 0),
    ],
)
def test_the_share_of_repeated_beginnings_is_counted(trace: list[TracedRequest], repeated: float) -> None:
    assert summarise(trace).repeated == pytest.approx(repeated)
