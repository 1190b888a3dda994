"""Plain records of statistics. Standard library only; exporters read the fields."""

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
    "EngineStats",
    "FinishedRequest",
    "Histogram",
    "ReplicaStats",
    "RequestStats",
    "merge_stats",
]

DEADLINE_KINDS = ("ttft", "tpot", "deadline")
"""Kinds of deadlines: time to the first token, per token after it, to the end."""

FORECAST_RATIOS = (1.0, 1.25, 2.0)
"""Factors of the predicted wait within which a forecast counts as kept."""

BATCH_OUTCOMES = ("completed", "failed")
"""Outcomes of a batch's request: status 2xx, or another."""

CAUSES = (
    *("front_door", "waiting_step", "waiting_slots", "waiting_blocks", "waiting_tokens", "waiting_reservation"),
    *("waiting_batch", "waiting_grammar", "waiting_adapter", "waiting_image"),
    *("preempted", "prefill", "decode", "stretched", "host", "delivery"),
)
"""Causes of a request's time; docs/why-slow.md explains each."""

_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TTFT_BUCKETS = (*_FINE, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS = (0.0005, *(b for b in _FINE if b <= 40), 80.0)
_SHORT = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY_BUCKETS = (*_SHORT, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
COUNT_BUCKETS = tuple(float(1 << i) for i in range(21))


class Histogram:
    """Counts per bucket. ``bounds`` are inclusive upper bounds; one more bucket counts larger values."""

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
    """The engine's state after a step. Counters begin at 0 with the engine's process."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    """Unused blocks whose content is in the prefix cache."""
    free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_finished_sequences: int = 0
    num_preempted_sequences: int = 0
    """Finished sequences that were preempted at least once."""
    preemption_rate: float = 0.0
    """Preempted divided by finished sequences, over the last 60 s."""
    prefix_cache_queries: int = 0
    """Prompt tokens searched in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    num_computed_tokens: int = 0
    """Tokens computed by all steps."""
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    step_tokens: int = 0
    """Tokens computed by this step."""
    num_swap_preemptions: int = 0
    """Preemptions that saved the KV in host memory."""
    num_tail_preemptions: int = 0
    """Preemptions that dropped only the end of the KV."""
    num_verified_rows: int = 0
    """Rows of steps with drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Accepted drafts."""
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    """How often the first, second, ... draft of a row was accepted."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_offloaded_blocks: int = 0
    """Blocks that the prefix cache evicted to host memory. The next field counts the blocks that it copied back."""
    num_brought_back_blocks: int = 0
    num_late_dropped: int = 0
    """Sequences that were ended because they could no longer meet their deadline."""
    num_late_downgraded: int = 0
    """Sequences that continued without their deadline."""
    rows_by_class: dict[str, int] = dataclasses.field(default_factory=dict)
    """Running sequences per class of service, for classes with reserved rows."""
    tenant_gap: float = 0.0
    """Largest difference in service between tenants with waiting requests, in weighted tokens divided by shares."""
    running_limit: int = 0
    """Present limit of running sequences. A governor may change it and the next two fields."""
    token_budget: int = 0
    """Present token budget of a step."""
    watermark: float = 0.0
    """Present share of the KV blocks that stays free when a sequence joins."""
    num_governor_decisions: int = 0
    """Changes that the governor made, or in shadow mode would have made."""
    max_loras: int = 0
    """Most adapters in a step; 0 where none are served."""
    running_adapters: list[str] = dataclasses.field(default_factory=list)
    """Names of adapters whose requests run, as they were at most a second ago, 64 at most; the next are of those whose
    requests only wait."""
    waiting_adapters: list[str] = dataclasses.field(default_factory=list)
    num_adapter_reads: int = 0
    """Adapters read from their files; then requests whose adapter was in memory, and adapters that made room."""
    num_adapter_hits: int = 0
    num_adapter_evictions: int = 0
    num_grammars_compiled: int = 0
    num_grammar_hits: int = 0
    """Requests whose grammar was compiled before."""
    num_grammars_failed: int = 0
    grammar_compile_seconds: float = 0.0
    """Time of all compilations."""
    num_thinking_limited: int = 0
    """Answers with a thinking budget that have ended; the next field counts those whose reasoning it ended."""
    num_thinking_ended: int = 0
    floor_share: float | None = None
    """Least possible time of the last steps on this machine divided by their time; None if the limits were not
    measured."""
    expert_imbalance: list[float] = dataclasses.field(default_factory=list)
    """Per layer of experts, tokens of its busiest expert divided by the mean, lately, as read at most a second ago;
    empty where experts are not counted."""

    def only_counters(self) -> EngineStats:
        """The counters without the state, for an engine that has ended."""
        kept = EngineStats(**{name: getattr(self, name) for name in _COUNTERS})
        kept.accepted_at = list(self.accepted_at)
        return kept


def merge_stats(all_: Sequence[EngineStats]) -> EngineStats:
    """State of several engines as one: counters, requests, blocks and limits are sums.

    ``step_tokens`` is 0, because no step belongs to all of them.
    """
    sums = map(sum, zip(*map(_summed_of, all_), strict=True))
    fields: dict[str, Any] = dict(zip(_SUMMED, sums, strict=False))  # without engines there are no sums: all are 0
    total = EngineStats(**fields)
    total.preemption_rate = max((each.preemption_rate for each in all_), default=0.0)
    total.tenant_gap = max((each.tenant_gap for each in all_), default=0.0)
    total.watermark = max((each.watermark for each in all_), default=0.0)
    total.max_loras = max((each.max_loras for each in all_), default=0)
    layers = itertools.zip_longest(*(each.expert_imbalance for each in all_), fillvalue=1.0)
    total.expert_imbalance = [max(layer) for layer in layers]
    total.floor_share = min((each.floor_share for each in all_ if each.floor_share is not None), default=None)
    for each in all_:
        total.accepted_at = [
            sum(two) for two in itertools.zip_longest(total.accepted_at, each.accepted_at, fillvalue=0)
        ]
        for name, rows in each.rows_by_class.items():
            total.rows_by_class[name] = total.rows_by_class.get(name, 0) + rows
    for field in ("running_adapters", "waiting_adapters"):
        setattr(total, field, list(dict.fromkeys(name for each in all_ for name in getattr(each, field))))
    return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One replica of a fleet as the door sees it."""

    index: int
    pid: int | None
    """Its process; None while there is none."""
    state: str
    """``loading``, ``ready``, ``draining`` or ``down``."""
    unstarted: int
    """Requests sent there that have no token yet, and the next ones those that have."""
    started: int
    unstarted_tokens: int
    """Prompt tokens that the replica has yet to compute, without those expected in its prefix cache."""
    kv_cache_usage: float
    """Share of its KV cache that requests hold, 0 to 1."""
    sent: int
    """Requests sent to it since the server started."""
    restarts: int


@dataclasses.dataclass(slots=True, kw_only=True)
class FinishedRequest:
    """One request that has left, for any reason. Times in seconds."""

    reason: str
    """stop, length, abort, error or deadline."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    generation_tokens: int
    """Delivered tokens, summed over the ``n`` answers."""
    n: int
    max_tokens: int | None
    num_preemptions: int
    e2e_seconds: float
    queue_seconds: float | None
    """Time from arrival to the first step; None without a step. So are the next two."""
    prefill_seconds: float | None
    """Time from the first step to the first token."""
    decode_seconds: float | None
    """Time from the first token to the end."""
    service_class: str = "default"
    promised: bool = False
    """Whether it had a deadline of any kind."""
    misses: tuple[str, ...] = ()
    """Kinds of deadlines that it missed, from :data:`DEADLINE_KINDS`."""

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first; None if there is none."""
        if self.decode_seconds is None or self.generation_tokens <= self.n:
            return None
        return self.decode_seconds * self.n / (self.generation_tokens - self.n)


class RequestStats:
    """All counters of requests since the start. Not thread-safe: the event loop owns it."""

    def __init__(self) -> None:
        self.engine = EngineStats()
        """The newest state, with counters summed over restarts of the engine."""
        self.num_restarts = 0
        self.batch_requests: Counter[str] = Counter()
        """Requests of batches that were answered, by :data:`BATCH_OUTCOMES`."""
        self.num_lost = 0
        """Requests that died with the engine."""
        self.last_token_time: float | None = None
        """``time.monotonic()`` of the newest token delivered."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.overrun_tokens = 0
        """Tokens computed after a stop string or a cancellation, and dropped."""
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """Refused requests by reason: queue_requests, queue_tokens, queue_timeout, forecast, logprobs, draining,
        unavailable, connections."""
        self.responses: Counter[str] = Counter()
        """Responses by HTTP status, for all paths. A stream that breaks off counts as 200."""
        self.classes: Counter[str] = Counter()
        """Ended requests by class of service."""
        self.with_deadline: Counter[str] = Counter()
        """Ended requests with a deadline by class: answered, dropped, or cut off after a missed deadline."""
        self.within_deadline: Counter[str] = Counter()
        """Ended requests that kept all their deadlines, by class (goodput)."""
        self.deadline_misses: Counter[tuple[str, str]] = Counter()
        """Missed deadlines by (class, kind)."""
        self.cause_seconds = dict.fromkeys(CAUSES, 0.0)
        """Seconds by cause of all answers that have ended."""
        self.ttft = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e, self.queue, self.inference, self.prefill, self.decode = (Histogram(LATENCY_BUCKETS) for _ in range(5))
        self.request_prompt_tokens = Histogram(COUNT_BUCKETS)
        self.request_generation_tokens = Histogram(COUNT_BUCKETS)
        self.request_max_tokens = Histogram(COUNT_BUCKETS)
        self.request_n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.request_preemptions = Histogram((0.0, 1.0, 2.0, 4.0, 8.0))
        self.step_tokens = Histogram(COUNT_BUCKETS[:15])
        self.forecast_error = Histogram(LATENCY_BUCKETS)
        """Differences in seconds between predicted and actual waits."""
        self._base = EngineStats()

    def step(self, stats: EngineStats) -> None:
        """Take the engine's state after a step."""
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
        for name in _COUNTERS:
            setattr(stats, name, getattr(stats, name) + getattr(self._base, name))
        places = itertools.zip_longest(stats.accepted_at, self._base.accepted_at, fillvalue=0)
        stats.accepted_at = [now + before for now, before in places]
        self.engine = stats

    def connection_refused(self, status: int) -> None:
        """Count a refused connection: no valid HTTP request, or too many connections (503)."""
        self.responses[str(status)] += 1
        self.rejected.update(("connections",) if status == 503 else ())

    def engine_died(self, num_requests: int = 0) -> None:
        """Reset the state after the engine's death, which lost ``num_requests``. A new process counts from 0."""
        self.num_lost += num_requests
        self._base = self.engine
        self.engine = self._base.only_counters()

    def prompt_computed(self, num_tokens: int, num_cached: int) -> None:
        """Count the prompt of a request with its first token, so that rates are smooth."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached

    def first_token(self, seconds: float, now: float) -> None:
        """Count the first token of an answer, ``seconds`` after its request arrived."""
        self.ttft.observe(seconds)
        self.generation_tokens += 1
        self.last_token_time = now

    def next_tokens(self, seconds: float, count: int, now: float) -> None:
        """Count ``count`` tokens of one answer, ``seconds`` after the earlier ones."""
        self.inter_token.observe(seconds / count, count)
        self.generation_tokens += count
        self.last_token_time = now

    def charge(self, causes: Mapping[str, float]) -> None:
        """Add the seconds by cause of an answer that has ended, or a part of them."""
        for cause in CAUSES:
            self.cause_seconds[cause] += causes.get(cause, 0.0)

    def request_finished(self, request: FinishedRequest) -> None:
        self.finished[request.reason] += 1
        self.classes[request.service_class] += 1
        self.deadline_misses.update((request.service_class, kind) for kind in request.misses)
        if request.promised and (request.misses or request.reason in ("stop", "length", "deadline")):
            self.with_deadline[request.service_class] += 1
            self.within_deadline[request.service_class] += not request.misses
        self.e2e.observe(request.e2e_seconds)
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(request.generation_tokens)
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
    if field.name.startswith(("num_", "prefix_", "grammar_")) and field.name not in ("num_running", "num_waiting")
)
_SUMMED = (
    *_COUNTERS,
    *("num_running", "num_waiting", "used_blocks", "cached_blocks", "free_blocks", "running_limit", "token_budget"),
)
_summed_of = operator.attrgetter(*_SUMMED)
