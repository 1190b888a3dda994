"""cache_control of /v1/messages: which breakpoints are allowed, and which part of the prompt each of them covers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from starlette.testclient import TestClient

from chairlift.config import CacheConfig
from chairlift.server.caching.marks import MARK
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import says

SHORT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
LONG: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
PNG = "iVBORw0KGgo="
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = TEMPLATE.replace("{% if tools %}", "{{ messages[0].content }}{% if tools %}", 1)


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": name * 9, "input_schema": SCHEMA, **more}


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, "Yes.", TEMPLATE)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


def send(http: TestClient, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return http.post(path, json=body)


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def covered(engine: FakeEngine) -> list[tuple[str, float]]:
    """(end of the text that a lease covers, its seconds), to the last whole block."""
    prompt = engine.submitted[-1][0]
    return [(bytes_of(prompt[:end]), seconds) for end, seconds in engine.services[-1].leases]


def bytes_of(ids: list[int]) -> str:
    tokenizer = FakeEngine().prompts.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(ids, skip_special_tokens=False)


def ends(engine: FakeEngine, *texts: str) -> None:
    """Check that the last leases end with the last whole block before the end of each text."""
    prompt = bytes_of(engine.submitted[-1][0])
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None
    lengths = [len(tokenizer.encode(prompt[: prompt.index(each) + len(each)], False)) for each in texts]
    assert [end for end, _ in engine.services[-1].leases][-len(texts) :] == [length // 16 * 16 for length in lengths]


# -- which part of the prompt ------------------------------------------------------------------------------------------


def test_a_breakpoint_covers_tools_system_and_messages_up_to_it(http: TestClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "tools": [tool("aaa"), tool("bbb", **LONG), tool("ccc")],
        "system": [text("Be brief. " * 4, **LONG), text("Be kind. " * 4)],
        "messages": user(text("What is this? " * 9, **SHORT), text("Tell me. " * 9)),
    }
    assert send(http, **fields).status_code == 200
    assert [seconds for _, seconds in covered(engine)] == [3600.0, 3600.0, 300.0]
    parts = [part for part, _ in covered(engine)]
    assert "bbbbbb" in parts[0] and "cccccc" not in parts[0]
    ends(engine, "Be brief. " * 4, "What is this? " * 9)
    assert MARK not in bytes_of(engine.submitted[-1][0])


def test_a_system_breakpoint_covers_tools_that_are_written_after_it(http: TestClient, engine: FakeEngine) -> None:
    says(engine, "Yes.", SYSTEM_FIRST)
    send(http, tools=[tool("aaa"), tool("bbb")], system=[text("Be brief. " * 4, **SHORT)])
    ((part, _),) = covered(engine)
    assert part.count("<tool>") == 2 and "Hi" not in part


def test_every_kind_of_block_may_have_a_breakpoint(http: TestClient, engine: FakeEngine) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "aaa", "input": {"place": "Ulm " * 9}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1"}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It rains. " * 9}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [text("It snows. " * 9)]}
    asked = [*user(text("x")), {"role": "assistant", "content": [call]}]
    marked_call = [*user(text("Where?")), {"role": "assistant", "content": [{**call, **SHORT}]}]
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([*marked_call, *user({**result, "content": "12"})], "Ulm " * 9),
        ([*asked, *user({**result, "content": "5 " * 40, **SHORT}, text("And?"))], "5 " * 40),
        ([*asked, *user({**result, "content": [text("6 " * 40, **SHORT)]}, text("And?"))], "6 " * 40),
        (user({**document, **SHORT}, text("And?")), "It rains. " * 9),
        (user({**found, **SHORT}, text("And?")), "It snows. " * 9),
    ]
    for messages, said in cases:
        assert send(http, tools=[tool("aaa")], messages=messages).status_code == 200, messages
        ((part, seconds),) = covered(engine)
        whole = bytes_of(engine.submitted[-1][0])
        assert abs(len(part) - (whole.index(said) + len(said))) <= 24, (part, said)
        assert seconds == 300.0


def test_a_breakpoint_of_the_request_covers_the_whole_prompt(http: TestClient, engine: FakeEngine) -> None:
    send(http, messages=user(text("Hi " * 40)), **LONG)
    assert engine.services[-1].leases == ((len(engine.submitted[-1][0]) // 16 * 16, 3600.0),)


def test_nothing_is_kept_without_a_prefix_cache(http: TestClient, engine: FakeEngine) -> None:
    engine.cache = CacheConfig(enable_prefix_caching=False)
    reply = send(http, messages=user(text("Hi " * 40, **SHORT)))
    assert engine.services[-1].leases == ()
    assert reply.json()["usage"]["cache_creation_input_tokens"] == 0


def test_prompts_with_and_without_breakpoints_are_the_same(http: TestClient, engine: FakeEngine) -> None:
    plain: dict[str, Any] = {"tools": [tool("aaa")], "system": [text("Be brief. ")], "messages": user(text("Hi "))}
    marked = copy.deepcopy(plain)
    for block in (marked["tools"][0], marked["system"][0], marked["messages"][0]["content"][0]):
        block.update(SHORT)
    for fields in (plain, marked):
        send(http, **fields)
    assert engine.submitted[0][0] == engine.submitted[1][0]


# -- what is refused ---------------------------------------------------------------------------------------------------

_FIVE = user(*(text(f"{number}", **SHORT) for number in range(5)))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": _FIVE}, "A maximum of 4 blocks with cache_control may be provided. Found 5."),
    ({"messages": user(*_FIVE[0]["content"][:4], text("last")), **SHORT}, "Found 5."),
    ({"system": [text("a", **SHORT)], "messages": user(text("b", **LONG))}, "must not come after a ttl='5m'"),
    ({"tools": [tool("aaa", **SHORT)], "system": [text("a", **LONG)]}, "`tools`, `system`, `messages`"),
    ({"messages": user(text("a", **SHORT), text("b")), **LONG}, "must not come after"),
    ({"messages": user(text("a", **SHORT)), **LONG}, "another ttl than the last block"),
    ({"messages": user(text("a", cache_control={"type": "forever"}))}, "cache_control.type must be ephemeral"),
    ({"messages": user(text("a", cache_control={"type": "ephemeral", "ttl": "2h"}))}, "ttl must be 5m or 1h; got '2h'"),
    ({"messages": user(text("a", cache_control="yes"))}, "must be an object such as"),
    ({"cache_control": {"ttl": "5m"}}, "cache_control.type must be ephemeral; got nothing"),
    ({"messages": user(text("", **SHORT), text("a"))}, "cannot be set for empty text blocks"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_what_anthropic_refuses_is_refused_in_its_form(http: TestClient, fields: dict[str, Any], why: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = send(http, path, **fields)
        assert reply.status_code == 400, reply.text
        error = reply.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert why in error["error"]["message"]


def test_thinking_blocks_have_no_breakpoints(http: TestClient) -> None:
    thought = {"type": "thinking", "thinking": "Hm", "signature": "unsigned", **SHORT}
    messages = [*user(text("a")), {"role": "assistant", "content": [thought, text("b")]}, *user(text("c"))]
    reply = send(http, messages=messages)
    assert reply.status_code == 400 and "thinking blocks have no breakpoints" in reply.text


def test_null_and_other_names_inside_are_allowed(http: TestClient, engine: FakeEngine) -> None:
    scoped = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    reply = send(http, messages=user(text("Hi " * 40, **scoped), text("a", cache_control=None)), cache_control=None)
    assert reply.status_code == 200
    assert len(engine.services[-1].leases) == 1


def test_the_breakpoint_of_the_request_may_repeat_the_last_one(http: TestClient, engine: FakeEngine) -> None:
    assert send(http, messages=user(text("Hi " * 40, **LONG)), **LONG).status_code == 200
    assert {seconds for _, seconds in engine.services[-1].leases} == {3600.0}


# -- usage, with Anthropic's own client --------------------------------------------------------------------------------


def parts_of(usage: Any) -> list[int]:
    return [usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens]


@pytest.mark.parametrize("num_cached", [0, 32, 128, 288])
@pytest.mark.parametrize("streams", [False, True])
def test_the_numbers_add_up_with_the_prompt(
    http: TestClient, engine: FakeEngine, streams: bool, num_cached: int
) -> None:
    engine.num_cached = num_cached
    client = anthropic.Anthropic(base_url="http://localhost", api_key="unused", http_client=http, max_retries=0)
    body: Any = {
        "model": "fake",
        "max_tokens": 9,
        "system": [text("Be brief. " * 9, **LONG)],
        "messages": user(text("What is this? " * 9, **SHORT), text("Tell me.")),
    }
    if streams:
        with client.messages.stream(**body) as stream:
            usages = [e.message.usage for e in stream if e.type == "message_start"]
            message = stream.get_final_message()
        assert parts_of(usages[0]) == parts_of(message.usage)
        created = usages[0].cache_creation
    else:
        message = client.messages.create(**body)
        created = message.usage.cache_creation
    prompt = engine.submitted[-1][0]
    long_end, short_end = (end for end, _ in engine.services[-1].leases)
    rest, written, read = parts_of(message.usage)
    assert (rest + written + read, read) == (len(prompt), num_cached)
    assert created is not None
    long, short = created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens
    assert long + short == written
    assert long == max(0, long_end - read)
    assert short == max(0, short_end - max(read, long_end))


def test_without_breakpoints_nothing_counts_as_written(http: TestClient) -> None:
    usage = send(http, messages=user(text("Hi " * 40))).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
