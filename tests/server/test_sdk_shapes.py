"""Replies, whole and streamed, are what the clients' own types allow: strictly, and without unknown fields but ours."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import CALLS, says

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTIONS = [{"name": name, "description": "d", "parameters": PARAMETERS} for name in ("look", "now")]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
MESSAGE_TOOLS = [{"name": function["name"], "input_schema": PARAMETERS} for function in FUNCTIONS]
OURS = frozenset(("reasoning", "reasoning_content", "stop_reason", "tool_call_errors", "cache_write_tokens", "store"))
"""Fields that the clients' types do not have: vLLM's, ours, and two that OpenAI's API has all the same."""


@pytest.fixture
def http() -> Iterator[TestClient]:
    engine = FakeEngine()
    says(engine, CALLS)
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


def checked(place: str, text: str | bytes) -> None:
    """Raise an error unless ``text`` is a value of the client's type ``module:Name``, without unknown fields."""
    module, _, name = place.partition(":")
    adapter: Any = pydantic.TypeAdapter(getattr(importlib.import_module(module), name))
    found = list(unknown(adapter.validate_json(text, strict=True)))
    assert not found, text


def unknown(value: Any) -> Iterator[str]:
    """Names of the fields in ``value`` that its type, or the type of a value inside, does not have."""
    if isinstance(value, pydantic.BaseModel):
        yield from (name for name in value.model_extra or {} if name not in OURS)
        for each in value.__dict__.values():
            yield from unknown(each)
    elif isinstance(value, list):
        for each in value:
            yield from unknown(each)


def data_of(text: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("tools", [None, CHAT_TOOLS])
def test_chats_are_what_openais_types_allow(http: TestClient, tools: Any) -> None:
    body = {"messages": ASK, "tools": tools, "stream_options": {"include_usage": True}}
    checked("openai.types.chat:ChatCompletion", http.post("/v1/chat/completions", json=body).content)
    stream = data_of(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert len(stream) > 3
    for chunk in stream:
        checked("openai.types.chat:ChatCompletionChunk", chunk)


@pytest.mark.parametrize("tools", [None, RESPONSE_TOOLS])
def test_responses_are_what_openais_types_allow(http: TestClient, tools: Any) -> None:
    body = {"input": "Hi", "tools": tools, "service_tier": "auto"}
    checked("openai.types.responses:Response", http.post("/v1/responses", json=body).content)
    stream = data_of(http.post("/v1/responses", json={**body, "stream": True}).text)
    assert len(stream) > 5
    for event in stream:
        checked("openai.types.responses:ResponseStreamEvent", event)


@pytest.mark.parametrize("tools", [None, MESSAGE_TOOLS])
def test_messages_are_what_anthropics_types_allow(http: TestClient, tools: Any) -> None:
    body = {"messages": ASK, "max_tokens": 400, "tools": tools}
    checked("anthropic.types:Message", http.post("/v1/messages", json=body).content)
    for event in data_of(http.post("/v1/messages", json={**body, "stream": True}).text):
        if json.loads(event)["type"] != "ping":
            checked("anthropic.types:RawMessageStreamEvent", event)
    version = {"anthropic-version": "2023-06-01"}
    checked("anthropic.types:ModelInfo", http.get("/v1/models/fake", headers=version).content)


def test_fields_are_there_or_not_as_the_node_types_want_it(http: TestClient) -> None:
    """OpenAI's Node types have no null for ``user`` and ``usage``, and Anthropic's want the caller of a tool."""
    body = {"input": "Hi", "stream": True}
    events = [json.loads(event) for event in data_of(http.post("/v1/responses", json=body).text)]
    created, *_, completed = (event["response"] for event in events if "response" in event)
    assert not {"usage", "user"} & created.keys() and completed["usage"]["output_tokens"] > 0
    named = http.post("/v1/responses", json={"input": "Hi", "user": "u"}).json()
    assert named["user"] == "u"
    asked = {"messages": ASK, "max_tokens": 400, "tools": MESSAGE_TOOLS}
    calls = [block for block in http.post("/v1/messages", json=asked).json()["content"] if block["type"] == "tool_use"]
    assert [call["caller"] for call in calls] == [{"type": "direct"}] * 2
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Rain."} for call in calls]
    history = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    again = http.post("/v1/messages", json={**asked, "messages": history})
    assert again.status_code == 200 and "warning" not in again.headers


def test_an_unknown_field_is_noticed() -> None:
    with pytest.raises(AssertionError):
        checked("openai.types:Model", '{"id": "a", "created": 1, "object": "model", "owned_by": "b", "colour": "red"}')
    with pytest.raises(pydantic.ValidationError):
        checked("openai.types:Model", '{"id": "a", "created": "1", "object": "model", "owned_by": "b"}')
