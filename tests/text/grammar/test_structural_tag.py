"""Structural tags: free text around tags, markers as tokens, and no text where none may be."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.byte_level import byte_tokenizer
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.text.grammar.models import follow

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<call>{"name": "f", "arguments": {"city": "Ulm"}}</call>'
PLAIN = '<function=g>{"city": "Ulm"}</function>'


def _model() -> Tokenizer:
    tokenizer = byte_tokenizer(("<|end|>",), eos="<|end|>")
    tokenizer.backend.add_tokens(["<call>", "</call>", "<think>", "</think>"])
    return Tokenizer(tokenizer.backend, {"eos_token": "<|end|>"})


MODEL = _model()
COMPILER = GrammarCompiler(lambda: MODEL, MODEL.vocab_size)


def verdict(text: str, tag: dict[str, Any]) -> str:
    """The text as the model writes it: markers are one token each."""
    made = COMPILER.compile(StructuredOutputsParams(structural_tag=tag).value)
    return follow(made, MODEL.encode(text, False), 256)[0]


def structure(name: str) -> dict[str, Any]:
    return {"begin": f'<call>{{"name": "{name}", "arguments": ', "schema": CITY, "end": "}</call>"}


def tag(name: str) -> dict[str, Any]:
    given = structure(name)
    content = {"type": "json_schema", "json_schema": given["schema"]}
    return {"type": "tag", "begin": given["begin"], "content": content, "end": given["end"]}


MARKED = {"structures": [structure("f"), structure("g")], "triggers": ["<call>"]}
UNMARKED = {
    "structures": [{"begin": f"<function={name}>", "schema": CITY, "end": "</function>"} for name in "fg"],
    "triggers": ["<function="],
}
REQUIRED = {
    "format": {"type": "tags_with_separator", "tags": [tag("f"), tag("g")], "separator": "\n", "at_least_one": True}
}
ONE = {"format": {**REQUIRED["format"], "stop_after_first": True}}
AT_LEAST = {"format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("f")], "at_least_one": True}}
THINK = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "const_string", "value": "\n\n"},
            {"type": "json_schema", "json_schema": CITY},
        ],
    }
}
EITHER = {
    "format": {
        "type": "or",
        "elements": [{"type": "regex", "pattern": "[0-9]+/x"}, {"type": "const_string", "value": "none"}],
    }
}
LAZY = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        MARKED,
        ["", "Hello", CALL, f"Hello {CALL}", f"{CALL}\n{CALL} bye", f"<think>hm</think>{CALL}"],
        [CALL.replace('"f"', '"h"'), CALL.replace("Ulm", 'Ulm", "x": "y'), CALL[:-7], "</call>"],
    ),
    (
        UNMARKED,
        ["", "Hi <b>", PLAIN, f"Hi {PLAIN} and {PLAIN}", f"<think>hm</think>{PLAIN}"],
        ["<function=h>", PLAIN.replace("city", "town"), PLAIN[:-2]],
    ),
    (REQUIRED, [CALL, f"{CALL}\n{CALL}"], ["", "Hi", f"Hi {CALL}", f"{CALL} {CALL}", CALL + "\n"]),
    (ONE, [CALL], ["", f"{CALL}\n{CALL}"]),
    (AT_LEAST, [CALL, f"Well. {CALL}", f"{CALL} bye"], ["", "no call"]),
    (THINK, ['<think>so {"a" it is</think>\n\n{"city": "Ulm"}'], ['{"city": "Ulm"}', "<think>so</think>\n\nUlm"]),
    (EITHER, ["12/x", "none"], ["12", "nothing"]),
    (LAZY, ["<a>foo < bar</a>"], ["<a>foo", "<a>foo</a>x"]),
]


@pytest.mark.parametrize(("spec", "good", "bad"), CASES)
def test_texts_are_accepted_exactly_if_they_follow_the_tag(
    spec: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert verdict(text, spec) == "complete", text
    for text in bad:
        assert verdict(text, spec) != "complete", text


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"a": 1}, "structures and triggers, or format"),
    ({"format": {"type": "poem"}}, "'poem'"),
    ({"structures": [], "triggers": ["<"]}, "structures must be"),
    ({"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]}, "begins with one of the triggers"),
    ({"structures": [{"begin": "x", "schema": {"not": {}}, "end": ""}], "triggers": ["x"]}, '"not"'),
    ({"structures": [{"begin": "x", "schema": {"x-guidance": {}}, "end": ""}], "triggers": ["x"]}, "x-guidance"),
    (
        {"structures": [{"begin": "x<call>", "schema": {}, "end": ""}], "triggers": ["x<call>"]},
        "begin it with the marker",
    ),
    (
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "x"}]}},
        "before plain text",
    ),
]


@pytest.mark.parametrize(("spec", "named"), WRONG)
def test_errors_name_the_place(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        verdict("", spec)
    assert named in str(caught.value)
