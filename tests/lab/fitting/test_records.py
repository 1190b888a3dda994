"""Benchmark records are read, or refused with what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.fitting.read import read_runs
from chairlift_lab.fitting.records import read_record

SMALL: dict[str, Any] = {
    "backend": "vllm",
    "request_rate": 2.0,
    "max_concurrency": None,
    "input_lens": [100, 200, 50],
    "output_lens": [3, 2, 2],
    "ttfts": [0.1, 0.2, 0.15],
    "itls": [[0.05, 0.07], [0.1], [0.1]],
    "start_times": [11.5, 10.0, 12.0],
    "errors": ["", "", ""],
}


def read(**changes: Any) -> Any:
    return read_record("r.json", SMALL | changes, cache_is_off=True)


def test_requests_are_in_order_from_zero() -> None:
    run = read()
    assert [request.start for request in run.requests] == [0.0, 1.5, 2.0]
    first, second, _ = run.requests
    assert (first.prompt_tokens, first.output_tokens, second.prompt_tokens) == (200, 2, 100)
    assert second.times == pytest.approx((1.6, 1.65, 1.72))
    assert (second.ttft, second.tpot, second.e2e) == pytest.approx((0.1, 0.06, 0.22))
    assert not run.all_at_once and run.max_concurrency is None


def test_a_closed_loop_is_served_as_one() -> None:
    run = read(max_concurrency=2, request_rate="inf")
    assert run.all_at_once and [each.arrival for each in run.trace()] == [0.0, 0.0, 0.0]
    assert not read(max_concurrency=2, request_rate=5.0).all_at_once


@pytest.mark.parametrize("key", ["itls", "ttfts", "start_times", "input_lens"])
def test_missing_times_are_named(key: str) -> None:
    fields = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ConfigError, match=rf"r\.json lacks {key}; vllm bench serve writes them with"):
        read_record("r.json", fields, cache_is_off=True)


def test_several_tokens_per_event_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 of 25 tokens have no event of their own"):
        read(output_lens=[15, 8, 2], itls=[[0.05] * 5, [0.1] * 2, [0.1]])
    run = read(output_lens=[4, 3, 3])  # the last token of each answer is an end without an event
    assert len(run.requests) == 3 and not run.notes


def test_an_unknown_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="say so with --no-enable-prefix-caching"):
        read_record("r.json", SMALL, cache_is_off=False)
    with pytest.raises(ConfigError, match="77 prompt tokens came from the prefix cache"):
        read(chairlift={"cached_tokens": 77})
    assert read_record("r.json", SMALL | {"chairlift": {"cached_tokens": 0}}, cache_is_off=False).requests


def test_failed_requests_are_counted() -> None:
    with pytest.raises(ConfigError, match="1 of 3 requests have no answer"):
        read(ttfts=[0.1, 0.0, 0.15], output_lens=[3, 0, 2], itls=[[0.05, 0.07], [], [0.1]])


def test_bad_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"request 2: ttft must be a number from 0"):
        read(ttfts=[0.1, -1, 0.15])
    with pytest.raises(ConfigError, match=r"request 1: itls must be a list"):
        read(itls=[3, [0.1], [0.1]])
    with pytest.raises(ConfigError, match="lists of different lengths: input_lens 3, output_lens 2"):
        read(output_lens=[3, 2])


def test_files_are_told_apart_by_their_contents(tmp_path: Path) -> None:
    def runs(text: str) -> list[Any]:
        path = tmp_path / "file"
        path.write_text(text)
        return read_runs(path, settings={"max_num_seqs": 8}, cache_is_off=True)

    assert runs(json.dumps(SMALL))[0].settings == {"max_num_seqs": 8}
    # SGLang's benchmark appends a line for each run to its file.
    assert len(runs(json.dumps(SMALL | {"ttfts": []}) + "\n" + json.dumps(SMALL) + "\n")[0].requests) == 3
    assert [run.name for run in runs(json.dumps({"benchmark": "serve", "runs": [SMALL, SMALL]}))] == [
        "file 1",
        "file 2",
    ]
    step = '{"start": 0, "end": 0.5, "num_decodes": 1, "context_tokens": 9, "prefill_tokens": 0, "prefill_context": 0}'
    assert runs(step)[0].source == "step log"
    with pytest.raises(ConfigError, match="none of these: a benchmark's record"):
        runs("hello")
    with pytest.raises(ConfigError, match="has no runs of one server"):
        runs(json.dumps({"runs": {"A": [SMALL], "B": [SMALL]}}))
    with pytest.raises(ConfigError, match="cannot read"):
        read_runs(tmp_path / "none", settings={}, cache_is_off=True)
