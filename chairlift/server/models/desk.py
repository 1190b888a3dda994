"""The routes of a server with many models: each request goes to the model that it names.

Every dialect names the model in the field ``model`` of the body. The request waits until this model is loaded, and its
endpoint then sees the state of that model only, as if the server had no other. Endpoints about an engine take the
parameter ``?model=NAME`` and load nothing. The others belong to the server.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from chairlift.engine.async_engine import EngineState
from chairlift.fleet.models.policy import Ticket
from chairlift.metrics import prometheus
from chairlift.server.dialects import DIALECTS
from chairlift.server.http import openapi
from chairlift.server.http.app import make_app
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, when_done
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.models.cards import (
    ServedModelList,
    card,
    merged_metrics,
    model_metrics,
    ollama_ps,
    ollama_tags,
)
from chairlift.server.models.engine import ManyModels
from chairlift.server.models.hosts import Host, Hosts, ModelRefusedError
from chairlift.server.ollama.bodies import OllamaModels
from chairlift.server.ollama.generate import unloaded_reply
from chairlift.server.ollama.keep_alive import keep_seconds
from chairlift.server.openai.models import anthropic_page, is_anthropic
from chairlift.server.operations.health import render_metrics
from chairlift.server.operations.traffic import RequestsReply, list_requests

__all__ = ["PLACE_HEADER", "make_models_app"]

PLACE_HEADER: Final = "x-chairlift-load-position"
"""Header of a response to a request that waited for a load: its place in the line when it arrived."""
_MAX_NAMED: Final = 20
_OLLAMA: Final = "/api/"
Endpoint = Callable[[Request], Awaitable[Response]]


def make_models_app(state: ServerState) -> ASGIApp:
    """The ASGI application of a server with many models. ``state.engine`` is a
    :class:`~chairlift.server.models.engine.ManyModels`."""
    engine = state.engine
    if not isinstance(engine, ManyModels):
        raise TypeError(f"the engine is {type(engine).__name__}")
    engine.attach(state)
    return make_app(state, _Desk(state, engine).routes())


class _Desk:
    """Chooses the model of each request."""

    def __init__(self, state: ServerState, engine: ManyModels) -> None:
        self._state = state
        self._engine = engine

    def routes(self) -> list[BaseRoute]:
        """The routes of all dialects. Their endpoints get the state of the chosen model."""
        own: dict[str, Endpoint] = {
            "/v1/models": self._list,
            "/v1/models/{name:path}": self._one,
            "/metrics": self._metrics,
            "/load": self._load,
            "/v1/requests": self._requests,
            "/api/tags": self._tags,
            "/api/ps": self._ps,
        }
        found: list[BaseRoute] = []
        for dialect in DIALECTS:
            for route in dialect.routes:
                if not isinstance(route, Route):
                    continue
                endpoint = route.endpoint
                if route.path in own:
                    endpoint = own[route.path]
                elif route.path in dialect.computing:
                    endpoint = functools.partial(self._compute, endpoint)
                elif route.path not in dialect.of_server:
                    endpoint = functools.partial(self._ask, endpoint)
                methods = sorted((route.methods or set()) - {"HEAD"})
                found.append(Route(route.path, endpoint, methods=methods))
        return [*found, *openapi.routes]

    # -- requests for a model ------------------------------------------------------------------------------------------

    async def _compute(self, endpoint: Endpoint, request: Request) -> Response:
        """Let the model that the body names answer a request. It is loaded if necessary."""
        body = await read_json(request)
        is_ollama = request.url.path.startswith(_OLLAMA)
        host = self._named(body.get("model"), is_ollama)
        keep = body.get("keep_alive") if is_ollama else None
        seconds = None if keep is None else keep_seconds(keep)
        if seconds == 0 and not any(body.get(name) for name in ("messages", "prompt", "input", "suffix")):
            self._hosts.keep(host, 0.0)
            return unloaded_reply(request.url.path, body)
        request.scope["state"]["body"] = body
        try:
            ticket = self._hosts.begin(host)
            place = 0 if ticket.admitted else self._hosts.policy.position(ticket)
            when_done(request, functools.partial(self._hosts.leave, ticket))
            if place:
                await self._wait(request, ticket)
        except ModelRefusedError as error:
            headers = {"retry-after": str(math.ceil(error.retry_after))}
            if error.failed:
                message = f"the model {host.entry.name!r} cannot be loaded: {error}"
                raise ApiError(503, message, code="model_failed", param="model", headers=headers) from None
            raise ApiError(429, str(error), code="too_many_waiting", headers=headers) from None
        if seconds is not None:
            self._hosts.keep(host, seconds)
        self._hand_over(request, host)
        response = await endpoint(request)
        if place:
            response.headers[PLACE_HEADER] = str(place)
        return response

    async def _wait(self, request: Request, ticket: Ticket) -> None:
        """Wait for a load. Raises ClientDisconnect if the caller leaves, and ApiError 503 if its time is over."""
        config = self._state.config
        limit = min(config.request_timeout, config.queue_timeout or math.inf)
        arrived: float = request.scope["state"]["arrived"]
        opened = asyncio.ensure_future(self._hosts.wait(ticket))
        left = asyncio.ensure_future(request.receive())
        try:
            remaining = max(0.0, arrived + limit - time.monotonic())
            await asyncio.wait({opened, left}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                return opened.result()
            if left.done():
                raise ClientDisconnect()
            retry = {"retry-after": str(math.ceil(self._hosts.policy.retry_after(ticket.model, time.monotonic())))}
            raise ApiError(
                503, f"the model {ticket.model!r} was not loaded in time", code="queue_timeout", headers=retry
            )
        finally:
            opened.cancel()
            left.cancel()
            await asyncio.gather(opened, left, return_exceptions=True)

    async def _ask(self, endpoint: Endpoint, request: Request) -> Response:
        """Let a loaded model answer a request about its engine. The model is not loaded, and may be unloaded."""
        name: Any = request.query_params.get("model")
        if name is None and request.method == "POST" and request.headers.get("content-type"):
            request.scope["state"]["body"] = body = await read_json(request)
            name = body.get("model", body.get("name"))
        loaded = self._hosts.loaded()
        host = loaded[0] if name is None and len(loaded) == 1 else self._named(name, True)
        if host.state is None:
            message = f"the model {host.entry.name!r} is {self._hosts.state_of(host)}; a request to it loads it"
            raise ApiError(409, message, code="model_not_loaded", param="model")
        self._hand_over(request, host)
        return await endpoint(request)

    def _hand_over(self, request: Request, host: Host) -> None:
        """Let the endpoint and the end of the request see the state of a model."""
        if host.state is None:
            raise ApiError(503, f"the model {host.entry.name!r} was unloaded", headers={"retry-after": "1"})
        num_bytes = request.scope["state"].get("body_bytes", 0)
        self._state.num_body_bytes -= num_bytes
        host.state.num_body_bytes += num_bytes
        request.scope["app"] = host.holder

    @property
    def _hosts(self) -> Hosts:
        if self._engine.hosts is None:
            headers = {"retry-after": "1"}
            raise ApiError(503, "the server plans the memory of its models", code="engine_unavailable", headers=headers)
        return self._engine.hosts

    def _named(self, name: Any, may_have_tag: bool) -> Host:
        """The model that a request names. Raises ApiError 400 without a name, and 404 for an unknown name."""
        hosts = self._hosts
        served = ", ".join(hosts.names[:_MAX_NAMED])
        if name is None and len(hosts.hosts) == 1:
            return next(iter(hosts.hosts.values()))
        if not isinstance(name, str) or not name:
            message = f"model is required, because this server has several; name one of {served}"
            raise ApiError(400, message, code="missing_required_parameter", param="model")
        host = hosts.named(name)
        if host is None or (name not in hosts.names and not may_have_tag):
            message = f"the model {name!r:.100} is not served here; ask for {served}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return host

    # -- the server's own endpoints ------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        hosts = self._hosts
        if is_anthropic(request):
            return json_response(anthropic_page(request, hosts.names))
        created = self._state.started_at
        cards = [
            card(hosts, host, name, created)
            for host in hosts.hosts.values()
            for name in (*host.entry.names, *host.entry.adapters)
        ]
        return json_response(ServedModelList(data=cards))

    async def _one(self, request: Request) -> Response:
        name = request.path_params["name"]
        host = self._named(name, False)
        if is_anthropic(request):
            return json_response(anthropic_page(request, [name]).data[0])
        return json_response(card(self._hosts, host, name, self._state.started_at))

    async def _tags(self, request: Request) -> Response:
        return json_response(OllamaModels(models=await ollama_tags(self._hosts, self._state.started_at)))

    async def _ps(self, request: Request) -> Response:
        return json_response(OllamaModels(models=await ollama_ps(self._hosts)))

    async def _load(self, request: Request) -> Response:
        states = [host.state for host in self._hosts.loaded() if host.state is not None]
        running = sum(state.engine.stats.engine.num_running for state in states)
        waiting = sum(state.engine.num_queued for state in states) + self._hosts.policy.num_waiting
        return json_response({"server_load": self._state.num_in_progress, "running": running, "waiting": waiting})

    async def _requests(self, request: Request) -> Response:
        """The requests of the model of the query, or of all loaded models."""
        if "model" in request.query_params:
            return await self._ask(list_requests, request)
        whole = RequestsReply(running=0, waiting=self._hosts.policy.num_waiting, requests=[])
        own = request.scope["app"]
        for host in self._hosts.loaded():
            if host.state is None:
                continue
            request.scope["app"] = host.holder
            part = msgspec.json.decode((await list_requests(request)).body, type=RequestsReply)
            whole.running += part.running
            whole.waiting += part.waiting
            whole.requests += part.requests
        request.scope["app"] = own
        return json_response(whole)

    async def _metrics(self, request: Request) -> Response:
        """The metrics of the server and of all loaded models. Those of a model have its name as a label."""
        pages = {"": render_metrics(self._state)} if self._engine.hosts is None else {}
        more = []
        if self._engine.state is EngineState.READY:
            more = model_metrics(self._hosts)
            states = [host.state for host in self._hosts.loaded()]
            pages |= {state.model_names[0]: render_metrics(state) for state in states if state is not None}
        return Response(merged_metrics(pages, more), media_type=prometheus.CONTENT_TYPE)
