"""An answer with tool calls tells the engine that its conversation pauses, in each API and once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import CALLS, says

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA if name == "look" else {"type": "object"}}}
    for name in ("look", "now")
]
FLAT = [{"type": "function", **each["function"]} for each in FUNCTIONS]  # type: ignore[dict-item]
CUSTOM = [{"name": each["name"], "input_schema": each["parameters"]} for each in FLAT]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "tools": FUNCTIONS, "max_tokens": 400},
    "/v1/messages": {"messages": ASK, "tools": CUSTOM, "max_tokens": 400},
    "/v1/responses": {"input": "Hi", "tools": FLAT, "max_output_tokens": 400},
    "/api/chat": {"messages": ASK, "tools": FUNCTIONS, "options": {"num_predict": 400}},
}


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, CALLS)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


def post(http: TestClient, path: str, **fields: Any) -> str:
    reply = http.post(path, json={"model": "fake", "stream": False, **BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    return reply.text


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_engine_learns_of_calls(http: TestClient, engine: FakeEngine, path: str, streams: bool) -> None:
    post(http, path, stream=streams)
    ((request_id, tools),) = engine.pauses
    assert request_id
    assert tools == ["look", "now"]


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_without_calls_begins_no_pause(http: TestClient, engine: FakeEngine, path: str) -> None:
    says(engine, "It rains.")
    assert "It rains." in json.dumps(post(http, path))
    assert engine.pauses == []


def test_a_call_that_was_cut_or_several_answers_begin_no_pause(http: TestClient, engine: FakeEngine) -> None:
    post(http, "/v1/chat/completions", max_tokens=70)
    post(http, "/v1/chat/completions", n=2)
    assert engine.pauses == []
