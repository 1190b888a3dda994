"""Exports the records of :mod:`chairlift.metrics.stats` in Prometheus' text format, on demand.

The exporter has no state: each scrape reads the records once. Metrics that vLLM also has use vLLM's names, with the
prefix ``chairlift`` or ``vllm``, so that vLLM's dashboards and autoscalers work. Metrics that only Chairlift has
always begin with ``chairlift``. Label values come from fixed sets or are names of adapters, so text from a client
cannot become a label value. The exception are names of tools, of which the engine passes on at most 20, and only
letters, digits, dots, hyphens and underscores.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.base.turn_cache import BLOCK_TIME_BOUNDS, TurnCache
from chairlift.metrics.stats import (
    BATCH_OUTCOMES,
    DEADLINE_KINDS,
    FORECAST_RATIOS,
    TRAINING_CALLS,
    TRAINING_ERRORS,
    TRAINING_PASSES,
    AutoscalingStats,
    EngineStats,
    Histogram,
    ReplicaCounts,
    ReplicaStats,
    RequestStats,
    TrainingStats,
)

__all__ = ["CONTENT_TYPE", "FINISH_REASONS", "REJECTION_REASONS", "CacheInfo", "exposed", "render"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text format that every version of Prometheus supports."""

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "deadline")
_KV_REJECTED: Final = "too_fast", "no_slot", "write_failed", "marks", "forgotten", "unreadable"
REJECTION_REASONS: Final = (
    *("queue_requests", "queue_tokens", "queue_timeout", "forecast", "logprobs", "draining", "unavailable"),
    "connections",
)

_ENGINE: Final = "0"
_ALL_ENGINES: Final = "all"
"""Label of metrics with vLLM's prefix that are not divided among replicas."""
_OURS: Final = "chairlift"
_STATUSES: Final = (
    *(
        "200",
        "400",
        "401",
        "403",
        "404",
        "405",
        "408",
        "413",
        "414",
        "415",
        "421",
        "429",
        "431",
        "500",
        "501",
        "503",
        "505",
    ),
)
_RECENT_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 300.0
"""Seconds after which a pause is not counted any more."""
_LABELS: Final = ("model_name", "engine")
_Of = Callable[[ReplicaCounts], float]
"""Function that reads the value of a metric for one replica."""
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
    ("request_computed_tokens", "request_prefill_kv_computed_tokens", "Prompt tokens computed per request."),
    ("request_longest_answer", "request_max_num_generation_tokens", "Tokens of the longest answer per request."),
    ("request_max_tokens", "request_params_max_tokens", "The max_tokens of requests that have one."),
    ("request_n", "request_params_n", "Answers asked for per request."),
    ("request_preemptions", "request_num_preemptions", "Preemptions per request."),
    ("step_tokens", "iteration_tokens_total", "Tokens computed per step."),
)
"""One entry per histogram: (field of RequestStats, name of the metric, description of the metric)."""


class CacheInfo(Protocol):
    """Constants of a loaded engine's KV cache."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str | None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def speculative_method(self) -> str | None: ...
    @property
    def num_speculative_tokens(self) -> int: ...


def render(
    stats: RequestStats,
    info: CacheInfo | None,
    *,
    model_name: str,
    prefix: str,
    up: bool,
    num_waiting: int,
    now: float,
    oldest_wait: float = 0.0,
    engine_pid: int | None = None,
    replicas: Sequence[ReplicaStats] = (),
    counts: Mapping[int, ReplicaCounts] | None = None,
    autoscaling: AutoscalingStats | None = None,
    num_tasks: int = 0,
    classes: Mapping[str, int] | None = None,
    forecast_within: Mapping[float, float | None] | None = None,
) -> bytes:
    """All metrics in the text exposition format, UTF-8. The content type is :data:`CONTENT_TYPE`.

    ``info`` is None until the engine is loaded. ``up`` tells whether the engine serves now; if not, no requests run.
    ``num_waiting`` is the number of accepted requests that wait for a step, and ``oldest_wait`` the longest of their
    waits in seconds. ``now`` is in seconds on the clock of ``stats.last_token_time``. ``engine_pid`` is the id of the
    engine's process. ``replicas`` are the replicas of a server that has several. ``counts`` maps the index of each such
    replica to its counters. With vLLM's prefix this index is the label ``engine``, as for vLLM's data-parallel engines.
    ``autoscaling`` is None if the number of replicas is fixed. ``num_tasks`` is the number of tasks in the server's
    event loop. ``classes`` maps classes of service to their reserved rows. ``forecast_within`` maps each factor in
    FORECAST_RATIOS to a fraction of requests: those whose wait was at most this factor times the predicted wait.
    """
    names = _Names(prefix, model_name, counts if prefix == "vllm" else None)
    families = [*_gauges(names, stats, info, up, num_waiting), *_counters(names, stats), *_histograms(names, stats)]
    families += [*_drafts(names, stats), *_adapters(names, stats, up)]
    families += [*_old_names(names, stats, up), *_vllm_only(names, stats, info)] if prefix == "vllm" else []
    families += [*_images(names, stats.engine), *_grammars_and_budgets(names, stats.engine), _batches(names, stats)]
    ours = _Names(_OURS, model_name)
    families += _ours(ours, stats, up, now, oldest_wait, num_tasks)
    families += _engine_process(ours, engine_pid) if not replicas else _replicas(ours, replicas)
    families += [] if autoscaling is None else _autoscaling(ours, autoscaling)
    families += _memory_pressure(ours, stats, info)
    families += [*_pauses(ours, stats, up, now), *_block_times(names, stats.engine)]
    families += _governor(ours, stats, up)
    families += _deadlines(ours, stats, {"default": 0} if classes is None else classes, up)
    families += _forecasts(ours, stats, forecast_within or {})
    families += [] if stats.training is None else _training(ours, stats.training)
    # These collectors report the process that runs this code: the server's process.
    families += ProcessCollector(registry=None).collect()
    return generate_latest(_Families(families))


def exposed(families: list[Metric]) -> bytes:
    """Metrics in the text exposition format."""
    return generate_latest(_Families(families))


class _Families(Collector):
    """A collector that returns metrics which exist already. Some functions of the Prometheus library accept only a
    collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Names:
    """Makes metrics whose names have a common prefix and which have common labels."""

    def __init__(self, prefix: str, model_name: str, counts: Mapping[int, ReplicaCounts] | None = None) -> None:
        """``counts``: replicas among which metrics are divided; None or empty: there is one engine."""
        self._prefix = prefix
        self._counts = counts or {}
        self._values = (model_name, _ALL_ENGINES if self._counts else _ENGINE)

    def _lines(self, value: float, of: _Of | None, extra: tuple[str, ...] = ()) -> Iterator[tuple[list[str], float]]:
        """(values of the labels, value) of each line of a metric. With ``of`` there is a line per replica."""
        if of is None or not self._counts:
            yield [*self._values, *extra], value
            return
        for index, counts in self._counts.items():
            yield [self._values[0], str(index), *extra], of(counts)

    def waiting(self, name: str, text: str, by_reason: Mapping[str, int]) -> GaugeMetricFamily:
        """A gauge of waiting requests by reason; the reason "" stands for no such label. Each replica has the requests
        that wait in its engine. Those that wait for any replica are not divided."""
        family = GaugeMetricFamily(
            f"{self._prefix}:{name}", text, labels=_LABELS if "" in by_reason else (*_LABELS, "reason")
        )
        for reason, count in by_reason.items():
            extra = [reason] if reason else []
            for index, counts in self._counts.items():
                there = min(count, counts.engine.num_waiting)
                count -= there
                family.add_metric([self._values[0], str(index), *extra], there)
            family.add_metric([*self._values, *extra], count)
        return family

    def gauge(self, name: str, text: str, value: float, of: _Of | None = None) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        for labels, each in self._lines(value, of):
            family.add_metric(labels, each)
        return family

    def gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def constants(self, name: str, text: str, constants: Mapping[str, str], value: float = 1) -> GaugeMetricFamily:
        """A gauge with a constant value. The information is in its labels."""
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, *constants))
        family.add_metric((*self._values, *constants.values()), value)
        return family

    def counter(self, name: str, text: str, value: float, of: _Of | None = None) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        for labels, each in self._lines(value, of):
            family.add_metric(labels, each)
        return family

    def counter_by(
        self, name: str, text: str, label: str, known: tuple[str, ...], values: Mapping[str, int]
    ) -> CounterMetricFamily:
        """A counter with one line per value in ``known``, even if its count is 0. The counts of other values are added
        up under ``other``."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for key in known:
            family.add_metric((*self._values, key), values.get(key, 0))
        family.add_metric((*self._values, "other"), sum(n for key, n in values.items() if key not in known))
        return family

    def counter_of(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], float]],
        of: Callable[[tuple[str, ...]], _Of] | None = None,
    ) -> CounterMetricFamily:
        """A counter with one line per tuple of label values. ``of`` returns the function for such a tuple."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, *labels))
        for key, value in values:
            for line, each in self._lines(value, None if of is None else of(key), key):
                family.add_metric(line, each)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._values, _buckets(histogram), histogram.total)
        return family


def _gauges(
    names: _Names, stats: RequestStats, info: CacheInfo | None, up: bool, num_waiting: int
) -> Iterator[GaugeMetricFamily]:
    engine = stats.engine

    def running(each: ReplicaCounts) -> float:
        return each.engine.num_running if up else 0

    yield names.gauge("num_requests_running", "Sequences in the batch.", engine.num_running if up else 0, running)
    yield names.waiting("num_requests_waiting", "Requests that wait for a step.", {"": num_waiting})
    reasons = {"capacity": num_waiting, "deferred": 0}  # no request is deferred yet
    text = "Requests that wait, by what they wait for."
    yield names.waiting("num_requests_waiting_by_reason", text, reasons)
    text = "Share of the KV cache that requests hold, 0 to 1."
    yield names.gauge("kv_cache_usage_perc", text, _usage(engine, up), lambda each: _usage(each.engine, up))
    text = "KV blocks that sharing saves: a block in use by three sequences saves two."
    yield names.gauge("kv_blocks_shared", text, engine.shared_blocks if up else 0)
    if info is not None:
        # Routers expect the label name num_gpu_blocks, even on a CPU.
        shape = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        shape["cache_dtype"] = info.kv_cache_dtype or info.dtype
        yield names.constants("cache_config_info", "The KV cache.", shape)
        if info.speculative_method is not None:
            drafts = {"method": info.speculative_method, "num_speculative_tokens": str(info.num_speculative_tokens)}
            yield names.constants("speculative_config_info", "Method of speculative decoding.", drafts)


_SOURCES: Final[dict[str, Callable[[RequestStats | ReplicaCounts], float]]] = {
    "local_compute": lambda each: each.prompt_tokens - each.cached_tokens,
    "local_cache_hit": lambda each: each.cached_tokens - each.host_tokens - each.disk_tokens,
    "host": operator.attrgetter("host_tokens"),
    "disk": operator.attrgetter("disk_tokens"),
    "external_kv_transfer": lambda each: 0,
}
"""Where the KV of a prompt token came from -> function that returns the number of such tokens. The first two and the
last have vLLM's names."""


def _counters(names: _Names, stats: RequestStats) -> Iterator[CounterMetricFamily]:
    engine = stats.engine
    for field, name, text in (
        ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have their first token."),
        ("cached_tokens", "prompt_tokens_cached", "Of those, read from the prefix cache."),
        ("generation_tokens", "generation_tokens", "Tokens generated."),
    ):
        yield names.counter(name, text, getattr(stats, field), operator.attrgetter(field))
    for name, text in (
        ("num_preemptions", "Times a sequence gave its memory back."),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ):
        yield names.counter(name, text, getattr(engine, name), operator.attrgetter(f"engine.{name}"))
    text = "Sequences that waited while another one computed the beginning of their prompt."
    yield names.counter("prefix_waits", text, engine.num_prefix_waits)
    text = "Prompt tokens of requests that have their first token, by where their KV came from."
    by_source = {(source,): float(of(stats)) for source, of in _SOURCES.items()}

    def from_source(key: tuple[str, ...]) -> _Of:
        return _SOURCES[key[0]]

    yield names.counter_of("prompt_tokens_by_source", text, ("source",), by_source.items(), from_source)
    text = "Requests that have ended, by how."
    yield names.counter_by("request_success", text, "finished_reason", FINISH_REASONS, stats.finished)
    text = "Requests that were not taken, by why."
    yield names.counter_by("admission_rejections", text, "reason", REJECTION_REASONS, stats.rejected)


def _old_names(names: _Names, stats: RequestStats, up: bool) -> Iterator[Metric]:
    """Metrics of the KV cache under vLLM's former names. The router of vLLM's production stack reads them."""
    engine = stats.engine
    text = "Former name of kv_cache_usage_perc."
    yield names.gauge("gpu_cache_usage_perc", text, _usage(engine, up), lambda each: _usage(each.engine, up))
    for name in ("prefix_cache_queries", "prefix_cache_hits"):
        of = operator.attrgetter(f"engine.{name}")
        yield names.counter(f"gpu_{name}", f"Former name of {name}.", getattr(engine, name), of)


def _vllm_only(names: _Names, stats: RequestStats, info: CacheInfo | None) -> Iterator[Metric]:
    """Metrics that panels of vLLM's dashboards read, and that tell here what other metrics tell too, or nothing new.

    The metrics of HTTP have the names and labels of the library that vLLM counts them with.
    """
    engine = stats.engine
    yield names.histogram("time_per_output_token_seconds", "Former name of inter_token_latency.", stats.inter_token)
    text = "Prompt tokens from the prefix cache, by where their KV was kept."
    cached = {("device",): _SOURCES["local_cache_hit"](stats)}
    cached |= {("host",): stats.host_tokens, ("disk",): stats.disk_tokens}
    yield names.counter_of("prompt_tokens_cached_by_source", text, ("source",), cached.items())
    for what, tiles in (("queries", engine.num_tile_hits + engine.num_tiles_encoded), ("hits", engine.num_tile_hits)):
        yield names.counter(f"mm_cache_{what}", "Image tiles that were looked up, and found encoded.", tiles)
        yield names.counter(f"external_prefix_cache_{what}", "Always 0: no cache is shared with other servers.", 0)
    states = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
    yield names.gauge_by("engine_sleep_state", "Always awake: there is no sleep mode.", "sleep_state", states)
    if info is not None and info.block_bytes:
        moved = {"store": engine.num_offloaded_blocks, "load": engine.num_brought_back_blocks}
        for way, blocks in moved.items():
            text = "Bytes that the prefix cache copied to host memory, and back."
            yield names.counter(f"kv_offload_{way}_bytes", text, blocks * info.block_bytes)
    labels = ("handler", "method", "status")
    responses = CounterMetricFamily("http_requests", "Responses of the API.", labels=labels)
    for key, count in sorted(stats.exchanges.items()):
        responses.add_metric(key, count)
    yield responses
    text = "Seconds from the beginning of a request to the end of its response."
    seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=labels[:2])
    for pair, histogram in sorted(stats.exchange_seconds.items()):
        seconds.add_metric(pair, _buckets(histogram), histogram.total)
    yield seconds


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Pairs (upper bound as text, number of values up to this bound)."""
    return list(zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True))


def _histograms(names: _Names, stats: RequestStats) -> Iterator[HistogramMetricFamily]:
    for field, name, text in _HISTOGRAMS:
        yield names.histogram(name, text, getattr(stats, field))


def _ours(
    names: _Names, stats: RequestStats, up: bool, now: float, oldest_wait: float, num_tasks: int
) -> Iterator[Metric]:
    engine = stats.engine
    text = "For how long the first of the requests that wait for a step has waited; 0 when none does."
    yield names.gauge("oldest_waiting_request_seconds", text, oldest_wait)
    idle = stats.last_token_time is None or now - stats.last_token_time > _RECENT_SECONDS
    rates = {
        "60s": 0.0 if idle else engine.preemption_rate,  # an idle engine does not update it
        "total": _share(engine.num_preempted_sequences, engine.num_finished_sequences),
    }
    text = "Share of finished sequences that were preempted: below 0.02 is healthy, above 0.05 costs throughput."
    yield names.gauge_by("preemption_rate", text, "window", rates)
    text = "Share of computed tokens that were computed before, and lost to a preemption."
    yield names.gauge("recomputed_token_share", text, _share(engine.num_recomputed_tokens, engine.num_computed_tokens))
    if engine.floor_share is not None:
        text = "Least time this machine could take for the last steps, over the time they took; 0 while nothing runs."
        yield names.gauge("floor_share", text, 0.0 if idle or not up else engine.floor_share)
    if engine.collective_seconds:
        text = "Time inside steps in which the engine waited for the other processes of its model."
        yield names.counter("collective_seconds", text, engine.collective_seconds)
    if engine.collective_share is not None:
        text = "Share of the last steps' time in which the engine waited for the other processes of its model."
        yield names.gauge("collective_share", text, 0.0 if idle or not up else engine.collective_share)
    if engine.expert_imbalance:
        text = "Tokens of a layer's busiest expert over the mean of its experts, lately; 1 when all have as many."
        layers = {str(number): each for number, each in enumerate(engine.expert_imbalance)}
        yield names.gauge_by("expert_imbalance", text, "layer", layers)
    text = "Tokens computed past a stop string or a cancellation, and thrown away."
    yield names.counter("overrun_tokens", text, stats.overrun_tokens)
    text = "Running requests that went on at another replica: with their KV, or computed again from their tokens."
    by_kind = {(kind,): stats.moves[kind] for kind in ("kv", "replay")}
    yield names.counter_of("request_moves", text, ("kind",), by_kind.items())
    text = "Moves that failed. The request stayed where it was."
    yield names.counter("request_moves_failed", text, stats.moves["failed"])
    yield names.counter("engine_restarts", "Times the engine died and was started again.", stats.num_restarts)
    yield names.gauge("engine_up", "1 when the engine serves.", float(up))
    yield names.gauge("event_loop_tasks", "Tasks of the server's event loop; steady while nothing is asked.", num_tasks)
    if stats.last_token_time is not None:
        age = max(0.0, now - stats.last_token_time)
        yield names.gauge("seconds_since_last_token", "Age of the newest token delivered.", age)
    yield names.counter_by("http_responses", "Answers of the API, by HTTP status.", "code", _STATUSES, stats.responses)
    seconds = {(cause,): spent for cause, spent in stats.cause_seconds.items()}
    yield names.counter_of("request_seconds", "Time of answers that have ended, by cause.", ("cause",), seconds.items())


def _engine_process(names: _Names, pid: int | None) -> Iterator[Metric]:
    """Metrics of the engine's process; none if the process does not run."""
    if (memory := _resident_memory(pid)) is not None:
        text = "Resident memory of the engine's process, with weights and KV cache."
        yield names.gauge("engine_resident_memory_bytes", text, memory)


def _replicas(names: _Names, replicas: Sequence[ReplicaStats]) -> Iterator[Metric]:
    """Metrics of each replica that is not switched off."""
    replicas = [each for each in replicas if each.state != "off"]
    for name, text, values in (
        ("replica_up", "1 when the replica takes requests.", [float(each.state == "ready") for each in replicas]),
        ("replica_requests_started", "Requests there that have a token.", [each.started for each in replicas]),
        ("replica_requests_unstarted", "Requests there without a token.", [each.unstarted for each in replicas]),
        ("replica_unstarted_tokens", "Prompt tokens there to compute.", [each.unstarted_tokens for each in replicas]),
        ("replica_kv_cache_usage_perc", "Share of its KV cache in use.", [each.kv_cache_usage for each in replicas]),
    ):
        yield names.gauge_by(
            name, text, "replica", {str(each.index): value for each, value in zip(replicas, values, strict=True)}
        )
    sent = [((str(each.index),), float(each.sent)) for each in replicas]
    yield names.counter_of("replica_requests_sent", "Requests sent there.", ("replica",), sent)
    restarts = [((str(each.index),), float(each.restarts)) for each in replicas]
    yield names.counter_of("replica_restarts", "Times it was started again.", ("replica",), restarts)
    memory = {str(each.index): value for each in replicas if (value := _resident_memory(each.pid)) is not None}
    text = "Resident memory of the replica's process, with weights and KV cache."
    yield names.gauge_by("replica_resident_memory_bytes", text, "replica", memory)


def _autoscaling(names: _Names, state: AutoscalingStats) -> Iterator[Metric]:
    """Metrics of autoscaling."""
    limits = {"min": state.min_replicas, "max": state.max_replicas, "wanted": state.wanted_replicas}
    text = "Replicas: least and most that autoscaling allows, and those that it wants now."
    yield names.gauge_by("autoscaling_replicas", text, "what", limits | {"starting": state.starting_replicas})
    text = "Forecast wait of a new request behind all waiting ones, which autoscaling compares with its limit."
    yield names.gauge("autoscaling_forecast_wait_seconds", text, state.forecast_wait_seconds)
    text = "Unfinished requests over the rows of the replicas that serve."
    yield names.gauge("autoscaling_load", text, state.load)
    yield names.gauge("autoscaling_start_seconds", "Time until the newest replica served.", state.start_seconds)
    changes = {("add",): state.num_added, ("remove",): state.num_removed}
    yield names.counter_of("autoscaling_decisions", "Decisions to change the fleet.", ("what",), changes.items())


def _resident_memory(pid: int | None) -> float | None:
    """Resident memory of a process in bytes; None if there is no such process."""
    families = [] if pid is None else ProcessCollector(registry=None, pid=lambda: pid).collect()
    found = [family for family in families if family.name == "process_resident_memory_bytes"]
    return found[0].samples[0].value if found else None


def _memory_pressure(names: _Names, stats: RequestStats, info: CacheInfo | None) -> Iterator[Metric]:
    """Metrics that show a lack of KV memory: preemptions and evictions."""
    engine = stats.engine
    swaps = engine.num_swap_preemptions
    tails = engine.num_tail_preemptions
    methods = {"recompute": engine.num_preemptions - swaps - tails, "swap": swaps, "tail": tails}
    text = "Preemptions: all KV dropped and computed again, kept in host memory, or only its end dropped."
    by_method = {(method,): count for method, count in methods.items()}
    yield names.counter_of("preemptions_by_method", text, ("method",), by_method.items())
    blocks = {("out",): engine.num_swapped_out_blocks, ("in",): engine.num_swapped_in_blocks}
    text = "KV blocks copied to host memory and back."
    yield names.counter_of("swapped_blocks", text, ("direction",), blocks.items())
    if info is not None and info.block_bytes:
        moved = {way: count * info.block_bytes for way, count in blocks.items()}
        yield names.counter_of("swapped_bytes", "The same in bytes.", ("direction",), moved.items())
    blocks = {("out",): engine.num_offloaded_blocks, ("in",): engine.num_brought_back_blocks}
    text = "Of the swapped blocks, those that the prefix cache evicted, and those it had back."
    yield names.counter_of("prefix_offload_blocks", text, ("direction",), blocks.items())
    moved = {("write",): engine.num_kv_bytes_written, ("read",): engine.num_kv_bytes_read}
    yield names.counter_of("kv_store_bytes", "Bytes of KV moved to and from disk.", ("direction",), moved.items())
    yield names.gauge("kv_store_blocks", "Blocks on disk that can be found.", engine.kv_store_blocks)
    text = "Blocks that were not written to disk, or not used after they were read."
    yield names.counter_by("kv_store_rejected_blocks", text, "reason", _KV_REJECTED, engine.kv_blocks_rejected)
    text = "Prompt tokens whose KV was read from disk."
    yield names.counter("kv_store_loaded_tokens", text, engine.num_kv_loaded_tokens)
    yield names.counter("kv_store_loads", "Requests that waited for KV from disk.", engine.num_kv_loads)
    text = "Seconds for which requests waited for KV from disk."
    yield names.counter("kv_store_load_seconds", text, engine.num_kv_load_seconds)
    text = "Pauses of conversations before whose end KV was read from disk."
    yield names.counter("kv_store_fetches", text, engine.num_kv_fetches)
    text = "Those of these pauses after which the whole conversation was in the cache."
    yield names.counter("kv_store_fetches_used", text, engine.num_kv_fetches_used)


def _pauses(names: _Names, stats: RequestStats, up: bool, now: float) -> Iterator[Metric]:
    """Metrics of conversations that pause while a tool runs, and of the leases of their blocks."""
    engine = stats.engine
    quiet = stats.last_token_time is None or now - stats.last_token_time > _PAUSE_SECONDS
    text = "Conversations that pause for a tool now, and have done so for at most 5 minutes."
    yield names.gauge_by("paused_conversations", text, "tool", {} if quiet or not up else engine.pauses_by_tool)
    yield names.counter(
        "pauses", "Answers that called tools, after which their conversation paused.", engine.num_pauses
    )
    yield names.counter("pause_leases", "Of those, the ones whose blocks got a lease.", engine.num_leases)
    text = "First turns after a pause, by what they found of their conversation's cache."
    turns = {(found.value,): engine.turns_by_cache.get(found.value, 0) for found in TurnCache}
    yield names.counter_of("turns_after_pause", text, ("cache",), turns.items())
    if not engine.lease_budget_blocks and not engine.leases_ended:  # the first is 0 while the engine restarts
        return
    text = "Unused blocks with a lease."
    yield names.gauge_by("leased_blocks", text, "level", engine.leased_blocks if up else {})
    text = "Most unused blocks that may have a lease."
    yield names.gauge("lease_budget_blocks", text, engine.lease_budget_blocks if up else 0)
    text = "Blocks whose lease ended before the next turn came."
    reasons = [how.value for how in TurnCache if how not in (TurnCache.KEPT, TurnCache.NO_LEASE)]
    ended = {(how,): engine.leases_ended.get(how, 0) for how in reasons}
    yield names.counter_of("lease_ended_blocks", text, ("reason",), ended.items())


def _block_times(names: _Names, engine: EngineStats) -> Iterator[Metric]:
    """Times of blocks of the prefix cache, under vLLM's names. vLLM measures a sample of its blocks."""
    for counts, seconds, name, text in (
        (
            engine.block_reuse_gaps,
            engine.num_block_reuse_seconds,
            "kv_block_reuse_gap_seconds",
            "Time for which a cached block was unused until it was used again.",
        ),
        (
            engine.block_idle_times,
            engine.num_block_idle_seconds,
            "kv_block_idle_before_evict_seconds",
            "Time for which an evicted block had been unused.",
        ),
        (
            engine.block_lifetimes,
            engine.num_block_lifetime_seconds,
            "kv_block_lifetime_seconds",
            "Time from the computation of a block to its eviction.",
        ),
    ):
        histogram = Histogram(BLOCK_TIME_BOUNDS)
        histogram.counts = counts or histogram.counts
        histogram.total = seconds
        yield names.histogram(name, text, histogram)


def _drafts(names: _Names, stats: RequestStats) -> Iterator[Metric]:
    """Metrics of speculative decoding, under vLLM's names. The mean number of tokens per verified row is 1 + accepted /
    drafts."""
    engine = stats.engine
    for field, name, text in (
        ("num_verified_rows", "num_drafts", "Rows of steps that had drafts."),
        ("num_draft_tokens", "num_draft_tokens", "Tokens drafted, and verified."),
        ("num_accepted_tokens", "num_accepted_tokens", "Drafted tokens that were right."),
    ):
        yield names.counter(f"spec_decode_{name}", text, getattr(engine, field), operator.attrgetter(f"engine.{field}"))

    def accepted_at(key: tuple[str, ...]) -> _Of:
        return lambda each: dict(enumerate(each.engine.accepted_at)).get(int(key[0]), 0)

    text = "Accepted drafts by their place in the row."
    places = {(str(place),): count for place, count in enumerate(engine.accepted_at)}
    name = "spec_decode_num_accepted_tokens_per_pos"
    yield names.counter_of(name, text, ("position",), places.items(), accepted_at)


def _adapters(names: _Names, stats: RequestStats, up: bool) -> Iterator[Metric]:
    """Metrics of LoRA adapters, if the server has any. The first metric has vLLM's name and labels."""
    engine = stats.engine
    if not (engine.max_loras or engine.num_adapter_reads):  # the first is 0 while the engine restarts
        return
    running, waiting = (engine.running_adapters, engine.waiting_adapters) if up else ([], [])
    labels = {"max_lora": str(engine.max_loras), "running_lora_adapters": ",".join(running)}
    labels["waiting_lora_adapters"] = ",".join(waiting)
    text = "Adapters whose requests run, and those whose requests wait; the value is the time in seconds."
    yield names.constants("lora_requests_info", text, labels, time.time())
    yield names.counter("lora_adapter_reads", "Adapters read from their files.", engine.num_adapter_reads)
    yield names.counter("lora_adapter_hits", "Requests whose adapter was in memory.", engine.num_adapter_hits)
    yield names.counter("lora_adapter_evictions", "Adapters that made room for others.", engine.num_adapter_evictions)


def _images(names: _Names, engine: EngineStats) -> Iterator[Metric]:
    """Metrics of encoded images, if the model reads images."""
    if not (engine.max_image_bytes or engine.num_tiles_encoded):  # the first is 0 while the engine restarts
        return
    yield names.counter("image_tiles_encoded", "Image tiles encoded.", engine.num_tiles_encoded)
    yield names.counter("image_tile_hits", "Image tiles that were encoded already.", engine.num_tile_hits)
    text = "Image tiles whose encoded rows made room for others while requests used them."
    yield names.counter("image_tiles_given_up", text, engine.num_tiles_given_up)
    text = "Image tiles that were encoded again because a request still needed their rows."
    yield names.counter("image_tiles_reencoded", text, engine.num_tiles_reencoded)
    yield names.gauge("image_memory_bytes", "Memory of encoded images.", engine.image_bytes)
    yield names.gauge("image_memory_limit_bytes", "Maximum memory of encoded images.", engine.max_image_bytes)


def _grammars_and_budgets(names: _Names, engine: EngineStats) -> Iterator[Metric]:
    """Metrics of grammars and thinking budgets."""
    yield names.counter("grammars_compiled", "Grammars compiled.", engine.num_grammars_compiled)
    yield names.counter("grammar_cache_hits", "Requests whose grammar was in the cache.", engine.num_grammar_hits)
    yield names.counter("grammars_failed", "Grammars that could not be compiled.", engine.num_grammars_failed)
    yield names.counter("grammar_compile_seconds", "Time of all compilations.", engine.grammar_compile_seconds)
    text = "Answers with a thinking budget."
    yield names.counter("thinking_budget_answers", text, engine.num_thinking_limited)
    text = "Answers whose reasoning was ended by their budget."
    yield names.counter("thinking_budget_ended", text, engine.num_thinking_ended)


def _batches(names: _Names, stats: RequestStats) -> Metric:
    text = "Requests of batches that were answered."
    outcomes = {(name,): stats.batch_requests[name] for name in BATCH_OUTCOMES}
    return names.counter_of("batch_requests", text, ("outcome",), outcomes.items())


def _governor(names: _Names, stats: RequestStats, up: bool) -> Iterator[Metric]:
    """Metrics with the current values of the settings that a governor changes."""
    engine = stats.engine
    yield names.gauge("running_limit", "Most sequences that may run.", engine.running_limit if up else 0)
    yield names.gauge("token_budget", "Tokens of a step.", engine.token_budget if up else 0)
    text = "Share of the KV blocks kept free when a sequence joins."
    yield names.gauge("admission_watermark", text, engine.watermark if up else 0.0)
    text = "Changes that the governor made."
    yield names.counter("governor_decisions", text, engine.num_governor_decisions)


def _deadlines(names: _Names, stats: RequestStats, classes: Mapping[str, int], up: bool) -> Iterator[Metric]:
    """Metrics of requests with deadlines: how many there were, and how many met them."""
    engine = stats.engine
    known = tuple(classes)
    for name, text, values in (
        ("requests_by_class", "Requests that have ended, by class of service.", stats.classes),
        ("requests_with_deadline", "Of those, the ones that had a deadline.", stats.with_deadline),
        ("requests_within_deadline", "Of those, the ones that kept every one they had.", stats.within_deadline),
    ):
        yield names.counter_by(name, text, "service_class", known, values)
    text = "Deadlines not kept: to the first token, per token after it, to the end."
    misses = {(name, kind): stats.deadline_misses[name, kind] for name in known for kind in DEADLINE_KINDS}
    yield names.counter_of("deadline_misses", text, ("service_class", "kind"), misses.items())
    late = {("dropped",): engine.num_late_dropped, ("downgraded",): engine.num_late_downgraded}
    text = "Sequences that could not keep their deadline any more: ended, or gone on without it."
    yield names.counter_of("late_requests", text, ("outcome",), late.items())
    reserved = {name: float(rows) for name, rows in classes.items()}
    yield names.gauge_by("reserved_rows", "Rows of the batch reserved for a class.", "service_class", reserved)
    used = {name: min(rows, float(engine.rows_by_class.get(name, 0) if up else 0)) for name, rows in reserved.items()}
    yield names.gauge_by("reserved_rows_in_use", "Of those, the ones the class uses.", "service_class", used)
    text = "Largest difference between tenants that have requests waiting: weighted tokens computed, over their shares."
    yield names.gauge("tenant_gap", text, engine.tenant_gap if up else 0.0)


def _forecasts(names: _Names, stats: RequestStats, within: Mapping[float, float | None]) -> Iterator[Metric]:
    """Metrics of the accuracy of the forecasts of waiting times."""
    text = "Between the wait predicted for a request and the one it had."
    yield names.histogram("forecast_wait_error_seconds", text, stats.forecast_error)
    shares = {f"{ratio:g}": within.get(ratio) for ratio in FORECAST_RATIOS}
    known = {ratio: math.nan if share is None else share for ratio, share in shares.items()}
    text = "Share of the last requests that waited no longer than the ratio times what was predicted; NaN: too few."
    yield names.gauge_by("forecast_within_ratio", text, "ratio", known)


def _usage(engine: EngineStats, up: bool) -> float:
    """Fraction of an engine's KV cache that requests hold, 0 to 1."""
    return _share(engine.used_blocks, engine.used_blocks + engine.cached_blocks + engine.free_blocks) if up else 0.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _training(names: _Names, stats: TrainingStats) -> Iterator[Metric]:
    for name, text, value in (
        ("training_sessions", "Sessions of clients that train or sample.", stats.num_sessions),
        ("training_adapters", "Adapters in training that are in memory.", stats.num_adapters),
        ("training_adapter_bytes", "Bytes of these adapters, with gradients and optimiser.", stats.adapter_bytes),
        ("training_adapter_limit_bytes", "Bytes that they may have.", stats.adapter_limit_bytes),
        ("training_calls_waiting", "Training calls without an answer.", stats.num_waiting),
        ("training_disk_bytes", "Bytes in the directory of training runs.", stats.disk_bytes),
        ("training_disk_limit_bytes", "Bytes that it may have.", stats.disk_limit_bytes),
        ("training_longest_slice_seconds", "Longest piece of work between two steps.", stats.longest_slice),
    ):
        yield names.gauge(name, text, value)
    for name, text, label, known, values in (
        ("training_tokens", "Tokens of training passes.", "pass", TRAINING_PASSES, stats.tokens),
        ("training_calls", "Training calls that have an answer.", "kind", TRAINING_CALLS, stats.calls),
        ("training_failed_calls", "Training calls that failed.", "category", TRAINING_ERRORS, stats.failed),
    ):
        yield names.counter_of(name, text, (label,), [((key,), float(values[key])) for key in known])
    yield names.counter("training_samples", "Samples drawn for clients that train.", stats.samples)
    yield names.counter("training_seconds", "Seconds in which training work was computed.", stats.seconds)
    text = "From the moment at which a training call could begin to its first pass."
    yield names.histogram("training_wait_seconds", text, stats.wait)
