"""What the live view shows of training: who trains, who samples, and the tokens of each pass by training run."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from chairlift.server.http.auth import check_sees_all
from chairlift.server.http.streaming import json_response
from chairlift_train.service.service import TrainingService

__all__ = ["live_routes"]


def live_routes(get: Callable[[], TrainingService]) -> list[BaseRoute]:
    """The route of the live view. It shows the work of all keys, so it needs the key named ``admin`` if keys
    distinguish callers. ``get`` returns the service, and raises EngineDeadError before it has started."""

    async def show(request: Request) -> Response:
        """Training runs in memory, samplers that were used, and the newest packs and steps."""
        check_sees_all(request, "the live view")
        return json_response(get().runs.progress.shown())

    return [Route("/live/training", show, methods=["GET"])]
