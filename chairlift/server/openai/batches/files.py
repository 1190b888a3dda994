"""/v1/files: input and output files of batches. A file belongs to the API key that uploaded it.

Keys with the same name share their files. Without keys, everybody shares all files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.batches import FileRecord, storage_error
from chairlift.server.openai.batches.worker import BatchWorker

__all__ = ["FileDeleted", "FileList", "FileObject", "batch_worker", "file_object", "owner_of", "page_of", "routes"]

MAX_FILES: Final = 1000
"""Maximum number of files per owner."""
EXPIRES: Final = (3600, 2_592_000)
"""(minimum, maximum) lifetime of a file in seconds, if the request sets one."""
_OVERHEAD: Final = 65_536
"""Maximum number of bytes that an upload form may have in addition to the file."""
_FIELDS: Final = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")
_WHOLE: Final = re.compile("[0-9]{1,9}")


class FileObject(msgspec.Struct, kw_only=True):
    """A file in the form of the API."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    """Use of the file: ``batch`` or ``batch_output``."""
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """A page of the caller's files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """The response to DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def batch_worker(request: Request) -> BatchWorker:
    """The server's batch worker. Raises ApiError 404 if it has none."""
    state: ServerState = request.app.state.server
    if state.batches is None:
        message = "this server keeps no files and batches; start it with --batch-dir DIR to have it do so"
        raise ApiError(404, message, code="batches_off", type="invalid_request_error")
    return state.batches


def owner_of(request: Request) -> str:
    """Owner of files and batches for this request: the tenant of its API key."""
    caller: Caller = getattr(request.state, "caller", Caller())
    return caller.tenant if request.app.state.server.api_keys else ""


def page_of(request: Request, default: int, maximum: int) -> tuple[str | None, int]:
    """Query parameters ``(after, limit)`` of a request for a list. Raises ApiError. ``default`` and ``maximum`` are for
    ``limit``."""
    given = request.query_params.get("limit", str(default))
    if not _WHOLE.fullmatch(given) or not 1 <= int(given) <= maximum:
        message = f"limit must be a whole number from 1 to {maximum:,}; got {given!r:.40}"
        raise ApiError(400, message, code="invalid_value", param="limit")
    return request.query_params.get("after"), int(given)


def file_object(record: FileRecord) -> FileObject:
    """A file record in the form of the API."""
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


async def upload_file(request: Request) -> Response:
    """Store a file: multipart/form-data with ``purpose`` and ``file``."""
    worker = batch_worker(request)
    owner = owner_of(request)
    now = int(time.time())
    num_files = await worker.call(lambda store: store.num_files(owner))
    length = request.headers.get("content-length", "")
    if length.isdecimal():  # before the body is read
        least = max(0, int(length[:20]) - _OVERHEAD)
        await worker.call(lambda store: store.check_room(least, "the file"))
    if num_files >= MAX_FILES:
        message = f"you have {num_files:,} files, and {MAX_FILES:,} may be kept; delete some"
        raise ApiError(400, message, code="too_many_files")
    async with worker.uploads, _form(request) as form:
        upload = form.get("file")
        purpose = form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise ApiError(
                400,
                "file is missing; send it as a part with a file name",
                code="missing_required_parameter",
                param="file",
            )
        if purpose != "batch":
            message = f"purpose must be batch, because this server keeps files for batches only; got {purpose!r:.80}"
            raise ApiError(400, message, code="invalid_value", param="purpose")
        for name in form:
            if name not in _FIELDS:
                message = f"the form has a field {name!r:.80}; known are {', '.join(_FIELDS)}"
                raise ApiError(400, message, code="unsupported_parameter", param=name[:80])
        expires_at = _expires_at(form, now)
        content = upload.file
        name = _plain_name(upload.filename)
        record = await worker.call(
            lambda store: store.add_file(content, name, "batch", owner=owner, now=now, expires_at=expires_at)
        )
    return json_response(file_object(record))


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[FormData]:
    """The upload form in the body. Raises ApiError 415 for another content type, 413 if the form is too long, 400 if
    it is invalid."""
    state: ServerState = request.app.state.server
    maximum = state.config.max_batch_file_bytes
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        message = "the body must be a form; send the header Content-Type: multipart/form-data with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > maximum + _OVERHEAD:
        raise _too_long(maximum)
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > maximum + _OVERHEAD:
            raise _too_long(maximum)
        return message

    try:
        form = await Request(request.scope, receive).form(max_files=1, max_fields=8, max_part_size=1024)
    except HTTPException as error:
        raise ApiError(400, f"the form cannot be read: {error.detail}", code="invalid_form") from None
    except OSError as error:
        raise storage_error(error, "the directory of temporary files") from error
    try:
        yield form
    finally:
        await form.close()


def _too_long(maximum: int) -> ApiError:
    message = (
        f"the file is longer than {maximum:,} bytes; split it, or start the server with a larger --max-batch-file-bytes"
    )
    return ApiError(413, message, code="file_too_large", param="file", headers={"connection": "close"})


def _expires_at(form: FormData, now: int) -> int | None:
    anchor = form.get("expires_after[anchor]")
    seconds = form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    minimum, maximum = EXPIRES
    whole = isinstance(seconds, str) and _WHOLE.fullmatch(seconds)
    if anchor != "created_at" or not whole or not minimum <= int(str(seconds)) <= maximum:
        message = f"expires_after needs the anchor created_at and from {minimum:,} to {maximum:,} seconds"
        raise ApiError(400, message, code="invalid_value", param="expires_after")
    return now + int(str(seconds))


def _plain_name(given: str | None) -> str:
    """Name of an uploaded file, without directories, with printable characters only, and not too long."""
    name = os.path.basename((given or "").replace("\\", "/"))
    return "".join(char for char in name if char.isprintable())[:255] or "file.jsonl"


async def list_files(request: Request) -> Response:
    """List the caller's files: the newest first, or in the order that the ``order`` parameter asks for."""
    worker = batch_worker(request)
    owner = owner_of(request)
    after, limit = page_of(request, 10_000, 10_000)
    order = request.query_params.get("order", "desc")
    purpose = request.query_params.get("purpose")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc; got {order!r:.40}", code="invalid_value", param="order")
    found = await worker.call(
        lambda store: store.files(owner, purpose=purpose, after=after, limit=limit + 1, newest_first=order == "desc")
    )
    listed = [file_object(record) for record in found[:limit]]
    return json_response(FileList(data=listed, **ends(listed), has_more=len(found) > limit))


def ends(listed: Sequence[Any]) -> dict[str, Any]:
    """Fields ``first_id`` and ``last_id`` of a page of a list."""
    return {"first_id": listed[0].id if listed else None, "last_id": listed[-1].id if listed else None}


async def _found(request: Request) -> FileRecord:
    worker = batch_worker(request)
    owner = owner_of(request)
    file_id = request.path_params["file_id"]
    record = await worker.call(lambda store: store.file(file_id, owner))
    if record is None:
        message = f"there is no file {file_id!r:.80} of yours; GET /v1/files lists those there are"
        raise ApiError(404, message, code="file_not_found", param="file_id")
    return record


async def show_file(request: Request) -> Response:
    """Show one file."""
    return json_response(file_object(await _found(request)))


async def file_content(request: Request) -> Response:
    """Return the content of a file."""
    record = await _found(request)
    path = batch_worker(request).store.path(record.id)
    await batch_worker(request).call(lambda store: path.stat())  # an error before the answer begins
    return FileResponse(path, media_type="application/octet-stream", filename=record.filename)


async def delete_file(request: Request) -> Response:
    """Delete a file. Refused while a batch reads the file."""
    worker = batch_worker(request)
    record = await _found(request)
    reader = await worker.call(lambda store: store.reader_of(record.id))
    if reader is not None:
        message = f"the batch {reader} reads the file; cancel it, or wait for its end"
        raise ApiError(400, message, code="file_in_use", param="file_id")
    await worker.call(lambda store: store.delete_file(record.id))
    return json_response(FileDeleted(id=record.id))


routes: Final = [
    Route("/v1/files", upload_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", show_file, methods=["GET"]),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", file_content, methods=["GET"]),
]
