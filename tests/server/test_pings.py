"""A stream that holds a growing call back is not silent: a ping comes within 5 s, and changes nothing of the answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import says

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"content": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "write", "arguments": {"content": "' + "many words " * 30 + '"}}\n</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": ASK,
        "max_tokens": 500,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": "Hi",
        "max_output_tokens": 500,
        "tools": [{"type": "function", "name": "write", "parameters": SCHEMA}],
    },
    "/v1/messages": {"messages": ASK, "max_tokens": 500, "tools": [{"name": "write", "input_schema": SCHEMA}]},
}


class Clock:
    """A clock that goes on by ``step`` seconds each time it is read: once before the first output, and once for each
    output."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.num_reads * self.step


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, CALL)
    return made


def client_of(engine: FakeEngine, clock: Clock) -> TestClient:
    state = make_state(engine)
    state.clock = clock
    return TestClient(make_app(state), base_url="http://localhost")


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def is_ping(path: str, event: dict[str, Any]) -> bool:
    if path == "/v1/chat/completions":
        return [choice["delta"] for choice in event["choices"]] == [{}] and not event["choices"][0]["finish_reason"]
    return bool(event["type"] == ("ping" if path == "/v1/messages" else "response.in_progress"))


@pytest.mark.parametrize("path", BODIES)
def test_a_growing_call_sends_pings_within_5_seconds(engine: FakeEngine, path: str) -> None:
    clock = Clock(1.0)
    with client_of(engine, clock) as http:
        events = events_of(http.post(path, json={**BODIES[path], "stream": True}).text)
    pings = [is_ping(path, event) for event in events]
    seconds = clock.num_reads - 1
    assert seconds > 20, "the engine's outputs are the seconds of this test"
    assert seconds // 5 <= sum(pings) <= seconds // 4 + 2
    kinds = [event.get("type", "chunk") for event in events]
    assert kinds[-1] in ("chunk", "response.completed", "message_stop")


@pytest.mark.parametrize("path", BODIES)
def test_pings_change_nothing_of_the_answer(engine: FakeEngine, path: str) -> None:
    texts = []
    for step in (0.0, 1.0):
        with client_of(engine, Clock(step)) as http:
            events = events_of(http.post(path, json={**BODIES[path], "stream": True}).text)
            texts.append("".join(_arguments(path, events)))
            whole = http.post(path, json=BODIES[path]).json()
    assert texts[0] == texts[1] and json.loads(texts[0]) == {"content": "many words " * 30}
    assert "many words" in json.dumps(whole)


def _arguments(path: str, events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if path == "/v1/chat/completions":
            for call in itertools.chain(*(choice["delta"].get("tool_calls", ()) for choice in event["choices"])):
                yield call["function"].get("arguments", "")
        elif path == "/v1/responses" and event["type"] == "response.function_call_arguments.delta":
            yield event["delta"]
        elif path == "/v1/messages" and event["type"] == "content_block_delta":
            yield event["delta"].get("partial_json", "")


def test_a_stream_without_tools_never_asks_for_the_time(engine: FakeEngine) -> None:
    clock = Clock(100.0)
    says(engine, "Plain words. " * 20)
    with client_of(engine, clock) as http:
        body = {"messages": ASK, "max_tokens": 300, "stream": True, "separate_reasoning": False}
        events = events_of(http.post("/v1/chat/completions", json=body).text)
    assert len(events) > 5 and clock.num_reads == 0
    assert not any(is_ping("/v1/chat/completions", event) for event in events)


def test_text_that_is_sent_needs_no_ping(engine: FakeEngine) -> None:
    says(engine, "Plain words. " * 20)
    with client_of(engine, Clock(3.0)) as http:
        body = {**BODIES["/v1/chat/completions"], "stream": True}
        events = events_of(http.post("/v1/chat/completions", json=body).text)
    assert len(events) > 20 and sum(is_ping("/v1/chat/completions", event) for event in events) <= 2


def test_openais_client_puts_a_stream_with_pings_together(engine: FakeEngine) -> None:
    with client_of(engine, Clock(5.0)) as http:
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)  # type: ignore[arg-type]
        with client.responses.stream(model="fake", **BODIES["/v1/responses"]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert kinds.count("response.in_progress") > 5
    assert [item.type for item in final.output] == ["function_call"]
