"""GET /v1/replicas: the engines behind this server. POST /v1/replicas/restart: restart them one after another."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.errors import ConfigError, ReplicaStartError
from chairlift.metrics.stats import AutoscalingStats, ReplicaStats
from chairlift.server.http.auth import check_admin
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response

__all__ = ["ReplicasReply", "rounded_autoscaling", "routes"]


class ReplicasReply(msgspec.Struct, kw_only=True):
    """State of the replicas; empty for a server with one engine."""

    object: Literal["replicas"] = "replicas"
    waiting_at_door: int
    """Number of requests that wait at the router because no replica can take them yet."""
    replicas: list[ReplicaStats]
    autoscaling: AutoscalingStats | None = None
    """State of autoscaling; null if the number of replicas is fixed."""


def _reply(state: ServerState) -> Response:
    replicas = [
        dataclasses.replace(each, kv_cache_usage=round(each.kv_cache_usage, 4))
        for each in state.engine.replicas.shown()
    ]
    waiting = max(0, state.engine.num_queued - sum(each.unstarted for each in replicas)) if replicas else 0
    return json_response(
        ReplicasReply(waiting_at_door=waiting, replicas=replicas, autoscaling=rounded_autoscaling(state))
    )


def rounded_autoscaling(state: ServerState) -> AutoscalingStats | None:
    """State of autoscaling with values rounded for a response; None if the number of replicas is fixed."""
    found = state.engine.replicas.autoscaling()
    if found is not None:
        for name in ("forecast_wait_seconds", "load", "start_seconds"):
            setattr(found, name, round(getattr(found, name), 3))
    return found


async def _show(request: Request) -> Response:
    """Show the state of each replica."""
    return _reply(request.app.state.server)


async def _restart(request: Request) -> Response:
    """Restart all replicas, one after another. The response is sent when the last replica serves again, or when one
    cannot start again."""
    state: ServerState = request.app.state.server
    check_admin(request)
    try:
        await state.engine.replicas.restart(state.config.shutdown_timeout)
    except ConfigError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    except ReplicaStartError as error:
        raise ApiError(503, str(error), code="replica_not_started") from None
    return _reply(state)


routes: Final = [
    Route("/v1/replicas", _show, methods=["GET"]),
    Route("/v1/replicas/restart", _restart, methods=["POST"]),
]
