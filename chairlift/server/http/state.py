"""State that all endpoints of one server share."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from chairlift.config import ServerConfig
from chairlift.models.vision.addresses import MediaSource
from chairlift.server.openai.response_store import ResponseStore

if TYPE_CHECKING:
    from chairlift.engine.async_engine import AsyncEngine
    from chairlift.server.openai.batches.worker import BatchWorker
    from chairlift.server.operations.tracing import RequestTracer
    from chairlift.server.pages.live_feed import LiveFeed

__all__ = ["ServerState"]

_MAX_BODY_BYTES: Final = 4 << 20
_MAX_IMAGE_BODY_BYTES: Final = 48 << 20
"""Has room for the largest image, 32 MiB, in base64."""


@dataclasses.dataclass(slots=True)
class ServerState:
    """State of one server. Endpoints access it as ``request.app.state.server``."""

    config: ServerConfig
    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Model names for clients. Responses to requests without a model name contain the first name."""
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """API key -> tenant that is charged for the key's requests."""
    started_at: int = 0
    """Unix time of the server's start, shown as ``created`` in /v1/models."""
    draining: bool = False
    """Whether the server is shutting down: it finishes its requests and accepts no new ones."""
    completing: bool = False
    """Whether something beside the engine still starts, such as a training service."""
    reloads: bool = False
    """Whether the server starts another engine in the place of one that has stopped: it has many models."""
    num_body_bytes: int = 0
    """Bytes of all request bodies that have not been turned into tokens."""
    reading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Locked while a long body is parsed."""
    writing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Locked while a thread encodes a piece of a long response."""
    num_logprobs: int = 0
    """Number of log-probabilities for which running requests have reserved room."""
    num_in_progress: int = 0
    """Number of HTTP requests to /v1/* and /api/* whose response is not finished."""
    responses: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    """Responses that clients asked to be stored."""
    live: LiveFeed | None = None
    """Data source of the live view page; None before the page's first viewer."""
    comparison: str | None = None
    """Worker program that simulates a recording with other rules, for the live view page; None if there is none."""
    media: MediaSource | None = None
    """Reads images from URLs; None if the settings allow no URLs."""
    tracer: RequestTracer | None = None
    """Writes an OpenTelemetry trace of every request; None if the settings turn it off."""
    clock: Callable[[], float] = time.monotonic
    """Current time in seconds, by which streams notice that they have been silent."""
    batches: BatchWorker | None = None
    """Stores files and processes batches; None if the settings name no directory for them."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum length of a request body in bytes. While the model is unknown, images may be sent: the answer is then
        503, and not that the body is too long."""
        if self.config.max_body_bytes is not None:
            return self.config.max_body_bytes
        info = self.engine.info
        return _MAX_IMAGE_BODY_BYTES if info is None or info.takes_images else _MAX_BODY_BYTES
