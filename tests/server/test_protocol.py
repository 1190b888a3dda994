"""Every field has a rule and bounds, and every refusal says which field, what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from chairlift.base.sampling_params import PARAMETERS
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.server.anthropic.messages_types import MessagesRequest
from chairlift.server.http.errors import ApiError
from chairlift.server.openai import protocol
from chairlift.server.openai.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
    sampling_params,
    template_variables,
    warning_headers,
)
from chairlift.server.openai.responses_types import ResponsesRequest
from chairlift.server.openai.structured import structured_outputs
from tools import markdown, sampling_table

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
BODIES = [(ChatRequest, CHAT), (CompletionRequest, TEXT)]

# Fields named in the project's conventions, and those of today's OpenAI and vLLM clients.
KNOWN = [
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "user",
    "service_tier",
    "metadata",
    "store",
    "prompt",
    "echo",
    "suffix",
    "best_of",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "priority",
    "request_id",
    "cache_salt",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "separate_reasoning",
    "session_id",
    "lora_path",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "use_beam_search",
    "length_penalty",
]


FORMATS = [name for name in REFUSED if REFUSED[name][1] is protocol._GRAMMAR]


def rows() -> dict[str, set[str]]:
    """The docstring's table: what happens -> fields."""
    texts: dict[str, str] = {}
    kind = ""
    assert protocol.__doc__ is not None
    for line in protocol.__doc__.split("====\n")[2].splitlines():
        kind = line[:19].strip() or kind
        texts[kind] = f"{texts.get(kind, '')} {line[19:].strip()}"
    # Values of fields are in the table as well: they follow "but", or stand in brackets.
    values = re.compile(r"\([^)]*\)|but (type )?``[^`]*``( and ``[^`]*``)?")
    found = {kind: set(re.findall(r"``(\w+)``", values.sub("", text))) for kind, text in texts.items()}
    assert ":data:`~chairlift.base.sampling_params.PARAMETERS`" in texts["supported, all"]
    found["supported, all"] |= PARAMETERS.keys()
    return found


def refusal(kind: type[msgspec.Struct], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    return caught.value


def test_every_known_field_has_a_row_in_the_table() -> None:
    listed = {name for names in rows().values() for name in names}
    assert not set(KNOWN) - listed
    assert set(REFUSED) <= rows()["refused"]


def test_supported_fields_are_fields_and_ignored_ones_are_not() -> None:
    chat, text = set(ChatRequest.__struct_fields__), set(CompletionRequest.__struct_fields__)
    assert rows()["supported, all"] - {"include_usage", "continuous_usage_stats"} <= chat & text
    assert rows()["supported, chat"] == chat - text
    assert rows()["supported, texts"] == text - chat
    assert not rows()["ignored"] & (chat | text | set(REFUSED))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_would_change_the_meaning_are_refused(name: str) -> None:
    harmless, _ = REFUSED[name]
    for kind, body in BODIES:
        if name in kind.__struct_fields__:
            continue
        error = refusal(kind, {**body, name: {"some": "value"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert name in error.message
        empty = () if name in FORMATS else (False, [], {}, "")
        for value in (None, *empty, *harmless):
            assert parse(kind, {**body, name: value})[1] == []


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [{}, [], "", False, 0, True, {"json": {}}, {"json": None}, "a+", ["a", "b"]])
def test_a_format_is_asked_for_by_an_empty_value_too(name: str, value: Any) -> None:
    """An answer in any form is no answer to ``guided_json: {}``, which asks for JSON."""
    for kind, body in [*BODIES, (TokenizeRequest, TEXT)]:
        error = refusal(kind, {**body, name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert parse(kind, {**body, name: None})[1] == []


@pytest.mark.parametrize("name", ["thinking_token_budget", "length_penalty", "max_completion_tokens"])
def test_zero_is_a_value_of_an_unsupported_field(name: str) -> None:
    assert "is 0, which is not supported" in refusal(CompletionRequest, {**TEXT, name: 0}).message
    assert parse(CompletionRequest, {**TEXT, "length_penalty": 1.0, "top_logprobs": 0})[1] == []


@pytest.mark.parametrize("name", sorted(rows()["ignored"]))
def test_hints_are_ignored_and_named(name: str) -> None:
    for kind, body in BODIES:
        assert parse(kind, {**body, name: "value"})[1] == [name]
        assert parse(kind, {**body, name: None})[1] == []


def test_unknown_names_inside_are_reported() -> None:
    body = {**CHAT, "stream_options": {"include_obfuscation": False}}
    assert parse(ChatRequest, body)[1] == ["stream_options.include_obfuscation"]
    assert parse(CompletionRequest, {**TEXT, "messages": 5})[1] == ["messages"]
    body = {**CHAT, "prediction": {"type": "content", "content": "x", "weight": 2}}
    assert parse(ChatRequest, body)[1] == ["prediction.weight"]


def test_the_warning_header_cannot_be_used_to_write_others() -> None:
    assert warning_headers([]) == {}
    given = ["user", "a\r\nSet-Cookie: x", 'q"', "é", "x" * 65]
    assert warning_headers(given) == {"warning": '299 chairlift "ignored: user, and 4 more"'}
    many = warning_headers([f"f{i}" for i in range(1000)])["warning"]
    assert len(many) < 200 and "and 984 more" in many


@pytest.mark.parametrize(("struct_type", "body"), BODIES)
def test_a_whole_number_may_be_written_with_a_point(struct_type: Any, body: dict[str, Any]) -> None:
    given = {"n": 2.0, "max_tokens": 4.0, "seed": -1e15, "top_k": -1.0, "min_tokens": 0.0, "temperature": 1.0}
    request, ignored = parse(struct_type, {**body, **given, "metadata": 1.0})
    assert {name: getattr(request, name) for name in given} == given and ignored == ["metadata"]
    assert {type(getattr(request, name)) for name in given if name != "temperature"} == {int}


BAD = [
    ("n", 0, "n must be a whole number from 1 to 16; got 0"),
    ("n", 17, "got 17"),
    ("n", 1.5, "got 1.5"),
    ("n", 17.0, "got 17.0"),
    ("seed", 1e30, "from -9223372036854775808 to 9223372036854775807"),
    ("stream", 1.0, "got 1.0"),
    ("n", True, "got true"),
    ("temperature", "1", "temperature must be a number from 0 to 100; got '1'"),
    ("top_p", -0.1, "from 0 to 1"),
    ("seed", 2**63, "from -9223372036854775808 to 9223372036854775807"),
    ("stop", ["x"] * 17, "got a list of 17"),
    ("stop[1]", ["x", ""], "1 to 256 characters"),
    ("stop", "x" * 257, "got a text of 257 characters"),
    ("stream", "yes", "true or false"),
    ("logit_bias", {"x": 1}, "a name in logit_bias must be a token id in decimal digits, such as '50', without"),
    *(("logit_bias", {"50": 1, key: 2}, f"got {key!r}") for key in ("050", " 50", "50\n", "+50", "5_0", "٥٠")),
    ("logit_bias[7]", {"1": 1, "7": 101}, "logit_bias[7] must be a number from -100 to 100; got 101"),
    ("logit_bias[7]", {"7": "x"}, "logit_bias[7] must be a number from -100 to 100; got 'x'"),
    ("logit_bias", {str(i): 1 for i in range(301)}, "an object of 0 to 300 entries; got an object of 301"),
    ("logit_bias[1]", {"1": -101}, "got -101"),
    ("stop_token_ids[0]", [-1], "from 0"),
    ("stop_token_ids[0]", [None], "got null"),
    ("cache_salt", "a b", "from A-Z, a-z, 0-9, '_' and '-'"),
    ("cache_salt", "ab\n", "from A-Z, a-z, 0-9, '_' and '-'"),
    ("cache_salt", "a" * 65, "at most 64 characters"),
    ("stream_options", 5, "must be an object"),
    ("stream_options.include_usage", {"include_usage": 1}, "true or false"),
    ("queue_timeout", 0, "above 0"),
    ("prediction", "text", "must be an object"),
    ("prediction.type", {"type": "diff", "content": "x"}, "prediction.type must be 'content'; got 'diff'"),
    ("prediction.content", {"type": "content", "content": 7}, "a text or a list of 1 to 1024 entries; got 7"),
    ("prediction.content", {"type": "content"}, "prediction.content is missing"),
    ("prediction.content[0].type", {"type": "content", "content": [{"type": "image", "text": "x"}]}, "'text'"),
]


@pytest.mark.parametrize(("param", "value", "message"), BAD, ids=[f"{p}={str(v)[:12]}" for p, v, _ in BAD])
def test_refusals_name_the_field_the_value_and_the_bounds(param: str, value: Any, message: str) -> None:
    name = re.split(r"[.\[]", param)[0]
    for kind, body in BODIES:
        error = refusal(kind, {**body, name: value})
        assert error.param == param
        assert message in error.message


def test_refusals_tell_another_type_from_another_value() -> None:
    codes = [refusal(ChatRequest, {**CHAT, "temperature": value}).code for value in ("warm", 200)]
    assert codes == ["invalid_type", "invalid_value"]


def test_missing_fields_are_named() -> None:
    assert refusal(ChatRequest, {}).param == "messages"
    assert refusal(CompletionRequest, {}).param == "prompt"
    error = refusal(ChatRequest, {"messages": [{"role": "user", "content": "x"}, 5]})
    assert (error.param, error.code) == ("messages[1]", "invalid_type")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_number_has_two_bounds_and_every_list_an_end(kind: type[msgspec.Struct]) -> None:
    def check(info: Any, where: str) -> None:
        types = msgspec.inspect
        if isinstance(info, (types.IntType, types.FloatType)):
            assert info.le is not None and (info.ge is not None or info.gt is not None), where
        elif isinstance(info, types.UnionType):
            for option in info.types:
                check(option, where)
        elif isinstance(info, types.ListType):
            # The ids of one prompt among several are bounded by the body and by the model.
            assert info.max_length is not None or where == "prompt[]", where
            check(info.item_type, f"{where}[]")
        elif isinstance(info, types.DictType):
            assert info.max_length is not None, where
            check(info.value_type, f"{where}{{}}")
        elif isinstance(info, types.StructType):
            for field in info.fields:
                check(field.type, f"{where}.{field.name}" if where else field.name)

    check(msgspec.inspect.type_info(kind), "")


def test_prompts_come_in_four_forms() -> None:
    def prompts(prompt: Any, **more: Any) -> list[Any]:
        return parse(CompletionRequest, {"prompt": prompt, **more})[0].prompts()

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]
    for mixed in ([1, "a"], [[1], "a"], [[1], 2]):
        with pytest.raises(ApiError, match="mixes"):
            prompts(mixed)
    assert len(prompts(["a"] * 64)) == 64
    for many in ({"prompt": ["a"] * 65}, {"prompt": ["a"] * 33, "n": 2}, {"prompt": ["a"] * 5, "best_of": 16}):
        with pytest.raises(ApiError, match="split it"):
            prompts(**many)
    for wrong in ([], {}, [[[1]]], [1.5], [True], [-1], [2**31], [None]):
        with pytest.raises(ApiError):
            prompts(wrong)


def test_settings_that_contradict_each_other_name_the_field() -> None:
    request, _ = parse(ChatRequest, {**CHAT, "min_tokens": 5})
    with pytest.raises(ApiError, match="min_tokens is 5 but max_tokens is 3") as caught:
        sampling_params(request, {}, max_tokens=3)
    assert caught.value.param == "min_tokens"


def test_template_variables_cannot_replace_the_conversation() -> None:
    assert template_variables({"enable_thinking": False}) == {"enable_thinking": False}
    for name in ("messages", "self", "add_generation_prompt", "tools"):
        with pytest.raises(ApiError, match=name):
            template_variables({name: 1})
        assert template_variables({name: None, "x": None}) == {"x": None}
    for bad in ({"_x": 1}, {"a b": 1}, {"a\n": 1}, {"x": []}, {"x": {}}, {"x": 2**64}, {"x": 1e308}, {"x": "y" * 5000}):
        refusal(ChatRequest, {**CHAT, "chat_template_kwargs": bad})


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
def test_ranges_are_those_of_the_declared_parameters(body: type[msgspec.Struct]) -> None:
    """Except where the endpoint gives the name another meaning or limit of its own."""
    own = {"max_tokens", "logprobs"}
    (_, schemas) = msgspec.json.schema_components([body])
    fields = schemas[body.__name__]["properties"]
    for name in (PARAMETERS.keys() & fields.keys()) - own:
        declared, (schema, *_) = PARAMETERS[name], fields[name]["anyOf"]
        if declared.kind is int or declared.kind is float:
            low = schema["exclusiveMinimum" if declared.above else "minimum"]
            assert (low, schema["maximum"]) == (declared.low, declared.high), name
        types = {int: ("integer",), float: ("number",), bool: ("boolean",), list: ("string", "array")}
        assert schema["type"] in types[declared.kind], name
    assert fields.keys() >= {name for name, declared in PARAMETERS.items() if declared.shared}


def test_the_table_of_sampling_parameters_is_current() -> None:
    page = sampling_table.PAGE.read_text(encoding="utf-8")
    made = markdown.replaced(page, sampling_table.BEGIN, sampling_table.sampling_table())
    assert made == page, "run tools/sampling_table.py"


def test_a_schema_beside_json_object_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages = [{"role": "user", "content": "Hi"}]
    request, _ = parse(
        ChatRequest, {"messages": messages, "response_format": {"type": "json_object", "schema": schema}}
    )
    assert structured_outputs(request) == StructuredOutputsParams(json=schema)
    request, _ = parse(ChatRequest, {"messages": messages, "response_format": {"type": "json_object", "schema": None}})
    assert structured_outputs(request) == StructuredOutputsParams(json_object=True)
