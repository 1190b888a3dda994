"""``return_timing``: the reply says where the time went, in both endpoints, streamed or not, and only where asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.turn_cache import ResumedTurn, TurnCache
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Charging(FakeEngine):
    """Its requests take as many seconds as their prompts have tokens, half of them to decode."""

    def _output(
        self, prompt: list[int], params: SamplingParams, answers: list[CompletionOutput], finished: bool
    ) -> RequestOutput:
        metrics = RequestMetrics(1.0, first_scheduled_time=1.0 + len(prompt) / 4)
        if finished:
            metrics.causes = {"decode": len(prompt) / 2, "waiting_slots": len(prompt) / 2}
            metrics.preempted_by = [f"of {len(prompt)}"]
            if len(prompt) == 4:
                metrics.resumed = ResumedTurn("before", ("search",), 1.5, TurnCache.EXPIRED)
        return dataclasses.replace(super()._output(prompt, params, answers, finished), metrics=metrics)


@pytest.fixture
def http() -> Iterator[TestClient]:
    app = make_app(make_state(Charging()))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def ask(http: TestClient, path: str, **fields: Any) -> Any:
    body = {"prompt": [[1, 2], [1, 2, 3]]} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    reply = http.post(path, json={**body, "max_tokens": 9, "seed": 1, **fields})
    assert reply.status_code == 200, reply.text
    return reply


def events(http: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = ask(http, path, stream=True, **fields).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def test_a_reply_says_what_a_turn_found_of_its_cache(http: TestClient) -> None:
    timing = ask(http, TEXT, prompt=[1, 2, 3, 4], return_timing=True).json()["timing"]
    assert (timing["turn_cache"], timing["pause_ms"]) == ("expired", 1500)


def test_a_reply_says_where_the_time_of_the_slowest_prompt_went(http: TestClient) -> None:
    timing = ask(http, TEXT, return_timing=True).json()["timing"]
    causes = {"decode": 1500, "waiting_slots": 1500}
    assert timing == {"queue_ms": 750, "causes_ms": causes, "preempted_by": ["of 3"]}
    reply = ask(http, CHAT, return_timing=True).json()
    spent = 1000 * reply["usage"]["prompt_tokens"]
    assert sum(reply["timing"]["causes_ms"].values()) == spent


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_last_chunk_of_each_prompt_in_a_stream_says_where_the_time_went(
    http: TestClient, path: str, n: int
) -> None:
    chunks = events(http, path, return_timing=True, n=n, stream_options={"include_usage": True})
    told = [chunk for chunk in chunks if "timing" in chunk]
    assert len(told) == (2 if path == TEXT else 1)
    for chunk in told:
        assert chunk["choices"][0]["finish_reason"] is not None
        prompt = chunk["choices"][0]["index"] // n
        following = chunks[chunks.index(chunk) + 1 :]
        assert not [c for after in following for c in after["choices"] if c["index"] // n == prompt]
    if path == TEXT:
        assert sorted(chunk["timing"]["preempted_by"] for chunk in told) == [["of 2"], ["of 3"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"return_timing": False}, {"return_timing": None}])
def test_replies_have_no_timing_unless_asked(http: TestClient, path: str, fields: dict[str, Any]) -> None:
    assert "timing" not in ask(http, path, **fields).json()
    assert not any("timing" in chunk for chunk in events(http, path, **fields))
