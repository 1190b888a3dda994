"""Tools and reasoning in chat completions, as the official client uses them, against a scripted model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import EOS, INFO, FakeEngine, byte_tokenizer, make_state
from tests.server.harness import run, serving

HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Weather",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
CALLS = (
    '<think>\nHm. é\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"place": "Ulm 😀"}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def says(engine: FakeEngine, text: str, template: str = HERMES) -> None:
    """Let every answer be this text, from a model with this template."""
    own = byte_tokenizer()
    engine.prompts.tokenizer = Tokenizer(own.backend, own.named_tokens, template)
    engine.script = [*own.encode(text, False), EOS]


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


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    made: Any = http
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=made, max_retries=0)


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "fake", "messages": ASK, "tools": TOOLS, "max_tokens": 400, **fields}
    )


def refused(http: TestClient, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, **fields})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def test_an_answer_has_its_calls_and_its_reasoning(client: openai.OpenAI) -> None:
    reply = create(client, n=2)
    for choice in reply.choices:
        message = choice.message
        assert (message.content, message.reasoning_content, message.reasoning) == ("I look.", "Hm. é", "Hm. é")
        first, second = message.tool_calls
        assert (first.type, first.function.name) == ("function", "look")
        assert json.loads(first.function.arguments) == {"place": "Ulm 😀"}
        assert (second.function.name, second.function.arguments) == ("now", "{}")
        assert first.id != second.id and len(first.id) == 9 and first.id.isalnum()
        assert choice.finish_reason == "tool_calls"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 2 * len("<think>\nHm. é\n</think>".encode())


def test_a_stream_brings_the_same_calls_and_reasoning(client: openai.OpenAI) -> None:
    whole = create(client, seed=1)
    chunks = list(create(client, seed=1, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm. é"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "look", ""),
        (0, None, '{"place": "Ulm 😀"}'),
        (1, "now", ""),
        (1, None, "{}"),
    ]
    assert [call.id is None for call in calls] == [False, True, False, True]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage


def test_the_clients_accumulator_reads_several_streamed_answers(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.chat.completions.stream(
        model="fake", messages=ASK, tools=TOOLS, max_tokens=400, n=3, logprobs=True
    ) as stream:
        reply = stream.get_final_completion()
    for choice in reply.choices:
        assert [call.function.name for call in choice.message.tool_calls or ()] == ["look", "now"]
        assert choice.message.content == "I look."
        assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == len(engine.script)


def test_an_agent_goes_round_over_http() -> None:
    async def test() -> None:
        engine = FakeEngine()
        says(engine, '<tool_call>\n{"name": "look", "arguments": {"place": "Ulm"}}\n</tool_call>')
        async with serving(make_app(make_state(engine))) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
                messages = list(ASK)
                asked: dict[str, Any] = {"model": "fake", "tools": TOOLS, "max_tokens": 200}
                reply = await client.chat.completions.create(messages=messages, **asked)
                message = reply.choices[0].message
                assert message.content is None and message.tool_calls
                messages.append(message.model_dump())
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."})
                says(engine, "It rains.")
                reply = await client.chat.completions.create(messages=messages, **asked)
                assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("It rains.", "stop")
        prompt = byte_tokenizer().decode(engine.submitted[1][0], False)
        assert '"name": "look", "arguments": {"place": "Ulm"}' in prompt and "Rain." in prompt
        assert '"description": "Weather"' in prompt

    run(test())


def test_a_broken_call_is_content_with_a_reason(client: openai.OpenAI, engine: FakeEngine) -> None:
    text = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    says(engine, text)
    (choice,) = create(client).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert choice.tool_call_errors == ["'fly' is none of the tools (look, now)"]
    chunks = list(create(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].tool_call_errors == choice.tool_call_errors


def test_an_answer_that_is_cut_off_says_length(client: openai.OpenAI) -> None:
    (choice,) = create(client, max_tokens=len(CALLS.encode()) - 30).choices
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1
    assert choice.message.content.startswith("I look.<tool_call>")
    assert choice.tool_call_errors == ["the answer ends inside the call"]


def test_a_stop_string_ends_an_answer_with_calls_too(client: openai.OpenAI) -> None:
    (choice,) = create(client, stop='\n<tool_call>\n{"name": "now"').choices
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)


def test_without_tools_or_with_choice_none_a_call_is_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": openai.omit}, {"tools": []}):
        (choice,) = create(client, **fields).choices
        assert choice.message.tool_calls is None and "<tool_call>" in choice.message.content
        assert choice.finish_reason == "stop"
        assert "Weather" not in byte_tokenizer().decode(engine.submitted[-1][0], False)


def test_only_one_call_is_returned_without_parallel_tool_calls(client: openai.OpenAI) -> None:
    (choice,) = create(client, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["look"]
    assert "1 more calls" in choice.tool_call_errors[0]


def test_reasoning_can_be_left_out_or_left_in(client: openai.OpenAI) -> None:
    without = create(client, extra_body={"include_reasoning": False})
    assert not hasattr(without.choices[0].message, "reasoning_content")
    assert without.choices[0].message.content == "I look."
    assert without.usage.completion_tokens_details.reasoning_tokens > 0
    together = create(client, extra_body={"separate_reasoning": False})
    assert together.choices[0].message.content.startswith("<think>\nHm. é\n</think>\n\nI look.")
    assert together.usage.completion_tokens_details is None


def test_thinking_can_be_turned_off(client: openai.OpenAI, engine: FakeEngine) -> None:
    for fields in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        create(client, **fields)
        assert byte_tokenizer().decode(engine.submitted[-1][0], False).endswith("<think>\n\n</think>\n\n")


def test_reasoning_that_the_prompt_opens_is_split_from_the_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, "Hm.\n</think>\n\nYes.", HERMES.replace("assistant\n", "assistant\n<think>\n"))
    message = create(client).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    says(engine, "m.</think>Yes.")
    continued = [*ASK, {"role": "assistant", "content": "<think>H"}]
    message = create(client, messages=continued, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning_content, message.content) == ("m.", "Yes.")


def test_efforts_reach_templates_that_have_a_place_for_them(http: TestClient, engine: FakeEngine) -> None:
    assert "none, minimal, low" in refused(http, reasoning_effort="huge")["message"]
    fields = {"messages": ASK, "max_tokens": 3, "reasoning_effort": "low"}
    assert "reasoning_effort" in http.post("/v1/chat/completions", json=fields).headers["warning"]
    says(engine, "x", "{{ reasoning_effort }}: " + HERMES)
    assert "warning" not in http.post("/v1/chat/completions", json=fields).headers
    assert byte_tokenizer().decode(engine.submitted[-1][0], False).startswith("low: ")


def test_marks_that_are_special_tokens_are_read_and_others_left_out(client: openai.OpenAI, engine: FakeEngine) -> None:
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|other|>"]
    own = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    own.add_special_tokens(marks)
    template = "{# <|channel|><|message|><|call|> #}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine.prompts.tokenizer = Tokenizer(own, {"eos_token": "<|im_end|>"}, template)
    engine.info = dataclasses.replace(INFO, vocab_size=engine.prompts.tokenizer.vocab_size)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now"
    engine.script = [*engine.prompts.tokenizer.encode(text + " <|constrain|>json<|message|>{}<|call|>", False), EOS]
    choice = create(client).choices[0]
    assert (choice.message.content, choice.message.reasoning) == (None, "Hm.")
    assert choice.message.tool_calls[0].function.name == "now"
    text = "<|channel|>final<|message|>One<|other|> two<|end|>"
    engine.script = [*engine.prompts.tokenizer.encode(text, False), EOS]
    assert create(client).choices[0].message.content == "One two"
    chunks = create(client, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "One two"
    assert engine.submitted[-1][1].skip_special_tokens is False


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "again"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters", "JSON schema"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
            "'object'",
        ),
        ({"tools": [1]}, "tools[0]", "object"),
        ({"tool_choice": "sometimes"}, "tool_choice", '"auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "'fly'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": "required"}, "tool_choice", "grammar is made of the parameters of tools: cannot be followed"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "where its"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", '"mode"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be followed"),
        ({"function_call": {"name": "now"}}, "function_call", "send tools instead"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools instead"),
    ],
)
def test_wrong_tools_are_refused_by_name(http: TestClient, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(http, **fields)
    assert error["param"] == param and words in error["message"]


def test_a_wrong_history_of_calls_is_refused_by_name(http: TestClient) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def history(calls: list[Any], answered: Any) -> list[Any]:
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return [*ASK, said, {"role": "tool", "tool_call_id": answered, "content": "x"}]

    for messages, param in (
        (history([call], "b"), "messages[2].tool_call_id"),
        (history([call, call], "a"), "messages[1].tool_calls[1].id"),
        (history([{"id": "a", "function": {}}], "a"), "messages[1].tool_calls[0].function.name"),
        (history([{**call, "function": {"name": "look", "arguments": "["}}], "a"), None),
    ):
        error = refused(http, messages=messages)
        assert error["param"] == param or (param is None and "must be a JSON object" in error["message"])


def test_models_that_know_no_tools_get_a_generic_form(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    says(engine, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', template)
    for choice in ("auto", "required"):
        (answer,) = create(client, tool_choice=choice).choices
        assert (answer.message.tool_calls[0].function.name, answer.finish_reason) == ("now", "tool_calls")
        prompt, params = engine.submitted[-1][:2]
        text = byte_tokenizer().decode(prompt, False)
        assert text.startswith("<system>You can call functions.") and "Weather" in text and text.endswith("<user>Hi\n")
        assert (params.structured_outputs is None) is (choice == "auto")


def test_models_whose_format_is_unknown_refuse_tools(http: TestClient, engine: FakeEngine) -> None:
    says(engine, "x", "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    assert "--tool-call-parser" in refused(http)["message"]
    says(engine, "x", "{{ messages[-1].content }}")
    assert "prints only a part of a conversation" in refused(http)["message"]


def test_parsers_can_be_forced_and_turned_off() -> None:
    engine = FakeEngine()
    says(engine, CALLS)
    state = make_state(engine, tool_call_parser="none", reasoning_parser="none")
    with TestClient(make_app(state), base_url="http://localhost") as http:
        assert "--tool-call-parser none" in refused(http)["message"]
        reply = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 400}).json()
        assert reply["choices"][0]["message"]["content"] == CALLS
    state = make_state(engine, tool_call_parser="pythonic")
    says(engine, "x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with TestClient(make_app(state), base_url="http://localhost") as http:
        assert "knows no tools" in refused(http)["message"]
    says(engine, "[now()]")
    with TestClient(make_app(make_state(engine, tool_call_parser="pythonic")), base_url="http://localhost") as http:
        reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, "max_tokens": 99}).json()
        assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_a_template_that_prints_calls_and_no_tools_is_read_in_the_form_that_the_model_is_told() -> None:
    """As the templates of DeepSeek R1's small models: the messages describe the tools, in the form ``generic``."""
    printed = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{printed}\n```json\n{{{{ c.function.arguments }}}}\n```<｜tool▁call▁end｜>{{% endfor %}}<|im_end|>"
        "{% endfor %}<|im_start|>assistant\n"
    )
    engine = FakeEngine()
    says(engine, '<tool_call>\n{"name": "look", "arguments": {"place": "Ulm"}}\n</tool_call>', template)
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, "max_tokens": 200})
    assert "<tool_call>" in byte_tokenizer().decode(engine.submitted[-1][0], False)
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"place": "Ulm"})


def test_prompts_with_tools_can_be_counted(http: TestClient, engine: FakeEngine) -> None:
    http.post("/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, "max_tokens": 2})
    reply = http.post("/tokenize", json={"messages": ASK, "tools": TOOLS}).json()
    assert reply["tokens"] == engine.submitted[-1][0]


def test_a_call_can_be_required(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True
    says(engine, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    named: Any = {"type": "function", "function": {"name": "now"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice, reason in (("required", "tool_calls"), (named, "stop"), (allowed, "tool_calls")):
        (answer,) = create(client, tool_choice=choice).choices
        assert (answer.message.tool_calls[0].function.name, answer.finish_reason) == ("now", reason)
        prompt, params = engine.submitted[-1][:2]
        assert params.structured_outputs is not None
        whole = json.loads(str(params.structured_outputs.structural_tag))["format"]
        thinking, calls = whole["elements"]
        assert thinking["tags"][0]["content"]["elements"][0]["begin"] == "<think>"
        assert [tag["begin"].partition(",")[0] for tag in calls["tags"]] == [
            f'<tool_call>\n{{"name": "{name}"' for name in (["look", "now"] if choice == "required" else ["now"])
        ]
        assert calls["stop_after_first"] is (choice == named)
        assert "Weather" in byte_tokenizer().decode(prompt, False)
        chunks = list(create(client, tool_choice=choice, stream=True))
        assert chunks[-1].choices[0].finish_reason == reason
    reply = create(client, tool_choice="required", max_tokens=30)
    assert reply.choices[0].finish_reason == "length"


def test_calls_of_strict_functions_follow_a_grammar_from_their_first_mark_on(
    client: openai.OpenAI, http: TestClient, engine: FakeEngine
) -> None:
    engine.prompts.follows_grammars = True
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    (answer,) = create(client, tools=strict).choices
    assert [call.function.name for call in answer.message.tool_calls] == ["look", "now"]
    free = json.loads(str(engine.submitted[-1][1].structured_outputs.structural_tag))["format"]["elements"][-1]
    assert (free["type"], free["triggers"]) == ("triggered_tags", ["<tool_call>"])
    create(client)
    assert engine.submitted[-1][1].structured_outputs is None
    fields = {"messages": ASK, "tools": strict, "max_tokens": 2}
    assert "warning" not in http.post("/v1/chat/completions", json=fields).headers
    says(engine, "x", "{{ tools }}{{ messages }}<|tool_call>call:<tool_call|>")
    reply = http.post("/v1/chat/completions", json=fields)
    assert "tools[0].function.strict" in reply.headers["warning"]
    assert engine.submitted[-1][1].structured_outputs is None


def test_a_form_comes_after_the_reasoning_and_beside_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True

    def held(**fields: Any) -> Any:
        create(client, response_format={"type": "json_object"}, **fields)
        asked = engine.submitted[-1][1].structured_outputs
        return asked.structural_tag and json.loads(asked.structural_tag)["format"]

    thinking, rest = held()["elements"]
    assert thinking["type"] == "tags_with_separator" and [way["type"] for way in rest["elements"]] == [
        "tags_with_separator",
        "json_schema",
    ]
    assert held(tools=openai.omit)["elements"][1]["type"] == "json_schema"
    assert held(tool_choice="required")["elements"][1]["type"] == "tags_with_separator"
    assert held(tools=openai.omit, reasoning_effort="none") is None
    assert held(tools=openai.omit, extra_body={"separate_reasoning": False}) is None
    says(engine, "x", HERMES.replace("assistant\n", "assistant\n<think>\n"))
    thought, space, form = held(tools=openai.omit)["elements"]
    assert (thought["begin"], thought["end"], space["type"], form["type"]) == ("", "</think>", "regex", "json_schema")
    grammar = {"messages": ASK, "structured_outputs": {"grammar": 'start: "x"'}}
    with pytest.raises(openai.BadRequestError, match="cannot begin after the reasoning") as refusal:
        create(client, tools=openai.omit, extra_body=grammar)
    assert refusal.value.param == "structured_outputs"


def test_formats_without_a_grammar_refuse_to_be_forced() -> None:
    engine = FakeEngine()
    says(engine, "[now()]")
    with TestClient(make_app(make_state(engine, tool_call_parser="pythonic")), base_url="http://localhost") as http:
        error = refused(http, tool_choice="required")
        assert error["param"] == "tool_choice" and "in the format pythonic" in error["message"]
        error = refused(http, response_format={"type": "json_object"})
        assert error["param"] == "response_format" and "in the format pythonic" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_a_text_in_a_chat(http: TestClient, engine: FakeEngine, stream: bool) -> None:
    says(engine, '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"é\\""}}\n</tool_call>')
    past = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "old"}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "Edits"}}]
    body = {"messages": messages, "tools": tools, "max_tokens": 300, "stream": stream}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert calls[0]["type"] == "custom" and calls[0]["custom"] == {"name": "patch", "input": ""}
        assert "".join(call["custom"]["input"] for call in calls) == 'a\n"é"'
    else:
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": 'a\n"é"'})
    prompt = byte_tokenizer().decode(engine.submitted[-1][0], False)
    assert '{"input": "old"}' in prompt
