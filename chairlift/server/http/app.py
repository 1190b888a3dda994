"""The ASGI application: checks before each endpoint, and error handling after it.

The order of the checks is: request id, Host allow-list, origin or API key, drain. Then the request is routed. Every
error, from the first check to a bug in an endpoint, becomes an OpenAI error object, or
the error object of the dialect to which the path belongs.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.dialects import COUNTED, error_form
from chairlift.server.http.auth import INTERNAL_CALLER, Auth, HostCheck, check_origin
from chairlift.server.http.cors import allows_origin, with_cors
from chairlift.server.http.errors import ApiError, error_response, to_api_error
from chairlift.server.http.limits import release_all
from chairlift.server.http.logs import log_event
from chairlift.server.http.routers import TrustedProxies
from chairlift.server.http.state import ServerState
from chairlift.server.routes import all_routes

__all__ = ["make_app"]

_logger: Final = logging.getLogger("chairlift.server")
_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_DRAIN_RETRY_SECONDS: Final = 5


def make_app(state: ServerState, routes: Sequence[BaseRoute] | None = None) -> ASGIApp:
    """The ASGI application for ``state``: with all endpoints, or only with ``routes`` if given."""
    return with_cors(_App(state, all_routes() if routes is None else routes), state.config.cors_origin)


class _App:
    """The ASGI callable. Unlike middleware it does not buffer: chunks of a stream are written to the connection at
    once."""

    def __init__(self, state: ServerState, routes: Sequence[BaseRoute]) -> None:
        self._state = state
        self._router = Router(routes, redirect_slashes=False)
        self._holder = Starlette()  # becomes request.app
        self._holder.state.server = state
        self._auth = Auth(state.api_keys)
        self._proxies = TrustedProxies(state.config.trusted_proxy)
        self._hosts = HostCheck(state.config.host, state.config.allowed_host, bool(state.api_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._router.lifespan(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        scope["app"] = self._holder
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        if self._state.tracer is not None:
            self._state.tracer.received(scope)
        counted = scope["path"].startswith(COUNTED)
        self._state.num_in_progress += counted
        try:
            if INTERNAL_CALLER in scope:
                scope["state"] |= scope[INTERNAL_CALLER]
            else:
                self._admit(scope)
            await self._router(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            return
        except Exception as error:
            chat = scope["path"] == "/v1/chat/completions"
            state: ServerState = scope["app"].state.server  # that of the model that was to answer
            api_error = to_api_error(error, state, exchange.request_id, chat=chat)
            turned_away = api_error.code == "engine_unavailable" and not getattr(error, "taken", False)
            state.engine.stats.rejected.update(("unavailable",) if turned_away else ())
            response = error_response(api_error, scope["path"], exchange.request_id, error_form(scope["path"]))
            if exchange.status is not None:
                raise  # in the middle of an answer, only closing the connection can report an error
            await response(scope, receive, exchange.send)
        finally:
            release_all(Request(scope))
            self._state.num_in_progress -= counted
            if counted and exchange.status is not None:
                stats = scope["app"].state.server.engine.stats
                stats.responded(exchange.route, exchange.method, exchange.status, exchange.seconds)
            if self._state.config.log_requests:
                exchange.log()

    def _admit(self, scope: Scope) -> None:
        """Raise ApiError for a request that the checks do not let through to an endpoint."""
        hosts = []
        authorization = []
        keys = []
        sites = []
        origins = []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"authorization":
                authorization.append(value)
            elif name == b"x-api-key":
                keys.append(value)
            elif name == b"sec-fetch-site":
                sites.append(value)
            elif name == b"origin":
                origins.append(value)
        self._hosts.check(hosts)
        path = scope["path"]
        if (
            (sites or origins)
            and not self._state.api_keys
            and not allows_origin(self._state.config.cors_origin, origins)
        ):
            check_origin(path, hosts[0], sites, origins)
        raw_path = scope.get("raw_path") or path.encode("utf-8", "replace")
        caller = self._auth.check(path, raw_path, authorization, keys)
        scope["state"]["caller"] = dataclasses.replace(caller, request_id=scope["state"]["request_id"])
        if self._proxies:
            scope["state"]["fairness_id"] = self._proxies.fairness_id(scope.get("client"), scope["headers"])
        if self._state.draining and scope["method"] == "POST":
            self._state.engine.stats.rejected["draining"] += 1
            retry = {"retry-after": str(_DRAIN_RETRY_SECONDS), "connection": "close"}
            raise ApiError(503, "the server is shutting down; try another one", code="server_draining", headers=retry)


_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class _Exchange:
    """Data of one HTTP request and its response, for the log."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._start = time.monotonic()
        self._first_byte: float | None = None
        self._bytes_in = self._bytes_out = 0
        self.status: int | None = None
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        client_id = given[0] if len(given) == 1 and _CLIENT_ID.fullmatch(given[0]) else b""
        self.request_id = client_id.decode() or f"req-{secrets.token_hex(16)}"

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_in += len(message.get("body", b""))
        if not message.get("more_body"):
            self._scope["state"].setdefault("arrived", time.monotonic())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._first_byte = time.monotonic()
            extra = [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            present = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
        else:
            self._bytes_out += len(message.get("body", b""))
        await self._send(message)

    @property
    def route(self) -> str:
        """Pattern of the path, or ``none`` if there is no such path."""
        path: str = getattr(self._scope.get("route"), "path", "none")
        return path

    @property
    def method(self) -> str:
        """HTTP method, or ``other`` if no endpoint has it."""
        method: str = self._scope["method"]
        return method if method in _METHODS else "other"

    @property
    def seconds(self) -> float:
        """Seconds since the request's head arrived."""
        return time.monotonic() - self._start

    def log(self) -> None:
        """Log one line about the request and its response. The line contains no text of the prompt or of the output."""
        log_event(
            _logger,
            logging.INFO,
            "request",
            id=self.request_id,
            method=self._scope["method"],
            route=self.route,
            status=self.status,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            first_byte_seconds=None if self._first_byte is None else round(self._first_byte - self._start, 4),
            seconds=round(self.seconds, 4),
        )
