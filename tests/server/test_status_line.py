from __future__ import annotations

import pytest

from chairlift.metrics.stats import EngineStats, FinishedRequest, RequestStats
from chairlift.server.operations.status_line import PreemptionAlarm, StatusLine
from tests.server.harness import INFO


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


def text_of(line: str | None) -> str:
    assert line is not None
    return line


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
    assert status.next(stats, num_waiting=2, now=110.0) == expected
    stats.rejected.update(["draining", "queue_requests"])
    stats.engine_died()
    stats.num_restarts += 1
    line = text_of(status.next(stats, num_waiting=0, now=120.0))
    assert "; 2 rejected; engine restarted once" in line
    assert "tokens/s: 0 in, 0 out; KV cache 0%; preempted" in line


@pytest.mark.parametrize(
    ("rate", "mark"), [(0.0, "healthy"), (0.019, "healthy"), (0.02, "watch"), (0.05, "watch"), (0.051, "too many")]
)
def test_the_preemption_rate_has_its_marks(rate: float, mark: str) -> None:
    stats = RequestStats()
    status = StatusLine(stats, 0.0)
    stats.engine = EngineStats(num_running=1, preemption_rate=rate)
    assert text_of(status.next(stats, num_waiting=0, now=10.0)).endswith(f"preempted {rate:.1%} ({mark})")


def pressed(running: int, used: int, rate: float = 0.08, steps: int = 1) -> RequestStats:
    stats = RequestStats()
    stats.engine = EngineStats(num_running=running, used_blocks=used, preemption_rate=rate, num_steps=steps)
    return stats


@pytest.mark.parametrize(
    ("running", "used", "remedy"),
    [
        # 2,688 blocks. 48 sequences of 56 fit where 64 may run: a few less cost little.
        (48, 2688, "best lower --max-num-seqs from 64 to 43, or else raise --kv-cache-memory-bytes to 1.5 times"),
        # 8 of 64: with so few the machine would idle.
        (
            8,
            2688,
            "best raise --kv-cache-memory-bytes to 9.1 times what it is, or else lower --max-num-seqs",
        ),
        (1, 2688, "to 64.0 times what it is, or else lower --max-num-seqs from 64 to 1"),
        (0, 0, "raise --kv-cache-memory-bytes, or lower --max-num-seqs"),
        (2, 4, "room for 1,344 of them, so rows are what was short: raise --max-num-seqs from 64"),
    ],
)
def test_too_many_preemptions_name_the_better_remedy(running: int, used: int, remedy: str) -> None:
    warning = text_of(PreemptionAlarm().next(pressed(running, used), INFO, now=5.0))
    assert warning.startswith("8.0% of the sequences that finished in the last minute were preempted")
    assert remedy in warning


def test_the_alarm_is_given_once_a_minute_and_only_while_there_are_steps() -> None:
    alarm = PreemptionAlarm()
    heard = [
        now
        for now in range(0, 200, 5)
        if alarm.next(pressed(8, 2688, 0.05 if now < 20 else 0.06, steps=now + 1), INFO, now=float(now))
    ]
    assert heard == [20, 80, 140]
    still = pressed(8, 2688, steps=1000)
    assert alarm.next(still, INFO, now=1000.0) and alarm.next(still, INFO, now=2000.0) is None


def test_two_lines_at_the_same_time_divide_by_no_zero() -> None:
    stats = RequestStats()
    status = StatusLine(stats, 5.0)
    assert status.next(stats, num_waiting=1, now=5.0) is not None
