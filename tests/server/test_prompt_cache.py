"""OpenAI's fields for the prompt cache, sent by its own client, and the session of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from chairlift.base.cache_hints import LONGEST_LEASE
from chairlift.config import CacheConfig
from chairlift.server.caching.marks import MARK
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_cache_control import TEMPLATE, bytes_of
from tests.server.test_tools import says

POINT: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit"}}
LONG = "What is this? " * 9


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, "Yes.", TEMPLATE)
    made.num_cached = 32
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=http, max_retries=0)


def chat(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": list(parts) or LONG}]
    return client.chat.completions.create(model="fake", messages=messages, max_tokens=5, **fields)


def respond(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    items: Any = [{"role": "user", "content": list(parts)}] if parts else LONG
    return client.responses.create(model="fake", input=items, max_output_tokens=5, **fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model="fake", prompt=[LONG, LONG * 2], max_tokens=5, extra_body=fields)


def leases(engine: FakeEngine) -> list[tuple[int, float]]:
    return list(engine.services[-1].leases)


def whole(engine: FakeEngine) -> int:
    return len(engine.submitted[-1][0]) // 16 * 16


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [chat, respond])
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        ({"prompt_cache_key": "k"}, 0.0),
        ({"prompt_cache_retention": "in_memory"}, 0.0),
        ({"prompt_cache_retention": "24h"}, LONGEST_LEASE),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800.0),
        ({"prompt_cache_options": {}}, 1800.0),
        ({"prompt_cache_options": {"mode": "explicit"}}, 0.0),
        ({"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"}, LONGEST_LEASE),
    ],
)
def test_the_whole_prompt_is_kept_as_long_as_asked(
    client: openai.OpenAI, engine: FakeEngine, send: Any, fields: dict[str, Any], seconds: float
) -> None:
    usage = send(client, **fields).usage
    assert leases(engine) == ([(whole(engine), seconds)] if seconds else [])
    details = getattr(usage, "prompt_tokens_details", None) or usage.input_tokens_details
    assert details.cached_tokens == 32
    assert (details.cache_write_tokens or 0) == (whole(engine) - 32 if seconds else 0)


def test_24_hours_need_no_lease_where_blocks_are_kept_in_files(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.cache = CacheConfig(kv_store="somewhere")
    chat(client, prompt_cache_retention="24h")
    assert leases(engine) == []


def test_completions_keep_each_of_their_prompts(client: openai.OpenAI, engine: FakeEngine) -> None:
    usage = complete(client, prompt_cache_options={}).usage
    lengths = [len(prompt) // 16 * 16 for prompt, _, _ in engine.submitted]
    assert [service.leases for service in engine.services] == [((length, 1800.0),) for length in lengths]
    assert usage.prompt_tokens_details.cache_write_tokens == sum(lengths) - 64


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_cache_retention": "7d"}, "'in_memory' or '24h'"),
        ({"prompt_cache_options": {"mode": "never"}}, "'implicit' or 'explicit'"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "'30m'"),
        ({"prompt_cache_key": "k" * 300}, "a text of 0 to 256 characters"),
        ({"prompt_cache_key": "a\nb"}, "printable"),
    ],
)
@pytest.mark.parametrize("send", [chat, respond, complete])
def test_other_values_are_refused(client: openai.OpenAI, send: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        send(client, **fields)


# -- explicit breakpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("send", "kind"), [(chat, "text"), (respond, "input_text")])
def test_a_breakpoint_covers_the_prompt_up_to_its_part(
    client: openai.OpenAI, engine: FakeEngine, send: Any, kind: str
) -> None:
    first, last = {"type": kind, "text": LONG, **POINT}, {"type": kind, "text": "Tell me. " * 9}
    send(client, first, last, prompt_cache_options={"mode": "explicit"})
    ((end, seconds),) = leases(engine)
    prompt = bytes_of(engine.submitted[-1][0])
    assert seconds == 1800.0
    assert 0 <= len(bytes_of(engine.submitted[-1][0][:end])) - prompt.index(LONG) <= len(LONG)
    assert end > len(LONG) - 16
    assert MARK not in prompt
    send(client, {**first, "prompt_cache_breakpoint": None}, last)
    assert prompt == bytes_of(engine.submitted[-1][0])
    send(client, first, last)
    assert leases(engine) == [(end, 1800.0), (whole(engine), 1800.0)]


def test_the_latest_four_breakpoints_count(client: openai.OpenAI, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": f"{number} is a number. " * 5, **POINT} for number in range(7)]
    chat(client, *parts, prompt_cache_options={"mode": "explicit"})
    assert len(leases(engine)) == 4 and leases(engine)[0][0] > 3 * 80
    chat(client, *parts)
    assert len(leases(engine)) == 4


def test_a_breakpoint_that_is_none_is_refused(client: openai.OpenAI) -> None:
    for given in ({"mode": "implicit"}, "yes", {}):
        with pytest.raises(openai.BadRequestError, match="prompt_cache_breakpoint must be"):
            chat(client, {"type": "text", "text": "a", "prompt_cache_breakpoint": given})


# -- sessions ----------------------------------------------------------------------------------------------------------

NAMES: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"session_id": "a", "prompt_cache_key": "b", "user": "c"}, {"x-session-id": "d"}, "a"),
    ({"prompt_cache_key": "b", "user": "c"}, {"x-session-id": "d"}, "d"),
    ({"prompt_cache_key": "b", "user": "c"}, {"session_id": "e"}, "e"),
    ({"user": "c"}, {"x-claude-code-session-id": "f"}, "f"),
    ({}, {"x-session-affinity": "g", "session-id": "h"}, "g"),
    ({"prompt_cache_key": "b", "user": "c"}, {}, "b"),
    ({"user": "c"}, {}, "c"),
    ({"prompt_cache_key": "b"}, {"x-session-id": "x" * 300}, "b"),
    ({}, {}, ""),
]


@pytest.mark.parametrize(("fields", "headers", "session"), NAMES)
def test_the_first_name_counts(
    http: TestClient, engine: FakeEngine, fields: dict[str, str], headers: dict[str, str], session: str
) -> None:
    said = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": said},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in bodies.items():
        assert http.post(path, json={"model": "fake", **body, **fields}, headers=headers).status_code == 200
        assert engine.services[-1].session == session, path


def test_anthropics_user_id_is_the_last_name(http: TestClient, engine: FakeEngine) -> None:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    who = {"metadata": {"user_id": "user_1_session_2"}}
    for fields, session in ((who, "user_1_session_2"), ({**who, "session_id": "s"}, "s"), ({}, "")):
        assert http.post("/v1/messages", json={**body, **fields}).status_code == 200
        assert engine.services[-1].session == session


def test_leases_are_paid_by_who_is_vouched_for() -> None:
    """A name that the client gives itself makes no share of its own; the name of an API key does."""
    engine = FakeEngine()
    said = [{"role": "user", "content": LONG}]
    body = {"model": "fake", "messages": said, "user": "anybody", "prompt_cache_options": {}}
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        http.post("/v1/chat/completions", json=body)
    assert (engine.services[-1].payer, len(leases(engine))) == ("", 1)
    with TestClient(make_app(make_state(engine, api_key=("k1",))), base_url="http://localhost") as http:
        http.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k1"})
    assert engine.services[-1].payer.startswith("key-")
