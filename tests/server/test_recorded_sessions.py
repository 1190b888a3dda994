"""Whole coding tasks of Claude Code and Codex, body by body, with templates as strict as Qwen3.5's and Mistral's."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import INFO, FakeEngine, byte_tokenizer, make_state
from tests.server.recorded import claude_code, codex
from tests.server.test_messages import events_of, put_together
from tests.server.test_sdk_shapes import checked
from tests.server.test_tools import says

# As in Qwen3.5: instructions only at the beginning, no other roles, at least one question of the user, arguments as an
# object, reasoning only after the last question.
QWEN = """{%- if not messages %}{{ raise_exception('no messages') }}{% endif -%}
{%- macro text(content) -%}{%- if content is string %}{{ content }}{% elif content is none or content is undefined %}
{%- else %}{% for part in content %}{% if 'text' in part %}{{ part.text }}{% else %}
{{- raise_exception('unexpected part') }}{% endif %}{% endfor %}{% endif %}{%- endmacro -%}
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<tool_call><function=name><parameter=key>value</parameter></function></tool_call>
{{ text(messages[0].content) if messages[0].role == 'system' }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ text(messages[0].content) }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif -%}
{%- for m in messages %}
{%- if m.role == 'system' %}{% if not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ text(m.content) }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ text(m.content) }}
{%- for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for key, value in c.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ text(m.content) }}
</tool_response><|im_end|>
{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# As in Mistral Small 3.2 and Devstral: turns that alternate, instructions first, ids of nine letters and digits.
MISTRAL = """{%- macro text(content) -%}{%- if content is string %}{{ content }}{% elif content %}
{%- for part in content %}{% if part.type == 'text' %}{{ part.text }}{% else %}
{{- raise_exception('only texts') }}{% endif %}{% endfor %}{% endif %}{%- endmacro -%}
{%- if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ text(messages[0].content) }}[/SYSTEM_PROMPT]
{%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif -%}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- set ns = namespace(turn=0) -%}
{%- for m in loop_messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user and assistant roles except for tool calls and results') }}
{%- endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}[INST]{{ text(m.content) }}[/INST]
{%- elif m.role == 'assistant' %}
{%- if not m.content and not m.tool_calls %}{{ raise_exception('neither content nor tool calls') }}{% endif %}
{{- text(m.content) }}
{%- for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}</s>
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' }}{{ text(m.content) }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user, system, assistant and tool roles are supported!') }}{% endif %}
{%- endfor -%}"""
TEMPLATES = {"qwen": QWEN, "mistral": MISTRAL}
CALLS = {"claude_code": ("Bash", "command", "make"), "codex": ("exec_command", "cmd", "make")}
PATCHES = ("apply_patch", "input", "*** Begin Patch\n*** Add File: a\n+größe\n*** End Patch")


def answer(call: tuple[str, str, str], template: str) -> str:
    name, key, value = call
    if template == "mistral":
        return f"I build it. größe[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{json.dumps({key: value})}"
    thought = "<think>\nThe build comes next.\n</think>\n\n"
    written = f"<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    return f"{thought}I build it. größe\n{written}"


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.info = dataclasses.replace(INFO, max_model_len=100_000, capacity_tokens=200_000, pool_tokens=200_000)
    made.prompts.follows_grammars = True
    made.says_whole_script = True
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def post(http: TestClient, client: Any, body: dict[str, Any]) -> Any:
    return http.post(client.PATH, json=body, headers=client.HEADERS)


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[-1][0], False)


def assert_nothing_is_lost(prompt: str, told: list[str], moved: list[str]) -> None:
    """Every text of the history is in the prompt, as often as the client sent it, and in its order. Texts of ``moved``
    may be anywhere."""
    at = 0
    for text in told:
        found = [place for form in forms(text) if (place := prompt.find(form, at)) >= 0]
        assert found, f"{text!r} is not in the prompt after {prompt[max(0, at - 80) : at]!r}"
        at = min(found) + 1
    sent = [*told, *moved]
    for text in sent:
        if " " in text:  # names and numbers are in other texts, too
            expected = sum(text in other for other in sent)
            assert sum(prompt.count(form) for form in forms(text)) == expected, text


def forms(text: str) -> set[str]:
    """A text as it is, and as a JSON string has it."""
    return {text.strip("\n"), json.dumps(text, ensure_ascii=False)[1:-1].removesuffix("\\n")}


def reply_of(http: TestClient, engine: FakeEngine, client: Any, body: dict[str, Any]) -> tuple[Any, Any]:
    """The whole reply, and the events of the streamed one, to the same prompt."""
    whole = post(http, client, body)
    streamed = post(http, client, {**body, "stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    assert streamed.headers.get("warning") == whole.headers.get("warning")
    assert engine.submitted[-1][0] == engine.submitted[-2][0]
    return whole, events_of(streamed.text)


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream brings, in the order of events that OpenAI's client expects."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    pieces: dict[str, str] = {}
    is_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            is_open = True
            items.append(event["item"])
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            is_open = False
            items[-1] = event["item"]
            assert pieces.pop(event["item"]["id"]) == text_of(event["item"])
        elif kind.endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
        elif kind.endswith((".done", "part.added")):
            assert event["item_id"] == items[-1]["id"]
    assert not is_open and not pieces
    response: dict[str, Any] = events[-1]["response"]
    assert response["output"] == items
    return response


def text_of(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", item.get("input")))


def plain(value: Any) -> Any:
    """A reply without what differs in every call."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "call_id", "created_at", "completed_at")
    return {key: plain(each) for key, each in value.items() if key not in changing}


def left_out(client: Any, body: dict[str, Any], template: str) -> set[str]:
    """Paths of what has no effect, all of which the header must name."""
    if client is codex:
        paths = {"client_metadata", "text.verbosity"}
        paths |= {"reasoning.summary", "reasoning.effort"} if body["reasoning"] else set()
        kinds = {f"tools[{at}]": tool["type"] for at, tool in enumerate(body["tools"])}
        paths |= {path for path, kind in kinds.items() if kind in ("web_search", "tool_search", "image_generation")}
        return paths | {f"input[{at}]" for at, item in enumerate(body["input"]) if item["type"] == "web_search_call"}
    paths = {"metadata.user_id"}
    paths |= {"diagnostics", "output_config.effort"} if "diagnostics" in body else set()
    thinking = body.get("thinking", {"type": "disabled"})
    paths |= {"thinking"} if template == "mistral" and thinking["type"] != "disabled" else set()
    paths |= {"thinking.budget_tokens"} if "budget_tokens" in thinking else set()
    for at, message in enumerate(body["messages"]):
        kinds = {index: block["type"] for index, block in enumerate(message["content"]) if isinstance(block, dict)}
        paths |= {f"messages[{at}].content[{index}]" for index in kinds if kinds[index] == "redacted_thinking"}
    return paths


def warned(reply: Any) -> set[str]:
    told = reply.headers.get("warning", "").removeprefix('299 chairlift "ignored: ').removesuffix('"')
    return set(told.split(", ")) - {""}


CASES = [
    pytest.param(client, name, template, id=f"{client.__name__.rpartition('.')[2]}, {name}, {template}")
    for client, template in itertools.product((claude_code, codex), TEMPLATES)
    for name in client.BODIES
]


@pytest.mark.parametrize(("client", "name", "template"), CASES)
def test_a_session_of_an_agent_loses_nothing(
    http: TestClient, engine: FakeEngine, client: Any, name: str, template: str
) -> None:
    body = client.BODIES[name]
    says(engine, answer(call_of(client, name), template), TEMPLATES[template])
    whole, events = reply_of(http, engine, client, body)
    assert_nothing_is_lost(prompt_of(engine), *client.texts(body))
    assert warned(whole) == left_out(client, body, template)
    build = put_together if client is claude_code else built
    assert plain(build(events)) == plain(whole.json())


def call_of(client: Any, name: str) -> tuple[str, str, str]:
    return PATCHES if client is codex and name == "turn 3" else CALLS[client.__name__.rpartition(".")[2]]


def test_a_patch_is_what_openais_types_allow(http: TestClient, engine: FakeEngine) -> None:
    says(engine, answer(PATCHES, "qwen"), QWEN)
    whole, events = reply_of(http, engine, codex, codex.BODIES["turn 3"])
    checked("openai.types.responses:Response", json.dumps({**whole.json(), "tools": []}))  # the tools are the client's
    assert any(event["type"] == "response.custom_tool_call_input.done" for event in events)
    for event in events:
        if "response" not in event:
            checked("openai.types.responses:ResponseStreamEvent", json.dumps(event))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("client", [claude_code, codex])
def test_a_session_gets_the_call_that_the_model_wrote(
    http: TestClient, engine: FakeEngine, client: Any, template: str
) -> None:
    call = call_of(client, "turn 3")
    says(engine, answer(call, template), TEMPLATES[template])
    reply = post(http, client, client.BODIES["turn 3"]).json()
    found = reply["content"][-1] if client is claude_code else reply["output"][-1]
    given = {call[1]: found["input"]} if client is codex else found["input"]
    assert (found["name"], given) == (call[0], {call[1]: call[2]})


def test_thoughts_of_the_current_turn_reach_the_model(http: TestClient, engine: FakeEngine) -> None:
    for client, name, thought in (
        (claude_code, "turn 3", "An edit with both lines."),
        (codex, "turn 2", "The plan comes before the patch."),
    ):
        says(engine, "Yes.", QWEN)
        post(http, client, client.BODIES[name])
        assert f"<think>\n{thought}\n</think>" in prompt_of(engine)


def test_the_billing_header_of_claude_code_changes_no_prompt(http: TestClient, engine: FakeEngine) -> None:
    says(engine, "Yes.", QWEN)
    body = claude_code.BODIES["turn 1"]
    post(http, claude_code, body)
    assert "cch=" in body["system"][0]["text"] and "cch=" not in prompt_of(engine)


@pytest.mark.parametrize("template", TEMPLATES)
def test_counted_tokens_are_those_of_the_prompt(http: TestClient, engine: FakeEngine, template: str) -> None:
    says(engine, "Yes.", TEMPLATES[template])
    path = "/v1/messages/count_tokens?beta=true"
    for body in claude_code.COUNTS:
        counted = http.post(path, json=body, headers=claude_code.HEADERS)
        assert counted.status_code == 200, counted.text
        usage = post(http, claude_code, {**body, "max_tokens": 9}).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_another_server_has_is_refused_by_its_name(
    http: TestClient, engine: FakeEngine, stream: bool
) -> None:
    says(engine, "Yes.", QWEN)
    for client in (claude_code, codex):
        for body, field in client.REFUSED.values():
            reply = post(http, client, {**body, "stream": stream})
            assert reply.status_code == 400, reply.text
            assert field in reply.json()["error"]["message"]
