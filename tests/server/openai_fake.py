"""A small server with the OpenAI protocol, for tests of Chairlift's clients.

The text of the last message selects the response:

- ``fail STATUS CODE``: an error with this status and code, with the header Retry-After: 7 if the status is 429 or 503;
- ``break``: two pieces of text, then an error event;
- ``cut``: two pieces of text, then the connection ends;
- ``endless``: pieces of text until the client disconnects; then the event ``left`` is set;
- ``silent``: the same as ``endless``, but comments instead of pieces of text;
- ``script EVENTS``: exactly the events of the JSON list EVENTS;
- ``say TEXT``: TEXT, one character per event;
- ``say-at-once TEXT``: TEXT in one event;
- any other text: ``N: `` and the text, where N is the number of messages.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chairlift.server.pages import pages

__all__ = ["FakeServer", "serve_fake"]

OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "Chairlift", "version": "1"},
    "paths": {
        "/v1/completions": {
            "post": {
                "summary": "Complete a text",
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Ask"}}}},
                "responses": {"200": {"description": "OK"}, "400": {"description": "a field is wrong"}},
            }
        },
        "/health": {"get": {"summary": "Whether requests make progress", "responses": {"200": {}}}},
    },
    "components": {
        "schemas": {
            "Ask": {
                "title": "Ask",
                "type": "object",
                "required": ["prompt"],
                "properties": {
                    "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
                    "seed": {"anyOf": [{"type": "integer", "maximum": 2**63 - 1}, {"type": "null"}], "default": None},
                    "top_k": {"anyOf": [{"type": "integer", "minimum": -1}, {"type": "null"}], "default": None},
                    "top_p": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": 1,
                        "default": 1.0,
                        "description": "<b>nucleus",
                    },
                },
            }
        }
    },
}


class FakeServer:
    """A fake server that sends scripted responses, and records the requests."""

    def __init__(
        self,
        *,
        key: str = "",
        room: int = 4096,
        tokenize: bool = True,
        counts: str = "messages",
        lists_room: bool = True,
        models: tuple[str, ...] = ("tiny", "little"),
    ) -> None:
        self.key = key
        self.counts = counts
        """Name of the field that a request to /tokenize must have."""
        self.room = room
        self.lists_room = lists_room
        self.models = models
        self.url = ""
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Bodies of all chat requests so far."""
        self.started, self.left = threading.Event(), threading.Event()
        """Events: ``started`` is set when an endless response has begun, ``left`` when its client has disconnected."""
        self.loading = False
        routes = [
            *pages.routes,
            Route("/v1/models", self._models),
            Route("/load", self._load),
            Route("/openapi.json", self._openapi),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        if tokenize:
            routes.append(Route("/tokenize", self._tokenize, methods=["POST"]))
        self.app = Starlette(routes=routes)

    def _refusal(self, request: Request) -> Response | None:
        self.paths.append(request.url.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "invalid_api_key", "the API key is missing or wrong")
        return _error(503, "loading", "the model is being loaded") if self.loading else None

    async def _models(self, request: Request) -> Response:
        room = {"max_model_len": self.room} if self.lists_room else {}
        models = [{"id": name, "object": "model", **room} for name in self.models]
        return self._refusal(request) or JSONResponse({"object": "list", "data": models})

    async def _load(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"server_load": 5, "running": 3, "waiting": 2})

    async def _openapi(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(OPENAPI)

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if self.counts not in body:
            return JSONResponse({"message": f"missing field {self.counts}"}, 422)
        count = _count(body["messages"])
        return self._refusal(request) or JSONResponse({"count": count, "max_model_len": self.room, "tokens": []})

    async def _chat(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if _count(body["messages"]) + body.get("max_tokens", 1) > self.room:
            return _error(400, "context_length_exceeded", "the prompt is too long")
        message = body["messages"][-1]["content"]
        if message.startswith("fail "):
            _, status, code = message.split()
            return _error(int(status), code, f"scripted {code}")
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": message}, "finish_reason": "stop"}
            head = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
            return JSONResponse({**head, "choices": [choice], "usage": _usage(1)})
        if message.startswith("script "):
            lines = [f"data: {json.dumps(each)}\n\n" for each in json.loads(message.removeprefix("script "))]
            return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")
        return StreamingResponse(self._stream(message, len(body["messages"])), media_type="text/event-stream")

    async def _stream(self, message: str, count: int) -> AsyncIterator[str]:
        yield _event({"role": "assistant", "content": ""}, 0)
        if message in ("endless", "silent"):
            try:
                tokens = 0
                self.started.set()
                while True:
                    await asyncio.sleep(0.005)
                    tokens += 1
                    yield _event({"content": "on "}, tokens) if message == "endless" else ": nothing\n\n"
            finally:
                self.left.set()
        text = message.removeprefix("say ") if message.startswith("say ") else f"{count}: {message}"
        pieces = [message.removeprefix("say-at-once ")] if message.startswith("say-at-once ") else text
        for index, piece in enumerate(pieces if message not in ("break", "cut") else "ab"):
            yield _event({"content": piece}, index + 1)
        if message == "break":
            yield f"data: {json.dumps({'error': {'message': 'the engine died', 'code': 'engine_unavailable'}})}\n\n"
        if message not in ("break", "cut"):
            yield _event({}, len(text), "stop")
            yield "data: " + json.dumps({"choices": [], "usage": _usage(len(text))}) + "\n\n"
            yield "data: [DONE]\n\n"


def _count(messages: list[dict[str, str]]) -> int:
    """Number of tokens: one per word, plus one per message."""
    return sum(1 + len((message["content"] or "").split()) for message in messages)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}


def _event(delta: dict[str, str], tokens: int, finish_reason: str | None = None) -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return "data: " + json.dumps({"choices": choices, "usage": _usage(tokens), "error": None}) + "\n\n"


def _error(status: int, code: str, message: str) -> Response:
    headers = {"Retry-After": "7"} if status in (429, 503) else {}
    return JSONResponse({"error": {"message": message, "code": code}}, status, headers=headers)


@contextmanager
def serve_fake(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve ``fake`` on a free port of this machine. Its address is ``fake.url``."""
    listener = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(fake.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
