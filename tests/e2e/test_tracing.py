"""Spans as a collector receives them, on this machine, from a real server."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from chairlift.errors import ConfigError
from chairlift.server.operations.tracing import otlp_exporter
from tests.e2e.server_process import PATIENCE, ServerProcess

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP collector that remembers."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.resource: dict[str, Any] = {}
        received: queue.Queue[bytes] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.put(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_for(self, roots: int) -> list[Any]:
        """The roots, once there are so many."""
        while len(found := [span for span in self.spans.values() if span.kind == span.SPAN_KIND_SERVER]) < roots:
            told = ExportTraceServiceRequest.FromString(self._received.get(timeout=PATIENCE))
            for group in told.resource_spans:
                self.resource = attributes(group.resource)
                self.spans |= {span.span_id: span for scope in group.scope_spans for span in scope.spans}
        return found

    def below(self, root: Any) -> dict[str, list[Any]]:
        parts: dict[str, list[Any]] = {}
        for span in self.spans.values():
            if span.parent_span_id == root.span_id:
                assert span.trace_id == root.trace_id
                parts.setdefault(span.name, []).append(span)
        return parts

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(told: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in told.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_is_a_part_of_its_callers_trace(collector: Collector) -> None:
    small = ("--num-kv-blocks", "12", "--block-size", "16", "--max-num-seqs", "4", "--batching", "continuous")
    with ServerProcess("hashlm:5ms", *small, "--otlp-traces-endpoint", collector.url) as server:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
            traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
            unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            asked: dict[str, Any] = {"model": "hashlm:5ms", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            several = [list(range(20 * i, 20 * i + 20)) for i in range(1, 5)]  # 5 blocks each in the end, of 11
            client.completions.create(prompt=several, **asked)
            client.completions.create(prompt=several[0], extra_headers=unsampled, **asked)
            client.completions.create(prompt=several[1], extra_headers=traced, temperature=0.5, **asked)
        server.terminate()
        assert asyncio.run(server.ended()) == 0
        roots = collector.wait_for(5)
    assert len(roots) == 5, "what the caller does not sample is not written"
    [mine] = [root for root in roots if root.trace_id.hex() == TRACE]
    told = attributes(mine)
    assert mine.parent_span_id.hex() == PARENT
    assert mine.name == "text_completion hashlm:5ms"
    assert (told["gen_ai.request.id"], told["gen_ai.request.temperature"]) == ("mine", 0.5)
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (20, 60)
    assert [each.string_value for each in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert collector.resource["service.name"] == "chairlift"
    num_preempted = 0
    for root in roots:
        told, parts = attributes(root), collector.below(root)
        assert [len(parts[name]) for name in ("queue", "prefill", "decode")] == [1, 1, 1]
        edges = [parts[name][0] for name in ("queue", "prefill", "decode")]
        assert sum(map(seconds, edges)) == pytest.approx(seconds(root), abs=1e-5)
        assert seconds(root) == pytest.approx(told["gen_ai.latency.e2e"], abs=1e-5)
        assert seconds(edges[0]) == pytest.approx(told["gen_ai.latency.time_in_queue"], abs=1e-5)
        away = parts.get("preempted", [])
        assert sum(map(seconds, away)) == pytest.approx(told.get("chairlift.cause.preempted", 0.0), abs=1e-5)
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in away)
        num_preempted += len(away)
    assert num_preempted > 0, "the memory was to be too small"
    assert not any(word in repr(collector.spans) for word in ("prompt:", "Bearer"))


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://127.0.0.1:4317", ""])
def test_a_wrong_endpoint_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a URL of OTLP over HTTP, like http://.*; got"):
        otlp_exporter(endpoint)
