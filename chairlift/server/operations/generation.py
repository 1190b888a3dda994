"""Endpoints for trainers: pause, resume and end the generation, forget KV, and replace the weights.

Each is offered under the name that vLLM gives it, and under SGLang's, with their bodies and replies, because frameworks
for reinforcement learning call these. A caller changes the answers of all clients, so all need the API key named
``admin``. Fields about GPU memory and CUDA graphs are accepted and have no meaning here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.generation import PauseMode
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError
from chairlift.server.http.auth import check_admin
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.protocol import parse, warning_headers

__all__ = [
    "AbortReply",
    "AbortRequest",
    "AbortsRequest",
    "DiskWeightsReply",
    "DiskWeightsRequest",
    "PauseReply",
    "PauseRequest",
    "PausedReply",
    "routes",
]

Name = Annotated[str, Meta(max_length=256)]


class PauseRequest(msgspec.Struct, kw_only=True):
    """The body of /pause_generation (SGLang)."""

    mode: Literal["abort", "in_place", "retract"] = "abort"
    """``in_place`` keeps the requests and their KV; ``retract`` keeps them and computes their KV again."""


class AbortRequest(msgspec.Struct, kw_only=True):
    """The body of /abort_request (SGLang)."""

    rid: Name = ""
    """The X-Request-Id of the request to end."""
    abort_all: bool = False


class AbortsRequest(msgspec.Struct, kw_only=True):
    """The body of /abort_requests (vLLM). Without ids, all requests end."""

    request_ids: Annotated[list[Name], Meta(max_length=65536)] = []


class DiskWeightsRequest(msgspec.Struct, kw_only=True):
    """The body of /update_weights_from_disk (SGLang)."""

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Directory with safetensors on the server's machine."""
    weight_version: Annotated[str, Meta(max_length=64)] | None = None
    """Number of the version, as text; null: the next one."""
    abort_all_requests: bool = False
    flush_cache: bool = True
    """Must be true, as KV of old weights is never shared."""


class PauseReply(msgspec.Struct, kw_only=True):
    """Result of a pause or resume."""

    status: str
    message: str


class PausedReply(msgspec.Struct, kw_only=True):
    """Whether the server is paused."""

    is_paused: bool


class AbortReply(msgspec.Struct, kw_only=True):
    """Number of requests that were ended."""

    aborted: int


class DiskWeightsReply(msgspec.Struct, kw_only=True):
    """Result of /update_weights_from_disk. If it fails, the server keeps the weights from before."""

    success: bool
    message: str
    num_paused_requests: int = 0


def _state(request: Request) -> ServerState:
    """The server's state, for the admin only. Raises ApiError 403."""
    check_admin(request)
    state: ServerState = request.app.state.server
    return state


async def _body(request: Request) -> dict[str, object]:
    """The JSON body; an empty one if there is none, as frameworks send some of these calls without a body."""
    if not int(request.headers.get("content-length") or 0) and "transfer-encoding" not in request.headers:
        return {}
    body: dict[str, object] = await read_json(request)
    return body


def _flag(request: Request, name: str, default: bool) -> bool:
    """A query parameter that is true or false. Raises ApiError 400."""
    value = request.query_params.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise ApiError(400, f"{name} must be true or false, got {value!r:.80}", code="invalid_value", param=name)
    return value == "true"


def _refused(error: ConfigError) -> ApiError:
    return ApiError(400, str(error), code="invalid_value")


async def _pause(request: Request) -> Response:
    """Compute no further step. The response is sent when no step is running."""
    generation = _state(request).engine.generation
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "keep"):
        message = f"mode is {mode!r:.80}, and may be abort or keep; to let requests end, send none and wait for them"
        raise ApiError(400, message, code="invalid_value", param="mode")
    clear = _flag(request, "clear_cache", True) and mode == "abort"
    await generation.pause("abort" if mode == "abort" else "keep")
    if clear:
        await generation.reset_prefix_cache()
    return json_response(PauseReply(status="paused", message="no step is computed until /resume"))


async def _resume(request: Request) -> Response:
    """Go on after a pause."""
    await _state(request).engine.generation.resume()
    return json_response(PauseReply(status="resumed", message="requests go on"))


async def _is_paused(request: Request) -> Response:
    """Show whether the server is paused."""
    return json_response(PausedReply(is_paused=_state(request).engine.generation.is_paused))


async def _aborts(request: Request) -> Response:
    """End requests; their answers have the finish reason ``abort``."""
    state = _state(request)
    payload, ignored = parse(AbortsRequest, await _body(request))
    return _ended(state, payload.request_ids or None, ignored)


async def _abort(request: Request) -> Response:
    """End one request or all; see :func:`_aborts`."""
    state = _state(request)
    payload, ignored = parse(AbortRequest, await _body(request))
    if not payload.rid and not payload.abort_all:
        raise ApiError(400, "give rid, or abort_all: true", code="invalid_value", param="rid")
    return _ended(state, None if payload.abort_all else [payload.rid], ignored)


def _ended(state: ServerState, names: Sequence[str] | None, ignored: list[str]) -> Response:
    return json_response(AbortReply(aborted=state.engine.generation.abort(names)), warning_headers(ignored))


async def _reset(request: Request) -> Response:
    """Let no later request use KV that was computed until now."""
    state = _state(request)
    recompute = _flag(request, "reset_running_requests", False)
    external = _flag(request, "reset_external", False)
    try:
        await state.engine.generation.reset_prefix_cache(recompute=recompute)
    except ConfigError as error:
        raise _refused(error) from None
    if external:
        await state.engine.kv_store("own")
    return json_response(PauseReply(status="ok", message="cached prefixes are forgotten"))


async def _pause_as_sglang(request: Request) -> Response:
    """Compute no further step; see :func:`_pause`."""
    generation = _state(request).engine.generation
    payload, ignored = parse(PauseRequest, await _body(request))
    mode: PauseMode = "abort" if payload.mode == "abort" else "keep"
    await generation.pause(mode)
    if payload.mode == "retract":
        try:
            await generation.reset_prefix_cache(recompute=True)
        except ConfigError as error:
            await generation.resume()
            raise _refused(error) from None
    return json_response(PauseReply(status="ok", message="generation is paused"), warning_headers(ignored))


async def _continue(request: Request) -> Response:
    """Go on after a pause."""
    await _state(request).engine.generation.resume()
    return json_response(PauseReply(status="ok", message="generation goes on"))


async def _weights(request: Request) -> Response:
    """Replace the weights, as ``POST /update_weights`` does. The response is sent when they are in use."""
    state = _state(request)
    payload, ignored = parse(DiskWeightsRequest, await _body(request))
    if not payload.flush_cache:
        message = "flush_cache must be true: KV of old weights is never shared"
        raise ApiError(400, message, code="unsupported_parameter", param="flush_cache")
    info = state.engine.info
    if info is None:
        raise EngineDeadError("the engine has not loaded its model yet")
    given = payload.weight_version
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) <= 15):
        message = f"weight_version must be a whole number as text, such as '12', got {given!r}"
        raise ApiError(400, message, code="invalid_value", param="weight_version")
    version = info.weight_version + 1 if given is None else int(given)
    if payload.abort_all_requests:
        state.engine.generation.abort()
    try:
        await state.engine.update_weights(payload.model_path, version, in_flight="continue")
    except (ConfigError, ModelLoadError) as error:
        reply = DiskWeightsReply(success=False, message=f"{error}; the weights are those from before")
        return Response(msgspec.json.encode(reply), status_code=400, media_type="application/json")
    paused = state.engine.num_requests if state.engine.generation.is_paused else 0
    reply = DiskWeightsReply(success=True, message=f"version {version} is in use", num_paused_requests=paused)
    return json_response(reply, warning_headers(ignored))


routes: Final = [
    Route("/pause", _pause, methods=["POST"]),
    Route("/resume", _resume, methods=["POST"]),
    Route("/is_paused", _is_paused, methods=["GET"]),
    Route("/abort_requests", _aborts, methods=["POST"]),
    Route("/reset_prefix_cache", _reset, methods=["POST"]),
    Route("/pause_generation", _pause_as_sglang, methods=["POST"]),
    Route("/continue_generation", _continue, methods=["POST"]),
    Route("/abort_request", _abort, methods=["POST"]),
    Route("/flush_cache", _reset, methods=["GET", "POST"]),
    Route("/update_weights_from_disk", _weights, methods=["POST"]),
]
