"""Endpoints that tell about the server itself: its health, its version, its load and its metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.async_engine import EngineState
from chairlift.metrics import prometheus
from chairlift.metrics.stats import FORECAST_RATIOS
from chairlift.server.http.state import ServerState
from chairlift.version import __version__

__all__ = ["LoadReply", "StatusReply", "VersionReply", "render_metrics", "routes"]


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


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _unavailable(state: ServerState) -> str:
    """Reason why the server cannot serve requests now, in general words; empty when it can. Clients without a key may
    read the reason, so details are only in the log."""
    engine = state.engine
    return engine.check_health() if engine.state is EngineState.READY else f"the engine is {engine.state.value}"


async def _health(request: Request) -> Response:
    """Respond 200 while requests make progress, otherwise 503."""
    state: ServerState = request.app.state.server
    reason = _unavailable(state)
    return _json({"status": "unavailable", "reason": reason}, 503) if reason else _json({"status": "ok"})


async def _ready(request: Request) -> Response:
    """Respond 200 while new requests are accepted, otherwise 503."""
    state: ServerState = request.app.state.server
    engine = state.engine
    if state.draining:
        reason = "the server is shutting down"
    elif engine.state is not EngineState.READY:
        reason = f"the engine is {engine.state.value}"
    elif state.completing:
        reason = "the server is starting"
    else:
        return _json({"status": "ready"})
    return _json({"status": "unavailable", "reason": reason}, 503)


async def _version(request: Request) -> Response:
    return _json({"version": __version__})


async def _load(request: Request) -> Response:
    state: ServerState = request.app.state.server
    counts = {"running": state.engine.stats.engine.num_running, "waiting": state.engine.num_queued}
    return _json({"server_load": state.num_in_progress, **counts})


async def _metrics(request: Request) -> Response:
    return Response(render_metrics(request.app.state.server), media_type=prometheus.CONTENT_TYPE)


def render_metrics(state: ServerState) -> bytes:
    """The metrics of one engine and of this process, in Prometheus' text format."""
    engine = state.engine
    classes = engine.service_classes
    return prometheus.render(
        engine.stats,
        engine.info,
        model_name=state.model_names[0],
        prefix=state.config.metrics_prefix,
        up=engine.state is EngineState.READY,
        num_waiting=engine.num_queued,
        now=time.monotonic(),
        oldest_wait=engine.intake.oldest_wait(time.monotonic()),
        engine_pid=engine.replicas.engine_pid,
        replicas=engine.replicas.shown(),
        counts=engine.replicas.counts(),
        autoscaling=engine.replicas.autoscaling(),
        num_tasks=len(asyncio.all_tasks()),
        classes=None if classes is None else {name: each.min_seqs for name, each in classes.items()},
        forecast_within={ratio: engine.intake.calibration.within(ratio) for ratio in FORECAST_RATIOS},
    )


routes: Final = [
    Route("/health", _health, methods=["GET"]),
    Route("/ping", _health, methods=["GET"]),
    Route("/ready", _ready, methods=["GET"]),
    Route("/version", _version, methods=["GET"]),
    Route("/load", _load, methods=["GET"]),
    Route("/metrics", _metrics, methods=["GET"]),
]
