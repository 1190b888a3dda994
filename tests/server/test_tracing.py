"""Spans that nobody takes hold up nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from chairlift.server.operations import tracing


class Stuck(SpanExporter):
    """Exporter to a collector that accepts everything and never confirms it."""

    def __init__(self) -> None:
        self.away, self.told_to_end = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.away.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.told_to_end.set()
        self.away.wait()


def test_the_end_of_a_server_does_not_wait_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_MAX_SECONDS", 0.05)
    stuck = Stuck()
    ending = threading.Thread(target=tracing.RequestTracer(stuck, "m").shutdown, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    stuck.away.set()
    assert "the collector did not take the last spans within 0.05 s" in caplog.text


def test_the_end_of_a_server_waits_for_a_collector_that_answers(caplog: pytest.LogCaptureFixture) -> None:
    slow = Stuck()
    ending = threading.Thread(target=tracing.RequestTracer(slow, "m").shutdown, daemon=True)
    ending.start()
    assert slow.told_to_end.wait(20)
    slow.away.set()
    ending.join(20)
    assert not caplog.messages
