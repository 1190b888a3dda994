"""Limits on the number of log-probabilities, per request and for all running requests together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.requests import Request

from chairlift.base.sampling_params import SamplingLimits
from chairlift.engine.info import EngineInfo
from chairlift.errors import QueueFullError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import when_done
from chairlift.server.http.state import ServerState
from chairlift.server.openai.protocol import DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest

__all__ = ["reserve_logprobs"]

_ALWAYS_ALLOWED: Final = 1 << 20
"""Number of log-probabilities that any request may ask for, even if the model's context length is small. It is enough
for 64 prompts of 2,700 tokens with 5 log-probabilities per token, which take 12 MB."""
_ANSWERS: Final = 4
"""Maximum number of log-probabilities of one request, as a multiple of the number for one output of maximum length (the
model's context length times the maximum per token)."""
_IN_FLIGHT: Final = 16
"""Maximum number of log-probabilities of all running requests together, as a multiple of the number for one output of
maximum length (or of ``_ALWAYS_ALLOWED``, if that is larger)."""
_MAX_PER_TOKEN: Final = SamplingLimits().max_logprobs + 1


def reserve_logprobs(
    request: Request, payload: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]
) -> None:
    """Reserve room for all log-probabilities of a request, until its response was sent or failed. ``prompts`` are token
    ids.

    Raises ApiError 400 if the request exceeds the limit per request. Raises QueueFullError if the running requests
    leave too little room now.
    """
    state: ServerState = request.app.state.server
    info = state.engine.info
    if info is None:
        return
    of_prompts, of_answers = _num_logprobs(payload, prompts, info)
    total = of_prompts + of_answers
    whole = _MAX_PER_TOKEN * info.max_model_len
    limit = max(_ALWAYS_ALLOWED, _ANSWERS * whole)
    total_limit = _IN_FLIGHT * max(_ALWAYS_ALLOWED, whole)
    if total > limit:
        message = (
            f"the request asks for up to {total:,} log-probabilities, {of_prompts:,} of its prompts and {of_answers:,}"
            f" of its answers, but {limit:,} are allowed; ask for fewer per token, give a lower max_tokens or n, or"
            " send fewer prompts at a time"
        )
        field = "prompt_logprobs" if of_prompts > of_answers and payload.prompt_logprobs is not None else "logprobs"
        raise ApiError(400, message, code="invalid_value", param=field)
    if total and state.num_logprobs + total > total_limit:
        state.engine.stats.rejected["logprobs"] += 1
        message = (
            f"requests in flight may bring {state.num_logprobs:,} log-probabilities and this one {total:,}, but"
            f" {total_limit:,} are allowed together; try again later, or give a lower max_tokens"
        )
        raise QueueFullError(message, state.engine.retry_after(), "logprobs")
    state.num_logprobs += total

    def release() -> None:
        state.num_logprobs -= total

    when_done(request, release)


def _num_logprobs(
    payload: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], info: EngineInfo
) -> tuple[int, int]:
    """(number of log-probabilities for prompts, maximum number for outputs) in the response. Prompt log-probabilities
    count once per choice that repeats them."""
    n = payload.n or 1
    lengths = [len(prompt) for prompt in prompts]
    of_prompt = 0 if payload.prompt_logprobs is None else payload.prompt_logprobs + 1
    if isinstance(payload, ChatRequest):
        per_token = (payload.top_logprobs or 0) + 1 if payload.logprobs else 0
        max_tokens = payload.max_tokens if payload.max_completion_tokens is None else payload.max_completion_tokens
    else:
        per_token = 0 if payload.logprobs is None else payload.logprobs + 1
        max_tokens = DEFAULT_MAX_TOKENS if payload.max_tokens is None else payload.max_tokens
        of_prompt *= n  # each choice repeats them
        if payload.echo:
            of_prompt += n * per_token
        n = max(n, payload.best_of or 1)
    room = [max(0, info.max_model_len - length) for length in lengths]
    answers = sum(each if max_tokens is None else min(each, max_tokens) for each in room)
    return sum(lengths) * of_prompt, n * answers * per_token
