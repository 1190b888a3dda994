"""Requests are JSON about texts and token ids: no route takes objects, none but /v1/files takes files, and none fetches
anything."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from chairlift import server
from chairlift.server.anthropic import messages, messages_types
from chairlift.server.http import openapi
from chairlift.server.http.app import make_app
from chairlift.server.ollama import bodies as ollama
from chairlift.server.ollama.dialect import OLLAMA
from chairlift.server.openai import chat, completions, models, protocol, responses, responses_types, tokens
from chairlift.server.operations import health, queue, traffic
from chairlift.server.pages import live, pages
from chairlift.text.tokenizer.chat_template import ChatTemplate
from tests.server import fake_engine
from tests.server.fake_engine import FakeEngine, make_state

POSTS = {
    *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses/{response_id}/cancel", "/v1/responses/input_tokens"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull"),
    *("/api/create", "/api/push", "/api/copy"),
}
ON_MODELS = {"/api/embed", "/api/embeddings", "/api/pull", "/api/create", "/api/push", "/api/copy", "/api/show"}
"""Posts that generate nothing. The fake model has no embeddings and no files."""
DELETES = {"/v1/responses/{response_id}", "/api/delete"}
NAMED = {"/v1/models/{name:path}", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"}
GETS = {
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
    *("/", "/docs", "/openapi.json", "/v1/models", "/v1/models/{name:path}"),
    *("/v1/queue", "/v1/requests", "/v1/traffic"),
    *("/live", "/live/", "/live/events", "/live/export", "/live/compare", "/live/demo"),
    *("/api/tags", "/api/ps", "/api/version"),
    *("/health", "/ping", "/ready", "/version", "/load", "/metrics"),
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "prompt": "x", "options": {"num_predict": 2}},
}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
    "/v1/responses": responses_types.ResponsesRequest,
    "/v1/responses/input_tokens": responses_types.ResponsesRequest,
    "/v1/messages": messages_types.MessagesRequest,
    "/v1/messages/count_tokens": messages_types.CountTokensRequest,
    "/api/chat": ollama.OllamaChat,
    "/api/generate": ollama.OllamaGenerate,
}
LURES = (
    *("http://127.0.0.1:9/lure", "https://example.org/lure", "ftp://127.0.0.1/lure", "//127.0.0.1:9/lure"),
    *("file:///etc/passwd", "/etc/passwd", "../../../../etc/passwd", "\\\\127.0.0.1\\lure", "data:text/plain,x"),
    *("gASVCgAAAAAAAACMBmxhbWJkYZQu", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "!!python/object:os"),
)
_heard: list[tuple[str, str]] | None = None


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if _heard is not None and event in _TOLD:
        _heard.append((event, repr(args[:2])))


_TOLD = {
    *("open", "socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.exec", "os.system"),
    *("pickle.find_class", "compile", "exec", "os.listdir", "os.scandir", "urllib.Request", "marshal.loads", "import"),
    *("ctypes.dlopen", "shutil.copyfile", "os.remove", "os.rename", "os.mkdir", "glob.glob"),
}
sys.addaudithook(_listen)


@contextmanager
def heard() -> Iterator[list[tuple[str, str]]]:
    """Files, sockets, programs and code that the process opens meanwhile."""
    global _heard
    _heard = found = []
    try:
        yield found
    finally:
        _heard = None


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    engine = FakeEngine()
    template = ChatTemplate(engine.prompts.tokenizer.chat_template, engine.prompts.tokenizer.named_tokens)
    monkeypatch.setattr(fake_engine, "ChatTemplate", lambda *_: template)  # else the model's is compiled each time
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        for path, body in GOOD.items():  # what is imported at the first use is there now
            assert client.post(path, json=body).status_code == 200
            assert client.post(path, json={"model": 1}).status_code == 400
        for path in ("/v1/models/x", "/docs", "/"):
            client.get(path)
        yield client


def all_routes() -> list[Route]:
    modules = (chat, completions, responses, messages, models, openapi, pages, queue, tokens, traffic, live)
    return [*health.routes, *(route for module in modules for route in module.routes), *OLLAMA.routes]


def test_the_server_has_exactly_the_listed_routes() -> None:
    """A new route belongs into this list, and into the tests of this file."""
    assert {route.path for route in all_routes() if route.methods == {"POST"}} == POSTS
    assert POSTS - set(GOOD) == {"/v1/responses/{response_id}/cancel", *ON_MODELS}  # it reads no body
    others = {route.path for route in all_routes() if route.methods != {"POST"}}
    assert {path for path in others if not path.startswith("/static/")} == GETS | DELETES
    reads = [route for route in all_routes() if route.path in others and route.methods != {"DELETE"}]
    assert all(route.methods == {"GET", "HEAD"} for route in reads)
    assert {route.path for route in all_routes() if route.methods == {"DELETE"}} == DELETES
    assert all("{" not in path for path in others - NAMED)


@pytest.mark.full
def test_nothing_is_reached_for_on_behalf_of_a_client(http: TestClient) -> None:
    """Each lure in each field, in texts, and in the path: no file, no socket, no program, no code."""
    num_requests = 0
    with heard() as events:
        for path, good in GOOD.items():
            struct = BODIES[path]
            names = [*struct.__struct_fields__, *protocol.REFUSED, "file", "image_url", "input_audio", "unknown"]
            for name in names:
                for lure in LURES[:: 1 if name in ("prompt", "messages", "file", "chat_template", "model") else 3]:
                    reply = http.post(path, json=good | {name: lure if name != "stop" else [lure]})
                    assert reply.status_code in (200, 400, 404), (path, name, lure)
                    num_requests += 1
        for lure in LURES:
            for kind in ("image_url", "input_audio", "file", "video_url", "input_image"):
                part = {"type": kind, kind: {"url": lure, "data": lure, "file_id": lure}}
                message = {"role": "user", "content": [part]}
                reply = http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
                assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_content")
            assert http.get("/v1/models/" + lure.replace("?", "").replace("#", "")).status_code in (400, 404)
            assert http.get("/docs", params={"url": lure}).status_code == 200
    assert not events
    assert num_requests > 800


def test_the_audit_hears_open_compile_and_exec() -> None:
    with heard() as events:
        Path("/etc/hostname").exists()
        with open("/dev/null"):
            pass
        eval("1 + 1")
    assert {name for name, _ in events} >= {"open", "compile", "exec"}


@pytest.mark.parametrize("path", sorted(GOOD))
@pytest.mark.parametrize(
    "kind",
    [
        *("multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "application/octet-stream"),
        *("application/x-python-pickle", "application/yaml", "application/xml", "application/msgpack", "text/plain"),
        *("application/x-ndjson", "application/zip", "image/png", ""),
    ],
)
def test_bodies_are_read_as_json_only(http: TestClient, path: str, kind: str) -> None:
    bodies = (
        json.dumps(GOOD[path]).encode(),
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.json"\r\n\r\n{}\r\n--x--\r\n',
        b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00\x8c\x06lambda\x94.",
        b"PK\x03\x04" + b"\x00" * 26,
    )
    with heard() as events:
        for body in bodies:
            assert http.post(path, content=body, headers={"content-type": kind}).status_code == 415
    assert not events


CLIENTS = {"requests", "httpx", "aiohttp", "urllib", "http", "ftplib", "smtplib", "pickle", "marshal", "shelve", "yaml"}
FILES = {"UploadFile", "FileResponse", "StaticFiles", "form", "multipart", "urlopen", "open_connection"}


def test_the_package_of_the_server_has_no_way_to_fetch_or_to_take_files() -> None:
    """Everything that could fetch an address for a client, or take a client's file, has one of these names."""
    batches = Path(server.__file__).parent / "openai" / "batches"
    of_batches = {batches / "files.py", batches / "store.py"}  # they take files, where the operator has told them to
    found = []
    for file in Path(server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                found += [(file.name, name) for name in modules if name.split(".")[0] in CLIENTS and name != "http"]
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            if name in FILES and file not in of_batches:
                found.append((file.name, name))
    assert not found
