"""The list of models that a server has."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
from starlette.testclient import TestClient

from chairlift.engine.async_engine import EngineState
from chairlift.server.http.app import make_app
from tests.server.fake_engine import INFO, FakeEngine, make_state


def client_of(engine: FakeEngine) -> openai.OpenAI:
    made: Any = TestClient(make_app(make_state(engine)), base_url="http://localhost")
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", http_client=made, max_retries=0)


def test_every_name_is_listed_and_can_be_asked_for() -> None:
    client = client_of(FakeEngine())
    assert [model.id for model in client.models.list()] == ["fake", "other-name"]
    card: Any = client.models.retrieve("other-name")
    assert (card.object, card.owned_by, card.root, card.created) == ("model", "chairlift", "fake", 1_700_000_000)
    assert card.max_model_len == INFO.max_model_len
    reply = client.chat.completions.create(model="other-name", messages=[{"role": "user", "content": "Hi"}])
    assert reply.model == "fake"


def test_other_names_are_not_found_and_the_message_says_what_is_there() -> None:
    http = TestClient(make_app(make_state()), base_url="http://localhost")
    for name in ("gpt-9", "a/b", "fake ", "Fake", "..", "%2e%2e/x", "é"):
        reply = http.get(f"/v1/models/{name}")
        assert reply.status_code == 404, name
    error = http.get("/v1/models/org/name").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "fake, other-name" in error["message"]


def test_the_card_says_what_repeats() -> None:
    engine = FakeEngine()
    card: Any = client_of(engine).models.retrieve("fake")
    assert card.deterministic is True and "same tokens" in card.determinism
    assert card.quantization is None and card.kv_cache_dtype is None and card.speculative_method is None
    assert card.approximations == []
    engine.info = dataclasses.replace(INFO, deterministic=False, quantization="fp8", kv_cache_dtype="int8")
    engine.info = dataclasses.replace(engine.info, approximations=("8-bit K and V",))
    card = client_of(engine).models.retrieve("fake")
    assert card.deterministic is False and "can differ" in card.determinism and card.quantization == "fp8"
    assert card.kv_cache_dtype == "int8" and card.approximations == ["8-bit K and V"]


def test_the_list_is_there_while_the_model_loads() -> None:
    card: Any = client_of(FakeEngine(state=EngineState.LOADING)).models.retrieve("fake")
    assert card.max_model_len is None
