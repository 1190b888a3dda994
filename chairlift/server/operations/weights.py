"""POST /update_weights: replace the weights of the served model between two steps. For trainers.

A caller of this endpoint controls the generated text of all clients, and chooses directories that the server reads. So
it always needs the API key named ``admin``, even if no other key is set.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.server.http.auth import check_admin
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.protocol import parse, warning_headers

__all__ = ["WeightsReply", "WeightsRequest", "routes"]


class WeightsRequest(msgspec.Struct, kw_only=True):
    """The body of POST /update_weights; see :meth:`chairlift.async_llm.AsyncLLM.update_weights`."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Directory with safetensors on the server's machine."""
    version: Annotated[int, Meta(ge=0, le=2**53)]
    in_flight: Literal["continue", "recompute"] = "continue"


class WeightsReply(msgspec.Struct, kw_only=True):
    """Version and fingerprint of the weights that are now in use."""

    version: int
    system_fingerprint: str


async def _update(request: Request) -> Response:
    """Replace the weights. The response is sent when the new weights are in use."""
    state: ServerState = request.app.state.server
    check_admin(request)
    payload, ignored = parse(WeightsRequest, await read_json(request))
    try:
        info = await state.engine.update_weights(payload.path, payload.version, in_flight=payload.in_flight)
    except (ConfigError, ModelLoadError) as error:
        raise ApiError(400, f"{error}; the weights are those from before", code="invalid_value") from None
    reply = WeightsReply(version=info.weight_version, system_fingerprint=info.fingerprint)
    return json_response(reply, warning_headers(ignored))


routes: Final = [Route("/update_weights", _update, methods=["POST"])]
