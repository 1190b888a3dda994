"""State that all endpoints share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from chairlift.config import ServerConfig
from chairlift.server.response_store import ResponseStore
from chairlift.vision.addresses import MediaSource

if TYPE_CHECKING:
    from chairlift.engine.async_engine import AsyncEngine
    from chairlift.server.batch_worker import BatchWorker
    from chairlift.server.live_feed import LiveFeed
    from chairlift.server.tracing import RequestTracer

__all__ = ["ServerState"]


@dataclasses.dataclass(slots=True)
class ServerState:
    """State of one server. Endpoints use it as ``request.app.state.server``."""

    config: ServerConfig
    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Model names for clients; answers have the first."""
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key -> tenant that is charged for its requests."""
    started_at: int = 0
    """Unix time, for ``created`` in /v1/models."""
    draining: bool = False
    """Whether the server finishes its requests and accepts no new ones."""
    num_body_bytes: int = 0
    """Bytes of all request bodies that are not tokens yet."""
    reading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while a long body is parsed."""
    writing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while a thread writes a piece of a long reply."""
    num_logprobs: int = 0
    """Most log-probabilities of all running requests together."""
    num_in_progress: int = 0
    """Number of HTTP requests to /v1/* whose answer is not finished."""
    responses: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    """Responses that clients asked to be stored."""
    live: LiveFeed | None = None
    """Data of the live view; None before its first viewer."""
    media: MediaSource | None = None
    """Reads images from addresses, if the settings name some that may be read."""
    tracer: RequestTracer | None = None
    """Writes a trace of every request, if the settings ask for it."""
    batches: BatchWorker | None = None
    """Stores files and answers batches, if the settings name a directory for them."""
