"""Shows a recording in the live view page, without an engine, on this machine only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from chairlift.config import ServerConfig
from chairlift.metrics.stats import RequestStats
from chairlift.server.http.app import make_app
from chairlift.server.http.http_protocol import HttpServer
from chairlift.server.http.lifecycle import bind
from chairlift.server.http.state import ServerState
from chairlift.server.pages import live
from chairlift.server.pages.live_feed import LiveFeed

__all__ = ["serve_recording"]


class _NoEngine:
    """Replaces the engine when only a recording is shown. It has only the attributes that the application reads."""

    def __init__(self) -> None:
        self.stats = RequestStats()

    def retry_after(self) -> float:
        """Seconds after which to try again."""
        return 1.0


async def serve_recording(data: bytes, port: int, announce: Callable[[str], None], comparison: str) -> None:
    """Show the recording until SIGINT or SIGTERM. ``announce`` is called with the page's URL. ``comparison`` is the
    worker program that simulates the recording with other rules. Raises ConfigError."""
    config = ServerConfig(port=port)
    state = ServerState(config, cast(Any, _NoEngine()), ("a recording",), live=LiveFeed(None, recording=data))
    state.comparison = comparison
    server = HttpServer(make_app(state, [Route("/", _to_page), *live.routes]))
    sock = bind(config, ())
    await server.start(sock)
    announce(f"http://127.0.0.1:{sock.getsockname()[1]}/live")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        await server.close(1.0)


async def _to_page(request: Request) -> Response:
    return RedirectResponse("/live")
