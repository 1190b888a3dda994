"""Classes of service, deadlines and tenants, from the request to the engine and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.base.outputs import FinishReason
from chairlift.base.service_class import parse_service_classes
from chairlift.core.request import Service
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = [(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}), (TEXT, {"prompt": "Hi"})]
CLASSES = parse_service_classes({"chat": {"priority": -5, "ttft_ms": 500}})


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.service_classes = CLASSES
    return engine


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def tiers(client: TestClient, path: str, body: dict[str, Any], **fields: Any) -> set[str]:
    """The reply, and each chunk of the same request as a stream."""
    body = {**body, "max_tokens": 5, **fields}
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n")[:-2]]
    return {whole.json()["service_tier"], *(chunk["service_tier"] for chunk in chunks)}


def refused(client: TestClient, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = client.post(path, json={**body, **fields})
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def service(engine: FakeEngine) -> Service:
    """Promises to the newest request."""
    return engine.services[-1]


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        *((None, "default"), ("auto", "default"), ("scale", "default")),
        *((name, name) for name in ("default", "flex", "priority", "chat")),
    ],
)
def test_replies_say_which_class_it_was(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any], asked: str | None, given: str
) -> None:
    assert tiers(client, path, body, service_tier=asked) == {given}
    assert service(engine).service_class == given
    assert engine.room_asked[0] == (1, given)


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_without_promises_a_tier_means_nothing_and_the_rest_is_refused(path: str, body: dict[str, Any]) -> None:
    with TestClient(make_app(make_state()), base_url="http://localhost") as client:
        for tier in ("auto", "default", "flex", "priority", "scale"):
            assert tiers(client, path, body, service_tier=tier, priority=0) == {"default"}
        for name, value in (("priority", 3), ("ttft_ms", 200), ("tpot_ms", 20.5), ("deadline_ms", 1e6)):
            error = refused(client, path, body, **{name: value})
            assert (error["param"], error["code"]) == (name, "invalid_value")
            assert "scheduling_policy='priority'" in error["message"]
        assert refused(client, path, body, service_tier="chat")["param"] == "service_tier"


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_an_unknown_tier_is_told_the_known_ones(client: TestClient, path: str, body: dict[str, Any]) -> None:
    error = refused(client, path, body, service_tier="gold")
    assert error["param"] == "service_tier"
    assert error["message"] == "service_tier must be one of auto, priority, default, flex, chat; got 'gold'"
    assert refused(client, path, body, service_tier=5)["param"] == "service_tier"


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_deadlines_come_from_the_body_the_header_and_the_class(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    def first_token_by(header: str | None, **fields: Any) -> float:
        headers = {} if header is None else {"x-slo-ttft-ms": header}
        assert client.post(path, json={**body, "max_tokens": 2, **fields}, headers=headers).status_code == 200
        return service(engine).first_token_by  # the fake engine's clock stands at 0

    assert first_token_by(None) == float("inf")
    assert first_token_by("250") == 0.25
    assert first_token_by("0.5") == 0.0005
    assert first_token_by("250.5", service_tier="chat") == 0.2505
    assert first_token_by(None, service_tier="chat") == 0.5
    assert first_token_by("250", ttft_ms=100) == 0.1
    assert first_token_by(None, tpot_ms=20, deadline_ms=3000) == float("inf")
    assert (service(engine).seconds_per_token, service(engine).finish_by) == (0.02, 3.0)


@pytest.mark.parametrize("given", [["0"], ["-5"], ["soon"], ["1e3"], ["nan"], [""], ["1", "2"], ["9" * 400]])
def test_a_header_that_is_no_number_is_refused(client: TestClient, given: list[str]) -> None:
    path, body = BOTH[0]
    reply = client.post(path, json=body, headers=[("x-slo-ttft-ms", value) for value in given])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "x-slo-ttft-ms"
    assert len(reply.text) < 500


def test_several_prompts_still_name_the_field(client: TestClient) -> None:
    with TestClient(make_app(make_state()), base_url="http://localhost") as plain:
        error = refused(plain, TEXT, {"prompt": ["a", "b"]}, ttft_ms=5)
    assert (error["param"], error["message"][:9]) == ("ttft_ms", "prompt 0:")


# --- who is charged ---------------------------------------------------------------------------------------------------


def test_without_keys_the_user_is_the_tenant(client: TestClient, engine: FakeEngine) -> None:
    for path, body in BOTH:
        reply = client.post(path, json={**body, "user": "alice", "safety_identifier": "x", "max_tokens": 2})
        assert service(engine).tenant == "alice"
        assert reply.headers["warning"] == '299 chairlift "ignored: safety_identifier"'
        client.post(path, json={**body, "max_tokens": 2})
        assert service(engine).tenant == ""
        assert refused(client, path, body, user="a\x07b")["param"] == "user"
        assert refused(client, path, body, user="a" * 257)["param"] == "user"


def test_with_keys_the_key_is_the_tenant_and_the_user_is_ignored(engine: FakeEngine, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("alice sk-1\nsk-2\n")
    state = make_state(engine, api_key_file=str(tmp_path / "keys"))
    with TestClient(make_app(state), base_url="http://localhost") as client:
        seen = []
        for key in ("sk-1", "sk-2"):
            headers = {"authorization": f"Bearer {key}"}
            reply = client.post(TEXT, json={"prompt": "Hi", "user": "bob", "max_tokens": 2}, headers=headers)
            assert reply.headers["warning"] == '299 chairlift "ignored: user"'
            seen.append(service(engine).tenant)
    assert seen == ["alice", state.api_keys["sk-2"]]
    assert "sk-2" not in seen[1]


# --- deadlines that cannot be kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_dropped_request_is_an_error_and_never_an_answer(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.failed_row = "the request could not be answered by its deadline"
    engine.failed_reason = FinishReason.DEADLINE
    body = {**body, "max_tokens": 40, "ignore_eos": True}
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert reply.json()["error"]["message"] == engine.failed_row
    assert reply.headers["retry-after"] == "3"
    streamed = client.post(path, json={**body, "stream": True}).text
    assert json.loads(streamed.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in streamed


def test_the_document_knows_the_fields_and_the_header(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for name in ("ChatRequest", "CompletionRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        assert {"service_tier", "priority", "ttft_ms", "tpot_ms", "deadline_ms", "user"} <= set(fields)
    for name in ("ChatCompletion", "TextCompletion"):
        assert "service_tier" in document["components"]["schemas"][name]["required"]
    for path in (CHAT, TEXT):
        (parameter,) = document["paths"][path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"]) == ("x-slo-ttft-ms", "header")


@pytest.mark.parametrize("stream", [False, True])
def test_time_counts_from_when_the_request_was_there(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    before = time.monotonic()
    client.post(TEXT, json={"prompt": "Hi", "max_tokens": 1, "stream": stream})
    (arrival,), (encoded,) = engine.arrivals, engine.prompts.encoded_at
    assert arrival is not None and before <= arrival <= encoded  # tokenizing is part of the wait
