"""THE LOOP: ``schedule -> execute -> sample -> update``, once per step."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from chairlift.config import SchedulerConfig
from chairlift.engine.clock import Clock, SystemClock
from chairlift.engine.input_processor import InputProcessor, ModelLimits, Prompt
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.step_log import StepLog
from chairlift.errors import EngineDeadError, RequestError
from chairlift.executor.executor import Executor, PendingTokens
from chairlift.kv_cache.manager import KVCacheManager
from chairlift.models.flat_batch import SampledTokens
from chairlift.outputs import FinishReason, RequestOutput
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.scheduler.membership import membership_from_name
from chairlift.scheduler.output import SchedulerOutput
from chairlift.scheduler.policy import FCFS, Policy
from chairlift.scheduler.scheduler import Scheduler
from chairlift.tokenizer.tokenizer import Tokenizer

__all__ = ["Engine"]

_log = logging.getLogger(__name__)
_id_of = attrgetter("request_id")


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread owns it.

    With a look-ahead depth of d, up to d steps are scheduled and launched beyond the newest known tokens.
    """

    def __init__(
        self,
        executor: Executor,
        limits: ModelLimits,
        config: SchedulerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        enable_prefix_caching: bool = True,
        cache_secret: bytes = b"",
        seed: int | None = None,
        clock: Clock | None = None,
        policy: Policy = FCFS,
        kv: KVCacheManager | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.kv = kv or KVCacheManager(
            executor.cache_groups,
            executor.block_size,
            max_step_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            secret=cache_secret,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            policy=policy,
            membership=membership_from_name(config.batching, config.batch_wait_ms),
            watermark=config.admission_watermark,
            look_ahead=config.admission_look_ahead,
            max_times_passed=config.max_times_passed,
            max_preemptions=config.max_preemptions,
        )
        self.step_log = StepLog()
        self._executor = executor
        self._depth = config.num_lookahead_steps
        self._inputs = InputProcessor(limits, tokenizer, self.kv, seed)
        self._outputs = OutputProcessor(tokenizer, limits.eos_token_ids)
        self._ready: list[RequestOutput] = []
        self._dead = False
        self._flights: deque[tuple[SchedulerOutput, PendingTokens | Exception, float]] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended, or any step is still in flight."""
        return bool(self._outputs) or bool(self._flights) or bool(self._ready)

    @property
    def num_in_flight(self) -> int:
        """Steps launched whose tokens have not been taken yet."""
        return len(self._flights)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id. Raises RequestError, and changes nothing, when it cannot be served.

        With ``stream`` every step that brings it a token reports it; without, only its end is reported.
        """
        self._check_alive()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        undelivered = {output.request_id for output in self._ready}
        if isinstance(request_id, str) and (request_id in self._outputs or request_id in undelivered):
            raise RequestError(f"request id {request_id!r} is already in use; choose another")
        now = self.clock.now()
        prepared = self._inputs.prepare(request_id, prompt, params or SamplingParams(), now, cache_salt)
        try:
            self._queue(prepared.sequences)
            self._outputs.add(prepared, stream)
        except RequestError:
            raise
        except BaseException:  # Ctrl-C: the request is half in
            self._dead = True
            raise
        _log.debug("request %r: %d prompt tokens, seed %d", request_id, len(prepared.prompt_token_ids), prepared.seed)
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request in any state, at once and without an output. False when it is unknown, or was delivered."""
        undelivered = [output for output in self._ready if output.request_id == request_id]
        self._ready = [output for output in self._ready if output.request_id != request_id]
        if request_id not in self._outputs:
            return bool(undelivered)
        now = self.clock.now()
        for sequence in self._outputs.remove(request_id):
            # In a static batch, mates that only waited for this one leave with it.
            self._ready += self._outputs.finish(self.scheduler.abort(sequence.request_id, now), now, {})
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step, and report the requests it brought forward. Waits when there is nothing to do until later.

        A request's fault never raises here. What does (Ctrl-C, a bug) leaves brain and muscle out of step with each
        other, so the engine refuses to go on: EngineDeadError from then on.
        """
        self._check_alive()
        self._dead = True
        outputs = self._step()
        self._dead = False
        return outputs

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError("the engine was interrupted inside a step and cannot go on; make a new one")

    def _step(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, []
        now = self.clock.now()
        out = self.scheduler.schedule(now)
        if out.num_tokens:
            self._launch(out, now)
        if self._flights and (len(self._flights) > self._depth or not out.num_tokens):
            return ready + self._land()
        if not self._flights and not ready:
            when = self.scheduler.next_event(now)
            if when is not None and when > now:
                self.clock.wait_until(when)
        return ready

    def check_invariants(self) -> None:
        """Raise InvariantError if the books do not balance."""
        self.scheduler.check_invariants()

    def shutdown(self) -> None:
        """End every request without an output, and free the executor."""
        for request_id in self._outputs.ids():
            self.abort(request_id)
        self._flights.clear()
        self._ready.clear()
        self._executor.shutdown()

    def _queue(self, sequences: list[Request]) -> None:
        """All of them, or none."""
        for index, sequence in enumerate(sequences):
            try:
                self.scheduler.add(sequence)
            except RequestError:
                for queued in sequences[:index]:
                    self.scheduler.abort(queued.request_id)
                raise

    def _launch(self, out: SchedulerOutput, now: float) -> None:
        for row in out.joined:
            self._outputs.note_scheduled(row.request_id, now)
        try:
            pending: PendingTokens | Exception = self._executor.sample(self._executor.execute(out))
        except Exception as error:
            pending = error
        self._flights.append((out, pending, now))

    def _land(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight, and take what it brings."""
        out, pending, start = self._flights.popleft()
        try:
            if isinstance(pending, Exception):
                raise pending
            tokens = pending.result()
        except Exception as failure:
            _log.exception("step %d failed; its requests end with an error, the others go on", out.step)
            now = self.clock.now()
            result = self.scheduler.fail_step(out, now)
            self.step_log.record(out, result, start, now)
            reason = f"the step failed: {type(failure).__name__}"
            return self._outputs.finish(result.finished, now, dict.fromkeys(map(_id_of, result.finished), reason))
        now = self.clock.now()
        self._take_prompt_logprobs(out, tokens)
        result = self.scheduler.update(out, tokens.token_ids, now)
        failed = ((result.sampled[row], reason) for row, reason in tokens.errors.items())
        errors = {request.request_id: reason for request, reason in failed if request is not None}
        finished = list(result.finished)
        for sequence_id in self._outputs.take_tokens(result.sampled, tokens.logprobs, now):
            finished += self.scheduler.finish(sequence_id, FinishReason.STOP, None, now)
        self.step_log.record(out, result, start, now)
        outputs = self._outputs.finish(finished, now, errors)
        return outputs + self._partial(result.sampled, outputs)

    def _take_prompt_logprobs(self, out: SchedulerOutput, tokens: SampledTokens) -> None:
        names = {chunk.slot: name for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)}
        for report in tokens.prompt_logprobs:
            request = self.scheduler.running.get(names[report.slot])
            # A late report may meet another request, which was given the id of one that has left.
            if request is not None and request.admitted_at_step <= out.step:
                self._outputs.take_prompt_logprobs(request.request_id, report.first, report.entries)

    def _partial(self, sampled: Sequence[Request | None], outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Streamed requests that go on; in a held batch nothing is delivered before its end."""
        if self.scheduler.membership.held:
            return []
        reported = {output.request_id for output in outputs}
        return [output for output in self._outputs.touched(sampled) if output.request_id not in reported]
