"""The document is true: for the routes there are, for what they take and for what they answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.anthropic import messages
from chairlift.server.http import openapi
from chairlift.server.http.app import make_app
from chairlift.server.http.openapi import document
from chairlift.server.ollama.dialect import OLLAMA
from chairlift.server.openai import chat, completions, models, pooling, responses, tokens
from chairlift.server.openai.batches import endpoints as batches
from chairlift.server.openai.batches import files
from chairlift.server.operations import queue, traffic, weights
from tests.server.fake_engine import FakeEngine, make_state

DOCUMENT = document(make_state())


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_route_is_described() -> None:
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    documented = (
        *(chat, completions, responses, messages, pooling, models, tokens, queue, traffic, weights, openapi),
        *(files, batches, OLLAMA),
    )
    for route in [route for module in documented for route in module.routes]:
        path = re.sub(r":\w+}", "}", route.path)
        assert {(path, method) for method in (route.methods or set()) - {"HEAD"}} <= described
    for path in ("/health", "/ready", "/ping", "/version", "/load", "/metrics"):
        assert (path, "GET") in described


def test_every_reference_leads_somewhere() -> None:
    names = {name.removeprefix("#/components/schemas/") for name in references(DOCUMENT)}
    assert names <= set(DOCUMENT["components"]["schemas"])
    assert {"ChatRequest", "TokenizeRequest", "ErrorReply"} <= names


def test_bounds_are_in_the_document() -> None:
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    (number,) = [option for option in properties["n"]["anyOf"] if option["type"] == "integer"]
    assert (number["minimum"], number["maximum"]) == (1, 16)


def test_keys_are_in_the_document_when_there_are_any() -> None:
    assert "security" not in DOCUMENT
    with_keys = document(make_state(api_key=("secret-key",)))
    assert with_keys["security"] == [{"bearer": []}, {"key": []}]
    assert with_keys["paths"]["/health"]["get"]["security"] == []
    assert "secret-key" not in str(with_keys)


@pytest.mark.full
def test_generated_requests_get_what_the_document_says() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    engine = FakeEngine()
    app = make_app(make_state(engine))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    num_calls = 0

    def try_out(operation: Any) -> None:
        @settings(max_examples=25, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            case.call_and_validate(headers={"Host": "localhost"}, checks=checks)

        run()

    for each in schema.exclude(path="/v1/traffic").get_all_operations():  # which goes on until somebody leaves
        try_out(each.ok())
    assert num_calls > 100
    assert engine.num_requests == 0


def test_the_page_gets_the_document() -> None:
    with TestClient(make_app(make_state()), base_url="http://localhost") as http:
        reply = http.get("/openapi.json")
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["openapi"] == "3.1.0"
