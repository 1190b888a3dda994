"""What Prometheus reads: the plain records of :mod:`chairlift.metrics.stats` as text, made when somebody asks.

Nothing is counted twice: a scrape walks the records once and forgets. Metrics that vLLM has too bear its names, so that
its dashboards and autoscalers read them (prefix ``chairlift`` or ``vllm``); what only we have is always under
``chairlift``. Label values are closed sets: nothing a client sends can become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.metrics.stats import Histogram, RequestStats

__all__ = ["CONTENT_TYPE", "FINISH_REASONS", "REJECTION_REASONS", "CacheInfo", "render"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every version of Prometheus reads."""

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "deadline")
REJECTION_REASONS: Final = ("queue_requests", "queue_tokens", "queue_timeout", "draining", "unavailable", "connections")

_ENGINE: Final = "0"
_OURS: Final = "chairlift"
_LABELS: Final = ("model_name", "engine")
_HISTOGRAMS: Final = (
    ("ttft", "time_to_first_token_seconds", "From arrival to the first token."),
    ("inter_token", "inter_token_latency_seconds", "Between two tokens of an answer."),
    (
        "time_per_output_token",
        "request_time_per_output_token_seconds",
        "Mean time per token after the first, per request.",
    ),
    ("e2e", "e2e_request_latency_seconds", "From arrival to the end."),
    ("queue", "request_queue_time_seconds", "From arrival to the first step."),
    ("inference", "request_inference_time_seconds", "From the first step to the end."),
    ("prefill", "request_prefill_time_seconds", "From the first step to the first token."),
    ("decode", "request_decode_time_seconds", "From the first token to the end."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens per request."),
    ("request_generation_tokens", "request_generation_tokens", "Tokens delivered per request."),
    ("request_max_tokens", "request_params_max_tokens", "The max_tokens of requests that have one."),
    ("request_n", "request_params_n", "Answers asked for per request."),
    ("request_preemptions", "request_num_preemptions", "Preemptions per request."),
    ("step_tokens", "iteration_tokens_total", "Tokens computed per step."),
)
"""Field of RequestStats, name, what it says."""


class CacheInfo(Protocol):
    """What is fixed about the KV cache once the engine is ready."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def render(
    stats: RequestStats,
    info: CacheInfo | None,
    *,
    model_name: str,
    prefix: str,
    up: bool,
    num_waiting: int,
    now: float,
    num_tasks: int = 0,
) -> bytes:
    """All metrics in the text exposition format, UTF-8; its content type is :data:`CONTENT_TYPE`.

    ``info`` is None until the engine is ready. ``up`` tells whether it serves now; one that does not runs nothing.
    ``num_waiting`` counts requests that have been taken and wait for a step. ``now`` is on the clock of
    ``stats.last_token_time``, in seconds. ``num_tasks`` counts tasks of the server's event loop.
    """
    names = _Names(prefix, model_name)
    families = [*_gauges(names, stats, info, up, num_waiting), *_counters(names, stats), *_histograms(names, stats)]
    families += _ours(_Names(_OURS, model_name), stats, up, now, num_tasks)
    # The process here is the server's; the engine has one of its own.
    families += ProcessCollector(registry=None).collect()
    return generate_latest(_Families(families))


class _Families(Collector):
    """Metrics that are ready, for code that expects to collect them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Names:
    """Makes metrics with a prefix and the labels that all of them have."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._values = (model_name, _ENGINE)

    def gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def constants(self, name: str, text: str, constants: Mapping[str, str]) -> GaugeMetricFamily:
        """A gauge of 1 whose labels are what it says."""
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, *constants))
        family.add_metric((*self._values, *constants.values()), 1)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def counter_by(
        self, name: str, text: str, label: str, known: tuple[str, ...], values: Mapping[str, int]
    ) -> CounterMetricFamily:
        """One line per known value, also where nothing was counted; what is not known adds up under ``other``."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for key in known:
            family.add_metric((*self._values, key), values.get(key, 0))
        family.add_metric((*self._values, "other"), sum(n for key, n in values.items() if key not in known))
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(self._values, buckets, histogram.total)
        return family


def _gauges(
    names: _Names, stats: RequestStats, info: CacheInfo | None, up: bool, num_waiting: int
) -> Iterator[GaugeMetricFamily]:
    engine = stats.engine
    num_blocks = engine.used_blocks + engine.cached_blocks + engine.free_blocks
    usage = engine.used_blocks / num_blocks if up and num_blocks else 0.0
    yield names.gauge("num_requests_running", "Sequences in the batch.", engine.num_running if up else 0)
    yield names.gauge("num_requests_waiting", "Requests that wait for a step.", num_waiting)
    reasons = {"capacity": float(num_waiting), "deferred": 0.0}  # nothing defers a request yet
    text = "Requests that wait, by what they wait for."
    yield names.gauge_by("num_requests_waiting_by_reason", text, "reason", reasons)
    yield names.gauge("kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", usage)
    if info is not None:
        # The names of the labels are those that routers look for, on any device.
        shape = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks), "cache_dtype": info.dtype}
        yield names.constants("cache_config_info", "The KV cache.", shape)


def _counters(names: _Names, stats: RequestStats) -> Iterator[CounterMetricFamily]:
    engine = stats.engine
    for name, text, value in (
        ("num_preemptions", "Times a sequence gave its memory back and was computed again.", engine.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that have their first token.", stats.prompt_tokens),
        ("prompt_tokens_cached", "Of those, read from the prefix cache.", stats.cached_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", engine.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", engine.prefix_cache_hits),
    ):
        yield names.counter(name, text, value)
    text = "Requests that have ended, by how."
    yield names.counter_by("request_success", text, "finished_reason", FINISH_REASONS, stats.finished)
    text = "Requests that were not taken, by why."
    yield names.counter_by("admission_rejections", text, "reason", REJECTION_REASONS, stats.rejected)


def _histograms(names: _Names, stats: RequestStats) -> Iterator[HistogramMetricFamily]:
    for field, name, text in _HISTOGRAMS:
        yield names.histogram(name, text, getattr(stats, field))


def _ours(names: _Names, stats: RequestStats, up: bool, now: float, num_tasks: int) -> Iterator[Metric]:
    engine = stats.engine
    rates = {
        "60s": engine.preemption_rate,
        "total": _share(engine.num_preempted_sequences, engine.num_finished_sequences),
    }
    text = "Share of finished sequences that were preempted: below 0.02 is healthy, above 0.05 costs throughput."
    yield names.gauge_by("preemption_rate", text, "window", rates)
    text = "Share of computed tokens that were computed before, and lost to a preemption."
    yield names.gauge("recomputed_token_share", text, _share(engine.num_recomputed_tokens, engine.num_computed_tokens))
    text = "Tokens computed past a stop string or a cancellation, and thrown away."
    yield names.counter("overrun_tokens", text, stats.overrun_tokens)
    yield names.counter("engine_restarts", "Times the engine died and was started again.", stats.num_restarts)
    yield names.gauge("engine_up", "1 when the engine serves.", float(up))
    yield names.gauge("event_loop_tasks", "Tasks of the server's event loop; steady while nothing is asked.", num_tasks)
    if stats.last_token_time is not None:
        age = max(0.0, now - stats.last_token_time)
        yield names.gauge("seconds_since_last_token", "Age of the newest token delivered.", age)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
