"""Frames: the messages between the server and a worker process.

A frame has the length of its JSON text, the length of its data (4 bytes each, big endian), the JSON text, and the data.
Its fields are a dict. The field ``data`` holds bytes and travels as it is; every other field is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any, Final

__all__ = ["HEADER", "encode_frame", "fields_of", "lengths", "read_frame"]

HEADER: Final = 8
"""Number of bytes at the beginning of a frame that give its lengths."""


def encode_frame(fields: Mapping[str, Any]) -> bytes:
    """A frame with ``fields``."""
    data = fields.get("data", b"")
    plain = {name: value for name, value in fields.items() if name != "data"}
    # Half of a surrogate pair is passed on. The tokenizer refuses it later with a clear message.
    body = json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join((len(body).to_bytes(4, "big"), len(data).to_bytes(4, "big"), body, data))


def lengths(header: bytes) -> tuple[int, int]:
    """(number of bytes of the JSON text, number of bytes of the data) that follow ``header``."""
    return int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")


def fields_of(body: bytes, data: bytes) -> dict[str, Any]:
    """The fields of a frame. Raises ValueError if the JSON text is invalid or not an object."""
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError(f"a frame that is a {type(fields).__name__}")
    if data:
        fields["data"] = data
    return fields


def read_frame(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next frame of a blocking pipe; None at its end."""
    header = pipe.read(HEADER)
    if len(header) < HEADER:
        return None
    num_text, num_data = lengths(header)
    body = pipe.read(num_text)
    data = pipe.read(num_data)
    return fields_of(body, data) if len(body) == num_text and len(data) == num_data else None
