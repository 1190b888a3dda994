"""Plain records of statistics. Exporters read the fields. Standard library only."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BATCH_OUTCOMES",
    "CAUSES",
    "DEADLINE_KINDS",
    "FORECAST_RATIOS",
    "TRAINING_CALLS",
    "TRAINING_ERRORS",
    "TRAINING_PASSES",
    "AutoscalingStats",
    "EngineStats",
    "FinishedRequest",
    "Histogram",
    "ReplicaCounts",
    "ReplicaStats",
    "RequestStats",
    "TrainingStats",
    "merge_stats",
]

DEADLINE_KINDS = ("ttft", "tpot", "deadline")
"""Kinds of deadlines: time to the first token, time per later token, time to the end."""

FORECAST_RATIOS = (1.0, 1.25, 2.0)
"""Ratios of actual to predicted wait. For each ratio the server counts the requests whose actual wait was at most this
multiple of the predicted wait."""

BATCH_OUTCOMES = ("completed", "failed")
"""Outcomes of a request in a batch of /v1/batches: ``completed`` for status 2xx, ``failed`` for any other status."""

TRAINING_PASSES = ("forward", "backward")
TRAINING_CALLS = ("create", "pass", "optim_step", "save", "load")
TRAINING_ERRORS = ("user", "server")

CAUSES = (
    *("front_door", "waiting_step", "waiting_slots", "waiting_blocks", "waiting_tokens", "waiting_reservation"),
    *("waiting_batch", "waiting_grammar", "waiting_adapter", "waiting_image", "waiting_prefix", "waiting_kv_load"),
    "waiting_policy",
    *("preempted", "prefill", "decode", "stretched", "host", "delivery"),
)
"""Causes to which the time of a request is charged; docs/why-slow.md explains each cause."""

_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TTFT_BUCKETS = (*_FINE, 80.0, 160.0, 640.0, 2560.0)
_VLLM_TOKENS = (0.025, 0.05, 0.075, 0.15, 0.2, 0.3, 0.4)
TOKEN_BUCKETS = tuple(sorted({0.0005, *_FINE, *_VLLM_TOKENS, 80.0}))
"""Contains the bounds of vLLM's buckets, because vLLM's dashboards compare single buckets with latency targets."""
_SHORT = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY_BUCKETS = (*_SHORT, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
COUNT_BUCKETS = tuple(float(1 << i) for i in range(21))


class Histogram:
    """Number of values per bucket. ``bounds`` are inclusive upper bounds. One further bucket counts values above the
    last bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclasses.dataclass(slots=True)
class EngineStats:
    """State of the engine after a step, and counters. Counters start at 0 when the engine's process starts."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    """Number of unused blocks whose content is in the prefix cache."""
    free_blocks: int = 0
    shared_blocks: int = 0
    """Number of blocks that sharing saves: a block in the tables of three sequences saves two."""
    num_prefix_waits: int = 0
    """Number of sequences that waited while another one computed the beginning of their prompt."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_finished_sequences: int = 0
    num_preempted_sequences: int = 0
    """Number of finished sequences that were preempted at least once."""
    preemption_rate: float = 0.0
    """Fraction of the sequences finished in the last 60 s that were preempted."""
    prefix_cache_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    num_computed_tokens: int = 0
    """Number of tokens computed by all steps."""
    num_recomputed_tokens: int = 0
    """Number of tokens that were computed again after a preemption."""
    step_tokens: int = 0
    """Number of tokens computed by this step."""
    num_swap_preemptions: int = 0
    """Number of preemptions that copied the KV to host memory."""
    num_tail_preemptions: int = 0
    """Number of preemptions that freed only the last KV blocks of a request."""
    num_verified_rows: int = 0
    """Number of rows with draft tokens, over all steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    """Index of a draft token within its row -> how often that draft token was accepted."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_offloaded_blocks: int = 0
    """Number of blocks that the prefix cache moved to host memory. The next field is the number of blocks copied back
    from there."""
    num_brought_back_blocks: int = 0
    num_late_dropped: int = 0
    """Number of sequences that were ended because they could no longer meet their deadline."""
    num_late_downgraded: int = 0
    """Number of sequences that missed their deadline and continued without it."""
    rows_by_class: dict[str, int] = dataclasses.field(default_factory=dict)
    """Class of service -> number of running sequences, for classes with reserved rows."""
    tenant_gap: float = 0.0
    """Maximum difference in service between tenants with waiting requests. Service is weighted tokens divided by the
    tenant's weight."""
    running_limit: int = 0
    """Current limit of running sequences. A governor may change this field and the next two fields."""
    token_budget: int = 0
    """Current maximum number of tokens per step."""
    watermark: float = 0.0
    """Fraction of the KV blocks that must stay free when a sequence joins the batch."""
    num_governor_decisions: int = 0
    """Number of changes by the governor."""
    max_loras: int = 0
    """Maximum number of adapters in a step; 0 if the server has no adapters."""
    running_adapters: list[str] = dataclasses.field(default_factory=list)
    """Names of adapters with running requests, at most 64, updated once a second. The next field: names of adapters
    that have only waiting requests."""
    waiting_adapters: list[str] = dataclasses.field(default_factory=list)
    num_adapter_reads: int = 0
    """Number of adapters read from files. The next two fields: number of requests whose adapter was in memory, and
    number of adapters evicted from memory."""
    num_adapter_hits: int = 0
    num_adapter_evictions: int = 0
    num_grammars_compiled: int = 0
    num_grammar_hits: int = 0
    """Number of requests whose grammar was already compiled."""
    num_grammars_failed: int = 0
    grammar_compile_seconds: float = 0.0
    """Total time in seconds that was spent compiling grammars."""
    num_tiles_encoded: int = 0
    """Number of image tiles that were encoded. The next three fields: tiles that a new request found encoded or in the
    encoder's queue; tiles whose rows were given up for other images; such tiles that were encoded again."""
    num_tile_hits: int = 0
    num_tiles_given_up: int = 0
    num_tiles_reencoded: int = 0
    image_bytes: int = 0
    """Number of bytes of the encoded rows in memory. The next field: the maximum; 0 if the model reads no images."""
    max_image_bytes: int = 0
    kv_store_blocks: int = 0
    """Number of blocks on disk that can be found. The next fields: prompt tokens whose KV was loaded from there,
    requests that waited for it, and the seconds for which they waited."""
    num_kv_loaded_tokens: int = 0
    num_kv_loads: int = 0
    num_kv_load_seconds: float = 0.0
    num_kv_fetches: int = 0
    """Number of pauses before whose end blocks were read from disk. The next field: those of them after which all
    blocks were there."""
    num_kv_fetches_used: int = 0
    num_kv_bytes_read: int = 0
    """Number of bytes of KV that were read from disk; the next field: that were written."""
    num_kv_bytes_written: int = 0
    kv_blocks_rejected: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> number of blocks that were not written to disk, or not used after they were read."""
    num_pauses: int = 0
    """Number of answers that called tools, after which their conversation pauses. The next field: those of them whose
    blocks got a lease."""
    num_leases: int = 0
    pauses_by_tool: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tool -> number of conversations that pause for it now. There are at most 20 names, and ``other``."""
    turns_by_cache: dict[str, int] = dataclasses.field(default_factory=dict)
    """What the first turn after a pause found of its conversation's cache (:class:`TurnCache`) -> number of such
    turns."""
    leased_blocks: dict[str, int] = dataclasses.field(default_factory=dict)
    """Level of a lease (``1`` to ``3``) -> number of unused blocks with such a lease. Empty if the rule of
    eviction has no leases."""
    lease_budget_blocks: int = 0
    """Maximum of these blocks."""
    leases_ended: dict[str, int] = dataclasses.field(default_factory=dict)
    """How a lease ended before the next turn (:class:`TurnCache`) -> number of blocks whose lease ended in this way."""
    block_reuse_gaps: list[int] = dataclasses.field(default_factory=list)
    """Seconds for which a cached block was unused until it was used again: number of blocks per bucket of
    :data:`~chairlift.base.turn_cache.BLOCK_TIME_BOUNDS`. The next field: their sum. Then the same of the
    seconds for which an evicted block had been unused, and since it got its content."""
    num_block_reuse_seconds: float = 0.0
    block_idle_times: list[int] = dataclasses.field(default_factory=list)
    num_block_idle_seconds: float = 0.0
    block_lifetimes: list[int] = dataclasses.field(default_factory=list)
    num_block_lifetime_seconds: float = 0.0
    num_thinking_limited: int = 0
    """Number of ended outputs that had a thinking budget. The next field: outputs whose reasoning was ended by the
    budget."""
    num_thinking_ended: int = 0
    collective_seconds: float = 0.0
    """Seconds that the engine's process waited for the other processes of its model, inside steps. 0 for a model on
    one process."""
    collective_share: float | None = None
    """Share of the time of the last steps in which the engine's process waited for the others. None for a model on one
    process."""
    floor_share: float | None = None
    """Minimum time that this machine needs for the last steps, divided by the time that they took. None if the
    machine's limits were not measured."""
    expert_imbalance: list[float] = dataclasses.field(default_factory=list)
    """Load imbalance of each expert layer in recent steps: tokens of its busiest expert divided by the mean over its
    experts. Updated once a second; empty if experts are not counted."""

    def only_counters(self) -> EngineStats:
        """A copy in which only the counters are kept, for an engine that has ended."""
        counters = EngineStats(**{name: getattr(self, name) for name in _COUNTERS})
        for name in _COUNTER_LISTS:
            setattr(counters, name, list(getattr(self, name)))
        for name in _COUNTER_MAPS:
            setattr(counters, name, dict(getattr(self, name)))
        return counters


def merge_stats(all_: Sequence[EngineStats]) -> EngineStats:
    """Statistics of several engines as one record. Counters, requests, blocks and limits are added up. ``step_tokens``
    is 0, because the engines have no common step."""
    sums = map(sum, zip(*map(_summed_of, all_), strict=True))
    fields: dict[str, Any] = dict(zip(_SUMMED, sums, strict=False))  # without engines there are no sums: all are 0
    total = EngineStats(**fields)
    total.preemption_rate = max((each.preemption_rate for each in all_), default=0.0)
    total.tenant_gap = max((each.tenant_gap for each in all_), default=0.0)
    total.watermark = max((each.watermark for each in all_), default=0.0)
    total.max_loras = max((each.max_loras for each in all_), default=0)
    layers = itertools.zip_longest(*(each.expert_imbalance for each in all_), fillvalue=1.0)
    total.expert_imbalance = [max(layer) for layer in layers]
    total.collective_share = max(
        (each.collective_share for each in all_ if each.collective_share is not None), default=None
    )
    total.floor_share = min((each.floor_share for each in all_ if each.floor_share is not None), default=None)
    for each in all_:
        for name in _COUNTER_LISTS:
            setattr(total, name, _added_lists(getattr(total, name), getattr(each, name)))
        for name in (*_COUNTER_MAPS, *_STATE_MAPS):
            setattr(total, name, _added(getattr(total, name), getattr(each, name)))
    for field in ("running_adapters", "waiting_adapters"):
        setattr(total, field, list(dict.fromkeys(name for each in all_ for name in getattr(each, field))))
    return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """State of one replica, as the router process knows it."""

    index: int
    pid: int | None
    """Id of the replica's process; None while there is no process."""
    state: str
    """``loading``, ``ready``, ``draining`` or ``down``. With autoscaling also ``off``: it is not needed now."""
    unstarted: int
    """Number of requests at the replica that have no token yet. The next field: number of requests that have a
    token."""
    started: int
    unstarted_tokens: int
    """Number of prompt tokens that the replica must still compute. Tokens that are expected in its prefix cache are
    not counted."""
    kv_cache_usage: float
    """Fraction of the replica's KV cache that requests use, 0 to 1."""
    sent: int
    """Number of requests sent to the replica since the server started."""
    restarts: int


@dataclasses.dataclass(slots=True)
class ReplicaCounts:
    """State of one replica's engine, and counters of what it did since the server's start. They never fall."""

    engine: EngineStats = dataclasses.field(default_factory=EngineStats)
    """State after the replica's newest step. Counters include its earlier processes."""
    prompt_tokens: int = 0
    """Prompt tokens of requests whose first token came from the replica. The next field: those of them that came from
    the prefix cache."""
    cached_tokens: int = 0
    host_tokens: int = 0
    """Number of cached tokens whose KV came back from host memory. The next field counts those from disk."""
    disk_tokens: int = 0
    generation_tokens: int = 0
    """Delivered tokens that the replica computed."""


@dataclasses.dataclass(slots=True, kw_only=True)
class AutoscalingStats:
    """State of autoscaling: its limits, its newest decision, and the values that the decision used."""

    min_replicas: int
    max_replicas: int
    wanted_replicas: int
    """Number of replicas that the fleet should have."""
    starting_replicas: int = 0
    """Number of replicas that are starting, and do not serve yet."""
    forecast_wait_seconds: float = 0.0
    """Forecast wait of a new request behind all waiting requests."""
    load: float = 0.0
    """Number of unfinished requests divided by the number of rows of the serving replicas."""
    start_seconds: float = 0.0
    """Seconds that the newest replica needed until it served."""
    num_added: int = 0
    """Number of decisions to add a replica. The next field: to remove one."""
    num_removed: int = 0
    last_change: str = ""
    """Newest change of the number of replicas, and its reason. Empty if there was none."""
    last_change_at: float | None = None
    """Unix time of the newest change."""


@dataclasses.dataclass(slots=True, kw_only=True)
class FinishedRequest:
    """One request that has ended, for any reason. Times are in seconds."""

    reason: str
    """Reason for the end: ``stop``, ``length``, ``abort``, ``error`` or ``deadline``."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    host_tokens: int = 0
    """Number of cached tokens whose KV came back from host memory. The next field counts those from disk."""
    disk_tokens: int = 0
    generation_tokens: int
    """Number of delivered tokens, summed over the ``n`` outputs."""
    n: int
    max_tokens: int | None
    num_preemptions: int
    e2e_seconds: float
    queue_seconds: float | None
    """Time from the request's arrival to its first step. This field and the next two are None if the request did not
    get that far."""
    prefill_seconds: float | None
    """Time from the request's first step to its first token."""
    decode_seconds: float | None
    """Time from the request's first token to its end."""
    longest_answer: int | None = None
    """Number of delivered tokens of the longest of the ``n`` outputs. None: as many as ``generation_tokens``."""
    service_class: str = "default"
    has_deadline: bool = False
    """Whether the request had a deadline of any kind."""
    misses: tuple[str, ...] = ()
    """Kinds of deadlines that the request missed, from :data:`DEADLINE_KINDS`."""

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first; None if there is only one token."""
        if self.decode_seconds is None or self.generation_tokens <= self.n:
            return None
        return self.decode_seconds * self.n / (self.generation_tokens - self.n)


@dataclasses.dataclass(slots=True)
class TrainingStats:
    """State and counters of a training service. Counters start at 0 when the server starts."""

    num_sessions: int = 0
    num_adapters: int = 0
    """Adapters in memory."""
    adapter_bytes: int = 0
    adapter_limit_bytes: int = 0
    num_waiting: int = 0
    """Calls that have no answer, and wait for nothing but the machine."""
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    seconds: float = 0.0
    """Seconds in which training work was computed. It may have been interrupted by steps of the engine."""
    longest_slice: float = 0.0
    """Seconds of the longest piece of work that nothing could interrupt."""
    samples: int = 0
    tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    """Kind of pass (from :data:`TRAINING_PASSES`) -> tokens."""
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """Kind of call (from :data:`TRAINING_CALLS`) -> calls that have an answer."""
    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    """Category of the error (from :data:`TRAINING_ERRORS`) -> calls that failed."""
    wait: Histogram = dataclasses.field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    """Seconds from the moment at which a call could begin to its first pass."""


class RequestStats:
    """Statistics of all requests since the server's start. Not thread-safe: all calls must come from the event loop."""

    def __init__(self) -> None:
        self.engine = EngineStats()
        """State of the engine after its last step. Counters include earlier engine processes, which were restarted."""
        self.num_restarts = 0
        self.training: TrainingStats | None = None
        """Statistics of training; None if nobody trains."""
        self.batch_requests: Counter[str] = Counter()
        """Outcome (from :data:`BATCH_OUTCOMES`) -> number of batch requests that have a result."""
        self.num_lost = 0
        """Number of requests that ended because the engine died."""
        self.moves: Counter[str] = Counter()
        """Kind of move between replicas (``kv``, ``replay``, or ``failed`` for a move that left its request where it
        was) -> number of requests."""
        self.last_token_time: float | None = None
        """Time of the last delivered token, from ``time.monotonic()``."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.host_tokens = 0
        """Number of cached tokens whose KV came back from host memory. The next field counts those from disk."""
        self.disk_tokens = 0
        self.generation_tokens = 0
        self.overrun_tokens = 0
        """Number of tokens that were computed after a stop string or a cancellation, and dropped."""
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """Reason -> number of refused requests. Reasons: queue_requests, queue_tokens, queue_timeout, forecast,
        logprobs, draining, unavailable, connections."""
        self.responses: Counter[str] = Counter()
        """HTTP status -> number of responses, for all paths. A stream that is cut off counts as 200."""
        self.exchanges: Counter[tuple[str, str, str]] = Counter()
        """(route, method, class of the HTTP status such as ``2xx``) -> number of responses of ``/v1/*``."""
        self.exchange_seconds: dict[tuple[str, str], Histogram] = {}
        """(route, method) -> seconds from the beginning of the request to the end of the response."""
        self.classes: Counter[str] = Counter()
        """Class of service -> number of ended requests."""
        self.with_deadline: Counter[str] = Counter()
        """Class of service -> number of ended requests with a deadline: answered, dropped, or cut off after the
        deadline."""
        self.within_deadline: Counter[str] = Counter()
        """Class of service -> number of ended requests that met all their deadlines (goodput)."""
        self.deadline_misses: Counter[tuple[str, str]] = Counter()
        """(class of service, kind of deadline) -> number of missed deadlines."""
        self.cause_seconds = dict.fromkeys(CAUSES, 0.0)
        """Cause -> seconds charged to it, over all ended outputs."""
        self.ttft = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e, self.queue, self.inference, self.prefill, self.decode = (Histogram(LATENCY_BUCKETS) for _ in range(5))
        self.request_prompt_tokens = Histogram(COUNT_BUCKETS)
        self.request_generation_tokens = Histogram(COUNT_BUCKETS)
        self.request_computed_tokens = Histogram(COUNT_BUCKETS)
        self.request_longest_answer = Histogram(COUNT_BUCKETS)
        self.request_max_tokens = Histogram(COUNT_BUCKETS)
        self.request_n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.request_preemptions = Histogram((0.0, 1.0, 2.0, 4.0, 8.0))
        self.step_tokens = Histogram(COUNT_BUCKETS[:15])
        self.forecast_error = Histogram(LATENCY_BUCKETS)
        """Absolute differences between predicted and actual waits, in seconds."""
        self._base: EngineStats | None = None
        """Counters of earlier engine processes. None if no engine has died."""
        self._replicas: dict[int, ReplicaCounts] = {}
        """Index of a replica -> its counters. ``engine`` has only those of fleets that have ended."""

    def step(self, stats: EngineStats) -> None:
        """Store the engine's state after a step. The counters of earlier processes are added in a copy."""
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
        self.engine = stats if self._base is None else _with_counters(stats, self._base)

    def responded(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a response of ``/v1/*``. ``route`` is the pattern of the path, or ``none``."""
        self.responses[str(status)] += 1
        self.exchanges[route, method, f"{status // 100}xx"] += 1
        histogram = self.exchange_seconds.get((route, method))
        if histogram is None:
            histogram = self.exchange_seconds[route, method] = Histogram(LATENCY_BUCKETS)
        histogram.observe(seconds)

    def connection_refused(self, status: int) -> None:
        """Count a refused connection: invalid HTTP, or too many connections (status 503)."""
        self.responses[str(status)] += 1
        self.rejected.update(("connections",) if status == 503 else ())

    def engine_died(self, num_requests: int = 0, replicas: Mapping[int, EngineStats] | None = None) -> None:
        """Reset the state after the engine died and lost ``num_requests``. A new process counts from 0. If the engine
        was a fleet, ``replicas`` maps the index of each replica to its statistics."""
        self.num_lost += num_requests
        for index, engine in (replicas or {}).items():
            counts = self._replicas.setdefault(index, ReplicaCounts())
            counts.engine = _with_counters(counts.engine, engine.only_counters())
        self._base = self.engine.only_counters()
        self.engine = self._base

    def tokens_counted(self) -> tuple[int, ...]:
        """Numbers of prompt tokens by their source, and of delivered tokens, for :meth:`credit`."""
        return tuple(getattr(self, name) for name in _TOKENS)

    def credit(self, replica: int, before: tuple[int, ...]) -> None:
        """Count the tokens that were counted since ``before`` for a replica too, which computed all of them."""
        counts = self._replicas.get(replica)
        if counts is None:
            counts = self._replicas[replica] = ReplicaCounts()
        for name, earlier in zip(_TOKENS, before, strict=True):
            setattr(counts, name, getattr(counts, name) + getattr(self, name) - earlier)

    def of_replicas(self, engines: Mapping[int, EngineStats]) -> dict[int, ReplicaCounts]:
        """Index -> state and counters of each replica of this server, also of fleets that have ended. ``engines`` are
        the statistics of the replicas of the present fleet."""
        found: dict[int, ReplicaCounts] = {}
        for index in sorted(self._replicas.keys() | engines.keys()):
            counts = self._replicas.get(index, ReplicaCounts())
            engine = _with_counters(engines.get(index, EngineStats()), counts.engine)
            found[index] = dataclasses.replace(counts, engine=engine)
        return found

    def prompt_computed(self, num_tokens: int, num_cached: int, num_host: int = 0, num_disk: int = 0) -> None:
        """Count the prompt tokens of a request when its first token arrives. So the rate of prompt tokens changes
        smoothly."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached
        self.host_tokens += num_host
        self.disk_tokens += num_disk

    def first_token(self, seconds: float, now: float) -> None:
        """Count the first token of an output, ``seconds`` after the request arrived."""
        self.ttft.observe(seconds)
        self.generation_tokens += 1
        self.last_token_time = now

    def next_tokens(self, seconds: float, count: int, now: float) -> None:
        """Count ``count`` tokens of one output, ``seconds`` after its previous tokens."""
        self.inter_token.observe(seconds / count, count)
        self.generation_tokens += count
        self.last_token_time = now

    def charge(self, causes: Mapping[str, float]) -> None:
        """Add seconds by cause, for an output that has ended or for a part of it."""
        for cause in CAUSES:
            self.cause_seconds[cause] += causes.get(cause, 0.0)

    def request_finished(self, request: FinishedRequest) -> None:
        self.finished[request.reason] += 1
        self.classes[request.service_class] += 1
        self.deadline_misses.update((request.service_class, kind) for kind in request.misses)
        if request.has_deadline and (request.misses or request.reason in ("stop", "length", "deadline")):
            self.with_deadline[request.service_class] += 1
            self.within_deadline[request.service_class] += not request.misses
        self.e2e.observe(request.e2e_seconds)
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(request.generation_tokens)
        self.request_computed_tokens.observe(request.prompt_tokens - request.cached_tokens)
        longest = request.generation_tokens if request.longest_answer is None else request.longest_answer
        self.request_longest_answer.observe(longest)
        self.request_n.observe(request.n)
        self.request_preemptions.observe(request.num_preemptions)
        if request.max_tokens is not None:
            self.request_max_tokens.observe(request.max_tokens)
        if request.queue_seconds is not None:
            self.queue.observe(request.queue_seconds)
            self.inference.observe(request.e2e_seconds - request.queue_seconds)
        if request.prefill_seconds is not None:
            self.prefill.observe(request.prefill_seconds)
        if request.decode_seconds is not None:
            self.decode.observe(request.decode_seconds)
            if request.seconds_per_token is not None:
                self.time_per_output_token.observe(request.seconds_per_token)


_COUNTERS = tuple(
    field.name
    for field in dataclasses.fields(EngineStats)
    if field.name.startswith(("num_", "prefix_", "grammar_", "collective_seconds"))
    and field.name not in ("num_running", "num_waiting")
)
_SUMMED = (
    *_COUNTERS,
    *("num_running", "num_waiting", "used_blocks", "cached_blocks", "free_blocks", "shared_blocks"),
    *("running_limit", "token_budget"),
    *("image_bytes", "max_image_bytes", "kv_store_blocks", "lease_budget_blocks"),
)
_COUNTER_LISTS = ("accepted_at", "block_reuse_gaps", "block_idle_times", "block_lifetimes")
_COUNTER_MAPS = ("kv_blocks_rejected", "turns_by_cache", "leases_ended")
_STATE_MAPS = ("rows_by_class", "pauses_by_tool", "leased_blocks")
_TOKENS = ("prompt_tokens", "cached_tokens", "host_tokens", "disk_tokens", "generation_tokens")
_summed_of = operator.attrgetter(*_SUMMED)


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def _added_lists(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [sum(two) for two in itertools.zip_longest(one, other, fillvalue=0)]


def _with_counters(stats: EngineStats, more: EngineStats) -> EngineStats:
    """A copy of ``stats`` whose counters include those of ``more``."""
    total = dataclasses.replace(stats, **{name: getattr(stats, name) + getattr(more, name) for name in _COUNTERS})
    for name in _COUNTER_LISTS:
        setattr(total, name, _added_lists(getattr(stats, name), getattr(more, name)))
    for name in _COUNTER_MAPS:
        setattr(total, name, _added(getattr(stats, name), getattr(more, name)))
    return total
