"""Scheduler and executor in one loop, with token ids in and out: the engine without text.

It runs in the caller's process under :class:`~chairlift.engine.engine.Engine`, or in its own process under
:class:`~chairlift.engine.core_process.CoreProcess`. Its inputs and outputs are plain data in both cases.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.config import CacheConfig, SchedulerConfig
from chairlift.engine.adapters import Adapters
from chairlift.engine.causes import CauseLedger, DecodeSeconds
from chairlift.engine.clock import Clock, SystemClock
from chairlift.engine.estimates import estimator_from
from chairlift.engine.events import Events
from chairlift.engine.expert_load import ExpertLoad
from chairlift.engine.floor_share import FloorShare
from chairlift.engine.grammars import Grammars, HeldPlace
from chairlift.engine.images import Images
from chairlift.engine.info import check_update
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.step_log import StepLog, StepRecord
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.executor import Executor, LiveWeights, OnProgress, PendingTokens, WeightSource
from chairlift.kv_cache.manager import KVCacheManager
from chairlift.metrics.stats import EngineStats
from chairlift.outputs import FinishReason
from chairlift.request import Request
from chairlift.sampling.failures import output_reason
from chairlift.scheduler.answer_lengths import AnswerLengths
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.costs import Costs
from chairlift.scheduler.fairness import VirtualTokenCounters
from chairlift.scheduler.governor_loop import governor_from_config
from chairlift.scheduler.membership import membership_from_name
from chairlift.scheduler.output import FAILED_ROW, SchedulerOutput, StepResult
from chairlift.scheduler.policies import policy_from_config
from chairlift.scheduler.policy import Policy
from chairlift.scheduler.preemption import PreemptionMode
from chairlift.scheduler.prefill_mode import prefill_mode_from_name
from chairlift.scheduler.scheduler import Scheduler
from chairlift.spec_decode.adaptive import speculator_from_config
from chairlift.step_batch import Masks, SampledTokens

if TYPE_CHECKING:
    from chairlift.engine.step_recorder import StepRecorder

__all__ = ["CoreOutputs", "EngineClient", "EngineCore", "FinishedSequence", "Progress", "TokenRecord"]

_log = logging.getLogger(__name__)
_SHARES_SECONDS = 1.0
_LOOK_AHEAD = 8
"""Number of waiting requests that are tried when the first does not fit. Each try looks at the request's blocks."""
_MAX_TIMES_PASSED = 16
"""A waiting request that was passed this often is not passed again, so that large requests start."""
_MAX_PREEMPTIONS = 8
"""A request that was preempted this often resumes only with all blocks it may ever need, so that it ends."""
_UNREADY_PAUSE = 0.001
"""Seconds between two checks for compiled grammars and adapters in memory while the loop is otherwise idle."""
_FAILED = (FinishReason.ERROR, FinishReason.DEADLINE)
_TOO_LATE = "the request could not be answered by its deadline"
_NO_ERRORS: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRecord:
    """Log-probabilities at one position: the token there, then the most likely tokens, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry, the chosen token."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that has left the engine and may be delivered."""

    sequence_id: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    error: str | None = None
    causes: dict[str, float] | None = None
    """Seconds from arrival to end, by cause; None where the core did not end it."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Ids of the sequences that preempted it: at most the last three, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Intervals (from, until) in which it was preempted, on the core's clock: at most the last eight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sequence whose next token takes several steps: a long prefill, or a recompute after preemption."""

    sequence_id: str
    num_output_tokens: int
    """Output tokens when this record was made. A sequence with more tokens makes the record out of date."""
    num_computed: int
    """Leading positions of prompt and answer whose KV is computed."""
    preempted: bool
    seconds_left: float | None = None
    """Forecast of the seconds until its next token, if later steps are like this one; None while it pauses."""


@dataclasses.dataclass(slots=True)
class CoreOutputs:
    """Results of one or more steps. Entries i of ``sequence_ids``, ``token_ids`` and ``logprobs`` belong together."""

    sequence_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenRecord | None] | None = None
    """None when no request asked for log-probabilities."""
    joined: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    """(sequence, prompt tokens found in the prefix cache, time) of each sequence in its first step."""
    prompt_logprobs: list[tuple[str, int, list[TokenRecord]]] = dataclasses.field(default_factory=list)
    """(sequence, first position, one record per position). A recompute may repeat earlier records."""
    finished: list[FinishedSequence] = dataclasses.field(default_factory=list)
    decoding: list[tuple[str, dict[str, float], DecodeSeconds]] = dataclasses.field(default_factory=list)
    """See :attr:`CauseLedger.decoding`."""
    decode_seconds: DecodeSeconds = (0.0, 0.0, 0.0)
    """The ledger's totals when the tokens were known."""
    progress: list[Progress] = dataclasses.field(default_factory=list)
    """Only sequences with news other than a token."""
    predicted: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    """(sequence, accepted drafts, rejected drafts) so far, of drafts from its expected text, where they changed."""

    def merge(self, later: CoreOutputs) -> None:
        """Append later results to these, because these could not be sent yet."""
        if self.logprobs is not None or later.logprobs is not None:
            mine = self.logprobs or [None] * len(self.token_ids)
            self.logprobs = mine + (later.logprobs or [None] * len(later.token_ids))
        self.sequence_ids += later.sequence_ids
        self.token_ids += later.token_ids
        self.joined += later.joined
        self.prompt_logprobs += later.prompt_logprobs
        self.finished += later.finished
        self.decoding += later.decoding
        self.progress += later.progress
        self.predicted += later.predicted
        self.decode_seconds = max(self.decode_seconds, later.decode_seconds)


@dataclasses.dataclass(slots=True)
class _Flight:
    """A launched step."""

    out: SchedulerOutput
    pending: PendingTokens | Exception
    start: float
    grammars: Sequence[HeldPlace]
    """Places at which requests with a grammar sample."""
    known: SampledTokens | None = None

    def tokens(self) -> SampledTokens:
        """Wait for the sampled tokens. Raises the step's error."""
        if self.known is None:
            if isinstance(self.pending, Exception):
                raise self.pending
            self.known = self.pending.result()
        return self.known


class EngineClient(Protocol):
    """Interface between the front (text, checks, HTTP) and a core. The core may run in another process.

    Results of steps do not come through this interface. :meth:`EngineCore.step` returns them in this process; another
    process sends them as frames.
    """

    def add(self, request: PreparedRequest) -> None:
        """Queue a request. A refusal is a RequestError, at once or as the request's only outcome."""
        ...

    def abort(self, sequence_ids: Sequence[str]) -> Any:
        """End sequences in any state, without an output, because their caller has left. Unknown ids are ignored."""
        ...

    def stop(self, sequence_ids: Sequence[str]) -> Any:
        """End sequences whose text has ended with a stop string. Unknown ids are ignored."""
        ...


def _kv_cache(executor: Executor, config: SchedulerConfig, cache: CacheConfig, secret: bytes) -> KVCacheManager:
    return KVCacheManager(
        executor.cache_groups,
        executor.block_size,
        max_step_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=cache.enable_prefix_caching,
        prefix_offload=cache.prefix_offload,
        secret=secret,
    )


class EngineCore(EngineClient):
    """Requests in, tokens out, one step at a time. Not thread-safe: one thread owns it.

    With a look-ahead depth of d, up to d steps are scheduled and launched beyond the newest known tokens.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        cache: CacheConfig | None = None,
        cache_secret: bytes = b"",
        clock: Clock | None = None,
        policy: Policy | None = None,
        kv: KVCacheManager | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters, self.grammars = adapters or Adapters(), Grammars(None) if grammars is None else grammars
        self.clock: Clock = clock or SystemClock()
        self.images = Images(getattr(executor, "images", None), self.clock)
        self.kv = kv or _kv_cache(executor, config, cache or CacheConfig(), cache_secret)
        self.costs = Costs(executor.block_bytes, max_step_tokens=config.max_num_batched_tokens)
        self.answer_lengths = AnswerLengths()
        has_states = any(group.state_span is not None for group in executor.cache_groups)
        drafting = executor.num_lookahead_steps, has_states, self.grammars, getattr(executor, "drafter", None)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy or policy_from_config(config, estimator_from(self.costs, self.answer_lengths, self.kv)),
            prefill_mode=prefill_mode_from_name(config.prefill_mode, self.costs, config.max_num_batched_tokens),
            membership=membership_from_name(config.batching, config.batch_wait_ms, config.batch_sizes),
            watermark=config.admission_watermark,
            look_ahead=_LOOK_AHEAD,
            max_times_passed=_MAX_TIMES_PASSED,
            max_preemptions=_MAX_PREEMPTIONS,
            preemption=PreemptionMode(config.preemption_mode, self.costs),
            costs=self.costs,
            policy_share=config.policy_share,
            drop_late=config.late_requests == "drop",
            speculator=speculator_from_config(config, self.costs, *drafting),
            guide=self.grammars,
            max_loras=self.adapters.max_loras,
        )
        self.governor = governor_from_config(config, self.scheduler, self.costs, self.clock.now())
        self.causes = CauseLedger(self.costs.model, self.clock.now())
        self.step_log = StepLog()
        self.events = Events("added", "scheduled", "landed", "ended")
        self.events.subscribe("the step log", self.step_log)
        self.masks_of: Callable[[SchedulerOutput], Masks | None] | None = None
        """Function that returns the masks of a step, called while the model computes it; None where no request has a
        mask. It does not know the tokens of steps in flight."""
        self.floor: FloorShare | None = None
        """Measures how near steps come to the limits of this machine; None where the limits were not measured."""
        self.config, self.executor = config, executor
        self.weight_version = 0
        asked = config.num_lookahead_steps
        self.num_lookahead_steps = executor.num_lookahead_steps if asked is None else asked
        counts = getattr(executor, "expert_counts", None)
        self.expert_load = None if counts is None else ExpertLoad(counts)
        """Tokens per expert of the last steps; None where nothing counts them."""
        self._begin_books()

    def _begin_books(self) -> None:
        """Initialise the records of the core's steps."""
        self._joined: list[tuple[str, int, float]] = []
        self._progress: list[Progress] = []
        self._flights: deque[_Flight] = deque()
        self._landed_at = self._tenant_gap = 0.0
        self._counted = EngineStats()
        self._reserved = [name for name, each in (self.config.promises or {}).items() if each.min_seqs]
        self._shares_noted = -math.inf
        self._rows_by_class, self._adapters_in_use = dict[str, int](), self.adapters.in_use(())

    @property
    def num_in_flight(self) -> int:
        """Steps launched whose tokens have not been taken yet."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, any step is in flight, or any adapter is being read."""
        return bool(self._flights) or self.scheduler.has_unfinished or self.adapters.is_reading

    def add(self, request: PreparedRequest) -> None:
        """Queue all answers of a request, or none. Raises RequestError, and any error of the scheduler."""
        sequences, now = request.make_sequences(), self.clock.now()
        asked = request.params.structured_outputs
        if request.adapter_id:
            self.adapters.add(sequences, request.adapter_id)
        try:
            if request.image_spans:
                self.images.add(sequences, request.image_tiles)
            if asked is not None:
                self.grammars.add(sequences, asked.value)
            elif request.params.thinking is not None:
                self.grammars.limit(sequences, request.params.thinking)
            for sequence in sequences:
                self.scheduler.add(sequence)
            for sequence in sequences:
                self.causes.added(sequence, now)
        except Exception:
            for sequence in sequences:
                self.adapters.forget(sequence)
                self.images.forget(sequence)
                if self.scheduler.requests.get(sequence.request_id) is sequence:
                    self.scheduler.abort(sequence.request_id)
                    self.causes.ended(sequence, now)
                    self.grammars.forget(sequence.request_id)
            raise
        for sequence in sequences:
            self.events.tell("added", sequence)

    def abort(self, sequence_ids: Sequence[str]) -> list[FinishedSequence]:
        """End sequences in any state. Returns sequences that leave with them: finished members of a static batch."""
        return self._end(sequence_ids, FinishReason.ABORT)

    def stop(self, sequence_ids: Sequence[str]) -> list[FinishedSequence]:
        """End sequences because of their text. Returns the sequences that leave now; in a static batch these may be
        none or several."""
        return self._end(sequence_ids, FinishReason.STOP)

    def fail(self, sequence_id: str, reason: str) -> list[FinishedSequence]:
        """End a sequence whose output cannot be made or sent, with the ``reason``. Returns the sequences that leave
        now."""
        return self._end([sequence_id], FinishReason.ERROR, reason)

    def step(self) -> CoreOutputs | None:
        """Schedule and launch a step, then wait for the oldest step in flight. None when no step had to be waited
        for."""
        if self.images.is_encoding:
            self.images.work(self._decode_seconds())
        now = self.clock.now()
        if self.governor is not None:
            self.governor.govern(now)
        ended = self._take_ready(now)
        out = self.scheduler.schedule(now)
        self.causes.scheduled(out, now)
        self.events.tell("scheduled", out, now)
        for name in out.preempted_for:
            if (request := self.scheduler.requests.get(name)) is not None:
                self._progress.append(Progress(name, request.num_output_tokens, request.num_computed_tokens, True))
        if out.num_tokens:
            self._launch(out, now)
        outputs = None
        depth = 0 if self.scheduler.drafts is not None else self.num_lookahead_steps
        if self._flights and (len(self._flights) > depth or not out.num_tokens):
            outputs = self._land()
        if self.scheduler.dropped:
            ended += self._finished(self.scheduler.dropped, self.clock.now(), _TOO_LATE)
            self.scheduler.dropped = []
        if ended:
            if outputs is None:  # a dropped request may be part of a step in flight
                outputs, self._joined = CoreOutputs(joined=self._joined), []
            outputs.finished += ended
        return outputs

    def _decode_seconds(self) -> float | None:
        """Seconds of a decode step of the running requests, by the cost model; None if no request runs."""
        running = self.scheduler.running.values()
        if not running:
            return None
        context = sum(request.num_computed_tokens for request in running)
        return self.costs.model.step_seconds(StepFeatures(len(running), context))

    def _take_ready(self, now: float) -> list[FinishedSequence]:
        """Add requests to the waiting queue whose grammar is now compiled, whose adapter is now in memory and whose
        images are now encoded. End requests for which one of these failed."""
        ended: list[FinishedSequence] = []
        if not (self.scheduler.batch.unready or self.grammars.is_compiling or self.adapters.is_reading):
            return ended
        sources = self.grammars, self.adapters, self.images
        for source in sources:
            ready, failed = source.take_ready()
            for request in ready:
                if not any(each.waits(request) for each in sources):
                    self.scheduler.ready(request, now)
            for request, reason in failed:
                ended += self._end([request.request_id], FinishReason.ERROR, reason)
        return ended

    def land(self) -> CoreOutputs | None:
        """Wait for the oldest step in flight, without launching another. None when no step is in flight."""
        return self._land() if self._flights else None

    def update_weights(
        self, source: WeightSource, version: int, in_flight: str, progress: OnProgress | None = None
    ) -> None:
        """Replace the model's weights. No step may be in flight.

        With ``in_flight="recompute"`` running requests start again. ``progress`` and the errors are those of
        :class:`~chairlift.executor.executor.LiveWeights`.
        """
        check_update(version, self.weight_version, in_flight)
        recompute = in_flight == "recompute"
        if self._flights:
            raise InvariantError(f"weights were to be replaced under {len(self._flights)} steps in flight")
        if not isinstance(self.executor, LiveWeights):
            raise ConfigError(f"{type(self.executor).__name__} cannot replace the weights of its model")
        if recompute and self.scheduler.membership.held:
            raise ConfigError(
                "a static batch stays together to its end; use in_flight='continue', or batching='continuous'"
            )
        self.executor.update_weights(source, progress)
        self.scheduler.weights_changed(recompute=recompute)
        self.weight_version = version

    @property
    def recorder(self) -> StepRecorder | None:
        """The recorder; None unless :meth:`watch` was called."""
        return self.events.subscribers.get("the record of steps")

    def watch(self, wanted: bool) -> None:
        """Start or stop recording every event in :attr:`recorder`. A repeated call changes nothing."""
        recorder = self.recorder
        if wanted and recorder is None:
            # needs msgspec, which an engine without a server does not need
            from chairlift.engine.step_recorder import StepRecorder

            StepRecorder(self)
        elif not wanted and recorder is not None:
            recorder.close()

    def next_event(self) -> float | None:
        """Time at which :meth:`step` has work even if no request comes or leaves; None if there is no such time."""
        now = self.clock.now()
        when = now if self._flights else self.scheduler.next_event(now)
        if self.images.is_encoding:
            return now
        if self.scheduler.batch.unready or self.adapters.is_reading:
            when = now + _UNREADY_PAUSE if when is None else min(when, now + _UNREADY_PAUSE)
        return when

    def stats(self) -> EngineStats:
        """Statistics after the newest step. The shares of requests and tenants are at most a second old."""
        self._note_shares()
        if self.expert_load is not None:
            self.expert_load.read(self.clock.now())
        scheduler, counts = self.scheduler, self.kv.counts()
        rate = scheduler.preemption_rate
        stats = dataclasses.replace(
            self._counted,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.batch.unready),
            used_blocks=counts.used,
            cached_blocks=counts.cached,
            free_blocks=counts.free,
            num_steps=scheduler.step,
            num_preemptions=scheduler.num_preemptions,
            num_finished_sequences=rate.num_finished,
            num_preempted_sequences=rate.num_preempted,
            preemption_rate=rate.recent(self.clock.now()),
            num_swap_preemptions=scheduler.preemptor.num_swaps,
            num_tail_preemptions=scheduler.preemptor.num_tails,
            num_offloaded_blocks=self.kv.num_offloaded,
            **self._draft_counts(),
            **self._adapter_counts(),
            **self._grammar_counts(),
            num_brought_back_blocks=self.kv.num_brought_back,
            num_late_dropped=scheduler.num_past_deadline if scheduler.drop_late else 0,
            num_late_downgraded=0 if scheduler.drop_late else scheduler.num_past_deadline,
            rows_by_class=self._rows_by_class,
            tenant_gap=self._tenant_gap,
            running_limit=scheduler.batch.running_limit,
            token_budget=scheduler.batch.token_budget,
            watermark=scheduler.batch.watermark,
            num_governor_decisions=0 if self.governor is None else self.governor.num_decisions,
            floor_share=None if self.floor is None else self.floor.share,
            expert_imbalance=[] if self.expert_load is None else self.expert_load.imbalance,
        )
        return stats

    def _draft_counts(self) -> dict[str, Any]:
        drafts = self.scheduler.drafts
        if drafts is None:
            return {}
        return {
            "num_verified_rows": drafts.num_verified,
            "num_draft_tokens": drafts.num_drafts,
            "num_accepted_tokens": drafts.num_accepted,
            "accepted_at": drafts.accepted_at,
        }

    def _adapter_counts(self) -> dict[str, Any]:
        adapters = self.adapters
        if not adapters.max_loras:
            return {}
        return {
            "max_loras": adapters.max_loras,
            "running_adapters": self._adapters_in_use[0],
            "waiting_adapters": self._adapters_in_use[1],
            "num_adapter_reads": adapters.num_reads,
            "num_adapter_hits": adapters.num_hits,
            "num_adapter_evictions": adapters.num_evictions,
        }

    def _grammar_counts(self) -> dict[str, Any]:
        grammars = self.grammars
        return {
            "num_grammars_compiled": grammars.num_compiled,
            "num_grammar_hits": grammars.num_hits,
            "num_grammars_failed": grammars.num_failed,
            "grammar_compile_seconds": grammars.compile_seconds,
            "num_thinking_limited": grammars.num_limited,
            "num_thinking_ended": grammars.num_ended_thinking,
        }

    def _note_shares(self) -> None:
        """Sum up the shares of all running requests and tenants. This is not done in every step, to keep steady
        decoding cheap."""
        now, running = self.clock.now(), self.scheduler.running
        if running and now < self._shares_noted + _SHARES_SECONDS:
            return
        self._shares_noted = now if running else -math.inf
        if self._reserved:
            rows = Counter(request.service.service_class for request in running.values())
            self._rows_by_class = {name: rows[name] for name in self._reserved}
        if self.adapters.max_loras:
            self._adapters_in_use = self.adapters.in_use(self.scheduler.batch.adapters)
        counters = getattr(self.scheduler.policy, "counters", None)
        if isinstance(counters, VirtualTokenCounters):
            service = [counters[tenant] for tenant in counters.active()]
            self._tenant_gap = max(service, default=0.0) - min(service, default=0.0)

    def shutdown(self) -> None:
        """End every request without an output, and free the executor."""
        for sequence_id in list(self.scheduler.requests):
            self.scheduler.abort(sequence_id)
        self._flights.clear()
        self.grammars.shutdown()
        self.adapters.shutdown()
        self.images.shutdown()
        self.executor.shutdown()

    def _end(
        self, sequence_ids: Sequence[str], reason: FinishReason, error: str | None = None
    ) -> list[FinishedSequence]:
        now = self.clock.now()
        ended: list[Request] = []
        for sequence_id in sequence_ids:
            ended += self.scheduler.finish(sequence_id, reason, None, now)
        return self._finished(ended, now, error)

    def _launch(self, out: SchedulerOutput, now: float) -> None:
        for row in out.joined:
            request = self.scheduler.running[row.request_id]
            if not request.was_preempted:
                self._joined.append((row.request_id, request.num_cached_tokens, now))
                if request.source is None:
                    self._counted.prefix_cache_queries += row.num_prompt_tokens
                    self._counted.prefix_cache_hits += request.num_cached_tokens
        if not self._flights:
            self.causes.began(out, self.clock.now())
        rows = self.grammars.rows_of(out)
        # Without steps in flight all tokens are known, so masks can be filled while the model runs. The tokens of steps
        # in flight are known only when those steps end, and the model does not wait for that.
        early = self.grammars.begin(rows, self._drawn) if rows and not self._flights else None
        try:
            try:
                handle = self.executor.execute(out)
            finally:
                if early is not None:
                    early.exception()
            masks = None if self.masks_of is None else self.masks_of(out)
            if rows:
                filled = (early or self.grammars.begin(rows, self._drawn)).result()
                masks = {**(masks or {}), **filled} or None
            pending: PendingTokens | Exception = self.executor.sample(handle, masks)
        except Exception as error:
            pending = error
        self._flights.append(_Flight(out, pending, now, rows))

    def _drawn(self, request: Request) -> list[int] | None:
        """Tokens that steps in flight have sampled for a request with a grammar, oldest first; None where a step
        failed."""
        drawn: list[int] = []
        for flight in self._flights:
            for place in flight.grammars:
                if place.row.request is request and request.resumed_at_step <= flight.out.step:
                    try:
                        drawn += place.right(flight.tokens().token_ids)
                    except Exception:  # its requests end when the step lands
                        return None
        return drawn

    def _land(self) -> CoreOutputs:
        """Wait for the oldest step in flight and collect its results."""
        flight = self._flights.popleft()
        out, start = flight.out, flight.start
        outputs, self._joined = CoreOutputs(joined=self._joined), []
        try:
            tokens = flight.tokens()
        except Exception as failure:
            _log.exception("step %d failed; its requests end with an error, the others go on", out.step)
            now = self._landed(out)
            result = self.scheduler.fail_step(out, now)
            outputs.finished = self._finished(result.finished, now, f"the step failed: {type(failure).__name__}")
        else:
            result = self._update(flight, tokens, outputs, self._landed(out))
            self._note_chunks(out)
        outputs.progress, self._progress = self._progress, []
        outputs.decode_seconds, outputs.decoding = self.causes.decode_seconds, self.causes.decoding
        self.causes.decoding = []
        end = self.clock.now()
        record = StepRecord.of(out, result, start, end)
        self.events.tell("landed", record)
        if self.governor is not None:
            self.governor.window.saw(out, result, end - max(start, self._landed_at), end)
        if result.sampled and self.costs.wants(out):
            # With look-ahead a step is scheduled early, but begins only when the step before has ended.
            self.costs.observe(record.features, end - max(start, self._landed_at), self.costs.num_copied(out))
        was_busy = out.num_decodes > 0 or len(out.chunks) > len(out.joined)
        if was_busy and not out.swap_out and not out.swap_in:
            self.costs.passed(record.features, end - max(start, self._landed_at), end - self._landed_at)
        if self.floor is not None:
            sampled = out.num_decodes + sum(chunk.samples for chunk in out.chunks)
            begin = self._landed_at if was_busy else max(start, self._landed_at)
            self.floor.landed(record.features, sampled, out.num_held, end - begin)
        self._landed_at, counted = end, self._counted
        counted.step_tokens = out.num_tokens
        counted.num_computed_tokens += out.num_tokens
        counted.num_recomputed_tokens += out.num_recomputed
        counted.num_swapped_out_blocks += len(out.swap_out)
        counted.num_swapped_in_blocks += len(out.swap_in)
        return outputs

    def _note_chunks(self, out: SchedulerOutput) -> None:
        """Note the progress of requests whose prefill continues in later steps."""
        size = sum(chunk.num_tokens for chunk in out.chunks)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            request = self.scheduler.running.get(name)
            if chunk.samples or request is None or request.num_computed_tokens < chunk.end:
                continue
            left = len(request.token_ids) - chunk.end
            each = min(left, size)
            step = StepFeatures(out.num_decodes, out.context_tokens, each, each * (chunk.end + left / 2))
            seconds = math.ceil(left / each) * self.costs.model.step_seconds(step)
            known, again = request.num_output_tokens, chunk.why != "prefill"
            self._progress.append(Progress(name, known, chunk.end, again, seconds))

    def _landed(self, out: SchedulerOutput) -> float:
        """Note that a step has landed and the next in flight begins. Returns the time."""
        now = self.clock.now()
        self.causes.landed(out, now)
        if self._flights:
            self.causes.began(self._flights[0].out, now)
        return now

    def _update(self, flight: _Flight, tokens: SampledTokens, outputs: CoreOutputs, now: float) -> StepResult:
        out = flight.out
        ended = self._take_prompt_logprobs(out, tokens, outputs, now)
        records = self._token_records(tokens)
        self.grammars.landed(flight.grammars, out.step, tokens)
        result = self.scheduler.update(out, tokens.token_ids, now)
        if (drafts := self.scheduler.drafts) is not None and drafts.predicted:
            for each in drafts.predicted:
                counts = each.num_accepted_predicted, each.num_rejected_predicted
                outputs.predicted.append((each.request_id, *counts))
            drafts.predicted.clear()
        complete = self._complete(flight, now)
        rows = [row for row, request in enumerate(result.sampled) if request is not None]
        rows = [row for row in rows if tokens.token_ids[row] != FAILED_ROW]
        outputs.sequence_ids = [result.sampled[row].request_id for row in rows]  # type: ignore[union-attr]
        outputs.token_ids = [tokens.token_ids[row] for row in rows]
        if records is not None:
            outputs.logprobs = [records[row] for row in rows]
        failed = ((result.sampled[row], reason) for row, reason in tokens.errors.items())
        errors = {request.request_id: reason for request, reason in failed if request is not None}
        outputs.finished = ended + self._finished([*result.finished, *complete], now, errors=errors)
        return result

    def _complete(self, flight: _Flight, now: float) -> list[Request]:
        """End answers after which the grammar allows no token. Returns the requests that leave now."""
        left: list[Request] = []
        for request in self.grammars.complete(flight.grammars):
            if request.finish_reason is FinishReason.LENGTH:  # the length limit cut nothing off
                request.finish_reason = FinishReason.STOP
            elif request.finish_reason is None:
                left += self.scheduler.finish(request.request_id, FinishReason.STOP, None, now)
        return left

    def _take_prompt_logprobs(
        self, out: SchedulerOutput, tokens: SampledTokens, outputs: CoreOutputs, now: float
    ) -> list[FinishedSequence]:
        """Add prompt log-probabilities to ``outputs``. A request without valid ones ends here, before it gets its
        token."""
        names = {chunk.slot: name for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)}
        ended: list[FinishedSequence] = []
        for report in tokens.prompt_logprobs:
            request = self.scheduler.running.get(names[report.slot])
            # The id may belong to a new request by now; results of the earlier request are not for it.
            if request is None or request.admitted_at_step > out.step:
                continue
            reason, name = report.error, request.request_id
            if not reason:
                try:
                    records = [_token_record(entry) for entry in report.entries]
                    outputs.prompt_logprobs.append((name, report.first, records))
                except Exception as error:
                    reason = output_reason(error)
            if reason:
                _log.error("sequence %s ends with an error: %s", name, reason)
                ended += self._finished(self.scheduler.finish(name, FinishReason.ERROR, None, now), now, reason)
        return ended

    @staticmethod
    def _token_records(tokens: SampledTokens) -> list[TokenRecord | None] | None:
        """One record per sampled row; None when no row asked for log-probabilities. A row without a valid record
        fails."""
        if tokens.logprobs is None:
            return None
        records: list[TokenRecord | None] = [None] * len(tokens.logprobs)
        for row, entry in enumerate(tokens.logprobs):
            if entry is None or tokens.token_ids[row] == FAILED_ROW:
                continue
            try:
                records[row] = _token_record(entry)
            except Exception as error:
                tokens.token_ids[row], tokens.errors[row] = FAILED_ROW, output_reason(error)
        return records

    def _finished(
        self, ended: Sequence[Request], now: float, error: str | None = None, errors: Mapping[str, str] = _NO_ERRORS
    ) -> list[FinishedSequence]:
        """Make the records of sequences that left at ``now``.

        ``error`` applies to all that failed; members of a static batch that had ended well leave with them, without it.
        ``errors`` applies to the sequences that it names.
        """
        for request in ended:
            self.answer_lengths.add(request)
            self.grammars.forget(request.request_id)
            self.adapters.forget(request)
            self.images.forget(request)
        charged = [(request, *self.causes.ended(request, now)) for request in ended]
        for request, causes, preempted_by, _ in charged:
            self.events.tell("ended", request, now, causes, preempted_by)
        return [
            FinishedSequence(
                request.request_id,
                request.finish_reason or FinishReason.ABORT,
                request.stop_reason,
                request.num_preemptions,
                errors.get(request.request_id, error if request.finish_reason in _FAILED else None),
                causes,
                preempted_by,
                preempted_during,
            )
            for request, causes, preempted_by, preempted_during in charged
        ]


def _token_record(entry: Any) -> TokenRecord:
    return TokenRecord(entry.token_ids.tolist(), entry.logprobs.tolist(), int(entry.rank))
