"""Whatever a model writes is answered: on every endpoint, whole and streamed, in every format of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.text.tool_calls import TOOL_FORMATS
from tests.server.fake_engine import EOS, FakeEngine, byte_tokenizer, make_state
from tests.server.test_tools import HERMES

HALF = '{"place": "\\ud83d", "\\ude00": [1' + 30 * "0" + ", 1e5, -0.0]}"
ARGUMENTS = json.loads(HALF)
_DSML = "｜DSML｜"
_ARGUMENT = {
    "hy_v3": "<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>place</arg_key>\n<arg_value>{0}</arg_value>\n"
    "</tool_call>\n</tool_calls>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look">'
    '<steptml:parameter name="place">{0}</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="place" type="object"<|sep|>{0}<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|>",
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=place>\n{0}\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look>\n<parameter=place>{0}</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>{0}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">{0}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
_M3 = "]<]minimax[>["
SAID = {
    "hermes": f'<tool_call>\n{{"name": "look", "arguments": {HALF}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]look[ARGS]{HALF}",
    "mistral_nemo": f'[TOOL_CALLS][{{"name": "look", "arguments": {HALF}}}]',
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{HALF}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{HALF}\n"
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": f'<{_DSML}function_calls>\n<{_DSML}invoke name="look">\n<{_DSML}parameter name="place" '
    f'string="false">{HALF}</{_DSML}parameter>\n</{_DSML}invoke>\n</{_DSML}function_calls>',
    "deepseek_v4": f'<{_DSML}tool_calls>\n<{_DSML}invoke name="look">\n<{_DSML}parameter name="place" '
    f'string="false">{HALF}</{_DSML}parameter>\n</{_DSML}invoke>\n</{_DSML}tool_calls>',
    "harmony": f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{HALF}<|call|>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{HALF}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "look", "arguments": {HALF}}}]',
    "phi4": f'<|tool_call|>[{{"name": "look", "arguments": {HALF}}}]<|/tool_call|>',
    "command_r7b": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "look", "parameters": {HALF}}}]'
    "<|END_ACTION|>",
    "functools": f'functools[{{"name": "look", "arguments": {HALF}}}]',
    "functionary_v31": f"<function=look>{HALF}</function>",
    "tool_calls_list": f'<tool_calls>[{{"name": "look", "arguments": {HALF}}}]</tool_calls>',
    "nemotron_v2": f'<TOOLCALL>[{{"name": "look", "arguments": {HALF}}}]</TOOLCALL>',
    "llama3_json": f'{{"name": "look", "parameters": {HALF}}}',
    "lfm2": f"<|tool_call_start|>[look(place={HALF})]<|tool_call_end|>",
    "pythonic": f"[look(place={HALF})]",
    "gemma4": f"<|tool_call>call:look{{place:{HALF}}}<tool_call|>",
    "apertus": f'<|tools_prefix|>[{{"look": {HALF}}}]<|tools_suffix|>',
    "ernie45": f'<tool_call>\n{{"name": "look", "arguments": {HALF}}}\n</tool_call>\n',
    "generic": f'<tool_call>\n{{"name": "look", "arguments": {HALF}}}\n</tool_call>',
    "granite_20b_fc": f'<function_call> {{"name": "look", "arguments": {HALF}}}',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "look", "parameters": {HALF}}}<|action_end|>',
    "longcat": f'<longcat_tool_call>\n{{"name": "look", "arguments": {HALF}}}\n</longcat_tool_call>',
    "olmo3": f"<function_calls>look(place={HALF})</function_calls>",
    "functiongemma": f"<start_function_call>call:look{{place:{HALF}}}<end_function_call>",
    "minimax_m3": f'{_M3}<tool_call>\n{_M3}<invoke name="look">{_M3}<place>{HALF}{_M3}</place>{_M3}</invoke>\n'
    f"{_M3}</tool_call>",
    **{name: text.replace("{0}", HALF) for name, text in _ARGUMENT.items()},
}
"""Name of a format -> an answer whose call has half of a surrogate pair as a value and as a key, and a number of 101
bits."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "Hi"}]
TEXTS = {
    "half of a pair in bytes": b"a\xed\xa0\xbdb",
    "half of a character": "a😀".encode()[:-2],
    "no text at all": bytes(range(256)),
    "half of a pair as JSON": b'{"a": "\\ud83d"}',
    "in reasoning": b'<think>\xed\xa0\xbd "\\ud83d"</think>\xed\xb8\x80',
    "in a mark": b'<tool_call>\n{"name": "l\\ud83d", "arguments": {}}\n</tool_call>',
    "in text beside a call": b'\xed\xa0\xbd<tool_call>\n{"name": "look"}\n</tool_call>\xff',
}


def test_every_format_has_an_answer() -> None:
    assert set(SAID) == set(TOOL_FORMATS)


def served(script: bytes, **settings: Any) -> TestClient:
    engine, own = FakeEngine(), byte_tokenizer()
    engine.prompts.tokenizer = Tokenizer(own.backend, own.named_tokens, HERMES)
    ids = {own.token_bytes(token_id, False): token_id for token_id in range(256)}
    engine.script = [*(ids[bytes([byte])] for byte in script), EOS]
    return TestClient(make_app(make_state(engine, **settings)), base_url="http://localhost")


def post(http: TestClient, path: str, **fields: Any) -> Any:
    reply = http.post(path, json={"model": "fake", **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: TestClient, path: str, **fields: Any) -> list[Any]:
    reply = http.post(path, json={"model": "fake", "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not [each for each in found if each.get("type") == "error" or "error" in each]
    return found


@pytest.mark.parametrize("name", SAID)
def test_arguments_with_half_a_pair_and_large_numbers_arrive(name: str) -> None:
    chat = {"messages": ASK, "tools": TOOLS, "max_tokens": 500}
    flat = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    blocks = {"messages": ASK, "tools": [{"name": "look", "input_schema": {"type": "object"}}], "max_tokens": 500}
    wanted = [ARGUMENTS, {"place": ARGUMENTS}]
    with served(SAID[name].encode(), tool_call_parser=name, reasoning_parser="none") as http:
        (choice,) = post(http, "/v1/chat/completions", **chat, logprobs=True, top_logprobs=1)["choices"]
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) in wanted
        deltas = [each["choices"][0]["delta"] for each in events(http, "/v1/chat/completions", **chat)]
        pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(pieces) == arguments
        response = post(http, "/v1/responses", input="Hi", tools=flat, max_output_tokens=500)
        assert [item["arguments"] for item in response["output"]] == [arguments]
        last = events(http, "/v1/responses", input="Hi", tools=flat, max_output_tokens=500)[-1]
        assert [item["arguments"] for item in last["response"]["output"]] == [arguments]
        assert [block["input"] for block in post(http, "/v1/messages", **blocks)["content"]] == [json.loads(arguments)]
        told = [
            each["delta"]
            for each in events(http, "/v1/messages", **blocks)
            if "content_block" in each["type"] and "delta" in each
        ]
        assert "".join(delta["partial_json"] for delta in told) == arguments


@pytest.mark.parametrize("parser", ["hermes", "glm", "harmony", "pythonic", "gemma4"])
@pytest.mark.parametrize("name", TEXTS)
def test_any_bytes_are_an_answer(name: str, parser: str) -> None:
    chat = {"messages": ASK, "tools": TOOLS, "max_tokens": 500}
    with served(TEXTS[name], tool_call_parser=parser, reasoning_parser="think") as http:
        for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"separate_reasoning": False}, {"n": 2}):
            whole = post(http, "/v1/chat/completions", **chat, **more)["choices"][0]["message"]
            deltas = [
                each["choices"][0]["delta"]
                for each in events(http, "/v1/chat/completions", **chat, **more)
                if not each["choices"][0]["index"]
            ]
            assert "".join(delta.get("content") or "" for delta in deltas) == (whole["content"] or "")
        for more in ({}, {"logprobs": 2, "echo": True}):
            fields = {"prompt": "Hi", "max_tokens": 500, **more}
            (choice,) = post(http, "/v1/completions", **fields)["choices"]
            assert (
                "".join(each["choices"][0]["text"] for each in events(http, "/v1/completions", **fields))
                == (choice["text"])
            )
        post(http, "/v1/responses", input="Hi", max_output_tokens=500)
        events(http, "/v1/responses", input="Hi", max_output_tokens=500)
        post(http, "/v1/messages", messages=ASK, max_tokens=500)
        events(http, "/v1/messages", messages=ASK, max_tokens=500)
