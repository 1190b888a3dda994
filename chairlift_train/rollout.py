"""An LLM that generates the rollouts of a training loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from chairlift.base.outputs import CompletionOutput, FinishReason, RequestOutput
from chairlift.base.sampling_params import SamplingLimits, SamplingParams
from chairlift.errors import ConfigError, RequestError
from chairlift.llm import LLM
from chairlift_train.async_loop import Rollout

__all__ = ["RolloutGenerator"]

_KNOWN: Final = ("temperature", "top_k", "top_p", "min_p")
"""Parameters whose effect a trainer computes again from a rollout."""
_MOST_KEPT: Final = SamplingLimits().max_logprobs


class RolloutGenerator:
    """A :class:`~chairlift_train.async_loop.Generator` that uses an :class:`~chairlift.llm.LLM` in this thread.

    The LLM computes only while :meth:`poll` waits, and not while the trainer computes. After the trainer updates the
    weights, unfinished rollouts continue with the new weights. Only one thread may use the LLM. ``sampling_params``
    apply to every rollout and must have ``n=1``; the rollout's ticket is added to the seed. ``in_flight`` is an
    argument of :meth:`~chairlift.llm.LLM.update_weights`.

    With ``logprobs="sampled"``, the log-probabilities must be those with which the tokens were drawn. An LLM with
    ``logprobs_mode="processed_logprobs"`` reports them for temperature, top_k, top_p and min_p, and the rollouts have
    the ids that were left (``kept``); top_k must then be at most 20. An LLM with raw log-probabilities takes none of
    these. Parameters that change the distribution in other ways (penalties, masks, ...) raise ConfigError. ``"raw"``
    allows all, but needs raw log-probabilities: the trainer then takes these, too, so that ratios are still 1 at equal
    weights, but they are not those of the distribution that was sampled.
    """

    def __init__(
        self,
        llm: LLM,
        sampling_params: SamplingParams,
        *,
        in_flight: str = "continue",
        logprobs: Literal["sampled", "raw"] = "sampled",
    ) -> None:
        if sampling_params.n != 1:
            raise ConfigError(
                f"a rollout is one answer, got n={sampling_params.n}; submit the prompt {sampling_params.n} times"
            )
        if logprobs not in ("sampled", "raw"):
            raise ConfigError(f"logprobs must be sampled or raw, got {logprobs!r}")
        processed = llm.config.model.logprobs_mode == "processed_logprobs"
        if logprobs == "raw" and processed:
            raise ConfigError("logprobs='raw' needs an LLM with logprobs_mode='raw_logprobs'")
        if logprobs == "sampled" and (changed := _changed(sampling_params, _KNOWN if processed else ())):
            raise ConfigError(
                f"rollouts are drawn with {', '.join(changed)}, but their log-probabilities"
                f" ({llm.config.model.logprobs_mode}) do not tell a trainer about this; leave these out, or take"
                " logprobs='raw' if the trainer uses raw log-probabilities, too. For temperature, top_k, top_p and"
                " min_p, make the LLM with logprobs_mode='processed_logprobs'"
            )
        self._cuts = processed and bool(_changed(sampling_params, ("temperature",)))
        if self._cuts and not 0 < sampling_params.top_k <= _MOST_KEPT:
            raise ConfigError(
                f"a rollout names the ids from which its tokens were drawn, which are at most {_MOST_KEPT}; give top_k"
                f" from 1 to {_MOST_KEPT} beside top_p or min_p, got {sampling_params.top_k}"
            )
        if self._cuts:
            sampling_params = dataclasses.replace(sampling_params, logprobs=sampling_params.top_k)
        self._llm = llm
        self._params = sampling_params
        self._in_flight = in_flight
        self._running: dict[str, int] = {}  # request id -> ticket
        self._refused: list[Rollout] = []

    def submit(self, ticket: int, prompt: Sequence[int]) -> None:
        """Queue a prompt. If it cannot be served, the next :meth:`poll` reports it with the reason."""
        seed = None
        first = self._params.seed
        if first is not None:
            seed = first + ticket + (first < 0 <= first + ticket + 1)  # skip -1, which means "no seed"
        try:
            params = dataclasses.replace(self._params, logprobs=self._params.logprobs or 0, seed=seed)
            request_id = self._llm.engine.add_request(list(prompt), params, stream=False)
        except RequestError as error:
            self._refused.append(Rollout(ticket, prompt, error=str(error)))
        else:
            self._running[request_id] = ticket

    def poll(self, *, wait: bool) -> list[Rollout]:
        """Rollouts that have ended. With ``wait``, compute until at least one rollout has ended."""
        ended = self._refused
        self._refused = []
        while wait and self._running and not ended:
            ended = [self._rollout(output) for output in self._llm.step_for(self._running)]
        return ended

    def update_weights(self, source: str | Path | Mapping[str, Any], version: int) -> None:
        """Use new weights; see :meth:`~chairlift.llm.LLM.update_weights`."""
        self._llm.update_weights(source, version, in_flight=self._in_flight)

    def _rollout(self, output: RequestOutput) -> Rollout:
        ticket = self._running.pop(output.request_id)
        answer = output.outputs[0]
        if answer.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return Rollout(ticket, output.prompt_token_ids, error=output.error or f"it ended by {answer.finish_reason}")
        return Rollout(
            ticket,
            output.prompt_token_ids,
            answer.token_ids,
            [entry[token].logprob for entry, token in zip(answer.logprobs or (), answer.token_ids, strict=True)],
            _versions(answer),
            kept=_kept(answer) if self._cuts else (),
        )


def _changed(params: SamplingParams, known: Sequence[str] = ()) -> list[str]:
    """Parameters, with their values, by which tokens are not drawn from the softmax of the raw logits; without those
    that are ``known`` to the trainer."""
    plain = SamplingParams()
    names: tuple[str, ...] = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    names += ("repetition_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids")
    names += ("structured_outputs", "thinking")
    found = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}
    if params.top_k > 0:
        found["top_k"] = params.top_k
    if params.greedy:
        known = ()  # a greedy token has no distribution
    return [f"{name}={value!r:.60}" for name, value in found.items() if name not in known]


def _kept(answer: CompletionOutput) -> list[list[int]]:
    """For each token of the answer: the ids from which it was drawn, in ascending order."""
    entries = answer.logprobs or ()
    return [sorted(token for token, each in entry.items() if each.logprob > -math.inf) for entry in entries]


def _versions(answer: CompletionOutput) -> list[int]:
    """One entry per token of the answer: version of the weights that sampled the token."""
    runs = [*answer.weight_versions, (len(answer.token_ids), -1)]
    return [version for (start, version), (end, _) in pairwise(runs) for _ in range(start, end)]
