"""Endpoints for those who run the server: the routes, and their entries in ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from chairlift.server.http.api_docs import ErrorReply, get, operation, post, query, ref
from chairlift.server.http.dialect import Dialect
from chairlift.server.operations import adapters, generation, health, kv_store, queue, replicas, traffic, weights
from chairlift.server.operations.generation import (
    AbortReply,
    AbortRequest,
    AbortsRequest,
    DiskWeightsReply,
    DiskWeightsRequest,
    PausedReply,
    PauseReply,
    PauseRequest,
)
from chairlift.server.operations.health import LoadReply, StatusReply, VersionReply
from chairlift.server.operations.kv_store import KVStoreReply
from chairlift.server.operations.queue import QueueReply
from chairlift.server.operations.replicas import ReplicasReply
from chairlift.server.operations.traffic import RequestsReply, TrafficRecord
from chairlift.server.operations.weights import WeightsReply, WeightsRequest

__all__ = ["OPERATIONS"]

_ID_PARAMETER: Final = query("request_id", "The X-Request-Id of one request that has not ended", {"type": "string"})
_LIMIT_PARAMETER: Final = query(
    "limit", "Maximum number of requests to list", {"type": "integer", "minimum": 1, "maximum": 1000}
)
_ALL_PARAMETER: Final = query("all", "Remove those of all models", {"type": "boolean", "default": False})
_RECORDING_PARAMETERS: Final = (
    query("block_size", "Tokens per hash id", {"type": "integer", "minimum": 16, "maximum": 512, "default": 64}),
    query("requests", "End after this number of requests", {"type": "integer", "minimum": 1, "maximum": 10**9}),
    query("duration", "End after this number of seconds", {"type": "number", "minimum": 0.001, "maximum": 10**9}),
    query(
        "recording", "Id of a recording to continue, which was interrupted less than a minute ago", {"type": "string"}
    ),
)


def _traffic() -> dict[str, Any]:
    """OpenAPI entry of the traffic stream. The stream has events with a TrafficRecord as data, and some named events.
    OpenAPI 3.1 has no schema for this, so the entry describes it in words."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    found = operation("Record traffic, without texts: an event per request that ends", content, (404, 429))
    return found | {"parameters": list(_RECORDING_PARAMETERS)}


def _generation() -> dict[str, dict[str, Any]]:
    """OpenAPI entries of the endpoints for trainers."""
    false = {"type": "boolean", "default": False}
    mode = query("mode", "What becomes of the requests", {"enum": ["abort", "keep"], "default": "abort"})
    clear = query("clear_cache", "With abort: forget cached prefixes", {"type": "boolean", "default": True})
    recompute = query("reset_running_requests", "Compute the KV of running requests again", false)
    external = query("reset_external", "Also remove the model's blocks from --kv-store", false)
    reset = operation("Forget cached prefixes", ref(PauseReply), (403,)) | {"parameters": [recompute, external]}
    pause = operation("Compute no further step", ref(PauseReply), (403,))
    resume = operation("Go on after a pause", ref(PauseReply), (403,))
    return {
        "/pause": {"post": pause | {"parameters": [mode, clear]}},
        "/resume": {"post": resume},
        "/is_paused": get("Whether the server is paused", PausedReply, (403,)),
        "/abort_requests": post("End requests", AbortsRequest, AbortReply, (403,)),
        "/reset_prefix_cache": {"post": reset},
        "/pause_generation": post("Compute no further step", PauseRequest, PauseReply, (403,)),
        "/continue_generation": {"post": resume},
        "/abort_request": post("End one request or all", AbortRequest, AbortReply, (403,)),
        "/flush_cache": {"get": reset, "post": reset},
        "/update_weights_from_disk": post("Replace the weights", DiskWeightsRequest, DiskWeightsReply, (403,)),
    }


def _status(summary: str) -> dict[str, Any]:
    """OpenAPI entry of a health probe. The responses 200 and 503 have the same body, because a probe reads only the
    status."""
    found = operation(summary, ref(StatusReply))
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (StatusReply, ErrorReply)]
    found["responses"]["503"]["content"] = {"application/json": {"schema": {"anyOf": schemas}}}
    return {"get": found}


OPERATIONS: Final = Dialect(
    of_server=("/health", "/ping", "/ready", "/version"),
    routes=[
        *(*health.routes, *queue.routes, *traffic.routes, *weights.routes, *replicas.routes, *adapters.routes),
        *(*kv_store.routes, *generation.routes),
    ],
    types=(
        *(StatusReply, VersionReply, LoadReply, QueueReply, RequestsReply, ReplicasReply, TrafficRecord),
        *(WeightsRequest, WeightsReply, KVStoreReply),
        *(AbortReply, AbortRequest, AbortsRequest, DiskWeightsReply, DiskWeightsRequest),
        *(PauseReply, PauseRequest, PausedReply),
    ),
    paths={
        "/v1/queue": get("Waiting requests and their expected starts", QueueReply, (404,), [_ID_PARAMETER]),
        "/v1/replicas": get("The engines behind this server", ReplicasReply),
        "/v1/replicas/restart": {
            "post": operation("Restart the engines one after another", ref(ReplicasReply), (400, 403))
        },
        "/v1/kv_store": {
            "get": operation("The files that keep KV", ref(KVStoreReply), (403, 404)),
            "delete": operation("Remove the model's blocks from the files", ref(KVStoreReply), (400, 403, 404))
            | {"parameters": [_ALL_PARAMETER]},
        },
        "/v1/requests": get("Waiting and running requests", RequestsReply, (), [_LIMIT_PARAMETER]),
        "/v1/traffic": {"get": _traffic()},
        "/update_weights": post("Replace the weights of the model", WeightsRequest, WeightsReply, (403,)),
        **_generation(),
        "/health": _status("Whether requests make progress"),
        "/ping": _status("The same as /health"),
        "/ready": _status("Whether new requests are accepted"),
        "/version": get("Version of the server", VersionReply),
        "/load": get("Numbers of requests in progress", LoadReply),
        "/metrics": get("Metrics in Prometheus' text format", None),
    },
)
