"""Figures of ``bench serve`` against arithmetic done another way."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_lab.bench.report import text
from chairlift_lab.bench.serve_client import EventReader
from chairlift_lab.bench.serve_report import compared_table, compared_words, run_blocks, serve_record
from chairlift_lab.bench.serve_result import (
    Stats,
    compare,
    figures_of,
    is_good,
    parse_goodput,
    peak_of,
    tokens_per_second,
)
from chairlift_lab.bench.serve_run import Load, LoadOutcome, ServeRun, Target, fit
from chairlift_lab.replay.traced_request import TracedRequest
from tests.lab.bench.scripted_server import event, usage


def outcome(times: list[float], counts: list[int], *, start: float = 0.0, wanted: int | None = None) -> LoadOutcome:
    return LoadOutcome(
        index=0,
        scheduled=start,
        start=start,
        headers=times[0],
        end=times[-1],
        times=times,
        counts=counts,
        completion_tokens=sum(counts),
        prompt_tokens=7,
        wanted_tokens=sum(counts) if wanted is None else wanted,
        status="completed",
    )


def failed(kind: str, message: str = "", *, start: float = 1.0) -> LoadOutcome:
    found = LoadOutcome(index=0, scheduled=start, start=start, end=start + 50, wanted_tokens=9, prompt_tokens=9)
    found.fail(kind, message)
    return found


def run_of(*outcomes: LoadOutcome, seconds: float = 10.0, cpu: float = 0.1, most: int | None = None) -> ServeRun:
    server = Target(url="http://127.0.0.1:1", model="m")
    requests = [TracedRequest(arrival=each.start, prompt_tokens=7, output_tokens=9) for each in outcomes]
    return ServeRun(
        server=server,
        load=Load(requests=requests, max_concurrency=most),
        outcomes=outcomes,
        date=datetime.datetime(2026, 1, 2, 3, 4, 5),
        begin=0.0,
        seconds=seconds,
        cpu_share=cpu,
        interrupted=False,
    )


# --- one answer ------------------------------------------------------------------------------------------------------


def read(*pieces: tuple[float, bytes]) -> LoadOutcome:
    found = LoadOutcome(index=0, scheduled=0.0, wanted_tokens=8, prompt_tokens=5)
    reader = EventReader(found)
    for now, data in pieces:
        reader.feed(data, now)
    reader.close()
    return found


def chunk(text: str = "x", *, tokens: int | None = None, finish: str | None = None) -> bytes:
    told: dict[str, object] = {"choices": [{"text": text, "finish_reason": finish}]}
    return event(told | ({} if tokens is None else {"usage": usage(6, tokens)}))


DONE = event(b"[DONE]")


def test_tokens_of_a_chunk_are_counted_as_the_server_counts_them() -> None:
    found = read(
        (1.0, chunk(tokens=1)),
        (2.0, chunk("several", tokens=4)),
        (2.5, chunk("", tokens=5, finish="stop")),
        (3.0, DONE),
    )
    assert (found.status, found.times, found.counts) == ("completed", [1.0, 2.0, 2.5], [1, 3, 1])
    assert not found.counted, "an event has three tokens"
    assert found.itls == [1.0, 0.5]  # one gap for each event, as vLLM's benchmark has it: no median of 0
    run = run_of(found)
    lines = list(text(*run_blocks(run, figures_of(run, {}), {})))
    assert any(line.startswith("between events (ITL, as vLLM's)") for line in lines)
    assert (found.ttft, found.e2el, found.tpot) == (1.0, 2.5, 1.5 / 4)
    assert (found.prompt_tokens, found.output_tokens, found.finish_reason) == (6, 5, "stop")


def test_two_events_in_one_read_came_together() -> None:
    found = read((1.0, chunk(tokens=1) + chunk(tokens=2)), (1.5, chunk(tokens=3, finish="length") + DONE))
    assert (found.times, found.itls) == ([1.0, 1.0, 1.5], [0.0, 0.5])


def test_an_event_may_come_in_pieces() -> None:
    data = chunk(tokens=1) + chunk(tokens=2, finish="length").replace(b"\n", b"\r\n") + b": a comment\n\n" + DONE
    whole = read((2.0, data))
    split = read(*[(2.0 if place >= 0 else 0.0, data[place : place + 1]) for place in range(len(data))])
    assert split == whole
    assert split.counts == [1, 1]


def test_without_counts_gaps_are_of_chunks_and_said_to_be() -> None:
    last = event({"choices": [], "usage": usage(6, 9)})
    found = read((1.0, chunk()), (2.0, chunk("a b c")), (2.5, chunk("", finish="stop")), (2.5, last + DONE))
    assert not found.counted
    assert (found.output_tokens, found.itls) == (9, [1.0])
    assert found.tpot == pytest.approx(1.5 / 8)
    lines = list(text(*run_blocks(run_of(found), figures_of(run_of(found), {}), {})))
    assert any(line.startswith("between events (ITL, as vLLM's)") for line in lines)
    assert any("an event may have several tokens: ITL is the time between events" in line for line in lines)


def test_usage_in_the_last_chunk_alone_says_nothing_of_those_before() -> None:
    role = event({"choices": [{"delta": {"role": "assistant"}}], "usage": usage(6, 0)})
    found = read((0.5, role), (1.0, chunk("abcd")), (2.0, chunk("abcd")), (3.0, chunk("", tokens=8, finish="stop")))
    assert (found.counts, found.itls, found.counted, found.output_tokens) == ([1, 1], [1.0], False, 8)
    whole = read((1.0, chunk("all of it", tokens=8, finish="stop") + DONE))
    assert (whole.counts, whole.counted) == ([8], True)


def test_one_chunk_per_token_needs_no_counts() -> None:
    last = event({"choices": [], "usage": usage(6, 3)})  # an end-of-sequence token has no text
    found = read((1.0, chunk()), (2.0, chunk()), (2.0, chunk("", finish="stop")), (2.0, last + DONE))
    assert found.counted
    assert (found.itls, found.output_tokens) == ([1.0], 3)


def test_the_role_is_no_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    found = read((1.0, role), (3.0, thought), (4.0, event({"choices": [{"delta": {}, "finish_reason": "stop"}]})))
    assert (found.ttft, found.e2el, found.counts, found.status) == (3.0, 4.0, [1], "completed")


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([chunk(tokens=1)], "cut stream", "after 1 tokens"),
        ([], "cut stream", "without a token"),
        ([DONE], "no answer", "without a token"),
        ([chunk("", tokens=0, finish="stop") + DONE], "no answer", "no token"),
        ([b"data: {oops\n"], "not OpenAI's format", "{oops"),
        ([b'data: {"choices": 3}\n'], "not OpenAI's format", "choices"),
        ([b"data: [1]\n\xff"], "not OpenAI's format", "[1]"),
        ([chunk(tokens=10**15)], "not OpenAI's format", "choices"),
        ([chunk(tokens=1), event({"usage": usage(-6, 1)})], "not OpenAI's format", "-6"),
        ([b"x" * (1 << 21)], "not OpenAI's format", "without an end"),
        ([chunk(tokens=1), event({"error": {"message": "out of\nmemory"}})], "error in the stream", "out of memory"),
        ([event({"error": "plain"})], "error in the stream", "plain"),
    ],
)
def test_a_failed_stream_has_the_kind_of_its_failure(pieces: list[bytes], kind: str, message: str) -> None:
    found = read(*[(1.0, piece) for piece in pieces])
    assert (found.status, found.kind) == ("failed", kind)
    assert message in found.message


def test_the_servers_queue_time_is_read_from_its_answer() -> None:
    told = {"choices": [{"text": "x", "finish_reason": "length"}], "timing": {"causes_ms": QUEUE, "preempted_by": []}}
    assert read((1.0, event(told) + DONE)).server_queue_ms == 11.5, "of an older server"
    assert read((0.01, event(told) + DONE)).server_queue_ms == 10.0, "no more than until the first token"
    timing = {"causes_ms": QUEUE, "queue_ms": 3.5}
    assert read((1.0, event(told | {"timing": timing}) + DONE)).server_queue_ms == 3.5, "the rest was waited for later"


QUEUE = {"front_door": 1.0, "waiting_slots": 10.0, "waiting_step": 0.5, "prefill": 7.0, "decode": 90.0}


# --- many ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50))
def test_stats_are_numpys(values: list[float]) -> None:
    stats = Stats.of(values)
    assert stats is not None
    ms = np.array(values) * 1000
    assert stats.mean == pytest.approx(np.mean(ms))
    assert stats.std == pytest.approx(np.std(ms), abs=1e-6)
    assert stats.median == stats.p50 == pytest.approx(np.median(ms))
    assert (stats.p90, stats.p99) == pytest.approx((np.percentile(ms, 90), np.percentile(ms, 99)))


def test_rates_and_goodput_follow_from_the_outcomes() -> None:
    quick, slow = outcome([0.2, 0.3, 0.4], [1, 1, 1]), outcome([2.0, 2.5], [1, 1], start=1.0)
    single = outcome([1.1], [1], start=1.0)
    run = run_of(quick, slow, single, failed("HTTP 429", "later"), failed("HTTP 429"), failed("timeout", "gone"))
    figures = figures_of(run, {"ttft": 500.0, "tpot": 100.0})
    assert (figures.completed, figures.failed, figures.output_tokens, figures.input_tokens) == (3, 3, 6, 21)
    assert (figures.request_throughput, figures.output_throughput, figures.total_token_throughput) == (0.3, 0.6, 2.7)
    assert (figures.good, figures.goodput) == (2, 0.2)  # an answer of one token has no TPOT to miss
    assert figures.errors == [("HTTP 429", 2, "later"), ("timeout", 1, "gone")]
    ttft = figures.times["ttft"]
    assert ttft is not None
    assert ttft.mean == pytest.approx(1000 * (0.2 + 1.0 + 0.1) / 3)  # nothing of those that failed
    assert figures.times["queueing"] == ttft, "headers come with the first token here"
    assert figures.times["server_queue"] is None
    assert figures_of(run, {}).goodput is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        *(({"ttft": 1000.0}, True), ({"ttft": 999.0}, False), ({"tpot": 250.0}, True), ({"tpot": 249.0}, False)),
        *(({"e2el": 1500.0}, True), ({"e2el": 1500.0, "ttft": 900.0}, False), ({}, True)),
    ],
)
def test_a_limit_is_kept_when_it_is_met_exactly(slo: dict[str, float], good: bool) -> None:
    assert is_good(outcome([2.0, 2.25, 2.5], [1, 1, 1], start=1.0), slo) is good


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=12))
def test_peak_concurrency_is_the_most_requests_at_one_moment(spans: list[tuple[int, int]]) -> None:
    ends = [(float(start), float(start + length)) for start, length in spans]
    moments = [sum(start <= moment + 0.5 < end for start, end in ends) for moment in range(32)]
    assert peak_of(ends) == max(moments)


def test_tokens_are_counted_by_second() -> None:
    run = run_of(outcome([0.1, 0.9, 1.0], [1, 2, 3]), outcome([3.5], [4]), failed("timeout"), seconds=3.6)
    assert tokens_per_second(run) == [3, 3, 0, 4, 0]
    assert figures_of(run, {}).max_output_tokens_per_s == 4


def test_the_record_has_vllms_keys_and_is_plain_json() -> None:
    run = run_of(outcome([1.0, 2.0], [1, 1]), failed("HTTP 500", "oh"))
    figures = figures_of(run, {"ttft": 5.0})
    record = json.loads(
        json.dumps(serve_record(run, figures, {"request_rate": "inf", "burstiness": 1.0}), allow_nan=False)
    )
    names = {
        f"{stat}_{time}_ms" for stat in ("mean", "median", "std", "p99") for time in ("ttft", "tpot", "itl", "e2el")
    }
    assert set(record) >= names | {
        *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
        *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
        *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens"),
        *(
            "output_lens",
            "ttfts",
            "itls",
            "errors",
            "start_times",
            "max_concurrent_requests",
            "max_output_tokens_per_s",
        ),
    }
    assert (record["date"], record["num_prompts"], record["request_rate"]) == ("20260102-030405", 2, "inf")
    assert (record["ttfts"], record["itls"], record["output_lens"]) == ([1.0, 0.0], [[1.0], []], [2, 0])
    assert record["errors"] == ["", "HTTP 500: oh"]
    assert record["chairlift"]["errors_by_kind"] == [{"kind": "HTTP 500", "count": 1, "example": "oh"}]


def test_an_unsent_request_has_no_time_of_sending() -> None:
    """Ctrl-C came while it waited for its place in a closed loop."""
    waiting = LoadOutcome(index=1, scheduled=101.0, held=True, wanted_tokens=9, prompt_tokens=9)
    run = dataclasses.replace(run_of(outcome([102.0], [1], start=101.0), waiting, most=1), begin=100.0)
    record = serve_record(run, figures_of(run, {}), {"request_rate": "inf", "burstiness": 1.0})
    assert record["start_times"] == [1.0, 0.0]


def test_a_run_without_an_answer_has_no_averages() -> None:
    run = run_of(failed("connection refused"))
    figures = figures_of(run, {"ttft": 5.0})
    record = serve_record(run, figures, {"request_rate": 1.0, "burstiness": 1.0})
    assert (record["completed"], record["mean_ttft_ms"], record["request_goodput"]) == (0, None, 0.0)
    lines = list(text(*run_blocks(run, figures, {"ttft": 5.0})))
    assert "failed         1 x connection refused: " in lines
    assert not [line for line in lines if line.startswith("time to first")]


@pytest.mark.parametrize(
    ("late", "cpu", "held", "said"),
    [
        (0.5, 0.1, False, "was late"),
        (0.0, 0.9, False, "90% of a processor"),
        (0.5, 0.1, True, ""),
        (0.005, 0.1, False, ""),
    ],
)
def test_a_client_that_is_the_bottleneck_says_so(late: float, cpu: float, held: bool, said: str) -> None:
    found = [outcome([start + 1.0], [1], start=start) for start in (0.1, 0.5, 0.9)]
    found[1].scheduled -= late
    found[1].held = held
    doubts = list(figures_of(run_of(*found, cpu=cpu), {}).doubts(run_of(*found, cpu=cpu)))
    assert (said in doubts[0]) if said else not doubts


def test_a_client_is_not_late_where_all_are_due_at_once() -> None:
    run = run_of(*[outcome([2.0], [1], start=start) for start in (0.1, 0.5, 0.9)])
    for each in run.outcomes:
        each.scheduled = 0.0
    at_once = [dataclasses.replace(request, arrival=0.0) for request in run.load.requests]
    run = dataclasses.replace(run, load=dataclasses.replace(run.load, requests=at_once))
    assert not list(figures_of(run, {}).doubts(run))


@pytest.mark.parametrize(("times", "counts", "whole"), [([1.0], [5], True), ([1.0, 1.5], [4, 1], False)])
def test_answers_that_came_whole_say_nothing_of_tokens(times: list[float], counts: list[int], whole: bool) -> None:
    found = outcome(times, counts)
    found.end += 0.001  # what ends a stream comes after its last token
    run = run_of(found)
    said = [doubt for doubt in figures_of(run, {}).doubts(run) if "answers came whole" in doubt]
    assert bool(said) == whole
    lines = list(text(*run_blocks(run, figures_of(run, {}), {})))
    (line,) = [line for line in lines if line.startswith("time per output token")]
    assert (line.split()[-5:] == ["-"] * 5) == whole, "a dash, not 0"


def test_an_answer_of_one_chunk_that_nobody_counts_came_whole() -> None:
    run = run_of(read((1.0, chunk("all of it")), (1.5, event({"choices": [], "usage": usage(6, 9)}) + DONE)))
    assert any("answers came whole" in doubt for doubt in figures_of(run, {}).doubts(run))


def test_a_closed_loop_is_named() -> None:
    run = run_of(outcome([1.0], [1]), most=3)
    assert any(doubt.startswith("closed loop: at most 3") for doubt in figures_of(run, {}).doubts(run))


def records(throughputs: list[float], **more: float) -> list[dict[str, Any]]:
    common = {"duration": 3.0, "chairlift": {"busy": 0.0}, **more}
    return [{"output_throughput": value, **common} for value in throughputs]


def test_ratios_compare_each_figure_of_two_servers() -> None:
    first = records([100.0, 50.0, 80.0] * 2, p50_ttft_ms=10.0, mean_itl_ms=0.0)
    second = records([200.0, 100.0, 80.0] * 2, p50_ttft_ms=5.0, mean_itl_ms=1.0)
    ratios = compare(first, second)
    assert set(ratios) == {"output_throughput", "p50_ttft_ms"}  # nothing over zero, nothing that is not there
    ratio = ratios["output_throughput"]
    assert ratio.per_round == pytest.approx((2.0, 2.0, 1.0) * 2)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2.0, 1.0, 2.0))
    same = ratios["p50_ttft_ms"]
    assert (same.ratio, same.low, same.high) == pytest.approx((0.5, 0.5, 0.5))
    assert not compare([], [])
    table = list(text(compared_table(ratios, first, second)))
    row = ["output", "tokens/s", "80.00", "100.00", "2.000", "1.000", "to", "2.000", "1.000", "2.000"]
    assert table[2].split() == row
    assert compared_words(ratios, [0.0, 0.25]) == (
        "B and A have the same throughput within the noise: 2.0 times (1.00 to 2.00 in 6 rounds). B has a lower median"
        " TTFT than A: 0.50 times (0.50 to 0.50 in 6 rounds). Other programs used 12% of this machine during the runs,"
        " at most 25%."
    )


def test_one_round_claims_nothing() -> None:
    first, second = records([100.0]), records([200.0])
    ratios = compare(first, second)
    assert ratios["output_throughput"].doubt
    assert "which is no claim: 6 rounds are needed, and there was 1" in compared_words(ratios, [0.0])
    assert list(text(compared_table(ratios, first, second)))[2].split()[5] == "-"


@pytest.mark.parametrize("items", [["ttft"], ["ttft:"], ["itl:5"], ["ttft:-1"], ["ttft:nan"], ["ttft:5", "x:1"], [""]])
def test_wrong_limits_are_named(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="goodput wants limits in ms"):
        parse_goodput(items)


def test_limits_may_be_spelled_as_vllm_does() -> None:
    assert parse_goodput(["ttft:500", "e2el:9e3"]) == parse_goodput(["ttft:500, e2el:9000"])


def test_requests_are_cut_to_the_room() -> None:
    small = TracedRequest(arrival=0.0, prompt_tokens=50, output_tokens=50)
    long = TracedRequest(arrival=1.0, prompt_tokens=400, output_tokens=90, prefix_ids=(1, 2, 3, 4), prefix_block=100)
    fitted, shortened = fit([small, long], 100)
    assert (fitted[0], shortened) == (small, 1)
    assert (fitted[1].prompt_tokens, fitted[1].output_tokens, fitted[1].prefix_ids) == (50, 50, (1,))
    assert fit([small, long], None) == ([small, long], 0)
