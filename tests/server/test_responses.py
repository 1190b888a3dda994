"""/v1/responses as the official client uses it, against a scripted model: items, events in order, what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from chairlift.errors import EngineDeadError
from chairlift.server.http.app import make_app
from chairlift.server.openai.protocol import parse
from chairlift.server.openai.response_store import ResponseStore, StoredResponse
from chairlift.server.openai.responses_input import names, to_chat
from chairlift.server.openai.responses_types import ResponsesRequest
from tests.server.fake_engine import FakeEngine, byte_tokenizer, make_state
from tests.server.harness import run, serving
from tests.server.test_tools import CALLS, says

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "look",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        "strict": True,
    },
    {"type": "function", "name": "now", "parameters": None},
]
KEYS = ("first-key", "second-key")


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.prompts.follows_grammars = True  # the calls of strict functions follow one
    says(made, CALLS)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def official(http: TestClient, key: str = "unused") -> openai.OpenAI:
    made: Any = http
    return openai.OpenAI(base_url="http://localhost/v1", api_key=key, http_client=made, max_retries=0)


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return official(http)


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "fake", "input": "Hi", "max_output_tokens": 400, **fields})


def refused(http: TestClient, status: int = 400, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[-1][0], False)


def plain(response: Any) -> dict[str, Any]:
    """The parts of a response that are equal in every call."""
    told: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        del told[name]
    for item in told["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    for tool in told["tools"]:
        tool.pop("strict", None)
    return told


def test_an_answer_is_items(client: openai.OpenAI) -> None:
    reply = create(client, tools=TOOLS, metadata={"a": "b"}, instructions="Be brief.", user="u")
    thought, message, first, second = reply.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm. é", [])
    assert (message.type, message.role, message.content[0].text) == ("message", "assistant", "I look.")
    assert reply.output_text == "I look."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "look", {"place": "Ulm 😀"})
    assert (second.name, second.arguments) == ("now", "{}")
    assert first.call_id != second.call_id and len(first.call_id) == 9
    assert {item.status for item in reply.output} == {reply.status} == {"completed"}
    assert (reply.metadata, reply.instructions, reply.store) == ({"a": "b"}, "Be brief.", True)
    thoughts = len("<think>\nHm. é\n</think>".encode())
    assert reply.usage.output_tokens_details.reasoning_tokens == thoughts
    assert reply.usage.output_tokens == len(CALLS.encode()) + 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.error is None and reply.incomplete_details is None and reply.truncation == "disabled"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_back_by_the_field_that_some_clients_keep(client: openai.OpenAI, stream: bool) -> None:
    """Codex sends back the summary and the encrypted content, and no other field."""
    asked: dict[str, Any] = {"tools": TOOLS, "stream": stream}
    for include in (None, ["reasoning.encrypted_content"]):
        reply: Any = create(client, include=include, **asked)
        if stream:
            reply = list(reply)[-1].response
        thought = reply.output[0].to_dict()
        kept = {key: thought.get(key) for key in ("type", "summary", "encrypted_content")}
        request, _ = parse(ResponsesRequest, {"input": [USER, kept, SAID]})
        read = to_chat(request, [], names(), []).messages[-1].get("reasoning_content")
        assert read == (None if include is None else "Hm. é")


def test_events_come_in_order(client: openai.OpenAI) -> None:
    events = list(create(client, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "D", "content_part.done", "output_item.done"]
    call = ["output_item.added", *(f"function_call_arguments.{each}" for each in ("delta", "done")), "output_item.done"]
    told = [kind for index, kind in enumerate(kinds) if not (kind.endswith(".delta") and kind == kinds[index - 1])]
    reasoning = ["reasoning_text.delta", "reasoning_text.done"]
    said = ["output_text.delta", "output_text.done"]
    expected = ["created", "in_progress"]
    for pieces in (reasoning, said):
        expected += [*text[:2], *pieces, *text[3:]]
    assert told == [*expected, *call, *call, "completed"]
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
    ids = {item.id for item in done}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == ids and len(ids) == 4


def test_a_stream_brings_what_the_whole_reply_has(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "fake", "input": "Hi", "max_output_tokens": 400, "extra_body": {"seed": 1}}
    with client.responses.stream(**fields, tools=TOOLS) as stream:
        pieces = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        streamed = stream.get_final_response()
    assert pieces == streamed.output_text == "I look."
    assert plain(streamed) == plain(create(client, tools=TOOLS, extra_body={"seed": 1}))


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "It rains, it rains, it rains.")
    reply = create(client, max_output_tokens=8)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (reply.output_text, reply.output[0].status, reply.completed_at) == ("It rains", "incomplete", None)
    events = list(create(client, max_output_tokens=8, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "It rains"
    assert events[-1].response.usage == reply.usage


def test_an_engine_that_dies_ends_a_stream_with_an_event(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.failure_of_streams, engine.fail_after = EngineDeadError("it is gone"), 3
    events = list(create(client, stream=True))
    assert events[-1].type == "response.failed" and events[-1].sequence_number == len(events) - 1
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    assert "started again" in events[-1].response.error.message
    engine.fail_after = 0
    with pytest.raises(openai.InternalServerError):
        create(client, stream=True)


def test_logprobs_are_those_of_the_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "<think>\nHm.\n</think>\n\nIt rains.")
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": {"seed": 3}}
    part = create(client, **fields).output[1].content[0]
    assert "".join(each.token for each in part.logprobs).strip() == "It rains."
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    events = list(create(client, stream=True, **fields))
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done] == [each.token for each in part.logprobs]
    assert [each.token for each in deltas] == [each.token for each in done][: len(deltas)]
    assert create(client).output[1].content[0].logprobs == []
    only = create(client, include=["message.output_text.logprobs"]).output[1].content[0].logprobs
    assert only and all(each.top_logprobs == [] for each in only)


def test_demanded_forms_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True
    says(engine, "{}", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    reply = create(client, text={"format": form})
    asked = engine.submitted[-1][1].structured_outputs
    assert asked and json.loads(str(asked.json)) == schema and reply.text.format.type == "json_schema"
    create(client, text={"format": {"type": "json_object"}})
    asked = engine.submitted[-1][1].structured_outputs
    assert asked and asked.json_object
    create(client, text={"format": {"type": "text"}, "verbosity": "low"})
    assert engine.submitted[-1][1].structured_outputs is None


def test_settings_reach_the_engine_and_hints_are_named(http: TestClient, engine: FakeEngine) -> None:
    fields = {"temperature": 0.5, "top_p": 0.5, "top_k": 7, "seed": 3, "stop": ["x"], "stream_options": None}
    hints = {"max_tool_calls": 3, "safety_identifier": "s", "text": {"verbosity": "low"}}
    reasoning = {"effort": "none", "summary": "auto", "context": "auto", "mode": "standard"}
    reply = http.post("/v1/responses", json={"input": "Hi", "reasoning": reasoning, **fields, **hints})
    assert reply.status_code == 200
    params = engine.submitted[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 7, 3)
    assert (reply.json()["temperature"], reply.json()["top_p"]) == (0.5, 0.5)
    named = "max_tool_calls, safety_identifier, reasoning.mode, text.verbosity, reasoning.summary"
    assert named in reply.headers["warning"]
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


# --- from items to messages -------------------------------------------------------------------------------------------

LOOK = {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"place": "Ulm"}'}
NOW = {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}", "id": "fc_1", "status": "completed"}
RAIN = {"type": "function_call_output", "call_id": "a", "output": "Rain."}
NOON = {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Noon."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "logprobs": []}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


ASKED = {"role": "user", "content": "Hi"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /(.|\\n)*/'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": LARK}
SPACE = {
    "type": "namespace",
    "name": "mcp__git",
    "description": "Of git.",
    "tools": [
        {"type": "function", "name": "log", "description": "Shows", "parameters": {"type": "object"}, "strict": None},
        {"type": "custom", "name": "commit"},
    ],
}
PATCHED = (
    'So.\n<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n\\"é\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mcp__git__log", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mcp__git__commit", "arguments": {"input": "all"}}\n</tool_call>'
)


def test_custom_tools_and_namespaces_are_called_whole_and_streamed(http: TestClient, engine: FakeEngine) -> None:
    says(engine, PATCHED)
    body: dict[str, Any] = {"input": "Hi", "tools": [{"type": "web_search"}, PATCH, SPACE], "max_output_tokens": 400}
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["warning"] == '299 chairlift "ignored: tools[0]"'
    found = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in reply.json()["output"][1:]]
    assert found == [
        {"type": "custom_tool_call", "name": "apply_patch", "input": '*** Begin\n"é"'},
        {
            "type": "function_call",
            "namespace": "mcp__git",
            "name": "log",
            "arguments": '{"n": 1}',
            "status": "completed",
        },
        {"type": "custom_tool_call", "namespace": "mcp__git", "name": "commit", "input": "all"},
    ]
    prompt = prompt_of(engine)
    assert "web_search" not in prompt and "lark grammar" in prompt and "*** Begin" in prompt and "Of git." in prompt
    events = [
        json.loads(line[6:])
        for line in http.post("/v1/responses", json={**body, "stream": True}).text.split("\n")
        if line.startswith("data: ")
    ]
    inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    for event in (each for each in inputs if each["type"].endswith("done")):
        pieces = [each["delta"] for each in inputs if "delta" in each and each["item_id"] == event["item_id"]]
        assert "".join(pieces) == event["input"]
    assert [event["input"] for event in inputs if "input" in event] == ['*** Begin\n"é"', "all"]
    last = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in events[-1]["response"]["output"][1:]
    ]
    assert last == found


def test_a_grammar_is_held_to_or_named_where_the_format_has_none(engine: FakeEngine) -> None:
    body = {"input": "Hi", "tools": [PATCH], "max_output_tokens": 400}
    for parser, warning in (("auto", None), ("pythonic", '299 chairlift "ignored: tools[0].format"')):
        says(engine, "[apply_patch(input='x')]")
        with TestClient(make_app(make_state(engine, tool_call_parser=parser)), base_url="http://localhost") as http:
            reply = http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.headers.get("warning")) == (200, warning), reply.text
        held = engine.submitted[-1][1].structured_outputs
        assert (held is None) == (parser == "pythonic")
        if held is not None:
            assert "Begin" in str(held.structural_tag)


def test_a_call_whose_input_is_no_text_is_text(http: TestClient, engine: FakeEngine) -> None:
    says(engine, '<tool_call>\n{"name": "apply_patch", "arguments": {"input": 3}}\n</tool_call>')
    free = {"type": "custom", "name": "apply_patch"}
    reply = http.post("/v1/responses", json={"input": "Hi", "tools": [free], "max_output_tokens": 400}).json()
    assert [item["type"] for item in reply["output"]] == ["message"]
    assert '{"input": 3}' in reply["output"][0]["content"][0]["text"]
    assert reply["tool_call_errors"] == ["the input of apply_patch is no single text"]


def test_items_of_other_tools_become_calls_and_results_or_are_named(http: TestClient, engine: FakeEngine) -> None:
    shell = {"type": "local_shell_call", "call_id": "s", "id": "ls", "action": {"type": "exec", "command": ["ls"]}}
    given = [
        USER,
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
        shell,
        {"type": "local_shell_call_output", "id": "s", "output": "a.txt"},
        {"type": "function_call", "call_id": "l", "namespace": "mcp__git", "name": "log", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "l", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "later"}]},
    ]
    reply = http.post("/v1/responses", json={"input": given, "tools": [PATCH, SPACE]})
    assert reply.status_code == 200 and "input[1]" in reply.headers["warning"], reply.text
    prompt = prompt_of(engine)
    for text in ("*** é", "Done.", '"command": ["ls"]', "a.txt", '"mcp__git__log"', "none", '"later"'):
        assert text in prompt, text


def test_images_of_results_follow_in_a_message_of_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    given = [USER, LOOK, {**RAIN, "output": [image, {"type": "input_text", "text": "Seen."}]}]
    request, _ = parse(ResponsesRequest, {"input": given})
    messages = to_chat(request, [], names()).messages
    picture = {"type": "image_url", "image_url": {"url": image["image_url"]}}
    assert messages[2:] == [result("a", "Seen."), {"role": "user", "content": [picture]}]


def test_truncation_serves_a_conversation_that_is_too_long_to_encode(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.max_chars = 4000
    given = [{"role": "user", "content": f"{number} " + "x" * 300} for number in range(50)]
    said = [each for turn in given for each in (turn, {"role": "assistant", "content": "Yes."})]
    body = {"input": [*said, USER], "max_output_tokens": 500}
    assert http.post("/v1/responses", json=body).status_code == 400
    reply = http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert reply.status_code == 200 and reply.json()["usage"]["input_tokens"] > 1000, reply.text


def test_truncation_leaves_out_the_oldest_turns_only(http: TestClient, engine: FakeEngine) -> None:
    turns = [
        {"role": role, "content": f"{role}{number} " + "x" * 200}
        for number in range(8)
        for role in ("user", "assistant")
    ]
    given = [*turns[:5], {"role": "developer", "content": "Be kind."}, *turns[5:], {"role": "user", "content": "Last?"}]
    body = {"input": given, "instructions": "Rules.", "max_output_tokens": 500}
    assert http.post("/v1/responses", json=body).status_code == 400
    reply = http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert reply.status_code == 200 and reply.json()["truncation"] == "auto", reply.text
    prompt = prompt_of(engine)
    kept = [number for number in range(8) if f"user{number} " in prompt]
    assert kept and kept == list(range(kept[0], 8)) and kept[0] > 0
    assert all((f"assistant{number} " in prompt) == (number in kept) for number in range(8))
    assert "Rules." in prompt and "Be kind." in prompt and "Last?" in prompt
    assert reply.json()["usage"]["input_tokens"] + 500 <= 2048
    one_more = len(f"<|im_start|>user\nuser{kept[0] - 1} " + "x" * 200) * 2
    assert reply.json()["usage"]["input_tokens"] + 500 + one_more > 2048
    huge = {**body, "input": [*given[:-1], {"role": "user", "content": "y" * 3000}], "truncation": "auto"}
    assert http.post("/v1/responses", json=huge).status_code == 400


def test_reasoning_of_earlier_turns_is_left_out_where_the_request_says_so() -> None:
    given = [USER, THOUGHT, SAID, USER, THOUGHT, LOOK, RAIN]
    counts = {}
    for context in ("auto", "current_turn"):
        request, _ = parse(ResponsesRequest, {"input": given, "reasoning": {"context": context}})
        messages = to_chat(request, [], names()).messages
        counts[context] = ["reasoning_content" in each for each in messages if each["role"] == "assistant"]
    assert counts == {"auto": [True, True], "current_turn": [False, True]}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"input": "Hi"}, [ASKED]),
        ({"input": [USER]}, [ASKED]),
        ({"input": "Hi", "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, ASKED]),
        (
            {"instructions": "One.", "input": [{"role": "developer", "content": "Two."}, USER]},
            [{"role": "system", "content": "One.\n\nTwo."}, ASKED],
        ),
        (
            {"instructions": "One.", "input": [USER, {"role": "developer", "content": "Two."}]},
            [{"role": "system", "content": "One."}, ASKED, {"role": "developer", "content": "Two."}],
        ),
        (
            {"input": [{"role": "user", "content": [*USER["content"], *USER["content"]]}]},
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2}],
        ),
        (
            {"input": [USER, THOUGHT, SAID, LOOK, NOW, RAIN, NOON]},
            [
                ASKED,
                {
                    "role": "assistant",
                    "reasoning_content": "Hm.",
                    "content": "I look.",
                    "tool_calls": [call(LOOK), call(NOW)],
                },
                result("a", "Rain."),
                result("b", "Noon."),
            ],
        ),
        (
            {"input": [USER, LOOK, RAIN, NOW, NOON]},
            [
                ASKED,
                {"role": "assistant", "tool_calls": [call(LOOK)]},
                result("a", "Rain."),
                {"role": "assistant", "tool_calls": [call(NOW)]},
                result("b", "Noon."),
            ],
        ),
        (
            {"input": [USER, THOUGHT, LOOK, THOUGHT, NOW, RAIN, NOON]},
            [
                ASKED,
                {"role": "assistant", "reasoning_content": "Hm.\nHm.", "tool_calls": [call(LOOK), call(NOW)]},
                result("a", "Rain."),
                result("b", "Noon."),
            ],
        ),
        (
            {"input": [USER, SAID, SAID, THOUGHT, SAID, USER]},
            [
                ASKED,
                {"role": "assistant", "content": "I look."},
                {"role": "assistant", "content": "I look."},
                {"role": "assistant", "reasoning_content": "Hm.", "content": "I look."},
                ASKED,
            ],
        ),
        (
            {"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}, SAID]},
            [ASKED, {"role": "assistant", "reasoning_content": "Short.", "content": "I look."}],
        ),
        (
            {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "chairlift:Hm. é"}, SAID]},
            [ASKED, {"role": "assistant", "reasoning_content": "Hm. é", "content": "I look."}],
        ),
        (
            {"input": [USER, {**THOUGHT, "encrypted_content": "chairlift:Hm."}]},
            [ASKED, {"role": "assistant", "reasoning_content": "Hm."}],
        ),
        ({"input": [{"type": "reasoning", "summary": [], "content": None}, USER]}, [ASKED]),
    ],
)
def test_items_become_messages(given: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert to_chat(ResponsesRequest(**given), [], names()).messages == messages


def test_a_conversation_goes_behind_what_was_kept() -> None:
    chat = to_chat(ResponsesRequest(input=[NOON, RAIN], instructions="New."), [USER, LOOK, NOW], names())
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "tool"]


def test_tools_and_choices_are_one_level_deeper_in_a_chat() -> None:
    for given, choice in (
        ("auto", "auto"),
        ({"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        ),
    ):
        chat = to_chat(ResponsesRequest(input="Hi", tools=TOOLS, tool_choice=given), [], names())
        assert chat.tool_choice == choice
        assert chat.tools and chat.tools[1] == {"type": "function", "function": {"name": "now"}}


def picture(role: str = "user", **fields: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "input_image", **fields}]}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "1 to 4096"),
        ({"tools": [3]}, "tools[0]", "object"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "'web_search' are not served"),
        (
            {"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "tool_choice.type is 'web_search', but tools",
        ),
        (
            {
                "tools": [*TOOLS, {"type": "web_search"}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            },
            "tool_choice",
            "tool_choice.tools has no other tools",
        ),
        ({"tools": [{"type": "web_search"}, {"type": "custom", "name": "a b"}]}, "tools[1].name", "1 to 128"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools[0].format", "text or grammar"),
        (
            {"tools": [{**PATCH, "format": {**LARK, "definition": 'start: "(" start ")" | "x"'}}]},
            "tools[0].format",
            "tools[0].format cannot be enforced: line 1 of the lark grammar: the rule 'start' refers to itself",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "must be a list"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]},
            "tools[0].tools[0].name",
            "1 to 128",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "x"}]}, "input[0].input", "a text"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "'compaction'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "1 to 128"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, None, "tools[0].parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice", "'fly'"),
        ({"tools": TOOLS, "top_logprobs": 1}, "top_logprobs", "with tools"),
        ({"truncation": "most"}, "truncation", "auto or disabled"),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"background": True}, "background", "while the client waits"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "send the text in input"),
        ({"messages": [ASKED]}, "messages", "send input"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "/v1/chat/completions"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"guided_json": {}}, "guided_json", "/v1/chat/completions"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "JSON schema"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot be followed"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be one of none"),
        ({"reasoning": 3}, "reasoning", "object"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"metadata": {"a": 1}}, None, "metadata"),
        ({"input": [USER, {"type": "item_reference", "id": 7}]}, "input[1].id", "the id of an item"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type", "function_call_output"),
        ({"input": [{"type": "web_search_call"}]}, "input", "input is empty"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "list of parts"),
        ({"input": picture()}, "input[0].content[0].image_url", "must be a data URL"),
        ({"input": picture(file_id="x")}, "input[0].content[0].file_id", "files are not kept here"),
        ({"input": picture(role="assistant")}, "input[0].content[0]", "'input_image'"),
        (
            {"input": picture(image_url="data:image/png;base64,AA")},
            None,
            "only models of gemma3, idefics3, ",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a text"),
        ({"input": [LOOK, NOON]}, "input[1].call_id", "before it"),
        ({"input": [{**LOOK, "arguments": "["}]}, "input[0].arguments", "an object"),
        ({"input": [{**LOOK, "name": ""}]}, "input[0].name", "a text"),
        ({"input": [USER, LOOK, LOOK]}, "input[2].id", "input[2].id is 'a' again"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content",
            "cannot be read",
        ),
    ],
)
def test_errors_have_the_names_of_the_clients_fields(
    http: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str | None, words: str
) -> None:
    engine.prompts.follows_grammars = False
    error = refused(http, **fields)
    assert words in error["message"] and (param is None or error["param"] == param), error


def test_a_prompt_that_is_too_long_is_the_inputs(http: TestClient) -> None:
    error = refused(http, input="x" * 3000, max_output_tokens=3)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_input_tokens_are_those_of_the_prompt(client: openai.OpenAI, http: TestClient) -> None:
    first = create(client, tools=TOOLS, store=True)
    fields: dict[str, Any] = {"model": "fake", "input": "Rain?", "tools": TOOLS, "instructions": "Be brief."}
    for more in ({}, {"previous_response_id": first.id}):
        counted = client.responses.input_tokens.count(**fields, **more)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == create(client, **fields, **more).usage.input_tokens
    assert client.responses.input_tokens.count(**fields).input_tokens < counted.input_tokens
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.input_tokens.count()
    with pytest.raises(openai.BadRequestError, match="input is missing") as caught:
        client.responses.create()  # type: ignore[call-overload]
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")
    assert http.post("/v1/responses/compact", json={"model": "fake"}).status_code == 404


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_stored_response_is_gone_on_with_and_deleted(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = create(client, tools=TOOLS, store=True, instructions="Once only.")
    assert first.store and client.responses.retrieve(first.id).to_dict() == first.to_dict()
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."} for item in first.output[2:]
    ]
    says(engine, "It rains.")
    (*_, last) = create(client, previous_response_id=first.id, input=outputs, store=True, stream=True)
    second = last.response
    assert (second.output_text, second.previous_response_id) == ("It rains.", first.id)
    prompt = prompt_of(engine)
    assert "Once only." not in prompt and "I look." in prompt and prompt.count("Rain.") == 2
    third = create(client, previous_response_id=second.id, input="Really?", store=False)
    assert "It rains." in prompt_of(engine) and prompt_of(engine).count("Rain.") == 2
    client.responses.delete(first.id)
    for gone in (first.id, third.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError, match="store false"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError) as missing:
            create(client, previous_response_id=gone)
        assert missing.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(gone)
    assert client.responses.retrieve(second.id).output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match="are not kept"):
        client.responses.retrieve(second.id, stream=True)


def test_items_named_by_their_ids_are_those_of_the_stored_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    """The AI SDK sends the ids of reasoning and messages, and the calls themselves."""
    asked: dict[str, Any] = {"role": "user", "content": "Rain?"}
    first = create(client, input=[asked], tools=TOOLS)
    thought, message, call, other = first.output
    results = [{"type": "function_call_output", "call_id": each.call_id, "output": "Rain."} for each in (call, other)]
    calls = [each.to_dict() for each in (call, other)]
    named = [{"type": "item_reference", "id": thought.id}, {"id": message.id}]
    by_id = [asked, *named, *calls, *results]
    count = client.responses.input_tokens.count(input=by_id, model="fake", tools=TOOLS)
    second = create(client, input=by_id, tools=TOOLS)
    seen = prompt_of(engine)
    create(client, input=[asked, thought.to_dict(), message.to_dict(), *calls, *results], tools=TOOLS)
    assert seen == prompt_of(engine) and count.input_tokens == second.usage.input_tokens
    create(client, input=[*by_id, {"type": "item_reference", "id": second.output[1].id}, asked], tools=TOOLS)
    assert prompt_of(engine).count("I look.") == 2
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="send the item itself") as missing:
        create(client, input=by_id)
    assert (missing.value.param, missing.value.code) == ("input[1].id", "item_not_found")


def test_the_items_before_a_stored_answer_are_listed_in_pages(client: openai.OpenAI, engine: FakeEngine) -> None:
    asked: list[Any] = [{"role": "user", "content": "Hi"}, {"type": "message", "role": "assistant", "content": "Yes?"}]
    first = create(client, input=[*asked, {"role": "user", "content": "Rain?"}], tools=TOOLS, store=True)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."} for item in first.output[2:]
    ]
    says(engine, "It rains.")
    second = create(client, previous_response_id=first.id, input=outputs, store=True)
    of_first: list[Any] = list(client.responses.input_items.list(first.id, order="asc"))
    assert [(item.role, item.content[0].type, item.content[0].text) for item in of_first] == [
        ("user", "input_text", "Hi"),
        ("assistant", "output_text", "Yes?"),
        ("user", "input_text", "Rain?"),
    ]
    whole: list[Any] = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in whole] == [
        *["message"] * 3,
        *("reasoning", "message", "function_call", "function_call"),
        *["function_call_output"] * 2,
    ]
    assert [item.call_id for item in whole[5:7]] == [item.call_id for item in first.output[2:]]
    assert len({item.id for item in whole}) == len(whole) == 9
    pages = list(client.responses.input_items.list(second.id, limit=2))
    assert [item.to_dict() for item in pages] == [item.to_dict() for item in reversed(whole)]
    page: Any = client.responses.input_items.list(second.id, limit=8)
    assert (page.has_more, page.first_id, page.last_id) == (True, whole[-1].id, whole[1].id)
    with pytest.raises(openai.BadRequestError, match="after must be the id of an item"):
        client.responses.input_items.list(second.id, after="msg_unknown")
    with pytest.raises(openai.BadRequestError, match="order must be asc or desc"):
        client.responses.input_items.list(second.id, order="up")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="store false"):
        client.responses.input_items.list("resp_unknown")


def test_a_response_that_has_ended_cannot_be_cancelled(client: openai.OpenAI, http: TestClient) -> None:
    kept = create(client, store=True)
    with pytest.raises(openai.BadRequestError, match="only background responses can be cancelled") as refusal:
        client.responses.cancel(kept.id)
    assert refusal.value.param == "response_id"
    with pytest.raises(openai.NotFoundError, match="store false"):
        client.responses.cancel("resp_unknown")
    error = refused(http, background=True)
    assert error["param"] == "background" and "while the client waits" in error["message"]


def test_a_key_sees_its_own_responses_only(engine: FakeEngine) -> None:
    with TestClient(make_app(make_state(engine, api_key=KEYS)), base_url="http://localhost") as http:
        one, other = official(http, KEYS[0]), official(http, KEYS[1])
        kept = create(one, store=True)
        assert one.responses.retrieve(kept.id).id == kept.id
        for call_it in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                call_it(kept.id)
        with pytest.raises(openai.NotFoundError):
            create(other, previous_response_id=kept.id)
        with pytest.raises(openai.NotFoundError):
            create(other, input=[{"type": "item_reference", "id": kept.output[0].id}])
        assert one.responses.retrieve(kept.id).id == kept.id


def test_a_server_that_keeps_nothing_says_so(engine: FakeEngine) -> None:
    with TestClient(make_app(make_state(engine, max_stored_responses=0)), base_url="http://localhost") as http:
        error = refused(http, store=True)
        assert error["param"] == "store" and "--max-stored-responses 0" in error["message"]
        for body in ({}, {"store": False}):
            assert http.post("/v1/responses", json={"input": "Hi", **body}).json()["store"] is False


def test_the_store_is_bounded_and_the_largest_key_gives_way() -> None:
    store, kept = ResponseStore(), StoredResponse(b"x" * 40, b"y" * 10)
    named = [StoredResponse(kept.body, kept.items, 0, (f"item{index}",)) for index in range(4)]
    for index, each in enumerate(named):
        assert store.put("a", f"a{index}", each, 4, 1000)
    assert store.with_item("a", "item0") is named[0] and store.with_item("b", "item0") is None
    assert store.put("b", "b0", kept, 4, 1000)
    assert [store.get("a", f"a{index}") is named[index] for index in range(4)] == [True, False, True, True]
    assert store.get("b", "b0") is kept and store.get("a", "b0") is None
    assert store.with_item("a", "item1") is None
    assert (store.num_stored, store.num_bytes) == (4, 200)
    assert store.put("b", "b1", kept, 100, 120)
    assert (store.num_stored, store.num_bytes) == (2, 100)
    assert not store.put("b", "b2", kept, 100, 49) and not store.put("b", "b2", kept, 0, 1000)
    assert not store.delete("a", "b1") and not store.delete("nobody", "b1")
    for holder, name in [(holder, f"{holder}{i}") for holder in "ab" for i in range(4)]:
        store.delete(holder, name)
    assert (store.num_stored, store.num_bytes, store._stored, store._bytes, store._of_items) == (0, 0, {}, {}, {})


# --- an agent ---------------------------------------------------------------------------------------------------------


def test_an_agent_that_keeps_its_history_itself_comes_to_its_end() -> None:
    """Stateless: streams with tools, whose items go back as they came, until there are no calls any more."""
    steps = (
        "<think>\nWhich files?\n</think>\n\n"
        '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>',
        'I read it.\n<tool_call>\n{"name": "shell", "arguments": {"command": ["cat", "a.txt"]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "shell", "arguments": {"command": ["wc", "a.txt"]}}\n</tool_call>',
        "<think>\nThat is all.\n</think>\n\nThe file says hello.",
    )
    tools: list[Any] = [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
            },
        }
    ]
    results = {"ls": "a.txt", "cat": "hello", "wc": "1 1 6"}
    asked: dict[str, Any] = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "stream": True,
        "max_output_tokens": 400,
    }

    async def test() -> None:
        engine = FakeEngine()
        async with serving(make_app(make_state(engine))) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
                history: list[Any] = [
                    {"role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
                    {"role": "user", "content": [{"type": "input_text", "text": "What does the file say?"}]},
                ]
                done: list[Any] = []
                for text in steps:
                    says(engine, text)
                    done = []
                    async for event in await client.responses.create(input=history, **asked):
                        if event.type == "response.output_item.done":
                            done.append(event.item)
                    assert event.type == "response.completed" and event.response.usage.input_tokens > 0
                    history += [item.to_dict() for item in done]
                    for item in done:
                        if item.type == "function_call":
                            output = results[json.loads(item.arguments)["command"][0]]
                            history.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
                assert [item.type for item in done] == ["reasoning", "message"]
                assert done[-1].content[0].text == "The file says hello."
        prompt = prompt_of(engine)
        assert (
            prompt.index("Sandbox: none.") < prompt.index("What does") < prompt.index('["ls"]') < prompt.index("a.txt")
        )
        assert "I read it." in prompt and prompt.index("hello") < prompt.index("1 1 6")
        assert prompt.count("<|im_start|>system") == 1

    run(test())


def test_a_stored_custom_call_is_continued_and_listed(http: TestClient, engine: FakeEngine) -> None:
    says(engine, PATCHED)
    body = {"tools": [PATCH, SPACE], "max_output_tokens": 400, "store": True}
    first = http.post("/v1/responses", json={"input": "Hi", **body}).json()
    answers = [
        {"type": f"{item['type'].removesuffix('_call')}_call_output", "call_id": item["call_id"], "output": f"r{index}"}
        for index, item in enumerate(first["output"])
        if "call_id" in item
    ]
    assert len(answers) == 3
    says(engine, "Done.")
    second = http.post("/v1/responses", json={"input": answers, "previous_response_id": first["id"], **body})
    assert second.status_code == 200, second.text
    prompt = prompt_of(engine)
    assert "mcp__git__log" in prompt and '"mcp__git__commit"' in prompt and "*** Begin" in prompt
    assert all(answer["output"] in prompt for answer in answers)
    listed = http.get(f"/v1/responses/{second.json()['id']}/input_items?order=asc").json()["data"]
    kinds = [item["type"] for item in listed]
    assert kinds[-6:] == ["custom_tool_call", "function_call", "custom_tool_call", *(each["type"] for each in answers)]
    assert listed[-5]["namespace"] == "mcp__git" and listed[-6]["input"] == '*** Begin\n"é"'
