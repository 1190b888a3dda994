"""Scheduling fields of a request: class of service, deadlines, tenant."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Protocol

from starlette.requests import Request

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.service_class import DEFAULT_CLASS, parse_service_classes
from chairlift.server.caching.sessions import session_of
from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.routers import charged_to
from chairlift.server.http.state import ServerState

__all__ = ["BATCH_CLASS", "NOT_IN_BATCHES", "TTFT_HEADER", "class_of", "read_scheduling_fields"]

TTFT_HEADER: Final = "x-slo-ttft-ms"
"""Header with the number of milliseconds until the first token is due. The field ``ttft_ms`` takes precedence."""

BATCH_CLASS: Final = "flex"
"""Class of service for the requests of batches."""
NOT_IN_BATCHES: Final = ("stream", "priority", "ttft_ms", "tpot_ms", "deadline_ms", "queue_timeout")
"""Fields that requests of a batch may not have."""
_BUILT_IN: Final = tuple(parse_service_classes(""))
_MILLISECONDS: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")


class _Scheduled(Protocol):
    """Scheduling fields of a request's body."""

    service_tier: str | None
    ttft_ms: float | None
    user: str | None


def read_scheduling_fields(request: Request, payload: _Scheduled, ignored: list[str]) -> Caller:
    """Check the class of service, copy deadlines from headers into the request's fields, and return the caller to
    charge.

    ``scale`` is OpenAI's class for prepaid use, which does not exist here. It means ``auto``, except if the settings
    define a class with this name. If the scheduling policy ignores deadlines, the three built-in classes are accepted
    without effect. Raises ApiError 400.
    """
    state: ServerState = request.app.state.server
    classes = state.engine.service_classes
    known = _BUILT_IN if classes is None else tuple(classes)
    if getattr(request.state, "is_batch", False):
        _check_batch(payload)
        payload.service_tier = BATCH_CLASS
    if payload.service_tier == "auto" or (payload.service_tier == "scale" and "scale" not in known):
        payload.service_tier = None
    if payload.service_tier is not None and payload.service_tier not in known:
        message = f"service_tier must be one of auto, {', '.join(known)}; got {payload.service_tier!r}"
        raise ApiError(400, message, code="invalid_value", param="service_tier")
    given = request.headers.getlist(TTFT_HEADER)
    if payload.ttft_ms is None and given:
        payload.ttft_ms = _milliseconds(given)
    caller: Caller = getattr(request.state, "caller", Caller())
    fairness_id = getattr(request.state, "fairness_id", "")
    if fairness_id and classes is not None:
        caller = dataclasses.replace(caller, tenant=charged_to(caller, fairness_id))
    caller = dataclasses.replace(caller, vouched=caller.tenant, session=session_of(request, payload))
    if payload.user and (caller.tenant or classes is None):
        ignored.append("user")
    elif payload.user and not payload.user.isprintable():
        raise ApiError(400, "user must be of printable characters", code="invalid_value", param="user")
    elif payload.user:
        caller = dataclasses.replace(caller, tenant=payload.user)
    return dataclasses.replace(caller, arrived=getattr(request.state, "arrived", None))


def _check_batch(payload: _Scheduled) -> None:
    """Raise ApiError 400 for fields that are not allowed in a request of a batch."""
    given = [name for name in NOT_IN_BATCHES if getattr(payload, name, None)]
    if payload.service_tier not in (None, "auto", "default", BATCH_CLASS):
        given.append("service_tier")
    if given:
        message = f"{given[0]} cannot be used in a batch, whose requests have the class {BATCH_CLASS}; leave it out"
        raise ApiError(400, message, code="invalid_value", param=given[0])


def class_of(params: SamplingParams) -> str:
    """Class of service that a request with these parameters asks for. The parameters need not have been checked."""
    return params.service_tier or DEFAULT_CLASS


def _milliseconds(given: list[str]) -> float:
    value = float(given[0]) if len(given) == 1 and _MILLISECONDS.fullmatch(given[0].strip()) else 0.0
    if value <= 0:
        message = f"the header {TTFT_HEADER} must be one number of milliseconds above 0; got {', '.join(given)!r:.80}"
        raise ApiError(400, message, code="invalid_value", param=TTFT_HEADER)
    return value
