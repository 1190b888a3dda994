"""Spans that nobody takes hold up nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from chairlift.server import tracing


class Stuck(SpanExporter):
    """Of a collector that takes everything and never says so."""

    def __init__(self) -> None:
        self.away = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.away.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.away.wait()


def test_the_end_of_a_server_does_not_wait_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_MOST_SECONDS", 0.05)
    stuck = Stuck()
    ending = threading.Thread(target=tracing.RequestTracer(stuck, "m").shutdown, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    stuck.away.set()
    assert "the collector did not take the last spans within 0.05 s" in caplog.text
