"""/v1/messages in the forms of Anthropic's API: blocks, named events in order, errors, and an agent's whole run.

Its client is no requirement of the tests. The events are put together here as it does, by its public protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.errors import EngineDeadError
from chairlift.server.anthropic.messages_input import names, to_chat
from chairlift.server.anthropic.messages_types import MessagesRequest
from chairlift.server.http.app import make_app
from chairlift.server.openai.protocol import parse
from tests.server.fake_engine import FakeEngine, byte_tokenizer, make_state
from tests.server.harness import run, serving
from tests.server.test_tools import CALLS, HERMES, says

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: list[Any] = [
    {"name": "look", "description": "Weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
THINK = {"type": "enabled", "budget_tokens": 1024}
KEYS = ("first-key", "second-key")


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, CALLS)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": ASK, "max_tokens": 400, **fields}


def create(http: TestClient, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/messages", json=asked(**fields))
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


def refused(http: TestClient, status: int = 400, **fields: Any) -> str:
    reply = http.post("/v1/messages", json=asked(**fields))
    assert reply.status_code == status, reply.text
    told = reply.json()
    assert (set(told), told["type"]) == ({"type", "error", "request_id"}, "error")
    assert set(told["error"]) - {"details"} == {"type", "message"}
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    message: str = told["error"]["message"]
    return message


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        found.append(told)
    return found


def stream(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    reply = http.post("/v1/messages", json=asked(stream=True, **fields))
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream brings. Raises AssertionError where the order is not the protocol's."""
    message: dict[str, Any] = {}
    buffer: str | None = None
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    for event in events:
        kind, blocks = event["type"], message.get("content", [])
        if kind == "message_start":
            message = event["message"]
            assert message["content"] == [] and message["stop_reason"] is None
        elif kind == "content_block_start":
            assert buffer is None and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            buffer = ""
        elif kind == "content_block_delta":
            assert buffer is not None and event["index"] == len(blocks) - 1
            delta, block = event["delta"], blocks[-1]
            names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            if delta["type"] == "input_json_delta":
                buffer += delta["partial_json"]
            else:
                block[names[delta["type"]]] += delta[names[delta["type"]]]
        elif kind == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(buffer or "")
            buffer = None
        elif kind == "message_delta":
            assert buffer is None
            message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
            message |= {key: event[key] for key in event if key == "tool_call_errors"}
        else:
            assert kind in ("ping", "message_stop")
    return message


def plain(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[-1][0], False)


def test_an_answer_is_blocks(http: TestClient) -> None:
    reply = create(http, tools=TOOLS, thinking=THINK)
    thought, text, first, second = reply["content"]
    assert thought == {"type": "thinking", "thinking": "Hm. é", "signature": "unsigned"}
    assert (text["type"], text["text"]) == ("text", "I look.")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "look", {"place": "Ulm 😀"})
    assert (second["name"], second["input"]) == ("now", {})
    assert first["id"] != second["id"] and first["id"].isalnum()
    assert (reply["type"], reply["role"], reply["stop_reason"]) == ("message", "assistant", "tool_use")
    usage = reply["usage"]
    assert usage["output_tokens"] == len(CALLS.encode()) + 1
    assert usage["output_tokens_details"]["thinking_tokens"] == len("<think>\nHm. é\n</think>".encode())
    body = {key: value for key, value in asked(tools=TOOLS, thinking=THINK).items() if key != "max_tokens"}
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert counted == {"input_tokens": sum(usage[name] for name in parts)}


def test_a_stream_brings_what_the_whole_reply_has(http: TestClient) -> None:
    events = stream(http, tools=TOOLS, thinking=THINK, seed=1)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert plain(put_together(events)) == plain(create(http, tools=TOOLS, thinking=THINK, seed=1))
    assert sum(event["type"] == "content_block_start" for event in events) == 4
    assert events[-2]["usage"]["output_tokens"] == len(CALLS.encode()) + 1


@pytest.mark.parametrize(
    ("text", "fields", "reason", "stop"),
    [
        ("It rains.", {}, "end_turn", None),
        ("It rains.", {"max_tokens": 4}, "max_tokens", None),
        ("It rains. STOP it", {"stop_sequences": ["xyz", "STOP"]}, "stop_sequence", "STOP"),
        ("x" * 3000, {"max_tokens": 100_000}, "model_context_window_exceeded", None),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', {"tools": TOOLS}, "tool_use", None),
    ],
)
def test_each_end_of_an_answer_has_its_stop_reason(
    http: TestClient, engine: FakeEngine, text: str, fields: dict[str, Any], reason: str, stop: str | None
) -> None:
    says(engine, text)
    for reply in (create(http, **fields), put_together(stream(http, **fields))):
        assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, stop)


def test_a_broken_call_is_text_with_a_reason(http: TestClient, engine: FakeEngine) -> None:
    says(engine, '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>')
    for reply in (create(http, tools=TOOLS), put_together(stream(http, tools=TOOLS))):
        assert reply["content"][0]["text"].startswith("<tool_call>") and reply["stop_reason"] == "end_turn"
        assert reply["tool_call_errors"] == ["'fly' is none of the tools (look, now)"]


def test_an_engine_that_dies_ends_a_stream_with_an_event(http: TestClient, engine: FakeEngine) -> None:
    engine.failure_of_streams, engine.fail_after = EngineDeadError("it is gone"), 3
    events = stream(http)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error" and "started again" in events[-1]["error"]["message"]
    engine.fail_after = 0
    assert "started again" in refused(http, 503, stream=True)


def test_models_think_only_when_they_are_asked_to(http: TestClient, engine: FakeEngine) -> None:
    closed = "<think>\n\n</think>\n\n"
    for thinking, ends in ((None, True), ({"type": "disabled"}, True), (THINK, False), ({"type": "adaptive"}, False)):
        create(http, thinking=thinking)
        assert prompt_of(engine).endswith(closed) is ends
    shown = create(http, thinking={**THINK, "display": "omitted"})
    assert [block["type"] for block in shown["content"]] == ["text"]
    headers = http.post("/v1/messages", json=asked(thinking=THINK, speed="fast")).headers
    assert headers["warning"].endswith('"ignored: speed, thinking.budget_tokens"')
    says(engine, "x", HERMES.replace("enable_thinking", "thinking"))
    create(http)
    assert prompt_of(engine).endswith(closed)
    says(engine, "x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "warning" not in http.post("/v1/messages", json=asked(thinking={"type": "disabled"})).headers
    assert (
        '"ignored: thinking"' in http.post("/v1/messages", json=asked(thinking={"type": "adaptive"})).headers["warning"]
    )
    says(engine, "x", HERMES.partition("{% if enable_thinking")[0] + "<think>{% endif %}")
    assert "thinking" in http.post("/v1/messages", json=asked(thinking={"type": "disabled"})).headers["warning"]
    assert "warning" not in http.post("/v1/messages", json=asked()).headers


def test_the_answer_goes_on_with_the_assistants_last_message(http: TestClient, engine: FakeEngine) -> None:
    create(http, messages=[*ASK, {"role": "assistant", "content": "It ra"}])
    assert prompt_of(engine).endswith("assistant\nIt ra")


def test_settings_reach_the_engine(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    create(http, temperature=0.5, top_p=0.5, top_k=7, output_config=config, service_tier="standard_only")
    params = engine.submitted[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.5, 7, 400)
    assert params.structured_outputs is not None
    for user in ("me", "x" * 400):
        create(http, metadata={"user_id": user})
    create(http, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert engine.submitted[-1][1].structured_outputs is not None
    reply = http.post("/v1/messages?beta=true", json=asked(), headers={"anthropic-version": "1999-01-01"})
    assert reply.status_code == 200


def test_either_header_has_the_key() -> None:
    engine = FakeEngine()
    says(engine, "x")
    with TestClient(make_app(make_state(engine, api_key=KEYS)), base_url="http://localhost") as http:

        def status(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            reply = http.post("/v1/messages", json=asked(), headers=given)
            assert reply.status_code == 200 or reply.json()["error"]["type"] == "authentication_error"
            return reply.status_code

        bearer = f"Bearer {KEYS[0]}"
        assert status(x_api_key=KEYS[0]) == status(authorization=bearer) == 200
        assert status(x_api_key=KEYS[0], authorization=bearer) == 200
        assert status(x_api_key=KEYS[1], authorization=bearer) == 401
        assert status() == status(x_api_key="no") == status(authorization=KEYS[0]) == 401
        twice = [("x-api-key", KEYS[0]), ("x-api-key", KEYS[0])]
        assert http.post("/v1/messages", json=asked(), headers=twice).status_code == 401
        assert http.get("/v1/models", headers={"x-api-key": KEYS[1]}).status_code == 200


# --- from blocks to messages ------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {"place": "Ulm é"}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"place": "Ulm é"}'}}


def back(text: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": text, **fields}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({}, ASK),
        ({"messages": [{"role": "user", "content": [TEXT]}]}, ASK),
        (
            {"messages": [{"role": "user", "content": [TEXT, TEXT]}]},
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2}],
        ),
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *ASK]),
        (
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, TEXT, TEXT]},
            [{"role": "system", "content": "Hi\n\nHi"}, *ASK],
        ),
        ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}]}, ASK),
        (
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "content": [THOUGHT, TEXT, USE]},
                    {"role": "user", "content": [back("Rain."), TEXT]},
                ]
            },
            [
                *ASK,
                {"role": "assistant", "content": "Hi", "reasoning_content": "Hm.", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "Rain."},
                *ASK,
            ],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [TEXT, back([TEXT, TEXT]), back(None), back([], is_error=True)]},
                    {"role": "user", "content": [back("no", is_error=True), back("ERROR 3", is_error=True)]},
                    {"role": "system", "content": [TEXT]},
                    {"role": "user", "content": []},
                ]
            },
            [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                *ASK,
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Hi"}] * 2},
                {"role": "tool", "tool_call_id": "a", "content": ""},
                {"role": "tool", "tool_call_id": "a", "content": "Error: "},
                {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
                {"role": "tool", "tool_call_id": "a", "content": "ERROR 3"},
                {"role": "system", "content": "Hi"},
                {"role": "user", "content": ""},
            ],
        ),
    ],
)
def test_blocks_become_messages(given: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    request, _ = parse(MessagesRequest, asked(**given))
    assert to_chat(request, names(), "", []).messages == messages


def test_choices_become_those_of_a_chat() -> None:
    for given, choice, parallel in (
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}, None),
        ({"type": "none"}, "none", None),
    ):
        request, _ = parse(MessagesRequest, asked(tools=TOOLS, tool_choice=given))
        chat = to_chat(request, names(), "", [])
        assert (chat.tool_choice, chat.parallel_tool_calls) == (choice, parallel)
        assert chat.tools and chat.tools[0]["function"]["parameters"] == SCHEMA


PIXELS = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def of(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"messages": []}, "messages must be a list of 1"),
        (of("user", {"type": "image", "source": {}}), "messages[0].content[0].source must be of type base64 or url"),
        (of("user", {"type": "image", "source": {"type": "file", "file_id": "x"}}), "got 'file'; files are not kept"),
        (of("user", {"type": "image", "source": {"type": "base64"}}), "content[0].source.media_type must be a text"),
        (of("user", PIXELS), "messages[0].content[0] must be a text part"),
        (of("user", PIXELS), "only models of gemma3, idefics3, "),
        (of("assistant", PIXELS), "messages[0].content[0].type is 'image'"),
        (of("user", {"type": "document"}), "messages[0].content[0].source must be of type text or content"),
        (of("system", {"type": "document"}), "messages[0].content[0].type is 'document'"),
        (of("assistant", {"type": "compaction", "content": None}), "content[0].content must be a text"),
        (of("assistant", {"type": "mcp_tool_use", "id": "a"}), "messages[0].content[0].type is 'mcp_tool_use'"),
        (of("user", TEXT, {"type": "tool_use"}), "messages[0].content[1].type is 'tool_use'"),
        (of("user", back("x")), "messages[0].content[0].tool_use_id must be the id of a tool_use before it"),
        (of("user", 3), "messages[0].content[0] must be an object"),
        (of("user", {"type": "text"}), "messages[0].content[0].text must be a text"),
        (of("assistant", {**USE, "input": "x"}), "messages[0].content[0].input must be an object"),
        (of("assistant", {**USE, "name": ""}), "messages[0].content[0].name must be a text"),
        (of("assistant", USE, TEXT, USE), "messages[0].content[2].id is 'a' again"),
        (of("assistant", {"type": "thinking"}), "messages[0].content[0].thinking must be a text"),
        (of("robot"), "messages[0].role must be user, assistant or system"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a text or a list"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        (
            {
                "tools": [*TOOLS, {"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice names tools[2], whose type is 'bash_20250124'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, "there are no tools"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "a b", "input_schema": {}}]},
            "tools[1].name must be 1 to 128",
        ),
        ({"thread": {"type": "create"}}, "thread is given, but conversations are not kept"),
        ({"compaction": {"type": "summarize"}}, "conversations are not compacted"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0] is {'type': 'clear_tool_uses_20250919'}, but the server removes nothing",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management.edits[0]",
        ),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget is given"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type must be 'object'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be 1 to 128"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', but there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type must be auto, any, tool or none"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 3}}, "true or false"),
        ({"thinking": {"type": "hard"}}, "thinking.type must be enabled, adaptive or disabled"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format cannot be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
        ({"container": "c"}, "there are no containers"),
        ({"mcp_servers": [{"url": "http://x"}]}, "calls no other servers"),
        ({"stop": "x"}, "send stop_sequences"),
        ({"user": "x"}, "send metadata.user_id"),
        ({"n": 2}, "n is 2, which is not supported"),
        ({"response_format": {"type": "json_object"}}, "send output_config.format"),
        ({"service_tier": "gold"}, "service_tier must be one of"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "does not fit"),
    ],
)
def test_errors_have_the_names_of_the_clients_fields(http: TestClient, fields: dict[str, Any], words: str) -> None:
    assert words in refused(http, **fields)


def test_a_thread_is_refused_so_that_the_client_goes_on_without_it(http: TestClient) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = http.post(path, json=asked(thread={"type": "continue", "previous_message_id": "msg_1"}))
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert create(http, thread=None)["type"] == "message"


def test_blocks_of_other_servers_are_read_or_named_as_dropped(http: TestClient, engine: FakeEngine) -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
        {"type": "compaction", "content": "It rained before."},
        TEXT,
    ]
    said = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And now?"}]
    reply = http.post("/v1/messages", json=asked(messages=said))
    assert reply.status_code == 200, reply.text
    assert "messages[1].content[0], messages[1].content[1], messages[1].content[2]" in reply.headers["warning"]
    assert "It rained before.\n" in prompt_of(engine) and "srv_1" not in prompt_of(engine)


def test_documents_results_and_references_become_text(http: TestClient, engine: FakeEngine) -> None:
    document = {
        "type": "document",
        "title": "T.txt",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    found = {"type": "search_result", "title": "S", "source": "http://s", "content": [{"type": "text", "text": "F"}]}
    reference = {"type": "tool_reference", "tool_name": "look_up"}
    create(http, messages=[{"role": "user", "content": [document, found]}])
    assert "T.txt\nD" in prompt_of(engine) and "S\nhttp://s\nF" in prompt_of(engine)
    answer = {"type": "tool_result", "tool_use_id": "a", "content": [reference, document, TEXT]}
    create(http, messages=[*ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [answer]}])
    assert "look_up" in prompt_of(engine) and "T.txt\nD" in prompt_of(engine)


def test_images_of_a_tools_result_follow_in_the_users_message() -> None:
    answer = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, PIXELS]}
    said = [*ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [answer, TEXT]}]
    request, _ = parse(MessagesRequest, asked(messages=said))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert to_chat(request, names(), "", []).messages[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": TEXT["text"]},
        {"role": "user", "content": [picture, {"type": "text", "text": TEXT["text"]}]},
    ]


def test_tools_without_a_schema_are_left_out_and_named(http: TestClient, engine: FakeEngine) -> None:
    server = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "from_tomorrow", "name": "x"}]
    reply = http.post("/v1/messages", json=asked(tools=[server[0], *TOOLS, server[1]]))
    assert reply.status_code == 200 and "ignored: tools[0], tools[3]" in reply.headers["warning"]
    assert "web_search" not in prompt_of(engine) and "Weather" in prompt_of(engine)
    assert create(http, tools=server)["stop_reason"] is not None


def test_examples_of_inputs_are_a_part_of_the_schema() -> None:
    request, _ = parse(MessagesRequest, asked(tools=[{**TOOLS[0], "input_examples": [{"place": "Ulm"}]}]))
    chat = to_chat(request, names(), "", [])
    assert chat.tools and chat.tools[0]["function"]["parameters"] == {**SCHEMA, "examples": [{"place": "Ulm"}]}


def test_a_text_block_has_no_citations(http: TestClient) -> None:
    """The AI SDK takes a list or nothing."""
    blocks = create(http, tools=TOOLS)["content"]
    assert {"type", "text"} in [set(block) for block in blocks]
    started = [event["content_block"] for event in stream(http, tools=TOOLS) if event["type"] == "content_block_start"]
    assert {"type", "text"} in [set(block) for block in started]


def test_models_have_anthropics_form_for_its_clients(http: TestClient) -> None:
    version = {"anthropic-version": "2023-06-01"}
    page = http.get("/v1/models", headers=version).json()
    names = [each["id"] for each in http.get("/v1/models").json()["data"]]
    model = page["data"][0]
    assert [each["id"] for each in page["data"]] == names and names[0] == "fake"
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, names[0], names[-1])
    assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
    assert model["created_at"].endswith("Z") and model["max_tokens"] == 2048
    assert http.get("/v1/models/fake", headers=version).json() == model
    for query, shown in (("limit=1", names[:1]), ("after_id=fake", names[1:]), (f"before_id={names[-1]}", names[:-1])):
        page = http.get(f"/v1/models?{query}", headers=version).json()
        assert [each["id"] for each in page["data"]] == shown
        assert page["has_more"] is (query == "limit=1")
    for query in ("limit=0", "after_id=gone", "before_id=gone"):
        assert http.get(f"/v1/models?{query}", headers=version).status_code == 400
    assert http.get("/v1/models").json()["object"] == "list"


def test_every_error_of_these_paths_has_anthropics_form(http: TestClient, engine: FakeEngine) -> None:
    def kind(reply: Any, status: int) -> str:
        assert reply.status_code == status and reply.json()["type"] == "error", reply.text
        found: str = reply.json()["error"]["type"]
        return found

    assert kind(http.get("/v1/messages"), 405) == "invalid_request_error"
    for reply in (http.post("/v1/messages/batches", json={"requests": []}), http.get("/v1/messages/batches/x/results")):
        assert kind(reply, 404) == "not_found_error" and "POST /v1/batches" in reply.json()["error"]["message"]
    assert kind(http.post("/v1/messages", json=asked(model="gone")), 404) == "not_found_error"
    assert kind(http.post("/v1/messages/count_tokens", json={}), 400) == "invalid_request_error"
    assert kind(http.post("/v1/messages", content=b"x"), 415) == "invalid_request_error"
    assert kind(http.post("/v1/messages", json={"x": "y" * 2**23}), 413) == "request_too_large"
    engine.full = True
    reply = http.post("/v1/messages", json=asked())
    assert kind(reply, 429) == "rate_limit_error" and reply.headers["retry-after"]


def test_a_count_refuses_what_an_answer_refuses(http: TestClient) -> None:
    for body, words in (
        ({**of("user", {"type": "image"})}, "source must be of type base64 or url"),
        ({"messages": ASK, "mcp_servers": [{}]}, "no other servers"),
    ):
        reply = http.post("/v1/messages/count_tokens", json=body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_an_agent_comes_to_its_end() -> None:
    """Streams with tools, over a socket: blocks go back as they came, results as blocks of the user."""
    steps = (
        "<think>\nWhich files?\n</think>\n\n"
        '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>',
        'I read it.\n<tool_call>\n{"name": "shell", "arguments": {"command": "cat a.txt"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "shell", "arguments": {"command": "wc b.txt"}}\n</tool_call>',
        "The file says hello.",
    )
    results = {"ls": ("a.txt", False), "cat a.txt": ("hello", False), "wc b.txt": ("no such file", True)}
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    fixed: dict[str, Any] = {
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=7"},
            {"type": "text", "text": "You are a coding agent.", **ephemeral},
        ],
        "tools": [{"name": "shell", "description": "Runs a command", "input_schema": schema, **ephemeral}],
        "metadata": {"user_id": "user_" + "0" * 300},
        "thinking": {"type": "enabled", "budget_tokens": 4096},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
    }

    async def test() -> None:
        engine = FakeEngine()
        async with serving(make_app(make_state(engine))) as server:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What does it say?"}]}]
            message: dict[str, Any] = {}
            for text in steps:
                says(engine, text)
                body = json.dumps({"model": "fake", "messages": messages, **fixed}).encode()
                reply = await server.post("/v1/messages?beta=true", body, "anthropic-version: 2023-06-01")
                assert reply.status == 200, reply.body
                message = put_together(events_of(reply.body.decode()))
                messages.append({"role": "assistant", "content": message["content"]})
                answers = []
                for block in message["content"]:
                    if block["type"] == "tool_use":
                        output, failed = results[block["input"]["command"]]
                        answer = {"type": "tool_result", "tool_use_id": block["id"], "content": output}
                        answers.append({**answer, "is_error": failed})
                messages.append({"role": "user", "content": answers})
            assert (message["stop_reason"], message["content"][0]["text"]) == ("end_turn", "The file says hello.")
        prompt = prompt_of(engine)
        assert "x-anthropic" not in prompt and prompt.index("coding agent") < prompt.index("What does it say?")
        assert prompt.index("a.txt") < prompt.index("hello") < prompt.index("Error: no such file")

    run(test())
