"""/v1/batches: files of requests that are processed within a day, when the engine has no urgent work."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.batches import ENDPOINTS, BatchRecord
from chairlift.server.openai.batches.files import EXPIRES, batch_worker, ends, owner_of, page_of
from chairlift.server.openai.protocol import parse, warning_headers

__all__ = ["BatchList", "BatchObject", "BatchRequest", "routes"]

_WINDOWS: Final = {"24h": 86_400}
_MAX_ACTIVE: Final = 100
"""Maximum number of unfinished batches of one API key's tenant."""
_Id = Annotated[str, Meta(max_length=64)]


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """Lifetime of the output files, counted from ``anchor``."""

    anchor: Annotated[str, Meta(max_length=64)]
    """Time from which the lifetime of the output files is counted: always ``created_at``."""
    seconds: Annotated[int, Meta(ge=EXPIRES[0], le=EXPIRES[1])]


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: _Id
    """Id of an uploaded file: JSON lines with custom_id, method, url and body."""
    endpoint: _Id
    """Path of the endpoint for all requests of the file, such as /v1/chat/completions. It equals the ``url`` of every
    line."""
    completion_window: _Id
    """Time in which the batch must be completed: always ``24h``."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None
    """If missing, output files are kept until a client deletes them."""


class BatchError(msgspec.Struct, kw_only=True):
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """All reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Number of requests in the input file, and how many of them succeeded or failed."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch in the form of the API."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    """Name of the served model."""
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    """validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled."""
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of the caller's batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


_SAME: Final = tuple(name for name in BatchObject.__struct_fields__ if name in BatchRecord.__dataclass_fields__)


def _object(request: Request, record: BatchRecord) -> BatchObject:
    errors = [BatchError(**each) for each in json.loads(record.errors)]
    same: dict[str, Any] = {name: getattr(record, name) for name in _SAME if name not in ("errors", "metadata")}
    return BatchObject(
        **same,
        model=request.app.state.server.model_names[0],
        errors=BatchErrors(data=errors) if errors else None,
        request_counts=RequestCounts(total=record.total, completed=record.completed, failed=record.failed),
        metadata=json.loads(record.metadata),
    )


async def create_batch(request: Request) -> Response:
    """Create a batch from the requests of a file."""
    worker = batch_worker(request)
    owner = owner_of(request)
    payload, ignored = parse(BatchRequest, await read_json(request))
    _check(payload)
    source = await worker.call(lambda store: store.file(payload.input_file_id, owner))
    if source is None or source.purpose != "batch":
        message = f"input_file_id must be a file of yours with the purpose batch; got {payload.input_file_id!r:.80}"
        raise ApiError(400, message, code="file_not_found", param="input_file_id")
    num_active = len(await worker.call(lambda store: store.active(owner)))
    if num_active >= _MAX_ACTIVE:
        message = f"you have {num_active} batches that have not ended, and {_MAX_ACTIVE} may be; wait for one to end"
        raise ApiError(400, message, code="too_many_batches")
    expiry = payload.output_expires_after
    record = await worker.call(
        lambda store: store.add_batch(
            source,
            payload.endpoint,
            now=int(time.time()),
            seconds=_WINDOWS[payload.completion_window],
            window=payload.completion_window,
            metadata=json.dumps(payload.metadata),
            output_seconds=None if expiry is None else expiry.seconds,
        )
    )
    worker.wake()
    return json_response(_object(request, record), warning_headers(ignored))


def _check(payload: BatchRequest) -> None:
    for name, known in (("endpoint", ENDPOINTS), ("completion_window", tuple(_WINDOWS))):
        if getattr(payload, name) not in known:
            message = f"{name} must be {' or '.join(known)}; got {getattr(payload, name)!r}"
            raise ApiError(400, message, code="invalid_value", param=name)
    expiry = payload.output_expires_after
    if expiry is not None and expiry.anchor != "created_at":
        message = f"output_expires_after.anchor must be created_at; got {expiry.anchor!r}"
        raise ApiError(400, message, code="invalid_value", param="output_expires_after.anchor")


async def list_batches(request: Request) -> Response:
    """List the caller's batches."""
    worker = batch_worker(request)
    owner = owner_of(request)
    after, limit = page_of(request, 20, 100)
    found = await worker.call(lambda store: store.batches(owner, after=after, limit=limit + 1))
    listed = [_object(request, record) for record in found[:limit]]
    return json_response(BatchList(data=listed, **ends(listed), has_more=len(found) > limit))


async def _found(request: Request) -> BatchRecord:
    worker = batch_worker(request)
    owner = owner_of(request)
    batch_id = request.path_params["batch_id"]
    record = await worker.call(lambda store: store.batch(batch_id, owner))
    if record is None:
        message = f"there is no batch {batch_id!r:.80} of yours; GET /v1/batches lists those there are"
        raise ApiError(404, message, code="batch_not_found", param="batch_id")
    return record


async def show_batch(request: Request) -> Response:
    """Show one batch."""
    return json_response(_object(request, await _found(request)))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch. Results that exist are kept. A finished batch does not change."""
    worker = batch_worker(request)
    record = await _found(request)
    await worker.call(lambda store: store.cancel(record.id, int(time.time())))
    worker.wake()
    return json_response(_object(request, await _found(request)))


routes: Final = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", show_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
]
