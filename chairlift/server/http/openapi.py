"""GET /openapi.json: the OpenAPI document, made from the types of requests and responses of all dialects."""

from __future__ import annotations

import copy
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.server.dialects import DIALECTS
from chairlift.server.http.api_docs import ErrorReply, operation
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.version import __version__

__all__ = ["document", "routes"]

_OPEN: Final = ("/health", "/ready")
"""Paths that need no API key."""


def document(state: ServerState) -> dict[str, Any]:
    """The OpenAPI 3.1 document of this server."""
    types = [ErrorReply, *(each for dialect in DIALECTS for each in dialect.types)]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: entry for dialect in DIALECTS for path, entry in dialect.paths.items()}
    paths["/openapi.json"] = {"get": operation("This document", {"application/json": {"schema": {"type": "object"}}})}
    paths = copy.deepcopy(paths)
    out: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Chairlift",
            "version": __version__,
            "description": "OpenAI-compatible inference with continuous batching.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if state.api_keys:
        out["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        out["security"] = [{"bearer": []}, {"key": []}]
        for path in _OPEN:
            paths[path]["get"]["security"] = []
    return out


async def _openapi(request: Request) -> Response:
    return json_response(document(request.app.state.server))


routes: Final = [Route("/openapi.json", _openapi, methods=["GET"])]
