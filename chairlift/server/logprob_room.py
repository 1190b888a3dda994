"""Limits of log-probabilities per request, and for all running requests together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.requests import Request

from chairlift.engine.info import EngineInfo
from chairlift.errors import QueueFullError
from chairlift.sampling_params import SamplingLimits
from chairlift.server.errors import ApiError
from chairlift.server.protocol import DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest
from chairlift.server.state import ServerState

__all__ = ["hold_logprobs", "release_logprobs"]

_ALWAYS_ALLOWED: Final = 1 << 20
"""Log-probabilities that one request may always have, whatever the model's length: 64 prompts of 2,700 tokens with 5
each. They take 12 MB."""
_ANSWERS: Final = 4
"""Largest request, in answers of the model's full length with the most log-probabilities per token."""
_IN_FLIGHT: Final = 16
"""All requests together, in such answers; or this many times _ALWAYS_ALLOWED, if that is more."""
_MOST_PER_TOKEN: Final = SamplingLimits().max_logprobs + 1


def hold_logprobs(request: Request, asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Reserve room for all log-probabilities of a request, until :func:`release_logprobs`. ``prompts`` are token ids.

    Raises ApiError 400 for more than any request may have, and QueueFullError when running requests leave no room now.
    """
    state: ServerState = request.app.state.server
    info = state.engine.info
    if info is None:
        return
    of_prompts, of_answers = _asked_for(asked, prompts, info)
    total, whole = of_prompts + of_answers, _MOST_PER_TOKEN * info.max_model_len
    most, most_of_all = max(_ALWAYS_ALLOWED, _ANSWERS * whole), _IN_FLIGHT * max(_ALWAYS_ALLOWED, whole)
    if total > most:
        message = (
            f"the request asks for up to {total:,} log-probabilities, {of_prompts:,} of its prompts and {of_answers:,}"
            f" of its answers, but {most:,} are allowed; ask for fewer per token, give a lower max_tokens or n, or send"
            " fewer prompts at a time"
        )
        field = "prompt_logprobs" if of_prompts > of_answers and asked.prompt_logprobs is not None else "logprobs"
        raise ApiError(400, message, code="invalid_value", param=field)
    if total and state.num_logprobs + total > most_of_all:
        state.engine.stats.rejected["logprobs"] += 1
        message = (
            f"requests in flight may bring {state.num_logprobs:,} log-probabilities and this one {total:,}, but"
            f" {most_of_all:,} are allowed together; try again later, or give a lower max_tokens"
        )
        raise QueueFullError(message, state.engine.retry_after(), "logprobs")
    state.num_logprobs += total
    request.scope["state"]["num_logprobs"] = total


def release_logprobs(request: Request) -> None:
    """Release the room, after the answer was sent or failed."""
    request.app.state.server.num_logprobs -= request.scope["state"].pop("num_logprobs", 0)


def _asked_for(
    asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], info: EngineInfo
) -> tuple[int, int]:
    """Numbers of log-probabilities: those of the prompts, as often as they are repeated, and the most of the
    answers."""
    n, lengths = asked.n or 1, [len(prompt) for prompt in prompts]
    of_prompt = 0 if asked.prompt_logprobs is None else asked.prompt_logprobs + 1
    if isinstance(asked, ChatRequest):
        per_token = (asked.top_logprobs or 0) + 1 if asked.logprobs else 0
        most_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    else:
        per_token = 0 if asked.logprobs is None else asked.logprobs + 1
        most_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        of_prompt *= n  # each choice repeats them
        if asked.echo:
            of_prompt += n * per_token
        n = max(n, asked.best_of or 1)
    room = [max(0, info.max_model_len - length) for length in lengths]
    answers = sum(each if most_tokens is None else min(each, most_tokens) for each in room)
    return sum(lengths) * of_prompt, n * answers * per_token
