"""Errors of requests, and their form in OpenAI's API. A dialect may declare another form for its paths."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.async_engine import EngineState
from chairlift.errors import (
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    StorageError,
    TemplateError,
    WorkerLostError,
)
from chairlift.server.http.not_served import not_served
from chairlift.server.http.state import ServerState

__all__ = ["ApiError", "ErrorForm", "error_body", "error_response", "openai_form", "to_api_error"]

_OVERLOADED = {
    QueueTimeoutError: "queue_timeout",
    DeadlineError: "deadline_exceeded",
    WorkerLostError: "worker_lost",
}
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OF_MESSAGES = re.compile(r"messages(\[[0-9]+\][\w.\[\]-]{0,200})?|continue_final_message")
_OF_PARTS = re.compile(r"messages\[[0-9]+\]\.content\[[0-9]+\]")
_PROMPT_NUMBER = re.compile(r"prompt ([0-9]+): ")
_OF_PROMPT = re.compile(r"the (prompt|texts?)\b")
_log = logging.getLogger("chairlift.server")


class ApiError(Exception):
    """An error that ends a request with an HTTP status and an OpenAI error object.

    If ``type`` is not given, it is derived from the status: invalid_request_error, authentication_error,
    not_found_error, rate_limit_error, server_error or overloaded_error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})
        self.details = details
        """Fields that only Anthropic's form of errors has: clients decide by them what to send next."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, object]:
    """JSON body of an error: ``{"error": {"message", "type", "param", "code"}}``."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


ErrorForm = Callable[[ApiError, str], tuple[dict[str, object], dict[str, str]]]
"""(error, request id) -> (JSON body, additional headers), in the form of one API."""


def openai_form(error: ApiError, request_id: str) -> tuple[dict[str, object], dict[str, str]]:
    """An error in OpenAI's form."""
    return error_body(error), {}


def to_api_error(error: Exception, state: ServerState, request_id: str, *, chat: bool = False) -> ApiError:
    """Convert ``error`` for the client. An internal error gets a general text, and its details are logged. ``chat``:
    whether the prompt is a list of messages."""
    if isinstance(error, ApiError):
        if error.status == 503:
            error.headers.setdefault("retry-after", _whole_seconds(state.engine.retry_after()))
        return error
    if isinstance(error, HTTPException):
        return _routing_error(error)
    if isinstance(error, PromptTooLongError):
        message = str(error) + _context_length(state)
        return ApiError(400, message, code="context_length_exceeded", param=_field(str(error), chat))
    if isinstance(error, (RequestError, TemplateError)):
        param = _field(str(error), chat)
        code = "unsupported_content" if param and _OF_PARTS.fullmatch(param) else "invalid_value"
        return ApiError(400, str(error), code=code, param=param)
    if isinstance(error, OverloadedError):
        retry = {"retry-after": _whole_seconds(error.retry_after)}
        if isinstance(error, QueueFullError):
            code = "queue_too_long" if error.kind == "forecast" else "rate_limit_exceeded"
            return ApiError(429, str(error), code=code, headers=retry)
        code = next((code for kind, code in _OVERLOADED.items() if isinstance(error, kind)), "timeout")
        return ApiError(503, str(error), code=code, headers=retry)
    if isinstance(error, StorageError):
        if error.is_full:
            return ApiError(507, str(error), code="insufficient_storage")
        return ApiError(503, str(error), code="storage_unavailable", headers={"retry-after": "10"})
    if isinstance(error, EngineDeadError):
        seconds = _whole_seconds(state.engine.retry_after())
        if not state.reloads and (state.draining or state.engine.state is EngineState.STOPPED):
            message = "the server stopped before the answer was complete; try another one"
            return ApiError(503, message, code="server_draining", headers={"retry-after": seconds})
        # The reason why the engine died may contain file names of this machine. So the reason is only logged, and not
        # sent.
        loading = state.engine.state is EngineState.LOADING
        why = "is loading its model" if loading else "died, and is started again"
        message = f"the engine {why}; send the request again in {seconds} s"
        return ApiError(503, message, code="engine_unavailable", headers={"retry-after": seconds})
    _log.error("request %s failed", request_id, exc_info=error)
    message = f"the server made a mistake; its log says more under request id {request_id}"
    return ApiError(500, message, code="internal_error")


def _field(message: str, chat: bool) -> str | None:
    """Name of the request field that an error message is about. Such a message begins with the field's name, as in
    ``ttft_ms is 5.0, but ...``. None if the message does not begin with a field."""
    number = _PROMPT_NUMBER.match(message)
    message = message[number.end() :] if number else message
    if message.startswith("the messages") or (chat and _OF_PROMPT.match(message)):
        return "messages"
    if _OF_PROMPT.match(message):
        return f"prompt[{number[1]}]" if number else "prompt"
    first = message.partition(" ")[0]
    return first if first in _FIELDS or _OF_MESSAGES.fullmatch(first) else None


def _context_length(state: ServerState) -> str:
    """Sentence about the maximum length, for the error about a prompt that is too long; empty while the model loads.

    Some clients recognise the error by this sentence of OpenAI. They then retry with a model that has a longer context.
    """
    info = state.engine.info
    if info is None:
        return ""
    return f". This model's maximum context length is {min(info.max_model_len, info.capacity_tokens + 1)} tokens."


def error_response(error: ApiError, path: str = "", request_id: str = "", made_by: ErrorForm = openai_form) -> Response:
    """The error as a response to a request for ``path``, in the form that ``made_by`` gives it."""
    if error.code in _OF_PATHS and (found := not_served(path)):
        error = ApiError(404, found, code="not_found")
    body, more = made_by(error, request_id)
    return Response(
        msgspec.json.encode(body),
        status_code=error.status,
        headers={**error.headers, **more},
        media_type="application/json",
    )


_OF_PATHS: Final = ("not_found", "method_not_allowed")
"""Codes of errors that mean an unknown path or HTTP method."""


def _routing_error(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "there is nothing at this path; GET /openapi.json lists what there is", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"this path does not know this method; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
    return ApiError(error.status_code, "the request cannot be served", code="invalid_request")


def _whole_seconds(seconds: float) -> str:
    return str(min(60, max(1, math.ceil(seconds))))
