"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, translated to chat requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.outputs import CompletionOutput, FinishReason, RequestOutput
from chairlift.server.anthropic.cache_control import SHORT, breakpoints, check_cache_control
from chairlift.server.anthropic.messages_input import names, to_chat
from chairlift.server.anthropic.messages_types import (
    REFUSED,
    REFUSED_IN_COUNT,
    CacheCreation,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    MessagesUsage,
    Metadata,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ThinkingDetails,
    TokenCount,
    ToolUseBlock,
)
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json, until_tokens
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import (
    Meter,
    StreamWriter,
    collect,
    in_pieces,
    json_response,
    refuse_aborted,
    start_stream,
)
from chairlift.server.openai.chat import ARGUMENTS
from chairlift.server.openai.chat_reading import plan_prompt
from chairlift.server.openai.chat_run import ChatRun, begin_chat, encode_messages
from chairlift.server.openai.models import check_model, generating_info
from chairlift.server.openai.protocol import parse, unknown_inside, warning_headers
from chairlift.text.tool_calls import CallBegun, CallEnded, CallPiece, Event, Piece, complete_part

__all__ = ["error_form", "routes"]

_encode: Final = msgspec.json.encode
_SIGNATURE: Final = "unsigned"
EventFields = dict[str, Any]


async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation whose messages consist of blocks."""
    state: ServerState = request.app.state.server
    body = await read_json(request)
    _check_thread(body)
    payload, ignored = parse(MessagesRequest, body, REFUSED)
    ignored += _unknown_inside(body)
    client_names = names()
    template = state.engine.prompts.chat_template or ""
    chat = to_chat(payload, client_names, template, ignored)
    points = breakpoints(payload, lambda marked: to_chat(marked, names(), template, []))
    with client_names.translated_errors(state, request.state.request_id):
        hint = payload.thinking.budget_tokens if payload.thinking else None
        of_chat: list[str] = []
        run = await begin_chat(request, chat, of_chat, shorten=True, thinking_hint=hint, points=points)
    headers = _headers(request, [*ignored, *map(client_names.translated, of_chat)])
    if payload.stream:
        return await start_stream(state, run.streams, _MessageEvents(run, request.state.request_id), headers)
    with client_names.translated_errors(state, request.state.request_id):
        (output,) = await collect(run.streams)
    meter = Meter(run.streams)
    meter.note(0, output)
    builder = _MessageBuilder(run, meter)
    for _ in builder.new_events(output.outputs[0]):
        pass
    return json_response(builder.reply, headers)


async def count_tokens(request: Request) -> Response:
    """Count the tokens in the prompt of a conversation."""
    state: ServerState = request.app.state.server
    body = await read_json(request)
    _check_thread(body)
    payload, ignored = parse(CountTokensRequest, body, REFUSED_IN_COUNT)
    ignored += _unknown_inside(body)
    check_model(state, payload.model)
    generating_info(state)
    client_names = names()
    chat = to_chat(payload, client_names, state.engine.prompts.chat_template or "", ignored)
    check_cache_control(payload)
    with client_names.translated_errors(state, request.state.request_id):
        of_chat: list[str] = []
        plan = plan_prompt(state, chat, of_chat)
        async with until_tokens(request):
            prompt = await encode_messages(state, chat, plan)
    headers = _headers(request, [*ignored, *map(client_names.translated, of_chat)])
    return json_response(TokenCount(input_tokens=len(prompt)), headers)


def error_form(error: ApiError, request_id: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(body, headers) of an error in Anthropic's form: ``{"type": "error", "error": {"type", "message"},
    "request_id"}``."""
    kind = {413: "request_too_large", 500: "api_error"}.get(error.status, error.type)
    details = {} if error.details is None else {"details": error.details}
    fields = {"type": kind, "message": error.message, **details}
    return {"type": "error", "error": fields, "request_id": request_id}, {"request-id": request_id}


def _check_thread(body: dict[str, Any]) -> None:
    """Raise ApiError if the request continues or creates a conversation that the server keeps. ``details`` are those
    of Anthropic's API: its Python client then sends the whole conversation instead."""
    if body.get("thread") is not None:
        message = "thread is given, but conversations are not kept; send the whole conversation in messages without it"
        details = {"error_code": "thread_unsupported_request", "unsupported": []}
        raise ApiError(400, message, code="unsupported_parameter", param="thread", details=details)


def _headers(request: Request, ignored: list[str]) -> dict[str, str]:
    """Response headers: the names of ignored fields, and the request id under the name that Anthropic's clients
    read."""
    return {**warning_headers(ignored), "request-id": request.state.request_id}


def _unknown_inside(body: dict[str, Any]) -> list[str]:
    kinds: dict[str, type[msgspec.Struct]] = {
        "thinking": ThinkingConfig,
        "output_config": OutputConfig,
        "metadata": Metadata,
    }
    return [path for name, kind in kinds.items() for path in unknown_inside(name, body.get(name), kind)]


class _MessageBuilder:
    """Builds a response from the content, reasoning and tool calls of an output, and yields the events of a stream."""

    def __init__(self, run: ChatRun, meter: Meter) -> None:
        self.reply = MessageReply(id=f"msg_{secrets.token_hex(12)}", model=run.model, usage=_usage(meter))
        self._reading = run.reading()
        self._counts = run.plan.reasoning is not None
        self._was_shortened = run.was_shortened
        self._meter = meter
        self._open: TextBlock | ThinkingBlock | None = None
        """The block that may still grow: further text of the same kind is added to it."""
        self._open_call: ToolUseBlock | None = None
        """The call that may still grow."""
        self._pieces: list[str] = []
        """Parts of the text of the block or the call that may still grow."""

    def begin(self) -> Iterator[EventFields]:
        """First events of a stream, before any output."""
        self.reply.usage = _usage(self._meter)
        self.reply.usage.output_tokens = 0
        yield {"type": "message_start", "message": self.reply}
        yield {"type": "ping"}

    def new_events(self, answer: CompletionOutput) -> Iterator[EventFields]:
        """Events for the new part of an output. At the end of the output, the response gets its stop_reason and
        usage."""
        ended = answer.finish_reason is not None
        for event in self._reading.read(answer.text, answer.token_ids, ended):
            yield from self._read(event)
        if not ended:
            return
        yield from self._close()
        if self._counts:
            self._meter.reasoning_tokens = self._reading.reasoning_tokens
        self.reply.usage = _usage(self._meter)
        self.reply.tool_call_errors = self._reading.broken or msgspec.UNSET
        self._end(answer)

    def end(self) -> Iterator[EventFields]:
        """Last events of a stream that has a stop_reason."""
        reply = self.reply
        delta = {"stop_reason": reply.stop_reason, "stop_sequence": reply.stop_sequence}
        more = {"tool_call_errors": reply.tool_call_errors} if self._reading.broken else {}
        usage = msgspec.structs.replace(reply.usage, cache_creation=msgspec.UNSET)
        yield {"type": "message_delta", "delta": delta, "usage": usage, **more}
        yield {"type": "message_stop"}

    def _end(self, answer: CompletionOutput) -> None:
        refuse_aborted(answer)
        if answer.finish_reason is FinishReason.LENGTH:
            self.reply.stop_reason = "model_context_window_exceeded" if self._was_shortened else "max_tokens"
        elif self._reading.ids and not self._reading.is_cut:
            self.reply.stop_reason = "tool_use"
        elif isinstance(answer.stop_reason, str):
            self.reply.stop_reason = "stop_sequence"
            self.reply.stop_sequence = answer.stop_reason
        else:
            self.reply.stop_reason = "end_turn"

    def _read(self, event: Event) -> Iterator[EventFields]:
        if isinstance(event, CallBegun):
            yield from self._close()
            self._open_call = ToolUseBlock(id=event.id, name=event.name, input=msgspec.Raw(b"{}"))
            self._pieces = []
            yield self._start(self._open_call)
        elif isinstance(event, CallPiece):
            self._pieces.append(event.text)
            for start in range(0, len(event.text), ARGUMENTS):
                piece = event.text[start : start + ARGUMENTS]
                yield self._delta({"type": "input_json_delta", "partial_json": piece})
        elif isinstance(event, CallEnded):
            yield self._end_call(event.is_cut)
        elif isinstance(event, Piece):
            kind = ThinkingBlock if event.kind == "reasoning" else TextBlock
            if not isinstance(self._open, kind):
                yield from self._close()
                self._open = TextBlock(text="") if kind is TextBlock else ThinkingBlock(thinking="", signature="")
                self._pieces = []
                yield self._start(self._open)
            self._pieces.append(event.text)
            name = "text" if kind is TextBlock else "thinking"
            yield self._delta({"type": f"{name}_delta", name: event.text})

    def _close(self) -> Iterator[EventFields]:
        block = self._open
        self._open = None
        if block is None:
            return
        text = "".join(self._pieces)
        if isinstance(block, ThinkingBlock):
            block.thinking = text
            block.signature = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        else:
            block.text = text
        yield self._stop()

    def _end_call(self, is_cut: bool) -> EventFields:
        """The event that ends a call. The input of a call that was cut has its complete members, as Anthropic's clients
        read them from the pieces."""
        arguments = "".join(self._pieces)
        if self._open_call is not None:
            whole = complete_part(arguments) if is_cut else arguments
            self._open_call.input = msgspec.Raw(whole.encode())
        self._open_call = None
        return self._stop()

    def _start(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> EventFields:
        self.reply.content.append(block)
        return {"type": "content_block_start", "index": len(self.reply.content) - 1, "content_block": block}

    def _delta(self, delta: EventFields) -> EventFields:
        return {"type": "content_block_delta", "index": len(self.reply.content) - 1, "delta": delta}

    def _stop(self) -> EventFields:
        return {"type": "content_block_stop", "index": len(self.reply.content) - 1}


def _usage(meter: Meter) -> MessagesUsage:
    usage = meter.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    thought: ThinkingDetails | msgspec.UnsetType = msgspec.UNSET
    if meter.reasoning_tokens is not None:
        thought = ThinkingDetails(thinking_tokens=meter.reasoning_tokens)
    kept = meter.written() or {}
    short = kept.get(SHORT, 0)
    created = sum(kept.values())
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=cached,
        cache_creation=CacheCreation(ephemeral_5m_input_tokens=short, ephemeral_1h_input_tokens=created - short),
        output_tokens=usage.completion_tokens,
        output_tokens_details=thought,
    )


class _MessageEvents(StreamWriter):
    """Writes the events of a streamed response."""

    def __init__(self, run: ChatRun, request_id: str) -> None:
        super().__init__(run.streams)
        self._builder = _MessageBuilder(run, self.meter)
        self._request_id = request_id
        self._begun = False
        self.holds_back = run.plan.reads

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def chunk(self, prompt: int, output: RequestOutput) -> Iterator[bytes]:
        self.note(prompt, output)
        if not self._begun:  # only now the number of cached tokens is known
            self._begun = True
            yield b"".join(map(_event, self._builder.begin()))
        for answer in output.outputs:
            yield from in_pieces(map(_event, self._builder.new_events(answer)))

    def end(self) -> bytes:
        return b"".join(map(_event, self._builder.end()))

    def failed(self, error: ApiError) -> bytes:
        return _event(error_form(error, self._request_id)[0])


def _event(fields: EventFields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), _encode(fields))


routes: Final = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
