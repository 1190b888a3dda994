"""Converts tokens to outputs: makes text, collects the answers of each request, and finds stop strings."""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Iterable, Sequence

from chairlift.base.outputs import CompletionOutput, FinishReason, FlatLogprobs, RequestMetrics, RequestOutput
from chairlift.base.row_failures import output_reason
from chairlift.base.sampling_params import is_of_the_caller
from chairlift.engine.causes import DecodeSeconds, causes_until
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, Progress
from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.engine.input_processor import PreparedRequest
from chairlift.metrics.stats import DEADLINE_KINDS, FinishedRequest, RequestStats
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["OutputProcessor", "RequestPhase", "RequestProgress", "RequestState"]

_log = logging.getLogger(__name__)


class _Answer:
    """State of one sequence: its results between the core and the caller."""

    def __init__(self, index: int, sequence_id: str, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.params = prepared.params
        self.only_scores = prepared.params.max_tokens == 0 or prepared.pooled is not None
        """Whether the caller wants only log-probabilities or the vector of the prompt. Then one token is generated, and
        dropped."""
        self.detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and not self.only_scores:
            self.detokenizer = IncrementalDetokenizer(tokenizer, prepared.prompt_token_ids, prepared.params)
        self.token_ids: list[int] = []
        self.num_read = 0
        """Number of generated tokens that the detokenizer has read."""
        self.num_tokens: int | None = None
        """Number of generated tokens that belong to the answer. None unless a stop string has ended the answer."""
        self.stop_string: str | None = None
        self.logprobs = None if self.params.logprobs is None else _flat(tokenizer)
        """Log-probabilities of generated tokens that were not delivered yet."""
        self.cumulative = 0.0
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.decodes_since: tuple[dict[str, float], DecodeSeconds] | None = None
        """(seconds charged to the sequence until it began to decode, totals of the cause ledger at that time); only for
        a request with stop strings."""
        self._taken = 0
        """Number of the answer's tokens that were already delivered to the caller as deltas."""
        self._end_delivered = False
        self.progress: tuple[Progress, float] | None = None
        """(newest progress report of the sequence, time of this report); None before the first."""
        self.weight_versions = [(0, 0)]
        """One entry per version of the weights: (index of the first token that it sampled, version)."""
        self.predicted = (0, 0)
        """(number of accepted drafts, number of rejected drafts). Only drafts from the request's ``prediction``
        count."""

    def read(self, stop_terminated: bool = False) -> str | None:
        """Let the detokenizer read the new tokens. Returns the stop string that ends the answer, or None."""
        if self.detokenizer is None or self.num_tokens is not None:
            return None
        fresh = self.token_ids[self.num_read :]
        self.num_read += len(fresh)
        return self._ended_by(self.detokenizer.update(fresh, stop_terminated))

    def close(self, ended: FinishedSequence, eos: frozenset[int]) -> None:
        """End the answer: let the detokenizer read all tokens, and set the finish reason. A stop string found in the
        last tokens takes precedence over the reason in ``ended``."""
        if self.only_scores:
            scored = ended.finish_reason is FinishReason.STOP and self.params.max_tokens == 0
            self.finish_reason = FinishReason.LENGTH if scored else ended.finish_reason
            return
        by_token = ended.finish_reason is FinishReason.STOP and isinstance(ended.stop_reason, int)
        self.read(by_token)
        if self.detokenizer is not None and self.stop_string is None:
            self._ended_by(self.detokenizer.finish())
        self.finish_reason = FinishReason.STOP if self.stop_string is not None else ended.finish_reason
        if self.stop_string is not None:
            self.stop_reason = self.stop_string
        elif by_token and ended.stop_reason not in eos:
            self.stop_reason = ended.stop_reason
        del self.token_ids[len(self.token_ids) if self.num_tokens is None else self.num_tokens :]
        if self.logprobs is not None:
            self.logprobs.truncate(len(self.token_ids) - self._taken)
        self.weight_versions = [run for run in self.weight_versions if run[0] < max(1, len(self.token_ids))]

    def fail(self) -> None:
        """End the answer with an error and without text. An answer whose end was delivered is not changed."""
        if self._end_delivered:
            return
        self.detokenizer = None
        self.finish_reason = FinishReason.ERROR
        self.stop_reason = None
        if self.logprobs is not None:  # an error may have come between the two appends
            whole = min(len(self.token_ids) - self._taken, len(self.logprobs))
            del self.token_ids[self._taken + whole :]
            self.logprobs.truncate(whole)

    def weights_changed(self, version: int) -> None:
        """Note that later tokens come from weights of another version."""
        if self.weight_versions[-1][1] == version:
            return
        if self.weight_versions[-1][0] == len(self.token_ids):
            self.weight_versions.pop()
        self.weight_versions.append((len(self.token_ids), version))

    def _ended_by(self, stop: str | None) -> str | None:
        if stop is not None:
            self.num_tokens = self.num_read
            self.stop_string = stop
        return stop

    def output(self) -> CompletionOutput:
        """The whole answer so far."""
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer is not None else "",
            token_ids=self.token_ids[: self.num_tokens],
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=None if self.logprobs is None else self.logprobs[: self.num_tokens],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=list(self.weight_versions),
            accepted_prediction_tokens=self.predicted[0],
            rejected_prediction_tokens=self.predicted[1],
        )

    def delta(self) -> CompletionOutput | None:
        """The part of the answer since the last call; None if there is nothing new."""
        if self._end_delivered:
            return None
        if self.finish_reason is None:
            self.read()
        ended = self.finish_reason is not None
        text = self.detokenizer.take_delta(ended) if self.detokenizer is not None else ""
        fresh = slice(self._taken, len(self.token_ids) if self.num_tokens is None else self.num_tokens)
        token_ids = self.token_ids[fresh]
        if not ended and not token_ids:
            return None
        self._taken += len(token_ids)
        logprobs = self.logprobs
        if logprobs is not None:
            self.logprobs = logprobs[len(token_ids) :]
            logprobs = logprobs[: len(token_ids)]
        self._end_delivered = ended
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=[run for run in self.weight_versions if fresh.start <= run[0] < fresh.stop],
            accepted_prediction_tokens=self.predicted[0],
            rejected_prediction_tokens=self.predicted[1],
        )


class RequestPhase(enum.StrEnum):
    """Phase of a request. WAITING: it has not been in a step. PREEMPTED: it has not yet recomputed the KV that it
    lost."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestProgress:
    """Progress of a request. With several answers: progress of the first unfinished answer."""

    phase: RequestPhase
    num_computed: int
    """Number of leading positions of prompt and answer whose KV is in the cache."""
    next_token_at: float | None = None
    """Expected time of the next token on the engine's clock; set only during a prefill of several steps."""


class RequestState:
    """State of one request between the core and the caller. It has all answers to one prompt."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None, stream: bool) -> None:
        self.prepared = prepared
        self.stream = stream
        self.answers = [
            _Answer(index, sequence_id, prepared, tokenizer) for index, sequence_id in enumerate(prepared.sequence_ids)
        ]
        self.metrics = RequestMetrics(prepared.arrival_time)
        self.num_cached_tokens = 0
        self.num_host_tokens = 0
        """Number of prompt tokens whose KV came back from host memory. The next field counts those from disk."""
        self.num_disk_tokens = 0
        self.prompt_logprobs = None if prepared.params.prompt_logprobs is None else _flat(tokenizer)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.append((), (), 0)  # the first token has no log-probability
        self.error: str | None = None
        self.vector: bytes | None = None
        """Vector of the prompt, if the request asked for it and it was computed."""

    @property
    def request_id(self) -> str:
        return self.prepared.request_id

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def failure(self) -> FinishReason | None:
        """Finish reason (ERROR or DEADLINE) of an answer that failed, unless the caller caused the failure; otherwise
        None. If one answer failed, the request's other answers are useless."""
        reasons = [answer.finish_reason for answer in self.answers]
        failed = [reason for reason in (FinishReason.ERROR, FinishReason.DEADLINE) if reason in reasons]
        return failed[0] if failed and not is_of_the_caller(self.error) else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far, summed over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def fail(self, error: Exception) -> None:
        """End all unfinished answers with this error, because the request's output cannot be made."""
        self.error = output_reason(error)
        for answer in self.answers:
            answer.fail()

    def progress(self) -> RequestProgress:
        """Progress of the request at this time."""
        if self.metrics.first_scheduled_time is None:
            return RequestProgress(RequestPhase.WAITING, 0)
        answer = next((each for each in self.answers if each.finish_reason is None), self.answers[-1])
        known = len(answer.token_ids)
        phase = RequestPhase.DECODE if answer.token_ids else RequestPhase.PREFILL
        if answer.progress is not None and answer.progress[0].num_output_tokens == known:
            newest, when = answer.progress
            phase = RequestPhase.PREEMPTED if newest.preempted else phase
            until = None if newest.seconds_left is None else when + newest.seconds_left
            return RequestProgress(phase, newest.num_computed, until)
        done = len(self.prepared.prompt_token_ids) + known - 1 if known else self.num_cached_tokens
        return RequestProgress(phase, done)

    def output(self) -> RequestOutput:
        """Output with all text so far."""
        for answer in self.answers:
            if answer.finish_reason is None:
                answer.read()
        return self._output([answer.output() for answer in self.answers])

    def delta(self) -> RequestOutput | None:
        """Output with the new parts of the answers; None if there are none."""
        news = [delta for answer in self.answers if (delta := answer.delta()) is not None]
        return self._output(news) if news else None

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            error=self.error,
            vector=self.vector,
        )

    def record(self, now: float, *, aborted: bool = False) -> FinishedRequest:
        """Record of the ended request for the statistics."""
        metrics = self.metrics
        aborted = aborted or is_of_the_caller(self.error)  # an error of the caller's, not of the server
        first = metrics.first_scheduled_time
        token = metrics.first_token_time
        ended = None if aborted else self.answers[0].finish_reason
        record = FinishedRequest(
            # If an answer has failed, the caller leaves because of the failure. So the failure is the reason.
            reason=self.failure or ended or FinishReason.ABORT,
            prompt_tokens=len(self.prepared.prompt_token_ids),
            cached_tokens=self.num_cached_tokens,
            host_tokens=self.num_host_tokens,
            disk_tokens=self.num_disk_tokens,
            generation_tokens=sum(len(answer.token_ids[: answer.num_tokens]) for answer in self.answers),
            longest_answer=max(len(answer.token_ids[: answer.num_tokens]) for answer in self.answers),
            n=len(self.answers),
            max_tokens=None if self.prepared.pooled is not None else self.prepared.params.max_tokens,
            num_preemptions=metrics.num_preemptions,
            e2e_seconds=now - metrics.arrival_time,
            queue_seconds=None if first is None else first - metrics.arrival_time,
            prefill_seconds=None if first is None or token is None else token - first,
            decode_seconds=None if token is None or self.prepared.pooled is not None else now - token,
            service_class=self.prepared.service.service_class,
        )
        return self._with_missed_deadlines(record, now)

    def _with_missed_deadlines(self, record: FinishedRequest, now: float) -> FinishedRequest:
        """The record, with two more facts: the deadlines that the request had, and the deadlines that it missed."""
        service = self.prepared.service
        token = self.metrics.first_token_time
        per_token = record.seconds_per_token
        dropped = record.reason == FinishReason.DEADLINE
        misses = {
            "ttft": service.first_token_by < (now if token is None else token) or (dropped and token is None),
            "tpot": per_token is not None and per_token > service.seconds_per_token,
            "deadline": service.finish_by < now or dropped,
        }
        bounds = (service.first_token_by, service.seconds_per_token, service.finish_by)
        kinds = [kind for kind, bound in zip(DEADLINE_KINDS, bounds, strict=True) if bound < math.inf]
        missed = tuple(kind for kind in kinds if misses[kind])
        if dropped and not missed:  # one of several answers began late
            missed = ("ttft",)
        return dataclasses.replace(record, has_deadline=bool(kinds), misses=missed)


class OutputProcessor:
    """Makes the outputs of all unfinished requests from the results of the core's steps.

    ``stats``, if given, counts tokens and ended requests.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], stats: RequestStats | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._stats = stats
        self._states: dict[str, RequestState] = {}
        self._answers: dict[str, tuple[RequestState, _Answer]] = {}
        self._decode_seconds: DecodeSeconds = (0.0, 0.0, 0.0)
        self._broken: list[tuple[RequestState, list[str]]] = []
        self.weight_version = 0
        """Version of the weights that compute tokens now."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def delivered(self, request_id: str) -> list[list[int]]:
        """Token ids of each answer of an unfinished request, as far as they have arrived; empty for an unknown
        request."""
        state = self._states.get(request_id)
        return [] if state is None else [list(answer.token_ids) for answer in state.answers]

    def ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._states)

    def sequence_ids(self) -> list[str]:
        """Ids of the sequences that have not ended."""
        return list(self._answers)

    def state_of(self, sequence_id: str) -> RequestState | None:
        """The request of an unfinished sequence; None if the sequence has ended."""
        found = self._answers.get(sequence_id)
        return None if found is None else found[0]

    def add(self, prepared: PreparedRequest, stream: bool) -> RequestState:
        state = RequestState(prepared, self._tokenizer, stream)
        self._states[prepared.request_id] = state
        for answer in state.answers:
            self._answers[answer.sequence_id] = (state, answer)
            answer.weight_versions = [(0, self.weight_version)]
        return state

    def weights_changed(self, version: int) -> None:
        """Note that later tokens come from this version of the weights."""
        self.weight_version = version
        for _, answer in self._answers.values():
            answer.weights_changed(version)

    def weights_of(self, sequence_ids: Iterable[str], version: int) -> None:
        """Note that later tokens of these sequences come from this version of the weights. Ended sequences are
        ignored."""
        for name in sequence_ids:
            if name in self._answers:
                self._answers[name][1].weights_changed(version)

    def remove(self, request_id: str, now: float | None = None, *, died: bool = False) -> list[str]:
        """Remove a request, and return the ids of its unfinished sequences. With ``now``, the statistics count the
        request as aborted, or as failed if the engine ``died``."""
        state = self._states.pop(request_id)
        if self._stats is not None and now is not None:
            record = state.record(now, aborted=True)
            self._stats.request_finished(dataclasses.replace(record, reason=FinishReason.ERROR) if died else record)
        return [each.sequence_id for each in state.answers if self._answers.pop(each.sequence_id, None) is not None]

    def break_off(self, state: RequestState, error: Exception, now: float) -> None:
        """End a request whose output cannot be made. Other requests continue; :meth:`take_broken` returns this
        request."""
        _log.error("request %s ends with an error: its output could not be made", state.request_id, exc_info=error)
        state.fail(error)
        sequences = [each for each in state.answers if self._answers.pop(each.sequence_id, None) is not None]
        if self._states.pop(state.request_id, None) is not None:
            self._count_end(state, now)
        self._broken.append((state, [answer.sequence_id for answer in sequences]))

    def take_broken(self) -> list[tuple[RequestState, list[str]]]:
        """Requests ended by :meth:`break_off` since the last call, with the ids of the sequences that the core must
        abort."""
        broken = self._broken
        self._broken = []
        return broken

    def take(self, step: CoreOutputs, now: float) -> list[str]:
        """Process the results of a step. Returns the ids of sequences that a stop string has ended."""
        fetched = {sequence_id: (host, disk) for sequence_id, host, disk in step.fetched}
        for sequence_id, resumed in step.resumed:
            found = self._answers.get(sequence_id)
            if found is not None and found[0].metrics.resumed is None:
                found[0].metrics.resumed = resumed
        for sequence_id, num_cached, when in step.joined:
            found = self._answers.get(sequence_id)
            if found is not None and found[0].metrics.first_scheduled_time is None:
                found[0].metrics.first_scheduled_time = when
                found[0].num_cached_tokens = num_cached
                found[0].num_host_tokens, found[0].num_disk_tokens = fetched.get(sequence_id, (0, 0))
        for sequence_id, first, records in step.prompt_logprobs:
            found = self._answers.get(sequence_id)
            if found is not None and found[0].prompt_logprobs is not None:
                known = found[0].prompt_logprobs
                try:
                    for new in records[max(0, len(known) - first) :]:  # a recompute repeats known records
                        known.append(new.token_ids, new.logprobs, new.rank)
                except Exception as error:
                    self.break_off(found[0], error, now)
        for sequence_id, causes, totals in step.decoding:
            if sequence_id in self._answers:
                self._answers[sequence_id][1].decodes_since = (causes, totals)
        for progress in step.progress:
            if progress.sequence_id in self._answers:
                self._answers[progress.sequence_id][1].progress = (progress, now)
        for sequence_id, accepted, rejected in step.predicted:
            if sequence_id in self._answers:
                self._answers[sequence_id][1].predicted = (accepted, rejected)
        for sequence_id, vector in step.vectors:
            if (found := self._answers.get(sequence_id)) is not None:
                found[0].vector = vector
                found[0].metrics.first_token_time = now
                if self._stats is not None:
                    self._stats.prompt_computed(len(found[0].prepared.prompt_token_ids), 0)
        self._decode_seconds = step.decode_seconds
        stopped = []
        for row, sequence_id in enumerate(step.sequence_ids):
            found = self._answers.get(sequence_id)
            if found is None or found[1].num_tokens is not None:  # the request has left, or its text has ended
                if self._stats is not None:
                    self._stats.overrun_tokens += 1
                continue
            state, answer = found
            try:
                if self._stats is not None:
                    self._time(self._stats, state, answer, now)
                if state.metrics.first_token_time is None:
                    state.metrics.first_token_time = now
                if answer.only_scores:
                    continue
                token = step.token_ids[row]
                answer.token_ids.append(token)
                record = None if step.logprobs is None else step.logprobs[row]
                if record is not None and answer.logprobs is not None:
                    answer.logprobs.append(record.token_ids, record.logprobs, record.rank)
                    answer.cumulative += record.logprobs[0]
                # The text of a token that ended the answer may be missing from the output. So that text is not searched
                # for stop strings.
                if answer.params.stop and token not in state.prepared.stop_token_ids and answer.read() is not None:
                    stopped.append(sequence_id)
            except Exception as error:  # out of memory or a bug; the other rows go on
                self.break_off(state, error, now)
        return [each for each in stopped if each in self._answers]

    def touched(self, sequence_ids: Sequence[str]) -> list[RequestState]:
        """Unfinished requests of these sequences, each request once."""
        states: dict[str, RequestState] = {}
        for sequence_id in sequence_ids:
            found = self._answers.get(sequence_id)
            if found is not None:
                states[found[0].request_id] = found[0]
        return list(states.values())

    def finish(self, finished: Sequence[FinishedSequence], now: float) -> list[RequestState]:
        """Close sequences that have ended. Returns their requests, each request once."""
        states: dict[str, RequestState] = {}
        for ended in finished:
            if self._stats is not None and ended.causes is not None:  # also for requests whose caller has left
                self._stats.charge(ended.causes)
            found = self._answers.pop(ended.sequence_id, None)
            if found is None:
                continue
            state, answer = found
            try:
                self._close(state, answer, ended)
            except Exception as error:
                self.break_off(state, error, now)
                continue
            states[state.request_id] = state
        present = [state for state in states.values() if state.request_id in self._states]
        for state in present:
            if state.finished:
                del self._states[state.request_id]
                self._count_end(state, now)
        return present

    def _close(self, state: RequestState, answer: _Answer, ended: FinishedSequence) -> None:
        causes = ended.causes
        if causes is None and answer.decodes_since is not None:
            causes = causes_until(*answer.decodes_since, self._decode_seconds)
        state.metrics.causes = causes
        state.metrics.preempted_by = ended.preempted_by
        state.metrics.preempted_during = ended.preempted_during
        answer.close(ended, frozenset() if state.prepared.params.ignore_eos else self._eos)
        if answer.stop_string is None:  # a failure behind a stop string does not concern the answer
            state.error = state.error or ended.error
        state.metrics.num_preemptions += ended.num_preemptions

    def _count_end(self, state: RequestState, now: float) -> None:
        """Count the end of a request in the statistics. An error in this method is only logged, so that the request's
        output is still delivered."""
        try:
            self._note_end(state.metrics, now)
            if self._stats is not None:
                self._stats.request_finished(state.record(now))
        except Exception:
            _log.exception("request %s is missing in the statistics", state.request_id)

    def _note_end(self, metrics: RequestMetrics, now: float) -> None:
        metrics.finished_time = now
        if metrics.causes is not None:
            rest = max(0.0, now - metrics.arrival_time - sum(metrics.causes.values()))
            metrics.causes = {**metrics.causes, "delivery": rest}
            if self._stats is not None:
                self._stats.charge({"delivery": rest})

    @staticmethod
    def _time(stats: RequestStats, state: RequestState, answer: _Answer, now: float) -> None:
        if answer.last_token_time is not None:
            stats.next_tokens(now - answer.last_token_time, 1, now)
        else:
            stats.first_token(now - state.metrics.arrival_time, now)
        if state.metrics.first_token_time is None:
            known = state.num_cached_tokens, state.num_host_tokens, state.num_disk_tokens
            stats.prompt_computed(len(state.prepared.prompt_token_ids), *known)
        answer.last_token_time = now


def _flat(tokenizer: Tokenizer | None) -> FlatLogprobs:
    return FlatLogprobs(None if tokenizer is None else tokenizer.token_text)
