"""Malformed calls in each format, and what the reader makes of them: the rows of the table in docs/tools.md."""

from __future__ import annotations

from typing import Any

__all__ = ["REPAIRS", "Repair"]

Repair = tuple[str, str, list[tuple[str, dict[str, Any]]], str]
"""(format, output, calls that are read, part of the reason why the rest is text; empty if there is no reason)."""

_ULM = '{"place": "Ulm"}'
_LOOK: list[tuple[str, dict[str, Any]]] = [("look", {"place": "Ulm"})]
_BOTH: list[tuple[str, dict[str, Any]]] = [*_LOOK, ("now", {})]
_QWEN = "<tool_call>\n<function=look>\n<parameter=place>\nUlm\n"

REPAIRS: dict[str, Repair] = {
    "`hermes`: `</tool_call>` is missing": (
        "hermes",
        f'<tool_call>\n{{"name": "look", "arguments": {_ULM}}}\n<tool_call>{{"name": "now"}}',
        _BOTH,
        "",
    ),
    "`hermes`: arguments as a JSON string": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"Ulm\\"}"}</tool_call>',
        _LOOK,
        "",
    ),
    "`hermes`: `parameters` instead of `arguments`": (
        "hermes",
        f'<tool_call>{{"name": "look", "parameters": {_ULM}}}</tool_call>',
        _LOOK,
        "",
    ),
    "`hermes`: a line break inside a string": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"place": "U\nlm"}}</tool_call>',
        [("look", {"place": "U\nlm"})],
        "",
    ),
    "`hermes`: a brace is missing": (
        "hermes",
        f'<tool_call>{{"name": "look", "arguments": {_ULM}</tool_call>',
        [],
        "JSON has something else",
    ),
    "`hermes`: single quotes": (
        "hermes",
        "<tool_call>{'name': 'look', 'arguments': {}}</tool_call>",
        [],
        "JSON has something else",
    ),
    "`hermes`: a comma before the end of an object": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"place": "Ulm",}}</tool_call>',
        [],
        "JSON has something else",
    ),
    "`hermes`: the same argument twice": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"place": "a", "place": "b"}}</tool_call>',
        [],
        "the same name twice",
    ),
    "`hermes`: an unclosed fence before the call": (
        "hermes",
        '```xml\n<tool_call>{"name": "now"}</tool_call>',
        [],
        "code that has no end",
    ),
    "`hermes`: a lone backtick before the call": (
        "hermes",
        'A ` here. <tool_call>{"name": "now"}</tool_call>\nSo.',
        [],
        "code that has no end",
    ),
    "`hermes`: a call in a closed fence": (
        "hermes",
        '```\n<tool_call>{"name": "now"}</tool_call>\n```\nSo.',
        [],
        "",
    ),
    "`qwen3_coder`: `</parameter>` is missing before the next parameter": (
        "qwen3_coder",
        _QWEN + "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [],
        "</parameter> is missing",
    ),
    "`qwen3_coder`: the last `</parameter>` is missing": (
        "qwen3_coder",
        _QWEN + "</function>\n</tool_call>",
        [],
        "ends inside the call",
    ),
    "`qwen3_coder`: the last `</parameter>` is missing, and another call follows": (
        "qwen3_coder",
        _QWEN + f"</function>\n</tool_call>\n{_QWEN}</parameter>\n</function>\n</tool_call>",
        [],
        "</parameter> is missing",
    ),
    "`qwen3_coder`: `</function>` is missing": (
        "qwen3_coder",
        _QWEN + "</parameter>\n</tool_call>\n<tool_call>\n<function=now>\n</tool_call>",
        _BOTH,
        "",
    ),
    "`qwen3_coder`: `</function>` and `</tool_call>` are missing": (
        "qwen3_coder",
        _QWEN + "</parameter>\n",
        [],
        "ends inside the call",
    ),
    "`qwen3_coder`: `<tool_call>` is missing": (
        "qwen3_coder",
        _QWEN.removeprefix("<tool_call>\n") + "</parameter>\n</function>\n</tool_call>",
        _LOOK,
        "",
    ),
    "`qwen3_coder`: text between two parameters": (
        "qwen3_coder",
        _QWEN + "</parameter>\nand\n</function>\n</tool_call>",
        [],
        "text between the arguments",
    ),
    "`glm`: `</arg_value>` is missing": (
        "glm",
        "<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Ulm\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>",
        [],
        "</arg_value> is missing",
    ),
    "`minimax_m2`: `</parameter>` is missing": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">Ulm\n<parameter name="days">2</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        [],
        "</parameter> is missing",
    ),
    "`minimax_m2`: `</invoke>` is missing": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">Ulm</parameter>\n</minimax:tool_call>',
        _LOOK,
        "",
    ),
    "`llama3_json`: several calls, with `;`, a comma or white space between them": (
        "llama3_json",
        f'{{"name": "look", "parameters": {_ULM}}}\n{{"name": "now", "parameters": {{}}}}, '
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        [*_BOTH, ("now", {}), ("now", {})],
        "",
    ),
    "`llama3_json`: a list of calls": (
        "llama3_json",
        f'[{{"name": "look", "parameters": {_ULM}}}, {{"name": "now", "parameters": {{}}}}]',
        _BOTH,
        "",
    ),
    "`llama3_json`: `<|python_tag|>` before the call": (
        "llama3_json",
        f'<|python_tag|>{{"name": "look", "parameters": {_ULM}}}',
        _LOOK,
        "",
    ),
    "`llama3_json`: Python form": ("llama3_json", "[look(place='Ulm'), now()]", _BOTH, ""),
    "`llama3_json`: text before the call": (
        "llama3_json",
        f'Sure!\n{{"name": "look", "parameters": {_ULM}}}',
        [],
        "text comes before the call",
    ),
    "`llama3_json`: text after the call": (
        "llama3_json",
        f'{{"name": "look", "parameters": {_ULM}}} Done.',
        [],
        "text follows the call",
    ),
    "`llama3_json`: the call is cut off": (
        "llama3_json",
        '{"name": "look", "parameters": {"place": "Ul',
        [],
        "ends inside the call",
    ),
    "`pythonic`: `<|python_start|>` and `<|python_end|>` around the calls": (
        "pythonic",
        "<|python_start|>[look(place='Ulm'), now()]<|python_end|>",
        _BOTH,
        "",
    ),
    "`pythonic`: JSON form": ("pythonic", f'{{"name": "look", "parameters": {_ULM}}}', _LOOK, ""),
    "`pythonic`: an argument without a name": ("pythonic", "[look('Ulm')]", [], "where a name must be"),
    "`pythonic`: a value that is no literal": ("pythonic", "[look(place=Ulm)]", [], "is no value"),
    "`pythonic`: text before the calls": ("pythonic", "I look: [look(place='Ulm')]", [], "text comes before the call"),
    "`mistral`: `[ARGS]` is missing": ("mistral", f"[TOOL_CALLS]look{_ULM}", [], "ends inside the call"),
    "`deepseek_v31`: `<｜tool▁calls▁end｜>` is missing": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{_ULM}<｜tool▁call▁end｜>",
        _LOOK,
        "",
    ),
    "`kimi_k2`: text between the arguments and `<|tool_call_end|>`": (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{_ULM} or"
        "<|tool_call_end|>",
        [],
        "<|tool_call_end|> does not follow",
    ),
    "`gemma4`: a mark of a text is missing": (
        "gemma4",
        '<|tool_call>call:look{place:<|"|>Ulm}<tool_call|>',
        [],
        "a text has no end",
    ),
    "any format: an unknown function": (
        "hermes",
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        [],
        "is none of the tools",
    ),
}
"""The first two columns of the table (format and malformed call) -> what the reader makes of it."""
