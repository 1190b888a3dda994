"""Reads a request's JSON body, with limits on size, time and depth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request

from chairlift.errors import OverloadedError, QueueTimeoutError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.openai.protocol import GenerationRequest

__all__ = ["parse_json", "read_bytes", "read_json", "release_all", "release_body", "until_tokens", "when_done"]

_MAX_DEPTH: Final = 64
_READ_SECONDS: Final = 30.0
_MAX_DIGITS: Final = 40
"""Maximum number of digits of an integer in a body. No field needs so many digits, and conversion of longer numbers is
slow."""
_MAX_BODIES: Final = 64
_MAX_ALL_BYTES: Final = 256 << 20
"""Limits on the bytes of all request bodies in progress: bodies of the maximum size, and bytes. There is always room
for four bodies."""
_FEW_QUOTES: Final = 1024
"""Bytes per quotation mark in a text, above which it is cut at its quotation marks. That is ten times faster than a
regular expression for images, and slower for short strings."""
_LONG_BODY: Final = 65_536
"""Size in bytes above which a body is long. Only one long body is parsed per turn of the event loop, so that other
requests are not delayed."""
_MAX_CONTAINERS: Final = 65_536
"""Maximum number of objects and lists in one body, and of names in all its objects. It allows 1,024 messages of 64
parts."""
_MAX_VALUES: Final = 1 << 18
"""Maximum number of values in one body, such as token ids. The model's maximum number of tokens is added to this
number."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_LONG_NUMBER: Final = re.compile(rb"(?<![0-9.])[0-9]{%d,}" % (_MAX_DIGITS + 1))


async def read_json(request: Request, *, max_depth: int = _MAX_DEPTH, timeout: float = _READ_SECONDS) -> dict[str, Any]:
    """The JSON object in the body. Until :func:`release_body`, the body counts against the limit on the bytes of bodies
    in progress.

    Raises ApiError: 415 when the body is not declared as plain ``application/json``, 413 as soon as it is longer than
    ``max_body_bytes``, 408 when it takes more than ``timeout`` seconds to arrive, and 400 when it is not a JSON object
    (see :func:`parse_json`).
    """
    if (read := request.scope["state"].pop("body", None)) is not None:  # it was read to choose the model
        known: dict[str, Any] = read
        return known
    state: ServerState = request.app.state.server
    body = await read_bytes(request, "application/json", limit=state.max_body_bytes, timeout=timeout)
    max_values = _MAX_VALUES + (0 if state.engine.info is None else state.engine.info.max_model_len)
    if len(body) < _LONG_BODY:
        return parse_json(body, max_depth=max_depth, max_values=max_values)
    async with state.reading:  # otherwise many simultaneous bodies would be parsed before other work gets a turn
        await asyncio.sleep(0)
        return parse_json(body, max_depth=max_depth, max_values=max_values)


async def read_bytes(request: Request, kind: str, *, limit: int, timeout: float = _READ_SECONDS) -> bytes:
    """The body, which must be declared as the media type ``kind``. Until :func:`release_body`, it counts against the
    limit on the bytes of bodies in progress. Raises ApiError 415, 413 above ``limit`` bytes, 408 and 503."""
    _check_headers(request, kind)
    state: ServerState = request.app.state.server
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_long(limit)
    most = min(_MAX_BODIES * limit, max(_MAX_ALL_BYTES, 4 * limit))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                body += chunk
                state.num_body_bytes += len(chunk)
                if len(body) > limit:
                    raise _too_long(limit)
                if state.num_body_bytes > most:
                    raise _too_many()
    except TimeoutError:
        message = f"the body did not arrive within {timeout:g} s; send it faster, or shorten it"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    finally:
        request.scope["state"]["body_bytes"] = len(body)
    return bytes(body)


def release_body(request: Request) -> None:
    """Subtract the request's body from the bytes of bodies in progress."""
    request.app.state.server.num_body_bytes -= request.scope["state"].pop("body_bytes", 0)


def when_done(request: Request, release: Callable[[], None]) -> None:
    """Call ``release`` after the response was sent or failed."""
    request.scope["state"].setdefault("when_done", []).append(release)


def release_all(request: Request) -> None:
    """Release what the request holds: the room of its body, and what endpoints gave to :func:`when_done`."""
    release_body(request)
    for release in request.scope["state"].pop("when_done", ()):
        release()


@contextlib.asynccontextmanager
async def until_tokens(request: Request, payload: GenerationRequest | None = None) -> AsyncIterator[None]:
    """Context manager: limit the time for turning a request into tokens.

    The request timeout and the queue timeout apply. The body counts as in progress until the block ends. Raises
    OverloadedError or QueueTimeoutError when a timeout passes, as for a request in the queue.
    """
    state: ServerState = request.app.state.server
    limit = state.config.request_timeout
    patience = None if payload is None else payload.queue_timeout or state.config.queue_timeout
    remaining = min(limit, patience or limit) - time.monotonic() + request.scope["state"]["arrived"]
    try:
        async with asyncio.timeout(remaining):
            yield
    except TimeoutError:
        retry_after = state.engine.retry_after()
        if patience is None or limit < patience:
            raise OverloadedError("the request was not finished in time", retry_after) from None
        state.engine.stats.rejected["queue_timeout"] += 1
        raise QueueTimeoutError("the request was not started within its queue_timeout", retry_after) from None
    release_body(request)


def _too_many() -> ApiError:
    headers = {"connection": "close", "retry-after": "1"}
    return ApiError(503, "too many long bodies are on their way; try again later", code="overloaded", headers=headers)


def parse_json(body: bytes, *, max_depth: int = _MAX_DEPTH, max_values: int = _MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Raises ApiError 400 for text that is outside RFC 8259 or ambiguous: invalid UTF-8, half of a surrogate pair, NaN,
    infinity, a number too large for a double, a name twice in one object, more than one value, or nesting deeper than
    ``max_depth``. Raises it also for too many objects, lists, names or values. These are counted before any object is
    created, because parsing blocks all other requests.
    """
    try:
        msgspec.json.decode(body, type=msgspec.Raw)  # finds the ends of strings without making objects
        num_names = _check_size(body, max_values)
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (ValueError, msgspec.MsgspecError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _invalid(f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise _invalid(f"the body must be a JSON object such as {{...}}, got {_JSON_NAMES[type(value)]}")
    if _count_names(value, max_depth) != num_names:  # parsers disagree on the meaning of a repeated name
        raise _invalid(f"the body has an object with {_name_given_twice(body)} twice; give each field once")
    return value


def _name_given_twice(body: bytes) -> str:
    """Description of the first name that occurs twice in an object of valid JSON. For a long body it does not contain
    the name, because the search would take too long."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                found.append(name)
            names.add(name)

    if len(body) < _LONG_BODY:
        json.loads(body, object_pairs_hook=look)
    return f"the name {found[0]!r:.80}" if found else "the same name"


def _check_headers(request: Request, expected: str) -> None:
    kinds = request.headers.getlist("content-type")
    kind, *parameters = (part.strip().lower() for part in (kinds[0] if len(kinds) == 1 else "").split(";"))
    if kind != expected or any(p not in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters):
        name = "JSON" if expected == "application/json" else "binary"
        message = f"the body must be {name}; send the header Content-Type: {expected}"
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        message = "compressed bodies are not supported; send the body as it is, without Content-Encoding"
        raise ApiError(415, message, code="unsupported_content_encoding")


def _check_size(body: bytes, max_values: int) -> int:
    """Check the size of a JSON text, and return the number of names in all its objects. The text may still be invalid
    JSON. Raises ApiError for too many values."""
    marks = _without_strings(body)
    if marks.count(b"{") + marks.count(b"[") > _MAX_CONTAINERS:
        raise _invalid(f"the body has more than {_MAX_CONTAINERS:,} objects and lists; send less at a time")
    if marks.count(b",") >= max_values:
        raise _invalid(f"the body has more than {max_values:,} values; send fewer token ids at a time")
    names = marks.count(b":")
    if names > _MAX_CONTAINERS:
        raise _invalid(f"the body has more than {_MAX_CONTAINERS:,} names; send less at a time")
    if long := _LONG_NUMBER.search(marks):
        raise _invalid(f"the body has a number of {len(long[0])} digits; {_MAX_DIGITS} are allowed")
    return names


def _without_strings(body: bytes) -> bytes:
    """The text outside the strings of valid JSON."""
    if body.count(b'"') * _FEW_QUOTES > len(body):
        return _STRING.sub(b"", body)
    outside = []
    inside = False
    for piece in body.split(b'"'):  # a quotation mark ends a string, unless an odd number of backslashes precedes it
        if not inside:
            outside.append(piece)
        inside = not inside or (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
    return b"".join(outside)


def _count_names(value: Any, max_depth: int) -> int:
    """Number of names in all objects of ``value``, counted level by level without recursion. Raises ApiError if the
    nesting is too deep."""
    level = [value]
    depth = 0
    names = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise _too_deep(max_depth)
        names += sum(len(parent) for parent in level if type(parent) is dict)
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
    return names


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_deep(max_depth: int) -> ApiError:
    return _invalid(f"the body nests objects and lists more than {max_depth} deep; flatten it")


def _too_long(limit: int) -> ApiError:
    message = f"the body is longer than {limit:,} bytes; shorten it, or start the server with a larger --max-body-bytes"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


_JSON_NAMES: Final[dict[type, str]] = {
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
