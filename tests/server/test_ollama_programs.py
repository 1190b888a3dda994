"""The requests of Open WebUI and of Continue to a server of Ollama, by the fields that these programs send."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from chairlift.server.http.app import make_app
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.test_ollama import ask
from tests.server.test_tools import CALLS, TOOLS, says

SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is the weather in Ulm?"},
]
CALLED: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "look", "arguments": {"place": "Ulm"}}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
OPEN_WEBUI: dict[str, dict[str, Any]] = {
    "a chat": {"messages": SAID, "stream": True},
    "all parameters of a model": {
        "messages": SAID,
        "stream": True,
        "keep_alive": "5m",
        "think": False,
        "options": {
            **{"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3, "num_predict": 128},
            **{"num_ctx": 4096, "num_batch": 512, "num_keep": 24, "num_thread": 4, "num_gpu": 1, "use_mmap": True},
            **{"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1, "stop": ["<end>"]},
        },
    },
    "tools": {"messages": [*SAID, *CALLED], "stream": True, "tools": TOOLS},
    "a title": {"messages": SAID[1:2], "stream": False, "options": {"num_predict": 50}},
}
CONTINUE_OPTIONS: dict[str, Any] = {"num_predict": 64, "num_ctx": 2048, "temperature": 0.2, "stop": ["\n\n"]}
CONTINUE: dict[str, dict[str, Any]] = {
    "a chat": {"messages": SAID, "options": CONTINUE_OPTIONS, "keep_alive": 1800, "stream": True},
    "an agent": {"messages": SAID, "options": CONTINUE_OPTIONS, "keep_alive": 1800, "stream": False, "tools": TOOLS},
    "an agent's second step": {
        "messages": [*SAID, CALLED[0], {"role": "tool", "tool_name": "look", "content": "rain"}],
        "options": {**CONTINUE_OPTIONS, "num_thread": 8, "use_mmap": False},
        "keep_alive": 1800,
    },
}


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


def said_in(reply: Any) -> str:
    """Thinking and content of an answer, or of the lines of one."""
    replies = reply if isinstance(reply, list) else [reply]
    assert [each["done"] for each in replies] == [False] * (len(replies) - 1) + [True]
    return "".join(each["message"].get("thinking", "") + each["message"]["content"] for each in replies)


@pytest.mark.parametrize(
    "body", [*OPEN_WEBUI.values(), *CONTINUE.values()], ids=[*OPEN_WEBUI, *(f"Continue: {name}" for name in CONTINUE)]
)
def test_chats_are_answered(http: TestClient, body: dict[str, Any]) -> None:
    assert said_in(ask(http, **{**body, "model": "fake:latest"}))


def test_an_option_that_only_open_webui_knows_is_named(http: TestClient) -> None:
    body = {"model": "fake", "messages": SAID, "stream": False, "options": {"new_topic_penalty": 0.5, "num_predict": 2}}
    reply = http.post("/api/chat", json=body)
    assert reply.status_code == 200 and "new_topic_penalty" in reply.headers["warning"]


def test_the_other_calls_of_both_programs(http: TestClient) -> None:
    listed, *_ = http.get("/api/tags").json()["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= listed.keys()
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/api/version").json()["version"])  # Open WebUI takes the lowest
    loaded, *_ = http.get("/api/ps").json()["models"]
    assert {"expires_at", "size_vram"} <= loaded.keys()
    unloaded = http.post("/api/generate", json={"model": "fake", "prompt": "", "keep_alive": 0}).json()
    assert unloaded["done"]
    shown = http.post("/api/show", json={"name": listed["name"]}).json()
    for line in filter(None, shown["parameters"].split("\n")):  # as Continue splits it
        assert re.fullmatch(r'\S+\s+(".*"|\S+)', line)
    done = http.post("/api/pull", json={"model": "fake:latest", "stream": True}).text.splitlines()
    assert '"success"' in done[-1]


def test_continues_completion_of_code_is_raw_text(http: TestClient, engine: FakeEngine) -> None:
    prompt = "<fim_prefix>def f(<fim_suffix>\n<fim_middle>"
    body = {"prompt": prompt, "raw": True, "options": CONTINUE_OPTIONS, "keep_alive": 1800, "stream": True}
    lines = ask(http, "generate", **body)
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None and tokenizer.decode(engine.submitted[-1][0], False) == prompt
    assert lines[-1]["done"] and "context" not in lines[-1]
