"""GET /openapi.json: the OpenAPI document, made from the types of requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.server.anthropic.messages_types import (
    CountTokensRequest,
    MessageReply,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.batches.endpoints import BatchList, BatchObject, BatchRequest
from chairlift.server.openai.batches.files import FileDeleted, FileList, FileObject
from chairlift.server.openai.chat import ChatCompletion
from chairlift.server.openai.completions import TextCompletion
from chairlift.server.openai.models import ModelCard, ModelList
from chairlift.server.openai.pooling import (
    ClassifyReply,
    ClassifyRequest,
    EmbeddingReply,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from chairlift.server.openai.promises import TTFT_HEADER
from chairlift.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from chairlift.server.openai.responses_types import DeletedResponse, InputItemList, InputTokenCount, ResponsesRequest
from chairlift.server.openai.responses_types import Response as ModelResponse
from chairlift.server.openai.tokens import DetokenizeReply, TokenizeReply
from chairlift.server.operations.queue import QueueReply
from chairlift.server.operations.replicas import ReplicasReply
from chairlift.server.operations.traffic import RequestsReply, TrafficRecord
from chairlift.server.operations.weights import WeightsReply, WeightsRequest
from chairlift.version import __version__

__all__ = ["ErrorReply", "document", "routes"]


class ErrorObject(msgspec.Struct, kw_only=True):
    """An error: message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, kw_only=True):
    """Response of every path if an error occurs."""

    error: ErrorObject


class StatusReply(msgspec.Struct, kw_only=True):
    """State of the server."""

    status: str
    reason: str | None = None


class VersionReply(msgspec.Struct, kw_only=True):
    """Version of the server."""

    version: str


class LoadReply(msgspec.Struct, kw_only=True):
    """Numbers of requests in progress."""

    server_load: int
    running: int
    waiting: int


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
_WITH_BODY: Final = (404, 408, 413, 415)
_TYPES: Final = (
    *(ChatRequest, ChatCompletion, CompletionRequest, TextCompletion, TokenizeRequest, TokenizeReply),
    *(DetokenizeRequest, DetokenizeReply, ModelList, ModelCard, ErrorReply, StatusReply, VersionReply, LoadReply),
    *(EmbeddingRequest, EmbeddingReply, ClassifyRequest, ClassifyReply, ScoreRequest, ScoreReply),
    *(RerankRequest, RerankReply),
    *(FileObject, FileList, FileDeleted, BatchRequest, BatchObject, BatchList),
    *(ResponsesRequest, ModelResponse, DeletedResponse, InputItemList, InputTokenCount),
    *(MessagesRequest, MessageReply, CountTokensRequest, TokenCount, MessagesError),
    *(QueueReply, RequestsReply, ReplicasReply, TrafficRecord, WeightsRequest, WeightsReply),
)


def document(state: ServerState) -> dict[str, Any]:
    """The OpenAPI 3.1 document of this server."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    paths = {
        "/v1/chat/completions": _post(
            "Generate the next message of a conversation", ChatRequest, ChatCompletion, (429,), streams=True
        ),
        "/v1/completions": _post(
            "Continue one or more prompts", CompletionRequest, TextCompletion, (429,), streams=True
        ),
        **_responses_paths(),
        **_messages_paths(),
        "/v1/embeddings": _post("Embeddings of one or more texts", EmbeddingRequest, EmbeddingReply, (429,)),
        "/v1/classify": _post("Classes of one or more texts", ClassifyRequest, ClassifyReply, (429,)),
        "/v1/score": _post("Scores of pairs of texts", ScoreRequest, ScoreReply, (429,)),
        "/v1/rerank": _post("Documents ordered by relevance to a query", RerankRequest, RerankReply, (429,)),
        "/rerank": _post("The same as /v1/rerank", RerankRequest, RerankReply, (429,)),
        "/tokenize": _post("Token ids of a prompt or of messages", TokenizeRequest, TokenizeReply, (429,)),
        "/detokenize": _post("The text of token ids", DetokenizeRequest, DetokenizeReply, (429,)),
        "/v1/models": _get("The names of the model", ModelList),
        "/v1/models/{name}": _get("One name of the model", ModelCard, (404,), [_NAME_PARAMETER]),
        "/v1/queue": _get("Waiting requests and their expected starts", QueueReply, (404,), [_ID_PARAMETER]),
        "/v1/replicas": _get("The engines behind this server", ReplicasReply),
        "/v1/replicas/restart": {
            "post": _operation("Restart the engines one after another", _ref(ReplicasReply), (400, 403))
        },
        "/v1/requests": _get("Waiting and running requests", RequestsReply, (), [_LIMIT_PARAMETER]),
        "/v1/traffic": {"get": _traffic()},
        **_files_and_batches(),
        "/update_weights": _post("Replace the weights of the model", WeightsRequest, WeightsReply, (403,)),
        "/health": _status("Whether requests make progress"),
        "/ping": _status("The same as /health"),
        "/ready": _status("Whether new requests are accepted"),
        "/version": _get("Version of the server", VersionReply),
        "/load": _get("Numbers of requests in progress", LoadReply),
        "/metrics": _get("Metrics in Prometheus' text format", None),
        "/openapi.json": {"get": _operation("This document", {"application/json": {"schema": {"type": "object"}}})},
    }
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
        for path in ("/health", "/ready"):
            paths[path]["get"]["security"] = []
    return out


def _responses_paths() -> dict[str, Any]:
    created = _post(
        "Generate the next items of a conversation",
        ResponsesRequest,
        ModelResponse,
        (429,),
        streams=True,
        example=_RESPONSE,
    )
    deleted = _get("Delete a stored response", DeletedResponse, (404,), [_RESPONSE_PARAMETER])["get"]
    stored = _get("A stored response", ModelResponse, (404,), [_RESPONSE_PARAMETER])
    pages = (_query("after", "List only entries after this id", {"type": "string"}), _PAGE_PARAMETER, _ORDER_PARAMETER)
    listed = _get("The input items of a stored response", InputItemList, (404,), [_RESPONSE_PARAMETER, *pages])
    cancel = _operation("Refused: only background responses can be cancelled", _ref(ModelResponse), (404,))
    return {
        "/v1/responses": created,
        "/v1/responses/input_tokens": _post(
            "Number of tokens in the prompt of a conversation",
            ResponsesRequest,
            InputTokenCount,
            (404, 429),
            example={"input": _ASK[0]["content"]},
        ),
        "/v1/responses/{response_id}": {**stored, "delete": deleted},
        "/v1/responses/{response_id}/input_items": listed,
        "/v1/responses/{response_id}/cancel": {"post": {**cancel, "parameters": [_RESPONSE_PARAMETER]}},
    }


def _messages_paths() -> dict[str, Any]:
    paths = {
        "/v1/messages": _post(
            "Generate the next message of a conversation",
            MessagesRequest,
            MessageReply,
            (429,),
            streams=True,
            example=_MESSAGE,
        ),
        "/v1/messages/count_tokens": _post(
            "Number of tokens in the prompt of a conversation",
            CountTokensRequest,
            TokenCount,
            (429,),
            example={"messages": _ASK},
        ),
    }
    for path in paths.values():
        for status, response in path["post"]["responses"].items():
            if status != "200":
                response["content"] = _ref(MessagesError)
    return paths


def _query(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema}


_ID_PARAMETER: Final = _query("request_id", "The X-Request-Id of one request that has not ended", {"type": "string"})
_LIMIT_PARAMETER: Final = _query(
    "limit", "Maximum number of requests to list", {"type": "integer", "minimum": 1, "maximum": 1000}
)
_RECORDING_PARAMETERS: Final = (
    _query("block_size", "Tokens per hash id", {"type": "integer", "minimum": 16, "maximum": 512, "default": 64}),
    _query("requests", "End after this number of requests", {"type": "integer", "minimum": 1, "maximum": 10**9}),
    _query("duration", "End after this number of seconds", {"type": "number", "minimum": 0.001, "maximum": 10**9}),
    _query(
        "recording", "Id of a recording to continue, which was interrupted less than a minute ago", {"type": "string"}
    ),
)
_PAGE_PARAMETER: Final = _query(
    "limit", "Maximum number of entries to list", {"type": "integer", "minimum": 1, "maximum": 100}
)
_ORDER_PARAMETER: Final = _query("order", "asc: the oldest first", {"enum": ["asc", "desc"], "default": "desc"})
_UPLOAD_SCHEMA: Final = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


_NAME_PARAMETER: Final = _path_parameter("name")


_RESPONSE_PARAMETER: Final = {**_NAME_PARAMETER, "name": "response_id"}
_ASK: Final = [{"role": "user", "content": "What is a KV cache?"}]
_RESPONSE: Final = {"input": "What is a KV cache?", "max_output_tokens": 64}
_MESSAGE: Final = {"messages": _ASK, "max_tokens": 64}
_TTFT_PARAMETER: Final = {
    "name": TTFT_HEADER,
    "in": "header",
    "description": "Milliseconds until the first token is due; the field ttft_ms takes precedence",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 999_999_999},
}


def _ref(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct_type.__name__}"}}}


def _operation(summary: str, content: dict[str, Any], statuses: Sequence[int] = ()) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    for status in sorted({*_ALWAYS, *statuses}):
        responses[str(status)] = {"description": _STATUSES[status], "content": _ref(ErrorReply)}
    return {"summary": summary, "responses": responses}


def _post(
    summary: str,
    body: type[msgspec.Struct],
    reply: type[msgspec.Struct],
    statuses: Sequence[int],
    streams: bool = False,
    example: dict[str, Any] | None = None,
) -> dict[str, Any]:
    content = _ref(reply)
    if streams:
        content["text/event-stream"] = {}  # each event is a chunk of the reply; OpenAPI 3.1 cannot say so
    operation = _operation(summary, content, (*_WITH_BODY, *statuses))
    if streams:
        operation["parameters"] = [_TTFT_PARAMETER]
    operation["requestBody"] = {"required": True, "content": _ref(body)}
    if example is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = example
    return {"post": operation}


def _get(
    summary: str,
    reply: type[msgspec.Struct] | None,
    statuses: Sequence[int] = (),
    parameters: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if reply is None else _ref(reply)
    operation = _operation(summary, content, statuses)
    if parameters:
        operation["parameters"] = list(parameters)
    return {"get": operation}


def _files_and_batches() -> dict[str, dict[str, Any]]:
    """OpenAPI paths of files and batches. Without ``--batch-dir`` these paths return 404."""
    files, batches = _path_parameter("file_id"), _path_parameter("batch_id")
    pages = (_query("after", "List only entries after this id", {"type": "string"}), _PAGE_PARAMETER)
    sorts = (
        _ORDER_PARAMETER,
        _query("purpose", "List only files with this purpose", {"type": "string"}),
    )
    upload = _operation("Upload a file of requests for a batch", _ref(FileObject), _WITH_BODY)
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_SCHEMA}}}
    content = _operation("Content of a file", {"application/octet-stream": {"schema": {"type": "string"}}}, (404,))
    shown, removed = _get("One file", FileObject, (404,), [files]), _get("Delete a file", FileDeleted, (404,), [files])
    listed = _get("Your files", FileList, (404,), [*pages, *sorts])
    cancel = _get("Cancel a batch; finished results are kept", BatchObject, (404,), [batches])
    return {
        "/v1/files": listed | {"post": upload},
        "/v1/files/{file_id}": shown | {"delete": removed["get"]},
        "/v1/files/{file_id}/content": {"get": content | {"parameters": [files]}},
        "/v1/batches": _get("Your batches", BatchList, (404,), pages)
        | _post("Create a batch from a file of requests", BatchRequest, BatchObject, ()),
        "/v1/batches/{batch_id}": _get("One batch", BatchObject, (404,), [batches]),
        "/v1/batches/{batch_id}/cancel": {"post": cancel["get"]},
    }


def _traffic() -> dict[str, Any]:
    """OpenAPI entry of the traffic stream. The stream has events with a TrafficRecord as data, and some named events.
    OpenAPI 3.1 has no schema for this, so the entry describes it in words."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    operation = _operation("Record traffic, without texts: an event per request that ends", content, (404, 429))
    return operation | {"parameters": list(_RECORDING_PARAMETERS)}


def _status(summary: str) -> dict[str, Any]:
    """OpenAPI entry of a health probe. The responses 200 and 503 have the same body, because a probe reads only the
    status."""
    operation = _operation(summary, _ref(StatusReply))
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (StatusReply, ErrorReply)]
    operation["responses"]["503"]["content"] = {"application/json": {"schema": {"anyOf": schemas}}}
    return {"get": operation}


async def _openapi(request: Request) -> Response:
    return json_response(document(request.app.state.server))


routes: Final = [Route("/openapi.json", _openapi, methods=["GET"])]
