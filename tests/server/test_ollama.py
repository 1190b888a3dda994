"""Ollama's API: lines, options, tools, thinking, errors and model names, against a scripted model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.base.service_class import parse_service_classes
from chairlift.errors import EngineDeadError
from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_tools import CALLS, HERMES, TOOLS, says

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
METRICS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
}
OTHER_PATHS = {
    **{"/completion": "/v1/completions", "/infill": "/v1/completions", "/embedding": "/v1/embeddings"},
    **{"/slots": "/v1/requests", "/props": "/v1/models", "/chat/completions": "/v1/chat/completions"},
    **{"/generate": "/v1/completions", "/generate_stream": "/v1/completions", "/info": "/v1/models"},
    **{"/": "/v1/completions", "/apply-template": "/tokenize", "/lora-adapters": "/v1/load_lora_adapter"},
}
"""Path of llama.cpp or TGI -> path that the error names."""


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    says(made, CALLS)
    return made


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client
    assert engine.num_requests == 0


def ask(http: TestClient, path: str = "chat", status: int = 200, **fields: Any) -> Any:
    body = {"model": "fake", **({"messages": ASK} if path == "chat" else {}), **fields}
    reply = http.post(f"/api/{path}", json=body)
    assert reply.status_code == status, reply.text
    if body.get("stream") is False or status != 200:
        return reply.json()
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def refused(http: TestClient, path: str = "chat", status: int = 400, **fields: Any) -> str:
    told = ask(http, path, status, **fields)
    assert list(told) == ["error"]
    message: str = told["error"]
    return message


def test_a_stream_and_a_whole_answer_say_the_same(http: TestClient) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "options": {"num_predict": 400}, "think": True}
    whole = ask(http, stream=False, **fields)
    lines = ask(http, **fields)
    assert whole["message"]["content"] == "I look."
    assert whole["message"]["thinking"].strip() == "Hm. é"
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == [("look", {"place": "Ulm 😀"}), ("now", {})]
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in lines) == whole["message"][name]
    streamed = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert streamed == calls
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in (lines[-1], whole):
        assert set(last) >= METRICS
        assert (last["model"], last["done_reason"], last["done"]) == ("fake", "stop", True)
        assert last["eval_count"] == lines[-1]["eval_count"] > 0 < last["eval_duration"] <= last["total_duration"]


def test_generate_in_all_its_ways(http: TestClient, engine: FakeEngine) -> None:
    whole = ask(http, "generate", prompt="Hi", system="Be brief", stream=False, options={"num_predict": 400})
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None
    prompt = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(engine.submitted[-1][0], False) == prompt
    assert whole["context"] == [*engine.submitted[-1][0], *engine.script[: whole["eval_count"]]]
    lines = ask(http, "generate", prompt="Go on", context=whole["context"], options={"num_predict": 3})
    assert engine.submitted[-1][0][: len(whole["context"])] == whole["context"]
    assert lines[-1]["done_reason"] == "length"
    raw = ask(http, "generate", prompt="a b", raw=True, stream=False, options={"num_predict": 4})
    assert tokenizer.decode(engine.submitted[-1][0], False) == "a b"
    assert ("context" in raw, raw["eval_count"], raw["response"]) == (False, 4, tokenizer.decode(engine.script[:4]))
    assert "suffix" in refused(http, "generate", prompt="a", suffix="b")
    assert "template" in refused(http, "generate", prompt="a", template="{{ .Prompt }}")
    for path in ("chat", "generate"):
        (loaded,) = ask(http, path, messages=[]) if path == "chat" else ask(http, path, keep_alive=0)
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_options_reach_the_engine_or_are_refused(
    http: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        **{"num_predict": 5.0, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["zz"]},
        **{"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "repeat_last_n": -1},
        **{"num_ctx": 99_999, "num_gpu": 1, "mirostat": 0, "strange": 1},
    }
    with caplog.at_level(logging.INFO, "chairlift"):
        reply = http.post("/api/chat", json={"model": "fake", "messages": ASK, "options": options, "stream": False})
    assert reply.status_code == 200
    assert all(name in reply.headers["warning"] for name in ("options.num_ctx", "options.num_gpu", "options.strange"))
    assert {"names": "strange"} in [getattr(record, "fields", None) for record in caplog.records]
    params = engine.submitted[-1][1]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, params.stop) == (0.1, 3, ("zz",))
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    for given, said in (
        ({"mirostat": 1}, "mirostat is not supported"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "options.repeat_last_n is 64"),
        ({"temperature": -1}, "options.temperature"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"top_k": "many"}, "options: top_k must be"),
    ):
        assert said in refused(http, options=given)
    assert "belongs into options" in refused(http, temperature=0.1)
    assert "format" in refused(http, format="yaml")
    assert "think" in refused(http, think="hard")


def test_formats_and_scheduling_reach_the_engine(http: TestClient, engine: FakeEngine) -> None:
    engine.prompts.follows_grammars = True
    engine.service_classes = parse_service_classes("")
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    for given in ("json", schema):
        ask(http, format=given, stream=False, priority=3, deadline_ms=5000, options={"num_predict": 9})
        params = engine.submitted[-1][1]
        assert params.structured_outputs is not None
        assert (params.priority, params.deadline_ms) == (3, 5000)
    engine.full = True
    reply = http.post("/api/chat", json={"model": "fake", "messages": ASK})
    assert (reply.status_code, list(reply.json())) == (429, ["error"])
    assert int(reply.headers["retry-after"]) >= 1


def test_a_tool_s_result_belongs_to_the_call_of_its_name(http: TestClient, engine: FakeEngine) -> None:
    says(engine, "Rain.", HERMES.replace("{{ m.content }}", "{{ m.name or '' }}:{{ m.content }}"))
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("look", "now")]
    history = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
        {"role": "tool", "content": "rain"},
    ]
    assert ask(http, messages=history, tools=TOOLS, stream=False)["message"]["content"].startswith("R")
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.decode(engine.submitted[-1][0], False)
    assert "now:12:00" in prompt
    assert "look:rain" in prompt
    assert "messages[1].tool_calls[0].function" in refused(
        http, messages=[*ASK, {"role": "assistant", "tool_calls": [{}]}]
    )
    assert "messages[0].content" in refused(http, messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert "image" in refused(http, messages=[{"role": "user", "content": "x", "images": ["iVBORw0KGgo="]}])


def test_names_with_and_without_a_tag(http: TestClient) -> None:
    assert ask(http, model="fake:latest", stream=False, options={"num_predict": 2})["model"] == "fake:latest"
    for path in ("chat", "show", "pull"):
        assert refused(http, path, 404, model="llama3").startswith("model 'llama3' not found")
    assert refused(http, model="") == "model is required"
    listed, other = http.get("/api/tags").json()["models"]
    running, _ = http.get("/api/ps").json()["models"]
    assert listed["name"] == running["model"] == "fake:latest"
    assert (other["name"], other["digest"] != listed["digest"]) == ("other-name:latest", True)
    assert (len(listed["digest"]), running["context_length"]) == (64, 2048)
    shown = http.post("/api/show", json={"name": "fake"}).json()
    assert {"completion", "tools", "thinking"} == set(shown["capabilities"])
    assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 2048
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == 200


def test_models_are_neither_fetched_nor_changed(http: TestClient) -> None:
    assert [line["status"] for line in ask(http, "pull", model="fake")] == ["pulling manifest", "success"]
    assert ask(http, "pull", model="fake", stream=False) == {"status": "success"}
    for name in ("create", "push", "copy"):
        assert "here" in refused(http, name)
    assert "not deleted here" in http.request("DELETE", "/api/delete", json={"model": "fake"}).json()["error"]
    assert "chairlift serve" in http.post("/api/blobs/sha256:0", json={}).json()["error"]
    assert "/v1/chat/completions" in refused(http, "embed", input="x")


def test_errors_have_ollama_s_form_with_keys_and_in_streams(engine: FakeEngine) -> None:
    with TestClient(make_app(make_state(engine, api_key=("secret-key",))), base_url="http://localhost") as http:
        assert list(http.get("/api/tags").json()) == ["error"]
        http.headers["authorization"] = "Bearer secret-key"
        engine.failure_of_streams, engine.fail_after = EngineDeadError("gone"), 2
        lines = ask(http, options={"num_predict": 400})
        assert list(lines[-1]) == ["error"]
        assert not any(line.get("done") for line in lines)


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_paths_of_other_servers_say_what_to_use(http: TestClient, path: str) -> None:
    reply = http.post(path, json={})
    assert reply.status_code == 404
    assert OTHER_PATHS[path] in reply.json()["error"]["message"]
