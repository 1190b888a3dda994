"""Scheduler and executor in one loop, with token ids in and out: the engine without text.

It runs in the caller's process under :class:`~chairlift.engine.engine.Engine`, or in its own process under
:class:`~chairlift.engine.process.core_process.CoreProcess`. In both cases its inputs and outputs are plain data.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.base.outputs import FinishReason
from chairlift.base.row_failures import output_reason
from chairlift.base.service_class import parse_tenant_weights
from chairlift.base.step_batch import SampledTokens
from chairlift.base.turn_cache import ResumedTurn
from chairlift.config import CacheConfig, SchedulerConfig
from chairlift.core.kv_cache.eviction.rules import eviction_from_config
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor_loop import governor_from_config
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput, StepResult
from chairlift.core.scheduler.policy import Policy
from chairlift.engine.causes import CauseLedger
from chairlift.engine.clock import POLL_SECONDS, Clock, SystemClock
from chairlift.engine.collective_share import CollectiveShare
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, Progress, TokenRecord
from chairlift.engine.core_scheduler import scheduler_from_config
from chairlift.engine.core_statistics import CoreStatistics
from chairlift.engine.events import Events
from chairlift.engine.expert_load import ExpertLoad
from chairlift.engine.flight import Flight
from chairlift.engine.info import check_update
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.preparers import Preparers
from chairlift.engine.step_log import StepLog, StepRecord
from chairlift.engine.step_masks import StepMasks
from chairlift.engine.step_times import CoreTimes
from chairlift.errors import ConfigError, EngineDeadError, InvariantError
from chairlift.executor.executor import Executor, LiveWeights, OnProgress, WeightSource
from chairlift.metrics.stats import EngineStats

if TYPE_CHECKING:
    from chairlift.engine.kv_events import KVEventPublisher
    from chairlift.engine.step_recorder import StepRecorder

__all__ = ["EngineClient", "EngineCore"]

_log = logging.getLogger(__name__)
_FAILED = (FinishReason.ERROR, FinishReason.DEADLINE)
_TOO_LATE = "the request could not be answered by its deadline"
_ROW_FAILED = "a step failed for this request"
_NO_ERRORS: Mapping[str, str] = {}


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

    def paused(self, sequence_id: str, tools: Sequence[str]) -> Any:
        """Note that the answer of a sequence that has ended calls these tools, so that its KV may be kept until they
        have run. Unknown ids are ignored."""
        ...


def _kv_cache(executor: Executor, config: SchedulerConfig, cache: CacheConfig, secret: bytes) -> KVCacheManager:
    return KVCacheManager(
        executor.cache_groups,
        executor.block_size,
        max_step_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=cache.enable_prefix_caching and bool(executor.cache_groups),
        prefix_offload=cache.prefix_offload,
        secret=secret,
        eviction=eviction_from_config(cache, config),
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
        preparers: Preparers | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        cache = cache or CacheConfig()
        self.kv = kv or _kv_cache(executor, config, cache, cache_secret)
        self.costs = Costs(executor.block_bytes, max_step_tokens=config.max_num_batched_tokens)
        prices = self.kv.eviction.prices
        costs = self.costs  # not the core, which would then be freed by the garbage collector only
        prices.compute_seconds = lambda num_tokens, begin: costs.model.prefill_seconds(num_tokens, begin)
        prices.tenant_weights = parse_tenant_weights(config.tenant_weights)
        self.answer_lengths = AnswerLengths()
        self.preparers = preparers or Preparers()
        self.scheduler = scheduler_from_config(
            config,
            executor,
            self.kv,
            self.costs,
            self.answer_lengths,
            self.preparers,
            max_model_len=max_model_len,
            policy=policy,
        )
        self.preparers.attach(executor, self.scheduler, self.costs, self.clock, cache)
        self.governor = governor_from_config(config, self.scheduler, self.costs, self.clock.now())
        self.causes = CauseLedger(self.costs.model, self.clock.now())
        self.config = config
        self.executor = executor
        self.weight_version = 0
        self.is_paused = False
        """Whether :meth:`step` starts no step. Steps in flight still end, and requests may be added and ended."""
        setting = config.num_lookahead_steps
        self.num_lookahead_steps = executor.num_lookahead_steps if setting is None else setting
        counts = getattr(executor, "expert_counts", None)
        self.expert_load = None if counts is None else ExpertLoad(counts)
        """Number of tokens per expert in the last steps; None for a model that does not count the tokens of its
        experts."""
        self._begin_books()
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

    def _begin_books(self) -> None:
        """Initialise the core's records of its steps."""
        self.step_log = StepLog()
        self.events = Events("added", "scheduled", "landed", "ended", "paused")
        self.events.subscribe("the step log", self.step_log)
        self.on_joined: Callable[[CoreOutputs], None] | None = None
        """Called before a step is computed, with the sequences that join in it; None: :meth:`step` returns them with
        the results of the step. For models whose requests live for one long step only."""
        self._joined: list[tuple[str, int, float]] = []
        self._fetched: list[tuple[str, int, int]] = []
        self._resumed: list[tuple[str, ResumedTurn]] = []
        self._progress: list[Progress] = []
        self._flights: deque[Flight] = deque()
        self.masks = StepMasks(self.preparers, self.scheduler, self.costs, self.clock, self._flights)
        self.times = CoreTimes(self.scheduler, self.costs, self.governor)
        waited: Callable[[], float] = getattr(self.executor, "collective_seconds", float)
        if getattr(self.executor, "heartbeat", None) is not None:
            self.times.collectives = CollectiveShare(waited)
        self._statistics = CoreStatistics(
            self.scheduler,
            self.preparers,
            self.times,
            self.clock,
            governor=self.governor,
            expert_load=self.expert_load,
            collective_seconds=waited,
            reserved=[name for name, each in (self.config.promises or {}).items() if each.min_seqs],
        )

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps whose tokens were not collected yet."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, any step is in flight, or a preparer has work of its own. While the core
        is paused, requests are no work."""
        if self._flights or (self.scheduler.has_unfinished and not self.is_paused):
            return True
        return self.preparers.next_event(self.clock.now()) is not None

    def add(self, request: PreparedRequest) -> None:
        """Queue all sequences of a request, or none of them. Raises RequestError, and any error of the scheduler."""
        sequences = request.make_sequences()
        now = self.clock.now()
        try:
            self.preparers.add(request, sequences)
            for sequence in sequences:
                self.scheduler.add(sequence)
            for sequence in sequences:
                self.causes.added(sequence, now)
        except Exception:
            for sequence in sequences:
                if self.scheduler.requests.get(sequence.request_id) is sequence:
                    self.scheduler.abort(sequence.request_id)
                    self.causes.ended(sequence, now)
                self.preparers.forget(sequence)
            raise
        self.preparers.queued(sequences[:1])
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

    def paused(self, sequence_id: str, tools: Sequence[str]) -> None:
        """Note that the answer of a sequence that has ended calls these tools."""
        if (turn := self.kv.eviction.paused(sequence_id, tools)) is not None:
            self.events.tell("paused", turn)

    def fail(self, sequence_id: str, reason: str) -> list[FinishedSequence]:
        """End a sequence whose output cannot be made or sent; ``reason`` is the error message. Returns the sequences
        that leave now."""
        return self._end([sequence_id], FinishReason.ERROR, reason)

    def step(self) -> CoreOutputs | None:
        """Schedule and launch a step, then wait for the oldest step in flight. None if no step was waited for."""
        self.preparers.before_step()
        now = self.clock.now()
        if self.governor is not None and not self.is_paused:
            self.governor.govern(now)
        ended = self._take_ready(now)
        outputs = self.land() if self.is_paused else self._next(now)
        if self.scheduler.dropped:
            ended += self._finished(self.scheduler.dropped, self.clock.now(), _TOO_LATE)
            self.scheduler.dropped = []
        if ended:
            if outputs is None:  # no step has ended, so make an empty result for the ended requests
                outputs = self._take_joined()
            outputs.finished += ended
        if outputs is not None and outputs.finished:
            self.preparers.requests_ended()
        return outputs

    def _next(self, now: float) -> CoreOutputs | None:
        """Schedule and launch a step, then wait for the oldest step in flight, if there are enough of them."""
        out = self.scheduler.schedule(now)
        self.causes.scheduled(out, now)
        self.events.tell("scheduled", out, now)
        for name in out.preempted_for:
            if (request := self.scheduler.requests.get(name)) is not None:
                self._progress.append(Progress(name, request.num_output_tokens, request.num_computed_tokens, True))
        if out.num_tokens:
            self._launch(out, now)
        depth = 0 if self.scheduler.drafts is not None else self.num_lookahead_steps
        if self._flights and (len(self._flights) > depth or not out.num_tokens):
            return self._land()
        return None

    def _take_ready(self, now: float) -> list[FinishedSequence]:
        """Queue the requests whose parts are all ready now. End the requests for which one of these failed. Returns
        the ended sequences."""
        ended: list[FinishedSequence] = []
        batch = self.scheduler.batch
        if not (batch.unready or batch.unready_rows or self.preparers.is_busy):
            return ended
        for ready, failed in self.preparers.take_ready():
            for request in ready:
                self.scheduler.ready(request, now)
            self.preparers.queued(ready)
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
        self._check_forgetting(recompute)
        if not isinstance(self.executor, LiveWeights):
            raise ConfigError(f"{type(self.executor).__name__} cannot replace the weights of its model")
        self.executor.update_weights(source, progress)
        self.scheduler.forget_kv(recompute=recompute)
        self.preparers.weights_changed()
        self.weight_version = version

    def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Share none of the KV computed so far with later requests. No step may be in flight.

        Running requests keep their KV; with ``recompute`` they compute it again. Raises ConfigError for ``recompute``
        in a static batch.
        """
        self._check_forgetting(recompute)
        self.scheduler.forget_kv(recompute=recompute)

    def _check_forgetting(self, recompute: bool) -> None:
        if self._flights:
            raise InvariantError(f"KV was to be forgotten under {len(self._flights)} steps in flight")
        if recompute and self.scheduler.membership.held:
            raise ConfigError(
                "a static batch stays together to its end; do not recompute its KV, or use batching='continuous'"
            )

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
        asleep = None if self.is_paused else self.scheduler.next_event(now)
        times = [now if self._flights else asleep, self.preparers.next_event(now)]
        if self.scheduler.batch.unready or self.scheduler.batch.unready_rows:
            times.append(now + POLL_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def check_processes(self) -> None:
        """Raise EngineDeadError if a process with which the executor shares the model has ended, or hangs. Only
        executors that have a ``heartbeat`` have such processes."""
        check = getattr(self.executor, "check_processes", None)
        if check is not None and not self._flights:
            check()

    def stats(self) -> EngineStats:
        """Statistics after the newest step. The numbers per class, adapter and tenant are at most one second old."""
        return self._statistics.read()

    def shutdown(self) -> None:
        """End every request without an output, and free the executor."""
        for sequence_id in list(self.scheduler.requests):
            self.scheduler.abort(sequence_id)
        self._flights.clear()
        self.preparers.shutdown()
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
                if request.num_host_tokens or request.num_disk_tokens:
                    self._fetched.append((row.request_id, request.num_host_tokens, request.num_disk_tokens))
                if (resumed := request.resumed) is not None:
                    self._resumed.append((row.request_id, resumed))
                self._statistics.joined(request)
        if self.on_joined is not None and self._joined:
            self.on_joined(self._take_joined())
        if not self._flights:
            self.causes.began(out, self.clock.now())
        flight = Flight(out, now)
        self.masks.begin(flight)
        try:
            try:
                handle = self.executor.execute(out)
            except Exception:
                self.masks.drop(flight)
                raise
            flight.pending = self.executor.sample(handle, self.masks.take(flight))
        except Exception as error:
            flight.pending = error
        self._flights.append(flight)

    def _take_joined(self) -> CoreOutputs:
        """Results that have only the sequences that have joined since the last call."""
        outputs = CoreOutputs(joined=self._joined, fetched=self._fetched, resumed=self._resumed)
        self._joined = []
        self._fetched = []
        self._resumed = []
        return outputs

    def _land(self) -> CoreOutputs:
        """Wait for the oldest step in flight and return its results."""
        flight = self._flights.popleft()
        out = flight.out
        outputs = self._take_joined()
        try:
            tokens = flight.tokens()
        except EngineDeadError:
            raise
        except Exception as failure:
            _log.exception("step %d failed; its requests end with an error, the others go on", out.step)
            now = self._landed(out)
            result = self.scheduler.fail_step(out, now)
            outputs.finished = self._finished(result.finished, now, f"the step failed: {type(failure).__name__}")
        else:
            result = self._update(flight, tokens, outputs, self._landed(out))
            self._note_chunks(out)
        self.masks.work_ahead(flight)
        outputs.progress = self._progress
        self._progress = []
        outputs.decode_seconds = self.causes.decode_seconds
        outputs.decoding = self.causes.decoding
        self.causes.decoding = []
        record = StepRecord.of(out, result, flight.start, self.clock.now(), self.preparers.since_step())
        self.events.tell("landed", record)
        self.times.landed(flight, result, record)
        self._statistics.landed(out)
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
            step = StepFeatures(out.num_decodes, out.context_tokens, each, context, out.kind_bytes, out.shared_tokens)
            seconds = math.ceil(remaining / each) * self.costs.model.step_seconds(step)
            known = request.num_output_tokens
            again = chunk.why != "prefill"
            self._progress.append(Progress(name, known, chunk.end, again, seconds))

    def _landed(self, out: SchedulerOutput) -> float:
        """Note that a step has ended and the next step in flight begins. Returns the time now."""
        now = self.clock.now()
        self.causes.landed(out, now)
        if self._flights:
            self.causes.began(self._flights[0].out, now)
        return now

    def _update(self, flight: Flight, tokens: SampledTokens, outputs: CoreOutputs, now: float) -> StepResult:
        out = flight.out
        ended = self._take_prompt_logprobs(out, tokens, outputs, now)
        records = self._token_records(tokens)
        self.masks.landed(flight, tokens)
        result = self.scheduler.update(out, tokens.token_ids, now)
        if (drafts := self.scheduler.drafts) is not None and drafts.predicted:
            for each in drafts.predicted:
                counts = each.num_accepted_predicted, each.num_rejected_predicted
                outputs.predicted.append((each.request_id, *counts))
            drafts.predicted.clear()
        complete = self.masks.complete(flight, now)
        entries = enumerate(zip(result.sampled, tokens.token_ids, strict=True))
        rows = [row for row, (request, token) in entries if request is not None and token != FAILED_ROW]
        if tokens.vectors is not None:
            outputs.vectors = _vectors([(result.sampled[row], tokens.vectors[row]) for row in rows])
            rows = []
        outputs.sequence_ids = [result.sampled[row].request_id for row in rows]  # type: ignore[union-attr]
        outputs.token_ids = [tokens.token_ids[row] for row in rows]
        if records is not None:
            outputs.logprobs = [records[row] for row in rows]
        failed = ((result.sampled[row], reason) for row, reason in tokens.errors.items())
        errors = {request.request_id: reason for request, reason in failed if request is not None}
        outputs.finished = ended + self._finished([*result.finished, *complete], now, _ROW_FAILED, errors)
        return result

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
                records = [TokenRecord.of(entry) for entry in report.entries]
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
                records[row] = TokenRecord.of(entry)
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
        for request in ended:
            self.answer_lengths.add(request)
            self.preparers.forget(request)
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


def _vectors(ended: Sequence[tuple[Any, Any]]) -> list[tuple[str, bytes]]:
    """(id, float32 values, little endian) for each (request that has ended with a vector, vector)."""
    for request, _ in ended:
        request.finish_reason = FinishReason.STOP
    return [(request.request_id, vector.astype("<f4", copy=False).tobytes()) for request, vector in ended]
