from __future__ import annotations

import logging

import pytest

from chairlift.metrics.stats import EngineStats, FinishedRequest, RequestStats
from chairlift.server.status_line import StatusLine


def finished() -> FinishedRequest:
    return FinishedRequest(
        reason="stop",
        prompt_tokens=100,
        cached_tokens=0,
        generation_tokens=5,
        n=1,
        max_tokens=None,
        num_preemptions=0,
        e2e_seconds=1.0,
        queue_seconds=0.1,
        prefill_seconds=0.1,
        decode_seconds=0.8,
    )


def text_of(line: tuple[int, str] | None) -> str:
    assert line is not None
    return line[1]


def test_an_idle_server_says_nothing() -> None:
    stats = RequestStats()
    status = StatusLine(stats, 0.0)
    assert status.next(stats, num_waiting=0, now=10.0) is None
    stats.request_finished(finished())
    assert status.next(stats, num_waiting=0, now=20.0) is not None
    assert status.next(stats, num_waiting=0, now=30.0) is None
    stats.rejected["draining"] += 1
    assert status.next(stats, num_waiting=0, now=40.0) is not None
    assert status.next(stats, num_waiting=1, now=50.0) is not None
    assert status.next(stats, num_waiting=0, now=60.0) is None
    stats.engine.num_running = 1  # work without progress is worth a line
    assert status.next(stats, num_waiting=0, now=70.0) is not None


def test_the_line_tells_of_its_interval() -> None:
    stats = RequestStats()
    stats.step(EngineStats(num_computed_tokens=10_000, prefix_cache_queries=1_000, prefix_cache_hits=1_000))
    stats.num_restarts = 4
    status = StatusLine(stats, 100.0)
    stats.step(
        EngineStats(
            num_running=3,
            used_blocks=30,
            cached_blocks=20,
            free_blocks=50,
            num_computed_tokens=10_000 + 1_200 + 199 + 50 + 1,
            num_recomputed_tokens=50,
            prefix_cache_queries=1_400,
            prefix_cache_hits=1_100,
        )
    )
    stats.first_token(0.1, now=101.0)
    stats.next_tokens(1.0, 199, now=102.0)
    stats.overrun_tokens = 1
    expected = "3 running, 2 waiting; tokens/s: 120 in, 20 out; KV cache 30%; prefix hits 25%; preempted 0.0% (healthy)"
    assert status.next(stats, num_waiting=2, now=110.0) == (logging.INFO, expected)
    stats.rejected.update(["draining", "queue_requests"])
    stats.engine_restarted()
    line = text_of(status.next(stats, num_waiting=0, now=120.0))
    assert "; 2 rejected; engine restarted once" in line
    assert "tokens/s: 0 in, 0 out; KV cache 0%; preempted" in line


@pytest.mark.parametrize(
    ("rate", "level", "mark"),
    [
        (0.0, logging.INFO, "preempted 0.0% (healthy)"),
        (0.019, logging.INFO, "preempted 1.9% (healthy)"),
        (0.02, logging.INFO, "preempted 2.0% (watch)"),
        (0.05, logging.INFO, "preempted 5.0% (watch)"),
        (
            0.051,
            logging.WARNING,
            "preempted 5.1% (too many: raise --kv-cache-memory-bytes or lower --max-num-seqs)",
        ),
    ],
)
def test_the_preemption_rate_has_its_marks(rate: float, level: int, mark: str) -> None:
    stats = RequestStats()
    status = StatusLine(stats, 0.0)
    stats.engine = EngineStats(num_running=1, preemption_rate=rate)
    line = status.next(stats, num_waiting=0, now=10.0)
    assert line is not None and line[0] == level
    assert line[1].endswith(mark)


def test_two_lines_at_the_same_time_divide_by_no_zero() -> None:
    stats = RequestStats()
    status = StatusLine(stats, 5.0)
    assert status.next(stats, num_waiting=1, now=5.0) is not None
