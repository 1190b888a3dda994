"""Entries of ``/openapi.json``: what a route table says about its endpoints, as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

__all__ = [
    *("LIMIT_OF_A_PAGE", "ORDER", "WITH_BODY", "ErrorReply", "get", "operation", "path_parameter", "post", "query"),
    "ref",
]


class ErrorObject(msgspec.Struct, kw_only=True):
    """An error: message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, kw_only=True):
    """Response of every path if an error occurs."""

    error: ErrorObject


_STATUSES: Final = {
    400: "The request is not valid; the message says what to change",
    401: "The API key is missing or wrong",
    403: "The API key has no permission for this",
    404: "No model, request or other object has this name or id",
    408: "The body took too long",
    413: "The body is too long",
    415: "The body is not JSON",
    421: "The Host header names another server",
    429: "Too many requests wait; Retry-After says when to try again",
    500: "An error inside the server",
    503: "The server is loading, shutting down or too slow; Retry-After says when to try again",
}
_ALWAYS: Final = (400, 401, 421, 500, 503)
WITH_BODY: Final = (404, 408, 413, 415)


def query(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter in the query string."""
    return {"name": name, "in": "query", "description": text, "schema": schema}


LIMIT_OF_A_PAGE: Final = query(
    "limit", "Maximum number of entries to list", {"type": "integer", "minimum": 1, "maximum": 100}
)
ORDER: Final = query("order", "asc: the oldest first", {"enum": ["asc", "desc"], "default": "desc"})


def path_parameter(name: str) -> dict[str, Any]:
    """A parameter in the path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def ref(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON content with the schema of a type."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct_type.__name__}"}}}


def operation(summary: str, content: dict[str, Any], statuses: Sequence[int] = ()) -> dict[str, Any]:
    """Entry of an operation: its summary and its responses, with those errors that every path may have."""
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    for status in sorted({*_ALWAYS, *statuses}):
        responses[str(status)] = {"description": _STATUSES[status], "content": ref(ErrorReply)}
    return {"summary": summary, "responses": responses}


def post(
    summary: str,
    body: type[msgspec.Struct],
    reply: type[msgspec.Struct],
    statuses: Sequence[int],
    streams: bool = False,
    parameters: Sequence[dict[str, Any]] = (),
    example: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Entry of a path to which a body is posted. ``streams``: the answer may be server-sent events."""
    content = ref(reply)
    if streams:
        content["text/event-stream"] = {}  # each event is a chunk of the reply; OpenAPI 3.1 cannot say so
    found = operation(summary, content, (*WITH_BODY, *statuses))
    if parameters:
        found["parameters"] = list(parameters)
    found["requestBody"] = {"required": True, "content": ref(body)}
    if example is not None:
        found["requestBody"]["content"]["application/json"]["example"] = example
    return {"post": found}


def get(
    summary: str,
    reply: type[msgspec.Struct] | None,
    statuses: Sequence[int] = (),
    parameters: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Entry of a path that is read; ``reply`` is None for plain text."""
    content = {"text/plain": {"schema": {"type": "string"}}} if reply is None else ref(reply)
    found = operation(summary, content, statuses)
    if parameters:
        found["parameters"] = list(parameters)
    return {"get": found}
