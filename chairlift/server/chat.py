"""POST /v1/chat/completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.output_stream import OutputStream
from chairlift.outputs import CompletionOutput, Logprob, RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.server.errors import ApiError
from chairlift.server.limits import read_json, until_tokens
from chairlift.server.logprob_room import hold_logprobs
from chairlift.server.models import check_model, generating_info
from chairlift.server.pieces import Pieces, json_items, respond
from chairlift.server.promises import class_of, read_promises
from chairlift.server.protocol import (
    ChatRequest,
    TokenizeRequest,
    no_prompt_logprobs_in_stream,
    parse,
    sampling_params,
    template_variables,
    warning_headers,
)
from chairlift.server.state import ServerState
from chairlift.server.streaming import (
    ChunkWriter,
    Meter,
    PromptLogprobs,
    Timing,
    TokenTexts,
    Usage,
    collect,
    finite,
    parts,
    prompt_logprobs,
    reply_head,
    start_stream,
    submit_all,
    timing,
    truncate,
)

__all__ = ["ChatCompletion", "encode_messages", "routes"]

_encode: Final = msgspec.json.encode


class TokenLogprob(msgspec.Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(msgspec.Struct):
    """The token that was chosen, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """One entry per token of the answer."""

    content: list[ChosenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    """The answer."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop token or stop string that ended it."""
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The reply that is not a stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    """The class of service that the request had."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state: ServerState = request.app.state.server
    chat, ignored = parse(ChatRequest, await read_json(request))
    model = check_model(state, chat.model)
    caller = read_promises(request, chat, ignored)
    info = generating_info(state)
    params = _params(chat, info.sampling_defaults)
    state.engine.check_room(1, class_of(params))
    async with until_tokens(request, chat):
        prompt = truncate(await encode_messages(state, chat), chat.truncate_prompt_tokens, info, params.max_tokens)
    hold_logprobs(request, chat, [prompt])
    streams = await submit_all(state, [prompt], params, chat, stream=bool(chat.stream), caller=caller)
    head = reply_head("chatcmpl", model, info, streams)
    texts = TokenTexts(state.engine.tokenizer, bool(chat.return_tokens_as_token_ids))
    headers = warning_headers(ignored)
    if chat.stream:
        return await start_stream(state, streams, _ChatChunks(head, chat, streams, texts), headers)
    (output,) = await collect(streams)
    meter = Meter(streams)
    meter.note(0, output)
    most, pieces = chat.prompt_logprobs, Pieces()
    reply = ChatCompletion(
        **head,
        choices=[_choice(chat, answer, texts, pieces) for answer in output.outputs],
        usage=meter.usage(),
        prompt_logprobs=UNSET if most is None else prompt_logprobs(output.prompt_logprobs, texts, most, pieces),
        prompt_token_ids=prompt if chat.return_token_ids else UNSET,
        timing=timing([output], chat.return_timing),
    )
    return respond(state, reply, pieces, headers)


async def encode_messages(state: ServerState, request: ChatRequest | TokenizeRequest) -> list[int]:
    """The token ids of a conversation. Raises ApiError, RequestError or TemplateError."""
    opens = request.add_generation_prompt
    if opens and request.continue_final_message:
        message = "add_generation_prompt and continue_final_message exclude each other; leave one out"
        raise ApiError(400, message, code="invalid_value", param="continue_final_message")
    return await state.engine.encode_chat(
        request.messages or (),
        add_generation_prompt=not request.continue_final_message if opens is None else opens,
        continue_final_message=bool(request.continue_final_message),
        **template_variables(request.chat_template_kwargs),
    )


def _params(chat: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if chat.top_logprobs and not chat.logprobs:
        message = "top_logprobs needs logprobs to be true; set it, or leave top_logprobs out"
        raise ApiError(400, message, code="invalid_value", param="top_logprobs")
    no_prompt_logprobs_in_stream(chat)
    return sampling_params(
        chat,
        defaults,
        max_tokens=chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


def _choice(chat: ChatRequest, answer: CompletionOutput, texts: TokenTexts, pieces: Pieces) -> ChatChoice:
    logprobs, top = None, chat.top_logprobs or 0
    if answer.logprobs is not None:
        content = json_items(_chosen(entry, top, texts) for entry in answer.logprobs)
        part = itertools.chain([b'{"content":'], content, [b',"refusal":null}'])
        logprobs = pieces.later(part, len(answer.logprobs) * (top + 1))
    return ChatChoice(
        index=answer.index,
        message=ChatMessage("assistant", answer.text),
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        token_ids=answer.token_ids if chat.return_token_ids else UNSET,
    )


def _logprobs(entries: Sequence[Mapping[int, Logprob]], top: int, texts: TokenTexts) -> ChoiceLogprobs:
    return ChoiceLogprobs([_chosen(entry, top, texts) for entry in entries])


def _chosen(entry: Mapping[int, Logprob], top: int, texts: TokenTexts) -> ChosenLogprob:
    written = [
        (top + 1 if each.rank is None else each.rank, _token_logprob(token_id, each, texts))
        for token_id, each in entry.items()
    ]
    chosen = written[0][1]
    best = sorted((pair for pair in written if pair[0] <= top), key=lambda pair: pair[0])
    # The chosen one may tie with the last of them; it comes first of those that tie.
    return ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, [each for _, each in best[:top]])


def _token_logprob(token_id: int, entry: Logprob, texts: TokenTexts) -> TokenLogprob:
    return TokenLogprob(texts.text(token_id, entry), finite(entry.logprob), list(texts.bytes(token_id, entry)))


class _ChatChunks(ChunkWriter):
    """The events of a streamed chat completion."""

    def __init__(
        self, head: Mapping[str, Any], chat: ChatRequest, streams: Sequence[OutputStream], texts: TokenTexts
    ) -> None:
        super().__init__({**head, "object": "chat.completion.chunk"}, chat, streams)
        self._num_choices = chat.n or 1
        self._top = chat.top_logprobs or 0
        self._texts = texts
        self._ids = bool(chat.return_token_ids)
        self._prompt_token_ids = streams[0].prompt_token_ids
        self._openings = [b'{"index":%d,"delta":{"content":' % index for index in range(self._num_choices)]

    def start(self) -> bytes:
        ids = b',"prompt_token_ids":' + _encode(self._prompt_token_ids) if self._ids else b""
        role = b'{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(
            self.event(b'{"index":%d,"delta":%b' % (index, role), ids) for index in range(self._num_choices)
        )

    def choices(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Iterator[bytes]:
        if answer.text or (answer.token_ids and (self._ids or self._continuous or answer.logprobs)):
            for part in parts(answer, self._top):
                yield self._news(part)
        if answer.finish_reason is not None:
            end = (answer.index, _encode(answer.finish_reason), _encode(answer.stop_reason))
            yield b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % end

    def _news(self, answer: CompletionOutput) -> bytes:
        logprobs = b"null"
        if answer.logprobs:
            logprobs = _encode(_logprobs(answer.logprobs, self._top, self._texts))
        ids = b',"token_ids":' + _encode(answer.token_ids) if self._ids else b""
        text = _encode(answer.text)
        return b'%b%b},"logprobs":%b,"finish_reason":null%b}' % (self._openings[answer.index], text, logprobs, ids)


routes: Final = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
