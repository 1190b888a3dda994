"""An LLM that generates the rollouts of a training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from chairlift.base.outputs import CompletionOutput, FinishReason, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import ConfigError, RequestError
from chairlift.llm import LLM
from chairlift_train.async_loop import Rollout

__all__ = ["RolloutGenerator"]


class RolloutGenerator:
    """A :class:`~chairlift_train.async_loop.Generator` that uses an :class:`~chairlift.llm.LLM` in this thread.

    The LLM computes only while :meth:`poll` waits, and not while the trainer computes. After the trainer updates the
    weights, unfinished rollouts continue with the new weights. Only one thread may use the LLM. ``sampling_params``
    apply to every rollout and must have ``n=1``; the rollout's ticket is added to the seed. ``in_flight`` is an
    argument of :meth:`~chairlift.llm.LLM.update_weights`.

    Log-probabilities come from the raw logits. With ``logprobs="sampled"`` they must be those with which the tokens
    were drawn, so parameters that change the distribution (temperature, top_p, penalties, masks, ...) raise
    ConfigError. ``"raw"`` allows them: the trainer then takes the raw log-probabilities, too, so that ratios are still
    1 at equal weights, but they are not those of the distribution that was sampled.
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
        if logprobs == "sampled" and (changed := _changed(sampling_params)):
            raise ConfigError(
                f"rollouts are drawn with {', '.join(changed)}, but their log-probabilities are those of the raw"
                " logits; leave these out, or take logprobs='raw' if the trainer uses raw log-probabilities, too"
            )
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
        )


def _changed(params: SamplingParams) -> list[str]:
    """Parameters, with their values, by which tokens are not drawn from the softmax of the raw logits."""
    plain = SamplingParams()
    names: tuple[str, ...] = (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    names += ("logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking")
    found = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}
    if params.top_k > 0:
        found["top_k"] = params.top_k
    return [f"{name}={value!r:.60}" for name, value in found.items()]


def _versions(answer: CompletionOutput) -> list[int]:
    """One entry per token of the answer: version of the weights that sampled the token."""
    runs = [*answer.weight_versions, (len(answer.token_ids), -1)]
    return [version for (start, version), (end, _) in pairwise(runs) for _ in range(start, end)]
