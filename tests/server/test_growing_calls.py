"""Calls that a grammar guarantees are sent while they grow.

In every protocol, a stream equals the whole answer wherever the answer ends, and the official clients put both together
to the same calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jiter
import openai
import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import says

PLACE = {"type": "string"}
DEEP = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "number"}}}}
LOOK = {"type": "object", "properties": {"place": PLACE, "deep": DEEP}, "required": ["place"]}
NONE: dict[str, Any] = {"type": "object", "properties": {}}
GIVEN = ('{"place": "Ulm \\"é😀\\\\\\n {[", "deep": {"x": [1, -2.5]}}', "{}")
CALLS = (
    f'<tool_call>\n{{"name": "look", "arguments": {GIVEN[0]}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "now", "arguments": {GIVEN[1]}}}\n</tool_call>'
)
PATCH = '*** Begin\n+ "é😀" \\n\n'
CUSTOM = (
    f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": PATCH}, ensure_ascii=False)}}}\n</tool_call>'
)
Told = list[tuple[str, str]]
"""(name, arguments) of each call."""


def body(path: str, *, choice: str = "required", strict: bool = False, **fields: Any) -> dict[str, Any]:
    """A request with two functions, in the form of the protocol."""
    tools: list[dict[str, Any]] = [{"name": "look", "schema": LOOK}, {"name": "now", "schema": NONE}]
    if path == "/v1/messages":
        made: list[Any] = [{"name": each["name"], "input_schema": each["schema"], "strict": strict} for each in tools]
        kinds: dict[str, Any] = {"required": {"type": "any"}, "named": {"type": "tool", "name": "look"}}
        how = {"type": "auto"} if choice == "auto" else kinds[choice]
        return {"messages": [{"role": "user", "content": "Hi"}], "tools": made, "tool_choice": how, **fields}
    functions = [{"name": each["name"], "parameters": each["schema"], "strict": strict} for each in tools]
    if path == "/v1/responses":
        made = [{"type": "function", **each} for each in functions]
        named: Any = {"type": "function", "name": "look"}
        tokens = {"max_output_tokens": fields.pop("max_tokens")}
        how = {"named": named, "allowed": {"type": "allowed_tools", "mode": "required", "tools": [named]}}.get(choice)
        return {"input": "Hi", "tools": made, "tool_choice": how or choice, **tokens, **fields}
    made = [{"type": "function", "function": each} for each in functions]
    named = {"type": "function", "function": {"name": "look"}}
    how = {
        "named": named,
        "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
    }.get(choice)
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": made,
        "tool_choice": how or choice,
        **fields,
    }


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.prompts.follows_grammars = True
    says(made, CALLS)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def whole_of(path: str, reply: dict[str, Any]) -> tuple[Told, str, Any, Any]:
    """(calls, content, why it ended, errors) of a whole answer. The arguments of messages are JSON texts, too."""
    if path == "/v1/chat/completions":
        (choice,) = reply["choices"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", ())]
        text = choice["message"]["content"] or ""
        return calls, text, choice["finish_reason"], choice.get("tool_call_errors")
    if path == "/v1/responses":
        items = [item for item in reply["output"] if item["type"] == "function_call"]
        calls = [(item["name"], item["arguments"]) for item in items]
        text = "".join(part["text"] for item in reply["output"] for part in item.get("content", ()))
        ended = (reply["status"], [item["status"] for item in reply["output"]])
        return calls, text, ended, reply.get("tool_call_errors")
    calls = [
        (b["name"], json.dumps(b["input"], ensure_ascii=False)) for b in reply["content"] if b["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return calls, text, reply["stop_reason"], reply.get("tool_call_errors")


def events_of(reply: Any) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]


def streamed_chat(events: list[dict[str, Any]]) -> tuple[Told, str, Any, Any]:
    calls: list[list[str]] = []
    text = ""
    for choice in (choice for event in events for choice in event["choices"]):
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                assert call["function"] == {"name": call["function"]["name"], "arguments": ""}
                calls.append([call["function"]["name"], ""])
            else:
                assert call["index"] == len(calls) - 1 and list(call["function"]) == ["arguments"]
                calls[-1][1] += call["function"]["arguments"]
    last = events[-1]["choices"][0]
    return [(name, given) for name, given in calls], text, last["finish_reason"], last.get("tool_call_errors")


def streamed_items(events: list[dict[str, Any]]) -> tuple[Told, str, Any, Any]:
    calls: list[list[str]] = []
    text = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added" and event["item"]["type"] == "function_call":
            assert (event["item"]["arguments"], event["item"]["status"]) == ("", "in_progress")
            calls.append([event["item"]["name"], ""])
        elif kind == "function_call_arguments.delta":
            calls[-1][1] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert [event["name"], event["arguments"]] == calls[-1]
        elif kind == "output_text.delta":
            text += event["delta"]
    final = events[-1]["response"]
    assert [(item["name"], item["arguments"]) for item in final["output"] if item["type"] == "function_call"] == [
        (name, given) for name, given in calls
    ]
    ended = (final["status"], [item["status"] for item in final["output"]])
    return [(name, given) for name, given in calls], text, ended, final.get("tool_call_errors")


def streamed_blocks(events: list[dict[str, Any]]) -> tuple[Told, str, Any, Any]:
    calls: list[list[str]] = []
    text = ""
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            assert event["content_block"]["input"] == {}
            calls.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            calls[-1:] = [[calls[-1][0], calls[-1][1] + event["delta"].get("partial_json", "")]] if calls else []
            text += event["delta"].get("text", "")
    (last,) = [event for event in events if event["type"] == "message_delta"]
    return [(name, given) for name, given in calls], text, last["delta"]["stop_reason"], last.get("tool_call_errors")


STREAMED = dict(zip(PATHS, (streamed_chat, streamed_items, streamed_blocks), strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("choice", ["required", "named", "allowed", "strict"])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_wherever_an_answer_ends_its_stream_equals_the_whole(
    http: TestClient, engine: FakeEngine, path: str, choice: str, step: int
) -> None:
    if (path, choice) == ("/v1/messages", "allowed"):
        pytest.skip("the protocol has no allowed tools")
    text = f"I look. {CALLS}" if choice == "strict" else CALLS.partition("\n<tool_call>")[0]
    says(engine, text)
    how: dict[str, Any] = {"choice": "auto", "strict": True} if choice == "strict" else {"choice": choice}
    num_tokens = len(text.encode()) + 1
    first = text.encode().index(b'"arguments": ') + len(b'"arguments": ')
    before: list[str] = []
    for tokens in (*range(1, first, step), *range(first, num_tokens, step), num_tokens):
        asked = body(path, max_tokens=tokens, **how)
        whole = whole_of(path, http.post(path, json=asked).json())
        sent = STREAMED[path](events_of(http.post(path, json={**asked, "stream": True})))
        if path == "/v1/messages":
            given = [(name, partial_json(arguments)) for name, arguments in sent[0]]
            assert [(name, json.loads(arguments)) for name, arguments in whole[0]] == given
        else:
            assert sent[0] == whole[0]
        assert sent[1:] == whole[1:]
        told = [arguments.rstrip("\ufffd") for _, arguments in sent[0]]  # an answer may end inside a letter
        assert len(told) >= len(before) and all(map(str.startswith, told, before)), "something was taken back"
        if tokens >= first:
            assert told and "place" not in whole[1], "a call that has begun became text"
        before = told
        ended = "length" if path == "/v1/chat/completions" else "max_tokens" if path == "/v1/messages" else "incomplete"
        if tokens < num_tokens:
            assert ended in (whole[2], whole[2][0])
        if path == "/v1/responses" and told and not whole[1].replace("I look.", ""):
            is_cut = told[-1] not in GIVEN
            assert whole[2][1][-1] == ("incomplete" if is_cut else "completed")
    assert before == list(GIVEN)[: len(before)] and len(before) == (2 if choice == "strict" else 1)
    assert whole[3] is None


def partial_json(text: str) -> Any:
    return jiter.from_json(text.encode() or b"{}", partial_mode=True)


@pytest.mark.parametrize("path", PATHS)
def test_the_arguments_are_sent_in_pieces(http: TestClient, path: str) -> None:
    events = events_of(http.post(path, json=body(path, max_tokens=400, stream=True)))
    texts = [json.dumps(event, ensure_ascii=False) for event in events]
    pieces = [text for text in texts if "arguments.delta" in text or "partial_json" in text or '{"arguments": ' in text]
    assert len(pieces) > 5, "outputs that wait are merged, so fewer events than tokens are possible"


@pytest.mark.parametrize("path", PATHS)
def test_calls_that_no_grammar_holds_are_sent_when_they_are_whole(http: TestClient, path: str) -> None:
    events = events_of(http.post(path, json=body(path, choice="auto", max_tokens=400, stream=True)))
    calls, text, _, errors = STREAMED[path](events)
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("look", json.loads(GIVEN[0])),
        ("now", {}),
    ]
    assert not text and not errors
    pieces = [
        event for event in events if "arguments.delta" in json.dumps(event) or "partial_json" in json.dumps(event)
    ]
    assert len(pieces) <= 2
    whole = whole_of(path, http.post(path, json=body(path, choice="auto", max_tokens=90)).json())
    assert not whole[0] and "<tool_call>" in whole[1] and whole[3] == ["the answer ends inside the call"]


def test_several_choices_with_logprobs_grow_side_by_side(http: TestClient, engine: FakeEngine) -> None:
    asked = body("/v1/chat/completions", max_tokens=400, n=2, logprobs=True, top_logprobs=1)
    events = events_of(http.post("/v1/chat/completions", json={**asked, "stream": True}))
    for index in range(2):
        mine = [{"choices": [c for c in event["choices"] if c["index"] == index]} for event in events]
        mine = [event for event in mine if event["choices"]]
        calls, text, reason, _ = streamed_chat(mine)
        assert [given for _, given in calls] == list(GIVEN) and (text, reason) == ("", "tool_calls")
        entries = [entry for event in mine for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert len(entries) == len(engine.script)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stop_string_cuts_a_call(http: TestClient, path: str) -> None:
    stop = {"stop": "deep"} if path == "/v1/chat/completions" else {"stop_sequences": ["deep"]}
    asked = body(path, max_tokens=400, **stop)
    calls, text, reason, errors = whole_of(path, http.post(path, json=asked).json())
    sent = STREAMED[path](events_of(http.post(path, json={**asked, "stream": True})))
    assert sent[1:] == (text, reason, errors) and not text
    assert reason == ("stop" if path == "/v1/chat/completions" else "stop_sequence")
    assert errors == ["the answer ends inside the call"]
    assert sent[0] == [("look", '{"place": "Ulm \\"é😀\\\\\\n {[", "')]
    if path == "/v1/chat/completions":
        assert calls == sent[0]
    else:
        assert calls == [("look", json.dumps({"place": 'Ulm "é😀\\\n {['}, ensure_ascii=False))]


def test_one_call_is_sent_where_calls_are_not_parallel(http: TestClient) -> None:
    asked = body("/v1/chat/completions", max_tokens=400, parallel_tool_calls=False)
    whole = whole_of("/v1/chat/completions", http.post("/v1/chat/completions", json=asked).json())
    sent = streamed_chat(events_of(http.post("/v1/chat/completions", json={**asked, "stream": True})))
    assert sent == whole and sent[0] == [("look", GIVEN[0])]


# --- custom tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_the_text_of_a_custom_tool_is_sent_as_it_grows(http: TestClient, engine: FakeEngine, path: str) -> None:
    says(engine, CUSTOM)
    chat = path == "/v1/chat/completions"
    tool = {"type": "custom", "custom": {"name": "patch"}} if chat else {"type": "custom", "name": "patch"}
    first = CUSTOM.encode().index(b'"arguments": ') + len(b'"arguments": ')
    for tokens in (*range(first, len(CUSTOM.encode()), 5), len(CUSTOM.encode()) + 1):
        limit = {"max_tokens": tokens} if chat else {"max_output_tokens": tokens}
        asked = {"tools": [tool], "tool_choice": "required", **limit}
        asked |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"input": "Hi"}
        whole = http.post(path, json=asked).json()
        events = events_of(http.post(path, json={**asked, "stream": True}))
        if chat:
            (call,) = whole["choices"][0]["message"]["tool_calls"]
            text = call["custom"]["input"]
            calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
            assert [call["type"] for call in calls if "id" in call] == ["custom"]
            sent = "".join(call["custom"]["input"] for call in calls)
        else:
            text = whole["output"][0]["input"]
            deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
            sent = "".join(event["delta"] for event in deltas)
            (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
            assert done["input"] == sent
        assert sent == text and PATCH.startswith(text.rstrip("\ufffd"))
    assert text == PATCH


# --- the official clients -------------------------------------------------------------------------------------------


def openai_client(http: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=http, max_retries=0)


def test_openais_helpers_put_growing_calls_together(http: TestClient) -> None:
    client = openai_client(http)
    for tokens in (400, 110):
        asked: Any = body("/v1/chat/completions", max_tokens=tokens, model="fake")
        with client.chat.completions.stream(**asked) as stream:
            seen = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            message = stream.current_completion_snapshot.choices[0].message
        whole = client.chat.completions.create(**asked).choices[0].message
        assert [call.function.arguments for call in message.tool_calls or ()] == [
            call.function.arguments for call in whole.tool_calls or ()
        ]
        assert len(seen) > 3
        told: Any = body("/v1/responses", max_tokens=tokens, model="fake")
        with client.responses.stream(**told) as responses:
            events: list[Any] = list(responses)
        final = events[-1].response
        created: Any = client.responses.create(**told)
        given = [item.arguments for item in created.output if item.type == "function_call"]
        assert [item.arguments for item in final.output if item.type == "function_call"] == given
        assert final.status == ("completed" if tokens == 400 else "incomplete")
        assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 3


def test_anthropics_helper_ends_with_the_input_of_the_whole_answer(http: TestClient) -> None:
    made: Any = http
    client = anthropic.Anthropic(base_url="http://localhost", api_key="unused", http_client=made, max_retries=0)
    for tokens in (*range(60, len(CALLS.encode()), 11), len(CALLS.encode()) + 1):
        asked: Any = body("/v1/messages", max_tokens=tokens, model="fake")
        with client.messages.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
        whole = client.messages.create(**asked)
        assert final.stop_reason == whole.stop_reason
        assert [(block.name, block.input) for block in final.content if block.type == "tool_use"] == [
            (block.name, block.input) for block in whole.content if block.type == "tool_use"
        ]
