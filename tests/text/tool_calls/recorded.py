"""Model outputs in each tool-call format, and the calls that they contain."""

from __future__ import annotations

import json
from typing import Any

from chairlift.text.tool_calls import TOOL_FORMATS, Answer, AnswerReader
from chairlift.text.tool_calls.formats import REASONING_FORMATS

__all__ = ["RECORDED", "TOOLS", "as_calls", "reader_for", "split_read", "without_edges"]

TOOLS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["place"],
    },
    "now": {"type": "object", "properties": {}},
}
_BAR = "｜"
_M3 = "]<]minimax[>["

# One entry per case: (name of the format, output of the model, expected content, expected calls). A call is (name of
# the function, arguments).
RECORDED: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"place": "Ulm", "days": 2}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>',
        "I look.",
        [("look", {"place": "Ulm", "days": 2}), ("now", {})],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "look", "arguments": {"place": "a </tool_call> \\"b\\" {[\\\\ é😀\\u00e9"}}\n'
        "</tool_call>",
        "",
        [("look", {"place": 'a </tool_call> "b" {[\\ é😀é'})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"place": "two\nlines"}}<tool_call>{"name": "now"}',
        "",
        [("look", {"place": "two\nlines"}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "Well:\n\n<tool_call>\n<function=look>\n<parameter=place>\nNew\nUlm </tool_call> <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=tags>\n['a', \"b\"]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well:",
        [("look", {"place": "New\nUlm </tool_call> <b>", "days": 3, "exact": True, "tags": ["a", "b"]}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "<function=look>\n<parameter=place>\n5\n</parameter>\n</function>\n</tool_call>",
        "",
        [("look", {"place": "5"})],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=look>\n<parameter=place>Ulm</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("look", {"place": "Ulm"})],
    ),
    ("llama3_json", '\n{"name": "look", "parameters": {"place": "Ulm"}}', "", [("look", {"place": "Ulm"})]),
    (
        "llama3_json",
        '{"type": "function", "name": "now", "parameters": {}}; {"name": "look", "parameters": {"days": 1}}',
        "",
        [("now", {}), ("look", {"days": 1})],
    ),
    (
        "pythonic",
        "[look(place=\"Ulm's \\\"best\\\"\", days=2, tags=['a', 'b'], exact=True), now()]",
        "",
        [("look", {"place": 'Ulm\'s "best"', "days": 2, "tags": ["a", "b"], "exact": True}), ("now", {})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[look(place='Ulm', days=-1)]<|tool_call_end|>Looking.",
        "Looking.",
        [("look", {"place": "Ulm", "days": -1})],
    ),
    (
        "mistral_nemo",
        '[TOOL_CALLS][{"name": "look", "arguments": {"place": "Ulm"}, "id": "abcdef123"}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "mistral",
        'Hm.[TOOL_CALLS]look[CALL_ID]abcdef123[ARGS]{"place": "Ulm"}[TOOL_CALLS]now[ARGS]{}',
        "Hm.",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"place": "Ulm"}\n'
        "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "deepseek_v31",
        'One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place": "Ulm"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "One moment.",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">Ulm'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        [("look", {"place": "Ulm", "days": 2}), ("now", {})],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true"> 7 '
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        [("look", {"place": " 7 "})],
    ),
    (
        "glm",
        "I look.\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "I look.",
        [("look", {"place": "Ulm", "days": 2}), ("now", {})],
    ),
    (
        "glm",
        "<tool_call>look<arg_key>place</arg_key><arg_value>Ulm</arg_value></tool_call>",
        "",
        [("look", {"place": "Ulm"})],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"place": "Ulm"}<|call|>',
        "I look.",
        [("look", {"place": "Ulm"})],
    ),
    ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", "", [("now", {})]),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"place": "Ulm"}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">Ulm</parameter>\n<parameter name="tags">'
        '["a"]</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [("look", {"place": "Ulm", "tags": ["a"]})],
    ),
    (
        "gemma4",
        '<|tool_call>call:look{place:<|"|>Ulm, {"a"}<|"|>,days:2,tags:[<|"|>a<|"|>],exact:false}<tool_call|>',
        "",
        [("look", {"place": 'Ulm, {"a"}', "days": 2, "tags": ["a"], "exact": False})],
    ),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": {"place": "Ulm"}}]', "", [("look", {"place": "Ulm"})]),
    (
        "phi4",
        '<|tool_call|>[{"name": "look", "arguments": {"place": "Ulm"}}]<|/tool_call|>',
        "",
        [("look", {"place": "Ulm"})],
    ),
    (
        "command_r7b",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "look", "parameters": {"place": "Ulm"}}\n]'
        "<|END_ACTION|>",
        "",
        [("look", {"place": "Ulm"})],
    ),
    ("functools", ' functools[{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ("functionary_v31", 'Hm.\n<function=look>{"place": "Ulm"}</function>', "Hm.", [("look", {"place": "Ulm"})]),
    (
        "tool_calls_list",
        '<tool_calls>\n{"name": "look", "arguments": {"place": "Ulm"}}\n{"name": "now", "arguments": {}}\n'
        "</tool_calls>",
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:look{place:<escape>Ulm, {a}<escape>,days:2,tags:[<escape>a<escape>],exact:true}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        [("look", {"place": "Ulm, {a}", "days": 2, "tags": ["a"], "exact": True}), ("now", {})],
    ),
    (
        "hy_v3",
        "I look.<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>place</arg_key>\n<arg_value>Ulm</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        "I look.",
        [("look", {"place": "Ulm", "days": 2}), ("now", {})],
    ),
    (
        "step3",
        'I look.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look">'
        '<steptml:parameter name="place">Ulm</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
        '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "I look.",
        [("look", {"place": "Ulm", "days": 2}), ("now", {})],
    ),
    (
        "apertus",
        'I look. <|tools_prefix|>[{"look": {"place": "Ulm"}}, {"now": {}}]<|tools_suffix|>',
        "I look.",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "look", "parameters": {"place": "Ulm"}}<|action_end|>',
        "I look.",
        [("look", {"place": "Ulm"})],
    ),
    (
        "longcat",
        '<longcat_tool_call>\n{"name": "look", "arguments": {"place": "Ulm"}}\n</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "olmo3",
        'I look.\n<function_calls>look(place="Ulm\'s", days=2, exact=true, tags=["a"])\nnow()</function_calls>',
        "I look.",
        [("look", {"place": "Ulm's", "days": 2, "exact": True, "tags": ["a"]}), ("now", {})],
    ),
    (
        "ernie45",
        '<tool_call>\n{"name": "look", "arguments": {"place": "Ulm"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>\n',
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "kimi_k3",
        '<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="now" index="1"'
        '<|sep|><|close|>call<|sep|><|open|>call tool="look" index="2"<|sep|><|open|>argument key="place" type="string"'
        '<|sep|> Ulm "5"<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument'
        '<|sep|><|open|>argument key="tags" type="array"<|sep|>["a"]<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        "I look.",
        [("now", {}), ("look", {"place": ' Ulm "5"', "days": 2, "tags": ["a"]})],
    ),
    (
        "generic",
        'I look. <tool_call>[{"name": "look", "arguments": {"place": "Ulm"}}, {"name": "now", "arguments": {}}]'
        "</tool_call>",
        "I look.",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    ("ernie45", "<response>I see.</response>", "I see.", []),
    (
        "minimax_m3",
        f'I look.\n{_M3}<tool_call>\n{_M3}<invoke name="look">\n{_M3}<place>\n Ulm <b> & "5"{_M3}</place>\n'
        f"{_M3}<days>2{_M3}</days>\n{_M3}<exact>true{_M3}</exact>\n{_M3}<tags>{_M3}<item>a{_M3}</item>\n"
        f'{_M3}<item>5{_M3}</item>{_M3}</tags>\n{_M3}</invoke>\n{_M3}<invoke name="now">\n{_M3}</invoke>\n'
        f"{_M3}</tool_call>",
        "I look.",
        [("look", {"place": '\n Ulm <b> & "5"', "days": 2, "exact": True, "tags": ["a", "5"]}), ("now", {})],
    ),
    (
        "granite_20b_fc",
        '<function_call> {"name": "look", "arguments": {"place": "Ulm"}}'
        '<function_call> {"name": "now", "arguments": {}}',
        "",
        [("look", {"place": "Ulm"}), ("now", {})],
    ),
    (
        "nemotron_v2",
        '<TOOLCALL>[{"name": "look", "arguments": {"place": "Ulm"}}]</TOOLCALL>',
        "",
        [("look", {"place": "Ulm"})],
    ),
]


def reader_for(name: str, reasoning: str = "", **options: Any) -> AnswerReader:
    """Reader for the format ``name``, with the functions in ``TOOLS``."""
    return AnswerReader(TOOL_FORMATS[name], REASONING_FORMATS.get(reasoning), TOOLS, **options)


def split_read(reader: AnswerReader, pieces: list[str]) -> Answer:
    """Result of reading a text that arrives in ``pieces``."""
    answer = Answer()
    for piece in pieces:
        answer.add(reader.feed(piece))
    answer.add(reader.finish())
    return answer


def as_calls(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each call."""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def without_edges(name: str, text: str) -> str:
    """The text without the texts around calls and content that the reader drops."""
    for edge in TOOL_FORMATS[name].edges:
        text = text.replace(edge, "")
    return text
