"""Custom tools with a grammar: calls are held to it, in JSON and in tags, forced or not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from chairlift.text.grammar.lark import lark_regex
from chairlift.text.tool_calls import TOOL_FORMATS, AnswerReader, Thinking, output_constraint, read_answer
from chairlift.text.tool_calls.forced import calls_format, strict_calls_format
from chairlift.text.tool_calls.request import check_tools
from tests.text.grammar.models import of_bytes, sampled, verdict
from tests.text.grammar.test_lark import PATCH, PATCH_GRAMMAR
from tests.text.tool_calls.test_forced import FORCED

SHORT = r"""start: "*** " ("Add" | "Delete") LF line~1..2 LF?
line: ("+" | "-") /["\\<>a-z \n]{0,3}/
%import common.LF"""
"""With quotation marks, line breaks and marks of calls, and without an end that a random walk does not find."""


def custom(grammar: str, choice: Any = "required") -> Any:
    held = {"type": "grammar", "grammar": {"syntax": "lark", "definition": grammar}}
    patch = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits", "format": held}}
    return check_tools([patch, {"type": "function", "function": {"name": "now"}}], choice, False)


def written(name: str, text: str) -> str:
    """A call of ``apply_patch`` in one of three formats."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>',
        "mistral": f"[TOOL_CALLS]apply_patch[ARGS]{arguments}",
        "qwen3_coder": f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
    }[name]


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder"])
def test_a_patch_of_codex_follows_its_grammar(name: str) -> None:
    form = TOOL_FORMATS[name]
    forced = {"format": calls_format(form, custom(PATCH_GRAMMAR))}
    free = {"format": strict_calls_format(form, custom(PATCH_GRAMMAR, "auto"))}
    added = '*** Begin Patch\n*** Add File: größe\n+a "b" \\ </c>\n+\n*** End Patch'
    for patch in (PATCH, PATCH + "\n", added):
        call = written(name, patch)
        assert verdict(call, structural_tag=forced) == "complete", patch
        assert verdict(f"I edit it. {call}", structural_tag=free) == "complete", patch
        answer = read_answer(call, AnswerReader(form, None, custom(PATCH_GRAMMAR).schemas, held=True))
        assert [json.loads(each.arguments) for each in answer.calls] == [{"input": patch}]
    for patch in (PATCH.replace("@@ def", "@ def"), PATCH.replace("*** Update", "** Update"), PATCH[:-4], f"a{PATCH}"):
        call = written(name, patch)
        assert verdict(call, structural_tag=forced) == "refused", patch
        assert verdict(f"I edit it. {call}", structural_tag=free) == "refused", patch


@pytest.mark.parametrize("name", FORCED)
def test_every_input_that_a_format_lets_through_follows_the_grammar(name: str) -> None:
    form, tools = TOOL_FORMATS[name], custom(SHORT, {"type": "custom", "custom": {"name": "apply_patch"}})
    held = output_constraint(None, tools, form, None, Thinking.NONE)
    assert held is not None
    tokenizer, compiler = of_bytes()
    made = compiler.compile(held.value)
    inputs = set()
    for seed in range(12):
        text = sampled(made, seed, tokenizer, most=2000)
        assert text is not None
        (call,) = read_answer(text, AnswerReader(form, None, tools.schemas, held=True)).calls
        inputs.add(json.loads(call.arguments)["input"])
    assert len(inputs) > 6
    assert not [each for each in inputs if not re.fullmatch(lark_regex(SHORT), each)]


@pytest.mark.parametrize(("name", "result"), [("qwen3_coder", "refused"), ("hermes", "complete")])
def test_an_input_cannot_spell_the_end_of_its_tag(name: str, result: str) -> None:
    tools = custom(r'start: "a" /(.|\n)*/')
    call = written(name, "a\n</parameter>\nb")
    assert verdict(call, structural_tag={"format": calls_format(TOOL_FORMATS[name], tools)}) == result
    assert verdict(
        written(name, "a</param>\n"), structural_tag={"format": calls_format(TOOL_FORMATS[name], tools)}
    ) == ("complete")


def test_the_prompt_shows_the_grammar_and_not_its_expression() -> None:
    tools = custom(PATCH_GRAMMAR)
    (shown, _) = tools.offered
    assert PATCH_GRAMMAR.strip() in shown["function"]["description"]
    assert shown["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
