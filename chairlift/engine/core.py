"""Scheduler and executor in one loop, with token ids in and out: the engine without text.

It runs in the caller's process under :class:`~chairlift.engine.engine.Engine`, or in its own process under
:class:`~chairlift.engine.process.core_process.CoreProcess`. In both cases its inputs and outputs are plain data.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.base.outputs import FinishReason
from chairlift.base.row_failures import output_reason
from chairlift.base.step_batch import Masks, SampledTokens
from chairlift.config import CacheConfig, SchedulerConfig
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.governor_loop import governor_from_config
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput, StepResult
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.preemption import PreemptionMode
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.spec_decode.adaptive import speculator_from_config
from chairlift.engine.adapters import Adapters
from chairlift.engine.causes import CauseLedger, DecodeSeconds
from chairlift.engine.clock import Clock, SystemClock
from chairlift.engine.estimates import estimator_from
from chairlift.engine.events import Events
from chairlift.engine.expert_load import ExpertLoad
from chairlift.engine.floor_share import FloorShare
from chairlift.engine.grammars import LEAST_MASK_SECONDS, Grammars, SamplePlace
from chairlift.engine.images import BUSY_FRACTION, Images
from chairlift.engine.info import check_update
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.mask_work import Filling, Mask
from chairlift.engine.preparers import Preparer
from chairlift.engine.step_log import StepLog, StepRecord
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.executor import Executor, LiveWeights, OnProgress, PendingTokens, WeightSource
from chairlift.metrics.stats import EngineStats

if TYPE_CHECKING:
    from chairlift.engine.kv_events import KVEventPublisher
    from chairlift.engine.step_recorder import StepRecorder

__all__ = ["CoreOutputs", "EngineClient", "EngineCore", "FinishedSequence", "Progress", "TokenRecord"]

_log = logging.getLogger(__name__)
_SHARES_SECONDS = 1.0
_LOOK_AHEAD = 8
"""Number of further waiting requests to try when the first one does not fit. Each try reads the request's block
table."""
_MAX_TIMES_PASSED = 16
"""Later requests may pass a waiting request at most this often, so that large requests also start."""
_MAX_PREEMPTIONS = 8
"""A request that was preempted this often resumes only when it gets all blocks that it may ever need. So it is not
preempted again."""
_UNREADY_PAUSE = 0.001
"""Seconds between two checks for compiled grammars and loaded adapters while the loop has nothing else to do."""
_LEAST_IMAGE_TOKENS = 8
"""Minimum number of prompt tokens of images in a step without a turn of the encoder."""
_FAILED = (FinishReason.ERROR, FinishReason.DEADLINE)
_TOO_LATE = "the request could not be answered by its deadline"
_ROW_FAILED = "a step failed for this request"
_NO_ERRORS: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRecord:
    """Log-probabilities at one position: first the token at the position, then the most likely tokens, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry (the token at the position) among all tokens; 1 is the most likely."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that has ended; its output may be delivered."""

    sequence_id: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    error: str | None = None
    causes: dict[str, float] | None = None
    """Cause -> seconds, over the sequence's time from arrival to end; None if the core did not end the sequence."""
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    """Ids of the sequences that preempted this sequence: at most the last three, the newest at the end."""
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Intervals (from, until) in which the sequence was preempted, on the core's clock: at most the last eight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sequence whose next token needs several steps: a long prefill, or a recompute after preemption."""

    sequence_id: str
    num_output_tokens: int
    """Number of output tokens when this record was made. The record is outdated when the sequence has more output
    tokens."""
    num_computed: int
    """Number of leading positions of prompt and answer whose KV is computed."""
    preempted: bool
    seconds_left: float | None = None
    """Forecast of the seconds until the sequence's next token, assuming that later steps take as long as this step.
    None while the sequence pauses."""


@dataclasses.dataclass(slots=True)
class CoreOutputs:
    """Results of one or more steps. The entries with index i in ``sequence_ids``, ``token_ids`` and ``logprobs`` belong
    to the same token."""

    sequence_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenRecord | None] | None = None
    """One record or None per token; the list is None if no request asked for log-probabilities."""
    joined: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    """(sequence, number of prompt tokens found in the prefix cache, time) of each sequence in its first step."""
    prompt_logprobs: list[tuple[str, int, list[TokenRecord]]] = dataclasses.field(default_factory=list)
    """(sequence, first position, one record per position). After a recompute, earlier records may be repeated."""
    finished: list[FinishedSequence] = dataclasses.field(default_factory=list)
    decoding: list[tuple[str, dict[str, float], DecodeSeconds]] = dataclasses.field(default_factory=list)
    """Sequences with stop strings that began to decode: (id, cause -> seconds charged so far, totals of the cause
    ledger at that time)."""
    decode_seconds: DecodeSeconds = (0.0, 0.0, 0.0)
    """Totals of the cause ledger at the time when the step's tokens were known."""
    progress: list[Progress] = dataclasses.field(default_factory=list)
    """Progress of sequences that got no token, but made progress."""
    predicted: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    """(sequence, accepted drafts, rejected drafts): counts since the sequence began, for sequences with new results.
    Only drafts from the request's ``prediction`` are counted."""

    def merge(self, later: CoreOutputs) -> None:
        """Append the results of later steps to this object, because this object could not be sent yet."""
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
    """A step that was launched and whose tokens have not been collected."""

    out: SchedulerOutput
    start: float
    grammars: Sequence[SamplePlace]
    """Sample positions of requests that have a grammar or a thinking budget, without those of withdrawn requests."""
    mask_seconds: float = 0.0
    """Seconds for which the step waited for masks after the model had computed it."""
    pending: PendingTokens | Exception = dataclasses.field(default_factory=lambda: RuntimeError("not launched"))
    """The step's tokens, or the error with which it failed."""
    known: SampledTokens | None = None

    def tokens(self) -> SampledTokens:
        """Wait for the sampled tokens. Raises the error of the step, if it failed."""
        if self.known is None:
            if isinstance(self.pending, Exception):
                raise self.pending
            self.known = self.pending.result()
        return self.known


class EngineClient(Protocol):
    """Interface of a core for its front end (text, checks, HTTP). The core may run in another process.

    Results of steps do not pass through this interface: :meth:`EngineCore.step` returns them, or another process sends
    them as frames.
    """

    def add(self, request: PreparedRequest) -> None:
        """Queue a request. A refused request raises RequestError, or is reported as refused later."""
        ...

    def abort(self, sequence_ids: Sequence[str]) -> Any:
        """End sequences in any state without an output, because their caller has left. Unknown ids are ignored."""
        ...

    def stop(self, sequence_ids: Sequence[str]) -> Any:
        """End sequences whose text has reached a stop string. Unknown ids are ignored."""
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
    """Takes requests and returns tokens, one step at a time. Not thread-safe: only one thread may use it.

    With ``num_lookahead_steps`` d, up to d steps are scheduled and launched before the tokens of the previous step are
    known.
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
        cache = cache or CacheConfig()
        self.kv = kv or _kv_cache(executor, config, cache, cache_secret)
        self.costs = Costs(executor.block_bytes, max_step_tokens=config.max_num_batched_tokens)
        self.answer_lengths = AnswerLengths()
        self.grammars.made_ahead = has_states = any(group.state_span is not None for group in executor.cache_groups)
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
            kinds=[] if self.adapters.rows is None else [self.adapters.rows],
        )
        self.governor = governor_from_config(config, self.scheduler, self.costs, self.clock.now())
        self.causes = CauseLedger(self.costs.model, self.clock.now())
        self.masks_of: Callable[[SchedulerOutput], Masks | None] | None = None
        """Function that returns a step's masks of allowed tokens; called while the model computes the step. None if no
        request has a mask. When it is called, the tokens of steps in flight are not known."""
        self.floor: FloorShare | None = None
        """Compares step times with the limits of this machine; None if the limits were not measured."""
        self.config, self.executor, self.weight_version = config, executor, 0
        setting = config.num_lookahead_steps
        self.num_lookahead_steps = executor.num_lookahead_steps if setting is None else setting
        counts = getattr(executor, "expert_counts", None)
        self.expert_load = None if counts is None else ExpertLoad(counts)
        """Number of tokens per expert in the last steps; None for a model that does not count the tokens of its
        experts."""
        self._begin_books()
        self.images = self._images(cache.image_memory_bytes)
        self._kv_events = self._publish(cache.kv_events_endpoint)

    def _publish(self, endpoint: str | None) -> KVEventPublisher | None:
        """Publish the changes of the prefix cache on the address ``endpoint``; None: publish nothing. Raises
        ConfigError."""
        if endpoint is None or self.kv.prefix_cache is None:
            return None
        # Imported here because it needs msgspec, which an engine without a server does not need.
        from chairlift.engine.kv_events import KVEventPublisher

        publisher = KVEventPublisher(self.kv.prefix_cache, endpoint)
        self.events.subscribe("KV events", publisher)
        return publisher

    def _images(self, limit: int) -> Images:
        """The images of all requests, with at most ``limit`` bytes of encoded rows."""
        memory = getattr(self.executor, "images", None)
        known, seconds = self.scheduler.batch.num_known, self.costs.recompute_seconds
        return Images(memory, self.clock, limit=limit, num_known=known, compute_seconds=seconds)

    def _begin_books(self) -> None:
        """Initialise the core's records of its steps."""
        self.step_log = StepLog()
        self.events = Events("added", "scheduled", "landed", "ended")
        self.events.subscribe("the step log", self.step_log)
        self._joined: list[tuple[str, int, float]] = []
        self._progress: list[Progress] = []
        self._flights: deque[_Flight] = deque()
        self._landed_at = self._tenant_gap = self._drafted_seconds = 0.0
        self._counted = EngineStats()
        self._reserved = [name for name, each in (self.config.promises or {}).items() if each.min_seqs]
        self._shares_noted = -math.inf
        self._encoder_waits = False
        """Whether the encoder had no turn before the newest step, because the step had prompt tokens of images."""
        self._rows_by_class, self._adapters_in_use = dict[str, int](), self.adapters.in_use()

    @property
    def _preparers(self) -> Sequence[Preparer]:
        return self.grammars, self.adapters, self.images

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps whose tokens were not collected yet."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, any step is in flight, or any adapter is being read."""
        return bool(self._flights) or self.scheduler.has_unfinished or self.adapters.is_reading

    def add(self, request: PreparedRequest) -> None:
        """Queue all sequences of a request, or none of them. Raises RequestError, and any error of the scheduler."""
        sequences, now = request.make_sequences(), self.clock.now()
        setting = request.params.structured_outputs
        if request.adapter_id:
            self.adapters.add(sequences, request.adapter_id)
        try:
            if request.image_spans:
                self.images.add(sequences, request.image_tiles)
            if setting is not None:
                self.grammars.add(sequences, setting.value)
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
                    self.grammars.forget(sequence)
            raise
        for sequence in sequences:
            self.events.tell("added", sequence)

    def abort(self, sequence_ids: Sequence[str]) -> list[FinishedSequence]:
        """End sequences in any state. Returns the sequences that leave with them: in a static batch, members that have
        already ended."""
        return self._end(sequence_ids, FinishReason.ABORT)

    def stop(self, sequence_ids: Sequence[str]) -> list[FinishedSequence]:
        """End sequences whose text contains a stop string. Returns the sequences that leave now. In a static batch none
        or several may leave."""
        return self._end(sequence_ids, FinishReason.STOP)

    def fail(self, sequence_id: str, reason: str) -> list[FinishedSequence]:
        """End a sequence whose output cannot be made or sent; ``reason`` is the error message. Returns the sequences
        that leave now."""
        return self._end([sequence_id], FinishReason.ERROR, reason)

    def step(self) -> CoreOutputs | None:
        """Schedule and launch a step, then wait for the oldest step in flight. None if no step was waited for."""
        if self.images.is_used:
            self._work_on_images()
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
            if outputs is None:  # no step has ended, so make an empty result for the ended requests
                outputs, self._joined = CoreOutputs(joined=self._joined), []
            outputs.finished += ended
        return outputs

    def _drafting_seconds(self) -> float:
        """Seconds that making drafts took since the last call. Call this for every step: the drafter measures this
        time itself, so that it must not count as part of a step."""
        drafts = self.scheduler.drafts
        before, self._drafted_seconds = self._drafted_seconds, drafts.speculator.drafting_seconds if drafts else 0.0
        return max(0.0, self._drafted_seconds - before)

    def _decode_seconds(self) -> float | None:
        """Seconds that a decode step of the running requests takes, according to the cost model; None if no request
        runs."""
        batch = self.scheduler.batch
        if not batch.running:
            return None
        return self.costs.model.step_seconds(StepFeatures(len(batch.running), batch.num_computed_tokens))

    def _work_on_images(self) -> None:
        """Let the encoder compute, and limit the next step's prompt tokens of images, so that both together add at most
        a fraction of a decode step's time to the step. If both have work, they take turns."""
        seconds, batch = self._decode_seconds(), self.scheduler.batch
        for request in self.images.without_rows():
            if request in batch.waiting and batch.lacks_rows(request):
                batch.hold_back(request)
                self.images.encode_again(request)
        self.images.find_room()
        computes = any(r.images and r.num_computed_tokens < r.images[-1].end for r in batch.catching_up)
        self._encoder_waits = self.images.is_encoding and computes and seconds is not None and not self._encoder_waits
        start = self.clock.now()
        if self.images.is_encoding and not self._encoder_waits:
            self.images.work(seconds)
        batch.image_tokens = math.inf
        if seconds is not None and not self.scheduler.membership.closed:
            spent, rows = self.clock.now() - start, batch.decodes.count
            context, most = batch.num_computed_tokens, batch.max_tokens
            limit = (1 + BUSY_FRACTION) * self.costs.model.step_seconds(StepFeatures(rows, context)) - spent
            least = 0 if spent else _LEAST_IMAGE_TOKENS
            batch.image_tokens = self.costs.chunk_budget(rows, context, limit, most, least)

    def _take_ready(self, now: float) -> list[FinishedSequence]:
        """Queue the requests whose parts are all ready now. End the requests for which one of these failed. Returns
        the ended sequences."""
        ended: list[FinishedSequence] = []
        batch = self.scheduler.batch
        if not (batch.unready or batch.unready_rows or self.grammars.is_compiling or self.adapters.is_reading):
            return ended
        preparers = self._preparers
        for preparer in preparers:
            ready, failed = preparer.take_ready()
            for request in ready:
                if not any(each.waits(request) for each in preparers):
                    self.scheduler.ready(request, now)
            for request, reason in failed:
                ended += self._end([request.request_id], FinishReason.ERROR, reason)
        return ended

    def land(self) -> CoreOutputs | None:
        """Wait for the oldest step in flight, without launching another. None if no step is in flight."""
        return self._land() if self._flights else None

    def update_weights(
        self, source: WeightSource, version: int, in_flight: str, progress: OnProgress | None = None
    ) -> None:
        """Replace the model's weights. No step may be in flight.

        With ``in_flight="recompute"`` running requests compute their KV again. See
        :class:`~chairlift.executor.executor.LiveWeights` for ``progress`` and the errors.
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
        """The recorder of steps; None unless :meth:`watch` was called."""
        return self.events.subscribers.get("the record of steps")

    def watch(self, wanted: bool) -> None:
        """Start or stop to record all events in :attr:`recorder`. A repeated call changes nothing."""
        recorder = self.recorder
        if wanted and recorder is None:
            # Imported here because it needs msgspec, which an engine without a server does not need.
            from chairlift.engine.step_recorder import StepRecorder

            StepRecorder(self)
        elif not wanted and recorder is not None:
            recorder.close()

    def next_event(self) -> float | None:
        """Time at which :meth:`step` next has work if no request arrives or leaves before; None if there is no such
        time."""
        now = self.clock.now()
        when = now if self._flights else self.scheduler.next_event(now)
        if self.images.is_encoding:
            return now
        if self.scheduler.batch.unready or self.scheduler.batch.unready_rows or self.adapters.is_reading:
            when = now + _UNREADY_PAUSE if when is None else min(when, now + _UNREADY_PAUSE)
        return when

    def stats(self) -> EngineStats:
        """Statistics after the newest step. The numbers per class, adapter and tenant are at most one second old."""
        self._note_shares()
        if self.expert_load is not None:
            self.expert_load.read(self.clock.now())
        scheduler, counts = self.scheduler, self.kv.counts()
        rate = scheduler.preemption_rate
        stats = dataclasses.replace(
            self._counted,
            num_running=len(scheduler.running),
            num_waiting=scheduler.batch.num_waiting,
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
            **self.images.counts(),
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
        """Update three statistics: running requests per class of service, adapters in use, and the largest difference
        in service between tenants. They are not updated in every step, so that steady decoding stays cheap."""
        now, running = self.clock.now(), self.scheduler.running
        if running and now < self._shares_noted + _SHARES_SECONDS:
            return
        self._shares_noted = now if running else -math.inf
        if self._reserved:
            rows = Counter(request.service.service_class for request in running.values())
            self._rows_by_class = {name: rows[name] for name in self._reserved}
        if self.adapters.max_loras:
            self._adapters_in_use = self.adapters.in_use()
        counters = getattr(self.scheduler.policy, "counters", None)
        if isinstance(counters, VirtualTokenCounters):
            service = [counters[tenant] for tenant in counters.active()]
            self._tenant_gap = max(service, default=0.0) - min(service, default=0.0)

    def shutdown(self) -> None:
        """End every request without an output, and free the executor."""
        for sequence_id in list(self.scheduler.requests):
            self.scheduler.abort(sequence_id)
        self._flights.clear()
        for preparer in self._preparers:
            preparer.shutdown()
        if self._kv_events is not None:
            self._kv_events.close()
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
                    # Not the prompt alone: a request that continues on this replica looks up its delivered tokens too.
                    self._counted.prefix_cache_queries += len(request.token_ids)
                    self._counted.prefix_cache_hits += request.num_cached_tokens
        if not self._flights:
            self.causes.began(out, self.clock.now())
        rows = self.grammars.rows_of(out)
        # If no steps are in flight, all tokens are known, and the masks can be filled while the model runs. Otherwise
        # the newest tokens are known only when the steps in flight end, and the model does not wait for that.
        early = self.grammars.begin(rows, self._drawn) if rows and not self._flights else None
        flight = _Flight(out, now, rows)
        try:
            try:
                handle = self.executor.execute(out)
            except Exception:
                if early is not None:
                    self.grammars.masks_of(early, rows, None)
                raise
            masks = None if self.masks_of is None else self.masks_of(out)
            if rows:
                filled = self._grammar_masks(flight, early or self.grammars.begin(rows, self._drawn))
                masks = {**(masks or {}), **filled} or None
            flight.pending = self.executor.sample(handle, masks)
        except Exception as error:
            flight.pending = error
        self._flights.append(flight)

    def _grammar_masks(self, flight: _Flight, filling: Filling) -> dict[int, Mask]:
        """Masks of a step's rows with grammars, by sample position.

        Rows whose mask is late are withdrawn from the step. Rows whose next mask is expected to be slow leave the later
        steps, until their mask is made. The rows of a static batch compute every step together, so its steps wait for
        all masks. With recurrent states, which cannot go back, no row is withdrawn: a step waits for a mask that is
        slow although no mask before was.
        """
        begin, rows = self.clock.now(), flight.grammars
        held = self.scheduler.membership.held
        seconds = max(LEAST_MASK_SECONDS, self._decode_seconds() or 0.0)
        waits_for_all = held or self.grammars.made_ahead
        filled, late = self.grammars.masks_of(filling, rows, None if waits_for_all else seconds)
        flight.mask_seconds = self.clock.now() - begin
        if late:
            self.scheduler.withdraw(flight.out, late)
            flight.grammars = rows = [place for place in rows if place.row.request not in late]
        if not held:
            self._leave_slow([place for place in rows if not place.drafts], seconds)
        return filled

    def _leave_slow(self, rows: Sequence[SamplePlace], seconds: float) -> None:
        """Let no further step compute the rows whose next masks are not expected within ``seconds``, until these masks
        are made."""
        for place in self.grammars.slow(rows, seconds):
            self.scheduler.unready(place.row.request)
            place.row.waits = not place.row.request.is_ready

    def _make_masks(self, flight: _Flight) -> None:
        """After a step has ended, begin to make the masks for which its rows wait."""
        if not flight.grammars:
            return
        with_drafts = [place for place in flight.grammars if place.drafts]
        if with_drafts and not self._flights:
            alive = [place for place in with_drafts if place.row.request.decoding and place.row.job is None]
            self._leave_slow(alive, max(LEAST_MASK_SECONDS, self._decode_seconds() or 0.0))
        later = {id(place.row) for other in self._flights for place in other.grammars}
        for place in flight.grammars:
            if id(place.row) not in later:
                self.grammars.work_ahead(place.row)

    def _drawn(self, request: Request) -> list[int] | None:
        """Tokens that steps in flight have sampled for a request with a grammar, oldest first; None if one of the steps
        failed."""
        drawn: list[int] = []
        for flight in self._flights:
            for place in flight.grammars:
                if place.row.request is request and request.resumed_at_step <= flight.out.step:
                    try:
                        drawn += place.accepted(flight.tokens().token_ids)
                    except Exception:  # the step failed; its requests end when the step is collected
                        return None
        return drawn

    def _land(self) -> CoreOutputs:
        """Wait for the oldest step in flight and return its results."""
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
        self._make_masks(flight)
        outputs.progress, self._progress = self._progress, []
        outputs.decode_seconds, outputs.decoding = self.causes.decode_seconds, self.causes.decoding
        self.causes.decoding = []
        end, drafting = self.clock.now(), self._drafting_seconds()
        record = StepRecord.of(out, result, start, end, self.images.since_step())
        self.events.tell("landed", record)
        if self.governor is not None:
            self.governor.window.saw(out, result, end - max(start, self._landed_at), end)
        drafts = self.scheduler.drafts
        if result.sampled and (self.costs.wants(out) or (drafts is not None and drafts.measures())):
            # With look-ahead, a step is scheduled early, but begins only when the previous step has ended.
            own = end - max(start, self._landed_at) - drafting - flight.mask_seconds
            self.costs.observe(record.features, own, self.costs.num_copied(out))
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
        """Record the progress of requests whose prefill is not complete after this step."""
        size = sum(chunk.num_tokens for chunk in out.chunks)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            request = self.scheduler.running.get(name)
            if chunk.samples or request is None or request.num_computed_tokens < chunk.end:
                continue
            remaining = len(request.token_ids) - chunk.end
            each = min(remaining, size)
            context = each * (chunk.end + remaining / 2)
            step = StepFeatures(out.num_decodes, out.context_tokens, each, context, out.kind_bytes)
            seconds = math.ceil(remaining / each) * self.costs.model.step_seconds(step)
            known, again = request.num_output_tokens, chunk.why != "prefill"
            self._progress.append(Progress(name, known, chunk.end, again, seconds))

    def _landed(self, out: SchedulerOutput) -> float:
        """Note that a step has ended and the next step in flight begins. Returns the time now."""
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
        entries = enumerate(zip(result.sampled, tokens.token_ids, strict=True))
        rows = [row for row, (request, token) in entries if request is not None and token != FAILED_ROW]
        outputs.sequence_ids = [result.sampled[row].request_id for row in rows]  # type: ignore[union-attr]
        outputs.token_ids = [tokens.token_ids[row] for row in rows]
        if records is not None:
            outputs.logprobs = [records[row] for row in rows]
        failed = ((result.sampled[row], reason) for row, reason in tokens.errors.items())
        errors = {request.request_id: reason for request, reason in failed if request is not None}
        outputs.finished = ended + self._finished([*result.finished, *complete], now, _ROW_FAILED, errors)
        return result

    def _complete(self, flight: _Flight, now: float) -> list[Request]:
        """End answers after which the grammar allows no further token. Returns the requests that leave now."""
        leaving: list[Request] = []
        for request in self.grammars.complete(flight.grammars):
            if request.finish_reason is FinishReason.LENGTH:  # the answer was complete at the length limit
                request.finish_reason = FinishReason.STOP
            elif request.finish_reason is None:
                leaving += self.scheduler.finish(request.request_id, FinishReason.STOP, None, now)
        return leaving

    def _take_prompt_logprobs(
        self, out: SchedulerOutput, tokens: SampledTokens, outputs: CoreOutputs, now: float
    ) -> list[FinishedSequence]:
        """Add prompt log-probabilities to ``outputs``. A request with invalid log-probabilities ends here with an
        error, before it gets its token."""
        names = {chunk.slot: name for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)}
        ended: list[FinishedSequence] = []
        for report in tokens.prompt_logprobs:
            if report.error:
                failed = self.scheduler.fail_row(names[report.slot], out.step, now)
                ended += self._finished(failed, now, report.error)
                continue
            request = self.scheduler.running.get(names[report.slot])
            # The id may already belong to a new request. Results of the earlier request must not go to it.
            if request is None or request.admitted_at_step > out.step:
                continue
            name = request.request_id
            try:
                records = [_token_record(entry) for entry in report.entries]
                outputs.prompt_logprobs.append((name, report.first, records))
            except Exception as error:
                reason = output_reason(error)
                _log.error("sequence %s ends with an error: %s", name, reason)
                ended += self._finished(self.scheduler.finish(name, FinishReason.ERROR, None, now), now, reason)
        return ended

    @staticmethod
    def _token_records(tokens: SampledTokens) -> list[TokenRecord | None] | None:
        """One record per sampled row; the result is None if no row asked for log-probabilities. A row with an invalid
        record gets an error instead of its token."""
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
        """Make the records of sequences that ended at ``now``.

        ``error`` is the message for all failed sequences. (Members of a static batch that ended well leave together
        with them, without an error.) ``errors`` maps sequence ids to their own messages, which take precedence.
        """
        preparers = self._preparers
        for request in ended:
            self.answer_lengths.add(request)
            for preparer in preparers:
                preparer.forget(request)
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
