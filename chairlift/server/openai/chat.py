"""POST /v1/chat/completions: generates the next message of a conversation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.base.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from chairlift.server.http.limits import read_json
from chairlift.server.http.pieces import Pieces, json_items, respond
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import (
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
    start_stream,
    timing,
)
from chairlift.server.openai.chat_reading import AnswerReading
from chairlift.server.openai.chat_run import ChatRun, begin_chat
from chairlift.server.openai.prompt_cache import chat_breakpoints
from chairlift.server.openai.protocol import ChatRequest, parse, warning_headers
from chairlift.text.tool_calls import Answer, CallBegun, CallPiece, Event, Piece

__all__ = ["ARGUMENTS", "ChatCompletion", "ChosenLogprob", "chosen_logprob", "routes"]

_encode: Final = msgspec.json.encode
ARGUMENTS: Final = 4096
"""Maximum number of characters of a tool call's arguments in one delta."""


class TokenLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(msgspec.Struct):
    """The sampled token at a position of the output, and the most likely tokens at this position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities of an output: the list has one entry per output token."""

    content: list[ChosenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """Function name and arguments of a :class:`ToolCall`."""

    name: str
    arguments: str
    """The arguments of the function: a JSON object, as text."""


class ToolCall(msgspec.Struct):
    """A call that the model wants the client to make."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CustomInput(msgspec.Struct):
    """Tool name and input of a :class:`CustomCall`."""

    name: str
    input: str


class CustomCall(msgspec.Struct):
    """A call of a custom tool, whose input is a text."""

    id: str
    custom: CustomInput
    type: Literal["custom"] = "custom"


class ChatMessage(msgspec.Struct):
    """The generated message."""

    role: str
    content: str | None
    """Generated text; null if the message has only tool calls."""
    refusal: None = None
    tool_calls: list[Any] | UnsetType = UNSET
    """Calls of functions (:class:`ToolCall`) and custom tools (:class:`CustomCall`)."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Same text as in ``reasoning_content``. Some clients read this name instead."""


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the ``n`` generated messages."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """Stop token or stop string that ended the output; null if it ended otherwise."""
    token_ids: list[int] | UnsetType = UNSET
    tool_call_errors: list[str] | UnsetType = UNSET
    """Descriptions of malformed and of incomplete tool calls in the output. The text of a malformed call stays in
    ``content``."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    """Class of service with which the request was served."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    state: ServerState = request.app.state.server
    chat, ignored = parse(ChatRequest, await read_json(request))
    run = await begin_chat(request, chat, ignored, points=chat_breakpoints(state, chat))
    head = run.head("chatcmpl")
    headers = warning_headers(ignored)
    if chat.stream:
        return await start_stream(state, run.streams, _ChatChunks(head, run), headers)
    (output,) = await collect(run.streams)
    meter = Meter(run.streams, predicted=chat.prediction is not None)
    texts = run.texts
    meter.note(0, output)
    num_prompt_logprobs = chat.prompt_logprobs
    pieces = Pieces()
    readings = [run.reading() for _ in output.outputs]
    read = list(zip(output.outputs, readings, strict=True))
    choices = [_choice(chat, answer, texts, pieces, reading if run.plan.reads else None) for answer, reading in read]
    if run.plan.reasoning is not None:
        meter.reasoning_tokens = sum(reading.reasoning_tokens for reading in readings)
    reply = ChatCompletion(
        **head,
        choices=choices,
        usage=meter.usage(),
        prompt_logprobs=UNSET
        if num_prompt_logprobs is None
        else prompt_logprobs(output.prompt_logprobs, texts, num_prompt_logprobs, pieces),
        prompt_token_ids=run.prompt if chat.return_token_ids else UNSET,
        timing=timing([output], chat.return_timing),
    )
    return respond(state, reply, pieces, headers)


def _choice(
    chat: ChatRequest, answer: CompletionOutput, texts: TokenTexts, pieces: Pieces, reading: AnswerReading | None
) -> ChatChoice:
    """The choice for a finished output. ``reading`` finds the tool calls and the reasoning in its text."""
    logprobs = None
    top = chat.top_logprobs or 0
    if answer.logprobs is not None:
        content = json_items(chosen_logprob(entry, top, texts) for entry in answer.logprobs)
        part = itertools.chain([b'{"content":'], content, [b',"refusal":null}'])
        logprobs = pieces.later(part, len(answer.logprobs) * (top + 1))
    choice = ChatChoice(
        index=answer.index,
        message=ChatMessage("assistant", answer.text),
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        token_ids=answer.token_ids if chat.return_token_ids else UNSET,
    )
    if reading is not None:
        _read_into(choice, reading.read(answer.text, answer.token_ids, ended=True))
        choice.finish_reason = _finish_reason(answer, reading)
        choice.tool_call_errors = reading.broken or UNSET
    return choice


def _read_into(choice: ChatChoice, events: Sequence[Event]) -> None:
    """Copy the content, reasoning and tool calls in ``events`` into the message of the choice."""
    answer = Answer()
    answer.add(events)
    calls = [
        ToolCall(call.id, CalledFunction(call.name, call.arguments))
        if call.text is None
        else CustomCall(call.id, CustomInput(call.name, call.text))
        for call in answer.calls
    ]
    message = choice.message
    message.content = answer.content or (None if calls else "")
    message.tool_calls = calls or UNSET
    message.reasoning = message.reasoning_content = answer.reasoning or UNSET


def _finish_reason(answer: CompletionOutput, reading: AnswerReading) -> str | None:
    """Finish reason of an output: ``tool_calls`` if it has calls that the model chose to make, and all of them are
    complete, otherwise the engine's."""
    called = answer.finish_reason is FinishReason.STOP and reading.ids and not reading.named and not reading.is_cut
    return "tool_calls" if called else answer.finish_reason


def _logprobs(entries: Sequence[Mapping[int, Logprob]], top: int, texts: TokenTexts) -> ChoiceLogprobs:
    return ChoiceLogprobs([chosen_logprob(entry, top, texts) for entry in entries])


def chosen_logprob(entry: Mapping[int, Logprob], top: int, texts: TokenTexts) -> ChosenLogprob:
    """Log-probability of one output token in the form of the response, with the ``top`` most likely tokens."""
    written = [
        (top + 1 if each.rank is None else each.rank, _token_logprob(token_id, each, texts))
        for token_id, each in entry.items()
    ]
    chosen = written[0][1]
    best = sorted((pair for pair in written if pair[0] <= top), key=lambda pair: pair[0])
    # The sort is stable, and ``written`` begins with the sampled token. So the sampled token comes first among tokens
    # of equal rank.
    return ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, [each for _, each in best[:top]])


def _token_logprob(token_id: int, entry: Logprob, texts: TokenTexts) -> TokenLogprob:
    return TokenLogprob(texts.text(token_id, entry), finite(entry.logprob), list(texts.bytes(token_id, entry)))


class _ChatChunks(ChunkWriter):
    """Writes the events of a streamed chat completion."""

    def __init__(self, head: Mapping[str, Any], run: ChatRun) -> None:
        chat = run.chat
        super().__init__({**head, "object": "chat.completion.chunk"}, chat, run.streams)
        self._num_choices = chat.n or 1
        self._top = chat.top_logprobs or 0
        self._texts = run.texts
        self._ids = bool(chat.return_token_ids)
        self._prompt_token_ids = run.prompt
        self._openings = [b'{"index":%d,"delta":' % index for index in range(self._num_choices)]
        self._readings = [run.reading() for _ in range(self._num_choices if run.plan.reads else 0)]
        self._deltas = [_Deltas() for _ in self._readings]
        self._counts = run.plan.reasoning is not None
        if self._counts:
            self.meter.reasoning_tokens = 0
        self.holds_back = run.plan.reads
        self._open = set(range(self._num_choices))
        """Indices of the choices that have no ``finish_reason`` yet."""

    def ping(self) -> bytes:
        """A chunk with an empty delta. Clients count chunks, not comments, to notice that a stream is dead."""
        opening = self._openings[min(self._open, default=0)]
        return self.event(b'%b{},"logprobs":null,"finish_reason":null}' % opening)

    def start(self) -> bytes:
        ids = b',"prompt_token_ids":' + _encode(self._prompt_token_ids) if self._ids else b""
        role = b'{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(
            self.event(b'{"index":%d,"delta":%b' % (index, role), ids) for index in range(self._num_choices)
        )

    def choices(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> Iterator[bytes]:
        has_details = answer.token_ids and (self._ids or self._continuous or answer.logprobs)
        if self._readings:
            yield from self._read(answer, bool(has_details))
        elif answer.text or has_details:
            for part in parts(answer, self._top):
                yield self._choice_of(part, b'{"content":%b}' % _encode(part.text))
        if answer.finish_reason is not None:
            self._open.discard(answer.index)
            reason: str | None = answer.finish_reason
            more = b""
            if self._readings:
                reading = self._readings[answer.index]
                reason = _finish_reason(answer, reading)
                more = b',"tool_call_errors":' + _encode(reading.broken) if reading.broken else b""
            end = (answer.index, _encode(reason), _encode(answer.stop_reason), more)
            yield b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b}' % end

    def _read(self, answer: CompletionOutput, has_details: bool) -> Iterator[bytes]:
        """Deltas for the new part of an output. The first delta carries the log-probabilities and token ids, if
        ``has_details``."""
        reading = self._readings[answer.index]
        events = reading.read(answer.text, answer.token_ids, answer.finish_reason is not None)
        if self._counts:
            self.meter.reasoning_tokens = sum(each.reasoning_tokens for each in self._readings)
        deltas = [delta for event in events for delta in self._deltas[answer.index].of(event)]
        if has_details:
            for part in parts(answer, self._top):
                yield self._choice_of(part, deltas.pop(0) if deltas else b'{"content":""}')
        for delta in deltas:
            yield b'%b%b,"logprobs":null,"finish_reason":null}' % (self._openings[answer.index], delta)

    def _choice_of(self, answer: CompletionOutput, delta: bytes) -> bytes:
        logprobs = b"null"
        if answer.logprobs:
            logprobs = _encode(_logprobs(answer.logprobs, self._top, self._texts))
        ids = b',"token_ids":' + _encode(answer.token_ids) if self._ids else b""
        return b'%b%b,"logprobs":%b,"finish_reason":null%b}' % (self._openings[answer.index], delta, logprobs, ids)


class _Deltas:
    """Writes the deltas of one choice. The first delta of a tool call has its index, id and name; the next deltas have
    its arguments."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._form = b""
        """Beginning of a delta with a piece of the current call."""

    def of(self, event: Event) -> Iterator[bytes]:
        """Deltas of one event."""
        if isinstance(event, CallBegun):
            index = self._num_calls
            self._num_calls += 1
            kind, field = (b"custom", b"input") if event.is_custom else (b"function", b"arguments")
            self._form = b'{"tool_calls":[{"index":%d,"%b":{"%b":' % (index, kind, field)
            head = (index, _encode(event.id), kind, kind, _encode(event.name), field)
            yield b'{"tool_calls":[{"index":%d,"id":%b,"type":"%b","%b":{"name":%b,"%b":""}}]}' % head
        elif isinstance(event, CallPiece):
            for start in range(0, len(event.text), ARGUMENTS):
                yield self._form + _encode(event.text[start : start + ARGUMENTS]) + b"}}]}"
        elif isinstance(event, Piece) and event.kind == "reasoning":
            text = _encode(event.text)
            yield b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
        elif isinstance(event, Piece):
            yield b'{"content":%b}' % _encode(event.text)


routes: Final = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
