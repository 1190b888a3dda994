"""The bytes that ``curl -N`` receives from a server, compared with the documented format."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.served import HI, KEY, LONG, ROOM, SEEDED, Served, answers
from tests.e2e.server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def command(served: Served, path: str, body: Any, *options: str, key: str | None = KEY) -> list[str]:
    """``curl -N`` as the banner shows it."""
    authorization = [] if key is None else ["-H", f"Authorization: Bearer {key}"]
    sent = body if isinstance(body, str) else json.dumps(body)
    kind = ["-H", "Content-Type: application/json"]
    return ["curl", "-sN", *options, f"{served.url}{path}", *authorization, *kind, "-d", sent]


def curl(served: Served, path: str, body: Any, *options: str, key: str | None = KEY) -> bytes:
    arguments = command(served, path, body, *options, key=key)
    return subprocess.run(arguments, capture_output=True, check=True, timeout=PATIENCE).stdout


def events_of(raw: bytes) -> list[Any]:
    """The events' data. The framing must be exactly ``data: ...`` and an empty line, with ``[DONE]`` at the end."""
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert b"\r" not in raw
    events = raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
    assert events.pop() == b""
    for event in events:
        assert event.startswith(b"data: {")
        assert event.count(b"\n") == 0
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_a_streamed_chat_that_breaks_off_ends_with_an_error_event() -> None:
    """An error in mid-stream is the last event, in place of the end."""
    with ServerProcess("hashlm:5ms", *ROOM) as server:
        body = {"model": "hashlm", "messages": HI, "stream": True, **LONG}
        process = subprocess.Popen(command(Served(server), "/v1/chat/completions", body), stdout=subprocess.PIPE)
        _lines(process, 20)
        os.kill(server.engine(), signal.SIGKILL)
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0  # the response is whole, the answer is not
    assert b"[DONE]" not in rest
    assert rest.endswith(b"}}\n\n")
    last = rest.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    error = json.loads(last.removeprefix(b"data: "))
    assert list(error) == ["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    assert error["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_chat_has_the_events_of_the_answer(served: Served, n: int, include_usage: bool) -> None:
    body = {"model": "hashlm", "messages": HI, "n": n, "stream": True, **SEEDED}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    events = events_of(curl(served, "/v1/chat/completions", body))
    expected = answers("Hi", n=n, **SEEDED)

    head = {
        name: events[0][name] for name in ("id", "object", "created", "model", "system_fingerprint", "service_tier")
    }
    assert head["id"].startswith("chatcmpl-")
    assert (head["object"], head["model"], head["service_tier"]) == ("chat.completion.chunk", "hashlm", "default")
    for event in events:
        assert set(event) == ({*head, "choices", "usage"} if include_usage else {*head, "choices"})
        assert {name: event[name] for name in head} == head
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        written = sum(len(answer.token_ids) for answer in expected)
        usage = last["usage"]
        cached = usage.pop("prompt_tokens_details")
        assert list(cached) == ["cached_tokens"]
        assert usage == {"prompt_tokens": 21, "completion_tokens": written, "total_tokens": 21 + written}
        assert all(event["usage"] is None for event in events)

    choices = [event["choices"] for event in events]
    assert all(len(choice) == 1 for choice in choices)
    for index, answer in enumerate(expected):
        own = [choice for (choice,) in choices if choice["index"] == index]
        role, *deltas, end = own
        assert role["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert all(list(choice["delta"]) == ["content"] and choice["delta"]["content"] for choice in deltas)
        assert "".join(choice["delta"]["content"] for choice in deltas) == answer.text
        assert (end["delta"], end["finish_reason"]) == ({}, answer.finish_reason)
    assert [choice[0]["delta"].get("role") for choice in choices[:n]] == ["assistant"] * n


def test_a_streamed_completion_has_the_events_of_the_answer(served: Served) -> None:
    body = {"model": "hashlm", "prompt": [[5, 6], [7]], "stream": True, **SEEDED}
    events = events_of(curl(served, "/v1/completions", body))
    expected = [answers(ids, **SEEDED)[0] for ids in ([5, 6], [7])]
    for index, answer in enumerate(expected):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == answer.text
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [answer.finish_reason]
        assert own[-1]["finish_reason"] == answer.finish_reason


def test_a_stream_has_the_headers_of_its_request(served: Served) -> None:
    body = {"model": "hashlm", "messages": HI, "stream": True, "user": "me", "max_tokens": 1}
    raw = curl(served, "/v1/chat/completions", body, "-i", "-H", "X-Request-Id: mine-17")
    first, *lines = raw.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert first == "HTTP/1.1 200 OK"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["transfer-encoding"] == "chunked"
    assert headers["x-request-id"] == "mine-17"
    assert headers["warning"] == '299 chairlift "ignored: user"'


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "code"),
    [
        ("/v1/chat/completions", "{", KEY, 400, None),
        ("/v1/chat/completions", {"messages": HI, "stream": True, "n": 99}, KEY, 400, "invalid_value"),
        ("/v1/chat/completions", {"messages": HI, "stream": True}, None, 401, None),
        ("/v1/chat/completions", {"messages": HI, "stream": True, "model": "x"}, KEY, 404, "model_not_found"),
        ("/v1/nothing", {}, KEY, 404, "not_found"),
        ("/v1/models", {}, KEY, 405, None),
    ],
)
def test_errors_come_before_a_stream(
    served: Served, path: str, body: Any, key: str | None, status: int, code: str | None
) -> None:
    raw = curl(served, path, body, "-w", "\n%{http_code} %{content_type}", key=key)
    text, _, told = raw.decode().rpartition("\n")
    assert told == f"{status} application/json"
    error = json.loads(text)
    assert list(error) == ["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    if code is not None:
        assert error["error"]["code"] == code


def test_pieces_arrive_one_by_one_and_leaving_ends_the_request(served: Served) -> None:
    body = {"model": "hashlm", "messages": HI, "n": 2, "stream": True, **LONG}
    for _ in range(3):
        process = subprocess.Popen(command(served, "/v1/chat/completions", body), stdout=subprocess.PIPE)
        try:
            lines = _lines(process, 20)  # while the answer is far from its end
            assert [line[:6] for line in lines] == [b"data: ", b"\n"] * 10
            assert served.load()["running"] == 2
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE)
        served.wait_until_idle()


def test_the_command_of_the_banner_gets_an_answer(bundled_server: ServerProcess) -> None:
    """The line to paste, as it is printed, but for the key."""
    (line,) = [line.strip() for line in bundled_server.log().splitlines() if line.strip().startswith("curl -N")]
    pasted = line.replace("YOUR_KEY", KEY).replace("curl ", "curl -s ", 1)
    done = subprocess.run(["sh", "-c", pasted], capture_output=True, check=True, timeout=PATIENCE)
    events = events_of(done.stdout)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text.isprintable() and len(text.split()) > 3
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def _lines(process: subprocess.Popen[bytes], count: int) -> Sequence[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]
