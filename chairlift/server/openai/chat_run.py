"""Runs a chat, from the parsed request to the engine's output.

Every endpoint for conversations translates its request to a chat and then uses this module. So request checks,
queueing and the reading of tool calls and reasoning are the same for every API.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.info import EngineInfo
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import OverloadedError, PromptTooLongError, RequestError, TemplateError
from chairlift.models.vision.processor import PlacedImages
from chairlift.server.caching.breakpoints import Breakpoints, Leases
from chairlift.server.caching.marks import positions, with_marked_tools
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import until_tokens
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import TokenTexts, on_thread_if_long, reply_head, submit_all, truncate
from chairlift.server.openai.chat_reading import (
    AnswerReading,
    ChatPlan,
    chat_plan,
    constrained,
    limited_params,
    opened_by,
)
from chairlift.server.openai.logprob_room import reserve_logprobs
from chairlift.server.openai.models import adapter_named, check_model, generating_info
from chairlift.server.openai.promises import class_of, read_scheduling_fields
from chairlift.server.openai.protocol import ChatRequest, TokenizeRequest, no_prompt_logprobs_in_stream, sampling_params
from chairlift.text.tokenizer.late_messages import INSTRUCTIONS
from chairlift.text.tool_calls import check_history

__all__ = ["ChatRun", "begin_chat", "encode_messages"]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRun:
    """A chat that was sent to the engine."""

    chat: ChatRequest
    model: str
    """Model name for the response."""
    info: EngineInfo
    plan: ChatPlan
    params: SamplingParams
    prompt: list[int]
    streams: list[OutputStream]
    """A list with one stream, which has all ``n`` outputs."""
    texts: TokenTexts
    was_shortened: bool = False
    """Whether ``max_tokens`` was reduced because prompt and output together would exceed the model's maximum length."""
    called: Callable[[Sequence[str]], None] | None = None
    """Function that tells the engine which tools the output calls; None with several outputs."""

    def head(self, prefix: str) -> dict[str, Any]:
        """Fields with which the responses and chunks of a chat completion begin."""
        return reply_head(prefix, self.model, self.info, self.streams)

    def reading(self) -> AnswerReading:
        """A new reader of tool calls and reasoning, for one of the outputs."""
        return AnswerReading(self.plan, self.texts.tokenizer, self.params.skip_special_tokens, self.called)


async def begin_chat(
    request: Request,
    chat: ChatRequest,
    ignored: list[str],
    *,
    shorten: bool = False,
    thinking_hint: int | None = None,
    drops_turns: bool = False,
    before: Sequence[int] = (),
    points: Breakpoints | None = None,
) -> ChatRun:
    """Check a chat, turn its messages into a prompt, and send the prompt to the engine. Names of ignored fields are
    added to ``ignored``.

    With ``shorten``, a ``max_tokens`` that is too large for the model's length is reduced to the remaining length.
    With ``drops_turns``, the oldest turns of a conversation that is too long are left out. ``thinking_hint`` is a
    thinking_token_budget that is ignored if the model cannot apply it. ``before`` has the token ids of an earlier
    conversation, which precede the messages. ``points`` are the breakpoints of the prefix cache; those at marks have an
    effect only if the whole conversation is the prompt. Raises ApiError, RequestError, TemplateError, OverloadedError
    or EngineDeadError.
    """
    state: ServerState = request.app.state.server
    model = check_model(state, chat.model)
    caller = read_scheduling_fields(request, chat, ignored)
    info = generating_info(state)
    if chat.prediction is not None and not info.takes_predictions:
        ignored.append("prediction")
    plan = chat_plan(state, chat, ignored)
    params = _params(chat, info.sampling_defaults, keeps_special=bool(plan.hidden))
    state.engine.check_room(1, class_of(params))
    given = chat
    async with until_tokens(request, chat):
        if drops_turns:
            chat = await _without_old_turns(state, chat, plan, info, params.max_tokens)
        laid_out, images = await lay_out_messages(state, chat, plan)
        if images is not None and chat.truncate_prompt_tokens is not None:
            message = "a prompt with images cannot be cut; leave truncate_prompt_tokens out, or send fewer images"
            raise ApiError(400, message, code="invalid_value", param="truncate_prompt_tokens")
        laid_out = [*before, *_without_bos(state, laid_out)] if before else laid_out
        prompt = truncate(laid_out, chat.truncate_prompt_tokens, info, params.max_tokens)
        asked = await _leases(state, points if chat is given else None, chat, plan, prompt)
    plan = opened_by(plan, chat, state.engine.prompts.tokenizer, laid_out)
    plan, params = constrained(plan, chat, params)
    params = limited_params(plan, chat, state.engine.prompts.tokenizer, params)
    if thinking_hint is not None:
        hinted = msgspec.structs.replace(chat, thinking_token_budget=thinking_hint)
        try:
            params = limited_params(plan, hinted, state.engine.prompts.tokenizer, params)
        except ApiError:
            ignored.append("thinking_token_budget")
    room = min(info.max_model_len, info.capacity_tokens + 1) - len(prompt)
    shortened = shorten and params.max_tokens is not None and 1 <= room < params.max_tokens
    if shortened:
        params = dataclasses.replace(params, max_tokens=room)
    reserve_logprobs(request, chat, [prompt])
    whose: dict[str, Any] = {"caller": caller, "adapter": adapter_named(state, model), "images": images}
    whose["leases"] = [asked]
    streams = await submit_all(state, [prompt], params, chat, stream=bool(chat.stream), **whose)
    texts = TokenTexts(state.engine.prompts.tokenizer, bool(chat.return_tokens_as_token_ids))
    called = functools.partial(state.engine.paused, streams[0].request_id) if params.n == 1 else None
    return ChatRun(chat, model, info, plan, params, prompt, streams, texts, shortened, called)


async def _leases(
    state: ServerState, points: Breakpoints | None, chat: ChatRequest, plan: ChatPlan, prompt: list[int]
) -> Leases:
    """Leases for the prompt of a chat. The places of marks are found by laying out the chat again, with marks. If this
    fails, only the whole prompt may have a lease: hints make no request fail."""
    info = generating_info(state)
    if points is None or not state.engine.cache.enable_prefix_caching:
        return ()
    places: list[int] = []
    if points.seconds and chat.truncate_prompt_tokens is None:
        tools = dataclasses.replace(plan.tools, definitions=tuple(with_marked_tools(points.tools, plan.tools.offered)))
        marked = msgspec.structs.replace(chat, messages=list(points.messages))
        with contextlib.suppress(ApiError, RequestError, TemplateError, OverloadedError):
            laid_out = await encode_messages(state, marked, dataclasses.replace(plan, tools=tools))
            count = len(points.seconds)
            places = await on_thread_if_long(state, len(laid_out), lambda: positions(prompt, laid_out, count))
    return points.leases(places, len(prompt), info.block_size)


def _without_bos(state: ServerState, prompt: list[int]) -> list[int]:
    """The prompt without a token that begins every text."""
    tokenizer = state.engine.prompts.tokenizer
    bos = None if tokenizer is None else tokenizer.token_to_id(tokenizer.named_tokens.get("bos_token") or "")
    return prompt[1:] if bos is not None and prompt[:1] == [bos] else prompt


async def _without_old_turns(
    state: ServerState, chat: ChatRequest, plan: ChatPlan, info: EngineInfo, max_tokens: int | None
) -> ChatRequest:
    """The chat, without as many of its oldest turns as must go so that the prompt and ``max_tokens`` fit. Without
    ``max_tokens``, a quarter of the length is kept for the output.

    A turn begins with a message of the user. Instructions and the last turn stay.
    """
    length = min(info.max_model_len, info.capacity_tokens + 1)
    limit = length - (length // 4 if max_tokens is None else min(max_tokens, length - 1))
    messages = chat.messages
    asked = [at for at, each in enumerate(messages) if each.get("role") == "user"]
    starts = [at for at in asked if at == 0 or messages[at - 1].get("role") != "user"]

    def kept(turn: int) -> ChatRequest:
        first = starts[turn] if turn else 0
        instructs = [each for each in messages[:first] if each.get("role") in INSTRUCTIONS]
        return msgspec.structs.replace(chat, messages=[*instructs, *messages[first:]])

    async def fits(turn: int) -> bool:
        try:
            return len(await encode_messages(state, kept(turn), plan)) <= limit
        except PromptTooLongError:  # a text that is much too long is not encoded
            return False

    low = 0
    high = max(0, len(starts) - 1)
    while low < high:  # the smallest number of turns that must go; the last turn is not tried
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return kept(low) if low else chat


async def encode_messages(state: ServerState, request: ChatRequest | TokenizeRequest, plan: ChatPlan) -> list[int]:
    """Token ids of a conversation. Raises ApiError, RequestError or TemplateError."""
    return (await lay_out_messages(state, request, plan))[0]


async def lay_out_messages(
    state: ServerState, request: ChatRequest | TokenizeRequest, plan: ChatPlan
) -> tuple[list[int], PlacedImages | None]:
    """(token ids, images) of a conversation; None for no images. Raises ApiError, RequestError or TemplateError."""
    opens = request.add_generation_prompt
    if opens and request.continue_final_message:
        message = "add_generation_prompt and continue_final_message exclude each other; leave one out"
        raise ApiError(400, message, code="invalid_value", param="continue_final_message")
    messages = check_history(request.messages or ())
    info = state.engine.info
    if state.media is not None and info is not None and info.takes_images:
        messages = await state.engine.prompts.fetch_images(messages, state.media)
    return await state.engine.prompts.lay_out_chat(
        messages,
        add_generation_prompt=not request.continue_final_message if opens is None else opens,
        continue_final_message=bool(request.continue_final_message),
        tools=plan.tools.offered or None,
        **plan.variables,
    )


def _params(chat: ChatRequest, defaults: Mapping[str, Any], *, keeps_special: bool = False) -> SamplingParams:
    if chat.top_logprobs and not chat.logprobs:
        message = "top_logprobs needs logprobs to be true; set it, or leave top_logprobs out"
        raise ApiError(400, message, code="invalid_value", param="top_logprobs")
    no_prompt_logprobs_in_stream(chat)
    return sampling_params(
        chat,
        defaults,
        max_tokens=chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        **({"skip_special_tokens": False} if keeps_special else {}),
    )
