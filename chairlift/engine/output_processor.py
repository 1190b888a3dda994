"""The exit: tokens become text, answers are collected per request, and stop strings are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.engine.input_processor import PreparedRequest
from chairlift.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from chairlift.request import Request
from chairlift.tokenizer.tokenizer import Tokenizer

__all__ = ["OutputProcessor"]


class _Answer:
    """One sequence on its way to the caller."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
        self.index = index
        self.request = request
        self.params = request.params
        self.detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt, self.params)
        self.num_read = 0
        """Generated tokens the detokenizer has seen."""
        self.num_tokens: int | None = None
        """How many generated tokens count, once a stop string has ended the answer."""
        self.stop_string: str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None if self.params.logprobs is None else []
        self.cumulative = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        end = None if self.num_tokens is None else self.request.num_prompt_tokens + self.num_tokens
        return self.request.token_ids[self.request.num_prompt_tokens : end]

    def read(self, stop_terminated: bool = False) -> str | None:
        """Bring the text up to date; the stop string that ended it, if one did."""
        if self.detokenizer is None or self.num_tokens is not None:
            return None
        start = self.request.num_prompt_tokens + self.num_read
        fresh = self.request.token_ids[start:]
        self.num_read += len(fresh)
        return self._ended_by(self.detokenizer.update(fresh, stop_terminated))

    def close(self, stop_terminated: bool) -> str | None:
        """Read to the end; the stop string that ended the text, now or before."""
        self.read(stop_terminated)
        if self.detokenizer is not None and self.stop_string is None:
            self._ended_by(self.detokenizer.finish())
        return self.stop_string

    def _ended_by(self, stop: str | None) -> str | None:
        if stop is not None:
            self.num_tokens, self.stop_string = self.num_read, stop
        return stop

    def output(self) -> CompletionOutput:
        text = self.detokenizer.text if self.detokenizer is not None else ""
        cumulative = None if self.logprobs is None else self.cumulative
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids,
            cumulative_logprob=cumulative,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclasses.dataclass(slots=True)
class _Group:
    """All answers to one prompt."""

    prepared: PreparedRequest
    answers: list[_Answer]
    stream: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    error: str | None = None


class OutputProcessor:
    """Knows every request by the id its caller gave it, and every sequence by its own."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._groups: dict[str, _Group] = {}
        self._answers: dict[str, tuple[_Group, _Answer]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._groups)

    def add(self, prepared: PreparedRequest, stream: bool) -> None:
        answers = [
            _Answer(index, request, self._tokenizer, prepared.prompt_token_ids)
            for index, request in enumerate(prepared.sequences)
        ]
        wanted = prepared.params.prompt_logprobs is not None
        prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wanted else None
        metrics = RequestMetrics(prepared.sequences[0].arrival_time)
        group = _Group(prepared, answers, stream, metrics, prompt_logprobs)
        self._groups[prepared.request_id] = group
        for answer in answers:
            self._answers[answer.request.request_id] = (group, answer)

    def remove(self, request_id: str) -> list[Request]:
        """Forget a request; returns its sequences that had not ended."""
        group = self._groups.pop(request_id)
        for answer in group.answers:
            self._answers.pop(answer.request.request_id, None)
        return [answer.request for answer in group.answers if answer.finish_reason is None]

    def note_scheduled(self, request_id: str, now: float) -> None:
        """A sequence joined the batch; only the first time counts."""
        found = self._answers.get(request_id)
        if found is not None and found[0].metrics.first_scheduled_time is None:
            found[0].metrics.first_scheduled_time = now

    def take_tokens(self, sampled: Sequence[Request | None], logprobs: Sequence[Any] | None, now: float) -> list[str]:
        """Note the tokens a step brought, and return the ids of sequences that a stop string has ended."""
        stopped = []
        for row, request in enumerate(sampled):
            found = None if request is None else self._answers.get(request.request_id)
            if request is None or found is None:
                continue
            group, answer = found
            if group.metrics.first_token_time is None:
                group.metrics.first_token_time = now
            if logprobs is not None and logprobs[row] is not None and answer.logprobs is not None:
                self._note_logprobs(answer, logprobs[row])
            ended = request.finish_reason is FinishReason.STOP  # by a token, whose text may not count
            if answer.params.stop and not ended and answer.read() is not None:
                stopped.append(request.request_id)
        return stopped

    def take_prompt_logprobs(self, request_id: str, first: int, entries: Sequence[Any]) -> None:
        """Log-probabilities of prompt tokens from position ``first`` on; a recompute may bring them again."""
        found = self._answers.get(request_id)
        if found is not None and found[0].prompt_logprobs is not None:
            known = found[0].prompt_logprobs
            known[first : first + len(entries)] = [self._logprob_dict(entry) for entry in entries]

    def touched(self, sampled: Sequence[Request | None]) -> list[RequestOutput]:
        """The state of streamed requests that got a token and have not ended."""
        groups: dict[str, _Group] = {}
        for request in sampled:
            found = None if request is None or request.is_finished else self._answers.get(request.request_id)
            if found is not None and found[0].stream:
                found[1].read()
                groups[found[0].prepared.request_id] = found[0]
        return [self._output(group) for group in groups.values()]

    def finish(self, requests: Sequence[Request], now: float, errors: Mapping[str, str]) -> list[RequestOutput]:
        """Close sequences that have ended, ``errors`` saying why some failed; returns the state of their requests."""
        groups: dict[str, _Group] = {}
        for request in requests:
            found = self._answers.pop(request.request_id, None)
            if found is None:
                continue
            group, answer = found
            by_token = request.finish_reason is FinishReason.STOP and isinstance(request.stop_reason, int)
            stop = answer.close(stop_terminated=by_token)
            answer.finish_reason = FinishReason.STOP if stop is not None else request.finish_reason
            if stop is not None:
                answer.stop_reason = stop
            elif by_token and request.stop_reason not in self._eos:
                answer.stop_reason = request.stop_reason
            if answer.logprobs is not None:
                del answer.logprobs[len(answer.token_ids) :]
            group.error = group.error or errors.get(request.request_id)
            group.metrics.num_preemptions += request.num_preemptions
            groups[group.prepared.request_id] = group
        outputs = []
        for request_id, group in groups.items():
            done = all(answer.finish_reason is not None for answer in group.answers)
            if done:
                group.metrics.finished_time = now
                del self._groups[request_id]
            if done or group.stream:
                outputs.append(self._output(group))
        return outputs

    def _output(self, group: _Group) -> RequestOutput:
        prepared = group.prepared
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[answer.output() for answer in group.answers],
            finished=all(answer.finish_reason is not None for answer in group.answers),
            num_cached_tokens=group.answers[0].request.num_cached_tokens,
            prompt_logprobs=group.prompt_logprobs,
            metrics=group.metrics,
            error=group.error,
        )

    def _note_logprobs(self, answer: _Answer, entry: Any) -> None:
        if answer.logprobs is not None:
            answer.logprobs.append(self._logprob_dict(entry))
            answer.cumulative += float(entry.logprobs[0])

    def _logprob_dict(self, entry: Any) -> dict[int, Logprob]:
        """The chosen token first; the most likely ones follow with ranks 1, 2, ..."""
        out: dict[int, Logprob] = {}
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        for token_id, logprob, rank in zip(entry.token_ids.tolist(), entry.logprobs.tolist(), ranks, strict=True):
            if token_id not in out:
                text = (
                    None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
                )
                out[token_id] = Logprob(logprob, rank, text)
        return out
