"""GET and DELETE /v1/kv_store: show and empty the files that keep KV blocks. Both need the API key named ``admin``."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.kv_store.report import StoreReport
from chairlift.server.http.auth import check_admin
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response

__all__ = ["KVStoreReply", "routes"]


class KVStoreReply(msgspec.Struct, kw_only=True):
    """State of the stores of KV blocks, one for each replica."""

    object: Literal["kv_store"] = "kv_store"
    engines: list[StoreReport]


async def _reply(state: ServerState, clear: str = "") -> Response:
    engines = await state.engine.kv_store(clear)
    if all(each.state == "off" for each in engines):
        raise ApiError(404, "KV is not kept in files; start with --kv-store DIR", code="not_enabled")
    if clear and any(each.state == "read_only" for each in engines):
        message = "kv_store_mode is ro, so nothing was removed; ask a server that may write (rw)"
        raise ApiError(400, message, code="not_enabled")
    return json_response(KVStoreReply(engines=engines))


async def _show(request: Request) -> Response:
    """Show what is in the store."""
    check_admin(request)
    return await _reply(request.app.state.server)


async def _clear(request: Request) -> Response:
    """Remove the blocks of the served model; with ``all=true``, those of all models. Files that other running engines
    write stay. The response is sent when they are removed, and shows what is left."""
    check_admin(request)
    everything = request.query_params.get("all", "false")
    if everything not in ("true", "false"):
        raise ApiError(400, f"all must be true or false, got {everything!r:.80}", code="invalid_value", param="all")
    return await _reply(request.app.state.server, "all" if everything == "true" else "own")


routes: Final = [
    Route("/v1/kv_store", _show, methods=["GET"]),
    Route("/v1/kv_store", _clear, methods=["DELETE"]),
]
