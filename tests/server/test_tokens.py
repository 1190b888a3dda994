"""Tokens and texts, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.engine.async_engine import EngineState
from chairlift.server.http.app import make_app
from tests.server.fake_engine import INFO, FakeEngine, make_state


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


def refused(http: TestClient, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize("text", ["", "Dé 😀<|im_end|>\n", "x" * 20_000])
def test_tokenize_and_detokenize_are_inverse(http: TestClient, engine: FakeEngine, text: str) -> None:
    reply = http.post("/tokenize", json={"model": "fake", "prompt": text, "return_token_strs": True}).json()
    assert engine.prompts.tokenizer is not None
    assert reply["tokens"] == engine.prompts.tokenizer.encode(text)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), INFO.max_model_len)
    assert reply["token_strs"] == [engine.prompts.tokenizer.decode([token], False) for token in reply["tokens"]]
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_messages_are_laid_out_as_for_an_answer(http: TestClient, engine: FakeEngine) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert tokens == engine.submitted[0][0]
    shorter = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] < len(tokens)
    assert shorter["token_strs"] is None


def test_text_that_spells_a_control_token_becomes_this_token(http: TestClient) -> None:
    """As SECURITY.md says, with the remedy."""

    def ends(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        reply = http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
        assert reply["token_strs"].count("<|im_end|>") == reply["tokens"].count(257)
        return int(reply["tokens"].count(257))

    assert ends("a<|im_end|>b") == ends("ab") + 1
    assert ends("a<|im_end |>b") == ends("ab")


def test_impossible_fields_are_refused_by_name(http: TestClient) -> None:
    assert refused(http, "/tokenize")["param"] == "prompt"
    assert refused(http, "/tokenize", prompt="x", messages=[{"role": "user", "content": "x"}])["param"] == "prompt"
    messages = [{"role": "user", "content": "x"}]
    assert refused(http, "/tokenize", messages=messages, add_special_tokens=True)["param"] == "add_special_tokens"
    assert "from 0 to 257" in refused(http, "/detokenize", tokens=[258])["message"]
    assert refused(http, "/detokenize", tokens=[-1])["param"] == "tokens[0]"
    assert refused(http, "/detokenize", tokens=[0] * (2**18 + 1))["param"] == "tokens"
    assert http.post("/detokenize", json={"tokens": [], "model": "gpt-9"}).status_code == 404
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_long_texts_wait_in_their_own_queue(http: TestClient, engine: FakeEngine) -> None:
    engine.full = True
    for path, body in (
        ("/detokenize", {"tokens": [65] * 513}),
        ("/tokenize", {"prompt": "x" * 513, "return_token_strs": True}),
    ):
        reply = http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert http.post("/detokenize", json={"tokens": [65] * 512}).status_code == 200


def test_there_must_be_a_tokenizer() -> None:
    for engine, status in ((FakeEngine(with_tokenizer=False), 400), (FakeEngine(state=EngineState.LOADING), 503)):
        with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
            assert http.post("/tokenize", json={"prompt": "x"}).status_code == status
            assert http.post("/detokenize", json={"tokens": [1]}).status_code == status


def test_tokens_are_told_one_by_one_up_to_a_number(http: TestClient) -> None:
    text = "x" * (2**18 + 1)
    error = refused(http, "/tokenize", prompt=text, return_token_strs=True)
    assert error["param"] == "return_token_strs"
    assert "there are 262,145 tokens, and return_token_strs takes 262,144" in error["message"]
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] == 2**18 + 1
