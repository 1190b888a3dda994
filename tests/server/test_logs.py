"""No log line can be forged, and every line ends somewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable

import pytest

from chairlift.server.http.logs import clean, configure_logging, log_event

NASTY = [
    "a\nb",
    "a\r\nb",
    "a\x1b[31mb",
    "a\x00b",
    "a\x07b\x08",
    "a\x7fb",
    "a\x85b",
    "a\x9b31mb",
    "a\u2028b\u2029",
    "a\u202eb\u202c",
    "a\u2066b\u2069",
    "a\u200fb",
    "a\ufeffb",
    "a\ud800b",
]


def logged(log_format: str, log: Callable[[logging.Logger], None], verbose: bool = False) -> str:
    stream = io.StringIO()
    configure_logging(log_format, verbose=verbose, stream=stream)
    log(logging.getLogger("chairlift.server"))
    text = stream.getvalue()
    text.encode()  # no lone surrogates
    return text


@pytest.mark.parametrize("text", NASTY, ids=repr)
def test_harmful_characters_become_escapes(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert cleaned.startswith("a\\")
    for log_format in ("text", "json"):
        lines = logged(log_format, lambda log: log_event(log, logging.INFO, text, value=text)).splitlines()
        assert len(lines) == 1
        assert lines[0].isprintable()


def test_other_characters_stay() -> None:
    assert clean("Grüße 🎿 \\n «» 中文 a\tb") == "Grüße 🎿 \\n «» 中文 a\\x09b"


def test_values_have_a_longest_length() -> None:
    for log_format in ("text", "json"):
        line = logged(log_format, lambda log: log_event(log, logging.INFO, "x" * 10**6, value="\n" * 10**6))
        assert len(line) < 30_000
        assert "(1000000 characters)" in line


def test_events_are_logged_as_text_or_as_json() -> None:
    def log(logger: logging.Logger) -> None:
        log_event(logger, logging.WARNING, "request", id="a", status=200, seconds=0.5, first=None)

    text = logged("text", log)
    assert text.endswith("Z WARNING request id=a status=200 seconds=0.5 first=None\n")
    line = json.loads(logged("json", log))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "chairlift.server",
        "message": "request",
        "id": "a",
        "status": 200,
        "seconds": 0.5,
        "first": None,
    }


def fail(logger: logging.Logger) -> None:
    try:
        raise RuntimeError("one\n2026-11-21T08:00:00.000Z INFO forged \x1b[31m")
    except RuntimeError:
        logger.error("failed", exc_info=sys.exc_info())


def test_a_traceback_cannot_forge_a_line() -> None:
    first, *rest = logged("text", fail).splitlines()
    assert first.endswith("ERROR failed")
    assert len(rest) > 3
    assert all(line.startswith("  | ") and line.isprintable() for line in rest)
    line = json.loads(logged("json", fail))
    assert any("RuntimeError: one" in entry for entry in line["traceback"])


def test_debug_lines_are_logged_only_when_verbose() -> None:
    def log(logger: logging.Logger) -> None:
        logger.debug("detail")
        logger.info("news")

    assert "detail" not in logged("text", log)
    assert "news" in logged("text", log)
    assert "detail" in logged("text", log, verbose=True)
