"""Log-probabilities are counted before they are computed, for one request and for all in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from chairlift.server.http.state import ServerState
from tests.server.fake_engine import INFO, FakeEngine, make_state

MOST = 1 << 20
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def state() -> ServerState:
    return make_state(FakeEngine())


@pytest.fixture
def http(state: ServerState) -> Iterator[TestClient]:
    with TestClient(make_app(state), base_url="http://localhost") as client:
        yield client
    assert state.num_logprobs == 0


def test_too_many_log_probabilities_are_refused_with_the_numbers(http: TestClient, state: ServerState) -> None:
    assert state.engine.info is not None
    state.engine.info = dataclasses.replace(state.engine.info, max_model_len=16_000)
    lists = [[1] * 1001] * 64
    cases: list[tuple[str, dict[str, Any], int, int, str]] = [
        ("completions", {"prompt": lists, "prompt_logprobs": 20}, 64_064 * 21, 0, "prompt_logprobs"),
        ("completions", {"prompt": lists[:32], "echo": True, "logprobs": 5, "n": 2, "prompt_logprobs": 20}, 0, 0, ""),
        ("chat/completions", {**CHAT, "n": 16, "logprobs": True, "top_logprobs": 20}, 0, 0, "logprobs"),
        ("completions", {"prompt": lists, "logprobs": 5, "max_tokens": 14_000}, 0, 64 * 14_000 * 6, "logprobs"),
        ("completions", {"prompt": lists[:4], "best_of": 16, "logprobs": 5, "max_tokens": 14_000}, 0, 5_376_000, ""),
    ]
    for path, body, of_prompts, of_answers, param in cases:
        error = http.post(f"/v1/{path}", json=body).json()["error"]
        assert "but 1,344,000 are allowed" in error["message"], error
        assert not of_prompts or f"{of_prompts:,} of its prompts" in error["message"]
        assert not of_answers or f"{of_answers:,} of its answers" in error["message"]
        assert not param or error["param"] == param
    assert not state.engine.streams  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_beyond_the_room_are_refused_until_others_end(stream: bool) -> None:
    async def main() -> None:
        engine = FakeEngine()
        state = make_state(engine)
        app = make_app(state)
        engine.gate = asyncio.Event()
        asked = {"prompt": "Up", "logprobs": 5, "max_tokens": 1000, "stream": stream}
        state.num_logprobs = 16 * MOST - 6000
        first = asyncio.create_task(post(app, asked))
        await engine.waiting.wait()
        assert state.num_logprobs == 16 * MOST
        status, headers, body = await post(app, asked)
        assert (status, headers[b"retry-after"], json.loads(body)["error"]["code"]) == (
            429,
            b"3",
            "rate_limit_exceeded",
        )
        assert "this one 6,000, but 16,777,216 are allowed together" in json.loads(body)["error"]["message"]
        assert engine.stats.rejected["logprobs"] == 1
        assert (await post(app, {"prompt": "Up", "max_tokens": 0}))[0] == 400  # others are not touched
        engine.gate.set()
        assert (await first)[0] == 200
        assert state.num_logprobs == 16 * MOST - 6000
        engine.gate = None
        for failed in ({"prompt": [[1], [999]], "logprobs": 1}, {"prompt": "x" * 3000, "logprobs": 1}):
            assert (await post(app, failed))[0] == 400
            assert state.num_logprobs == 16 * MOST - 6000

    asyncio.run(main())


async def post(app: Any, content: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    body, status, headers = b"", 0, dict[bytes, bytes]()
    sent = json.dumps(content).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal body, status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        body += message.get("body", b"")

    given = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": given, "query_string": b""}
    await app(scope, receive, send)
    return status, headers, body


def test_a_long_stream_is_cut_into_events_and_says_the_same(http: TestClient) -> None:
    asked = {"prompt": "Dé! " * 50, "echo": True, "logprobs": 5, "max_tokens": 20, "ignore_eos": True, "seed": 3}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    events = http.post("/v1/completions", json={**asked, "stream": True}).text.split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
    scored = [choice for choice in choices if choice["logprobs"]]
    assert max(len(choice["logprobs"]["tokens"]) for choice in scored) <= 1024 // 6
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, wanted in whole["logprobs"].items():
        assert [each for choice in scored for each in choice["logprobs"][name]] == wanted


def test_a_long_reply_says_what_a_short_one_says(http: TestClient) -> None:
    length = INFO.max_model_len - 1
    asked = {"prompt": [i % 250 for i in range(length)], "prompt_logprobs": 3, "logprobs": 2, "max_tokens": 1}
    reply = http.post("/v1/completions", json={**asked, "echo": True})
    (choice,) = reply.json()["choices"]
    assert "content-length" not in reply.headers
    assert len(choice["prompt_logprobs"]) == length and choice["prompt_logprobs"][0] is None
    assert [next(iter(entry)) for entry in choice["prompt_logprobs"][1:]] == [str(i) for i in asked["prompt"][1:]]  # type: ignore[index]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == length + 1
    assert choice["logprobs"]["top_logprobs"][0] is None and choice["logprobs"]["token_logprobs"][0] is None
