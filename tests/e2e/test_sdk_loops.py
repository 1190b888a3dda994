"""SDKs and agent libraries in scripted tool loops, in their newest versions. They need a package registry.

The libraries run in processes of their own, against a real HTTP server. The model behind it follows a script
(:mod:`tests.e2e.sdks.model`), so what a library gives to its caller is known.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.http.app import make_app
from tests.e2e.sdks.model import THOUGHT, ScriptedEngine
from tests.e2e.server_process import ServerProcess
from tests.models.vision.tiny import picture, tiny_vlm
from tests.native import needs_kernels
from tests.server.fake_engine import INFO, FakeEngine, make_state
from tests.server.harness import run, serving
from tests.server.test_sdk_shapes import CHAT_TOOLS, MESSAGE_TOOLS, OURS, RESPONSE_TOOLS, data_of
from tests.server.test_tools import CALLS, says

pytestmark = pytest.mark.nightly
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")

SCRIPTS = Path(__file__).with_name("sdks")
NODE = ("ai", "zod", "openai", "typescript", "@types/node", "@anthropic-ai/sdk")
PROVIDERS = ("@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible")
PACKAGES = {
    "openai_agents": ("openai-agents",),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]",),
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic"),
    "instructor": ("instructor[anthropic]",),
}
"""Library -> packages that are installed for it."""

ULM, BERN = {"city": "Ulm"}, {"city": "Bern"}
SAID = "I look. / I look. / I heard: rain at Ulm | rain at Bern"
LOOPS: dict[str, Any] = {
    "one": {"text": "I heard: rain at Ulm", "calls": [[ULM], []]},
    "two": {"text": "I heard: rain at Ulm | rain at Bern", "calls": [[ULM, BERN], []]},
    "chain": {"text": "I heard: rain at Ulm | rain at Bern", "calls": [[ULM], [BERN], []]},
    "error": {"text": "I heard: no such place", "calls": [[{"city": "Nowhere"}], []]},
    "again": {"text": f"2 questions; I said: {SAID}", "calls": [[]]},
    "object": {"object": {"city": "Ulm", "degrees": 21}},
}
"""Loop -> text of the last answer and arguments of the calls in each answer, or the object."""
THREAD = (400, "")
"""First reply to the tool runner of Anthropic's SDK: it asks for a conversation that the server keeps, and goes on
without one."""


def fetch(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} failed: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the packages for Node and the scripts."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    fetch("npm", "install", "--no-audit", "--no-fund", *NODE, *PROVIDERS, cwd=folder)
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program ``uv``, because ``pip`` takes minutes to choose versions of so many packages."""
    folder = tmp_path_factory.mktemp("uv")
    fetch(sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "uv", cwd=folder)
    return folder / "bin" / "uv"


class Recorder:
    """The application, with a note of each reply: its status, and what the ``Warning`` header says."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.replies: set[tuple[int, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                warnings = [value.decode() for name, value in message["headers"] if name == b"warning"]
                self.replies.add((message["status"], "".join(warnings)))
            await send(message)

        await self._app(scope, receive, noted)


def told(*command: str, cwd: Path, **environment: str) -> tuple[dict[str, Any], set[tuple[int, str]]]:
    """(what a script prints, what the server replied) for a script whose last argument is the URL of the server."""
    engine = ScriptedEngine()
    engine.info = dataclasses.replace(INFO, max_model_len=100_000, capacity_tokens=200_000, pool_tokens=200_000)
    app = Recorder(make_app(make_state(engine)))
    printed: list[bytes] = []

    async def test() -> None:
        async with serving(app) as client:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            url = f"http://127.0.0.1:{client.port}"
            process = await asyncio.create_subprocess_exec(
                *command, url, cwd=cwd, env=os.environ | environment, **pipes
            )
            output, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()[-3000:]
            printed.append(output)

    run(test())
    assert engine.num_requests == 0
    seen: dict[str, Any] = json.loads(printed[0])
    return seen, app.replies


def each_loop(seen: dict[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """(API, whole or streamed, loop, what was seen) of all loops."""
    for api, ways in seen.items():
        for way, loops in ways.items():
            for loop, found in loops.items():
                yield api, way, loop, found


@needs_npm
def test_the_ai_sdk_comes_to_the_end_of_its_loops(node: Path) -> None:
    seen, replies = told("node", "ai_sdk.mjs", cwd=node)
    assert set(seen) == {"chat", "responses", "anthropic", "compatible"}
    budget = '299 chairlift "ignored: thinking.budget_tokens"'
    assert replies == {(200, ""), (200, budget)}
    for api, way, loop, found in each_loop(seen):
        place = (api, way, loop)
        if loop == "object":
            whole = LOOPS["object"]["object"]
            assert found == ({"object": whole, "streamed": whole} if way == "streamed" else {"object": whole}), place
            continue
        expected = LOOPS[loop]
        number = len(expected["calls"])
        # OpenAI's chats have no reasoning, and its responses show summaries only.
        thought = {"chat": None, "responses": ""}.get(api, THOUGHT)
        failed = ["Error: no such place"] if loop == "error" else []
        text = expected["text"]
        if loop == "error" and api == "anthropic":
            text = "I heard: Error: no such place"
        assert found == {
            "text": text,
            "calls": [[["weather", given] for given in calls] for calls in expected["calls"]],
            "failed": failed,
            "reasoning": [thought] * number,
            "reasons": ["tool-calls"] * (number - 1) + ["stop"],
            "usage": True,
            "warnings": [],
            "errors": [],
        }, place


@needs_npm
def test_the_node_sdks_come_to_the_end_of_their_loops(node: Path) -> None:
    seen, replies = told("node", "node_sdks.mjs", cwd=node)
    assert set(seen) == {"chat", "responses", "messages"}
    assert replies == {(200, ""), (200, '299 chairlift "ignored: thinking.budget_tokens"'), THREAD}
    check_loops(seen, {"messages": "Error: no such place"})


@pytest.mark.parametrize("library", PACKAGES)
def test_agent_libraries_come_to_the_end_of_their_loops(library: str, installer: Path, tmp_path: Path) -> None:
    command = (str(installer), "pip", "install", "-q", "--python", sys.executable, "--target", str(tmp_path))
    fetch(*command, *PACKAGES[library], cwd=tmp_path)
    script = str(SCRIPTS / "python_sdks.py")
    seen, replies = told(sys.executable, script, library, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert replies == {(200, "")}
    errors = "An error occurred while running the tool. Please try again."
    check_loops(seen, dict.fromkeys(seen, errors) if library == "openai_agents" else {})


def check_loops(seen: dict[str, Any], errors: dict[str, str]) -> None:
    """Compare all loops with :data:`LOOPS`. ``errors`` has the results that libraries make of an error of a tool, by
    API."""
    assert seen
    for api, way, loop, found in each_loop(seen):
        expected = LOOPS.get(loop, LOOPS["object"])  # several ways to ask for an object
        if loop == "error" and api in errors:
            expected = {**expected, "text": f"I heard: {errors[api]}"}
        assert found == expected, (api, way, loop)


@needs_npm
@needs_kernels
def test_images_of_the_ai_sdk_reach_the_model(node: Path, tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "tiny")
    key = "sk-of-the-tests"
    texts = []
    with ServerProcess(str(folder), "--served-model-name", "tiny", "--api-key", key, "--num-kv-blocks", "80") as server:
        for number in (1, 2):
            buffer = io.BytesIO()
            picture(number, 70, 50).save(buffer, "PNG")
            image = base64.b64encode(buffer.getvalue()).decode()
            url = f"http://127.0.0.1:{server.port}"
            command = ["node", "ai_sdk_images.mjs", url, image]
            done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            seen = json.loads(done.stdout)
            assert len(seen) == 4
            found = {text for answers in seen.values() for text in answers}
            assert len(found) == 1
            texts.append(found.pop())
    assert texts[0] != texts[1]


# --- types ------------------------------------------------------------------------------------------------------------

ASK = [{"role": "user", "content": "Hi"}]
REPLIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": ASK, "tools": CHAT_TOOLS, "stream_options": {"include_usage": True}},
        "OpenAI.Chat.Completions.ChatCompletion",
        "OpenAI.Chat.Completions.ChatCompletionChunk",
    ),
    "response": (
        "/v1/responses",
        {"input": "Hi", "tools": RESPONSE_TOOLS, "service_tier": "auto"},
        "OpenAI.Responses.Response",
        "OpenAI.Responses.ResponseStreamEvent",
    ),
    "message": (
        "/v1/messages",
        {"messages": ASK, "max_tokens": 400, "tools": MESSAGE_TOOLS},
        "Present<Omit<Anthropic.Message, '_request_id'>>",
        "Present<Anthropic.RawMessageStreamEvent>",
    ),
}
"""API -> (path, request, type of a whole reply, type of an event)."""


IMPORTS = [
    'import OpenAI from "openai";',
    'import Anthropic from "@anthropic-ai/sdk";',
    # Anthropic's API leaves fields out whose type says null.
    "type Present<T> = T extends (infer U)[] ? Present<U>[] : T extends object"
    " ? {[K in keyof T as null extends T[K] ? never : K]: Present<T[K]>}"
    " & {[K in keyof T as null extends T[K] ? K : never]?: Present<T[K]>} : T;",
]


NOT_TYPED = OURS - {"cache_write_tokens"} | {"max_tool_calls"}
"""Fields that the types for Node do not have: ours, and two that OpenAI's API and its types for Python have."""


def without_ours(value: Any) -> Any:
    """A reply without the fields that the clients' types do not have, and with the one that the client adds."""
    if isinstance(value, list):
        return [without_ours(each) for each in value]
    if isinstance(value, dict):
        added = {"output_text": ""} if value.get("object") == "response" else {}
        return added | {key: without_ours(each) for key, each in value.items() if key not in NOT_TYPED}
    return value


def compiles(node: Path, lines: list[str]) -> str:
    """Errors of the compiler for a program, in its strictest mode; empty if there are none."""
    (node / "check.ts").write_text("\n".join(lines))
    flags = ("--strict", "--exactOptionalPropertyTypes", "--skipLibCheck", "--noEmit")
    command = ["npx", "tsc", *flags, "--module", "nodenext", "--target", "es2022", "check.ts"]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=300)
    return done.stdout


@needs_npm
def test_replies_are_what_the_types_of_the_node_sdks_allow(node: Path) -> None:
    engine = FakeEngine()
    says(engine, CALLS)
    lines = list(IMPORTS)
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        for name, (path, body, whole, event) in REPLIES.items():
            asked = [body, {key: value for key, value in body.items() if key != "tools"}]
            for request in asked:
                reply = without_ours(http.post(path, json=request).json())
                lines.append(f"export const {name}{len(lines)}: {whole} = {json.dumps(reply)};")
                for line in data_of(http.post(path, json={**request, "stream": True}).text):
                    if json.loads(line).get("type") != "ping":
                        read = without_ours(json.loads(line))
                        lines.append(f"export const {name}{len(lines)}: {event} = {json.dumps(read)};")
    assert len(lines) > 60
    assert compiles(node, lines) == ""
    wrong = 'export const a: OpenAI.Model = {"id": "a", "created": 1, "object": "model", "owned_by": "b", "colour": 1};'
    assert "colour" in compiles(node, [*IMPORTS, wrong])
