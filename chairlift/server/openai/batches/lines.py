"""Lines of a batch's files as JSON: requests in the input file, responses in the output and error files.

The form is OpenAI's. An input line is ``{"custom_id", "method", "url", "body"}``, an output line ``{"id", "custom_id",
"response", "error"}``.
"""

from __future__ import annotations

import codecs
import dataclasses
import secrets
from typing import Final

import msgspec

__all__ = ["ENDPOINTS", "MAX_CUSTOM_ID", "BadLine", "BatchLine", "answer_line", "error_line", "read_line"]

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch may use."""
MAX_CUSTOM_ID: Final = 512
"""Maximum number of characters of a ``custom_id``."""
_LINE_ENDS: Final = "\u0085\u2028\u2029"
"""Characters that JSON allows in strings although some programs end a line there. They are written as escapes."""
_FIELDS: Final = ("custom_id", "method", "url", "body")


class BadLine(ValueError):
    """An invalid line of an input file. ``custom_id`` is None if the line has no readable id."""

    def __init__(self, message: str, code: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of an input file."""

    custom_id: str
    body: bytes
    """JSON object with the fields of the request, as written in the line. The endpoint checks it later."""


def read_line(line: bytes, endpoint: str) -> BatchLine:
    """Parse a line of an input file for a batch with this ``endpoint``. Raises BadLine."""
    try:
        fields = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"the line is not a JSON object: {error}", "invalid_json_line") from None
    name = _text(fields, "custom_id", None)
    if not 1 <= len(name) <= MAX_CUSTOM_ID:
        raise BadLine(
            f"custom_id must have 1 to {MAX_CUSTOM_ID} characters, got {len(name)}", "invalid_value", "custom_id"
        )
    for field in fields:
        if field not in _FIELDS:
            raise BadLine(
                f"the line has the field {field!r:.80}; known are {', '.join(_FIELDS)}",
                "unknown_field",
                field[:80],
                name,
            )
    method = _text(fields, "method", name)
    url = _text(fields, "url", name)
    if method != "POST":
        raise BadLine(f"method must be POST, got {method!r:.80}", "invalid_method", "method", name)
    if url != endpoint:
        message = f"url is {url!r:.80}, but the batch was created for {endpoint}; they must be the same"
        raise BadLine(message, "mismatched_url", "url", name)
    body = bytes(fields.get("body", b""))
    if not body.startswith(b"{"):
        raise BadLine("body must be a JSON object, the request itself", "invalid_value", "body", name)
    return BatchLine(name, body)


def _text(fields: dict[str, msgspec.Raw], name: str, custom_id: str | None) -> str:
    if name not in fields:
        raise BadLine(f"{name} is missing; each line needs {', '.join(_FIELDS)}", "missing_field", name, custom_id)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadLine(f"{name} must be a text", "invalid_type", name, custom_id) from None


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output or error file for a request that got a response. ``body`` is the response's JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(custom_id, response, None)


def error_line(
    custom_id: str | None, code: str, message: str, *, line: int | None = None, param: str | None = None
) -> bytes:
    """A line of the error file for a request without a response. ``line`` is the request's line number in the input
    file, from 1."""
    error: dict[str, object] = {"code": code, "message": message}
    if param is not None:
        error["param"] = param
    if line is not None:
        error["line"] = line
    return _line(custom_id, None, error)


def _line(custom_id: str | None, response: object, error: object) -> bytes:
    name = f"batch_req_{secrets.token_hex(16)}"
    line = msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
    for char in _LINE_ENDS:
        line = line.replace(char.encode(), f"\\u{ord(char):04x}".encode())
    return line + b"\n"
