"""``thinking_token_budget``: from a chat request to what the engine is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import AddedToken

from chairlift.base.thinking import ThinkingBudget
from chairlift.server.http.app import make_app
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine, byte_tokenizer, make_state
from tests.server.test_tools import HERMES, TOOLS

OPENED = HERMES.replace("assistant\n", "assistant\n<think>\n")
HARMONY = (
    "<|start|>{% for m in messages %}<|channel|>analysis<|message|>commentary to=functions. {{ m.content }}{% endfor %}"
    "{{ tools | default([]) | tojson }}"
)


def engine_with(template: str, *marks: str) -> FakeEngine:
    """An engine whose tokenizer has these marks as tokens of their own."""
    engine = FakeEngine()
    own = byte_tokenizer()
    backend = tokenizers.Tokenizer.from_str(own.backend.to_str())
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    engine.prompts.tokenizer = Tokenizer(backend, own.named_tokens, template)
    engine.info = dataclasses.replace(INFO, vocab_size=300)
    return engine


def ask(engine: FakeEngine, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        return http.post("/v1/chat/completions", json=body)


def budget_of(engine: FakeEngine, **fields: Any) -> ThinkingBudget | None:
    reply = ask(engine, **fields)
    assert reply.status_code == 200, reply.text
    return engine.submitted[-1][1].thinking


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_the_marks_are_those_of_the_template(name: str) -> None:
    engine = engine_with(HERMES, "<think>", "</think>")
    begin, end = (engine.prompts.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))  # type: ignore[union-attr]
    assert budget_of(engine, **{name: 7}) == ThinkingBudget(max_tokens=7, end=end, begin=(begin,))
    assert budget_of(engine_with(OPENED, "<think>", "</think>"), **{name: 0}) == ThinkingBudget(max_tokens=0, end=end)
    for fields in ({}, {name: -1}, {name: None}, {name: 7, "chat_template_kwargs": {"enable_thinking": False}}):
        assert budget_of(engine, **fields) is None
    assert budget_of(engine, thinking_token_budget=3, thinking_budget=9).max_tokens == 3  # type: ignore[union-attr]


def test_the_format_of_channels_needs_more_than_the_end() -> None:
    engine = engine_with(HARMONY, "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None
    budget = budget_of(engine, thinking_token_budget=7)
    assert budget is not None and tokenizer.token_to_id("<|end|>") == budget.end
    assert tokenizer.decode(budget.begin, False) == "<|channel|>analysis<|message|>"
    assert tokenizer.decode(budget.after, False) == "<|start|>assistant<|channel|>final<|message|>"
    with_tools = budget_of(engine, thinking_token_budget=7, tools=TOOLS)
    assert with_tools is not None and tokenizer.decode(with_tools.after, False) == "<|start|>assistant"


def test_a_template_that_knows_a_budget_is_told() -> None:
    engine = engine_with(HERMES + "{% if thinking_budget %}<{{ thinking_budget }}>{% endif %}", "<think>", "</think>")
    budget_of(engine, thinking_token_budget=7)
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None and tokenizer.decode(engine.submitted[-1][0], False).endswith("<7>")


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        (FakeEngine(), {}, "no reasoning is read"),
        (engine_with(HERMES, "<think>", "</think>"), {"separate_reasoning": False}, "separate_reasoning is false"),
        (engine_with(HERMES), {}, "</think> is no token of its own"),
        (engine_with(HERMES, "</think>"), {}, "<think> is no token of its own"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(engine: FakeEngine, fields: dict[str, Any], words: str) -> None:
    reply = ask(engine, thinking_token_budget=4, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "thinking_token_budget") and words in error["message"]


def test_a_text_completion_has_none() -> None:
    with TestClient(make_app(make_state()), base_url="http://localhost") as http:
        for value, status in ((-1, 200), (5, 400)):
            reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "thinking_token_budget": value})
            assert reply.status_code == status


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ()])
def test_the_budget_of_anthropics_messages_is_kept_where_it_can_be(marks: tuple[str, ...]) -> None:
    engine = engine_with(HERMES, *marks)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        reply = http.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    budget = engine.submitted[-1][1].thinking
    assert (budget is not None and budget.max_tokens == 2048) is bool(marks)
    assert ("thinking.budget_tokens" in reply.headers.get("warning", "")) is not bool(marks)
