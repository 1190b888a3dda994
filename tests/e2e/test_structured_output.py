"""Answers held to a form, over HTTP with the official client. HashLM knows no JSON: only the grammar makes it one."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.served import HI, answers


class Brief(pydantic.BaseModel):
    """The schema of an answer, as a client's class."""

    mood: Literal["good", "bad"]
    score: int


SCHEMA = Brief.model_json_schema() | {"additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "brief", "schema": SCHEMA, "strict": True}}


def test_the_client_parses_an_object_of_its_class(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model="hashlm", messages=HI, response_format=Brief, seed=3, max_tokens=500)
    assert isinstance(found.choices[0].message.parsed, Brief) and found.choices[0].finish_reason == "stop"


def test_every_way_to_ask_for_a_form_gives_valid_answers(client: openai.OpenAI) -> None:
    def text(**asked: Any) -> str:
        reply = client.completions.create(model="hashlm", prompt="Hi", max_tokens=600, seed=4, extra_body=asked)
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].text

    for asked in ({"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}):
        Brief.model_validate_json(text(**asked))
    assert re.fullmatch("[ab]{3}[0-9]", text(structured_outputs={"regex": "[ab]{3}[0-9]"}))
    assert re.fullmatch("[ab]{3}[0-9]", text(guided_regex="[ab]{3}[0-9]"))
    assert text(guided_choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch("x+y", text(guided_grammar='start: "x"+ "y"'))
    tag = {"structures": [{"begin": "<b>", "schema": SCHEMA, "end": "</b>"}], "triggers": ["<b>"]}
    one = {"type": "tag", "begin": "<b>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</b>"}
    Brief.model_validate_json(text(structured_outputs={"structural_tag": {"format": one}})[3:-4])
    for asked in ({"structural_tag": tag}, {"response_format": {"type": "structural_tag", **tag}}):
        assert client.completions.create(model="hashlm", prompt="Hi", max_tokens=5, extra_body=asked).choices


def test_streamed_answers_are_valid_and_change_no_neighbour(client: openai.OpenAI) -> None:
    """Streamed is whole, each of n answers is valid, and a request beside them is what it is alone."""
    ask: Any = {"model": "hashlm", "messages": HI, "response_format": FORMAT, "seed": 9, "max_tokens": 500, "n": 2}
    with ThreadPoolExecutor(2) as threads:
        beside = threads.submit(
            lambda: client.chat.completions.create(model="hashlm", messages=HI, seed=7, max_tokens=24).choices[0]
        )
        whole = [choice.message.content or "" for choice in client.chat.completions.create(**ask).choices]
        texts = ["", ""]
        for chunk in client.chat.completions.create(stream=True, **ask):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert beside.result().message.content == answers("Hi", seed=7, max_tokens=24)[0].text
    assert texts == whole and len([Brief.model_validate_json(text) for text in texts]) == 2


def test_an_answer_that_is_cut_off_says_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="hashlm", messages=HI, response_format=FORMAT, max_tokens=4)
    assert reply.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="hashlm", messages=HI, response_format=Brief, max_tokens=4)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"not": {}}}, "guided_json", '"not"'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {"minimum": 3}, "then": False}}}},
        "response_format",
        '"if"',
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "json_schema"),
    ({"response_format": {"type": "poem"}}, "response_format", "poem"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "leave all but one out"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "min_tokens is 2"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}}, "guided_json", "followed"),
]


@pytest.mark.parametrize(("asked", "param", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(client: openai.OpenAI, asked: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="hashlm", prompt="Hi", max_tokens=9, extra_body=asked)
    assert (caught.value.param or "") == param and named in caught.value.message
