"""POST /update_weights: other weights for the network that is served, from one step to the next. For trainers.

Whoever may do this decides what everybody is answered, and which directories of this machine are read: it takes the
API key that is named ``admin``, also where there is no other.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.server.auth import check_admin
from chairlift.server.errors import ApiError
from chairlift.server.limits import read_json
from chairlift.server.protocol import parse, warning_headers
from chairlift.server.state import ServerState
from chairlift.server.streaming import json_response

__all__ = ["WeightsReply", "WeightsRequest", "routes"]


class WeightsRequest(msgspec.Struct, kw_only=True):
    """The body; see :meth:`chairlift.async_llm.AsyncLLM.update_weights`."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A directory with safetensors, where the server runs."""
    version: Annotated[int, Meta(ge=0, le=2**53)]
    in_flight: Literal["continue", "recompute"] = "continue"


class WeightsReply(msgspec.Struct, kw_only=True):
    """What serves now."""

    version: int
    system_fingerprint: str


async def _update(request: Request) -> Response:
    """Answers when the new weights serve, with what follows their change: the version and the fingerprint."""
    state: ServerState = request.app.state.server
    check_admin(request)
    asked, ignored = parse(WeightsRequest, await read_json(request))
    try:
        info = await state.engine.update_weights(asked.path, asked.version, in_flight=asked.in_flight)
    except (ConfigError, ModelLoadError) as error:
        raise ApiError(400, f"{error}; the weights are those from before", code="invalid_value") from None
    reply = WeightsReply(version=info.weight_version, system_fingerprint=info.fingerprint)
    return json_response(reply, warning_headers(ignored))


routes: Final = [Route("/update_weights", _update, methods=["POST"])]
