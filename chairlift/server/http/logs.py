"""Log lines that clients cannot forge, as text or as JSON.

A message may contain text from a client. Characters that could end a line, move the cursor, change colours or reorder
text are written as escapes. Every value is cut to a maximum length.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import Any, Final, TextIO

__all__ = ["JsonFormatter", "TextFormatter", "clean", "configure_logging", "log_event"]

_MAX_CHARS: Final = 2000
_MAX_TRACEBACK_LINES: Final = 200
_HARMFUL: Final = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ud800-\\udfff]"
)


def clean(text: str, limit: int = _MAX_CHARS) -> str:
    """``text`` on one line, without control, ANSI or bidirectional characters, cut after ``limit`` characters."""
    cut = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    return _HARMFUL.sub(_escaped, cut)


def log_event(logger: logging.Logger, level: int, event: str, **fields: str | int | float | None) -> None:
    """Log ``event`` with named values. The line in text form is ``event name=value ...``. In JSON form, the values are
    members of the line's JSON object."""
    logger.log(level, event, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """Formats lines as ``2026-11-21T08:00:00.000Z INFO message``. Lines of a traceback follow, each indented by a
    bar."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname, clean(record.getMessage())]
        parts += [f"{name}={clean(str(value))}" for name, value in _fields(record).items()]
        return "\n  | ".join([" ".join(parts), *_traceback(record)])


class JsonFormatter(logging.Formatter):
    """Formats each record as one ASCII-only JSON object: time, level, logger, message, then the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _timestamp(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = clean(record.getMessage())
        for name, value in _fields(record).items():
            line[name] = clean(value) if isinstance(value, str) else value
        if trace := _traceback(record):
            line["traceback"] = trace
        return json.dumps(line)


def configure_logging(log_format: str, *, verbose: bool = False, stream: TextIO | None = None) -> None:
    """Send the lines of the logger ``chairlift`` to ``stream`` (default: standard error). ``log_format`` is text or
    json."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    levels = {"chairlift": logging.DEBUG if verbose else logging.INFO}
    for name, level in (levels | {"uvicorn": logging.ERROR, "opentelemetry": logging.ERROR}).items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level)


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _traceback(record: logging.LogRecord) -> list[str]:
    if record.exc_info is None or record.exc_info[1] is None:
        return []
    lines = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
    return [clean(line) for line in lines[-_MAX_TRACEBACK_LINES:]]


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
