"""GET /v1/queue: waiting requests, forecasts of their starts, and the accuracy of these forecasts."""

from __future__ import annotations

import time
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.service_class import DEFAULT_CLASS
from chairlift.engine.calibration import Calibration
from chairlift.engine.output_stream import OutputStream
from chairlift.metrics.stats import FORECAST_RATIOS, AutoscalingStats
from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.operations.replicas import rounded_autoscaling

__all__ = ["QueueReply", "routes"]

_MOST: Final = 1000
_QUANTILES: Final = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class ForecastCalibration(msgspec.Struct, kw_only=True):
    """Accuracy of the forecasts for the last requests. Values are null if there are too few requests."""

    samples: int
    actual_over_predicted: dict[str, float | None]
    """Quantiles (p10, p50, p90) of actual wait divided by predicted wait."""
    within_ratio: dict[str, float | None]
    """Ratio (1, 1.25 or 2) -> fraction of the requests whose wait was at most this ratio times the predicted wait."""
    mean_absolute_error_seconds: float | None


class QueuedRequest(msgspec.Struct, kw_only=True):
    """One waiting request. Each prompt of a completion is a separate request."""

    id: str
    """The X-Request-Id of the HTTP request."""
    position: int
    """Position in the queue: 1 for the next request to start; 0 if the request has started."""
    expected_start_seconds: float | None
    """Expected seconds from now until the request starts; null if there is no forecast."""
    expected_load_seconds: float | None
    """Expected seconds from now until its KV is read from files; null unless the request waits for that."""
    waited_seconds: float | None
    """Seconds since the request arrived; null if it has started."""
    service_tier: str
    prompt_tokens: int


class QueueReply(msgspec.Struct, kw_only=True):
    """State of the queue."""

    object: Literal["queue"] = "queue"
    running: int
    """Number of sequences that run in the batch now."""
    waiting: int
    """Number of requests that have not been in any step."""
    expected_wait_seconds: dict[str, float | None]
    """Class of service -> seconds that a new request of this caller would wait; null if there is no forecast."""
    forecast_age_seconds: float | None
    """Seconds since the last forecast; null before the first one."""
    calibration: ForecastCalibration
    autoscaling: AutoscalingStats | None
    """State of autoscaling; null if the number of replicas is fixed."""
    requests: list[QueuedRequest]
    """The caller's own requests, at most a thousand. If keys do not distinguish callers: the requests of all callers.
    """


async def show_queue(request: Request) -> Response:
    """Show the whole queue, or only the request that the parameter ``request_id`` names. Raises ApiError 404 for an
    unknown id."""
    state: ServerState = request.app.state.server
    engine = state.engine
    forecast = state.engine.intake.forecast
    caller: Caller = getattr(request.state, "caller", Caller())
    requests = _requests(state, caller, request.query_params.get("request_id"))
    reply = QueueReply(
        running=engine.stats.engine.num_running,
        waiting=engine.num_queued,
        expected_wait_seconds={
            name: _rounded(engine.expected_wait(name, caller.tenant))
            for name in engine.service_classes or (DEFAULT_CLASS,)
        },
        forecast_age_seconds=None if forecast is None else _rounded(max(0.0, time.monotonic() - forecast.made_at)),
        calibration=_calibration(engine.intake.calibration),
        autoscaling=rounded_autoscaling(state),
        requests=requests[:_MOST],
    )
    return json_response(reply)


def _requests(state: ServerState, caller: Caller, request_id: str | None) -> list[QueuedRequest]:
    """The waiting requests that the caller may see. With ``request_id``: only those with this id, also started ones."""

    def shown(stream: OutputStream) -> bool:
        return caller.sees(stream.tenant) and (request_id is None or stream.name == request_id)

    line = [(stream, place) for stream, place in state.engine.line() if shown(stream)]
    found = [
        _entry(stream, place.position, _rounded(place.expected_start), _rounded(place.waited), _rounded(place.loading))
        for stream, place in line
    ]
    if request_id is not None:
        waiting = {stream.request_id for stream, _ in line}
        started = [each for each in state.engine.named(request_id) if shown(each) and each.request_id not in waiting]
        found += [_entry(stream, 0, 0.0, None) for stream in started]
        if not found:
            message = f"no request with the id {request_id!r:.140} waits or runs here; it may have ended"
            raise ApiError(404, message, code="request_not_found", param="request_id")
    return found


def _entry(
    stream: OutputStream, position: int, start: float | None, waited: float | None, load: float | None = None
) -> QueuedRequest:
    return QueuedRequest(
        id=stream.name,
        position=position,
        expected_start_seconds=start,
        expected_load_seconds=load,
        waited_seconds=waited,
        service_tier=stream.service_class,
        prompt_tokens=len(stream.prompt_token_ids),
    )


def _calibration(calibration: Calibration) -> ForecastCalibration:
    return ForecastCalibration(
        samples=len(calibration),
        actual_over_predicted={name: _rounded(calibration.quantile(share)) for name, share in _QUANTILES.items()},
        within_ratio={f"{ratio:g}": _rounded(calibration.within(ratio)) for ratio in FORECAST_RATIOS},
        mean_absolute_error_seconds=_rounded(calibration.mean_error()),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


routes: Final = [Route("/v1/queue", show_queue, methods=["GET"])]
