"""What all endpoints share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from chairlift.config import ServerConfig
from chairlift.server.response_store import ResponseStore

if TYPE_CHECKING:
    from chairlift.engine.async_engine import AsyncEngine
    from chairlift.server.batch_worker import BatchWorker
    from chairlift.server.live_feed import LiveFeed
    from chairlift.server.tracing import RequestTracer

__all__ = ["ServerState"]


@dataclasses.dataclass(slots=True)
class ServerState:
    """One server. Endpoints find it at ``request.app.state.server``."""

    config: ServerConfig
    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Names clients may ask for; the first is the one that answers carry."""
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key -> the tenant that is charged for its requests."""
    started_at: int = 0
    """Unix time, for ``created`` in /v1/models."""
    draining: bool = False
    """The server finishes what it has and takes nothing new."""
    num_body_bytes: int = 0
    """Request bodies that are not tokens yet, all together."""
    reading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while a long body is read."""
    writing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while a piece of a long reply is written on a thread."""
    num_logprobs: int = 0
    """Log-probabilities that the requests in flight may bring, all together."""
    num_in_progress: int = 0
    """HTTP requests to /v1/* that have not been answered to the end."""
    responses: ResponseStore = dataclasses.field(default_factory=ResponseStore)
    """What clients asked to be kept."""
    live: LiveFeed | None = None
    """What the live view shows, once somebody has looked."""
    tracer: RequestTracer | None = None
    """Writes a trace of every request, where the settings say so."""
    batches: BatchWorker | None = None
    """Keeps files and answers batches, where the settings name a directory for them."""
