"""OpenTelemetry: one span per request, with child spans for its wait, prefill, decode and preemptions.

If the caller sends a ``traceparent`` header (W3C Trace Context), the span becomes a part of the caller's trace.
Attributes have the names of the gen_ai conventions, and contain no texts. The spans of a request are made after it has
ended, from recorded times. A thread of the exporter sends them. It drops them if the collector is not reachable.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from chairlift.base.outputs import FinishReason
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import ConfigError
from chairlift.metrics.stats import FinishedRequest
from chairlift.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["RequestTracer", "otlp_exporter"]

_log = logging.getLogger(__name__)
_OPERATIONS: Final = dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat")
_HEADERS: Final = (b"traceparent", b"tracestate", b"baggage")
_MAX_SECONDS: Final = 3.0
"""Maximum number of seconds for sending a batch of spans, and for sending the remaining spans when the server ends."""
_SECONDS: Final = 1_000_000_000


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Exporter that sends spans to a collector over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.

    Headers and other options come from OpenTelemetry's ``OTEL_EXPORTER_OTLP_*`` variables. Raises ConfigError if the
    URL is invalid or the packages are missing.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            "otlp_traces_endpoint must be a URL of OTLP over HTTP, like http://127.0.0.1:4318/v1/traces;"
            f" got {endpoint!r}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs {error.name}; install it with pip install 'chairlift[otel]'"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint, timeout=_MAX_SECONDS)


class RequestTracer:
    """Writes the spans of every request. It subscribes to the engine's events."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {SERVICE_NAME: "chairlift", SERVICE_VERSION: __version__, "gen_ai.request.model": model}
        resource = Resource(about).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and similar variables
        # The exit handler of OpenTelemetry would wait without a limit, so it is turned off.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("chairlift", __version__)
        self._model = model
        self._payload: contextvars.ContextVar[tuple[Context | None, str]] = contextvars.ContextVar(
            "asked", default=(None, "text_completion")
        )
        self._under_way: dict[str, tuple[Context | None, str]] = {}

    def received(self, scope: Scope) -> None:
        """Remember the trace headers and the path of an HTTP request while its task runs."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        context = TraceContextTextMapPropagator().extract(given) if given else None
        self._payload.set((context, _OPERATIONS.get(scope["path"], "text_completion")))

    def began(self, stream: OutputStream) -> None:
        self._under_way[stream.request_id] = self._payload.get()

    def ended(self, stream: OutputStream, cut_off: FinishReason | None, now: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        context, operation = self._under_way.pop(stream.request_id, (None, "text_completion"))
        wall = time.time_ns() - int(time.monotonic() * _SECONDS)
        metrics = stream.state.metrics
        facts = stream.state.record(now, aborted=cut_off is FinishReason.ABORT)
        root = self._tracer.start_span(
            f"{operation} {self._model}",
            context=context,
            kind=SpanKind.SERVER,
            attributes=self._attributes(stream, operation, facts, cut_off),
            start_time=wall + int(metrics.arrival_time * _SECONDS),
        )
        if FinishReason.ERROR in (cut_off, facts.reason):
            root.set_status(Status(StatusCode.ERROR, stream.state.error or "the server could not answer it"))
        below = set_span_in_context(root)

        def part(name: str, start: float, end: float) -> None:
            span = self._tracer.start_span(name, context=below, start_time=wall + int(start * _SECONDS))
            span.end(wall + int(end * _SECONDS))

        started = metrics.first_scheduled_time
        token = metrics.first_token_time
        part("queue", metrics.arrival_time, now if started is None else started)
        if started is not None:
            part("prefill", started, now if token is None else token)
        if token is not None:
            part("decode", token, now)
        for start, end in metrics.preempted_during:
            part("preempted", start, end)
        root.end(wall + int(now * _SECONDS))

    def _attributes(
        self, stream: OutputStream, operation: str, facts: FinishedRequest, cut_off: FinishReason | None
    ) -> dict[str, Any]:
        state = stream.state
        params = stream.state.prepared.params
        first = state.metrics.first_token_time
        reasons = [str(cut_off or answer.finish_reason or facts.reason) for answer in state.answers]
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "chairlift",
            "gen_ai.request.id": stream.name,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.prompt_tokens": facts.prompt_tokens,
            "gen_ai.usage.completion_tokens": facts.generation_tokens,
            "gen_ai.usage.input_tokens": facts.prompt_tokens,
            "gen_ai.usage.output_tokens": facts.generation_tokens,
            "gen_ai.latency.time_in_queue": facts.queue_seconds,
            "gen_ai.latency.time_to_first_token": None if first is None else first - state.metrics.arrival_time,
            "gen_ai.latency.e2e": facts.e2e_seconds,
            "gen_ai.latency.time_in_model_prefill": facts.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": facts.decode_seconds,
            "chairlift.cached_tokens": facts.cached_tokens,
            "chairlift.host_tokens": facts.host_tokens,
            "chairlift.disk_tokens": facts.disk_tokens,
            "chairlift.service_tier": stream.service_class,
            "chairlift.preemptions": facts.num_preemptions,
        }
        attributes |= {f"chairlift.cause.{name}": spent for name, spent in (state.metrics.causes or {}).items()}
        if (resumed := state.metrics.resumed) is not None:
            attributes |= {"chairlift.turn_cache": resumed.cache.value, "chairlift.pause": resumed.gap}
        return {name: value for name, value in attributes.items() if value is not None}

    def shutdown(self) -> None:
        """Send the remaining spans. It blocks for up to three seconds, so call it on a thread."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_MAX_SECONDS)
        if sending.is_alive():
            _log.warning("the collector did not take the last spans within %g s; they are dropped", _MAX_SECONDS)
